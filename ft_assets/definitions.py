"""The code location: only merges assets, checks, jobs, sensors and resources."""

import dagster as dg

from control_plane.platform.settings import load
from core.telemetry import logs, spans
from ft_assets.adapters import assets as adapter_assets
from ft_assets.asset_jobs import EVALUATE, PREPARE, REEVALUATE, TRAIN
from ft_assets.datasets import assets as dataset_assets
from ft_assets.evals import assets as eval_assets
from ft_assets.platform_resource import PlatformResource, configured_resources
from ft_assets.training import assets as training_assets
from sensors.adapter_stages import adapter_stages
from sensors.admission import admission
from sensors.evaluation_runs import evaluations
from sensors.partition_cleanup import partitions
from sensors.recovery import failures
from sensors.run_retention import daily_run_retention, run_retention
from sensors.scheduling_cycle import scheduling
from sensors.submit_job import submit
from sensors.validated_datasets import validated_datasets

logs.configure_packages("ft-dagster")  # other logs of this process belong to Dagster
spans.configure("ft-dagster")

connected = configured_resources(load())
defs = dg.Definitions(
    assets=dg.load_assets_from_modules([dataset_assets, training_assets, eval_assets, adapter_assets], include_specs=True),
    jobs=[PREPARE, TRAIN, EVALUATE, REEVALUATE, submit, run_retention],
    schedules=[daily_run_retention],
    sensors=[admission, scheduling, evaluations, validated_datasets, adapter_stages, failures, partitions],
    resources={**connected, "platform": PlatformResource(**connected)},
)
