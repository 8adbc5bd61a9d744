"""The code location: only merges assets, checks, jobs, sensors and resources."""

import dagster as dg

from ft_assets.adapters import assets as adapter_assets
from ft_assets.asset_jobs import EVALUATE, PREPARE, REEVALUATE, TRAIN
from ft_assets.datasets import assets as dataset_assets
from ft_assets.evals import assets as eval_assets
from ft_assets.platform_resource import PlatformResource
from ft_assets.telemetry import logs, spans
from ft_assets.training import assets as training_assets
from sensors.adapter_stages import adapter_stages
from sensors.admission import admission
from sensors.evaluation_runs import evaluations
from sensors.partition_cleanup import partitions
from sensors.recovery import failures
from sensors.scheduling_cycle import scheduling
from sensors.submit_job import submit

logs.configure_packages("ft-dagster")  # other logs of this process belong to Dagster
spans.configure("ft-dagster")

defs = dg.Definitions(
    assets=dg.load_assets_from_modules([dataset_assets, training_assets, eval_assets, adapter_assets]),
    jobs=[PREPARE, TRAIN, EVALUATE, REEVALUATE, submit],
    sensors=[admission, scheduling, evaluations, adapter_stages, failures, partitions],
    resources={"platform": PlatformResource()},
)
