"""Run requests for the runs that jobs are due."""

from collections.abc import Sequence

import dagster as dg

from control_plane.service.scheduling import DueRun
from ft_assets.partitions import partition_key

MAX_REQUESTS_PER_TICK = 25
"""Runs are created one by one (about 0.1 s each) inside a tick that has 60 s."""


LIVE = (
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
)


def missing(instance: dg.DagsterInstance, due: Sequence[DueRun]) -> list[DueRun]:
    """Those of `due` that no live run serves, as many as fit into one tick."""
    if not due:
        return []
    served = {run.tags.get("ft/run_key") for run in instance.get_runs(dg.RunsFilter(statuses=list(LIVE)))}
    return [d for d in due if d.run_key not in served][:MAX_REQUESTS_PER_TICK]


def run_request(due: DueRun) -> dg.RunRequest:
    """The request of one due run; its tags are what operators filter by in Dagster's UI."""
    tags = {
        "ft/tenant": due.tenant,
        "ft/job": due.job_id,
        "ft/run_key": due.run_key,
        "dagster/priority": str(due.priority),
    }
    if due.pool:
        tags["ft/pool"] = due.pool
        tags["ft/gpus"] = str(due.num_gpus)
    return dg.RunRequest(run_key=due.run_key, job_name=due.stage, partition_key=partition_key(due.tenant, due.job_id), tags=tags)
