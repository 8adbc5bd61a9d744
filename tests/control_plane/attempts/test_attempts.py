"""Placing jobs and following attempts, on a real database: reservations, fencing, retries and the ledger."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.attempts import checkpoint_retention, endings
from control_plane.attempts import service as attempts
from control_plane.attempts.service import Claim, Ending
from control_plane.attempts.tables import attempts as attempts_table
from control_plane.billing.tables import ledger_entries, meter_events
from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.queue_entry import mark_packed
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import job_events
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.jobs.transitions import fail
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.platform.protocols import WorkloadPhase, WorkloadStatus
from control_plane.queue import cycle, launches
from control_plane.queue.scheduler import Start, Wait
from control_plane.queue.tables import reservations
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from ft_assets.errors import Fault, InvalidDataset, NotAdmitted
from ft_assets.training.failures import FailureClass, Retry
from tests.support.jobs.training_specs import SPEC


@pytest.fixture
def queued(fresh_platform: Platform, write_chat_rows: Callable[..., Path]) -> Callable[..., tuple[Platform, str, str]]:
    """Makes a tenant with one job that is packed and waits for GPUs."""

    def make(*, tier: str = "standard") -> tuple[Platform, str, str]:
        owner: Tenant
        owner, _ = tenants.create(fresh_platform, f"t-{uuid.uuid4().hex[:8]}", tier=tier)
        with write_chat_rows().open("rb") as rows:
            file = uploaded_files.create(fresh_platform, owner.id, rows, filename="rows.jsonl", purpose="fine-tune")
        request = JobRequest.from_body({"model": "tiny-base", "training_file": file["id"]})
        job = jobs.submit(fresh_platform, owner.id, request).job
        mark_packed(fresh_platform, owner.id, job["id"], spec=SPEC, total_steps=10, expected_s=60.0)
        return fresh_platform, owner.id, job["id"]

    return make


def held_by(platform: Platform, tenant: str, job_id: str) -> Claim:
    cycle.run_cycle(platform)
    return attempts.claim(platform, tenant, job_id)


def state_of(platform: Platform, job_id: str) -> str:
    with platform.engine.connect() as conn:
        return str(conn.execute(sa.select(jobs_table.c.state).where(jobs_table.c.id == job_id)).scalar_one())


def ledger(platform: Platform, job_id: str) -> list[Any]:
    with platform.engine.connect() as conn:
        return list(conn.execute(sa.select(ledger_entries).where(ledger_entries.c.job_id == job_id).order_by(ledger_entries.c.id)).all())


def failure(code: str, fault: Fault, retry: Retry) -> FailureClass:
    return FailureClass(code=code, fault=fault, retry=retry, message=f"{code} happened", remedy="do something")


def ending(failed: FailureClass | None = None, *, step: int = 5, seconds: float = 36.0) -> Ending:
    status = WorkloadStatus(name="w", phase=WorkloadPhase.EXITED, exit_code=1, started_at=1000.0, ended_at=1000.0 + seconds)
    return Ending(outcome=failed.code if failed else "succeeded", failure=failed, last_step=step, trained_tokens=99, status=status)


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
    attempts.mark_started(platform, held, from_step=0, started_at=1000.0)
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


def test_a_diverged_attempt_fails_the_job_with_advice_and_is_paid(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    assert attempts.finish(platform, held, ending(failure("diverged", Fault.USER, Retry.NEVER))) is JobState.FAILED
    view = jobs.get(platform, tenant, job_id)
    assert view.row["error"]["code"] == "diverged"
    assert "do something" in view.row["error"]["message"]
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
    assert attempts.stop_asked(platform, held) == "cancel"
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
    attempts.record_progress(platform, stale, [{"step": 7, "total_steps": 10, "loss": 1.0, "time": 1.0}], phase="train")
    assert attempts.committed(platform, job_id) == []
    assert state_of(platform, job_id) == JobState.PROVISIONING


def test_a_step_has_one_row_which_names_the_newest_upload(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    for prefix, final in (("a", False), ("b", False), ("c", True)):
        assert attempts.record_checkpoint(platform, held, step=10, prefix=prefix, manifest_sha256=prefix, metrics={}, final=final)
    (row,) = attempts.committed(platform, job_id)
    assert (row.object_prefix, row.final) == ("c", True)


def test_a_step_that_is_saved_again_after_its_checkpoint_was_given_up_is_kept(
    queued: Callable[..., tuple[Platform, str, str]], tmp_path: Path
) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    for step in (2, 4):
        platform.objects.put_bytes(f"first/{step}/manifest.json", b"{}")
        assert attempts.record_checkpoint(platform, held, step=step, prefix=f"first/{step}", manifest_sha256="0", metrics={})
    assert checkpoint_retention.give_up_newer(platform, held, tmp_path, 2) == [4]
    checkpoint_retention.remove_retired(platform, job_id)
    assert not platform.objects.exists("first/4/manifest.json")
    platform.objects.put_bytes("again/4/manifest.json", b"{}")
    assert attempts.record_checkpoint(platform, held, step=4, prefix="again/4", manifest_sha256="1", metrics={})
    assert [(c.step, c.object_prefix) for c in attempts.committed(platform, job_id)] == [(4, "again/4"), (2, "first/2")]
    checkpoint_retention.remove_retired(platform, job_id)
    assert platform.objects.exists("again/4/manifest.json")


def test_a_loss_that_is_no_number_is_an_event_with_null(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    steps = [{"step": 1, "total_steps": 10, "loss": math.nan, "grad_norm": math.inf, "time": 1.0}]
    attempts.record_progress(platform, held, steps, phase="train", validation=[{"step": 1, "eval_loss": math.nan, "time": 1.0}])
    with platform.engine.connect() as conn:
        data = conn.execute(sa.select(job_events.c.data).where(job_events.c.type == "metrics").order_by(job_events.c.seq)).scalars().all()
    assert data == [
        {"step": 1, "total_steps": 10, "train_loss": None, "grad_norm": None, "time": 1.0},
        {"step": 1, "valid_loss": None, "time": 1.0},
    ]


def test_nothing_is_reported_of_a_job_that_has_ended(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    jobs.cancel(platform, tenant, job_id)
    attempts.record_progress(platform, held, [{"step": 1, "total_steps": 10, "loss": 1.0, "time": 1.0}], phase="train")
    assert not attempts.record_checkpoint(platform, held, step=1, prefix="p", manifest_sha256="m", metrics={})
    with platform.engine.connect() as conn:
        codes = conn.execute(sa.select(job_events.c.code).order_by(job_events.c.seq)).scalars().all()
    assert codes[-1] == "job_cancelled"


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
    assert attempts.stop_asked(platform, held) == "cancel"


def test_the_first_step_makes_the_job_running_and_metrics_become_events(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    steps = [{"step": n, "total_steps": 10, "loss": 2.0 / n, "tokens_per_s": 5.0, "time": 100.0 + n} for n in (1, 2, 3)]
    attempts.record_progress(platform, held, steps, phase="train", validation=[{"step": 3, "eval_loss": 0.5, "time": 103.0}])
    row = jobs.get(platform, tenant, job_id).row
    assert (row["state"], row["step"], row["loss"]) == ("running", 3, pytest.approx(2 / 3))
    assert row["first_step_at"] is not None
    assert row["estimated_finish_at"] is not None
    with platform.engine.connect() as conn:
        data = conn.execute(sa.select(job_events.c.data).where(job_events.c.type == "metrics").order_by(job_events.c.seq)).scalars().all()
    assert [d.get("train_loss", d.get("valid_loss")) for d in data] == [2.0, 1.0, pytest.approx(2 / 3), 0.5]


def test_history_tells_progress_from_standing_still(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    lost = failure("node_lost", Fault.PLATFORM, Retry.RESUME)
    first = held_by(platform, tenant, job_id)
    attempts.record_checkpoint(platform, first, step=5, prefix="p", manifest_sha256="m", metrics={})
    attempts.finish(platform, first, ending(lost, step=6))
    attempts.finish(platform, held_by(platform, tenant, job_id), replace(ending(lost), last_step=5))
    told = [(p.code, p.committed_step, p.last_step) for p in endings.history(platform, job_id)]
    assert told == [("node_lost", 5, 6), ("node_lost", 5, 5)]


def test_history_counts_what_was_given_up_and_not_the_rows_of_another_attempt(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    lost = failure("node_lost", Fault.PLATFORM, Retry.RESUME)
    for _ in range(2):  # the second goes on from an earlier step, and commits this one again
        held = held_by(platform, tenant, job_id)
        attempts.record_checkpoint(platform, held, step=5, prefix="p", manifest_sha256="m", metrics={})
        attempts.finish(platform, held, ending(lost, step=6))
    held = held_by(platform, tenant, job_id)
    checkpoint_retention.give_up_newer(platform, held, platform.settings.home / "none", 0)
    assert attempts.committed(platform, job_id) == []
    attempts.finish(platform, held, ending(failure("oom", Fault.AMBIGUOUS, Retry.HALVE_BATCH), step=1))
    attempts.finish(platform, held_by(platform, tenant, job_id), ending(lost, step=3))
    told = [(p.code, p.committed_step, p.last_step) for p in endings.history(platform, job_id)]
    assert told == [("node_lost", 5, 6), ("node_lost", 5, 6), ("oom", 5, 1), ("node_lost", 0, 3)]


@pytest.mark.parametrize("method", ["sft", "kto"])
def test_out_of_memory_while_pausing_halves_the_batch_too(queued: Callable[..., tuple[Platform, str, str]], method: str) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    held = replace(held, spec=replace(held.spec, method=method))
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


def test_each_phase_before_the_first_step_is_an_event_once(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    for phase in ("fetch", "import", "import", "load", "import"):
        attempts.record_provisioning(platform, held, phase)
    attempts.record_progress(platform, held, [{"step": 1, "total_steps": 10, "loss": 1.0, "time": 1.0}], phase="train")
    attempts.record_provisioning(platform, held, "self_test")
    assert [m for m in messages(platform, job_id) if m.startswith("Attempt 1: ")] == [
        "Attempt 1: fetching the base model and the training data.",
        "Attempt 1: importing the training libraries.",
        "Attempt 1: loading the base model.",
    ]


def messages(platform: Platform, job_id: str) -> list[str]:
    with platform.engine.connect() as conn:
        query = sa.select(job_events.c.message).where(job_events.c.job_id == job_id)
        return list(conn.execute(query.order_by(job_events.c.seq)).scalars())


def reports(platform: Platform, job_id: str) -> dict[str, Any]:
    with platform.engine.connect() as conn:
        return {row.kind: row for row in conn.execute(sa.select(meter_events).where(meter_events.c.job_id == job_id))}


def test_the_start_and_the_end_of_a_workload_are_reported_as_they_are_recorded(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    attempts.mark_started(platform, held, from_step=0, started_at=1000.0)
    assert reports(platform, job_id)["started"].at.timestamp() == 1000.0
    attempts.finish(platform, held, ending(failure("oom", Fault.AMBIGUOUS, Retry.NEVER)))
    found = reports(platform, job_id)
    assert found["started"].data == {
        "tier": "standard", "gpu_type": "local", "num_gpus": 1, "pricing": "on_demand", "model": "tiny-base",
    }  # fmt: skip
    assert (found["ended"].at.timestamp(), found["ended"].data["fault"]) == (1036.0, "ambiguous")
    assert [(e.amount_micros, e.detail["gpu_ms"]) for e in ledger(platform, job_id)] == [(10_000, 36_000)]


def test_a_lost_workload_is_billed_to_its_last_sign_of_life_and_given_back(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    attempts.mark_started(platform, held, from_step=0, started_at=1000.0)
    status = WorkloadStatus(name="w", phase=WorkloadPhase.LOST, started_at=1000.0, ended_at=1018.0)
    lost = replace(ending(failure("node_lost", Fault.PLATFORM, Retry.RESUME)), status=status, seen=False)
    attempts.finish(platform, held, lost)
    usage, refund = sorted(ledger(platform, job_id), key=lambda e: -e.amount_micros)
    assert (usage.gpu_seconds, usage.amount_micros, refund.amount_micros) == (18.0, 5_000, -5_000)
    assert usage.detail["end_known_from"] == "inferred"


def test_a_workload_whose_end_is_not_known_is_billed_to_its_last_sign_of_life(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    began = platform.clock().timestamp() - 500
    attempts.mark_started(platform, held, from_step=0, started_at=began)
    attempts.record_progress(platform, held, [{"step": 1, "total_steps": 9, "loss": 1.0, "time": began + 3}], phase="train")
    lost = WorkloadStatus(name="w", phase=WorkloadPhase.LOST, started_at=began)
    noticed = replace(platform, clock=lambda: platform.clock() + timedelta(hours=1))
    attempts.finish(noticed, held, replace(ending(failure("node_lost", Fault.PLATFORM, Retry.RESUME)), status=lost, seen=False))
    assert reports(platform, job_id)["ended"].at == reports_of_progress(platform, job_id)


def test_an_attempt_that_nobody_could_follow_is_closed_where_the_database_last_heard_of_it(
    queued: Callable[..., tuple[Platform, str, str]],
) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    began = platform.clock().timestamp() - 500
    attempts.mark_started(platform, held, from_step=0, started_at=began)
    now = {"step": 1, "total_steps": 9, "loss": 1.0, "time": began + 3}
    attempts.record_progress(platform, held, [now], phase="train")
    heard = reports_of_progress(platform, job_id)
    cycle.release(platform, job_id, held.attempt)
    found = reports(platform, job_id)
    assert found["ended"].at == heard
    assert found["ended"].data == {"outcome": "internal", "fault": "platform", "source": "inferred"}
    assert sum(e.amount_micros for e in ledger(platform, job_id)) == 0
    assert len(ledger(platform, job_id)) == 2


def reports_of_progress(platform: Platform, job_id: str) -> Any:
    query = sa.select(sa.func.max(job_events.c.created_at)).where(job_events.c.job_id == job_id, job_events.c.type == "metrics")
    with platform.engine.connect() as conn:
        return conn.execute(query).scalar_one()


def test_a_workload_that_never_started_costs_nothing_and_is_not_reported(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    absent = WorkloadStatus(name="w", phase=WorkloadPhase.ABSENT)
    attempts.finish(platform, held, replace(ending(failure("base_model_changed", Fault.PLATFORM, Retry.NEVER)), status=absent))
    assert reports(platform, job_id) == {}
    assert ledger(platform, job_id) == []
