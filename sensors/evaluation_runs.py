"""Requests runs for ordered evaluations, and another one if a run died."""

import dagster as dg

from ft_assets.adapters import reevaluation_step
from ft_assets.asset_jobs import REEVALUATE
from ft_assets.partitions import JOBS
from ft_assets.platform_resource import PlatformResource
from sensors.evaluation_requests import due_requests
from sensors.run_requests import FALLBACK_S


@dg.sensor(job=REEVALUATE, minimum_interval_seconds=FALLBACK_S, default_status=dg.DefaultSensorStatus.RUNNING)
def evaluations(context: dg.SensorEvaluationContext, platform: PlatformResource) -> dg.SensorResult | dg.SkipReason:
    """Requests a run for each order that holds a reservation or has its result, once per number of runs."""
    reevaluation_step.take_up(platform.get())
    requests = due_requests(platform.get(), context.instance, platform.launcher.open())
    if not requests:
        return dg.SkipReason("no evaluation needs a run")
    return dg.SensorResult(
        run_requests=requests, dynamic_partitions_requests=[JOBS.build_add_request(sorted({str(r.partition_key) for r in requests}))]
    )
