"""The ledger keeps itself: both sides of every entry, nothing changed afterwards, and a check that finds what was tampered with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from control_plane.billing import ledger, ledger_check
from control_plane.billing.metering.rules import Work, milliseconds
from control_plane.billing.rules import Entry
from control_plane.billing.tables import invoices, ledger_entries, ledger_postings, meter_events
from control_plane.platform.context import Actor, Platform
from core.errors import Fault, InvalidRequest
from tests.support.jobs.metered_job import AT, at_time, metered_job
from tests.support.platform.database_roles import as_owner


def an_entry(id_: str, amount: int = 5) -> Entry:
    return Entry(id=id_, kind="adjustment", amount_micros=amount, list_micros=amount, occurred_at=AT, detail={})


@pytest.mark.parametrize(
    "sides",
    [
        pytest.param({}, id="without a side"),
        pytest.param({"receivable/{t}": 5}, id="with one side"),
        pytest.param({"receivable/{t}": 5, "adjustments": -4}, id="whose sides differ"),
        pytest.param({"receivable/{t}": 4, "adjustments": -4}, id="that owes another amount"),
        pytest.param({"a": 5, "adjustments": -5}, id="that nobody owes"),
    ],
)
def test_the_database_refuses_an_entry_at_commit(platform: Platform, sides: dict[str, int]) -> None:
    job, names = metered_job(platform), ("id", "kind", "amount_micros", "list_micros", "occurred_at", "detail")
    entry = an_entry(f"raw/{job.id}")
    with platform.engine.connect() as conn:
        conn.execute(sa.insert(ledger_entries).values(**{n: getattr(entry, n) for n in names}, tenant_id=job.tenant, created_at=AT))
        for account, amount in sides.items():
            posting = {"entry_id": entry.id, "tenant_id": job.tenant, "account": account.format(t=job.tenant), "amount_micros": amount}
            conn.execute(sa.insert(ledger_postings).values(**posting))
        with pytest.raises(IntegrityError, match="does not balance"):
            conn.commit()


def test_a_side_that_is_added_to_a_balanced_entry_is_refused(platform: Platform) -> None:
    job = metered_job(platform)
    with platform.engine.begin() as conn:
        ledger.post(conn, job.tenant, an_entry(f"e/{job.id}"), now=AT)
    with platform.engine.connect() as conn:
        added = {"entry_id": f"e/{job.id}", "tenant_id": job.tenant, "account": "refunds", "amount_micros": 1}
        conn.execute(sa.insert(ledger_postings).values(**added))
        with pytest.raises(IntegrityError, match="does not balance"):
            conn.commit()


@pytest.mark.parametrize("table", [ledger_entries, ledger_postings, meter_events, invoices], ids=lambda t: t.name)
def test_nothing_that_was_entered_is_changed_or_taken_out(platform: Platform, table: sa.Table) -> None:
    metered_job(platform).run()
    for statement in (sa.update(table).values(tenant_id=table.c.tenant_id), sa.delete(table)):
        with pytest.raises(IntegrityError, match="only ever added to"), as_owner(platform).begin() as conn:
            conn.execute(statement)


def test_a_second_post_changes_nothing(platform: Platform) -> None:
    job = metered_job(platform)
    for amount in (5, 700):
        with platform.engine.begin() as conn:
            assert ledger.post(conn, job.tenant, an_entry(f"e/{job.id}", amount), now=AT) is (amount == 5)
    assert ledger.balance(platform, job.tenant) == 5


def test_a_tenant_reads_its_own_entries_page_by_page_and_no_others(platform: Platform) -> None:
    job, other = metered_job(platform), metered_job(platform)
    for attempt in range(1, 4):
        job.run(attempt, at=AT + timedelta(hours=attempt))
    other.run()
    mine = platform.in_scope_of(job.tenant, Actor(kind="key", id="key_1"))
    first = ledger.list_entries(mine, job.tenant, limit=2)
    rest = ledger.list_entries(mine, job.tenant, limit=2, after=first.items[-1].id)
    assert [e.attempt for e in (*first.items, *rest.items)] == [3, 2, 1]
    assert (first.has_more, rest.has_more) == (True, False)
    assert ledger.list_entries(mine, other.tenant).items == []
    assert (ledger.balance(mine, job.tenant), ledger.balance(mine, other.tenant)) == (12_000_000, 0)
    with pytest.raises(InvalidRequest, match="kinds of entries are"):
        ledger.list_entries(mine, job.tenant, kind="gift")
    with pytest.raises(InvalidRequest, match=r"^kind 'x{40}' is unknown"):
        ledger.list_entries(mine, job.tenant, kind="x" * 41)


def test_the_trial_balance_has_what_every_tenant_owes_on_one_side_and_what_was_earned_on_the_other(
    new_platform: Callable[..., Platform],
) -> None:
    platform = new_platform()
    job, other = metered_job(platform), metered_job(platform)
    job.run()
    other.run(outcome="node_lost", fault=Fault.PLATFORM)
    found = ledger.trial_balance(platform)
    assert found.accounts == {"receivable": 4_000_000, "revenue/gpu": -8_000_000, "refunds": 4_000_000}
    assert found.receivables == {job.tenant: 4_000_000, other.tenant: 0}
    assert found.total == 0


def test_a_whole_ledger_passes_its_check_and_each_kind_of_damage_is_found(new_platform: Callable[..., Platform]) -> None:
    platform = new_platform()
    jobs = [metered_job(platform) for _ in range(5)]
    for job in jobs:
        job.run()
    refunded = metered_job(platform)
    refunded.run(outcome="preempted", fault=Fault.PLATFORM)
    checked = ledger_check.check(platform)
    assert (checked.num_entries, checked.num_intervals, checked.total_micros, checked.differences) == (7, 6, 0, ())
    with as_owner(platform).begin() as conn:
        conn.execute(sa.text("SET LOCAL session_replication_role = replica"))  # past every trigger, as a restored backup may be
        of = [f"{job.id}/a1/usage" for job in jobs]
        conn.execute(sa.update(ledger_postings).where(ledger_postings.c.entry_id == of[0]).values(amount_micros=1))
        for table, column in ((ledger_postings, ledger_postings.c.entry_id), (ledger_entries, ledger_entries.c.id)):
            conn.execute(sa.delete(table).where(column == of[1]))
            conn.execute(sa.delete(table).where(column == f"{refunded.id}/a1/refund"))
        conn.execute(sa.update(ledger_entries).where(ledger_entries.c.id == of[2]).values(amount_micros=3))
        conn.execute(
            sa.update(meter_events).where(meter_events.c.id == f"{jobs[3].id}/a1/ended/launcher").values(at=AT + timedelta(hours=3))
        )
        conn.execute(sa.delete(meter_events).where(meter_events.c.job_id == jobs[4].id))
    found = {(d.code, d.id) for d in ledger_check.check(platform).differences}
    assert found == {
        ("unbalanced", of[0]),
        ("not_billed", of[1]),
        ("unbalanced", of[2]),
        ("recomputed", of[2]),
        ("recomputed", of[3]),
        ("recomputed", of[4]),
        ("recomputed", f"{refunded.id}/a1/refund"),
    }


def test_the_check_recomputes_a_part_and_finds_one_that_no_stop_explains(new_platform: Callable[..., Platform]) -> None:
    platform = new_platform()
    stopped, plain = metered_job(platform), metered_job(platform)
    at = milliseconds(AT)
    for _ in range(2):
        stopped.run(outcome="preempted", fault=Fault.PLATFORM, work=Work(after_stop=False, began_ms=at, kept_until_ms=at + 900_000))
    plain.run()
    assert (stopped.owes(), [e.kind for e in stopped.entries()]) == (1_000_000, ["usage", "refund"]), "once, however often it is reported"
    assert ledger_check.check(platform).differences == ()
    part = stopped.entries()[1]
    with as_owner(platform).begin() as conn:
        ledger.post(conn, plain.tenant, replace(part, id=f"{plain.id}/a1/refund/part", job_id=plain.id), now=AT)
        conn.execute(sa.text("SET LOCAL session_replication_role = replica"))
        conn.execute(sa.update(ledger_entries).where(ledger_entries.c.id == part.id).values(list_micros=1))
    found = {(d.code, d.id) for d in ledger_check.check(platform).differences}
    assert found == {("refund", f"{plain.id}/a1/refund/part"), ("recomputed", part.id)}


def test_a_price_that_is_changed_for_the_past_is_found(new_platform: Callable[..., Platform], tmp_path: object) -> None:
    import yaml

    from control_plane.billing import prices

    platform = new_platform()
    metered_job(platform).run()
    body = yaml.safe_load(prices.BUILTIN.read_text())
    body["lists"][0]["gpus"]["h100-80gb"]["on_demand_micros_per_hour"] = 9_000_000
    file = platform.settings.home / "prices.yaml"
    file.parent.mkdir(exist_ok=True)
    file.write_text(yaml.safe_dump(body))
    other = replace(at_time(platform, AT), settings=replace(platform.settings, prices_file=file))
    (difference,) = ledger_check.check(other).differences
    assert difference.code == "recomputed"
    assert "amount_micros is 4000000, its reports give 9000000" in difference.detail
