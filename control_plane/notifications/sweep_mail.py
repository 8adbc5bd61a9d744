"""E-mail about sweeps: their trials send none when they end, and the end of the last one is mailed as the end of the sweep."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.jobs.tables import jobs, sweep_trials, sweeps
from control_plane.notifications.tables import outbox
from control_plane.platform.job_states import FINAL
from control_plane.platform.records import one

ENDS = ("fine_tuning.job.succeeded", "fine_tuning.job.failed")
QUARANTINED = "adapter.quarantined"


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepEnd:
    """A sweep that has ended, with the number of its trials by what became of them."""

    id: str
    trials: int
    approved: int
    not_approved: int
    """Trained, but the model did not pass its gate."""
    without_model: int
    """Failed, cancelled or refused."""

    def to_dict(self) -> Mapping[str, Any]:
        return asdict(self)


class TrialEvent(NamedTuple):
    seq: int
    sweep_id: str
    is_end: bool
    """Of the trial's job; otherwise its model was quarantined."""


def trial_events(conn: Connection, seqs: Collection[int]) -> list[TrialEvent]:
    """Return which of these events report how a trial of a sweep ended. Later ones, such as after a release, are ordinary events."""
    job_id = sa.case((outbox.c.type == QUARANTINED, outbox.c.data["job_id"].astext), else_=outbox.c.subject)
    query = (
        sa.select(outbox.c.seq, sweep_trials.c.sweep_id, outbox.c.type.in_(ENDS))
        .join(sweep_trials, (sweep_trials.c.job_id == job_id) & ~sweep_trials.c.reused)
        .join(jobs, jobs.c.id == sweep_trials.c.job_id)
        .where(outbox.c.seq.in_(seqs), outbox.c.type.in_((*ENDS, QUARANTINED)), _of_first_end(outbox.c.created_at))
        .order_by(outbox.c.seq)
    )
    return [TrialEvent(*row) for row in conn.execute(query)]


def last_ends(conn: Connection, events: Collection[TrialEvent], seqs: Collection[int]) -> set[int]:
    """Return which of these events of the batch `seqs` ended their sweep, unless it was cancelled: no trial waits or runs, and no other
    trial's end is yet to be fanned out.

    The order of the queries matters: an end that is committed between the first two is found by the second, and is the last one then.
    """
    newest = {event.sweep_id: event.seq for event in events if event.is_end}
    if not newest:
        return set()
    waits = sa.or_(jobs.c.id.is_(None), jobs.c.state.not_in([state.value for state in FINAL]))
    trials = sa.select(sweep_trials.c.sweep_id).where(sweep_trials.c.sweep_id.in_(newest), sweep_trials.c.error.is_(None))
    going_on = trials.outerjoin(jobs, jobs.c.id == sweep_trials.c.job_id).where(waits)
    to_come = trials.join(outbox, outbox.c.subject == sweep_trials.c.job_id).where(
        outbox.c.fanned_out_at.is_(None), outbox.c.type.in_(ENDS), outbox.c.seq.not_in(seqs)
    )
    cancelled = sa.select(sweeps.c.id).where(sweeps.c.id.in_(newest), sweeps.c.cancelled_at.is_not(None))
    others = {sweep_id for query in (going_on, to_come, cancelled) for sweep_id in conn.execute(query).scalars()}
    return {seq for sweep_id, seq in newest.items() if sweep_id not in others}


def sweep_ended_by(conn: Connection, kind: str, job_id: str, happened_at: datetime) -> SweepEnd | None:
    """Return the sweep whose end is mailed with an event of a job; None if that is no trial."""
    if kind not in ENDS:
        return None
    query = sa.select(sweep_trials.c.sweep_id).join(jobs, jobs.c.id == sweep_trials.c.job_id)
    sweep_id = conn.execute(query.where(jobs.c.id == job_id, ~sweep_trials.c.reused, _of_first_end(sa.literal(happened_at)))).scalar()
    if sweep_id is None:
        return None
    count, approved, trained = sa.func.count(), jobs.c.fine_tuned_model.is_not(None), jobs.c.adapter_id.is_not(None)
    counted = (
        sa.select(
            sa.literal(sweep_id).label("id"),
            count.label("trials"),
            count.filter(approved).label("approved"),
            count.filter(~approved & trained).label("not_approved"),
            count.filter(~approved & ~trained).label("without_model"),
        )
        .select_from(sweep_trials.outerjoin(jobs, jobs.c.id == sweep_trials.c.job_id))
        .where(sweep_trials.c.sweep_id == sweep_id)
    )
    return one(conn, counted, SweepEnd)


def _of_first_end(happened_at: sa.ColumnElement[Any]) -> sa.ColumnElement[bool]:
    return jobs.c.finished_at.is_(None) | (happened_at <= jobs.c.finished_at)
