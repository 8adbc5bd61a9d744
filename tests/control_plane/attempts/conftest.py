"""A job that waits for GPUs."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.queue_entry import mark_packed
from control_plane.jobs.submission import JobRequest
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from tests.support.jobs.training_specs import SPEC


@pytest.fixture
def queued(fresh_platform: Platform, write_chat_rows: Callable[..., Path]) -> Callable[..., tuple[Platform, str, str]]:
    """Makes a tenant with one job that is packed and waits for GPUs."""

    def make(*, tier: str = "standard") -> tuple[Platform, str, str]:
        owner: Tenant
        owner, _ = tenants.create(fresh_platform, f"t-{uuid.uuid4().hex[:8]}", tier=tier)
        with write_chat_rows().open("rb") as rows:
            file = uploaded_files.create(fresh_platform, owner.id, rows, filename="rows.jsonl", purpose="fine-tune")
        request = JobRequest.from_body({"model": "tiny-base", "training_file": file.id})
        job = jobs.submit(fresh_platform, owner.id, request).job
        mark_packed(fresh_platform, owner.id, job.id, spec=SPEC, total_steps=10, expected_s=60.0)
        return fresh_platform, owner.id, job.id

    return make
