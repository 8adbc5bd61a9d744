"""The parts of one running platform, passed to every use case."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Self

from sqlalchemy.engine import Connection, Engine

from control_plane.platform.protocols import (
    Fleet,
    IdentityProvider,
    Mailer,
    ModelRegistry,
    ModelServers,
    ObjectStore,
    TenantRecords,
    Tracker,
    Wandb,
    WebhookSender,
)
from control_plane.platform.settings import Settings

if TYPE_CHECKING:
    from core.base_models import Catalogue


def utc_now() -> datetime:
    return datetime.now(UTC)


@dataclass(frozen=True, kw_only=True, slots=True)
class Actor:
    """The actor of a change, and their address, for the audit log."""

    kind: Literal["key", "member", "operator", "system"]
    id: str
    """Id of the key, or of the member or operator who signed in without one; for a process of the platform, its name."""
    ip: str | None = None
    user_agent: str | None = None
    request_id: str | None = None


TENANT, ACTOR = "ft_tenant", "ft_actor"
CONFINE = "SELECT set_config('ft.actor', %(actor)s, true), set_config('ft.tenant', %(tenant)s, true)"


def confine(conn: Connection) -> None:
    """Set the tenant and the actor of a transaction as it begins; called by the control plane's engines (event ``begin``)."""
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
    """One connection pool per database role, so that no statement can leave its role."""

    platform: Engine
    """``ft_platform``: the platform's own processes; every tenant's rows."""
    operator: Engine
    """``ft_operator``: the same, plus the operators' keys."""
    tenant: Engine
    """``ft_tenant``: calls of tenants; rows of the transaction's tenant, and the columns that tenants may write."""

    def dispose(self) -> None:
        """Close the idle connections."""
        for engine in (self.platform, self.operator, self.tenant):
            engine.dispose()


@dataclass(frozen=True, kw_only=True)
class Platform:
    """Composed once per process by ``control_plane.composition.open_platform``; tests compose their own."""

    logins: Logins
    objects: ObjectStore
    models: Catalogue
    fleet: Fleet | None
    """None if nothing is served: promotion then only records the desired state."""
    settings: Settings
    servers: ModelServers | None = None
    """None if the platform starts no inference servers itself: whole models cannot be promoted then."""
    clock: Callable[[], datetime] = utc_now
    """Returns the present time, with its time zone."""
    tracker: Tracker | None = None
    """None if runs are not tracked."""
    wandb: Wandb | None = None
    """None if nothing is sent to Weights & Biases."""
    registry: ModelRegistry | None = None
    """None if adapters are not mirrored as registered models."""
    webhooks: WebhookSender | None = None
    """None if no webhooks are sent."""
    mailer: Mailer | None = None
    """None if no e-mail is sent."""
    identity: IdentityProvider | None = None
    """None if people sign in with keys only."""
    records: tuple[TenantRecords, ...] = ()
    """Other systems with records about tenants; deleting a tenant's data deletes them, too."""

    tenant: str | None = None
    """Tenant whose rows queries see; None: all tenants."""
    actor: Actor | None = None
    """Actor in the audit log; None: this process."""

    @cached_property
    def engine(self) -> Engine:
        """Connections of this scope, with the login role that it needs."""
        if self.tenant is not None:
            return self.logins.tenant.execution_options(**{TENANT: self.tenant, ACTOR: self.actor})
        if self.actor is None:
            return self.logins.platform
        login = self.logins.operator if self.actor.kind == "operator" else self.logins.platform
        return login.execution_options(**{ACTOR: self.actor})

    def in_scope_of(self, tenant: str, actor: Actor) -> Self:
        """Return the platform as `tenant` may see it: every query, even one without a filter, finds rows of this tenant only."""
        return replace(self, tenant=tenant, actor=actor)

    def acting_as(self, actor: Actor) -> Self:
        """Return the whole platform, with `actor` in the audit log: for operators, and processes that act for them."""
        return replace(self, tenant=None, actor=actor)

    @property
    def api_key_id(self) -> str | None:
        """Id of the tenant's key that acts; None for a session of the console, an operator or a process of the platform."""
        return self.actor.id if self.actor is not None and self.actor.kind == "key" else None

    @property
    def whole(self) -> Self:
        """Return the platform outside any tenant's scope (for the queue, the fleet); the actor stays."""
        return self if self.tenant is None else replace(self, tenant=None)
