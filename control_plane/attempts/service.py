"""One attempt of training, from the reservation to the ledger; every write is fenced by the attempt number.

The attempt number of the unreleased reservation is the fencing token: a replaced step, or a workload that outlived its reservation, finds
its token released and can neither commit a checkpoint nor move the job.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection

from control_plane.attempts import endings, evaluation_endings
from control_plane.attempts.claims import Claim as Claim
from control_plane.attempts.claims import Ending as Ending
from control_plane.attempts.endings import of_attempt as of_attempt
from control_plane.attempts.endings import reserved
from control_plane.attempts.exports import export_endings
from control_plane.attempts.tables import Checkpoint, attempts, checkpoints
from control_plane.billing.metering import service as metering
from control_plane.jobs.tables import Job, jobs
from control_plane.jobs.transitions import fail_in, job_row, locked, record
from control_plane.platform.context import Platform
from control_plane.platform.job_events import Event
from control_plane.platform.job_states import FINAL, JobState
from control_plane.platform.records import columns, many
from control_plane.queue.reservations import local_placement
from control_plane.queue.tables import reservations
from core import layout
from core.errors import FtError, NotAdmitted
from core.workload import Kind
from engine.training import StopReason, TrainingSpec

UNREADABLE = "spec_unreadable"
"""Code of a spec whose format this platform does not know."""

log = logging.getLogger(__name__)


def claim(platform: Platform, tenant: str, job_id: str, kind: Kind | None = None) -> Claim:
    """Return the job's reservation, of any `kind` by default; raises ``NotAdmitted`` if it has none, so that nothing bypasses the queue, or
    with code :data:`UNREADABLE` if the spec of its training has another format."""
    with platform.engine.connect() as conn:
        job = job_row(conn, tenant, job_id)
        held = conn.execute(sa.select(reservations).where(reservations.c.job_id == job_id, reservations.c.released_at.is_(None))).first()
        if held is None or kind not in (None, held.kind) or (job.spec is None and held.kind == Kind.TRAIN):
            raise NotAdmitted(
                f"job {job_id} is {job.state} and holds no reservation, so it may not {kind or Kind.TRAIN}; submit jobs through the API, "
                "`ft submit` or the `submit` job, and the scheduler starts it when it fits"
            )
        return _claim(platform, job, held)


def past_claim(platform: Platform, tenant: str, job_id: str, attempt: int) -> Claim:
    """Return what an ended attempt held; its spec is the job's present one."""
    with platform.engine.connect() as conn:
        this = (reservations.c.job_id == job_id) & (reservations.c.attempt == attempt)
        return _claim(platform, job_row(conn, tenant, job_id), conn.execute(sa.select(reservations).where(this)).one())


def _claim(platform: Platform, job: Job, held: sa.Row[Any]) -> Claim:
    return Claim(
        tenant=job.tenant_id,
        job_id=job.id,
        attempt=held.attempt,
        tier=job.tier,
        pool=held.pool,
        num_gpus=held.num_gpus,
        placement=local_placement(platform, held.placement, held.devices),
        model=job.model,
        frozen_spec=_readable(job.id, job.spec or {}) if held.kind == Kind.TRAIN else None,
        kind=Kind(held.kind),
        evaluation_id=held.evaluation_id,
        export_id=held.export_id,
        workload=_workload(job.id, held.attempt),
    )


def workload_held(platform: Platform, job_id: str) -> str | None:
    """Name of the workload of the job's reservation."""
    query = sa.select(reservations.c.attempt).where(reservations.c.job_id == job_id, reservations.c.released_at.is_(None))
    with platform.engine.connect() as conn:
        attempt = conn.execute(query).scalar_one_or_none()
    return None if attempt is None else _workload(job_id, attempt)


def abandon(platform: Platform, tenant: str, job_id: str, error: FtError) -> None:
    """Fail a job that cannot be trained, with `error`, and release its reservation; what ran is billed and refunded.

    One transaction, which locks in the same order as the end of an attempt: the reservation, then the job.
    """
    now = platform.clock()
    with platform.engine.begin() as conn:
        held = (reservations.c.job_id == job_id) & reservations.c.released_at.is_(None)
        conn.execute(sa.update(reservations).where(held).values(released_at=now))
        job = locked(conn, job_id, tenant_id=tenant)
        fail_in(conn, job, error, now=now)
        over = (attempts.c.job_id == job_id) & attempts.c.ended_at.is_(None)
        ended = sa.update(attempts).where(over).values(outcome=error.code, ended_at=now).returning(attempts.c.attempt)
        for attempt in conn.execute(ended).scalars().all():
            metered = metering.Metered(tenant_id=tenant, job_id=job_id, attempt=attempt)
            metering.report_lost(conn, metered, outcome=error.code, now=now)
            metering.settle(conn, platform, metered)


def _workload(job_id: str, attempt: int) -> str:
    return f"{job_id}-a{attempt}"


def _readable(job_id: str, stored: Mapping[str, Any]) -> TrainingSpec:
    try:
        return TrainingSpec.from_dict(dict(stored))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        log.error("the spec of %s is not of this platform's format: %s: %s", job_id, type(error).__name__, error)
        raise NotAdmitted(
            f"the training spec of job {job_id} was frozen by another version of the platform, and this one cannot train it; that is the "
            "platform's failure, and nothing of it is billed: submit the job again",
            code=UNREADABLE,
        ) from error


STOP_REQUESTED = sa.case(
    (reservations.c.kind != Kind.TRAIN, sa.case((reservations.c.stop_asked_at.is_not(None), StopReason.PREEMPT.value))),
    ((jobs.c.stop_requested == StopReason.PREEMPT.value) & reservations.c.stop_asked_at.is_(None), None),
    else_=jobs.c.stop_requested,
).label("stop")
"""Why the holder of a reservation is to stop; null if it is not."""


def requested_stop(conn: Connection, held: Claim) -> str | None:
    """Return ``cancel``, ``pause`` or ``preempt`` if this attempt was asked to stop.

    A request to make room stops only the attempt that it was sent to. An attempt without a reservation must cancel, because its GPUs
    belong to another job.
    """
    query = sa.select(STOP_REQUESTED).join(reservations, reservations.c.job_id == jobs.c.id)
    row = conn.execute(query.where(reserved(held))).one_or_none()
    if row is None:
        return StopReason.CANCEL
    if held.kind is not Kind.TRAIN:
        wanted = is_wanted(conn, job_id=held.job_id, evaluation_id=held.evaluation_id, export_id=held.export_id)
        return row.stop if wanted else StopReason.CANCEL
    stop: str | None = row.stop
    return stop


def is_wanted(conn: Connection, *, job_id: str, evaluation_id: str | None, export_id: str | None) -> bool:
    """Whether the result of an evaluation or of an export is still needed."""
    if export_id is not None:
        return export_endings.is_wanted(conn, export_id)
    return evaluation_endings.is_wanted(conn, job_id, evaluation_id)


def checkpoint_prefix(held: Claim) -> str:
    """Prefix of the attempt's checkpoints; each attempt has its own, so that sending a step again never touches a committed one."""
    return f"{layout.job_prefix(held.tenant, held.job_id)}/checkpoints/a{held.attempt}"


def final_prefix(held: Claim) -> str:
    """Prefix of the attempt's finished model, until it is registered."""
    return f"{layout.job_prefix(held.tenant, held.job_id)}/final/a{held.attempt}"


def output_prefix(held: Claim) -> str:
    """Prefix of what the attempt's workload leaves, if it is not a training."""
    return f"{layout.attempt_prefix(held.tenant, held.job_id, held.attempt)}/outputs"


def record_checkpoint(
    platform: Platform, held: Claim, *, step: int, prefix: str, manifest_sha256: str, metrics: Mapping[str, Any], final: bool = False
) -> bool:
    """Commit a checkpoint whose verified files lie under `prefix`; returns False if the token was released or the job has ended.

    The row is the commit: files without one are leftovers. Each attempt has its own prefix, so that uploading a step again never touches a
    committed checkpoint; the row then names the newer one.
    """
    with platform.engine.begin() as conn:
        if not holds_in(conn, held) or locked(conn, held.job_id).state in FINAL:
            return False
        same = sa.select(checkpoints.c.id).where(
            checkpoints.c.job_id == held.job_id, checkpoints.c.step == step, checkpoints.c.attempt == held.attempt,
            checkpoints.c.manifest_sha256 == manifest_sha256, checkpoints.c.final == final,
        )  # fmt: skip
        if conn.execute(same).first() is not None:
            return True  # sent again
        changed = {
            "attempt": held.attempt, "object_prefix": prefix, "manifest_sha256": manifest_sha256, "metrics": dict(metrics), "final": final,
            "created_at": platform.clock(), "retired_at": None, "removed_at": None,
        }  # fmt: skip
        values = {"id": f"ftckpt_{uuid.uuid4().hex[:24]}", "job_id": held.job_id, "step": step, **changed}
        statement = insert(checkpoints).values(values)
        replaced = statement.on_conflict_do_update(
            index_elements=["job_id", "step"], set_=changed, where=sa.true() if final else ~checkpoints.c.final
        )
        if conn.execute(replaced.returning(checkpoints.c.id)).first() is None:
            return True  # the finished model has this step; its checkpoint does not replace it
        message = f"Final adapter committed at step {step}." if final else f"Checkpoint committed at step {step}."
        event = Event(code="checkpoint", message=message, data={"step": step, "attempt": held.attempt})
        record(conn, held.job_id, event, now=platform.clock())
    return True


def committed(platform: Platform, job_id: str) -> list[Checkpoint]:
    """Return the job's committed checkpoints that are kept, highest step first."""
    kept = sa.select(*columns(checkpoints, Checkpoint)).where(checkpoints.c.job_id == job_id, checkpoints.c.retired_at.is_(None))
    with platform.engine.connect() as conn:
        return many(conn, kept.order_by(checkpoints.c.step.desc()), Checkpoint)


def must_hold(platform: Platform, held: Claim) -> None:
    """Raise ``NotAdmitted`` if the attempt was released: it may no longer start anything."""
    with platform.engine.begin() as conn:
        holds = holds_in(conn, held)
    if not holds:
        raise NotAdmitted(
            f"attempt {held.attempt} of job {held.job_id} was released before its workload was started, so it starts nothing; the job goes "
            "on in its next attempt, or has ended"
        )


def finish(platform: Platform, held: Claim, ending: Ending) -> JobState:
    """End the attempt: release the reservation, write the ledger, move the job. A second call changes nothing.

    1. Succeeded: the job continues to evaluation, even if it was asked to make room meanwhile.
    2. Cancelled meanwhile: the job stays cancelled.
    3. A pause was requested and the workload saved its checkpoint: paused, even if it was to make room.
    4. The failure can be resumed: preempted, then queued again at its old place; the next attempt resumes from the last checkpoint.
    5. Out of memory for the first time: queued again with half the micro-batch and the same global batch, or paused with it if a pause was
       requested.
    6. Otherwise failed, with the failure's remedy.

    The end of an evaluation: :mod:`control_plane.attempts.evaluation_endings`; of an export:
    :mod:`control_plane.attempts.exports.export_endings`.
    """
    with platform.engine.begin() as conn:
        now = platform.clock()
        released = endings.release(conn, held, now)
        job = locked(conn, held.job_id, tenant_id=held.tenant)
        if released is None:
            return job.state
        if held.kind is Kind.TRAIN:
            ending = endings.settled(ending, job, released)
        elif held.kind is Kind.EVALUATE:
            ending = evaluation_endings.settled(conn, held, ending)
        endings.close(conn, held, ending, now)
        endings.bill(conn, platform, held, job, ending, released, now)
        if held.kind is Kind.EVALUATE:
            return evaluation_endings.move(conn, held, job, ending, now)
        if held.export_id is not None:
            export_endings.move(conn, held, held.export_id, ending, now)
            return job.state
        state = endings.move(conn, held, job, ending, released, now)
    if released.preempted and state is JobState.QUEUED:
        endings.tell_when(platform, held)
    return state


def mark_started(platform: Platform, held: Claim, *, started_at: float | None, nodes: Sequence[str] = ()) -> None:
    """Record when the attempt's workload started, as the launcher saw, else now, and on which `nodes`, if the launcher chose them; billing
    counts from there. Nothing for a released attempt, which has been billed."""
    with platform.engine.begin() as conn:
        if not holds_in(conn, held):
            return
        at = endings.moment(started_at) or platform.clock()
        started = {"started_at": at, "nodes": list(nodes) or None}
        if conn.execute(sa.update(attempts).where(of_attempt(held), attempts.c.started_at.is_(None)).values(started)).rowcount:
            job, seen = job_row(conn, held.tenant, held.job_id), started_at is not None
            endings.report_started(conn, platform, held, job, at=at, now=platform.clock(), seen=seen)
            _explain(conn, held, None)


def record_wait(platform: Platform, held: Claim, reason: str) -> None:
    """Record why the attempt's workload has not started yet, which its job shows while it is being provisioned or evaluated."""
    with platform.engine.begin() as conn:
        _explain(conn, held, reason or None)


def _explain(conn: Connection, held: Claim, reason: str | None) -> None:
    waits = jobs.c.state == (JobState.PROVISIONING if held.kind is Kind.TRAIN else JobState.EVALUATING)
    conn.execute(sa.update(jobs).where(jobs.c.id == reservations.c.job_id, reserved(held), waits).values(reason_detail=reason))


def holds_in(conn: Connection, held: Claim) -> bool:
    """Whether the attempt has its reservation; it cannot lose it before the transaction of `conn` ends."""
    return conn.execute(sa.select(reservations.c.attempt).where(reserved(held)).with_for_update()).first() is not None
