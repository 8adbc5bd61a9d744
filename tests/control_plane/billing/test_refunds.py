"""Refunds that operators decide on, and corrections by hand."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import sqlalchemy as sa

from control_plane.billing import ledger, ledger_check, refunds
from control_plane.billing.metering.rules import Work, milliseconds
from control_plane.billing.usage import service as usage
from control_plane.notifications.tables import outbox
from control_plane.platform.context import Actor, Platform
from control_plane.quotas import service as quotas
from control_plane.tenants.tables import audit_log
from core.errors import Conflict, Fault, InvalidRequest, NotFound
from tests.support.jobs.metered_job import AT, MeteredJob, metered_job


def waiting(platform: Platform) -> tuple[MeteredJob, str]:
    """A job whose only attempt ran out of memory, and its case."""
    job = metered_job(platform)
    job.run(outcome="oom", fault=Fault.AMBIGUOUS)
    return job, f"{job.id}-a1"


def told(platform: Platform, tenant: str) -> list[dict[str, object]]:
    query = sa.select(outbox.c.data).where(outbox.c.tenant_id == tenant, outbox.c.type == "refund.decided")
    with platform.engine.connect() as conn:
        return list(conn.execute(query).scalars())


def test_a_granted_refund_gives_everything_back_once_however_often_it_is_granted(platform: Platform) -> None:
    job, case = waiting(platform)
    assert job.owes() == 4_000_000
    with ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(lambda i: refunds.grant(platform, case, by=f"opk_{i}", note="the machine swapped"), range(4)))
    assert {row.state for row in rows} == {"granted"}
    assert len({row.decided_by for row in rows}) == 1, "the first decision stands"
    assert job.owes() == 0
    assert [e.kind for e in job.entries()] == ["usage", "refund"]
    assert told(platform, job.tenant) == [{"id": case, "job_id": job.id, "attempt": 1, "state": "granted", "amount_micros": 4_000_000}]
    with pytest.raises(Conflict, match="which stands"):
        refunds.refuse(platform, case, by="opk_9", note="no")


def test_a_refused_refund_gives_nothing_back_and_the_tenant_is_told(platform: Platform) -> None:
    job, case = waiting(platform)
    for _ in range(2):
        assert refunds.refuse(platform, case, by="opk_1", note="the batch was too large").state == "refused"
    assert job.owes() == 4_000_000
    assert [t["state"] for t in told(platform, job.tenant)] == ["refused"]
    with pytest.raises(Conflict, match="was refused by opk_1"):
        refunds.grant(platform, case, by="opk_2", note="after all")


def test_cases_wait_in_the_order_of_their_coming_and_a_decision_needs_a_note(platform: Platform) -> None:
    (job, first), (_, second) = waiting(platform), waiting(platform)
    ids = [row.id for row in refunds.list_cases(platform, limit=100).items]
    assert ids.index(first) < ids.index(second)
    with pytest.raises(InvalidRequest, match=r"say in 1\.\.2000 why"):
        refunds.grant(platform, first, by="opk_1", note=" ")
    refunds.grant(platform, first, by="opk_1", note="ours")
    assert first not in [row.id for row in refunds.list_cases(platform, limit=100).items]
    assert [row.id for row in refunds.list_cases(platform, state="granted", tenant=job.tenant).items] == [first]
    with pytest.raises(NotFound, match="refunds list"):
        refunds.grant(platform, "ftjob-none-a1", by="opk_1", note="ours")
    with pytest.raises(InvalidRequest, match="pending, granted, refused"):
        refunds.list_cases(platform, state="lost")


def test_of_an_attempt_that_a_stop_has_a_part_in_an_operator_decides_on_what_is_left(platform: Platform) -> None:
    job, began = metered_job(platform), milliseconds(AT) + 900_000
    job.run(outcome="oom", fault=Fault.AMBIGUOUS, work=Work(after_stop=True, began_ms=began))
    month = AT + timedelta(hours=2)
    with platform.engine.connect() as conn:
        (case,) = ledger.cases_of_job(conn, job.tenant, job.id)
        assert quotas.standing(conn, job.tenant, month).settled_s == 2700, "the loading is off the hard cap's time"
    assert (case.amount_micros, job.owes(), usage.cost_of_job(platform, job.tenant, job.id).total.refunded_gpu_ms) == (
        3_000_000, 3_000_000, 900_000,
    )  # fmt: skip
    refunds.grant(platform, case.id, by="opk_1", note="ours")
    total = usage.cost_of_job(platform, job.tenant, job.id).total
    assert (total.amount_micros, total.usage_micros, total.refund_micros, total.refunded_gpu_ms) == (0, 4_000_000, -4_000_000, 3_600_000)
    assert sum(entry.list_micros for entry in job.entries()) == 0
    assert not [d for d in ledger_check.check(platform).differences if job.id in d.id]
    with platform.engine.connect() as conn:
        assert quotas.standing(conn, job.tenant, month).settled_s == 0


def test_a_granted_refund_gives_back_its_own_attempt_alone(platform: Platform) -> None:
    job = metered_job(platform)
    for attempt in (1, 2, 3):
        job.run(attempt, at=AT + timedelta(days=attempt), hours=attempt, outcome="oom", fault=Fault.AMBIGUOUS)
    refunds.grant(platform, f"{job.id}-a2", by="opk_1", note="ours")
    assert [(e.attempt, e.amount_micros) for e in job.entries() if e.kind == "refund"] == [(2, -8_000_000)]
    assert job.owes() == 16_000_000


def test_a_decision_is_in_the_audit_log_with_the_operator(platform: Platform) -> None:
    job, case = waiting(platform)
    refunds.grant(platform.acting_as(Actor(kind="operator", id="opk_7")), case, by="opk_7", note="ours")
    query = sa.select(audit_log.c.actor_id).where(audit_log.c.object_id == case, audit_log.c.action == "refund_case.updated")
    with platform.engine.connect() as conn:
        assert conn.execute(query).scalars().all() == ["opk_7"]
    assert job.owes() == 0


def test_an_adjustment_is_an_entry_of_its_own_and_made_once_a_key(platform: Platform) -> None:
    job = metered_job(platform)
    for _ in range(2):
        made = refunds.adjust(platform, job.tenant, amount_micros=-1_500_000, reason="outage of 3 March", by="opk_1", key="ticket-12")
    assert ledger.balance(platform, job.tenant) == -1_500_000
    assert (made.id, made.detail) == (f"adjustment/{job.tenant}/ticket-12", {"reason": "outage of 3 March", "by": "opk_1"})
    with pytest.raises(Conflict, match="is that of an adjustment"):
        refunds.adjust(platform, job.tenant, amount_micros=5, reason="outage of 3 March", by="opk_1", key="ticket-12")
    longest = refunds.adjust(platform, job.tenant, amount_micros=1, reason="r", by="opk_1", key="k" * 100)
    assert longest.id.endswith("k" * 100)
    for wrong in ("", "k" * 101, "a\nb", "é"):
        with pytest.raises(InvalidRequest, match="printable ASCII characters"):
            refunds.adjust(platform, job.tenant, amount_micros=1, reason="r", by="opk_1", key=wrong)
    with pytest.raises(InvalidRequest, match="or nothing"):
        refunds.adjust(platform, job.tenant, amount_micros=0, reason="none", by="opk_1")
    with pytest.raises(NotFound, match="no tenant"):
        refunds.adjust(platform, "nobody", amount_micros=5, reason="r", by="opk_1")


def test_the_check_of_the_ledger_knows_decided_refunds(platform: Platform) -> None:
    _, case = waiting(platform)
    waiting(platform)
    refunds.grant(platform, case, by="opk_1", note="ours")
    assert ledger_check.check(platform).differences == ()
