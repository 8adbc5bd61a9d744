"""Files and jobs made through the service itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from control_plane.service import files, jobs
from control_plane.service.platform import Platform
from control_plane.service.submission import JobRequest
from control_plane.tenants import Tenant


@pytest.fixture
def training_file(platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path]) -> str:
    """Id of a validated file of `tenant`."""
    with write_chat_rows().open("rb") as stream:
        file = files.create(platform, tenant.id, stream, filename="support.jsonl", purpose="fine-tune")
    assert file["status"] == "processed", file["status_details"]
    return str(file["id"])


@pytest.fixture
def job_id(platform: Platform, tenant: Tenant, training_file: str) -> str:
    """Id of a job that was just submitted."""
    request = JobRequest.from_body({"model": "tiny-base", "training_file": training_file})
    return str(jobs.submit(platform, tenant.id, request).job["id"])
