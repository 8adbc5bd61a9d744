"""A claimed job, the ending of its attempt and what the database records of both."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from agent.messages import Heartbeat, HeartbeatAnswer, Restored
from control_plane.attempts import agents, endings
from control_plane.attempts import service as attempts
from control_plane.attempts.service import Claim, Ending
from control_plane.billing.tables import ledger_entries
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.platform.protocols import WorkloadPhase, WorkloadStatus
from control_plane.queue import cycle
from core.errors import Fault
from engine.training.failures import Evidence, FailureClass, Retry, StopReason, classify_failure

NUMBERS = itertools.count(1)
"""Of heartbeats."""


def held_by(platform: Platform, tenant: str, job_id: str) -> Claim:
    cycle.run_cycle(platform)
    return attempts.claim(platform, tenant, job_id)


def report(platform: Platform, held: Claim, *metrics: Mapping[str, Any], phase: str = "train", **fields: Any) -> HeartbeatAnswer:
    """What the attempt's agent does: one heartbeat, with lines of ``metrics.jsonl``."""
    token, number = agents.introduce(platform, held, may_read=[]), next(NUMBERS)
    return agents.heartbeat(platform, token, Heartbeat(phase=phase, metrics=metrics, number=number, first_notice=100 * number, **fields))


def resume_from(platform: Platform, held: Claim, step: int) -> None:
    """What the attempt's agent does once it knows where it begins."""
    agents.introduce(platform, held, may_read=[])
    agents.restored(platform, held, Restored(step=step))


def asked_to_stop(platform: Platform, held: Claim) -> str | None:
    with platform.engine.connect() as conn:
        return attempts.requested_stop(conn, held)


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


def lose(platform: Platform, held: Claim, *, exit_code: int | None = -9, stop: StopReason | None = None) -> JobState:
    """End the attempt as one whose process is gone without a report."""
    evidence = Evidence(
        phase="lost" if exit_code is None else "exited", exit_code=exit_code, stop_reason=stop, spec=held.spec,
        history=endings.history(platform, held.job_id),
    )  # fmt: skip
    return attempts.finish(platform, held, ending(classify_failure(evidence), step=0))


def give_up(platform: Platform, tenant: str, job_id: str) -> None:
    """Lose a queued job's attempts until it is a dead letter."""
    states = [lose(platform, held_by(platform, tenant, job_id)) for _ in range(3)]
    assert states == [JobState.QUEUED, JobState.QUEUED, JobState.DEAD_LETTER]
