"""The Dagster jobs of a fine-tuning job, keyed by ``<tenant>:<job>``: the scheduler releases the first three, an ordered evaluation the
last."""

import os

import dagster as dg

from resources.dagster.private_api import UnresolvedAssetJobDefinition


def executor() -> dg.ExecutorDefinition:
    """Returns the executor of steps: the run's process on one machine, or separate pods on a cluster (``FT_EXECUTOR=k8s``)."""
    if os.environ.get("FT_EXECUTOR") != "k8s":
        return dg.in_process_executor
    from dagster_k8s import k8s_job_executor  # takes 2 s to import and is not needed on one machine

    return k8s_job_executor


def _stage(name: str, *assets: str) -> UnresolvedAssetJobDefinition:
    return dg.define_asset_job(name, selection=dg.AssetSelection.assets(*assets), executor_def=executor())


PREPARE = _stage("prepare", "dataset", "tokenized_pack")
"""Runs on CPU before the queue, so that bad data ends a job before it waits for a GPU."""
TRAIN = _stage("train", "checkpoint")
"""Runs only with a reservation."""
EVALUATE = _stage("evaluate", "eval_report", "adapter")
"""Runs without a reservation, limited by FT_EVALUATE_RUNS, so that a gang never holds GPUs during an evaluation."""
REEVALUATE = _stage("reevaluate", "adapter_evaluation")
"""Re-evaluates a registered adapter, on other files of its base or with other suites."""
