"""What every use case is given: the parts of one running platform."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Self

from sqlalchemy.engine import Connection, Engine

from control_plane.platform.protocols import Fleet, Mailer, ModelRegistry, ObjectStore, TenantRecords, Tracker, WebhookSender
from control_plane.platform.settings import Settings

if TYPE_CHECKING:
    from ft_assets.base_models import Catalogue


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, kw_only=True, slots=True)
class Actor:
    """Who does something, and from where: what the audit log says of a change."""

    kind: Literal["key", "operator", "system"]
    id: str
    """Of the key; of a process of the platform, its name."""
    ip: str | None = None
    user_agent: str | None = None
    request_id: str | None = None


TENANT, ACTOR = "ft_tenant", "ft_actor"
CONFINE = "SELECT set_config('ft.actor', %(actor)s, true), set_config('ft.tenant', %(tenant)s, true)"


def confine(conn: Connection) -> None:
    """Set the tenant and the actor of a transaction as it begins; engines of the control plane call it (event ``begin``)."""
    options = conn.get_execution_options()
    tenant, actor = options.get(TENANT), options.get(ACTOR)
    if tenant is None and actor is None:
        return
    if tenant is not None and options.get("isolation_level") == "AUTOCOMMIT":
        raise RuntimeError("a tenant's scope lasts for a transaction; a connection without one is not confined: use Platform.whole")
    with closing(conn.connection.cursor()) as cursor:
        cursor.execute(CONFINE, {"actor": json.dumps(asdict(actor)) if actor else "", "tenant": tenant or ""})


@dataclass(frozen=True, kw_only=True, slots=True)
class Logins:
    """One connection pool for each role of the database, so that no statement can leave the role it runs as."""

    platform: Engine
    """``ft_platform``: the platform's own processes; every tenant's rows."""
    operator: Engine
    """``ft_operator``: the same, and the operators' keys."""
    tenant: Engine
    """``ft_tenant``: calls of tenants; the rows of the tenant that the transaction names, and the columns that tenants may write."""

    def dispose(self) -> None:
        """Close the idle connections."""
        for engine in (self.platform, self.operator, self.tenant):
            engine.dispose()


@dataclass(frozen=True, kw_only=True)
class Platform:
    """Composed once a process by ``control_plane.composition.open_platform``; tests compose their own."""

    logins: Logins
    objects: ObjectStore
    models: Catalogue
    fleet: Fleet | None
    """None where nothing is served: promotion then only records the desired state."""
    settings: Settings
    clock: Callable[[], datetime] = utc_now
    """Now, with its time zone."""
    tracker: Tracker | None = None
    """None where runs are not tracked."""
    registry: ModelRegistry | None = None
    """None where adapters are not mirrored as registered models."""
    webhooks: WebhookSender | None = None
    """None where no webhooks are sent."""
    mailer: Mailer | None = None
    """None where no e-mail is sent."""
    records: tuple[TenantRecords, ...] = ()
    """Other systems that record what is about tenants; deleting a tenant's data deletes it there, too."""

    tenant: str | None = None
    """Whose rows the queries see; None: those of all tenants."""
    actor: Actor | None = None
    """Who the audit log names; None: this process."""

    @cached_property
    def engine(self) -> Engine:
        """The connections of this scope, with the login role that it needs."""
        if self.tenant is not None:
            return self.logins.tenant.execution_options(**{TENANT: self.tenant, ACTOR: self.actor})
        if self.actor is None:
            return self.logins.platform
        login = self.logins.operator if self.actor.kind == "operator" else self.logins.platform
        return login.execution_options(**{ACTOR: self.actor})

    def in_scope_of(self, tenant: str, actor: Actor) -> Self:
        """The platform as `tenant` may see it: every query, also one that forgets to say so, finds rows of this tenant alone."""
        return replace(self, tenant=tenant, actor=actor)

    def acting_as(self, actor: Actor) -> Self:
        """The whole platform, with `actor` in the audit log: for operators, and processes that act on somebody's behalf."""
        return replace(self, tenant=None, actor=actor)

    @property
    def whole(self) -> Self:
        """The platform out of any tenant's scope, for what is about all of them (the queue, the fleet); the actor stays."""
        return self if self.tenant is None else replace(self, tenant=None)
