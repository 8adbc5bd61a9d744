"""Tenants, tiers and their limits, roles of members, and the principal behind a key."""

from __future__ import annotations

import enum
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Self

from core.errors import Forbidden, InvalidRequest
from core.storable_text import check_storable
from engine.scheduler import STARTS_WITHIN_S


class Scope(enum.StrEnum):
    """What a key may do; each scope includes the ones before it."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"
    """Also manages keys of its own tenant. Tenants are created by operators, never through a tenant's key."""


class Role(enum.StrEnum):
    """Role of a member in its tenant."""

    OWNER = "owner"
    """May do what an admin may, and alone adds and removes owners; a tenant with an owner always keeps one."""
    ADMIN = "admin"
    MEMBER = "member"
    VIEWER = "viewer"

    @property
    def scope(self) -> Scope:
        """Return the widest scope that a key of such a member can have."""
        return {Role.VIEWER: Scope.READ, Role.MEMBER: Scope.WRITE}.get(self, Scope.ADMIN)


def role_named(name: str) -> Role:
    """Return the role `name`; the refusal lists the roles."""
    try:
        return Role(name)
    except ValueError:
        raise InvalidRequest(f"role {name[:60]!r} is unknown; the roles are {', '.join(Role)}", code="invalid_role", param="role") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """Limits of a tier; a tenant's row may override `max_jobs_in_flight` and others."""

    name: str
    max_jobs_in_flight: int
    """Jobs that are not final, paused ones included."""
    max_file_bytes: int
    max_examples: int
    """Rows of one dataset, after deduplication."""
    may_train_full: bool
    """Allows full-parameter and 70B jobs."""
    soft_gpu_hours: float | None
    """GPU-hours per month beyond which use is billed as overage. None: no limit."""
    hard_gpu_hours: float | None
    """GPU-hours per month beyond which nothing runs. None: no cap."""
    requests_per_minute: int
    """Requests per minute of each API key."""
    requests_in_flight: int
    """Answers of models that may be under way at once in each API process; of one key three quarters of them."""
    weight: int
    """Share of a server's turns, relative to other tenants."""

    @property
    def starts_within_s(self) -> float | None:
        """Return the promised seconds from submission to start; None: best effort."""
        return STARTS_WITHIN_S[self.name]


GIB = 1 << 30
MILLION = 1_000_000

TIERS: Mapping[str, Tier] = {
    # 50 jobs at once among 500 tenants is the planned peak, so a fair share is far below one job each: 5 in flight lets a
    # standard tenant queue a small sweep, 20 a premium one a large sweep; free is best effort and gets one beside one.
    # GPU-hours: 10 are two to three jobs of a 7B with LoRA; 500 and 5,000 are 5 % and 50 % of a month of two nodes with 8 GPUs.
    # Requests: a client that follows 20 jobs by polling each second sends 1,200 a minute.
    # In flight: an embedded server answers 32 at once, vLLM 256; weights follow the numbers of jobs, but no tenant has a turn of 10.
    # 10 GiB is the largest dataset planned for (10M examples of 1 KiB); free covers the usual 1M examples.
    "free": Tier(
        name="free", max_jobs_in_flight=2, max_file_bytes=1 * GIB, max_examples=1 * MILLION, may_train_full=False,
        soft_gpu_hours=None, hard_gpu_hours=10.0, requests_per_minute=120, requests_in_flight=8, weight=1,
    ),
    "standard": Tier(
        name="standard", max_jobs_in_flight=5, max_file_bytes=10 * GIB, max_examples=10 * MILLION, may_train_full=False,
        soft_gpu_hours=500.0, hard_gpu_hours=1000.0, requests_per_minute=1200, requests_in_flight=32, weight=2,
    ),
    "premium": Tier(
        name="premium", max_jobs_in_flight=20, max_file_bytes=10 * GIB, max_examples=10 * MILLION, may_train_full=True,
        soft_gpu_hours=5000.0, hard_gpu_hours=None, requests_per_minute=6000, requests_in_flight=128, weight=4,
    ),
}  # fmt: skip


def tier_named(name: str) -> Tier:
    """Return the tier `name`; the refusal lists the tiers."""
    try:
        return TIERS[name]
    except KeyError:
        raise InvalidRequest(f"tier {name!r} is unknown; the tiers are {', '.join(TIERS)}", code="invalid_tier", param="tier") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Tenant:
    """A tenant with its effective limits: its own where set by an operator, else those of its tier."""

    id: str
    name: str
    tier: str
    max_jobs_in_flight: int
    soft_gpu_hours: float | None
    hard_gpu_hours: float | None
    requests_per_minute: int
    suspended_at: datetime | None = None
    """When it was suspended: calls of its keys are refused and nothing new starts; running jobs continue."""
    suspended_reason: str | None = None
    closed_at: datetime | None = None
    """When its account was closed, with the deletion of its data: it has no members and no keys, and gets none."""

    @property
    def limits(self) -> Self:
        """The same tenant, as responses show its limits: in an object of their own."""
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class Principal:
    """The caller: a tenant, through one of its keys or a member who signed in to the console."""

    tenant: Tenant
    id: str
    """Id of the key, ``key_...``; of the member, ``mem_...``, for a session without a key."""
    scopes: frozenset[Scope]
    """What the caller may do now: the key's scopes, limited by its member's role; those of the role for a session without a key."""
    requests_per_minute: int = 0
    """Limit of the key or session."""
    member_id: str | None = None
    """Member who owns the key or signed in; None: the tenant's own, for machines."""
    role: Role | None = None
    """Role of that member."""
    names_owners: bool = False
    """For a key without a member: created by an operator or an owner."""
    expires_at: datetime | None = None

    @property
    def key_id(self) -> str | None:
        """Return the id of the key; None for a session of a member without a key."""
        return None if self.id == self.member_id else self.id

    @property
    def may_name_owners(self) -> bool:
        """Whether the caller may name owners: owners, and keys of the tenant itself that owners or operators created."""
        return self.role is Role.OWNER or (self.role is None and self.names_owners)

    def require(self, scope: Scope) -> None:
        """Refuse unless the key has `scope` or one that includes it."""
        order = list(Scope)
        if any(order.index(held) >= order.index(scope) for held in self.scopes):
            return
        held = ", ".join(sorted(self.scopes)) or "none"
        caller = f"the key {self.id}" if self.key_id else f"your role {self.role}"
        raise Forbidden(f"this call needs the scope {scope!s}; {caller} holds: {held}. Use a key with {scope!s}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """An operator of the platform, who uses a key that belongs to no tenant, or signed in to the console."""

    id: str
    """Id of the key, ``opk_...``; ``oidc:<e-mail>`` without one; on the machine itself ``cli:<user>``."""
    name: str
    grant: str | None = None
    """Entry of ``FT_OIDC_OPERATORS`` that makes them an operator; None: their key does."""


def within(scopes: frozenset[Scope], widest: Scope) -> frozenset[Scope]:
    """Return `scopes`, limited to `widest`."""
    order = list(Scope)
    return frozenset(min(s, widest, key=order.index) for s in scopes)


MAX_NAME_CHARS = 100
MAX_EMAIL_CHARS = 254
"""Limit of mail servers (RFC 5321)."""
LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
EMAIL = re.compile(rf"[A-Za-z0-9.!#$%&'*+/=?^_`{{|}}~-]{{1,64}}@(?:{LABEL}\.)+{LABEL}")
"""As browsers check it, with a dot in the domain; whether the address is read shows only when mail is sent."""


def person_of(tenant: str, email: str, role: Role, *, now: datetime, name: str | None = None) -> Mapping[str, object]:
    """Return the row of a new member."""
    if len(email) > MAX_EMAIL_CHARS or not EMAIL.fullmatch(email):
        raise InvalidRequest(
            f"{email[:80]!r} is not an e-mail address of the form name@example.com, in ASCII, with at most {MAX_EMAIL_CHARS} characters",
            code="invalid_email",
            param="email",
        )
    check_name(name)
    made = {"id": f"mem_{uuid.uuid4().hex[:24]}", "tenant_id": tenant, "email": email, "name": name or email[:MAX_NAME_CHARS]}
    return {**made, "role": role.value, "created_at": now}


def check_name(name: str | None) -> None:
    """Refuse a name that does not fit into one line of a list or a mail header."""
    if name is None:
        return
    check_storable(name, "name")
    if not 1 <= len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise InvalidRequest(f"name is {name[:60]!r}; 1 to {MAX_NAME_CHARS} printable characters on one line are allowed", param="name")
