"""Tags of Dagster runs, and paths of UI pages that filter by them.

Dagster's run list hides tags that start with ``dagster/`` behind "View all tags", but can filter by them. So tags that distinguish runs
are outside of that prefix, next to Dagster's own ``dagster/partition`` (``<tenant>:<job>``), which it also shows; the others are inside.
"""

from urllib.parse import urlencode

TENANT_TAG, EVALUATION_TAG = "ft/tenant", "ft/evaluation"
"""Tags that the list shows. An evaluation is one that a tenant ordered; a job may have several."""

JOB_TAG, TIER_TAG, REASON_TAG = "dagster/ft_job", "dagster/ft_tier", "dagster/ft_reason"
POOL_TAG, GPUS_TAG, ATTEMPT_TAG = "dagster/ft_pool", "dagster/ft_gpus", "dagster/ft_attempt"
"""Tags of the reservation."""
RUN_KEY_TAG, ASKED_BY_TAG = "dagster/ft_run_key", "dagster/ft_asked_by"
REFUSED_KEY_TAG = "dagster/ft_refused_run_key"
"""Run key of a refused request."""
PREPARE_SLOT = "dagster/ft_prepare_slot"
"""Its value is the tenant."""
TRACE_TAG = "dagster/ft_traceparent"
"""The span that requested the run."""
SENSOR_TAG = "dagster/sensor_name"
"""Sensor that requested the run: Dagster sets it and shows it as "Launched by". A run without it counts as launched by hand."""


def runs_of_job(job_id: str) -> str:
    """Return the path of a job's run list in Dagster's UI."""
    return "/runs?" + urlencode({"q[0]": f"tag:{JOB_TAG}={job_id}"})


def page_of_asset(name: str, *, partition: str) -> str:
    """Return the path of an asset's partition in Dagster's UI."""
    return f"/assets/{name}?" + urlencode({"partition": partition})
