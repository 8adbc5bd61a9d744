"""What the tenant of a job that made room for another one is told: when it is expected to go on."""

from __future__ import annotations

import logging
from datetime import UTC, datetime

from control_plane.attempts.claims import Claim
from control_plane.jobs.transitions import locked, record
from control_plane.platform.context import Platform
from control_plane.platform.job_events import Event
from control_plane.platform.job_states import JobState
from control_plane.queue import scheduler, snapshot

log = logging.getLogger(__name__)


def tell_when(platform: Platform, held: Claim) -> None:
    """Write when the job of `held`, which is queued again, is expected to go on.

    A forecast of the queue as it is now, made behind the transaction that gave the GPUs back: what waits for them waits for no
    forecast. Where none can be made, and where the job has gone on by then, nothing is written. It is for information: whatever goes wrong
    with it, the attempt has ended as it should.
    """
    try:
        now = platform.clock().timestamp()
        start = scheduler.projected_start(snapshot.queue_snapshot(platform), held.job_id, now=now)
        if start is None:
            return
        with platform.engine.begin() as conn:
            job = locked(conn, held.job_id)
            if job["state"] == JobState.QUEUED and job["attempt"] == held.attempt:
                record(conn, held.job_id, _forecast(start, now), now=platform.clock())
    except Exception:
        log.exception("when %s goes on could not be told", held.job_id)


def _forecast(start: float, now: float) -> Event:
    wait_s = max(0.0, start - now)
    soon = "at once" if wait_s < 60 else f"in about {wait_s / 60:.0f} min" if wait_s < 7200 else f"in about {wait_s / 3600:.0f} h"
    at = datetime.fromtimestamp(start, tz=UTC)
    message = f"It is expected to go on {soon} ({at:%Y-%m-%d %H:%M} UTC), at its old place in the queue."
    return Event(code="preemption_forecast", message=message, data={"expected_start": int(start)})
