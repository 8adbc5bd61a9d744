"""Tags of Dagster's runs, and the pages of its UI that they lead to.

Dagster's list of runs shows every tag of a run, except those below ``dagster/``: those are behind "View all tags", and the list filters by
them like by any other. So what tells one run from the next stands outside, beside Dagster's own ``dagster/partition``, which is shown too
(``<tenant>:<job>``), and the rest inside.
"""

from urllib.parse import urlencode

TENANT_TAG, EVALUATION_TAG = "ft/tenant", "ft/evaluation"
"""The two that are shown; an evaluation is that of an order, which a job has several of."""

JOB_TAG, TIER_TAG, REASON_TAG = "dagster/ft_job", "dagster/ft_tier", "dagster/ft_reason"
POOL_TAG, GPUS_TAG, ATTEMPT_TAG = "dagster/ft_pool", "dagster/ft_gpus", "dagster/ft_attempt"
"""Of the reservation."""
RUN_KEY_TAG, ASKED_BY_TAG = "dagster/ft_run_key", "dagster/ft_asked_by"
REFUSED_KEY_TAG = "dagster/ft_refused_run_key"
"""The run key of a request that was refused."""
PREPARE_SLOT, EVALUATE_SLOT = "dagster/ft_prepare_slot", "dagster/ft_evaluate_slot"
"""Their value is the tenant."""
TRACE_TAG = "dagster/ft_traceparent"
"""The span that asked for the run."""
SENSOR_TAG = "dagster/sensor_name"
"""Whose request a run is: Dagster sets it on runs of a tick, and shows it as "Launched by". A run without it counts as launched by hand."""


def runs_of_job(job_id: str) -> str:
    """Path of the list of a job's runs, on whatever host Dagster's UI is reached."""
    return "/runs?" + urlencode({"q[0]": f"tag:{JOB_TAG}={job_id}"})


def page_of_asset(name: str, *, partition: str) -> str:
    """Path of what Dagster's UI shows of one partition of an asset."""
    return f"/assets/{name}?" + urlencode({"partition": partition})
