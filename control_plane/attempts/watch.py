"""Watches every running attempt, and ends an attempt once its workload has ended.

One pass compares the attempts' rows with what the launcher sees. It keeps nothing that the database does not have: a process that dies is
replaced by another one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa

from agent.messages import Exit, Facts
from control_plane.attempts import endings, health
from control_plane.attempts import service as attempts
from control_plane.attempts.claims import Claim, Ending
from control_plane.attempts.tables import agents
from control_plane.attempts.tables import attempts as attempts_table
from control_plane.jobs import job_logs
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.platform.protocols import Launcher, WorkloadPhase, WorkloadStatus
from control_plane.platform.records import many
from control_plane.queue.tables import reservations
from ft_assets import layout
from ft_assets.errors import FtError
from ft_assets.training.failures import Evidence, ExitEvidence, Outcome, StopReason, classify
from ft_assets.typed_json import from_json

QUIET_S = 4.0
"""Seconds after a heartbeat was due when the API is asked whether it answers, and a workload that cannot be found counts as gone."""
FORGET_AFTER = timedelta(hours=1)
"""How long the launcher keeps what is left of an ended workload, for operators."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """An attempt whose workload was started and whose reservation is not released."""

    tenant_id: str
    job_id: str
    attempt: int
    workload: str
    started_at: datetime
    heartbeat_at: datetime | None
    facts: Any
    exit: Any


@dataclass(kw_only=True)
class Watcher:
    """Keeps the health of each running attempt in memory between passes. ``answers`` says whether the API reaches the database.

    Time in which the API did not answer, and time before this watcher started, does not count as silence: an agent could not report.
    """

    platform: Platform
    launcher: Launcher
    answers: Callable[[], bool]
    _watches: dict[str, health.Watch] = field(default_factory=dict)
    _seen_at: dict[str, datetime] = field(default_factory=dict)
    """When the launcher last saw a workload run."""
    _stops: dict[str, Future[WorkloadStatus]] = field(default_factory=dict)
    _stopping: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(8, thread_name_prefix="stop"))
    _finishing: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(8, thread_name_prefix="epilogue"))
    """Completes logs and tracked runs, so that a store or tracker that hangs delays no other attempt."""
    _epilogues: list[Future[None]] = field(default_factory=list)
    _away_at: datetime = field(init=False)

    def __post_init__(self) -> None:
        self._away_at = self.platform.clock()

    def look(self) -> list[Ending]:
        """Look at every running attempt once; returns how those ended that have."""
        ended, found = list[Ending](), self._running()
        if any(self._is_quiet(row) for row in found) and not self.answers():
            self._away_at = self.platform.clock()
        for row in found:
            try:
                ended += self._look_at(row)
            except FtError as error:
                log.warning("%s cannot be watched now: %s", row.workload, error.message)
            except Exception:
                log.exception("%s cannot be watched now", row.workload)
        for gone in set(self._watches) - {row.workload for row in found}:
            self._watches.pop(gone)
            self._seen_at.pop(gone, None)
            self._stops.pop(gone, None)
        return ended

    def is_needed(self) -> bool:
        """Whether a reservation is held, so that an attempt runs or may start."""
        with self.platform.engine.connect() as conn:
            return bool(conn.scalar(sa.select(sa.exists().where(reservations.c.released_at.is_(None)))))

    def settle(self) -> None:
        """Wait until the logs and tracked runs of ended attempts are complete."""
        for task in self._epilogues:
            task.result()
        self._epilogues.clear()

    def forget_ended(self) -> int:
        """Have the launcher forget workloads that ended :data:`FORGET_AFTER` ago; returns how many."""
        before = (self.platform.clock() - FORGET_AFTER).timestamp()
        old = [s.name for s in self.launcher.list() if s.ended_at is not None and s.ended_at < before]
        for name in old:
            self.launcher.forget(name)
        return len(old)

    def close(self) -> None:
        for pool in (self._stopping, self._finishing):
            pool.shutdown(wait=False, cancel_futures=True)

    def _running(self, *only: sa.ColumnElement[bool]) -> list[Running]:
        a, r = attempts_table.c, reservations.c
        query = (
            sa.select(jobs.c.tenant_id, a.job_id, a.attempt, a.workload, a.started_at, agents.c.heartbeat_at, agents.c.facts, agents.c.exit)
            .join(r.job_id.table, (r.job_id == a.job_id) & (r.attempt == a.attempt))
            .join(jobs, jobs.c.id == a.job_id)
            .join(agents, (agents.c.job_id == a.job_id) & (agents.c.attempt == a.attempt))
            .where(r.released_at.is_(None), a.started_at.is_not(None), *only)
            .order_by(a.started_at, a.job_id)
        )
        with self.platform.engine.connect() as conn:
            return many(conn, query, Running)

    def _look_at(self, row: Running) -> list[Ending]:
        watch = self._watches.get(row.workload)
        if watch is None:
            held = attempts.claim(self.platform, row.tenant_id, row.job_id)
            if held.attempt != row.attempt:
                return []
            watch = self._watches[row.workload] = health.begin(self.platform, held)
        watch.look()
        status = self.launcher.get(row.workload)
        if status.phase is WorkloadPhase.RUNNING:
            self._seen_at[row.workload] = self.platform.clock()
        if status.phase in (WorkloadPhase.PENDING, WorkloadPhase.RUNNING):
            self._check_signs(row, watch, running=status.phase is WorkloadPhase.RUNNING)
            return []
        stop = self._stops.get(row.workload)
        if stop is not None and not stop.done():
            return []
        fresh = self._running(attempts_table.c.workload == row.workload)  # read again: its last report may have come meanwhile
        if not fresh or (status.phase is not WorkloadPhase.EXITED and fresh[0].exit is None and not self._is_quiet(fresh[0])):
            return []  # nobody saw its end, and its last heartbeat is fresh: it may run where this launcher cannot see it
        return [self._end(watch, fresh[0], status, stalled=stop is not None)]

    def _is_quiet(self, row: Running) -> bool:
        return self._silence_s(row) > _facts(row).next_s + QUIET_S

    def _silence_s(self, row: Running) -> float:
        return (self.platform.clock() - max(row.heartbeat_at or row.started_at, row.started_at)).total_seconds()

    def _check_signs(self, row: Running, watch: health.Watch, *, running: bool) -> None:
        """Judge how long the workload has been silent, and stop one that is silent for too long: its agent may be frozen or cut off."""
        settings = self.platform.settings
        silence_s = min(self._silence_s(row), (self.platform.clock() - self._away_at).total_seconds())
        watch.record_silence(silence_s=silence_s + _facts(row).silence_s, running=running)
        stop = self._stops.get(row.workload)
        failed = stop.exception() if stop is not None and stop.done() else None
        if silence_s <= settings.heartbeat_timeout_s or (stop is not None and failed is None):
            return
        fresh = self._running(attempts_table.c.workload == row.workload)
        if fresh and self._silence_s(fresh[0]) > settings.heartbeat_timeout_s:
            log.warning("%s has been silent for %.0f s: it is stopped%s", row.workload, silence_s, f" again: {failed}" if failed else "")
            self._stops[row.workload] = self._stopping.submit(self.launcher.stop, row.workload, grace_s=settings.heartbeat_grace_s)

    def _end(self, watch: health.Watch, row: Running, status: WorkloadStatus, *, stalled: bool) -> Ending:
        """End the attempt of a workload that is gone: judge its evidence, release its reservation, bill it, move its job."""
        ending = judge(self.platform, watch.held, row, status, stalled=stalled, seen_at=self._seen_at.get(row.workload))
        watch.judge_end(ending)
        attempts.finish(self.platform, watch.held, ending)
        self._epilogues = [task for task in self._epilogues if not task.done()]
        self._epilogues.append(self._finishing.submit(_complete, self.platform, watch, ending))
        return ending


def _complete(platform: Platform, watch: health.Watch, ending: Ending) -> None:
    """Complete the log and the tracked run of an ended attempt."""
    held = watch.held
    try:
        job_logs.finish(platform.objects, layout.attempt_prefix(held.tenant, held.job_id, held.attempt))
    except (FtError, OSError) as error:
        log.warning("the log of %s stays in pieces: %s", held.workload, error)
    watch.end_tracking(ending)
    health.flush(platform)


def judge(
    platform: Platform, held: Claim, row: Running, status: WorkloadStatus, *, stalled: bool = False, seen_at: datetime | None = None
) -> Ending:
    """Return how the attempt ended, by what its agent reported and what the launcher saw.

    If the launcher did not see it end, it ended when it was last seen (`seen_at`) or heard of.
    """
    said = None if row.exit is None else from_json(Exit, row.exit)
    facts = _facts(row)
    evidence = _evidence(said)
    committed = attempts.committed(platform, held.job_id)
    last_step = max(facts.last_step, evidence.step if evidence else 0)
    failure = classify(
        Evidence(
            phase=WorkloadPhase.ABSENT if said is not None and said.exit_code is None and said.error is None else status.phase,
            exit=evidence,
            exit_code=status.exit_code if said is None else said.exit_code,
            stop_reason=_stop_reason(platform, held, said, stalled=stalled),
            stall=said.stall if said else None,
            spec=held.spec,
            committed_step=committed[0].step if committed else 0,
            last_step=last_step,
            history=endings.history(platform, held.job_id),
        )
    )
    seen = status.ended_at is not None
    if not seen:
        last_sign = max(sign for sign in (row.started_at, row.heartbeat_at, seen_at) if sign is not None)
        status = replace(status, ended_at=last_sign.timestamp(), started_at=row.started_at.timestamp())
    return Ending(
        outcome=failure.code if failure else "succeeded", failure=failure, last_step=last_step,
        trained_tokens=evidence.trained_tokens if evidence else 0, status=status, seen=seen, again_s=facts.again_s,
        began_at=facts.began_at, kept_until=facts.kept_until,
    )  # fmt: skip


def _facts(row: Running) -> Facts:
    return Facts() if row.facts is None else from_json(Facts, row.facts)


def _evidence(said: Exit | None) -> ExitEvidence | None:
    """Return the training process's own evidence, or the agent's, if it could not start or finish the training."""
    if said is None:
        return None
    if said.error is None:
        return None if said.evidence is None else from_json(ExitEvidence, said.evidence)
    code = str(said.error["code"])
    outcome = Outcome.DISK_FULL if code == Outcome.DISK_FULL else Outcome.INTERNAL
    return ExitEvidence(outcome=outcome, step=0, total_steps=0, message=str(said.error["message"]), detail={"code": code})


def _stop_reason(platform: Platform, held: Claim, said: Exit | None, *, stalled: bool) -> StopReason | None:
    """Return why the workload was stopped: as its agent says, else as it was asked, else because it was silent."""
    if said is not None:
        return None if said.stop_reason is None else StopReason(said.stop_reason)
    with platform.engine.connect() as conn:
        asked = attempts.requested_stop(conn, held)
    return StopReason(asked) if asked else StopReason.STALLED if stalled else None
