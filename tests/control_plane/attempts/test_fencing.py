"""An attempt that has lost its reservation writes nothing: its number is over, whatever its step or its agent still believes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from agent.messages import Exit, Heartbeat, Notice, Restored, Skipped
from control_plane.attempts import agents, start
from control_plane.attempts import service as attempts
from control_plane.attempts.service import Claim, Ending
from control_plane.attempts.tables import agents as agents_table
from control_plane.attempts.tables import attempts as attempts_table
from control_plane.attempts.tables import checkpoints
from control_plane.jobs import transitions
from control_plane.jobs.tables import job_events, jobs
from control_plane.platform.context import Platform
from control_plane.platform.protocols import WorkloadPhase, WorkloadStatus
from control_plane.queue import cycle, launches
from control_plane.queue.tables import reservations
from core.errors import Conflict
from tests.support.jobs.claimed_job import asked_to_stop
from tests.support.jobs.started_job import start_job

STEP = {"step": 5, "total_steps": 10, "loss": 1.0, "learning_rate": 0.1, "grad_norm": 1.0, "epoch": 0.5, "num_tokens": 10, "time": 2000.0}
VALIDATION = {"step": 5, "eval_loss": 1.0, "time": 1.0}
NOTICE = Notice(code="disk_space_freed", level="warn", message="still here")
OVER = Exit(exit_code=0, evidence=None, stop_reason=None)
ENDED = WorkloadStatus(name="w", phase=WorkloadPhase.EXITED, exit_code=0, started_at=1000.0, ended_at=2000.0)
WRITES: Mapping[str, Callable[[Platform, Claim], Any]] = {
    "checkpoint": lambda p, c: attempts.record_checkpoint(p, c, step=5, prefix="x", manifest_sha256="0", metrics={}),
    "finished model": lambda p, c: attempts.record_checkpoint(p, c, step=5, prefix="x", manifest_sha256="0", metrics={}, final=True),
    "success": lambda p, c: attempts.finish(
        p, c, Ending(outcome="succeeded", failure=None, last_step=10, trained_tokens=10, status=ENDED)
    ),
    "start": lambda p, c: attempts.mark_started(p, c, started_at=1.0),
    "stop": lambda p, c: asked_to_stop(p, c),
}  # fmt: skip
REFUSED: Mapping[str, Callable[[Platform, Claim], Any]] = {
    "beat": lambda p, c: agents.heartbeat(p, agents.introduce(p, c, may_read=[]), Heartbeat(phase="load")),
    "progress": lambda p, c: agents.heartbeat(p, agents.introduce(p, c, may_read=[]), Heartbeat(phase="train", metrics=(STEP,))),
    "validation": lambda p, c: agents.heartbeat(p, agents.introduce(p, c, may_read=[]), Heartbeat(phase="train", metrics=(VALIDATION,))),
    "event": lambda p, c: agents.heartbeat(p, agents.introduce(p, c, may_read=[]), Heartbeat(notices=(NOTICE,))),
    "end": lambda p, c: agents.heartbeat(p, agents.introduce(p, c, may_read=[]), Heartbeat(exit=OVER)),
    "place to go on from": lambda p, c: agents.restored(p, c, Restored(step=3, skipped=(Skipped(step=4, why="damaged"),))),
}
"""What an agent reports: it is told that its attempt was released."""


def everything(platform: Platform, job_id: str) -> dict[str, list[dict[str, Any]]]:
    """What is stored of the job, also when somebody was last seen at it."""
    of_job = {t: sa.select(t).where((t.c.id if t is jobs else t.c.job_id) == job_id) for t in STORED}
    with platform.engine.connect() as conn:
        return {t.name: [dict(r) for r in conn.execute(query).mappings()] for t, query in of_job.items()}


STORED = (jobs, job_events, checkpoints, reservations, attempts_table, agents_table)


@pytest.mark.parametrize("what", [*WRITES, *REFUSED])
@pytest.mark.parametrize("next_attempt", [False, True])
def test_nothing_that_a_stale_attempt_writes_is_stored(
    platform: Platform, write_chat_rows: Callable[..., Path], what: str, next_attempt: bool
) -> None:
    held = start_job(platform, write_chat_rows)
    agents.introduce(platform, held, may_read=[])
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
    if what in REFUSED:
        with pytest.raises(Conflict, match="holds no reservation"):
            REFUSED[what](platform, held)
    else:
        WRITES[what](platform, held)
    assert everything(platform, held.job_id) == before
    cycle.release(platform, held.job_id, 2)


def test_a_token_opens_nothing_once_its_attempt_was_released(platform: Platform, write_chat_rows: Callable[..., Path]) -> None:
    held = start_job(platform, write_chat_rows)
    token = agents.introduce(platform, held, may_read=[])
    assert agents.held_by(platform, token) == held
    cycle.release(platform, held.job_id, held.attempt)
    for wrong in (token, "", token + "x"):
        with pytest.raises(Conflict, match="holds no reservation"):
            agents.held_by(platform, wrong)


def test_an_attempt_that_is_released_is_to_stop_its_workload(platform: Platform, write_chat_rows: Callable[..., Path]) -> None:
    held = start_job(platform, write_chat_rows)
    assert asked_to_stop(platform, held) is None
    cycle.release(platform, held.job_id, held.attempt)
    assert asked_to_stop(platform, held) == "cancel"


def test_a_replaced_step_that_still_waits_does_not_hide_the_death_of_the_next(
    platform: Platform, write_chat_rows: Callable[..., Path]
) -> None:
    held = start_job(platform, write_chat_rows)
    (due,) = [d for d in launches.due_runs(platform, ("train",)) if d.job_id == held.job_id]
    assert launches.replace_run(platform, due)
    before = everything(platform, held.job_id)
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(start.wait_for_end, platform, held)
        try:
            time.sleep(2 * start.POLL_S)
            assert everything(platform, held.job_id) == before
        finally:
            cycle.release(platform, held.job_id, held.attempt)
        assert waits.result(30).outcome == "internal"


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
