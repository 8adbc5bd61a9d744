"""Health of one attempt while it is followed: verdicts become events, metrics are copied to the tracker, heartbeats are checked.

Errors in here never end an attempt: they are logged, and the attempt continues without supervision.
"""

from __future__ import annotations

import contextlib
import json
import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection

from control_plane.attempts.claims import Claim, Ending
from control_plane.attempts.rules import (
    EARLY_STEPS,
    HEARTBEAT_AGAIN_S,
    ONCE,
    SLOW_GPU,
    Pace,
    Signs,
    Step,
    Verdict,
    diverged,
    faster,
    judge,
    modelled_pace,
    own_pace,
    slow_gpus,
)
from control_plane.attempts.service import final_prefix
from control_plane.attempts.tables import attempts, health_verdicts
from control_plane.capacity.configured_pools import named
from control_plane.jobs import results
from control_plane.jobs.tables import job_events, jobs
from control_plane.jobs.transitions import locked, record
from control_plane.platform.context import Platform
from control_plane.platform.job_events import FOR_OPERATORS, Event
from control_plane.platform.job_states import FINAL, JobState
from control_plane.platform.protocols import RunLog, Tables, TrackedRun
from control_plane.queue.tables import reservations
from core.telemetry.redaction import without_credentials
from engine.training import GPU_SPEEDS, TrainingSpec, loss_curve_svg

WATCHED_STEPS = 2000
"""Newest steps that verdicts consider."""
MIN_ALIKE = 3
"""Earlier similar jobs needed before their pace counts as the expected one."""
MAX_ALIKE = 20

FLUSH_S = 20.0
"""A short job ends before its tracker has even been imported."""

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Watch:
    """Supervision of one attempt; created by :func:`begin`."""

    platform: Platform
    held: Claim
    signs: Signs
    raised: set[str]
    tracked: RunLog | None
    seen: int
    """Sequence number of the newest metrics event that was processed."""
    alike: Pace | None = None
    """Pace of similar jobs; without any, the attempt is held against the faster of the next two."""
    modelled_step_s: float | None = None
    """Seconds of a step by the cost model; None: it does not know these devices."""
    own: Pace | None = field(default=None)
    reported: set[str] = field(default_factory=set)
    """Verdicts of :data:`~control_plane.attempts.rules.ONCE` already reported for this attempt."""
    reported_tracking: bool = field(default=False)

    def look(self) -> None:
        """Process the metrics that were reported since the last call."""
        with _unharmed("the watch"):
            with self.platform.engine.connect() as conn:
                this = (attempts.c.job_id == self.held.job_id) & (attempts.c.attempt == self.held.attempt)
                from_step = sa.select(attempts.c.from_step).where(this).scalar_subquery()  # unknown when the watch began
                query = _metrics_of(self.held.job_id).add_columns(from_step.label("from_step"))
                news = conn.execute(query.where(job_events.c.seq > self.seen).order_by(job_events.c.seq)).all()
            if not news:
                return
            self.seen, lines = news[-1].seq, [row.data for row in news]
            self.signs = replace(_with_lines(self.signs, lines), from_step=news[-1].from_step or 0)
            if self.alike is None:
                self.own = self.own or own_pace(self.signs)
                modelled = modelled_pace(self.signs, self.modelled_step_s) if self.modelled_step_s else None
                self.signs = replace(self.signs, expected=faster(modelled, self.own))
            if self.tracked is not None:
                self.tracked.log(lines)
            self._judge()

    def record_silence(self, *, silence_s: float, running: bool) -> None:
        """Process how long the workload has been silent."""
        self.signs = replace(self.signs, silence_s=silence_s, running=running)
        with _unharmed("the watch"):
            if "heartbeat_missed" in self.raised or silence_s > HEARTBEAT_AGAIN_S:
                self._judge()
            self._report_tracking()

    def judge_end(self, ending: Ending) -> None:
        """Judge the end, and close open verdicts; before the job moves on."""
        with _unharmed("the watch"):
            if ending.failure is not None and ending.failure.code == "diverged":
                self._record([diverged(step=ending.last_step, remedy=ending.failure.remedy)])
            with self.platform.engine.begin() as conn:
                _close(conn, self.platform, health_verdicts.c.job_id == self.held.job_id, health_verdicts.c.attempt == self.held.attempt)

    def end_tracking(self, ending: Ending) -> None:
        """Complete the tracked run."""
        with _unharmed("tracking"):
            if self.tracked is not None:
                self.tracked.attach(of_attempt(self.platform, self.held))
        with _unharmed("tracking"):
            if self.tracked is not None:
                self.tracked.end(outcome=ending.outcome)
            self._report_tracking()

    def _judge(self) -> None:
        held = {v.code: v for v in judge(self.signs, self.raised) if v.code in self.raised or v.code not in self.reported}
        over = self.raised - set(held)
        if over or set(held) - self.raised:
            self._record([v for v in held.values() if v.code not in self.raised], over)
            self.raised = set(held)
            self.reported |= self.raised & ONCE

    def _record(self, verdicts: Sequence[Verdict], over: Sequence[str] | set[str] = ()) -> None:
        with self.platform.engine.begin() as conn:
            job = locked(conn, self.held.job_id)
            if job.state in FINAL or job.attempt != self.held.attempt:
                return
            for code in sorted(over):
                _recover(conn, self.platform, self.held.job_id, code)
            for verdict in verdicts:
                _raise(conn, self.platform, self.held.job_id, self.held.attempt, verdict)

    def _report_tracking(self) -> None:
        """Report once that the tracked copy of this run is incomplete."""
        problem = None if self.tracked is None or self.reported_tracking else self.tracked.problem()
        if problem is None:
            return
        self.reported_tracking = True
        log.warning("%s is missing or incomplete in the tracker: %s", self.held.workload, without_credentials(problem))
        message = (
            "The run is missing or incomplete in MLflow; the worker's log has the reason. Training continues; its metrics are in the API."
        )
        with self.platform.engine.begin() as conn:
            if locked(conn, self.held.job_id).state not in FINAL:
                event = Event(code="tracking_failed", level="warn", message=message, data={"audience": FOR_OPERATORS})
                record(conn, self.held.job_id, event, now=self.platform.clock())


def begin(platform: Platform, held: Claim) -> Watch:
    """Start supervising an attempt that has started; a new watcher takes over the open verdicts of a dead one."""
    signs = Signs(steps=(), validations=(), total_steps=0, from_step=0, silence_s=0.0, running=False)
    raised, reported, seen = set[str](), set[str](), 0
    modelled_step_s: float | None = None
    with _unharmed("the watch"), platform.engine.begin() as conn:
        this = (attempts.c.job_id == held.job_id) & (attempts.c.attempt == held.attempt)
        began = conn.execute(sa.select(attempts.c.from_step, attempts.c.started_at).where(this)).one()
        earlier = (
            _metrics_of(held.job_id)
            .where(job_events.c.created_at < (began.started_at or platform.clock()))
            .order_by(job_events.c.seq.desc())
            .limit(1)
        )
        seen = next((row.seq for row in conn.execute(earlier)), 0)  # what a watch before this one tracked is tracked again, to no effect
        signs = _with_events(conn, held.job_id, signs)
        signs = replace(signs, from_step=began.from_step or 0, expected=_pace_of_jobs_alike(conn, held))
        own = health_verdicts.c.job_id == held.job_id, health_verdicts.c.attempt == held.attempt
        for code, cleared_at in conn.execute(sa.select(health_verdicts.c.code, health_verdicts.c.cleared_at).where(*own)).all():
            raised |= {code} if cleared_at is None and code != SLOW_GPU else set()
            reported |= {code} & ONCE
        _close(conn, platform, health_verdicts.c.job_id == held.job_id, health_verdicts.c.attempt < held.attempt)
    with _unharmed("the watch"):
        modelled_step_s = _modelled_step_s(platform, held)
    tracked = None
    with _unharmed("tracking"):
        if platform.tracker is not None:
            tracked = platform.tracker.begin(run_of(held))
            tracked.attach(of_spec(held.spec))
    return Watch(
        platform=platform, held=held, signs=signs, raised=raised, reported=reported, tracked=tracked, seen=seen, alike=signs.expected,
        modelled_step_s=modelled_step_s,
    )  # fmt: skip


def track_again(platform: Platform, held: Claim, *, outcome: str) -> None:
    """Track an attempt that has ended from its events, and end its tracked run; what is tracked already stays as it is."""
    with _unharmed("tracking"):
        if platform.tracker is None:
            return
        tracked = platform.tracker.begin(run_of(held))
        tracked.attach(of_spec(held.spec))
        with platform.engine.connect() as conn:
            this = (attempts.c.job_id == held.job_id) & (attempts.c.attempt == held.attempt)
            lived = conn.execute(sa.select(attempts.c.started_at, attempts.c.ended_at).where(this)).one()
            during = job_events.c.created_at.between(lived.started_at, lived.ended_at)
            tracked.log([row.data for row in conn.execute(_metrics_of(held.job_id).where(during).order_by(job_events.c.seq))])
        tracked.attach(of_attempt(platform, held))
        tracked.end(outcome=outcome)


def attach(platform: Platform, run: TrackedRun, files: Mapping[str, bytes], tables: Tables) -> None:
    """Attach `files` and `tables` to a tracked run that has ended; :func:`flush` waits for them."""
    if platform.tracker is not None:
        with _unharmed("tracking"):
            platform.tracker.attach(run, files, tables)


def flush(platform: Platform) -> None:
    """Wait until copies of ended runs have arrived. For the end of a process, after GPUs are released; following never waits for them."""
    if platform.tracker is not None:
        with _unharmed("tracking"):
            platform.tracker.flush(timeout_s=FLUSH_S)


def run_of(held: Claim) -> TrackedRun:
    """Return the attempt as the tracker shows it: its inputs as tags, its settings as parameters."""
    spec = held.spec
    datasets = [source.dataset_id for source in spec.sources] or [spec.dataset_id]
    tags = {
        "tenant": held.tenant, "job": held.job_id, "attempt": str(held.attempt), "base_model": spec.base_model,
        "base_digest": spec.base_digest, "dataset": ", ".join(datasets), "pack": spec.pack_fingerprint, "spec_sha256": spec.sha256,
        "commit": spec.commit, "recipe": spec.recipe, "pool": held.pool,
    }  # fmt: skip
    params = {k: str(v) for k, v in _flat(spec.to_dict()) if v is not None and k not in tags}
    return TrackedRun(tenant=held.tenant, job_id=held.job_id, attempt=held.attempt, tags=tags, params=params)


def judge_clocks(platform: Platform, clocks: Mapping[str, Mapping[str, float]]) -> int:
    """Raise or clear the verdict on slow GPUs of running attempts; returns how many have some. `clocks`: MHz by workload and GPU."""
    v = health_verdicts.c
    raised = sa.exists().where(v.job_id == attempts.c.job_id, v.code == SLOW_GPU, v.cleared_at.is_(None))
    query = (
        sa.select(attempts.c.job_id, attempts.c.attempt, attempts.c.workload, raised.label("raised"))
        .join(reservations, (reservations.c.job_id == attempts.c.job_id) & (reservations.c.attempt == attempts.c.attempt))
        .where(reservations.c.released_at.is_(None), attempts.c.workload.in_(clocks))
    )
    with platform.engine.begin() as conn:
        found = [(row, slow_gpus(clocks[row.workload])) for row in conn.execute(query.order_by(attempts.c.job_id)).all()]
        for row, verdict in found:
            if (verdict is not None) == row.raised or locked(conn, row.job_id).attempt != row.attempt:
                continue
            if verdict is not None:
                _raise(conn, platform, row.job_id, row.attempt, verdict)
            else:
                _recover(conn, platform, row.job_id, SLOW_GPU)
    return sum(verdict is not None for _, verdict in found)


def open_verdicts(platform: Platform) -> list[sa.Row[Any]]:
    """Return open verdicts on unfinished jobs, newest first, with the job's tenant and model."""
    query = (
        sa.select(health_verdicts, jobs.c.tenant_id, jobs.c.model)
        .join(jobs, jobs.c.id == health_verdicts.c.job_id)
        .where(health_verdicts.c.cleared_at.is_(None), jobs.c.state.not_in([s.value for s in FINAL]))
        .order_by(health_verdicts.c.raised_at.desc())
    )
    with platform.engine.connect() as conn:
        return list(conn.execute(query).all())


@contextlib.contextmanager
def _unharmed(what: str) -> Iterator[None]:
    try:
        yield
    except Exception:
        log.exception("%s of an attempt failed; the attempt continues", what)


def _with_lines(signs: Signs, lines: Sequence[Mapping[str, Any]]) -> Signs:
    """Add metrics events: those of steps and those of validations."""
    steps = [m for m in lines if "train_loss" in m]
    by_step = {s.step: s for s in signs.steps} | {m["step"]: Step.of(m) for m in steps}
    losses = dict(signs.validations) | {m["step"]: m["valid_loss"] for m in lines if m.get("valid_loss") is not None}
    kept = sorted(by_step.values(), key=lambda s: s.step)[-WATCHED_STEPS:]
    total = int(steps[-1].get("total_steps") or signs.total_steps) if steps else signs.total_steps
    early = signs.early
    if len(early) < EARLY_STEPS or (kept and kept[0].step <= EARLY_STEPS):
        firsts = {s.step: s for s in early} | {n: s for n, s in by_step.items() if n <= EARLY_STEPS}
        early = tuple(sorted(firsts.values(), key=lambda s: s.step))
    return replace(signs, steps=tuple(kept), early=early, validations=tuple(sorted(losses.items())), total_steps=total)


def _metrics_of(job_id: str) -> sa.Select[Any]:
    return sa.select(job_events.c.seq, job_events.c.data).where(job_events.c.job_id == job_id, job_events.c.type == "metrics")


def _with_events(conn: Connection, job_id: str, signs: Signs) -> Signs:
    """Add what was reported before, also by earlier attempts: curves continue."""
    query = _metrics_of(job_id)
    newest = conn.execute(query.order_by(job_events.c.seq.desc()).limit(WATCHED_STEPS)).all()[::-1]
    first = conn.execute(query.order_by(job_events.c.seq).limit(EARLY_STEPS)).all()
    return _with_lines(signs, [row.data for row in (*first, *newest)])


def _pace_of_jobs_alike(conn: Connection, held: Claim) -> Pace | None:
    """Return the median pace of the newest jobs that trained the same model in the same way on as many GPUs of the same pool.

    Windows and micro-batches follow the data, so their tokens need only be within a factor of two.
    """
    spec = held.spec
    same = ("method", "adapter", "precision", "gradient_checkpointing")
    window = jobs.c.spec["max_seq_len"].as_integer()
    micro_batch = window * jobs.c.spec["optimization"]["per_device_batch_size"].as_integer()
    tokens = spec.max_seq_len * spec.optimization.per_device_batch_size
    query = (
        sa.select(jobs.c.tokens_per_s)
        .where(
            jobs.c.state == JobState.SUCCEEDED, jobs.c.base_digest == spec.base_digest, jobs.c.num_gpus == held.num_gpus,
            jobs.c.tokens_per_s > 0, jobs.c.spec.contains({k: getattr(spec, k) for k in same}),
            (2 * window).between(spec.max_seq_len, 4 * spec.max_seq_len), (2 * micro_batch).between(tokens, 4 * tokens),
            jobs.c.id.in_(sa.select(reservations.c.job_id).where(reservations.c.pool == held.pool)),
        )
        .order_by(jobs.c.finished_at.desc())
        .limit(MAX_ALIKE)
    )  # fmt: skip
    found = [float(v) for v in conn.execute(query).scalars()]
    if len(found) < MIN_ALIKE:
        return None
    return Pace(tokens_per_s=median(found), source=f"the median of {len(found)} earlier jobs like it on pool {held.pool}")


def _modelled_step_s(platform: Platform, held: Claim) -> float | None:
    """Return the expected seconds of a step; None on a CPU, for whose steps the cost model has one thread's rate and no overhead."""
    if named(platform, held.pool).gpu_type not in GPU_SPEEDS:
        return None
    expected = jobs.c.expected_s * (jobs.c.modelled_s - jobs.c.setup_s) / jobs.c.modelled_s
    query = sa.select(expected / jobs.c.total_steps).where(
        jobs.c.id == held.job_id, jobs.c.modelled_s > jobs.c.setup_s, jobs.c.total_steps > 0
    )
    with platform.engine.connect() as conn:
        found = conn.execute(query).scalar()
    return None if found is None else float(found)


def _raise(conn: Connection, platform: Platform, job_id: str, attempt: int, verdict: Verdict) -> None:
    data = {"audience": verdict.audience, "value": verdict.value, "limit": verdict.limit, "next_step": verdict.next_step}
    now = platform.clock()
    values = {
        "id": f"verdict-{uuid.uuid4().hex[:24]}", "job_id": job_id, "attempt": attempt, "code": verdict.code,
        "audience": verdict.audience, "level": verdict.level, "message": verdict.message, "data": data, "raised_at": now,
    }  # fmt: skip
    if conn.execute(insert(health_verdicts).values(values).on_conflict_do_nothing().returning(health_verdicts.c.id)).first():
        event = Event(code=verdict.code, level=verdict.level, message=verdict.message, data=data | {"attempt": attempt})
        record(conn, job_id, event, now=now)


def _recover(conn: Connection, platform: Platform, job_id: str, code: str) -> None:
    now = platform.clock()
    this = (health_verdicts.c.job_id == job_id) & (health_verdicts.c.code == code) & health_verdicts.c.cleared_at.is_(None)
    row = conn.execute(sa.update(health_verdicts).where(this).values(cleared_at=now).returning(health_verdicts)).first()
    if row is None:
        return
    lasted = (now - row.raised_at).total_seconds()
    message = f"Recovered from {code} after {lasted:.0f} s."
    record(conn, job_id, Event(code="health_recovered", message=message, data={"verdict": code, "audience": row.audience}), now=now)


def _close(conn: Connection, platform: Platform, *of: sa.ColumnElement[bool]) -> None:
    """Close the verdicts of ended attempts, whose recovery is no longer watched."""
    this = (*of, health_verdicts.c.cleared_at.is_(None))
    conn.execute(sa.update(health_verdicts).where(*this).values(cleared_at=platform.clock()))


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


SPEC = "spec.json"
RESULT = ("adapter_config.json", "config.json", "manifest.json")
"""Files of an adapter or a whole model, beside its weights."""


def of_spec(spec: TrainingSpec) -> dict[str, bytes]:
    """Return the resolved spec: every setting of the training, defaults included."""
    return {SPEC: as_json(spec.to_dict())}


def of_attempt(platform: Platform, held: Claim) -> dict[str, bytes]:
    """Return the job's loss curve and metrics so far, and the files that describe the finished model, if there is one."""
    found = {}
    if curve := loss_curve_svg(results.metric_lines(platform, held.job_id)):
        found["loss_curve.svg"] = curve.encode()
    with results.table(platform, held.job_id) as table:
        found[results.FILENAME] = table.read()
    for name in RESULT:
        key = f"{final_prefix(held)}/{name}"
        if platform.objects.exists(key):
            found[f"model/{name}"] = platform.objects.get_bytes(key)
    return found


def as_json(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, indent=2, sort_keys=True).encode()
