"""Monthly GPU-hours: limits, usage, and the effect of one job."""

from __future__ import annotations

from typing import Literal

from control_plane.http.schemas import ApiModel, EpochSeconds


class JobQuota(ApiModel):
    """Effect of one job on its tenant's GPU-hours of the month."""

    month: str
    """Calendar month in UTC, as `yyyy-mm`."""
    used_gpu_hours: float
    """GPU-hours used this month, running jobs included, without this job."""
    held_gpu_hours: float
    """GPU-hours that other admitted jobs are still expected to use."""
    soft_gpu_hours: float | None
    """Soft limit in GPU-hours per month, beyond which usage is reported as overage; null if there is none."""
    hard_gpu_hours: float | None
    """Hard cap in GPU-hours per month, at which jobs are paused; null if there is none."""
    left_gpu_hours: float | None
    """GPU-hours left under the hard cap before this job; null if there is no cap."""
    job_gpu_hours: float
    """GPU-hours this job is expected to use in total; 0 once it is trained."""
    counted: bool
    """Whether the expectation is based on counted tokens. If false, it is a first estimate from the file's size and is replaced once tokens
    are counted."""
    fits: bool
    """Whether the hard cap leaves room for the job."""
    goes_into_overage: bool
    """Whether the job is expected to exceed the soft limit."""
    overage_gpu_hours: float
    """GPU-hours of the job expected beyond the soft limit."""
    on_hard_cap: str
    """What happens to running and waiting jobs when the hard cap is reached, in words."""


class Quota(ApiModel):
    """Limits of a tenant and its usage this month."""

    object: Literal["quota"] = "quota"
    """Object type, always `quota`."""
    tenant: str
    """Id of the tenant."""
    tier: str
    """Tier of the tenant: `free`, `standard` or `premium`."""
    month: str
    """Calendar month in UTC, as `yyyy-mm`."""
    month_ends_at: EpochSeconds
    """When the month ends and usage resets, as Unix time in seconds."""
    soft_gpu_hours: float | None
    """Soft limit in GPU-hours per month, beyond which usage is reported as overage; null if there is none."""
    hard_gpu_hours: float | None
    """Hard cap in GPU-hours per month, at which jobs are paused; null if there is none."""
    used_gpu_hours: float
    """GPU-hours used this month, running jobs included; refunded time does not count."""
    running_gpu_hours: float
    """The part of `used_gpu_hours` from attempts running now."""
    held_gpu_hours: float
    """GPU-hours that admitted jobs are still expected to use."""
    left_gpu_hours: float | None
    """GPU-hours left for further jobs: the hard cap less what is used and held. Null if there is no cap."""
    overage_gpu_hours: float
    """GPU-hours used beyond the soft limit."""
    at_hard_cap: bool
    """Whether the hard cap is reached."""
    on_hard_cap: str
    """What happens to running and waiting jobs when the hard cap is reached, in words."""
    jobs_in_flight: int
    """Unfinished jobs, including paused ones."""
    max_jobs_in_flight: int
    """Maximum number of unfinished jobs at a time."""
    jobs_paused_for_cap: int
    """Jobs paused because the hard cap was reached; they resume automatically when GPU-hours become available."""
    starts_within_s: float | None
    """Seconds from submission within which the tier promises to start a job; null if it promises none."""
    may_train_full: bool
    """Whether the tier includes full-parameter training and models of 60 billion parameters or more."""
    max_file_bytes: int
    """Maximum size of a file in bytes."""
    max_examples: int
    """Maximum number of rows in a dataset, after duplicates are dropped."""
    requests_per_minute: int
    """Requests per minute for each API key that has no lower limit."""
