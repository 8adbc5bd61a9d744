"""Changes to a tenant by operators: name, tier, limits and suspension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from control_plane.platform.context import Platform
from control_plane.platform.records import one
from control_plane.tenants.rules import Tenant, tier_named
from control_plane.tenants.service import lock_open
from control_plane.tenants.tables import TENANT, tenants
from core.errors import InvalidRequest
from core.storable_text import check_storable

MAX_NAME_CHARS = 200
MAX_REASON_CHARS = 1000


LIMITS: Mapping[str, tuple[float, float, bool]] = {
    "max_jobs_in_flight": (0, 10_000, True),
    "soft_gpu_hours": (0, 1e7, False),  # 10,000 GPUs for a month are 7.2 million hours
    "hard_gpu_hours": (0, 1e7, False),
    "requests_per_minute": (1, 600_000, True),
}
"""The least and the most that a limit of a tenant can be, and whether it is a whole number."""


def update(platform: Platform, tenant: str, changes: Mapping[str, Any]) -> Tenant:
    """Change `name`, `tier` or limits; None resets a limit to the tier's. Fields not given stay.

    Running jobs continue; the next admission uses the new limits.
    """
    values = {k: v for k, v in changes.items() if v is not None or k in LIMITS}
    for name in set(values) & set(LIMITS):
        _check_limit(name, values[name])
    if "name" in values:
        _check_text("name", values["name"], MAX_NAME_CHARS)
    with platform.engine.begin() as conn:
        old = lock_open(conn, tenant)
        tier = tier_named(values.get("tier") or old.tier)
        values["tier"] = tier.name
        if values.get("max_jobs_in_flight", 0) is None:
            values["max_jobs_in_flight"] = tier.max_jobs_in_flight
        elif "max_jobs_in_flight" not in values and old.max_jobs_in_flight == tier_named(old.tier).max_jobs_in_flight:
            values["max_jobs_in_flight"] = tier.max_jobs_in_flight  # it had its tier's limit, and now gets the new one's
        changed = one(conn, sa.update(tenants).where(tenants.c.id == tenant).values(values).returning(*TENANT), Tenant)
        _check_order(changed)
        return changed


def suspend(platform: Platform, tenant: str, *, reason: str) -> Tenant:
    """Suspend a tenant with `reason`: calls of its keys are refused, nothing new starts, running jobs continue. Again: changes the
    reason only."""
    _check_text("reason", reason, MAX_REASON_CHARS)
    return _set(platform, tenant, suspended_at=sa.func.coalesce(tenants.c.suspended_at, platform.clock()), suspended_reason=reason)


def resume(platform: Platform, tenant: str) -> Tenant:
    """Lift a suspension; does nothing if the tenant is not suspended."""
    return _set(platform, tenant, suspended_at=None, suspended_reason=None)


def _set(platform: Platform, tenant: str, **values: Any) -> Tenant:
    with platform.engine.begin() as conn:
        lock_open(conn, tenant)
        return one(conn, sa.update(tenants).where(tenants.c.id == tenant).values(values).returning(*TENANT), Tenant)


def _check_limit(name: str, value: float | None) -> None:
    least, most, whole = LIMITS[name]
    if value is not None and (not least <= value <= most or (whole and value != int(value))):
        kind = "a whole number within " if whole else "within "
        raise InvalidRequest(
            f"{name} {value} is not {kind}{least:g}..{most:g}; null is the limit of the tier",
            code="invalid_tenant_limit",
            param=name,
        )


def _check_order(after: Tenant) -> None:
    if after.soft_gpu_hours is not None and after.hard_gpu_hours is not None and after.soft_gpu_hours > after.hard_gpu_hours:
        raise InvalidRequest(
            f"soft_gpu_hours {after.soft_gpu_hours:g} is above hard_gpu_hours {after.hard_gpu_hours:g}: no hour would ever be overage; "
            "raise the hard limit with it, or lower the soft one",
            code="invalid_tenant_limit",
            param="soft_gpu_hours",
        )


def _check_text(name: str, text: str, most: int) -> None:
    check_storable(text, name)
    if not 1 <= len(text) <= most:
        raise InvalidRequest(f"{name} has {len(text)} characters; 1 to {most} are allowed", param=name)
