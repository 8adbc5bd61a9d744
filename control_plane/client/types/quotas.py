# Written by `python -m tools.client` from the API's OpenAPI document: change that, and run it again.
"""Objects of the API: quotas."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict


class JobQuota(TypedDict):
    """What a job means for its tenant's month."""

    month: str
    """yyyy-mm, UTC."""
    used_gpu_hours: float
    """This month, running jobs included, this one not."""
    held_gpu_hours: float
    """What other admitted jobs are still expected to take."""
    soft_gpu_hours: float | None
    """A month; what goes beyond is billed as overage. Null: there is no such line."""
    hard_gpu_hours: float | None
    """A month; nothing runs beyond. Null: no cap."""
    left_gpu_hours: float | None
    """Up to the hard cap, before this job."""
    job_gpu_hours: float
    """Expected of this job; 0 once it is trained."""
    counted: bool
    """From counted tokens; false: a first estimate from the size of the file, replaced once counted."""
    fits: bool
    """The hard cap has room for the job."""
    goes_into_overage: bool
    overage_gpu_hours: float
    """How much of the job exceeds the soft limit."""
    on_hard_cap: str
    """What happens to running and waiting jobs when the hard cap is reached."""


class Quota(TypedDict):
    """The tenant's limits, and where it stands in this month."""

    object: NotRequired[Literal["quota"]]
    tenant: str
    tier: str
    month: str
    """yyyy-mm, UTC."""
    month_ends_at: int
    """From then on nothing is used of the limits."""
    soft_gpu_hours: float | None
    hard_gpu_hours: float | None
    used_gpu_hours: float
    """Refunded attempts not included."""
    running_gpu_hours: float
    """Of what is used: attempts that run now."""
    held_gpu_hours: float
    """What admitted jobs are still expected to take."""
    left_gpu_hours: float | None
    """For further jobs, up to the hard cap. Null: no cap."""
    overage_gpu_hours: float
    """Used beyond the soft limit."""
    at_hard_cap: bool
    on_hard_cap: str
    jobs_in_flight: int
    max_jobs_in_flight: int
    jobs_paused_for_cap: int
    starts_within_s: float | None
    """Promised of jobs in this tier. Null: best effort, a wait has no bound."""
    may_train_full: bool
    """Full-parameter training and models of the 70B class."""
    max_file_bytes: int
    max_examples: int
    """Of one dataset."""
    requests_per_minute: int
    """Of each key that has no limit of its own."""
