"""Run requests for due runs, shared by the sensors and the queue listener."""

from collections.abc import Sequence

import dagster as dg

from control_plane.platform.context import Platform
from control_plane.queue import launches
from control_plane.queue.launches import DueRun
from ft_assets.partitions import partition_key
from ft_assets.telemetry import correlation, spans
from resources.dagster.run_tags import (
    ASKED_BY_TAG,
    ATTEMPT_TAG,
    GPUS_TAG,
    JOB_TAG,
    POOL_TAG,
    REASON_TAG,
    RUN_KEY_TAG,
    SENSOR_TAG,
    TENANT_TAG,
    TIER_TAG,
    TRACE_TAG,
)
from sensors import step_pods

MAX_REQUESTS_PER_TICK = 25
"""Runs are created one by one (about 0.1 s each) within a tick that has 60 s."""
KEYS_PER_QUERY = 4 * MAX_REQUESTS_PER_TICK
"""Runs named by one query of Dagster's storage: a burst may make thousands due, of which a tick requests 25."""

REQUESTED_BY = {"prepare": "admission", "train": "scheduling", "evaluate": "scheduling"}
"""The sensor that owns the runs of a stage. The queue listener requests them earlier on its behalf, so that they are listed on that
sensor's page."""

LIVE = (
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
)


def missing(platform: Platform, instance: dg.DagsterInstance, due: Sequence[DueRun], *, by: str) -> list[DueRun]:
    """Return those of `due` without a run that `by` may launch now; as many as fit into one tick.

    A key has one run forever: one that ended without moving its job is replaced under another key (sensor ``failures``).
    """
    left = launches.unbound(platform, due)
    for start in range(0, len(left), KEYS_PER_QUERY):
        looked_at = left[start : start + KEYS_PER_QUERY]
        made = instance.get_runs(dg.RunsFilter(tags={RUN_KEY_TAG: [d.run_key for d in looked_at]}))
        served = {run.tags[RUN_KEY_TAG] for run in made}
        won = launches.claim(platform, [d for d in looked_at if d.run_key not in served][:MAX_REQUESTS_PER_TICK], by=by)
        if won:
            return won
    return []


def run_request(due: DueRun, *, by: str = "sensor") -> dg.RunRequest:
    """Return the request of one due run, in the trace of its job; operators filter by its tags in Dagster's UI."""
    about = correlation.scope(tenant=due.tenant, job=due.job_id, attempt=due.attempt or None)
    with about, spans.span(f"request {due.stage}", parent=due.trace_parent, kind="producer", ft__run_key=due.run_key):
        return _request(due, spans.current() if due.trace_parent else None, by)


def _request(due: DueRun, trace_parent: str | None, by: str) -> dg.RunRequest:
    tags = {
        TENANT_TAG: due.tenant,
        TIER_TAG: due.tier,
        JOB_TAG: due.job_id,
        REASON_TAG: due.reason,
        RUN_KEY_TAG: due.run_key,
        ASKED_BY_TAG: by,
        SENSOR_TAG: REQUESTED_BY[due.stage],
        "dagster/priority": str(due.priority),
    }
    if trace_parent:
        tags[TRACE_TAG] = trace_parent
    if due.pool:
        tags |= {POOL_TAG: due.pool, GPUS_TAG: str(due.num_gpus), ATTEMPT_TAG: str(due.attempt)}
    return dg.RunRequest(
        run_key=due.run_key,
        job_name=due.stage,
        partition_key=partition_key(due.tenant, due.job_id),
        run_config=step_pods.run_config(due),
        tags=tags,
    )
