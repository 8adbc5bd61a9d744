"""Submission through Dagster: the ``submit`` job writes what the REST API would, through the same admission."""

from typing import Any

import dagster as dg
from pydantic import Field

from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from ft_assets.platform_resource import PlatformResource
from resources.dagster.run_tags import runs_of_job


class Submission(dg.Config):
    """A fine-tuning request with the fields of ``POST /v1/fine_tuning/jobs``, for one tenant."""

    tenant: str
    model: str
    training_file: str | None = None
    """None for a mixture, whose `training_files` are in `options`."""
    validation_file: str | None = None
    suffix: str | None = None
    seed: int | None = None
    options: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the request: method, hyperparameters, eval_config, ..."""


@dg.op
def register(context: dg.OpExecutionContext, config: Submission, platform: PlatformResource) -> None:
    """Admit the submission; a refusal fails the run with the same reason as over REST."""
    named = {k: getattr(config, k) for k in ("model", "training_file", "validation_file", "suffix", "seed")}
    job = jobs.submit(platform.get(), config.tenant, JobRequest.from_body({**config.options, **named})).job
    context.log.info(f"admitted {job.id}")
    runs = dg.MetadataValue.url(runs_of_job(job.id))
    context.add_output_metadata({"job": job.id, "state": job.state.value, "runs_of_job": runs})


@dg.job(executor_def=dg.in_process_executor)
def submit() -> None:
    """Submit a fine-tuning job; the admission sensor takes over from there."""
    register()
