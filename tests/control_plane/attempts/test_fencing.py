"""A follower that has lost its reservation writes nothing: its attempt's number is over, whatever it still believes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.attempts import service as attempts
from control_plane.attempts.service import Claim, Ending
from control_plane.attempts.tables import attempts as attempts_table
from control_plane.attempts.tables import checkpoints
from control_plane.jobs import transitions
from control_plane.jobs.tables import job_events, jobs
from control_plane.platform.context import Platform
from control_plane.platform.job_events import Event
from control_plane.platform.protocols import WorkloadPhase, WorkloadStatus
from control_plane.queue import cycle, launches
from control_plane.queue.tables import reservations
from tests.support.jobs.started_job import start_job

STEP = {"step": 5, "total_steps": 10, "loss": 1.0, "learning_rate": 0.1, "grad_norm": 1.0, "epoch": 0.5, "num_tokens": 10, "time": 2000.0}
ENDED = WorkloadStatus(name="w", phase=WorkloadPhase.EXITED, exit_code=0, started_at=1000.0, ended_at=2000.0)
WRITES: Mapping[str, Callable[[Platform, Claim], Any]] = {
    "progress": lambda p, c: attempts.record_progress(p, c, [STEP], phase="train"),
    "validation": lambda p, c: attempts.record_progress(p, c, [], phase="train", validation=[{"step": 5, "eval_loss": 1.0, "time": 1.0}]),
    "checkpoint": lambda p, c: attempts.record_checkpoint(p, c, step=5, prefix="x", manifest_sha256="0", metrics={}),
    "finished model": lambda p, c: attempts.record_checkpoint(p, c, step=5, prefix="x", manifest_sha256="0", metrics={}, final=True),
    "event": lambda p, c: attempts.tell(p, c, Event(code="note", message="still here")),
    "success": lambda p, c: attempts.finish(
        p, c, Ending(outcome="succeeded", failure=None, last_step=10, trained_tokens=10, status=ENDED)
    ),
    "start": lambda p, c: attempts.mark_started(p, c, from_step=3, started_at=1.0),
    "place to go on from": lambda p, c: attempts.mark_restored(p, c, from_step=3),
    "beat": lambda p, c: attempts.requested_stop(p, c),
}  # fmt: skip


def everything(platform: Platform, job_id: str) -> dict[str, list[dict[str, Any]]]:
    """What is stored of the job, also when somebody was last seen at it."""
    of_job = {t: sa.select(t).where((t.c.id if t is jobs else t.c.job_id) == job_id) for t in STORED}
    with platform.engine.connect() as conn:
        return {t.name: [dict(r) for r in conn.execute(query).mappings()] for t, query in of_job.items()}


STORED = (jobs, job_events, checkpoints, reservations, attempts_table)


@pytest.mark.parametrize("what", WRITES)
@pytest.mark.parametrize("next_attempt", [False, True])
def test_nothing_that_a_stale_follower_writes_is_stored(
    platform: Platform, write_chat_rows: Callable[..., Path], what: str, next_attempt: bool
) -> None:
    held = start_job(platform, write_chat_rows)
    if what in ("start", "place to go on from"):  # it was released before it had come that far
        with platform.engine.begin() as conn:
            conn.execute(sa.update(attempts_table).where(attempts_table.c.job_id == held.job_id).values(started_at=None, from_step=None))
    cycle.release(platform, held.job_id, held.attempt)
    if next_attempt:
        with platform.engine.begin() as conn:
            granted = {"job_id": held.job_id, "attempt": 2, "pool": held.pool, "num_gpus": 1, "granted_at": platform.clock()}
            conn.execute(sa.insert(reservations).values(granted))
            conn.execute(sa.insert(attempts_table).values(job_id=held.job_id, attempt=2, workload=f"{held.job_id}-a2"))
    before = everything(platform, held.job_id)
    WRITES[what](platform, held)
    assert everything(platform, held.job_id) == before
    cycle.release(platform, held.job_id, 2)


def test_a_follower_that_is_released_is_to_stop_its_workload(platform: Platform, write_chat_rows: Callable[..., Path]) -> None:
    held = start_job(platform, write_chat_rows)
    assert attempts.requested_stop(platform, held) is None
    cycle.release(platform, held.job_id, held.attempt)
    assert attempts.requested_stop(platform, held) == "cancel"


def test_a_step_that_was_replaced_beats_for_nobody(platform: Platform, write_chat_rows: Callable[..., Path]) -> None:
    held = start_job(platform, write_chat_rows)
    turn = transitions.run_numbers(platform, held.job_id)
    transitions.record_heartbeat(platform, held.job_id, turn)
    seen = everything(platform, held.job_id)["jobs"][0]["heartbeat_at"]
    assert seen is not None
    (due,) = [d for d in launches.due_runs(platform, ("train",)) if d.job_id == held.job_id]
    assert launches.replace_run(platform, due)
    before = everything(platform, held.job_id)
    transitions.record_heartbeat(platform, held.job_id, turn)
    assert everything(platform, held.job_id) == before
    transitions.record_heartbeat(platform, held.job_id, transitions.run_numbers(platform, held.job_id))
    assert everything(platform, held.job_id) != before
    cycle.release(platform, held.job_id, held.attempt)
