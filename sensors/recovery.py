"""Replaces runs that ended, or whose worker died, without moving their job; a stage that keeps failing ends the job."""

from datetime import datetime, timedelta

import dagster as dg
from dagster import DefaultRunLauncher

from control_plane.attempts.claims import STOP_GRACE_S
from control_plane.evaluations.tables import LOST
from control_plane.jobs.transitions import fail_in, locked
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.platform.protocols import Launcher
from control_plane.queue.cycle import release
from control_plane.queue.launches import DueRun, due_runs, replace_run, run_replacements
from core.errors import FtError
from ft_assets.platform_resource import PlatformResource
from resources.dagster.private_api import WorkerStatus
from resources.dagster.run_launcher import ForkingRunLauncher
from resources.dagster.run_tags import RUN_KEY_TAG
from sensors.run_coordinator import KEYED_JOBS
from sensors.run_requests import FALLBACK_S

STALE = timedelta(seconds=15)
"""On one machine, a live step sends a heartbeat at least every 5 s; three missed ones mean that its worker is gone. The queue listener
looks every 5 s, so a silent worker is noticed within 20 s, and one whose process can be checked within 5 s."""
HUNG = timedelta(seconds=60)
"""A worker whose process lives is left alone for longer, because its database may be unavailable. Then it is killed, so that there are
never two."""
WAITING = timedelta(minutes=5)
"""On a cluster nobody is heard of while the pod of a run's next step waits for a node or its image; Dagster ends a run whose pods fail. As
long as Dagster waits for a run to start."""
FORGOTTEN = timedelta(minutes=10)
"""How long a run may take to finish after its job has moved on; nothing waits for it, and its worker may have died."""
MAX_LOOKED_AT = 500
"""Working runs that a tick compares with what is due: more than one on each of the planned 325 GPUs, and 8 preparations."""
MAX_REPLACEMENTS = 5
"""Runs of one stage that may die without moving the job; each is a fault of the platform."""
ENDED = (dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED, dg.DagsterRunStatus.SUCCESS)
SETTLED = timedelta(seconds=1)
"""How long after its end a run may still be moving its job: the transition is written beside Dagster's own."""
FIRST_PAUSE, PAUSE_GROWS = timedelta(seconds=10), 3
"""The first run of a stage that dies is replaced at once, the next after this pause, and each later one after a pause that many times as
long: 10 s, 30 s, 90 s, 270 s. An outage of some minutes, such as a full disk, fails no job."""
UNQUEUED = timedelta(seconds=30)
"""Between its creation and the queue, a run is briefly held by a webserver or the daemon; one that stays there was lost with it. Longer
than the 20 s that the queue listener waits for an answer. If it enters the queue after all, its key is no longer due."""
MAX_OF_A_KEY = 5
"""One has entered the queue; the others are about to be refused there, or were lost before."""
WORKING = (dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING)


@dg.sensor(minimum_interval_seconds=FALLBACK_S, default_status=dg.DefaultSensorStatus.RUNNING)
def failures(context: dg.SensorEvaluationContext, platform: PlatformResource) -> dg.SkipReason:
    """Compares each due run with Dagster's records of it."""
    return dg.SkipReason("; ".join(replace_dead(platform.get(), context.instance, platform.launcher.open())) or "every due run is alive")


def replace_dead(platform: Platform, instance: dg.DagsterInstance, launcher: Launcher) -> list[str]:
    """Replace each due run that will not move its job any more; returns descriptions of what was done."""
    awaited = due_runs(platform, ("prepare", "train", "evaluate"))
    replaced = end_forgotten(instance, {d.run_key for d in awaited}, platform.clock())
    for due in awaited:
        known = run_replacements(platform, due)
        why = None if known is None else why_gone(instance, due, known[1], platform.clock())
        if why is None:
            continue
        if due.died + 1 < MAX_REPLACEMENTS:
            if replace_run(platform, due):
                replaced.append(f"{due.run_key}: {why}")
        elif run_replacements(platform, due) is not None:  # asking Dagster took a while
            replaced.append(f"{due.run_key}: {why}")
            _give_up(platform, launcher, due, why)
    return replaced


def _give_up(platform: Platform, launcher: Launcher, due: DueRun, why: str) -> None:
    """Fail the job, whose stage fails whenever it is run. An operator decides on the bill of an evaluation that had its result."""
    error = f"{due.stage} failed {due.died + 1} times: {why}. Submit the job again, or ask an operator to look at its runs"
    now = platform.clock()
    with platform.engine.begin() as conn:
        job = locked(conn, due.job_id, tenant_id=due.tenant)
        fail_in(conn, job, FtError(error), now=now)
        if job.state is JobState.EVALUATING:
            from control_plane.evaluations.service import open_refund_case  # 50 MiB of libraries, which are rarely needed here

            open_refund_case(conn, due.tenant, due.job_id, None, outcome=LOST, now=now)
    if due.attempt:  # released first: the end of a workload that is stopped would be billed as that of a cancelled one
        release(platform, due.job_id, due.attempt)
        launcher.stop(f"{due.job_id}-a{due.attempt}", grace_s=STOP_GRACE_S)


def why_gone(instance: dg.DagsterInstance, due: DueRun, beat: datetime | None, now: datetime) -> str | None:
    """Return why the run of `due` will not move its job any more; None while it may."""
    records = instance.get_run_records(dg.RunsFilter(tags={RUN_KEY_TAG: due.run_key}), limit=MAX_OF_A_KEY)
    if not records:
        return None
    entered = [r for r in records if r.dagster_run.status is not dg.DagsterRunStatus.NOT_STARTED]
    run, changed = (entered or records)[0].dagster_run, (entered or records)[0].update_timestamp
    if not entered and now - changed > UNQUEUED:
        instance.report_run_failed(run, message="it never entered the queue; the job gets another run")
        return f"run {run.run_id} never entered the queue"
    silent_since = max(t for t in (beat, changed) if t is not None)
    if run.status in ENDED:
        return f"run {run.run_id} ended {run.status.value}" if now - changed > pause(due.died) else None
    if run.status not in WORKING:
        return None
    lives, silent = worker_lives(instance, run), now - silent_since
    if lives is False and now - changed > pause(due.died):
        instance.report_run_failed(run, message="its worker's process is gone; the job gets another run")
        return f"run {run.run_id} lost its process"
    on_cluster = not isinstance(instance.run_launcher, DefaultRunLauncher)
    if silent <= (WAITING if on_cluster else HUNG if lives else STALE):
        return None
    end_worker(instance, run)
    instance.report_run_failed(run, message="its worker has not been heard of; the job gets another run")
    return f"run {run.run_id} was silent for {silent.total_seconds():.0f} s"


def pause(died: int) -> timedelta:
    """Return how long after its end a run is replaced, if so many runs of its stage died before."""
    return SETTLED if died == 0 else max(SETTLED, FIRST_PAUSE * PAUSE_GROWS ** (died - 1))


def end_worker(instance: dg.DagsterInstance, run: dg.DagsterRun) -> None:
    """End what is left of a run that gets replaced: its process, or its Job on the cluster, whose pod would wait for a step forever."""
    launcher = instance.run_launcher
    if isinstance(launcher, ForkingRunLauncher):
        launcher.kill(run)
    elif not isinstance(launcher, DefaultRunLauncher):
        launcher.terminate(run.run_id)


def worker_lives(instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool | None:
    """Asks the launcher: a forked run's process is on this machine, and a Job on the cluster has a pod. None: it cannot tell."""
    launcher = instance.run_launcher
    if not launcher.supports_check_run_worker_health:
        return None
    health = launcher.check_run_worker_health(run)
    if health.status in (WorkerStatus.NOT_FOUND, WorkerStatus.FAILED):
        return False
    knows = health.run_worker_id or not isinstance(launcher, DefaultRunLauncher)
    return True if health.status is WorkerStatus.RUNNING and knows else None


def end_forgotten(instance: dg.DagsterInstance, awaited: set[str], now: datetime) -> list[str]:
    """End silent runs that Dagster believes to be working but nothing waits for; returns descriptions of what was ended."""
    ended = []
    filters = dg.RunsFilter(statuses=list(WORKING), updated_before=now - FORGOTTEN)
    for record in instance.get_run_records(filters, limit=MAX_LOOKED_AT, ascending=True):
        run = record.dagster_run
        key = run.tags.get(RUN_KEY_TAG)
        if key is None or key in awaited or run.job_name not in KEYED_JOBS or worker_lives(instance, run):
            continue
        end_worker(instance, run)
        instance.report_run_failed(run, message="its job has moved on, and its worker has not been heard of")
        ended.append(f"{key}: run {run.run_id} was forgotten")
    return ended
