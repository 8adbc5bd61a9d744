"""Reports in the database and the entries that follow, whenever and however often they come."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from control_plane.attempts.tables import attempts, checkpoints
from control_plane.billing import ledger, ledger_check, prices, refunds
from control_plane.billing.metering import service as metering
from control_plane.billing.metering.rules import milliseconds
from control_plane.billing.tables import meter_events, unbilled_attempts
from control_plane.jobs.tables import job_events
from control_plane.platform.context import Platform
from control_plane.queue.tables import reservations
from control_plane.quotas import service as quotas
from core.errors import Fault, FtError
from engine.scheduler.pools import Pool, equal_nodes
from engine.training.failures import FailureClass
from tests.support.jobs.failure_classes import CLASSES
from tests.support.jobs.metered_job import AT, POOL, MeteredJob, at_time, metered_job

Report = Callable[[sa.Connection], None]
ENDS = st.tuples(st.integers(0, 10_000_000), st.sampled_from([None, *Fault]), st.integers(1, 8))


def due(ms: int, num_gpus: int, fault: Fault | None) -> int:
    held = prices.load().at(AT)
    return 0 if fault is Fault.PLATFORM else held.gpu_micros("h100-80gb", tier="standard", pricing="on_demand", gpu_ms=ms * num_gpus)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(ran=st.lists(ENDS, min_size=1, max_size=3), seed=st.integers(0, 2**32))
def test_events_that_come_ten_times_shuffled_and_between_rounds_of_billing_make_the_same_ledger(
    platform: Platform, ran: list[tuple[int, Fault | None, int]], seed: int
) -> None:
    job, chance = metered_job(platform), random.Random(seed)
    reports: list[Report] = []
    for number, (ms, fault, num_gpus) in enumerate(ran, start=1):

        def started(conn: sa.Connection, number: int = number, num_gpus: int = num_gpus) -> None:
            job.started(conn, number, AT, num_gpus=num_gpus)

        def ended(conn: sa.Connection, number: int = number, ms: int = ms, fault: Fault | None = fault) -> None:
            job.ended(conn, number, AT + timedelta(milliseconds=ms), outcome="any", fault=fault)

        reports += [started, ended] * 10
    chance.shuffle(reports)
    while reports:
        some, reports = reports[:7], reports[7:]
        with platform.engine.begin() as conn:
            for report in some:
                report(conn)
        if chance.random() < 0.5:
            metering.settle_due(platform)
    metering.settle_due(platform)
    assert metering.settle_due(platform) == 0, "all is billed, and nothing twice"
    assert job.owes() == sum(due(ms, num_gpus, fault) for ms, fault, num_gpus in ran)
    assert ledger.balance(platform, job.tenant) == job.owes()
    assert len(job.entries()) == sum(2 if fault is Fault.PLATFORM else 1 for _, fault, _ in ran)
    assert ledger.trial_balance(platform).total == 0


@pytest.mark.parametrize("made", CLASSES, ids=lambda c: c.code)
def test_each_failure_class_has_its_entries_and_an_ambiguous_one_waits_for_a_decision(platform: Platform, made: FailureClass) -> None:
    job = metered_job(platform)
    entries = job.run(outcome=made.code, fault=made.fault)
    assert [e.kind for e in entries] == (["usage", "refund"] if made.fault is Fault.PLATFORM else ["usage"])
    with platform.engine.connect() as conn:
        cases = ledger.cases_of_job(conn, job.tenant, job.id)
    expected = [("pending", 4_000_000, made.code)] if made.fault is Fault.AMBIGUOUS else []
    assert [(c.state, c.amount_micros, c.outcome) for c in cases] == expected


def test_a_start_that_comes_after_its_end_is_billed_then_and_once(platform: Platform) -> None:
    job = metered_job(platform)
    with platform.engine.begin() as conn:
        job.ended(conn, 1, AT + timedelta(hours=2))
        assert metering.settle(conn, platform, job.attempt(1)) == []
    metering.settle_due(platform)
    assert job.entries() == []
    with platform.engine.begin() as conn:
        job.started(conn, 1, AT)
    assert metering.settle_due(platform) == 1
    assert job.owes() == 8_000_000


def test_an_end_that_nobody_reported_is_that_of_the_last_sign_of_life(platform: Platform) -> None:
    job = metered_job(platform)
    with platform.engine.begin() as conn:
        this: dict[str, Any] = {"job_id": job.id, "attempt": 1}
        conn.execute(sa.insert(attempts).values(**this, workload="w", started_at=AT))
        job.started(conn, 1, AT)
        saved = {"step": 5, "object_prefix": "p", "manifest_sha256": "m", "metrics": {}, "created_at": AT + timedelta(minutes=30)}
        conn.execute(sa.insert(checkpoints).values(id=f"c-{job.id}", **this, **saved))
        conn.execute(sa.insert(reservations).values(**this, pool="h100", num_gpus=1, granted_at=AT, released_at=AT + timedelta(hours=5)))
    assert metering.settle_due(platform) == 1
    usage, refund = job.entries()
    assert (usage.gpu_seconds, usage.amount_micros) == (1800, 2_000_000), "half an hour to its last checkpoint, not five"
    assert usage.detail["end_known_from"] == "inferred"
    assert refund.amount_micros == -2_000_000, "its machine was lost, which is the platform's fault"


def test_a_running_attempt_is_left_alone(platform: Platform) -> None:
    job = metered_job(platform)
    with platform.engine.begin() as conn:
        conn.execute(sa.insert(attempts).values(job_id=job.id, attempt=1, workload="w", started_at=AT))
        conn.execute(sa.insert(reservations).values(job_id=job.id, attempt=1, pool="h100", num_gpus=1, granted_at=AT))
        job.started(conn, 1, AT)
    metering.settle_due(platform)
    assert job.entries() == []


def test_a_type_of_gpu_without_a_price_is_billed_once_it_has_one(new_platform: Callable[..., Platform], tmp_path: Path) -> None:
    platform = new_platform()
    job = metered_job(platform)
    assert job.run(pool=replace(POOL, gpu_type="b300-288gb")) == []
    (not_billed,) = ledger_check.check(platform).differences
    assert not_billed.code == "not_billed"
    assert "b300-288gb" in not_billed.detail
    body = yaml.safe_load(prices.BUILTIN.read_text())
    body["lists"][0]["gpus"]["b300-288gb"] = body["lists"][0]["gpus"]["h100-80gb"]
    own = tmp_path / "prices.yaml"
    own.write_text(yaml.safe_dump(body))
    priced = replace(platform, settings=replace(platform.settings, prices_file=own))
    assert metering.settle_due(priced) == 1
    assert job.owes() == 4_000_000


@pytest.mark.parametrize(("pricing", "owed"), [("on_demand", 4_000_000), ("spot", 2_000_000), ("reserved", 2_800_000)])
def test_hours_cost_what_their_pool_is_whatever_the_job_asked_for(platform: Platform, pricing: Any, owed: int) -> None:
    job = metered_job(platform)
    (usage,) = job.run(pool=Pool(name="p", nodes=equal_nodes(8), gpu_type="h100-80gb", max_gpus_per_job=8, pricing=pricing))
    assert (usage.amount_micros, usage.list_micros, usage.pricing) == (owed, 4_000_000, pricing)


def test_a_free_attempt_that_nobody_can_be_blamed_for_is_a_case_and_a_refund_of_nothing_gives_its_hours_back(platform: Platform) -> None:
    job = metered_job(platform, tier="free")
    (usage,) = job.run(outcome="oom", fault=Fault.AMBIGUOUS)
    assert (usage.gpu_seconds, usage.amount_micros) == (3600, 0)
    now = AT + timedelta(hours=2)
    with platform.engine.connect() as conn:
        (case,) = ledger.cases_of_job(conn, job.tenant, job.id)
        assert quotas.standing(conn, job.tenant, now).settled_s == 3600
    refunds.grant(platform, case.id, by="opk_1", note="ours")
    with platform.engine.connect() as conn:
        assert quotas.standing(conn, job.tenant, now).settled_s == 0
    assert (case.amount_micros, job.owes()) == (0, 0)


def test_attempts_without_a_price_keep_none_behind_them_from_being_billed(fresh_platform: Platform) -> None:
    jobs = [metered_job(fresh_platform) for _ in range(4)]
    first, *others = sorted(jobs, key=lambda job: job.tenant)
    for attempt in range(1, 6):
        first.run(attempt, pool=replace(POOL, gpu_type="b300-288gb"))
    for job in others:
        _reported(job)
    assert metering.settle_due(fresh_platform, at_a_time=2) == 3
    assert [job.owes() for job in others] == [4_000_000] * 3
    with fresh_platform.engine.connect() as conn:
        number, oldest = metering.closed_unbilled(conn)
    assert number == 5 and oldest is not None, "and operators see those that wait"


def test_an_attempt_whose_billing_fails_is_told_and_keeps_no_other_from_being_billed(fresh_platform: Platform) -> None:
    broken, sound = sorted((metered_job(fresh_platform) for _ in range(2)), key=lambda job: job.tenant)
    odd = replace(broken, tier="gold")
    for job in (odd, sound):
        _reported(job)
    with pytest.raises(FtError, match=f"1 of 2 attempts failed, .* attempt 1 of {broken.id}: KeyError"):
        metering.settle_due(fresh_platform)
    assert (broken.entries(), sound.owes()) == ([], 4_000_000)


def test_a_round_looks_at_what_is_not_billed_alone(fresh_platform: Platform) -> None:
    job = metered_job(fresh_platform)
    job.run(1)
    with fresh_platform.engine.begin() as conn:
        job.started(conn, 2, AT)
        job.started(conn, 1, AT + timedelta(hours=9))
    listed = sa.select(unbilled_attempts.c.attempt).where(unbilled_attempts.c.job_id == job.id)
    with fresh_platform.engine.connect() as conn:
        assert conn.execute(listed).scalars().all() == [2]


def _reported(job: MeteredJob) -> None:
    """An hour that is reported and not billed."""
    with job.platform.engine.begin() as conn:
        job.started(conn, 1, AT)
        job.ended(conn, 1, AT + timedelta(hours=1))


def checkpoint(job: MeteredJob, attempt: int, step: int, at: datetime, **changed: Any) -> dict[str, Any]:
    where = {"job_id": job.id, "attempt": attempt, "step": step}
    return {
        "id": f"c-{job.id}-{step}", **where, "object_prefix": "p", "manifest_sha256": "m", "metrics": {}, "created_at": at,
        "retired_at": None, **changed,
    }  # fmt: skip


def three_jobs_alike(platform: Platform) -> list[MeteredJob]:
    """With attempts at the same times a day apart: what is asked of one is none of the others', before or after it."""
    made = sorted((metered_job(platform) for _ in range(3)), key=lambda job: job.id)
    with platform.engine.begin() as conn:
        for day, job in enumerate(made):
            at = AT + timedelta(days=day)
            for attempt in (1, 2, 3):
                started_at = at + timedelta(hours=attempt)
                conn.execute(sa.insert(attempts).values(job_id=job.id, attempt=attempt, workload="w", started_at=started_at, from_step=0))
                saved = checkpoint(job, attempt, 10 * attempt, started_at + timedelta(minutes=30))
                conn.execute(sa.insert(checkpoints).values(**saved))
    return made


def test_what_is_kept_of_an_attempt_without_measurements_is_from_its_start_to_its_own_newest_checkpoint(platform: Platform) -> None:
    _, job, _ = three_jobs_alike(platform)
    began = AT + timedelta(days=1, hours=2)
    newer = [
        checkpoint(job, 2, 21, began + timedelta(minutes=40)),
        checkpoint(job, 2, 22, began + timedelta(minutes=50), retired_at=began + timedelta(hours=1)),
    ]
    with platform.engine.begin() as conn:
        conn.execute(sa.insert(checkpoints), newer)
        work = metering.work(conn, job.id, 2, began_at=None, kept_until=None)
        known = metering.work(conn, job.id, 2, began_at=AT, kept_until=AT + timedelta(minutes=1))
        none = metering.work(conn, job.id, 4, began_at=None, kept_until=None)
    assert (work.began_ms, work.kept_until_ms) == (milliseconds(began), milliseconds(began + timedelta(minutes=40)))
    assert (known.began_ms, known.kept_until_ms) == (milliseconds(AT), milliseconds(AT + timedelta(minutes=1)))
    assert (none.began_ms, none.kept_until_ms) == (None, None)


def test_an_attempt_that_only_stored_what_an_earlier_one_had_left_on_the_node_has_kept_nothing(platform: Platform) -> None:
    _, job, _ = three_jobs_alike(platform)
    with platform.engine.begin() as conn:
        conn.execute(sa.update(attempts).where(attempts.c.job_id == job.id, attempts.c.attempt == 2).values(from_step=20))
        resumed = metering.work(conn, job.id, 2, began_at=None, kept_until=None)
        conn.execute(sa.insert(checkpoints), checkpoint(job, 2, 21, AT))
        further = metering.work(conn, job.id, 2, began_at=None, kept_until=None)
    assert (resumed.began_ms, resumed.kept_until_ms) == (None, None)
    assert further.kept_until_ms == milliseconds(AT)


def test_a_workload_was_last_known_to_live_at_its_own_start_measurement_or_checkpoint(platform: Platform) -> None:
    _, job, _ = three_jobs_alike(platform)
    began = AT + timedelta(days=1, hours=2)

    def event(kind: str, at: datetime) -> dict[str, Any]:
        return {"id": uuid.uuid4().hex, "job_id": job.id, "type": kind, "level": "info", "message": kind, "created_at": at}

    with platform.engine.begin() as conn:
        assert metering.last_proof_of_life(conn, job.id, 4) is None
        assert metering.last_proof_of_life(conn, job.id, 2) == began + timedelta(minutes=30)
        conn.execute(sa.insert(job_events), [event("metrics", began - timedelta(minutes=1)), event("message", began + timedelta(hours=1))])
        assert metering.last_proof_of_life(conn, job.id, 2) == began + timedelta(minutes=30), "measured before it, and the platform's own"
        conn.execute(sa.insert(job_events).values(event("metrics", began + timedelta(minutes=35))))
        assert metering.last_proof_of_life(conn, job.id, 2) == began + timedelta(minutes=35)


def test_the_first_report_of_an_id_stays(platform: Platform) -> None:
    job = metered_job(platform)
    with platform.engine.begin() as conn:
        job.started(conn, 1, AT)
        job.started(conn, 1, AT + timedelta(hours=9))
        kept = conn.execute(sa.select(meter_events.c.at).where(meter_events.c.job_id == job.id)).scalars().all()
    assert kept == [AT]


def test_what_runs_now_is_known_with_its_price_so_far(platform: Platform) -> None:
    from control_plane.billing.usage.service import unbilled

    job: MeteredJob = metered_job(platform)
    with platform.engine.begin() as conn:
        job.started(conn, 1, AT, num_gpus=2)
        (running,) = unbilled(conn, at_time(platform, AT + timedelta(minutes=30)), job.tenant)
    assert (running.gpu_ms, running.amount_micros, running.model) == (3_600_000, 4_000_000, "tiny-base")
