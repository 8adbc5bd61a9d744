"""Run requests for the runs that jobs are due."""

from collections.abc import Sequence

import dagster as dg

from control_plane.service.due_runs import DueRun
from ft_assets import context, tracing
from ft_assets.partitions import partition_key
from resources.dagster_platform import TRACE_TAG

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
    """The request of one due run, in the trace of its job; its tags are what operators filter by in Dagster's UI."""
    about = context.scope(tenant=due.tenant, job=due.job_id, attempt=due.attempt or None)
    with about, tracing.span(f"request {due.stage}", parent=due.trace_parent, kind="producer", ft__run_key=due.run_key):
        return _request(due, tracing.current() if due.trace_parent else None)


def _request(due: DueRun, trace_parent: str | None) -> dg.RunRequest:
    tags = {
        "ft/tenant": due.tenant,
        "ft/job": due.job_id,
        "ft/run_key": due.run_key,
        "dagster/priority": str(due.priority),
    }
    if trace_parent:
        tags[TRACE_TAG] = trace_parent
    if due.pool:
        tags["ft/pool"] = due.pool
        tags["ft/gpus"] = str(due.num_gpus)
    return dg.RunRequest(run_key=due.run_key, job_name=due.stage, partition_key=partition_key(due.tenant, due.job_id), tags=tags)
