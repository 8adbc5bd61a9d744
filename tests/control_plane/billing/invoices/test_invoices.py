"""Invoices: drafts at any time, issued once, totals that are those of the ledger to the micro-dollar, late entries on the next one."""

from __future__ import annotations

import csv
import io
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from control_plane.billing import csv_export, ledger, ledger_check, refunds
from control_plane.billing.invoices import rules as invoicing
from control_plane.billing.invoices import service as invoices
from control_plane.billing.rules import Entry
from control_plane.billing.tables import invoice_entries, ledger_entries
from control_plane.billing.tables import invoices as table
from control_plane.jobs.tables import jobs
from control_plane.notifications.tables import outbox
from control_plane.platform.context import Platform
from control_plane.tenants import suspension
from core.errors import Fault, FtError, InvalidRequest, NotFound
from tests.support.jobs.metered_job import POOL, MeteredJob, at_time, metered_job

MARCH = datetime(2026, 3, 20, tzinfo=UTC)
APRIL = datetime(2026, 4, 2, tzinfo=UTC)
MAY = datetime(2026, 5, 2, tzinfo=UTC)


def issued(platform: Platform, tenant: str, *, now: datetime) -> list[invoices.Invoice]:
    """A round of issuing at `now`; the tenant's invoices after it, oldest first."""
    then = at_time(platform, now)
    invoices.issue_due(then)
    with platform.engine.connect() as conn:
        months = conn.execute(sa.select(table.c.month).where(table.c.tenant_id == tenant).order_by(table.c.month)).scalars().all()
    return [invoices.get(then, tenant, month) for month in months]


def ledger_sum(platform: Platform, tenant: str, month: int) -> int:
    within = sa.extract("month", sa.func.timezone("UTC", ledger_entries.c.occurred_at)) == month
    query = sa.select(sa.func.coalesce(sa.func.sum(ledger_entries.c.amount_micros), 0)).where(ledger_entries.c.tenant_id == tenant, within)
    with platform.engine.connect() as conn:
        return int(conn.execute(query).scalar_one())


def a_busy_month(platform: Platform) -> MeteredJob:
    """Attempts of every fate, a correction, and one attempt that ends in April."""
    job = metered_job(at_time(platform, MARCH))
    job.run(1, at=MARCH, hours=1.234567)
    job.run(2, at=MARCH + timedelta(hours=3), hours=0.7, outcome="node_lost", fault=Fault.PLATFORM)
    job.run(3, at=MARCH + timedelta(hours=5), hours=0.1, outcome="oom", fault=Fault.AMBIGUOUS)
    spot = type(POOL)(name="s", nodes=POOL.nodes, gpu_type="h100-80gb", max_gpus_per_job=8, pricing="spot")
    job.run(4, at=MARCH + timedelta(days=1), hours=3.3333, pool=spot, num_gpus=3)
    job.run(5, at=datetime(2026, 3, 31, 23, tzinfo=UTC), hours=2)
    refunds.adjust(at_time(platform, MARCH), job.tenant, amount_micros=-123_457, reason="=goodwill", by="opk_1")
    return job


def test_the_total_is_the_sum_of_the_months_entries_to_the_micro_dollar_and_of_the_lines(platform: Platform) -> None:
    job = a_busy_month(platform)
    (march,) = issued(platform, job.tenant, now=APRIL)
    document = march.document
    assert document["total_micros"] == ledger_sum(platform, job.tenant, 3) == sum(line["amount_micros"] for line in document["lines"])
    assert document["total_micros"] == sum(document[f"{kind}_micros"] for kind in ("usage", "refund", "storage", "adjustment"))
    assert [line["kind"] for line in document["lines"]] == ["usage"] * 4 + ["refund", "adjustment"]
    assert [line["description"] for line in document["lines"]] == [
        "GPU time, 1 x h100-80gb, succeeded", "GPU time, 1 x h100-80gb, node_lost", "GPU time, 1 x h100-80gb, oom",
        "GPU time, 3 x h100-80gb, succeeded", "Refund, node_lost, platform at fault", "Adjustment: =goodwill",
    ]  # fmt: skip
    assert f"{job.id}/a5/usage" not in [line["entry_id"] for line in document["lines"]], "it ended in April"
    assert document["spot_savings_micros"] == document["lines"][3]["list_micros"] - document["lines"][3]["amount_micros"] > 0
    assert march.sha256 == invoicing.sha256(document), "also after it was stored"


@pytest.mark.parametrize("issued_before", [False, True])
def test_a_refund_belongs_to_the_month_in_which_it_is_granted(platform: Platform, issued_before: bool) -> None:
    """Whether the attempt's month has its invoice already or not: what was billed in March stays as it was."""
    job = metered_job(at_time(platform, MARCH))
    job.run(1, at=MARCH, hours=2.5, outcome="oom", fault=Fault.AMBIGUOUS)
    job.run(2, at=APRIL, hours=1)
    billed = job.entries()[0].amount_micros
    if issued_before:
        issued(platform, job.tenant, now=APRIL + timedelta(days=1))
    granted_at = APRIL + timedelta(days=9)
    refunds.grant(at_time(platform, granted_at), f"{job.id}-a1", by="opk_1", note="ours")
    (refund,) = [entry for entry in job.entries() if entry.kind == "refund"]
    assert (refund.occurred_at, refund.amount_micros) == (granted_at, -billed)
    march, april = issued(platform, job.tenant, now=MAY)
    assert (march.document["refund_micros"], march.document["total_micros"]) == (0, billed)
    assert april.document["refund_micros"] == -billed
    assert (ledger_sum(platform, job.tenant, 3), ledger_sum(platform, job.tenant, 4)) == (billed, april.document["total_micros"])


def test_an_invoice_is_issued_once_by_however_many_at_once_and_its_tenant_is_told(platform: Platform) -> None:
    job = a_busy_month(platform)
    with ThreadPoolExecutor(4) as pool:
        made = [id_ for ids in pool.map(lambda _: invoices.issue_due(at_time(platform, APRIL)), range(4)) for id_ in ids]
    assert made.count(f"inv_{job.tenant}_2026-03") == 1
    query = sa.select(outbox.c.data).where(outbox.c.tenant_id == job.tenant, outbox.c.type == "invoice.issued")
    with platform.engine.connect() as conn:
        (told,) = conn.execute(query).scalars().all()
    assert told["month"] == "2026-03"
    assert invoices.issue_due(at_time(platform, APRIL)) == []


def test_what_comes_late_is_on_the_next_invoice_and_never_on_two(platform: Platform) -> None:
    job = a_busy_month(platform)
    (march,) = issued(platform, job.tenant, now=APRIL)
    job.run(9, at=MARCH, hours=2)  # its report was on its way for weeks
    again, april = issued(platform, job.tenant, now=MAY)
    assert again == march, "an issued invoice does not change"
    late = [line for line in april.document["lines"] if line["late"]]
    assert [line["entry_id"] for line in late] == [f"{job.id}/a9/usage"]
    assert april.document["total_micros"] == ledger_sum(platform, job.tenant, 4) + 8_000_000
    every = sa.select(sa.func.sum(ledger_entries.c.amount_micros)).where(ledger_entries.c.tenant_id == job.tenant)
    on = sa.select(sa.func.count()).where(invoice_entries.c.tenant_id == job.tenant)
    with platform.engine.connect() as conn:
        assert march.document["total_micros"] + april.document["total_micros"] == conn.execute(every).scalar_one()
        assert conn.execute(on).scalar_one() == len(march.document["lines"]) + len(april.document["lines"])
    assert ledger_check.check(platform).differences == ()


def test_a_month_waits_for_an_attempt_that_may_still_be_billed_in_it(platform: Platform) -> None:
    job = metered_job(platform)
    job.run(1, at=MARCH)
    with platform.engine.begin() as conn:
        job.started(conn, 2, datetime(2026, 3, 31, 20, tzinfo=UTC))
    assert issued(platform, job.tenant, now=APRIL) == []
    with platform.engine.begin() as conn:  # it is heard of in April: it will end there
        conn.execute(sa.update(jobs).where(jobs.c.id == job.id).values(heartbeat_at=APRIL))
    (march,) = issued(platform, job.tenant, now=APRIL)
    assert march.document["total_micros"] == 4_000_000


def test_a_month_does_not_wait_for_the_attempt_of_another_tenant(platform: Platform) -> None:
    first, waits, last = sorted((metered_job(platform) for _ in range(3)), key=lambda job: job.tenant)
    for job in (first, waits, last):
        job.run(1, at=MARCH)
    with platform.engine.begin() as conn:
        waits.started(conn, 2, datetime(2026, 3, 31, 20, tzinfo=UTC))
    assert [len(issued(platform, job.tenant, now=APRIL)) for job in (first, waits, last)] == [1, 0, 1]


def test_the_draft_of_the_open_month_shows_what_is_known_and_what_runs(platform: Platform) -> None:
    job = metered_job(platform)
    job.run(1, at=MARCH)
    with platform.engine.begin() as conn:
        job.started(conn, 2, MARCH + timedelta(hours=2))
    draft = invoices.get(at_time(platform, MARCH + timedelta(hours=3)), job.tenant, "2026-03")
    assert draft.issued_at is None
    assert draft.document["total_micros"] == 4_000_000
    assert [(one.attempt, one.amount_micros) for one in draft.unbilled] == [(2, 4_000_000)]
    assert invoices.list_issued(platform, job.tenant).items == []


def test_a_draft_has_nothing_of_a_month_that_waits_for_its_own_invoice_and_what_came_after_that(platform: Platform) -> None:
    job = metered_job(platform)
    job.run(1, at=MARCH)
    april = at_time(platform, APRIL)
    assert invoices.get(april, job.tenant, "2026-04").document["lines"] == []
    issued(platform, job.tenant, now=APRIL)
    job.run(2, at=MARCH)
    (late,) = invoices.get(april, job.tenant, "2026-04").document["lines"]
    assert (late["entry_id"], late["late"], late["model"]) == (f"{job.id}/a2/usage", True, "tiny-base")


def test_a_month_that_was_settled_after_the_next_one_had_begun_hides_nothing_of_that(fresh_platform: Platform) -> None:
    job = metered_job(fresh_platform)
    with fresh_platform.engine.begin() as conn:
        job.started(conn, 1, MARCH)
        job.started(conn, 2, datetime(2026, 4, 10, tzinfo=UTC))
    then = at_time(fresh_platform, datetime(2026, 4, 12, tzinfo=UTC))
    replace(job, platform=then).run(3, at=datetime(2026, 4, 11, tzinfo=UTC))
    may = at_time(fresh_platform, MAY)
    assert invoices.issue_due(may) == []
    replace(job, platform=may).run(1, at=MARCH)
    assert invoices.issue_due(may) == [f"inv_{job.tenant}_2026-03"], "April waits for its own attempt"
    replace(job, platform=may).run(2, at=datetime(2026, 4, 10, tzinfo=UTC))
    assert invoices.issue_due(at_time(fresh_platform, MAY + timedelta(days=9))) == [f"inv_{job.tenant}_2026-04"]
    assert invoices.get(may, job.tenant, "2026-04").document["total_micros"] == ledger_sum(fresh_platform, job.tenant, 4)


def test_a_tenant_whose_invoice_fails_keeps_no_other_waiting(fresh_platform: Platform) -> None:
    broken, sound = sorted((metered_job(fresh_platform) for _ in range(2)), key=lambda job: job.tenant)
    for job in (broken, sound):
        job.run(1, at=MARCH)
    with fresh_platform.engine.begin() as conn:
        odd = Entry(id=f"storage/{broken.tenant}", kind="storage", amount_micros=1, list_micros=1, occurred_at=MARCH, detail={})
        ledger.post(conn, broken.tenant, odd, now=MARCH)
    with pytest.raises(FtError, match=f"1 of 2 tenants failed, .* {broken.tenant}: KeyError"):
        invoices.issue_due(at_time(fresh_platform, APRIL))
    assert len(invoices.list_issued(fresh_platform, sound.tenant).items) == 1


def test_time_beyond_the_soft_limit_is_shown_with_its_price_and_not_added(platform: Platform) -> None:
    job = metered_job(platform)
    suspension.update(platform, job.tenant, {"soft_gpu_hours": 4.0, "hard_gpu_hours": 100.0})
    job.run(1, at=MARCH, hours=5)
    job.run(2, at=MARCH + timedelta(days=1), hours=3)
    job.run(3, at=MARCH + timedelta(days=2), hours=3, outcome="stalled", fault=Fault.PLATFORM)
    (march,) = issued(platform, job.tenant, now=APRIL)
    expected = {"soft_gpu_hours": 4.0, "used_gpu_hours": 8.0, "overage_gpu_hours": 4.0, "overage_micros": 16_000_000}
    assert march.document["overage"] == expected
    assert march.document["total_micros"] == 32_000_000


def test_gpu_time_of_an_earlier_month_that_comes_late_is_no_overage_of_this_one(platform: Platform) -> None:
    job = metered_job(platform)
    suspension.update(platform, job.tenant, {"soft_gpu_hours": 4.0, "hard_gpu_hours": 100.0})
    job.run(1, at=MARCH)
    issued(platform, job.tenant, now=APRIL)
    job.run(2, at=MARCH, hours=5)
    job.run(3, at=APRIL, hours=3)
    _, april = issued(platform, job.tenant, now=MAY)
    assert [line["late"] for line in april.document["lines"]] == [True, False]
    assert april.document["overage"] == {"soft_gpu_hours": 4.0, "used_gpu_hours": 3.0, "overage_gpu_hours": 0.0, "overage_micros": 0}


def test_a_month_that_is_none_that_is_to_come_or_of_nothing_is_refused(platform: Platform) -> None:
    job = metered_job(platform)
    now = at_time(platform, APRIL)
    for month in ("2026-13", "26-03", "x", "2026-05", "20\u0662\u0665-01"):
        with pytest.raises(InvalidRequest, match="month"):
            invoices.get(now, job.tenant, month)
    with pytest.raises(NotFound, match="nothing was billed"):
        invoices.get(now, job.tenant, "2026-02")
    assert invoices.get(now, job.tenant, "2026-04").document["total_micros"] == 0


def test_the_table_has_every_line_and_its_total_and_no_formula(platform: Platform) -> None:
    job = a_busy_month(platform)
    (march,) = issued(platform, job.tenant, now=APRIL)
    *lines, total = csv.DictReader(io.StringIO(csv_export.invoice(march.document)))
    assert sum(int(line["amount_micros"]) for line in lines) == int(total["amount_micros"]) == march.document["total_micros"]
    assert (total["kind"], total["amount_usd"]) == ("total", march.document["total_usd"])
    assert lines[-1]["description"] == "Adjustment: =goodwill"
    assert all(not (line["description"] or "").startswith("=") for line in lines)
