"""Budgets: thresholds are told of once a month, and running time counts before it is billed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from control_plane.billing import budgets
from control_plane.notifications.tables import outbox
from control_plane.platform.context import Actor, Platform
from core.errors import Conflict, FtError, InvalidRequest, NotFound, QuotaExceeded
from tests.support.jobs.metered_job import AT, at_time, metered_job

DOLLAR = 1_000_000


def told(platform: Platform, tenant: str) -> list[tuple[str, int]]:
    query = sa.select(outbox.c.data).where(outbox.c.tenant_id == tenant, outbox.c.type == "budget.threshold_reached").order_by(outbox.c.seq)
    with platform.engine.connect() as conn:
        return [(data["month"], data["threshold"]) for data in conn.execute(query).scalars()]


def test_each_threshold_is_told_once_a_month_and_anew_in_the_next(platform: Platform) -> None:
    job = metered_job(platform)
    now = at_time(platform, AT + timedelta(hours=9))
    made = budgets.create(now, job.tenant, name="march", limit_micros=10 * DOLLAR)
    job.run(1, at=AT)
    budgets.alert_due(now)
    assert told(platform, job.tenant) == []
    job.run(2, at=AT + timedelta(hours=2))
    for _ in range(3):
        budgets.alert_due(now)
    assert told(platform, job.tenant) == [("2026-03", 50), ("2026-03", 80)]
    found = budgets.get(now, job.tenant, made.id)
    assert (found.spent_micros, found.alerted) == (8 * DOLLAR, (50, 80))
    in_april = at_time(platform, datetime(2026, 4, 3, tzinfo=UTC))
    job.run(3, at=datetime(2026, 4, 2, tzinfo=UTC), hours=2.5)
    budgets.alert_due(in_april)
    assert told(platform, job.tenant)[2:] == [("2026-04", 50), ("2026-04", 80), ("2026-04", 100)]


def test_an_attempt_that_runs_counts_before_it_is_billed(platform: Platform) -> None:
    job = metered_job(platform)
    budgets.create(at_time(platform, AT), job.tenant, name="b", limit_micros=4 * DOLLAR, thresholds=[75])
    with platform.engine.begin() as conn:
        job.started(conn, 1, AT)
    budgets.alert_due(at_time(platform, AT + timedelta(minutes=44)))
    assert told(platform, job.tenant) == []
    budgets.alert_due(at_time(platform, AT + timedelta(minutes=45)))
    assert told(platform, job.tenant) == [("2026-03", 75)]


def test_a_tenant_makes_changes_and_removes_its_budgets_in_its_own_scope(platform: Platform) -> None:
    job, other = metered_job(platform), metered_job(platform)
    mine = platform.in_scope_of(job.tenant, Actor(kind="key", id="key_1"))
    made = budgets.create(mine, job.tenant, name=" all ", limit_micros=DOLLAR, thresholds=[100, 50, 100])
    assert (made.name, made.thresholds) == ("all", (50, 100))
    with pytest.raises(Conflict, match="named 'all' already"):
        budgets.create(mine, job.tenant, name="all", limit_micros=1)
    changed = budgets.update(mine, job.tenant, made.id, limit_micros=5)
    assert (changed.limit_micros, changed.name) == (5, "all")
    assert [b.id for b in budgets.list_budgets(mine, job.tenant).items] == [made.id]
    theirs = platform.in_scope_of(other.tenant, Actor(kind="key", id="key_2"))
    for call in (budgets.get, budgets.delete):
        with pytest.raises(NotFound, match="no budget"):
            call(theirs, other.tenant, made.id)
    budgets.delete(mine, job.tenant, made.id)
    assert budgets.list_budgets(mine, job.tenant).items == []


def test_an_unknown_budget_is_refused_without_summing_what_was_spent(platform: Platform) -> None:
    job, ran = metered_job(platform), []
    made = budgets.create(platform, job.tenant, name="b", limit_micros=DOLLAR)
    sa.event.listen(platform.engine, "before_cursor_execute", listen := lambda *given: ran.append(given[2]))
    try:
        with pytest.raises(NotFound, match="no budget"):
            budgets.get(platform, job.tenant, "bud_unknown")
        assert not any("ledger_entries" in one for one in ran), ran
        budgets.get(platform, job.tenant, made.id)
        assert any("ledger_entries" in one for one in ran)
    finally:
        sa.event.remove(platform.engine, "before_cursor_execute", listen)


def test_budgets_are_those_of_the_tenant_also_for_who_sees_all(platform: Platform) -> None:
    tenants = sorted(metered_job(platform).tenant for _ in range(3))
    made = [budgets.create(platform, tenant, name="b", limit_micros=DOLLAR).id for tenant in tenants]
    assert [[b.id for b in budgets.list_budgets(platform, tenant).items] for tenant in tenants] == [[one] for one in made]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"name": " "}, "name has 0 characters"),
        ({"limit_micros": 0}, "limit_micros 0 is outside"),
        ({"thresholds": []}, "percents"),
        ({"thresholds": [0]}, "percents"),
        ({"thresholds": list(range(1, 12))}, "are not 1..10 percents"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_a_budget_that_means_nothing_is_refused(platform: Platform, wrong: dict[str, object], said: str) -> None:
    job = metered_job(platform)
    values: dict[str, object] = {"name": "b", "limit_micros": 5, "thresholds": [50], **wrong}
    with pytest.raises(InvalidRequest, match=said):
        budgets.create(platform, job.tenant, **values)  # type: ignore[arg-type]


def test_a_budget_is_made_while_others_write_rows_of_the_tenant(platform: Platform) -> None:
    job = metered_job(platform)
    referred = sa.text("SELECT 1 FROM tenants WHERE id = :id FOR KEY SHARE")  # what each row that names the tenant takes
    with ThreadPoolExecutor(1) as pool, platform.engine.connect() as conn:
        conn.execute(referred, {"id": job.tenant})
        made = pool.submit(budgets.create, platform, job.tenant, name="b", limit_micros=DOLLAR)
        assert made.result(20).spent_micros == 0


def test_there_are_twenty_budgets_at_most(platform: Platform) -> None:
    job = metered_job(platform)
    for i in range(20):
        budgets.create(platform, job.tenant, name=f"b{i}", limit_micros=5)
    with pytest.raises(QuotaExceeded, match="20 are the limit"):
        budgets.create(platform, job.tenant, name="more", limit_micros=5)


def test_a_tenant_whose_budget_fails_keeps_no_other_from_being_told(fresh_platform: Platform) -> None:
    now = at_time(fresh_platform, AT + timedelta(hours=1))
    broken, sound = sorted((metered_job(fresh_platform) for _ in range(2)), key=lambda job: job.tenant)
    for job, tier in ((broken, "gold"), (sound, "standard")):
        budgets.create(now, job.tenant, name="b", limit_micros=4 * DOLLAR, thresholds=[50])
        odd = replace(job, tier=tier)
        with fresh_platform.engine.begin() as conn:
            odd.started(conn, 1, AT)
    with pytest.raises(FtError, match=f"1 of 2 tenants failed, .* {broken.tenant}: KeyError"):
        budgets.alert_due(now)
    assert told(fresh_platform, sound.tenant) == [("2026-03", 50)]
