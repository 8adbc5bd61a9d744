"""The code location: merges assets, checks, jobs, sensors and resources; nothing else."""

import dagster as dg

from ft_assets import logs, tracing
from ft_assets.adapters import assets as adapter_assets
from ft_assets.datasets import assets as dataset_assets
from ft_assets.evals import assets as eval_assets
from ft_assets.stages import EVALUATE, PREPARE, REEVALUATE, TRAIN
from ft_assets.training import assets as training_assets
from resources.dagster_platform import PlatformResource
from sensors.admission import admission
from sensors.evaluations import evaluations
from sensors.failures import failures
from sensors.metering import metering
from sensors.model_registry import model_registry
from sensors.outbox import outbox
from sensors.partitions import partitions
from sensors.quotas import quotas
from sensors.retention import retention
from sensors.rollout import rollout
from sensors.scheduling import scheduling
from sensors.submission import submit
from sensors.sweeps import sweeps
from sensors.uploads import uploads

logs.configure_packages("ft-dagster")  # the rest of this process is Dagster's
tracing.configure("ft-dagster")

defs = dg.Definitions(
    assets=dg.load_assets_from_modules([dataset_assets, training_assets, eval_assets, adapter_assets]),
    jobs=[PREPARE, TRAIN, EVALUATE, REEVALUATE, submit],
    sensors=[
        admission,
        scheduling,
        evaluations,
        failures,
        rollout,
        sweeps,
        quotas,
        retention,
        uploads,
        model_registry,
        outbox,
        metering,
        partitions,
    ],
    resources={"platform": PlatformResource()},
)
