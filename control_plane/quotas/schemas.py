"""GPU-hours of a month: what there is, what is used, and what a job takes of it."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class JobQuota(BaseModel):
    """What a job means for its tenant's month."""

    month: str = Field(description="yyyy-mm, UTC.")
    used_gpu_hours: float = Field(description="This month, running jobs included, this one not.")
    held_gpu_hours: float = Field(description="What other admitted jobs are still expected to take.")
    soft_gpu_hours: float | None = Field(description="A month; what goes beyond is billed as overage. Null: there is no such line.")
    hard_gpu_hours: float | None = Field(description="A month; nothing runs beyond. Null: no cap.")
    left_gpu_hours: float | None = Field(description="Up to the hard cap, before this job.")
    job_gpu_hours: float = Field(description="Expected of this job; 0 once it is trained.")
    counted: bool = Field(description="From counted tokens; false: a first estimate from the size of the file, replaced once counted.")
    fits: bool = Field(description="The hard cap has room for the job.")
    goes_into_overage: bool
    overage_gpu_hours: float = Field(description="How much of the job exceeds the soft limit.")
    on_hard_cap: str = Field(description="What happens to running and waiting jobs when the hard cap is reached.")


class Quota(BaseModel):
    """The tenant's limits, and where it stands in this month."""

    object: Literal["quota"] = "quota"
    tenant: str
    tier: str
    month: str = Field(description="yyyy-mm, UTC.")
    month_ends_at: int = Field(description="From then on nothing is used of the limits.")
    soft_gpu_hours: float | None
    hard_gpu_hours: float | None
    used_gpu_hours: float = Field(description="Refunded attempts not included.")
    running_gpu_hours: float = Field(description="Of what is used: attempts that run now.")
    held_gpu_hours: float = Field(description="What admitted jobs are still expected to take.")
    left_gpu_hours: float | None = Field(description="For further jobs, up to the hard cap. Null: no cap.")
    overage_gpu_hours: float = Field(description="Used beyond the soft limit.")
    at_hard_cap: bool
    on_hard_cap: str
    jobs_in_flight: int
    max_jobs_in_flight: int
    jobs_paused_for_cap: int
    starts_within_s: float | None = Field(description="Promised of jobs in this tier. Null: best effort, a wait has no bound.")
    may_train_full: bool = Field(description="Full-parameter training and models of the 70B class.")
    max_file_bytes: int
    max_examples: int = Field(description="Of one dataset.")
    requests_per_minute: int = Field(description="Of each key that has no limit of its own.")
