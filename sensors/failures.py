"""Runs that ended, or whose worker died, while their job did not move are replaced; a stage that keeps failing ends the job."""

from datetime import datetime, timedelta

import dagster as dg

from control_plane.service.due_runs import DueRun, due_runs, replace_run, run_replacements
from control_plane.service.preparation import fail
from control_plane.service.scheduling import release
from control_plane.service.training import STOP_GRACE_S
from ft_assets.errors import FtError
from resources.dagster_platform import PlatformResource

STALE = timedelta(seconds=45)
"""A live step beats every 5 s or faster; nine missed beats mean that its worker is gone."""
MAX_REPLACEMENTS = 5
"""Runs of one stage that may die without moving the job; each is a fault of the platform."""
ENDED = (dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED, dg.DagsterRunStatus.SUCCESS)
SETTLED = timedelta(seconds=1)
"""How long after its end a run may still be moving its job: the transition is written beside Dagster's own."""
WORKING = (dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING)


@dg.sensor(minimum_interval_seconds=1, default_status=dg.DefaultSensorStatus.RUNNING)
def failures(context: dg.SensorEvaluationContext, platform: PlatformResource) -> dg.SkipReason:
    """Compare each due run with what Dagster knows of it."""
    opened = platform.get()
    replaced = []
    for due in due_runs(opened, ("prepare", "train", "evaluate")):
        replacements, beat = run_replacements(opened, due)
        why = why_gone(context.instance, due, beat, opened.clock())
        if why is None:
            continue
        replaced.append(f"{due.run_key}: {why}")
        if replacements + 1 < MAX_REPLACEMENTS:
            replace_run(opened, due)
            continue
        fail(
            opened,
            due.tenant,
            due.job_id,
            FtError(f"{due.stage} failed {replacements + 1} times: {why}. Submit the job again, or ask an operator to look at its runs"),
        )
        if due.stage == "train":
            platform.launcher().stop(f"{due.job_id}-a{due.attempt}", grace_s=STOP_GRACE_S)
            release(opened, due.job_id, due.attempt)
    return dg.SkipReason("; ".join(replaced) or "every due run is alive")


def why_gone(instance: dg.DagsterInstance, due: DueRun, beat: datetime | None, now: datetime) -> str | None:
    """Why `due`'s run will not move its job any more; None while it may."""
    records = instance.get_run_records(dg.RunsFilter(tags={"ft/run_key": due.run_key}), limit=1)
    if not records:
        return None
    run, changed = records[0].dagster_run, records[0].update_timestamp
    silent_since = max(t for t in (beat, changed) if t is not None)
    if run.status in ENDED:
        return f"run {run.run_id} ended {run.status.value}" if now - changed > SETTLED else None
    if run.status in WORKING and now - silent_since > STALE:
        instance.report_run_failed(run, message="its worker has not been heard of; the job gets another run")
        return f"run {run.run_id} was silent for {(now - silent_since).total_seconds():.0f} s"
    return None
