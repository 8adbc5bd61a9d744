"""Watches every running attempt, and ends an attempt once its workload has ended.

One pass compares the attempts' rows with what the launcher sees. It keeps nothing that the database does not have: a process that dies is
replaced by another one.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import sqlalchemy as sa

from agent.messages import Exit, Facts
from control_plane.attempts import endings, evaluation_endings, health
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
from core import layout
from core.errors import FtError
from core.typed_json import from_json
from core.workload import Kind
from engine.training import Evidence, ExitEvidence, Outcome, StopReason, classify_failure

QUIET_S = 4.0
"""Seconds after a heartbeat was due when the API is asked whether it answers, and a workload that cannot be found counts as gone."""
GANG_GRACE_S = 30.0
"""Seconds between SIGTERM and SIGKILL for what is left of a gang: rank 0 of a replicated model can still commit its last step."""
FORGET_AFTER = timedelta(hours=1)
"""How long the launcher keeps what is left of an ended workload, for operators."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """What the agent on one node of a running attempt has reported."""

    tenant_id: str
    job_id: str
    attempt: int
    workload: str
    started_at: datetime | None
    """None until its workload runs: it may wait for its nodes."""
    node: int
    heartbeat_at: datetime | None
    silence_s: float
    """Seconds since its last heartbeat, or since the start, by the clock of the database; 0 before the start."""
    facts: Any
    exit: Any

    @property
    def last_sign(self) -> datetime | None:
        return self.heartbeat_at or self.started_at

    @property
    def read_facts(self) -> Facts:
        return Facts() if self.facts is None else from_json(Facts, self.facts)

    @property
    def read_exit(self) -> Exit | None:
        return None if self.exit is None else from_json(Exit, self.exit)


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """An attempt whose agents have a token and whose reservation is not released."""

    nodes: tuple[Node, ...]
    """In order; the first one leads."""

    @property
    def leader(self) -> Node:
        return self.nodes[0]

    @property
    def workload(self) -> str:
        return self.leader.workload

    @property
    def silence_s(self) -> float:
        """Of the node that has been silent for longest; one that has reported its end is not."""
        return max((node.silence_s for node in self.nodes if node.exit is None), default=0.0)

    @property
    def is_quiet(self) -> bool:
        """Whether a heartbeat of a node that has not ended is late."""
        return any(node.exit is None and node.silence_s > node.read_facts.next_s + QUIET_S for node in self.nodes)

    @property
    def ended(self) -> bool:
        """Whether every node has reported its end."""
        return all(node.exit is not None for node in self.nodes)


@dataclass(kw_only=True)
class Watcher:
    """Keeps the health of each running attempt in memory between passes. ``answers`` says whether the API reaches the database.

    Time in which the API did not answer, and time before this watcher started, does not count as silence: an agent could not report.
    """

    platform: Platform
    launcher: Launcher
    answers: Callable[[], bool]
    _held: dict[str, Claim] = field(default_factory=dict)
    _watches: dict[str, health.Watch] = field(default_factory=dict)
    """Of trainings."""
    _seen_at: dict[str, datetime] = field(default_factory=dict)
    """When the launcher last saw a workload run."""
    _stops: dict[str, Future[WorkloadStatus]] = field(default_factory=dict)
    _waits: dict[str, str] = field(default_factory=dict)
    """Why workloads have not started, as last recorded."""
    _silent: set[str] = field(default_factory=set)
    """Workloads that were stopped because one of their nodes was silent."""
    _stopping: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(8, thread_name_prefix="stop"))
    _finishing: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(8, thread_name_prefix="epilogue"))
    """Completes logs and tracked runs, so that a store or tracker that hangs delays no other attempt."""
    _epilogues: list[Future[None]] = field(default_factory=list)
    _lost: dict[str, float] = field(default_factory=dict)
    """When the launcher first said of a workload that it is lost."""
    _took_over: bool = False
    _away_at: float = field(default_factory=time.monotonic)

    def look(self) -> list[Ending]:
        """Look at every running attempt once; returns how those ended that have."""
        if not self._took_over:
            self._complete_left()
        ended, found = list[Ending](), self._running()
        if any(row.is_quiet for row in found) and not self.answers():
            self._away_at = time.monotonic()
        for row in found:
            with logged(f"{row.workload} cannot be watched now"):
                ended += self._look_at(row)
        for gone in {*self._held, *self._waits} - {row.workload for row in found}:
            for kept in (self._held, self._watches, self._seen_at, self._stops, self._waits):
                kept.pop(gone, None)
            self._silent.discard(gone)
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
        """Have the launcher forget workloads that ended, or were found to be lost, :data:`FORGET_AFTER` ago; returns how many it could."""
        now, known = self.platform.clock().timestamp(), self.launcher.list()
        lost = [s.name for s in known if s.phase is WorkloadPhase.LOST]
        self._lost = {name: self._lost.get(name, now) for name in lost}
        ends = {s.name: s.ended_at for s in known if s.ended_at is not None} | self._lost
        old = [name for name, at in ends.items() if at < now - FORGET_AFTER.total_seconds()]
        forgotten = 0
        for name in old:
            with logged(f"{name} cannot be forgotten now"):
                self.launcher.forget(name)
                forgotten += 1
        return forgotten

    def close(self) -> None:
        for pool in (self._stopping, self._finishing):
            pool.shutdown(wait=False, cancel_futures=True)

    def _running(self, *only: sa.ColumnElement[bool]) -> list[Running]:
        a, r = attempts_table.c, reservations.c
        silence = sa.func.clock_timestamp() - sa.func.coalesce(agents.c.heartbeat_at, a.started_at, sa.func.clock_timestamp())
        query = (
            sa.select(jobs.c.tenant_id, a.job_id, a.attempt, a.workload, a.started_at)
            .add_columns(agents.c.node, agents.c.heartbeat_at, agents.c.facts, agents.c.exit)
            .add_columns(sa.cast(sa.func.extract("epoch", silence), sa.Float).label("silence_s"))
            .join(r.job_id.table, (r.job_id == a.job_id) & (r.attempt == a.attempt))
            .join(jobs, jobs.c.id == a.job_id)
            .join(agents, (agents.c.job_id == a.job_id) & (agents.c.attempt == a.attempt))
            .where(r.released_at.is_(None), *only)
            .order_by(a.started_at, a.job_id, agents.c.node)
        )
        with self.platform.engine.connect() as conn:
            found = many(conn, query, Node)
        return [Running(nodes=tuple(nodes)) for _, nodes in itertools.groupby(found, key=lambda node: node.workload)]

    def _look_at(self, row: Running) -> list[Ending]:
        if row.leader.started_at is None:
            return self._look_at_unstarted(row)
        held = self._held.get(row.workload)
        if held is None:
            held = attempts.claim(self.platform, row.leader.tenant_id, row.leader.job_id)
            if held.attempt != row.leader.attempt:
                return []
            self._held[row.workload] = held
            if held.kind is Kind.TRAIN:
                self._watches[row.workload] = health.begin(self.platform, held)
        if (watch := self._watches.get(row.workload)) is not None:
            watch.look()
        status = self.launcher.get(row.workload)
        if status.phase is WorkloadPhase.RUNNING:
            self._seen_at[row.workload] = self.platform.clock()
        if status.phase in (WorkloadPhase.PENDING, WorkloadPhase.RUNNING):
            self._check_signs(row, watch, running=status.phase is WorkloadPhase.RUNNING)
            if status.broken:
                self._stop(row.workload, "one of its nodes is gone", grace_s=GANG_GRACE_S)
            return []
        stop = self._stops.get(row.workload)
        if stop is not None and not stop.done():
            return []
        fresh = self._running(attempts_table.c.workload == row.workload)  # read again: its last report may have come meanwhile
        if not fresh or (status.phase is not WorkloadPhase.EXITED and not fresh[0].ended and not fresh[0].is_quiet):
            return []  # nobody saw its end, and its last heartbeat is fresh: it may run where this launcher cannot see it
        return [self._end(held, fresh[0], status, stalled=row.workload in self._silent)]

    def _look_at_unstarted(self, row: Running) -> list[Ending]:
        """Record that a workload has started, or why not yet. One that is asked to stop meanwhile is stopped, and one that is lost ends."""
        held, status = attempts.claim(self.platform, row.leader.tenant_id, row.leader.job_id), self.launcher.get(row.workload)
        if held.attempt != row.leader.attempt or status.phase is WorkloadPhase.ABSENT:
            return []
        if status.started_at is not None:
            attempts.mark_started(self.platform, held, started_at=status.started_at, nodes=status.nodes)
            return []
        if status.phase is not WorkloadPhase.PENDING:
            return [self._end(held, row, status, stalled=False)]
        if self._waits.get(row.workload) != status.reason:
            self._waits[row.workload] = status.reason
            attempts.record_wait(self.platform, held, status.reason)
        with self.platform.engine.connect() as conn:
            requested = attempts.requested_stop(conn, held)
        if requested is not None:
            self._stop(row.workload, f"{requested} was requested before it started", grace_s=GANG_GRACE_S)
        return []

    def _check_signs(self, row: Running, watch: health.Watch | None, *, running: bool) -> None:
        """Judge how long the workload has been silent, and stop one that is silent for too long: its agent may be frozen or cut off."""
        settings = self.platform.settings
        silence_s = min(row.silence_s, time.monotonic() - self._away_at)
        if watch is not None:
            watch.record_silence(silence_s=silence_s + max(node.read_facts.silence_s for node in row.nodes), running=running)
        if silence_s <= settings.heartbeat_timeout_s:
            return
        fresh = self._running(attempts_table.c.workload == row.workload)
        if fresh and fresh[0].silence_s > settings.heartbeat_timeout_s:
            self._silent.add(row.workload)
            self._stop(row.workload, f"it has been silent for {silence_s:.0f} s", grace_s=settings.heartbeat_grace_s)

    def _stop(self, workload: str, why: str, *, grace_s: float) -> None:
        """Have the launcher stop the workload on every node, once more if that failed."""
        stop = self._stops.get(workload)
        failed = stop.exception() if stop is not None and stop.done() else None
        if stop is None or failed is not None:
            log.warning("%s is stopped%s: %s", workload, f" again ({failed})" if failed else "", why)
            self._stops[workload] = self._stopping.submit(self.launcher.stop, workload, grace_s=grace_s)

    def _end(self, held: Claim, row: Running, status: WorkloadStatus, *, stalled: bool) -> Ending:
        """End the attempt of a workload that is gone: judge its evidence, release its reservation, bill it, move its job."""
        seen_at, watch = self._seen_at.get(row.workload), self._watches.get(row.workload)
        ending = judge(self.platform, held, row, status, stalled=stalled, seen_at=seen_at)
        if watch is not None:
            watch.judge_end(ending)
        attempts.finish(self.platform, held, ending)
        self._epilogues = [task for task in self._epilogues if not task.done()]
        end_tracking = partial(watch.end_tracking, ending) if watch is not None else _nothing
        self._epilogues.append(self._finishing.submit(_complete, self.platform, held, end_tracking))
        return ending

    def _complete_left(self) -> None:
        """Complete attempts that ended while no watcher could, such as the one before this, which ended with its worker."""
        a = attempts_table.c
        query = sa.select(jobs.c.tenant_id, a.job_id, a.attempt, a.outcome).join(jobs, jobs.c.id == a.job_id)
        left = query.where(a.completed_at.is_(None), a.ended_at.is_not(None), a.started_at.is_not(None))
        with self.platform.engine.connect() as conn:
            rows = conn.execute(left.order_by(a.ended_at)).all()
        self._took_over = True
        for row in rows:
            try:
                held = attempts.past_claim(self.platform, row.tenant_id, row.job_id, row.attempt)
            except FtError as error:
                log.warning("%s-a%d cannot be completed: %s", row.job_id, row.attempt, error.message)
                continue
            end = partial(health.track_again, self.platform, held, outcome=row.outcome) if held.kind is Kind.TRAIN else _nothing
            self._epilogues.append(self._finishing.submit(_complete, self.platform, held, end))


@contextmanager
def logged(failure: str) -> Iterator[None]:
    """Log what fails, so that the watch goes on with the rest and keeps what it knows."""
    try:
        yield
    except FtError as error:
        log.warning("%s: %s", failure, error.message)
    except Exception:
        log.exception(failure)


def _nothing() -> None:
    """An evaluation or an export has no tracked run of its own."""


def _complete(platform: Platform, held: Claim, end_tracking: Callable[[], None]) -> None:
    """Complete the log and the tracked run of an ended attempt."""
    stored = True
    try:
        job_logs.finish(platform.objects, layout.attempt_prefix(held.tenant, held.job_id, held.attempt))
    except (FtError, OSError) as error:
        log.warning("the log of %s stays in pieces: %s", held.workload, error)
        stored = False
    end_tracking()
    health.flush(platform)
    if stored:
        with platform.engine.begin() as conn:
            conn.execute(sa.update(attempts_table).where(attempts.of_attempt(held)).values(completed_at=platform.clock()))


def judge(
    platform: Platform, held: Claim, row: Running, status: WorkloadStatus, *, stalled: bool = False, seen_at: datetime | None = None
) -> Ending:
    """Return how the attempt ended, by what its agent reported and what the launcher saw.

    If the launcher did not see it end, it ended when it was last seen (`seen_at`) or heard of.
    """
    seen, status = status.ended_at is not None, _ended(row, status, seen_at)
    if held.kind is not Kind.TRAIN:
        said = row.leader.read_exit
        asked = None if said is not None else _stop_reason(platform, held, said, stalled=stalled, evicted=status.evicted)
        cancelled, preempted = asked is StopReason.CANCEL, asked is StopReason.PREEMPT
        return replace(evaluation_endings.judge(said, status, cancelled=cancelled, stalled=stalled, asked=preempted), seen=seen)
    said, facts = cause(row), row.leader.read_facts
    evidence = _evidence(said)
    committed = attempts.committed(platform, held.job_id)
    last_step = max(facts.last_step, evidence.step if evidence else 0)
    failure = classify_failure(
        Evidence(
            phase=WorkloadPhase.ABSENT if said is not None and said.exit_code is None and said.error is None else status.phase,
            exit=evidence,
            exit_code=status.exit_code if said is None else said.exit_code,
            stop_reason=_stop_reason(platform, held, said, stalled=stalled, evicted=status.evicted),
            stall=said.stall if said else None,
            spec=held.spec,
            committed_step=committed[0].step if committed else 0,
            last_step=last_step,
            history=endings.history(platform, held.job_id),
        )
    )
    return Ending(
        outcome=failure.code if failure else "succeeded", failure=failure, last_step=last_step,
        trained_tokens=evidence.trained_tokens if evidence else 0, status=status, seen=seen, again_s=facts.again_s,
        began_at=facts.began_at, kept_until=facts.kept_until,
    )  # fmt: skip


def _ended(row: Running, status: WorkloadStatus, seen_at: datetime | None) -> WorkloadStatus:
    """Return the status of an ended workload; one whose end nobody saw ended at its last sign of life, or when it was last seen."""
    if status.ended_at is not None:
        return status
    signs = [sign.timestamp() for sign in (*(node.last_sign for node in row.nodes), seen_at) if sign is not None]
    started = row.leader.started_at
    return replace(status, ended_at=max(signs, default=None), started_at=None if started is None else started.timestamp())


def cause(row: Running) -> Exit | None:
    """Return the report of the node that explains the end of the gang; None if that node did not report.

    1. What a node's training process, or its agent, explains, unless that is an internal error: the leader's first. An internal error may
       only be how another node's death looked.
    2. A node that did not report: it was lost.
    3. An internal error.
    4. A node whose processes ended without explanation, and not because another node had ended.
    5. What the leader reports, if all were stopped. Which of the nodes heard of the request to stop makes no difference.
    """
    reports = [node.read_exit for node in row.nodes]
    known = [said for said in reports if said is not None]
    explained = [
        (said, found.outcome) for said in known if (found := _evidence(said)) is not None and found.outcome is not Outcome.PREEMPTED
    ]
    if told := [
        said for said, outcome in explained if outcome is not Outcome.INTERNAL and (said is reports[0] or outcome is not Outcome.SUCCEEDED)
    ]:
        return told[0]
    if None in reports:
        return None
    if internal := [said for said, outcome in explained if outcome is Outcome.INTERNAL]:
        return internal[0]
    asked = next((said.stop_reason for said in known if said.stop_reason is not None), None)
    if asked is None and (alone := [said for said in known if said.evidence is None and not said.follows]):
        return alone[0]
    return replace(known[0], stop_reason=asked, stall=next((said.stall for said in known if said.stall), None))


def _evidence(said: Exit | None) -> ExitEvidence | None:
    """Return the training process's own evidence, or the agent's, if it could not start or finish the training."""
    if said is None:
        return None
    if said.error is None:
        return None if said.evidence is None else from_json(ExitEvidence, said.evidence)
    code = str(said.error["code"])
    outcome = Outcome.DISK_FULL if code == Outcome.DISK_FULL else Outcome.INTERNAL
    return ExitEvidence(outcome=outcome, step=0, total_steps=0, message=str(said.error["message"]), detail={"code": code})


def _stop_reason(platform: Platform, held: Claim, said: Exit | None, *, stalled: bool, evicted: bool) -> StopReason | None:
    """Return why the workload was stopped: as its agent says, else as it was asked, else because its nodes were taken or it was silent."""
    if said is not None:
        return None if said.stop_reason is None else StopReason(said.stop_reason)
    with platform.engine.connect() as conn:
        asked = attempts.requested_stop(conn, held)
    return StopReason(asked) if asked else StopReason.PREEMPT if evicted else StopReason.STALLED if stalled else None
