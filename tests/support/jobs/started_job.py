"""A job whose training has begun, for tests that train nothing."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from control_plane.attempts import service as attempts
from control_plane.attempts.service import Claim
from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.queue_entry import mark_packed
from control_plane.jobs.submission import JobRequest
from control_plane.platform.context import Platform
from control_plane.queue import cycle
from control_plane.tenants import service as tenants
from engine.training.spec import TrainingSpec
from tests.support.jobs.training_specs import SPEC


def start_job(
    platform: Platform,
    write_chat_rows: Callable[..., Any],
    *,
    model: str = "tiny-base",
    spec: TrainingSpec = SPEC,
    started_at: float | None = 1000.0,
) -> Claim:
    """The first attempt of a new job of a new tenant; its workload still waits if `started_at` is None."""
    owner, _ = tenants.create(platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
    with write_chat_rows().open("rb") as rows:
        file = uploaded_files.create(platform, owner.id, rows, filename="rows.jsonl", purpose="fine-tune")
    job = jobs.submit(platform, owner.id, JobRequest.from_body({"model": model, "training_file": file.id})).job
    mark_packed(platform, owner.id, job.id, spec=spec, total_steps=1000, expected_s=60.0)
    cycle.run_cycle(platform)
    claim = attempts.claim(platform, owner.id, job.id)
    if started_at is not None:
        attempts.mark_started(platform, claim, started_at=started_at)
    return claim
