"""The code location: merges assets, checks, jobs, sensors and resources; nothing else."""

import os

import dagster as dg

from ft_assets.adapters import assets as adapter_assets
from ft_assets.datasets import assets as dataset_assets
from ft_assets.evals import assets as eval_assets
from ft_assets.partitions import JOBS
from ft_assets.training import assets as training_assets
from resources.dagster_platform import PlatformResource
from sensors.admission import admission
from sensors.failures import failures
from sensors.rollout import rollout
from sensors.scheduling import scheduling
from sensors.submission import submit


def executor() -> dg.ExecutorDefinition:
    """Steps run in the run's process on one machine, and as pods of their own on a cluster (``FT_EXECUTOR=k8s``)."""
    if os.environ.get("FT_EXECUTOR") != "k8s":
        return dg.in_process_executor
    from dagster_k8s import k8s_job_executor  # 2 s of imports that one machine does not need

    return k8s_job_executor


def stage(name: str, *assets: str) -> dg.UnresolvedAssetJobDefinition:
    """One of the three Dagster jobs of a fine-tuning job; all are keyed by ``<tenant>:<job>``."""
    return dg.define_asset_job(name, selection=dg.AssetSelection.assets(*assets), partitions_def=JOBS, executor_def=executor())


defs = dg.Definitions(
    assets=dg.load_assets_from_modules([dataset_assets, training_assets, eval_assets, adapter_assets]),
    jobs=[stage("prepare", "dataset", "tokenized_pack"), stage("train", "checkpoint"), stage("evaluate", "eval_report", "adapter"), submit],
    sensors=[admission, scheduling, failures, rollout],
    resources={"platform": PlatformResource()},
)
