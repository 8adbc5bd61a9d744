"""Logs of a job's attempts, as they were stored beside its checkpoints."""

from __future__ import annotations

from control_plane.service import jobs
from control_plane.service.platform import Platform
from ft_assets.errors import NotFound
from ft_assets.layout import attempt_prefix

LOG_NAME = "train.log"


def read(platform: Platform, tenant: str, job_id: str, *, attempt: int | None = None) -> str:
    """The training log of `attempt` (default: the job's last one); ``NotFound`` until it was stored."""
    job = jobs.get(platform, tenant, job_id).row
    number = job["attempt"] if attempt is None else attempt
    key = f"{attempt_prefix(tenant, job_id, number)}/{LOG_NAME}"
    if number < 1 or not platform.objects.exists(key):
        raise NotFound(
            f"job {job_id} has no stored log of attempt {number}; it is stored when the attempt ends", code="log_not_found", param="attempt"
        )
    return platform.objects.get_bytes(key).decode(errors="replace")
