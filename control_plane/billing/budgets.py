"""Budgets: a tenant's planned spending per month, with an alert once a month for each threshold. They stop nothing; quotas do."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection, RowMapping
from sqlalchemy.exc import IntegrityError as DuplicateRow

from control_plane.billing.metering.rounds import Round
from control_plane.billing.prices import MICROS
from control_plane.billing.tables import budget_alerts, budgets, ledger_entries
from control_plane.billing.usage.service import unbilled
from control_plane.notifications.outbox import publish
from control_plane.platform.context import Platform
from control_plane.platform.pagination import Page, page
from control_plane.quotas.rules import Month, month_of
from control_plane.tenants.tables import tenants
from ft_assets.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded

DEFAULT_THRESHOLDS = (50, 80, 100)
"""Percentages: half, while there is time to act, and all of it."""
MAX_THRESHOLDS = 10
MAX_PERCENT = 1000
MAX_BUDGETS = 20
MAX_LIMIT_MICROS = 10**9 * MICROS
MAX_NAME = 100
MAX_PAGE = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """A budget and its state this month."""

    row: RowMapping
    spent_micros: int
    """Entries of the month, plus running attempts."""
    alerts: Sequence[int]
    """Thresholds already reported this month."""


def create(platform: Platform, tenant: str, *, name: str, limit_micros: int, thresholds: Sequence[int] = DEFAULT_THRESHOLDS) -> Budget:
    """Create a budget of `tenant`; ``Conflict`` if it has one of that name."""
    values = _checked(name=name, limit_micros=limit_micros, thresholds=thresholds)
    now = platform.clock()
    row = {"id": f"bud_{uuid.uuid4().hex[:24]}", "tenant_id": tenant, **values, "created_at": now, "updated_at": now}
    with platform.engine.begin() as conn:
        conn.execute(sa.select(tenants.c.id).where(tenants.c.id == tenant).with_for_update(key_share=True))  # the count stays valid
        held = int(conn.execute(sa.select(sa.func.count()).select_from(budgets).where(budgets.c.tenant_id == tenant)).scalar_one())
        if held >= MAX_BUDGETS:
            raise QuotaExceeded(f"you have {held} budgets, and {MAX_BUDGETS} are the limit; delete one first", code="too_many_budgets")
        try:
            made = conn.execute(sa.insert(budgets).values(row).returning(budgets)).mappings().one()
        except DuplicateRow:
            raise _taken(name) from None
    return _seen(platform, made)


def list_budgets(platform: Platform, tenant: str, *, after: str | None = None, limit: int = 20) -> tuple[list[Budget], bool]:
    """Return budgets of `tenant`, newest first, and whether more follow."""
    query = sa.select(budgets).where(budgets.c.tenant_id == tenant)
    keys = (budgets.c.created_at, budgets.c.id)
    with platform.engine.connect() as conn:
        found: Page[RowMapping] = page(conn, query, keys, id_column=budgets.c.id, after=after, limit=limit, max_limit=MAX_PAGE)
        spent = spent_micros(conn, platform, tenant, month_of(platform.clock())) if found.items else 0
        return [_view(conn, platform, row, spent=spent) for row in found.items], found.has_more


def get(platform: Platform, tenant: str, budget_id: str) -> Budget:
    with platform.engine.connect() as conn:
        return _view(conn, platform, _row(conn, tenant, budget_id))


def update(platform: Platform, tenant: str, budget_id: str, **changes: Any) -> Budget:
    """Change name, limit or thresholds. Thresholds already reported this month are not reported again."""
    with platform.engine.begin() as conn:
        row = _row(conn, tenant, budget_id, lock=True)
        merged = {name: row[name] for name in ("name", "limit_micros", "thresholds")} | changes
        values = {**_checked(**merged), "updated_at": platform.clock()}
        try:
            changed = conn.execute(sa.update(budgets).where(budgets.c.id == row["id"]).values(values).returning(budgets)).mappings().one()
        except DuplicateRow:
            raise _taken(merged["name"]) from None
    return _seen(platform, changed)


def delete(platform: Platform, tenant: str, budget_id: str) -> None:
    with platform.engine.begin() as conn:
        row = _row(conn, tenant, budget_id, lock=True)
        conn.execute(sa.delete(budgets).where(budgets.c.id == row["id"]))


def alert_due(platform: Platform) -> int:
    """Report every threshold newly reached this month; returns how many. Concurrent calls report each once.

    An error in one tenant does not affect others; raises ``FtError`` at the end.
    """
    with platform.engine.connect() as conn:
        of = conn.execute(sa.select(budgets.c.tenant_id).distinct().order_by(budgets.c.tenant_id)).scalars().all()
    reported = 0
    with Round("tenants") as each:
        for tenant in of:
            with each(tenant):
                reported += _alert(platform, tenant)
    return reported


def spent_micros(conn: Connection, platform: Platform, tenant: str, month: Month) -> int:
    """Return what was spent in `month`: its entries, plus running attempts as if they ended now."""
    within = ledger_entries.c.occurred_at >= month.begins, ledger_entries.c.occurred_at < month.ends
    query = sa.select(sa.func.coalesce(sa.func.sum(ledger_entries.c.amount_micros), 0))
    entered = int(conn.execute(query.where(ledger_entries.c.tenant_id == tenant, *within)).scalar_one())
    return entered + sum(one.amount_micros for one in unbilled(conn, platform, tenant))


def _alert(platform: Platform, tenant: str) -> int:
    now = platform.clock()
    month, reported = month_of(now), 0
    with platform.engine.begin() as conn:
        spent = spent_micros(conn, platform, tenant, month)
        for row in conn.execute(sa.select(budgets).where(budgets.c.tenant_id == tenant).order_by(budgets.c.id)).mappings():
            for threshold in row["thresholds"]:
                if spent * 100 < threshold * row["limit_micros"]:
                    continue
                key = {"budget_id": row["id"], "month": month.name, "threshold": threshold}
                values = {**key, "tenant_id": tenant, "spent_micros": spent, "created_at": now}
                new = insert(budget_alerts).values(values).on_conflict_do_nothing().returning(budget_alerts.c.threshold)
                if conn.execute(new).scalar() is None:
                    continue
                data = {"month": month.name, "threshold": threshold, "limit_micros": row["limit_micros"], "spent_micros": spent}
                publish(conn, tenant, "budget.threshold_reached", row["id"], data, now=now)
                reported += 1
    return reported


def _seen(platform: Platform, row: RowMapping) -> Budget:
    """Return a budget's state. Call without holding locks: it sums over the month."""
    with platform.engine.connect() as conn:
        return _view(conn, platform, row)


def _view(conn: Connection, platform: Platform, row: RowMapping, *, spent: int | None = None) -> Budget:
    month = month_of(platform.clock())
    if spent is None:
        spent = spent_micros(conn, platform, row["tenant_id"], month)
    reported = sa.select(budget_alerts.c.threshold).where(budget_alerts.c.budget_id == row["id"], budget_alerts.c.month == month.name)
    return Budget(row=row, spent_micros=spent, alerts=sorted(conn.execute(reported).scalars()))


def _row(conn: Connection, tenant: str, budget_id: str, *, lock: bool = False) -> RowMapping:
    query = sa.select(budgets).where(budgets.c.id == budget_id, budgets.c.tenant_id == tenant)
    row = conn.execute(query.with_for_update() if lock else query).mappings().one_or_none()
    if row is None:
        raise NotFound(f"no budget {budget_id[:80]!r}; list yours with GET /v1/budgets", code="budget_not_found", param="budget_id")
    return row


def _checked(*, name: str, limit_micros: int, thresholds: Sequence[int]) -> dict[str, Any]:
    if not 0 < len(name.strip()) <= MAX_NAME:
        raise InvalidRequest(f"name has {len(name.strip())} characters; it has 1..{MAX_NAME}", code="invalid_budget", param="name")
    if not 0 < limit_micros <= MAX_LIMIT_MICROS:
        raise InvalidRequest(
            f"limit_micros {limit_micros} is outside 1..{MAX_LIMIT_MICROS} (1000000 is a dollar)",
            code="invalid_budget",
            param="limit_micros",
        )
    ordered = sorted(set(thresholds))
    if not 0 < len(ordered) <= MAX_THRESHOLDS or not all(0 < t <= MAX_PERCENT for t in ordered):
        raise InvalidRequest(
            f"thresholds {list(thresholds)[:20]} are not 1..{MAX_THRESHOLDS} percents in 1..{MAX_PERCENT}",
            code="invalid_budget",
            param="thresholds",
        )
    return {"name": name.strip(), "limit_micros": limit_micros, "thresholds": ordered}


def _taken(name: str) -> Conflict:
    return Conflict(f"you have a budget named {name.strip()!r} already; choose another name, or change that one", code="budget_exists")
