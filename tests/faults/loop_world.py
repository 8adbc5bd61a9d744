"""A small cluster whose time is told: jobs arrive, train, make room and end through the service, and every process of it may die.

Nothing is kept in memory between ticks: whoever goes on after a death finds the whole world in the database and in one file,
the clock.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Engine

from agent.messages import Heartbeat, Restored
from control_plane.attempts import agents
from control_plane.attempts import service as attempts
from control_plane.attempts.service import Claim, Ending
from control_plane.attempts.tables import attempts as attempts_table
from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.queue_entry import mark_packed
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.jobs.transitions import transition
from control_plane.platform.context import Logins, Platform
from control_plane.platform.job_states import FINAL, JobState
from control_plane.platform.protocols import WorkloadPhase, WorkloadStatus
from control_plane.queue import cycle
from control_plane.queue.snapshot import has_result
from control_plane.queue.tables import reservations
from control_plane.tenants import service as tenants
from core.errors import Conflict, Fault
from core.workload import Kind
from engine.training.failures import FailureClass, Retry
from tests.support.jobs.training_specs import SPEC

POOLS = """
pools:
  - name: small
    gpu_type: local
    nodes: [{prefix: n, count: 2, gpus: 2}]
"""
GPUS = {"n-0": 2, "n-1": 2}
BEGIN = datetime(2026, 5, 4, 8, tzinfo=UTC)
TICK = timedelta(minutes=10)
STEPS = 10
PREEMPTED = FailureClass(code="preempted", fault=Fault.PLATFORM, retry=Retry.RESUME, message="made room", remedy="")
PAUSED = FailureClass(code="paused", fault=Fault.USER, retry=Retry.NEVER, message="paused", remedy="resume")
CANCELLED = FailureClass(code="cancelled", fault=Fault.USER, retry=Retry.NEVER, message="cancelled", remedy="")


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A job of the world: when it joins the queue, and how long it takes."""

    job_id: str
    tenant: str
    num_gpus: int
    arrives: int
    """Tick."""
    ticks: int
    """That its training takes on its GPUs."""


@dataclass(frozen=True, kw_only=True)
class World:
    platform: Platform
    clock_file: Path
    planned: Sequence[Planned]
    tenants: Sequence[str]

    @property
    def tick(self) -> int:
        return int(self.clock_file.read_text())

    def set_tick(self, tick: int) -> None:
        new = self.clock_file.with_suffix(".new")
        new.write_text(str(tick))
        new.replace(self.clock_file)

    def over(self, engine: Engine) -> World:
        """The same world through another connection, told by its own clock."""
        return replace(
            self, platform=replace(self.platform, logins=Logins(platform=engine, operator=engine, tenant=engine), clock=self.now)
        )

    def now(self) -> datetime:
        return BEGIN + self.tick * TICK

    def run(self, *, ticks: int = 200) -> None:
        """Live until every job has ended."""
        for _ in range(ticks):
            self.live()
            if not self.open_jobs():
                return
            self.set_tick(self.tick + 1)

    def live(self) -> None:
        """One tick, which may be lived again: arrivals, a round, what the trainings do, and a round for what they left."""
        for one in self.planned:
            if one.arrives <= self.tick and self.state(one.job_id) == JobState.VALIDATING:
                self.pack(one)
        self._wishes()
        cycle.run_cycle(self.platform)
        for held in self._held():
            (self._train if held.kind is Kind.TRAIN else self._answer)(held)
        self._evaluate()
        cycle.run_cycle(self.platform)

    def pack(self, one: Planned) -> None:
        """The job joins the queue."""
        spec, seconds = replace(SPEC, world_size=one.num_gpus), one.ticks * TICK.total_seconds()
        mark_packed(self.platform, one.tenant, one.job_id, spec=spec, total_steps=STEPS, expected_s=seconds)

    def _wishes(self) -> None:
        """What tenants ask for: one cancels a job while it runs or waits, one pauses another and resumes it later."""
        paused, cancelled = self.planned[1], self.planned[3]
        try:
            if self.tick == 3:
                jobs.pause(self.platform, paused.tenant, paused.job_id)
            if self.tick >= 6 and self.state(paused.job_id) == JobState.PAUSED:
                jobs.resume(self.platform, paused.tenant, paused.job_id)
            if self.tick == 5:
                jobs.cancel(self.platform, cancelled.tenant, cancelled.job_id)
        except Conflict:
            return  # it has ended, or is about to

    def _held(self) -> list[Claim]:
        query = sa.select(reservations.c.job_id, jobs_table.c.tenant_id).join(jobs_table, jobs_table.c.id == reservations.c.job_id)
        with self.platform.engine.connect() as conn:
            rows = conn.execute(query.where(reservations.c.released_at.is_(None)).order_by(reservations.c.job_id)).all()
        return [attempts.claim(self.platform, r.tenant_id, r.job_id) for r in rows]

    def _train(self, held: Claim) -> None:
        """What the workload of an attempt and those who watch it would have done by now."""
        platform, now = self.platform, self.now()
        with platform.engine.connect() as conn:
            this = (attempts_table.c.job_id == held.job_id) & (attempts_table.c.attempt == held.attempt)
            attempt = conn.execute(sa.select(attempts_table).where(this)).one()
        saved = max((c.step for c in attempts.committed(platform, held.job_id)), default=0)
        if attempt.started_at is None:
            agents.introduce(platform, held, may_read=[])
            agents.restored(platform, held, Restored(step=saved))
            attempts.mark_started(platform, held, started_at=now.timestamp())
            return
        ticks = next(p.ticks for p in self.planned if p.job_id == held.job_id)
        ran = (now - attempt.started_at) / TICK
        step = min(STEPS, (attempt.from_step or 0) + int(ran * STEPS / ticks))
        if step > (attempt.from_step or 0):
            lines = [{"step": step, "total_steps": STEPS, "loss": 1.0, "learning_rate": 1e-3, "time": now.timestamp()}]
            agents.heartbeat(platform, agents.introduce(platform, held, may_read=[]), Heartbeat(phase="train", metrics=tuple(lines)))
        if step > saved:
            attempts.record_checkpoint(
                platform, held, step=step, prefix=f"p/{held.workload}/{step}", manifest_sha256="0", metrics={}, final=step == STEPS
            )
        failure = self._why_it_ends(held.job_id)
        if step == STEPS or failure is not None:
            self._finish(held, None if step == STEPS else failure, step, attempt.started_at)

    def _answer(self, held: Claim) -> None:
        """What the workload of an evaluation does: it ends in the tick after its start."""
        with self.platform.engine.connect() as conn:
            this = (attempts_table.c.job_id == held.job_id) & (attempts_table.c.attempt == held.attempt)
            started = conn.execute(sa.select(attempts_table.c.started_at).where(this)).scalar_one()
            stop = attempts.requested_stop(conn, held)
        if started is None:
            agents.introduce(self.platform, held, may_read=[])
            attempts.mark_started(self.platform, held, started_at=self.now().timestamp())
        else:
            self._finish(held, CANCELLED if stop else None, 0, started)

    def _why_it_ends(self, job_id: str) -> FailureClass | None:
        with self.platform.engine.connect() as conn:
            job = conn.execute(sa.select(jobs_table.c.state, jobs_table.c.stop_requested).where(jobs_table.c.id == job_id)).one()
        if JobState(job.state) in FINAL:
            return CANCELLED
        return {"pause": PAUSED, "preempt": PREEMPTED}.get(job.stop_requested or "")

    def _finish(self, held: Claim, failure: FailureClass | None, step: int, started: datetime) -> None:
        status = WorkloadStatus(
            name=held.workload, phase=WorkloadPhase.EXITED, exit_code=0, started_at=started.timestamp(), ended_at=self.now().timestamp()
        )
        code = failure.code if failure else "succeeded"
        attempts.finish(self.platform, held, Ending(outcome=code, failure=failure, last_step=step, trained_tokens=9, status=status))

    def _evaluate(self) -> None:
        """Conclude the jobs whose evaluation has its result."""
        answered = has_result(jobs_table.c.id, None)
        query = sa.select(jobs_table.c.id).where(jobs_table.c.state == JobState.EVALUATING, answered)
        with self.platform.engine.connect() as conn:
            trained = list(conn.execute(query).scalars())
        for job_id in trained:
            with self.platform.engine.begin() as conn:
                transition(conn, job_id, JobState.SUCCEEDED, message="Evaluated.", now=self.now())

    def state(self, job_id: str) -> str:
        with self.platform.engine.connect() as conn:
            return str(conn.execute(sa.select(jobs_table.c.state).where(jobs_table.c.id == job_id)).scalar_one())

    def open_jobs(self) -> int:
        final = [s.value for s in FINAL]
        with self.platform.engine.connect() as conn:
            query = sa.select(sa.func.count()).select_from(jobs_table).where(jobs_table.c.state.not_in(final))
            return int(conn.execute(query).scalar_one())


SHAPES = (
    # tier, GPUs, tick of arrival, ticks of training
    ("free", 1, 0, 15), ("standard", 2, 0, 12), ("standard", 1, 0, 20), ("free", 1, 0, 15), ("standard", 4, 1, 6), ("standard", 1, 1, 2),
    ("premium", 2, 4, 4), ("premium", 4, 10, 3), ("standard", 1, 11, 5), ("premium", 1, 11, 6), ("standard", 2, 15, 3),
)  # fmt: skip


def build(platform: Platform, home: Path, rows: Path, *, shapes: Sequence[tuple[str, int, int, int]] = SHAPES) -> World:
    """The world at its beginning: every job is submitted, and none has joined the queue."""
    made: dict[str, str] = {}
    of_tier: dict[str, str] = {}
    planned: list[Planned] = []
    for number, (tier, num_gpus, arrives, ticks) in enumerate(shapes):
        if tier not in of_tier:
            owner, _ = tenants.create(platform, f"t-{uuid.uuid4().hex[:8]}", tier=tier, max_jobs_in_flight=100)
            of_tier[tier] = owner.id
            with rows.open("rb") as stream:
                made[tier] = str(uploaded_files.create(platform, owner.id, stream, filename="rows.jsonl", purpose="fine-tune").id)
        request = JobRequest.from_body({"model": "tiny-base", "training_file": made[tier], "suffix": f"job-{number}"})
        job = jobs.submit(platform, of_tier[tier], request).job
        planned.append(Planned(job_id=job.id, tenant=of_tier[tier], num_gpus=num_gpus, arrives=arrives, ticks=ticks))
    world = World(platform=platform, clock_file=home / "clock", planned=planned, tenants=list(of_tier.values()))
    world.set_tick(0)
    return world


def breaches(platform: Platform, gpus: Mapping[str, int] = GPUS) -> list[str]:
    """What is wrong with the books; empty in every state that another process may see."""
    return list(_breaches(platform, gpus))


def _breaches(platform: Platform, gpus: Mapping[str, int]) -> Iterator[str]:
    with platform.engine.connect() as conn:
        held = conn.execute(sa.select(reservations).where(reservations.c.released_at.is_(None))).all()
        rows = {r.id: r for r in conn.execute(sa.select(jobs_table)).all()}
        numbers: dict[str, list[Any]] = {}
        for r in conn.execute(sa.select(attempts_table).order_by(attempts_table.c.attempt)):
            numbers.setdefault(r.job_id, []).append(r)
        evaluated = sa.select(reservations.c.job_id).where(reservations.c.kind == Kind.EVALUATE)
        evaluations = Counter(conn.execute(evaluated).scalars())
        granted = sa.text("SELECT job_id, count(*) AS granted FROM job_events WHERE code = 'job_provisioning' GROUP BY job_id")
        told = {r.job_id: r.granted for r in conn.execute(granted)}
    for node, size in gpus.items():
        out = sum(n for r in held for name, n in r.placement if name == node)
        if out > size:
            yield f"{out} GPUs of {node} are out, it has {size}"
    by_job = {r.job_id: r for r in held}
    for job in rows.values():
        got, state = by_job.get(job.id), JobState(job.state)
        needs = state in (JobState.PROVISIONING, JobState.RUNNING, JobState.PAUSING)
        if needs and (got is None or got.attempt != job.attempt):
            yield f"{job.id} is {state} in attempt {job.attempt} and holds {got}"
        judged = got is not None and got.kind == Kind.EVALUATE
        if got is not None and not needs and state not in FINAL and not (judged and state is JobState.EVALUATING):
            yield f"{job.id} is {state} and holds attempt {got.attempt}"
        if got is not None and sum(n for _, n in got.placement) != (1 if judged else job.num_gpus):
            yield f"{job.id} holds {got.placement}, not {job.num_gpus} GPUs"
        if [a.attempt for a in numbers.get(job.id, [])] != list(range(1, job.attempt + evaluations[job.id] + 1)):
            yield f"{job.id} is in attempt {job.attempt}, and has {numbers.get(job.id)}"
        if told.get(job.id, 0) != job.attempt:
            yield f"{job.id} was told of {told.get(job.id, 0)} grants, and had {job.attempt}"
        if state is not JobState.QUEUED and (job.promise or job.queue_position):
            yield f"{job.id} is {state} and has a place in the queue"
        running = [a.attempt for a in numbers.get(job.id, []) if a.ended_at is None]
        if running != ([got.attempt] if got is not None else []):
            yield f"{job.id} has open attempts {running} and holds {got}"
