"""Making room for another job: the handshake with a real process, at every moment at which it can be asked for."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.attempts import endings, start
from control_plane.attempts import service as attempts
from control_plane.attempts.service import Claim, Ending
from control_plane.attempts.tables import agents as agents_table
from control_plane.attempts.tables import attempts as attempts_table
from control_plane.attempts.watch import Watcher
from control_plane.billing import ledger, ledger_check
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.notifications.tables import outbox
from control_plane.platform.job_states import JobState
from control_plane.platform.protocols import WorkloadPhase, WorkloadStatus
from control_plane.queue import cycle
from control_plane.queue import snapshot as queue_reading
from control_plane.queue.tables import reservations
from control_plane.quotas import enforcement
from control_plane.quotas.rules import HARD_CAP_REACHED
from control_plane.tenants.tables import tenants
from core.errors import NotAdmitted, Unavailable
from core.workload import Workload
from engine.scheduler import Evaluation
from resources.object_store import LocalObjectStore
from tests.support.jobs.followed_jobs import Job, Scripted, plain_weights, until
from tests.support.processes.scripted_training import Scenario


def ask(job: Job, held: Claim, *, for_job: str | None = None) -> None:
    """What the scheduler writes when it has decided that `held` makes room."""
    this = (reservations.c.job_id == held.job_id) & (reservations.c.attempt == held.attempt) & reservations.c.released_at.is_(None)
    with job.platform.engine.begin() as conn:
        conn.execute(sa.update(reservations).where(this).values(stop_asked_at=job.platform.clock(), preempted_for=for_job))
        conn.execute(sa.update(jobs_table).where(jobs_table.c.id == held.job_id).values(stop_requested="preempt"))


def row(job: Job) -> Any:
    return jobs.get(job.platform, job.tenant, job.id).job


def attempt_rows(job: Job) -> list[Any]:
    with job.platform.engine.connect() as conn:
        query = sa.select(attempts_table).where(attempts_table.c.job_id == job.id).order_by(attempts_table.c.attempt)
        return list(conn.execute(query).all())


def step_ended_at(job: Job, step: int) -> float:
    """When the training process says that it ended `step`, by the clock."""
    lines = [json.loads(line) for line in (job.work_dir / "metrics.jsonl").read_text().splitlines()]
    return float(next(m["time"] for m in lines if m["step"] == step))


def paid(job: Job) -> dict[int, int]:
    """Micro-dollars by attempt, what was given back taken off."""
    with job.platform.engine.connect() as conn:
        entries = ledger.of_job(conn, job.tenant, job.id)
    sums: dict[int, int] = {}
    for entry in entries:
        sums[entry.attempt or 0] = sums.get(entry.attempt or 0, 0) + entry.amount_micros
    return sums


def _given_back(job: Job) -> list[str]:
    with job.platform.engine.connect() as conn:
        return [e.id.removeprefix(f"{job.id}/") for e in ledger.of_job(conn, job.tenant, job.id) if e.kind == "refund"]


def finished(job: Job, held: Claim, thread: threading.Thread, endings: list[Ending]) -> JobState:
    thread.join(120)
    assert endings, "the follower did not come to an end"
    return attempts.finish(job.platform, held, endings[0])


def asked_at_step_3(job: Job, scenario: Scenario, **asking: Any) -> tuple[Claim, threading.Thread, list[Ending]]:
    held, thread, endings = job.following(scenario)
    until(lambda: row(job).step == 3)
    ask(job, held, **asking)
    return held, thread, endings


def test_a_job_that_makes_room_saves_goes_back_to_its_place_and_ends_as_if_nothing_had_happened(new_job: Callable[..., Job]) -> None:
    job = new_job()
    held, thread, endings = job.following(Scenario(steps=9, every=100, hold_at=3))
    until(lambda: row(job).step == 3)
    before: datetime = row(job).queued_at
    ask(job, held)
    assert finished(job, held, thread, endings) is JobState.QUEUED
    now = row(job)
    assert (now.queued_at, now.preemptions, now.stop_requested) == (before, 1, None)
    assert now.waiting_since > before, "this wait is a new one, its place the old one"
    (first,) = attempt_rows(job)
    assert (first.outcome, [first.last_step], first.lost_s) == ("preempted", job.steps(), 0.0)

    kept = paid(job)
    assert kept[1] > 0, "its three steps are kept"
    assert _given_back(job) == ["a1/refund/part"], "its stop is the platform's"

    assert job.train(Scenario(steps=9))[1] is JobState.EVALUATING
    assert job.from_steps() == [0, first.last_step]
    assert paid(job)[1] == kept[1] and paid(job)[2] > 0, "no work is paid for twice"
    assert _given_back(job) == ["a1/refund/part", "a2/refund/part"], "and so is the loading after it"
    assert not [d for d in ledger_check.check(job.platform).differences if job.id in d.id]
    assert job.weights() == plain_weights(9)
    assert [m.data["step"] for m in job.events("metrics")] == list(range(1, 10)), "each step is told once"


def test_its_tenant_is_told_for_whom_that_nothing_is_lost_and_when_it_goes_on(new_job: Callable[..., Job]) -> None:
    job = new_job()
    request = JobRequest.from_body({"model": "tiny-base", "training_file": row(job).training_file, "seed": 5})
    other = jobs.submit(job.platform, job.tenant, request).job.id
    with job.platform.engine.begin() as conn:
        conn.execute(sa.update(jobs_table).where(jobs_table.c.id == other).values(tier="premium"))
    asked = asked_at_step_3(job, Scenario(steps=9, every=100, hold_at=3), for_job=other)
    assert finished(job, *asked) is JobState.QUEUED
    told = job.events("job_preempted", "job_queued", "preemption_forecast")[-3:]
    assert [e.code for e in told] == ["job_preempted", "job_queued", "preemption_forecast"]
    at = attempt_rows(job)[0].last_step
    assert told[0].message == f"Attempt 1: it gave its GPUs to a premium job at step {at}, which is saved; nothing is lost."
    assert (told[0].data["for_tier"], told[0].data["lost_gpu_s"]) == ("premium", 0)
    assert "resumes from the last verified checkpoint" in told[1].message
    assert "expected to resume" in told[2].message and told[2].data["expected_start"] > 0
    assert not any(other in e.message for e in told)
    with job.platform.engine.connect() as conn:
        kinds = conn.execute(sa.select(outbox.c.type).where(outbox.c.subject == job.id).order_by(outbox.c.seq)).scalars().all()
    assert kinds[-2:] == ["fine_tuning.job.preempted", "fine_tuning.job.queued"]


def test_before_its_workload_was_started_nothing_is_started_and_nothing_paid(new_job: Callable[..., Job]) -> None:
    job = new_job()
    Scenario(steps=6).write(job.work_dir)
    held = job.claim()
    ask(job, held)
    assert attempts.finish(job.platform, held, job.follow(held)) is JobState.QUEUED
    assert job.launcher.names == []
    assert (attempt_rows(job)[0].outcome, attempt_rows(job)[0].lost_s, paid(job)) == ("preempted", 0.0, {})
    assert "before it started" in job.events("job_preempted")[0].message
    assert job.train(Scenario(steps=6))[1] is JobState.EVALUATING


@pytest.mark.parametrize(("stop", "state"), [(jobs.cancel, JobState.CANCELLED), (jobs.pause, JobState.PAUSED)])
def test_no_workload_is_started_for_a_job_that_its_tenant_has_stopped(new_job: Callable[..., Job], stop: Any, state: JobState) -> None:
    job = new_job()
    held = job.claim()
    stop(job.platform, job.tenant, job.id)
    assert attempts.finish(job.platform, held, job.follow(held)) is state
    assert job.launcher.names == []


class ReleasedMeanwhile(LocalObjectStore):
    """While the inputs of the workload are looked up, somebody gives up on the attempt."""

    job: Job | None = None

    def get_bytes(self, key: str) -> bytes:
        if self.job is not None and "/packs/" in key:
            cycle.release(self.job.platform, self.job.id, 1)
        return super().get_bytes(key)


def test_an_attempt_that_was_released_meanwhile_starts_nothing(new_job: Callable[..., Job], tmp_path: Path) -> None:
    store = ReleasedMeanwhile(tmp_path / "objects")
    job = store.job = new_job(store)
    Scenario(steps=6).write(job.work_dir)
    held = job.claim()
    with pytest.raises(NotAdmitted, match=r"attempt 1 of job .* was released"):
        job.follow(held)
    assert (job.launcher.names, attempt_rows(job)[0].started_at) == ([], None)


def unwatched(job: Job, scenario: Scenario) -> Claim:
    """Start the attempt, whose workload nobody watches until the test does."""
    scenario.write(job.work_dir)
    held = job.claim()
    assert start.start_or_adopt(job.platform, job.launcher, held) is None
    return held


def has_ended(job: Job, held: Claim) -> bool:
    return job.launcher.get(held.workload).phase is WorkloadPhase.EXITED


@pytest.mark.slow
def test_a_workload_whose_attempt_was_released_meanwhile_ends_by_itself(new_job: Callable[..., Job]) -> None:
    job = new_job()
    held = unwatched(job, Scenario(steps=9, every=100, hold_at=3, deaf=True))
    with contextlib.closing(Watcher(platform=job.platform, launcher=job.launcher, answers=lambda: True)) as watcher:
        until(lambda: row(job).step == 3)
        assert watcher.look() == []
        cycle.release(job.platform, job.id, held.attempt)
        until(lambda: has_ended(job, held))
        assert watcher.look() == [], "its end was recorded with its release"
    assert job.steps() == []


@pytest.mark.slow
def test_what_it_kept_is_known_also_where_its_measurements_are_gone(new_job: Callable[..., Job]) -> None:
    job = new_job()
    held = unwatched(job, Scenario(steps=9, every=100, hold_at=3))
    until(lambda: row(job).step == 3)
    ask(job, held)
    until(lambda: has_ended(job, held))
    with job.platform.engine.begin() as conn:
        conn.execute(sa.update(agents_table).where(agents_table.c.job_id == job.id).values(facts=None))
    ending = job.follow(held)
    assert (ending.began_at, ending.kept_until) == (None, None)
    assert attempts.finish(job.platform, held, ending) is JobState.QUEUED
    assert paid(job)[1] > 0, "its checkpoint is in the database"


def test_an_attempt_has_ended_also_where_nothing_can_be_forecast(new_job: Callable[..., Job], caplog: pytest.LogCaptureFixture) -> None:
    def clock() -> datetime:
        raise ValueError("no time is known")

    job = new_job()
    endings.tell_when(replace(job.platform, clock=clock), job.claim())
    assert "could not forecast" in caplog.text and job.events("preemption_forecast") == []


def test_while_it_loads_it_leaves_at_once(new_job: Callable[..., Job]) -> None:
    job = new_job()
    held, thread, endings = job.following(Scenario(steps=6, load_s=30.0))
    until(lambda: attempt_rows(job)[0].started_at is not None)
    ask(job, held)
    assert finished(job, held, thread, endings) is JobState.QUEUED
    assert (attempt_rows(job)[0].outcome, attempt_rows(job)[0].last_step, attempt_rows(job)[0].lost_s) == ("preempted", 0, 0.0)
    assert job.train(Scenario(steps=6))[1] is JobState.EVALUATING


def test_in_the_middle_of_a_save_the_save_is_ended_and_nothing_is_lost(new_job: Callable[..., Job]) -> None:
    job = new_job()
    held, thread, endings = job.following(Scenario(steps=9, every=3, save_s=1.0))
    until(lambda: any(p.name.startswith(".") for p in (job.work_dir / "checkpoints").glob(".*")))
    ask(job, held)
    assert finished(job, held, thread, endings) is JobState.QUEUED
    assert (job.steps()[0], attempt_rows(job)[0].lost_s) == (attempt_rows(job)[0].last_step, 0.0)
    assert job.train(Scenario(steps=9))[1] is JobState.EVALUATING
    assert job.weights() == plain_weights(9)


@pytest.mark.slow
def test_in_its_last_step_it_finishes_instead(new_job: Callable[..., Job]) -> None:
    job = new_job()
    asked = asked_at_step_3(job, Scenario(steps=3, every=100, hold_at=3))
    assert finished(job, *asked) is JobState.EVALUATING
    assert (row(job).stop_requested, row(job).preemptions) == (None, 0)
    assert job.weights() == plain_weights(3)


class Impatient(Scripted):
    """Its agents kill a training process soon after they have asked it to stop."""

    def start_or_adopt(self, workload: Workload, *, token: str = "") -> WorkloadStatus:
        return super().start_or_adopt(replace(workload, grace_s=1.5), token=token)


def is_stopping(job: Job, held: Claim) -> bool:
    """Whether the agent says that it has asked the training process to stop."""
    return b"stopping: preempt" in job.launcher.read_log(held.workload)


def heartbeat_at(job: Job) -> datetime:
    with job.platform.engine.connect() as conn:
        seen: datetime = conn.execute(sa.select(agents_table.c.heartbeat_at).where(agents_table.c.job_id == job.id)).scalar_one()
    return seen


@pytest.mark.slow
def test_a_workload_that_does_not_answer_is_killed_and_what_it_loses_is_counted(new_job: Callable[..., Job]) -> None:
    job = new_job()
    job.launcher = Impatient(job.launcher.real.root)
    held, thread, endings = job.following(Scenario(steps=9, every=2, hold_at=5, step_s=0.2, deaf=True))
    until(lambda: row(job).step == 5 and 4 in job.steps())
    ask(job, held)
    until(lambda: is_stopping(job, held))
    beat = heartbeat_at(job)
    until(lambda: heartbeat_at(job) > beat)  # while it is being stopped its agent is known to live
    assert finished(job, held, thread, endings) is JobState.QUEUED
    (first,) = attempt_rows(job)
    assert first.outcome == "preempted"
    kept_s = step_ended_at(job, 4) - first.started_at.timestamp()
    assert first.lost_s == pytest.approx(step_ended_at(job, 5) - step_ended_at(job, 4), abs=0.01), "one step of one GPU"
    assert "steps after the checkpoint of step 4 are trained again" in job.events("job_preempted")[0].message
    assert job.train(Scenario(steps=9))[1] is JobState.EVALUATING
    assert job.from_steps() == [0, 4]
    with job.platform.engine.connect() as conn:
        usage, back = (e for e in ledger.of_job(conn, job.tenant, job.id) if e.attempt == 1)
    assert 0.6 <= usage.gpu_seconds - back.gpu_seconds <= kept_s + 0.1, "four steps, and the loading before them, which was the first"
    assert back.gpu_seconds >= 1.5 + first.lost_s, "what came after the fourth, and the time until it was killed"
    assert job.weights() == plain_weights(9)


@pytest.mark.parametrize(
    ("stop", "state", "outcome"),
    [pytest.param(jobs.cancel, JobState.CANCELLED, "cancelled", marks=pytest.mark.slow), (jobs.pause, JobState.PAUSED, "paused")],
)
def test_a_cancel_or_a_pause_that_comes_meanwhile_wins(new_job: Callable[..., Job], stop: Any, state: JobState, outcome: str) -> None:
    job = new_job()
    held, thread, endings = asked_at_step_3(job, Scenario(steps=9, every=100, hold_at=3, save_s=1.0))
    until(lambda: is_stopping(job, held))
    stop(job.platform, job.tenant, job.id)
    assert finished(job, held, thread, endings) is state
    assert (attempt_rows(job)[0].outcome, row(job).preemptions) == (outcome, 0)
    assert paid(job)[1] > 0, "it is the tenant's own stop"
    assert queue_reading.queue_snapshot(job.platform).running == []
    if state is JobState.PAUSED:
        jobs.resume(job.platform, job.tenant, job.id)
        assert job.train(Scenario(steps=9))[1] is JobState.EVALUATING
        assert job.from_steps() == [0, attempt_rows(job)[0].last_step]


class RefusesOnce(Scripted):
    """Its first stop fails, and the workload goes on."""

    refused = 0

    def stop(self, name: str, *, grace_s: float) -> WorkloadStatus:
        if not self.refused:
            self.refused += 1
            raise Unavailable("no machine answers")
        return super().stop(name, grace_s=grace_s)


@pytest.mark.slow
def test_a_stop_that_fails_is_tried_again(new_job: Callable[..., Job]) -> None:
    job = new_job()
    job.platform = replace(job.platform, settings=replace(job.platform.settings, heartbeat_timeout_s=3.0, heartbeat_grace_s=0.5))
    root = job.launcher.real.root
    job.launcher = launcher = RefusesOnce(root)
    held, thread, endings = job.following(Scenario(steps=9, hold_at=3))
    until(lambda: row(job).step == 3)
    os.killpg(json.loads((root / held.workload / "process.json").read_text())["pid"], signal.SIGSTOP)
    thread.join(60)
    assert ([e.outcome for e in endings], launcher.refused) == (["stalled"], 1)
    assert row(job).state == JobState.QUEUED


@pytest.mark.slow
def test_a_watcher_that_dies_meanwhile_is_replaced_and_the_next_one_ends_the_handshake(new_job: Callable[..., Job]) -> None:
    job = new_job()
    held = unwatched(job, Scenario(steps=9, every=100, hold_at=3))
    with contextlib.closing(Watcher(platform=job.platform, launcher=job.launcher, answers=lambda: True)) as watcher:
        until(lambda: row(job).step == 3)
        assert watcher.look() == []
        ask(job, held)
    until(lambda: has_ended(job, held))
    assert row(job).state == JobState.RUNNING, "nobody has ended the attempt"
    assert attempts.finish(job.platform, held, job.follow(held)) is JobState.QUEUED
    assert (job.steps(), attempt_rows(job)[0].lost_s, row(job).preemptions) == ([attempt_rows(job)[0].last_step], 0.0, 1)
    assert job.train(Scenario(steps=9))[1] is JobState.EVALUATING
    assert job.weights() == plain_weights(9)


@pytest.mark.slow
def test_a_word_that_has_outlived_its_attempt_stops_nobody(new_job: Callable[..., Job]) -> None:
    job = new_job()
    asked = asked_at_step_3(job, Scenario(steps=6, every=100, hold_at=3))
    assert finished(job, *asked) is JobState.QUEUED
    assert attempts.finish(job.platform, asked[0], asked[2][0]) is JobState.QUEUED, "twice is once"
    ask(job, asked[0])  # of a reservation that was given back: only the word on the job changes
    assert job.train(Scenario(steps=6))[1] is JobState.EVALUATING
    assert (row(job).preemptions, len(attempt_rows(job))) == (1, 2)


@pytest.mark.slow
def test_making_room_is_no_failure_however_often_it_happens(new_job: Callable[..., Job]) -> None:
    job = new_job()
    for _ in range(12):  # more than the attempts after which any failure without progress is a dead letter
        held = job.claim()
        ask(job, held)
        assert attempts.finish(job.platform, held, job.follow(held)) is JobState.QUEUED
    assert all(p.excused and p.code == "preempted" for p in endings.history(job.platform, job.id))
    ending, state = job.train(Scenario(steps=6, end_at={"step": 3, "outcome": "preempted", "attempt": 13}))
    assert (ending.outcome, state) == ("preempted", JobState.QUEUED), "and this one, which nobody asked for, is the first of its kind"
    assert row(job).preemptions == 12
    assert job.train(Scenario(steps=6))[1] is JobState.EVALUATING


@pytest.mark.slow
def test_work_that_is_lost_with_a_node_is_counted_too(new_job: Callable[..., Job]) -> None:
    job = new_job()
    job.train(Scenario(steps=8, every=2, step_s=0.2, end_at={"step": 5, "outcome": "kill"}))
    assert (attempt_rows(job)[0].outcome, job.steps()[0]) == ("node_lost", 4)
    assert attempt_rows(job)[0].lost_s == pytest.approx(step_ended_at(job, 5) - step_ended_at(job, 4), abs=0.01)
    job.train(Scenario(steps=8, every=2))
    assert attempt_rows(job)[1].lost_s == 0.0


def test_a_job_that_is_evaluated_holds_no_gpus_that_could_be_asked_for(new_job: Callable[..., Job]) -> None:
    job = new_job()
    assert job.train(Scenario(steps=2))[1] is JobState.EVALUATING
    snapshot = queue_reading.queue_snapshot(job.platform)
    (waiting,) = snapshot.waiting
    assert (snapshot.running, waiting.job_id, waiting.evaluation) == ([], job.id, Evaluation(id=None))


@pytest.mark.slow
def test_a_stop_while_the_platform_paused_it_for_the_cap_is_the_cap_s(new_job: Callable[..., Job]) -> None:
    job = new_job()
    held, thread, endings = asked_at_step_3(job, Scenario(steps=9, every=100, hold_at=3, save_s=1.0))
    until(lambda: is_stopping(job, held))
    with job.platform.engine.begin() as conn:
        conn.execute(sa.update(tenants).where(tenants.c.id == job.tenant).values(hard_gpu_hours=1e-9))
    assert enforcement.enforce(job.platform).paused == [job.id]
    assert finished(job, held, thread, endings) is JobState.PAUSED
    assert row(job).reason == HARD_CAP_REACHED
    with job.platform.engine.begin() as conn:
        conn.execute(sa.update(tenants).where(tenants.c.id == job.tenant).values(hard_gpu_hours=None))
    assert enforcement.enforce(job.platform).resumed == [job.id]
    assert job.train(Scenario(steps=9))[1] is JobState.EVALUATING
    assert job.weights() == plain_weights(9)
