"""Places queued jobs by the scheduler's policy, and requests runs for jobs that hold a reservation or have been trained.

``sensors.queue_listener`` does the same as soon as a job moves, and every five seconds while a job is open; this covers for it.
"""

import dagster as dg

from control_plane.queue.cycle import run_cycle
from control_plane.queue.launches import due_runs
from ft_assets.asset_jobs import EVALUATE, TRAIN
from ft_assets.platform_resource import PlatformResource
from sensors.run_requests import FALLBACK_S, missing, run_request


@dg.sensor(jobs=[TRAIN, EVALUATE], minimum_interval_seconds=FALLBACK_S, default_status=dg.DefaultSensorStatus.RUNNING)
def scheduling(context: dg.SensorEvaluationContext, platform: PlatformResource) -> dg.SensorResult:
    """Runs one scheduling cycle, then requests the runs of every reservation and every evaluation that is due."""
    opened = platform.get()
    for decision in run_cycle(opened):
        context.log.info(str(decision))
    due = missing(opened, context.instance, due_runs(opened, ("train", "evaluate")), by="sensor")
    return dg.SensorResult(run_requests=[run_request(d) for d in due])
