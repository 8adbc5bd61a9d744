"""The Dagster jobs of a fine-tuning job, keyed by ``<tenant>:<job>``: the scheduler releases the first three, an ordered evaluation the
last."""

import os

import dagster as dg


def executor() -> dg.ExecutorDefinition:
    """Returns the executor of steps: the run's process on one machine, or separate pods on a cluster (``FT_EXECUTOR=k8s``)."""
    if os.environ.get("FT_EXECUTOR") != "k8s":
        return dg.in_process_executor
    from dagster_k8s import k8s_job_executor  # takes 2 s to import and is not needed on one machine

    return k8s_job_executor


PREPARE = dg.define_asset_job("prepare", selection=["dataset", "tokenized_pack"], executor_def=executor())
"""Runs on CPU before the queue, so that bad data ends a job before it waits for a GPU."""
TRAIN = dg.define_asset_job("train", selection=["checkpoint"], executor_def=executor())
"""Runs only with a reservation."""
EVALUATE = dg.define_asset_job("evaluate", selection=["eval_report", "adapter"], executor_def=executor())
"""Runs with a reservation of its own, of one GPU, so that a gang never holds its GPUs during an evaluation."""
REEVALUATE = dg.define_asset_job("reevaluate", selection=["adapter_evaluation"], executor_def=executor())
"""Re-evaluates a registered adapter, on other files of its base or with other suites."""
