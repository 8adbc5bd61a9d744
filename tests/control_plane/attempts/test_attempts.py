"""Placing jobs and following attempts, on a real database: reservations, fencing, retries and the ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.attempts import checkpoint_retention
from control_plane.attempts import service as attempts
from control_plane.attempts.tables import attempts as attempts_table
from control_plane.jobs import service as jobs
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.jobs.transitions import fail
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.queue import cycle, launches
from control_plane.queue.tables import reservations
from core.errors import Conflict, Fault, InvalidDataset, NotAdmitted
from engine.scheduler import Start, Wait
from engine.training.failures import Retry
from tests.control_plane.attempts.test_attempt_reports import messages, reports
from tests.support.jobs.claimed_job import asked_to_stop, ending, failure, held_by, ledger, report, resume_from, state_of


def test_a_job_without_a_reservation_may_not_train(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    with pytest.raises(NotAdmitted, match="holds no reservation"):
        attempts.claim(platform, tenant, job_id)


def test_one_slot_is_given_once_however_many_schedulers_run(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, _, _ = queued()
    queued()
    queued()
    with ThreadPoolExecutor(6) as pool:
        rounds: Sequence[list[Any]] = list(pool.map(lambda _: cycle.run_cycle(platform), range(6)))
    started = [d for decisions in rounds for d in decisions if isinstance(d, Start)]
    assert len(started) == 1
    with platform.engine.connect() as conn:
        assert conn.execute(sa.select(sa.func.count()).select_from(reservations)).scalar_one() == 1


def test_a_waiting_job_says_why_and_where_it_stands(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, _, first = queued()
    _, _, second = queued()
    decisions = cycle.run_cycle(platform)
    waiting = next(d for d in decisions if isinstance(d, Wait))
    assert waiting.job_id in {first, second}
    with platform.engine.connect() as conn:
        row = conn.execute(sa.select(jobs_table).where(jobs_table.c.id == waiting.job_id)).one()
    assert row.reason == "WaitingBehindHead" or row.reason == "WaitingForQuota"
    assert row.queue_position == 1
    assert row.estimated_finish_at is not None


def test_the_same_due_run_keeps_its_key_until_it_is_replaced(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held_by(platform, tenant, job_id)
    (due,) = launches.due_runs(platform, ("train",))
    assert launches.due_runs(platform, ("train",)) == [due]
    launches.replace_run(platform, due)
    (again,) = launches.due_runs(platform, ("train",))
    assert again.run_key != due.run_key


def test_a_run_is_replaced_once_however_many_see_it_dead(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held_by(platform, tenant, job_id)
    (due,) = launches.due_runs(platform, ("train",))
    assert [launches.replace_run(platform, due) for _ in range(2)] == [True, False]
    assert launches.run_replacements(platform, due) is None
    (again,) = launches.due_runs(platform, ("train",))
    known = launches.run_replacements(platform, again)
    assert known is not None and (again.runs, known[0]) == (1, 1)


def test_a_run_that_died_does_not_replace_the_run_of_the_next_attempt(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    (due,) = launches.due_runs(platform, ("train",))
    attempts.finish(platform, held, ending(failure("node_lost", Fault.PLATFORM, Retry.RESUME)))
    assert not launches.replace_run(platform, due), "nobody awaits it"
    assert held_by(platform, tenant, job_id).attempt == 2
    assert launches.run_replacements(platform, due) is None and not launches.replace_run(platform, due)
    (of_the_next,) = launches.due_runs(platform, ("train",))
    assert (of_the_next.attempt, of_the_next.runs) == (2, 0)


def test_a_release_that_comes_after_the_end_says_nothing_of_it(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    attempts.mark_started(platform, held, started_at=1000.0)
    with platform.engine.begin() as conn:  # what finish does before it reports
        conn.execute(sa.update(reservations).where(reservations.c.job_id == job_id).values(released_at=platform.clock()))
    cycle.release(platform, job_id, held.attempt)
    assert "ended" not in reports(platform, job_id) and ledger(platform, job_id) == []
    with platform.engine.connect() as conn:
        assert conn.execute(sa.select(attempts_table.c.outcome).where(attempts_table.c.job_id == job_id)).scalar_one() is None


def test_a_job_is_given_up_in_one_transaction_that_takes_its_reservation_first(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held_by(platform, tenant, job_id)
    wrote, commits = list[str](), list[Any]()
    sa.event.listen(platform.engine, "before_cursor_execute", lambda *given: wrote.append(given[2]))
    sa.event.listen(platform.engine, "commit", commits.append)
    attempts.abandon(platform, tenant, job_id, NotAdmitted("no", code=attempts.UNREADABLE))
    assert len(commits) == 1
    assert next(w for w in wrote if w.startswith("UPDATE") or "FOR UPDATE" in w).startswith("UPDATE reservations")
    assert state_of(platform, job_id) == "failed" and launches.due_runs(platform, ("train",)) == []


def test_a_success_goes_on_to_evaluation_and_is_billed_once(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    assert attempts.finish(platform, held, ending()) is JobState.EVALUATING
    assert attempts.finish(platform, held, ending()) is JobState.EVALUATING
    assert [e.amount_micros for e in ledger(platform, job_id)] == [10_000]


def test_a_preempted_attempt_is_refunded_and_queued_again_at_its_old_place(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    with platform.engine.connect() as conn:
        before = conn.execute(sa.select(jobs_table.c.queued_at).where(jobs_table.c.id == job_id)).scalar_one()
    held = held_by(platform, tenant, job_id)
    assert attempts.finish(platform, held, ending(failure("preempted", Fault.PLATFORM, Retry.RESUME))) is JobState.QUEUED
    assert sum(e.amount_micros for e in ledger(platform, job_id)) == 0
    with platform.engine.connect() as conn:
        assert conn.execute(sa.select(jobs_table.c.queued_at).where(jobs_table.c.id == job_id)).scalar_one() == before
    assert held_by(platform, tenant, job_id).attempt == 2


def test_work_that_is_done_again_counts_for_every_gpu_of_the_attempt(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = replace(held_by(platform, tenant, job_id), num_gpus=4)
    attempts.finish(platform, held, replace(ending(failure("node_lost", Fault.PLATFORM, Retry.RESUME)), again_s=2.5))
    with platform.engine.connect() as conn:
        assert conn.execute(sa.select(attempts_table.c.lost_s).where(attempts_table.c.job_id == job_id)).scalar_one() == 10.0


def test_estimated_finish_includes_the_evaluation(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    with platform.engine.begin() as conn:
        conn.execute(sa.update(jobs_table).where(jobs_table.c.id == job_id).values(evaluation_s=600.0))
    held = held_by(platform, tenant, job_id)
    report(platform, held, *({"step": n, "total_steps": 10, "loss": 1.0, "tokens_per_s": 5.0, "time": 100.0 + n} for n in (1, 2)))
    job = jobs.get(platform, tenant, job_id).job
    assert job.estimated_finish is not None and job.estimated_finish_at is not None
    assert (job.estimated_finish - job.estimated_finish_at).total_seconds() == 600.0
    attempts.finish(platform, held, ending())
    left = [left_s(platform, tenant, job_id)]
    report(platform, held_by(platform, tenant, job_id), phase="generate", evaluation={"phase": "generate", "done": 1, "eta_s": 90.0})
    left.append(left_s(platform, tenant, job_id))
    assert left == [pytest.approx(600.0, abs=30.0), pytest.approx(90.0, abs=30.0)], "once it evaluates, of the evaluation alone"


def left_s(platform: Platform, tenant: str, job_id: str) -> float:
    finish = jobs.get(platform, tenant, job_id).job.estimated_finish
    assert finish is not None
    return (finish - platform.clock()).total_seconds()


def test_running_attempt_counts_in_the_cost_so_far_until_it_is_billed(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    assert jobs.get(platform, tenant, job_id).cost_micros == 0, "nothing has started"
    began = platform.clock().timestamp() - 3600
    attempts.mark_started(platform, held, started_at=began)
    (listed,) = jobs.list_jobs(platform, tenant).items
    assert listed.unbilled_micros == listed.cost_micros == pytest.approx(1_000_000, rel=0.1), "an hour of one GPU"
    done = ending()
    attempts.finish(platform, held, replace(done, status=replace(done.status, started_at=began, ended_at=began + 3600)))
    billed = jobs.get(platform, tenant, job_id)
    assert billed.unbilled_micros == 0
    assert billed.cost_micros == sum(e.amount_micros for e in ledger(platform, job_id)) == 1_000_000


def test_a_diverged_attempt_fails_the_job_with_advice_and_is_paid(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    assert attempts.finish(platform, held, ending(failure("diverged", Fault.USER, Retry.NEVER))) is JobState.FAILED
    view = jobs.get(platform, tenant, job_id)
    assert view.job.error["code"] == "diverged"
    assert "do something" in view.job.error["message"]
    assert view.cost_micros == 10_000


def test_out_of_memory_halves_the_batch_and_keeps_the_global_one(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    attempts.finish(platform, held, ending(failure("oom", Fault.AMBIGUOUS, Retry.HALVE_BATCH)))
    optimization = held_by(platform, tenant, job_id).spec.optimization
    assert (optimization.per_device_batch_size, optimization.accumulation_steps) == (2, 4)


def test_a_cancelled_job_stays_cancelled_and_gives_its_gpus_back(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    jobs.cancel(platform, tenant, job_id)
    assert asked_to_stop(platform, held) == "cancel"
    assert [d.job_id for d in launches.due_runs(platform, ("train",))] == [job_id], "somebody must still end its workload"
    assert attempts.finish(platform, held, ending(failure("cancelled", Fault.USER, Retry.NEVER))) is JobState.CANCELLED
    assert launches.due_runs(platform, ("train",)) == []


def test_a_pause_ends_at_paused_and_resume_queues_it_again(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    jobs.pause(platform, tenant, job_id)
    assert attempts.finish(platform, held, ending(failure("paused", Fault.USER, Retry.NEVER))) is JobState.PAUSED
    jobs.resume(platform, tenant, job_id)
    assert held_by(platform, tenant, job_id).attempt == 2


def test_a_released_attempt_can_neither_commit_nor_report(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    stale = held_by(platform, tenant, job_id)
    attempts.finish(platform, stale, ending(failure("node_lost", Fault.PLATFORM, Retry.RESUME)))
    held_by(platform, tenant, job_id)
    assert not attempts.record_checkpoint(platform, stale, step=7, prefix="p", manifest_sha256="m", metrics={})
    with pytest.raises(Conflict, match="holds no reservation"):
        report(platform, stale, {"step": 7, "total_steps": 10, "loss": 1.0, "time": 1.0})
    assert attempts.committed(platform, job_id) == []
    assert state_of(platform, job_id) == JobState.PROVISIONING


def test_a_step_has_one_row_which_names_the_newest_upload(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    for prefix, final in (("a", False), ("b", False), ("c", True)):
        assert attempts.record_checkpoint(platform, held, step=10, prefix=prefix, manifest_sha256=prefix, metrics={}, final=final)
    (row,) = attempts.committed(platform, job_id)
    assert (row.object_prefix, row.final) == ("c", True)


def test_a_step_that_another_attempt_stores_again_is_as_old_as_its_files(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    assert attempts.record_checkpoint(platform, held, step=10, prefix="a1/10", manifest_sha256="1", metrics={})
    attempts.finish(platform, held, ending(failure("node_lost", Fault.PLATFORM, Retry.RESUME)))
    began, again = platform.clock(), held_by(platform, tenant, job_id)
    assert attempts.record_checkpoint(platform, again, step=10, prefix="a2/10", manifest_sha256="2", metrics={})
    (row,) = attempts.committed(platform, job_id)
    assert (row.attempt, row.object_prefix) == (2, "a2/10")
    assert row.created_at >= began


def test_a_step_that_is_saved_again_after_its_checkpoint_was_given_up_is_kept(
    queued: Callable[..., tuple[Platform, str, str]],
) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    for step in (2, 4):
        platform.objects.put_bytes(f"first/{step}/manifest.json", b"{}")
        assert attempts.record_checkpoint(platform, held, step=step, prefix=f"first/{step}", manifest_sha256="0", metrics={})
    resume_from(platform, held, 2)
    assert checkpoint_retention.remove_retired(platform, job_id) == [4]
    assert not platform.objects.exists("first/4/manifest.json")
    platform.objects.put_bytes("again/4/manifest.json", b"{}")
    assert attempts.record_checkpoint(platform, held, step=4, prefix="again/4", manifest_sha256="1", metrics={})
    assert [(c.step, c.object_prefix) for c in attempts.committed(platform, job_id)] == [(4, "again/4"), (2, "first/2")]
    checkpoint_retention.remove_retired(platform, job_id)
    assert platform.objects.exists("again/4/manifest.json")


def test_a_pause_is_kept_when_the_workload_had_gone_already(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    jobs.pause(platform, tenant, job_id)
    assert attempts.finish(platform, held, ending(failure("preempted", Fault.PLATFORM, Retry.RESUME))) is JobState.PAUSED


def test_a_failed_job_tells_its_workload_to_stop(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    fail(platform, tenant, job_id, InvalidDataset("no"))
    assert state_of(platform, job_id) == "failed"
    assert asked_to_stop(platform, held) == "cancel"


@pytest.mark.parametrize("method", ["sft", "kto"])
def test_out_of_memory_while_pausing_halves_the_batch_too(queued: Callable[..., tuple[Platform, str, str]], method: str) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    held = replace(held, frozen_spec=replace(held.spec, method=method))
    jobs.pause(platform, tenant, job_id)
    assert attempts.finish(platform, held, ending(failure("oom", Fault.AMBIGUOUS, Retry.HALVE_BATCH))) is JobState.PAUSED
    assert "resume starts from the first step with micro-batches of 2 rows" in messages(platform, job_id)[-1]
    jobs.resume(platform, tenant, job_id)
    assert held_by(platform, tenant, job_id).spec.optimization.per_device_batch_size == 2


def test_the_event_says_where_a_smaller_batch_goes_on(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    attempts.record_checkpoint(platform, held, step=5, prefix="p", manifest_sha256="m", metrics={})
    attempts.finish(platform, held, ending(failure("oom", Fault.AMBIGUOUS, Retry.HALVE_BATCH)))
    assert "training resumes from the last verified checkpoint with micro-batches of 2 rows" in messages(platform, job_id)[-1]


def test_a_pause_before_the_first_step_speaks_of_no_checkpoint(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    jobs.pause(platform, tenant, job_id)
    attempts.finish(platform, held, ending(failure("paused", Fault.USER, Retry.NEVER), step=0))
    told = messages(platform, job_id)
    assert told[-1] == "Paused before its first step; resume starts from the first step."
    assert not [m for m in told if "checkpoint" in m]
