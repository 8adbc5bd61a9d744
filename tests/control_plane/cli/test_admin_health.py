"""``ft admin health``: what operators see of verdicts that hold."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from control_plane.attempts.tables import health_verdicts
from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants


def test_verdicts_that_hold_are_listed_and_those_that_are_over_are_not(
    offline: Callable[..., Any], fresh_platform: Platform, write_chat_rows: Callable[..., Any]
) -> None:
    platform = fresh_platform
    owner, _ = tenants.create(platform, "acme")
    with write_chat_rows().open("rb") as rows:
        file = uploaded_files.create(platform, owner.id, rows, filename="rows.jsonl", purpose="fine-tune")
    job = jobs.submit(platform, owner.id, JobRequest.from_body({"model": "tiny-base", "training_file": file.id})).job
    now = platform.clock()
    shared = {"job_id": job.id, "attempt": 1, "audience": "operator", "level": "warn", "message": "It is slow.", "raised_at": now}
    with platform.engine.begin() as conn:
        for code, cleared in (("throughput_low", None), ("data_starved", now)):
            values = {"id": uuid.uuid4().hex, "code": code, "data": {"limit": 0.5}, "cleared_at": cleared, **shared}
            conn.execute(sa.insert(health_verdicts).values(**values))
    database = str(platform.settings.database_url)
    (found,) = offline("admin", "health", "--json", FT_DATABASE_URL=database).json
    assert (found["job_id"], found["tenant_id"], found["code"], found["limit"]) == (job.id, "acme", "throughput_low", 0.5)
    shown = offline("admin", "health", FT_DATABASE_URL=database).out
    assert "throughput_low" in shown and "data_starved" not in shown
