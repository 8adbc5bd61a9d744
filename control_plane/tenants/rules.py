"""Tenants, their tiers with the limits of each, the roles of their members, and who a key stands for."""

from __future__ import annotations

import enum
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ft_assets.errors import Forbidden, InvalidRequest
from ft_assets.storable_text import check_storable


class Scope(enum.StrEnum):
    """What a key may do; each includes the ones before it."""

    READ = "read"
    WRITE = "write"
    ADMIN = "admin"
    """Keys of its own tenant, too. Tenants themselves are made by operators, never through a key."""


class Role(enum.StrEnum):
    """What a member is to its tenant."""

    OWNER = "owner"
    """May do what an admin may, and alone makes and removes owners; a tenant that has one always keeps one."""
    ADMIN = "admin"
    MEMBER = "member"
    VIEWER = "viewer"

    @property
    def scope(self) -> Scope:
        """The widest scope that a key of such a member opens."""
        return {Role.VIEWER: Scope.READ, Role.MEMBER: Scope.WRITE}.get(self, Scope.ADMIN)


def role_named(name: str) -> Role:
    """The role called `name`; a refusal that lists the roles if there is none."""
    try:
        return Role(name)
    except ValueError:
        raise InvalidRequest(f"role {name[:60]!r} is unknown; the roles are {', '.join(Role)}", code="invalid_role", param="role") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Tier:
    """Limits of a class of service; a tenant's row may hold another `max_jobs_in_flight`."""

    name: str
    max_jobs_in_flight: int
    """Jobs that are not final, paused ones included."""
    max_file_bytes: int
    max_examples: int
    """Of one dataset, after duplicates are gone."""
    may_train_full: bool
    """Full-parameter and 70B jobs."""
    soft_gpu_hours: float | None
    """A month; what goes beyond is billed as overage. None: there is no such line."""
    hard_gpu_hours: float | None
    """A month; nothing runs beyond. None: no cap."""
    requests_per_minute: int
    """Of each API key."""
    starts_within_s: float | None
    """What the tier promises from submission to start; None: best effort."""


LARGE_MODEL_PARAMETERS = 60_000_000_000
"""From here on a model is of the 70B class: below Llama 70B and Qwen 72B, above the 32B models."""
GIB = 1 << 30
MILLION = 1_000_000

TIERS: Mapping[str, Tier] = {
    # 50 jobs at once among 500 tenants is the planned peak, so a fair share is far below one job each: 5 in flight lets a
    # standard tenant queue a small sweep, 20 a premium one a large sweep; free is best effort and gets one beside one.
    # GPU-hours: 10 are two to three jobs of a 7B with LoRA; 500 and 5,000 are 5 % and 50 % of a month of two nodes with 8 GPUs.
    # Requests: a client that follows 20 jobs by polling each second sends 1,200 a minute.
    # 10 GiB is the largest dataset planned for (10M examples of 1 KiB); free covers the usual 1M examples.
    "free": Tier(
        name="free", max_jobs_in_flight=2, max_file_bytes=1 * GIB, max_examples=1 * MILLION, may_train_full=False,
        soft_gpu_hours=None, hard_gpu_hours=10.0, requests_per_minute=120, starts_within_s=None,
    ),
    "standard": Tier(
        name="standard", max_jobs_in_flight=5, max_file_bytes=10 * GIB, max_examples=10 * MILLION, may_train_full=False,
        soft_gpu_hours=500.0, hard_gpu_hours=1000.0, requests_per_minute=1200, starts_within_s=3600.0,
    ),
    "premium": Tier(
        name="premium", max_jobs_in_flight=20, max_file_bytes=10 * GIB, max_examples=10 * MILLION, may_train_full=True,
        soft_gpu_hours=5000.0, hard_gpu_hours=None, requests_per_minute=6000, starts_within_s=300.0,
    ),
}  # fmt: skip


def tier_named(name: str) -> Tier:
    """The tier called `name`; a refusal that lists the tiers if there is none."""
    try:
        return TIERS[name]
    except KeyError:
        raise InvalidRequest(f"tier {name!r} is unknown; the tiers are {', '.join(TIERS)}", code="invalid_tier", param="tier") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Tenant:
    """A tenant with the limits that apply to it: its own where an operator gave it some, else those of its tier."""

    id: str
    name: str
    tier: str
    max_jobs_in_flight: int
    soft_gpu_hours: float | None
    hard_gpu_hours: float | None
    requests_per_minute: int
    suspended_at: datetime | None = None
    """Since then every call of its keys is refused, and nothing of it is submitted or starts; what runs goes on."""
    suspended_reason: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Principal:
    """Who calls: a tenant through one of its keys."""

    tenant: Tenant
    key_id: str
    scopes: frozenset[Scope]
    """What the key opens now: its own scopes, within what the role of its member allows."""
    requests_per_minute: int = 0
    """Of this key."""
    member_id: str | None = None
    """Whose key it is; None: the tenant's own, for its machines."""
    role: Role | None = None
    """Of that member."""
    names_owners: bool = False
    """Of a key without a member: an operator or an owner made it."""
    expires_at: datetime | None = None
    """Of this key."""

    @property
    def may_name_owners(self) -> bool:
        """Owners, and the tenant's own keys that they or an operator made: whoever made the tenant holds one of these."""
        return self.role is Role.OWNER or (self.role is None and self.names_owners)

    def require(self, scope: Scope) -> None:
        """Refuse unless the key holds `scope` or one that includes it."""
        order = list(Scope)
        if any(order.index(held) >= order.index(scope) for held in self.scopes):
            return
        held = ", ".join(sorted(self.scopes)) or "none"
        raise Forbidden(f"this call needs the scope {scope!s}; the key {self.key_id} holds: {held}. Use a key with {scope!s}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Operator:
    """Who runs the platform, and calls with a key that no tenant has."""

    id: str
    """Of the key: ``opk_...``; on the machine itself ``cli:<user>``."""
    name: str


def within(scopes: frozenset[Scope], widest: Scope) -> frozenset[Scope]:
    """`scopes`, none of them wider than `widest`."""
    order = list(Scope)
    return frozenset(min(s, widest, key=order.index) for s in scopes)


MAX_NAME_CHARS = 100
MAX_EMAIL_CHARS = 254
"""What a mail server takes (RFC 5321)."""
LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
EMAIL = re.compile(rf"[A-Za-z0-9.!#$%&'*+/=?^_`{{|}}~-]{{1,64}}@(?:{LABEL}\.)+{LABEL}")
"""As browsers check it, with a dot in the domain; whether anybody reads it shows when something is sent."""


def person_of(tenant: str, email: str, role: Role, *, now: datetime, name: str | None = None) -> dict[str, Any]:
    """The row of a new member."""
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
    """Refuse what cannot stand in a line of a list or of a mail's header."""
    if name is None:
        return
    check_storable(name, "name")
    if not 1 <= len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise InvalidRequest(f"name is {name[:60]!r}; 1 to {MAX_NAME_CHARS} printable characters on one line are allowed", param="name")
