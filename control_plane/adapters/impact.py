"""What a promotion, rollback or deprecation would change: which model answers to which name, and the shares of routes.

The rules are pure and repeat no decision of :mod:`control_plane.adapters.promotions`: they say what follows from its moves.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from control_plane.adapters.service import get_adapter, versions
from control_plane.adapters.tables import Adapter
from control_plane.platform.context import Platform
from control_plane.serving import model_routes
from control_plane.serving.model_routes import Route, with_shares
from engine.adapters import DEPRECATION_GRACE, STAGE_TRANSITIONS, Stage, parse_adapter_name


class Change(enum.StrEnum):
    PROMOTE = "promote"
    ROLL_BACK = "rollback"
    DEPRECATE = "deprecate"


LEADS_TO = {Change.PROMOTE: Stage.PRODUCTION, Change.ROLL_BACK: Stage.STAGING, Change.DEPRECATE: Stage.DEPRECATED}
"""Stage of the adapter after each change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """How an adapter is reached now."""

    adapter: Adapter
    production: Sequence[Adapter]
    """Production versions of its lineage, newest first; itself, if it is one."""
    routes: Sequence[Route]
    """Routes to it or to one of those."""

    @property
    def logical(self) -> str:
        """Name of its lineage, which requests may use as `model`."""
        return parse_adapter_name(self.adapter.name).logical

    @property
    def answering(self) -> Adapter | None:
        """The version that answers to the lineage's name; None if none does."""
        return _answering(self.production)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareChange:
    model: str
    before: float
    after: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteChange:
    name: str
    shares: Sequence[ShareChange]

    @property
    def changes(self) -> bool:
        return any(share.before != share.after for share in self.shares)

    @property
    def fails(self) -> bool:
        """Whether no target is left, so that requests to the route are refused."""
        return not any(share.after for share in self.shares)


@dataclass(frozen=True, kw_only=True, slots=True)
class Impact:
    """What a change would do to the names that callers use."""

    change: Change
    adapter: Adapter
    logical: str
    before: Adapter | None
    """Version that answers to the lineage's name now."""
    after: Adapter | None
    """Version that will."""
    routes: Sequence[RouteChange]
    """Routes to versions of the lineage, changed or not."""
    files_until: datetime | None
    """When the files are deleted, unless it is promoted again; None if they stay."""

    @property
    def stops(self) -> bool:
        """Whether the adapter stops answering to its own name."""
        return self.adapter.stage is Stage.PRODUCTION


def standing(platform: Platform, tenant: str, reference: str) -> Standing:
    """Return how an adapter, by id or name, is reached now."""
    adapter = get_adapter(platform, tenant, reference)
    with platform.engine.connect() as conn:
        production = versions(conn, tenant, parse_adapter_name(adapter.name).logical)
        ids = sorted({adapter.id, *(one.id for one in production)})
        return Standing(adapter=adapter, production=production, routes=model_routes.routes_to(conn, tenant, ids))


def possible(now: Standing) -> list[Change]:
    """Return the changes that the adapter's stage, verdict and approval allow.

    1. A promotion, if it passed its evaluation and, where needed, was approved.
    2. A rollback, if an earlier version of its lineage is in production.
    3. A deprecation, whatever it is used for.
    """
    adapter, moves = now.adapter, STAGE_TRANSITIONS[now.adapter.stage]
    found = []
    if Stage.PRODUCTION in moves and adapter.is_cleared and adapter.approval not in ("pending", "rejected"):
        found.append(Change.PROMOTE)
    if adapter.stage is Stage.PRODUCTION and _earlier(now):
        found.append(Change.ROLL_BACK)
    if Stage.DEPRECATED in moves:
        found.append(Change.DEPRECATE)
    return found


def impact(now: Standing, change: Change, *, at: datetime) -> Impact:
    """Return what `change` would do at that time.

    1. The lineage's name is answered by the newest served version in production; a rollback loads the one before first.
    2. A route's targets outside production have no share; the others keep their weights.
    3. Files of a deprecated adapter are deleted after the grace period.
    """
    moved = replace(now.adapter, stage=LEADS_TO[change])
    others = [one for one in now.production if one.id != moved.id]
    after = {Change.PROMOTE: moved, Change.ROLL_BACK: next(iter(others), None), Change.DEPRECATE: _answering(others)}[change]
    return Impact(
        change=change, adapter=now.adapter, logical=now.logical, before=now.answering, after=after,
        routes=[_route_change(route, moved) for route in now.routes],
        files_until=at + DEPRECATION_GRACE if change is Change.DEPRECATE else None,
    )  # fmt: skip


def _answering(production: Sequence[Adapter]) -> Adapter | None:
    return next((one for one in production if one.served_on != ()), next(iter(production), None))


def _earlier(now: Standing) -> bool:
    promoted_at = now.adapter.promoted_at
    return promoted_at is not None and any(one.promoted_at is not None and one.promoted_at < promoted_at for one in now.production)


def _route_change(route: Route, moved: Adapter) -> RouteChange:
    then = with_shares([replace(one, adapter=moved) if one.adapter_id == moved.id else one for one in route.targets])
    shares = [ShareChange(model=old.model, before=old.share, after=new.share) for old, new in zip(route.targets, then, strict=True)]
    return RouteChange(name=route.name, shares=shares)
