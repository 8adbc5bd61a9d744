"""Budgets: a tenant's planned spending per month, with an alert once a month for each threshold. They stop nothing; quotas do."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError as DuplicateRow

from control_plane.billing.metering.rounds import Round
from control_plane.billing.prices import MICROS
from control_plane.billing.tables import Budget, budget_alerts, budgets, ledger_entries
from control_plane.billing.usage.service import unbilled
from control_plane.notifications.outbox import publish
from control_plane.platform.context import Platform
from control_plane.platform.pagination import Page, page
from control_plane.platform.records import columns, many, one_or_raise
from control_plane.quotas.rules import Month, month_of
from control_plane.tenants.service import find_tenant
from core.errors import Conflict, InvalidRequest, NotFound, QuotaExceeded

DEFAULT_THRESHOLDS = (50, 80, 100)
"""Percentages: half, while there is time to act, and all of it."""
MAX_THRESHOLDS = 10
MAX_PERCENT = 1000
MAX_BUDGETS = 20
MAX_LIMIT_MICROS = 10**9 * MICROS
MAX_NAME = 100
MAX_PAGE = 100


def create(platform: Platform, tenant: str, *, name: str, limit_micros: int, thresholds: Sequence[int] = DEFAULT_THRESHOLDS) -> Budget:
    """Create a budget of `tenant`; ``Conflict`` if it has one of that name."""
    values = _checked(name=name, limit_micros=limit_micros, thresholds=thresholds)
    id_, now = f"bud_{uuid.uuid4().hex[:24]}", platform.clock()
    with platform.engine.begin() as conn:
        find_tenant(conn, tenant, lock=True)  # the count stays valid
        held = int(conn.execute(sa.select(sa.func.count()).select_from(budgets).where(budgets.c.tenant_id == tenant)).scalar_one())
        if held >= MAX_BUDGETS:
            raise QuotaExceeded(f"you have {held} budgets, and {MAX_BUDGETS} are the limit; delete one first", code="too_many_budgets")
        with _unique(name):
            conn.execute(sa.insert(budgets).values(id=id_, tenant_id=tenant, **values, created_at=now, updated_at=now))
    return get(platform, tenant, id_)


def list_budgets(platform: Platform, tenant: str, *, after: str | None = None, limit: int = 20) -> Page[Budget]:
    """Return budgets of `tenant`, newest first."""
    keys = (budgets.c.created_at, budgets.c.id)
    with platform.engine.connect() as conn:
        query, _ = _this_month(conn, platform, tenant)
        return page(conn, query, keys, of=Budget, id_column=budgets.c.id, after=after, limit=limit, max_limit=MAX_PAGE)


def get(platform: Platform, tenant: str, budget_id: str) -> Budget:
    """Return a budget of `tenant`. It sums over the month: do not call it while holding locks."""
    this = budgets.c.id == budget_id, budgets.c.tenant_id == tenant
    with platform.engine.connect() as conn:
        if not conn.execute(sa.select(sa.exists().where(*this))).scalar():
            raise _missing(budget_id)
        query, _ = _this_month(conn, platform, tenant)
        return one_or_raise(conn, query.where(*this), Budget, _missing(budget_id))


def update(platform: Platform, tenant: str, budget_id: str, **changes: Any) -> Budget:
    """Change name, limit or thresholds. Thresholds already reported this month are not reported again."""
    this = budgets.c.id == budget_id, budgets.c.tenant_id == tenant
    with platform.engine.begin() as conn:
        old = conn.execute(sa.select(budgets.c.name, budgets.c.limit_micros, budgets.c.thresholds).where(*this).with_for_update()).first()
        if old is None:
            raise _missing(budget_id)
        merged = old._asdict() | changes
        with _unique(merged["name"]):
            conn.execute(sa.update(budgets).where(*this).values(**_checked(**merged), updated_at=platform.clock()))
    return get(platform, tenant, budget_id)


def delete(platform: Platform, tenant: str, budget_id: str) -> None:
    with platform.engine.begin() as conn:
        if not conn.execute(sa.delete(budgets).where(budgets.c.id == budget_id, budgets.c.tenant_id == tenant)).rowcount:
            raise _missing(budget_id)


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
    now, reported = platform.clock(), 0
    with platform.engine.begin() as conn:
        query, month = _this_month(conn, platform, tenant)
        for budget in many(conn, query.order_by(budgets.c.id), Budget):
            for threshold in budget.thresholds:
                if budget.spent_micros * 100 < threshold * budget.limit_micros:
                    continue
                spent = {"month": month, "threshold": threshold, "spent_micros": budget.spent_micros}
                values = {**spent, "budget_id": budget.id, "tenant_id": tenant, "created_at": now}
                new = insert(budget_alerts).values(values).on_conflict_do_nothing().returning(budget_alerts.c.threshold)
                if conn.execute(new).scalar() is not None:
                    publish(conn, tenant, "budget.threshold_reached", budget.id, {**spent, "limit_micros": budget.limit_micros}, now=now)
                    reported += 1
    return reported


def _this_month(conn: Connection, platform: Platform, tenant: str) -> tuple[sa.Select[Any], str]:
    """Return a query of the tenant's budgets with their state this month, and the name of the month."""
    month, of = month_of(platform.clock()), budget_alerts.c
    spent = sa.literal(spent_micros(conn, platform, tenant, month), sa.BigInteger)
    reported = sa.select(of.threshold).where(of.budget_id == budgets.c.id, of.month == month.name).order_by(of.threshold)
    state = spent.label("spent_micros"), sa.func.array(reported.scalar_subquery()).label("alerted")
    return sa.select(*columns(budgets, Budget), *state).where(budgets.c.tenant_id == tenant), month.name


def _missing(budget_id: str) -> NotFound:
    return NotFound(f"no budget {budget_id[:80]!r}; list yours with GET /v1/budgets", code="budget_not_found", param="budget_id")


@contextmanager
def _unique(name: str) -> Iterator[None]:
    try:
        yield
    except DuplicateRow:
        message = f"you have a budget named {name.strip()!r} already; choose another name, or change that one"
        raise Conflict(message, code="budget_exists") from None


def _checked(*, name: str, limit_micros: int, thresholds: Sequence[int]) -> Mapping[str, object]:
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
