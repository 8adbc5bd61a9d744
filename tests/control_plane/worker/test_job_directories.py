"""What a job leaves on the disk of its machine goes once it has ended."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import sqlalchemy as sa

from control_plane.evaluations.tables import evaluations
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.platform.context import Platform
from control_plane.queue.tables import reservations
from control_plane.worker import job_directories
from tests.support.jobs.finished_job import finish
from tests.support.jobs.queued_jobs import queued


def test_directories_go_an_hour_after_the_end_of_their_jobs_unless_they_are_used(
    fresh_platform: Platform, write_chat_rows: Callable[..., Path]
) -> None:
    queue = queued(fresh_platform, write_chat_rows)
    queue.now[0] = datetime.now(UTC)  # `finish` has no other clock
    platform, tenant = queue.platform, queue.tenant()
    waiting, cancelled, reserved = (queue.job(tenant) for _ in range(3))
    request = JobRequest.from_body({"model": "tiny-base", "training_file": queue.files[tenant], "force": True})
    evaluated = jobs.submit(platform, tenant, request).job.id
    adapter = finish(platform, tenant, evaluated)
    for job_id in (cancelled, reserved):
        jobs.cancel(platform, tenant, job_id)
    root = platform.settings.work_dir / "jobs"
    for name in (waiting, cancelled, reserved, evaluated, "ftjob-of-nobody"):
        (root / name / "final").mkdir(parents=True)
        (root / name / "final" / "model.safetensors").write_bytes(b"weights")
    launched = [root.parent / "launcher" / f"{job_id}-a1" / "launched" for job_id in (waiting, cancelled)]
    for mark in launched:
        mark.parent.mkdir(parents=True)
        mark.touch()
    now = queue.now[0]
    with platform.engine.begin() as conn:
        conn.execute(sa.insert(reservations).values(job_id=reserved, attempt=1, pool="local", num_gpus=1, granted_at=now))
        row = {"id": "ev-1", "tenant_id": tenant, "job_id": evaluated, "adapter_id": adapter, "base_model": "m", "base_digest": "d"}
        conn.execute(sa.insert(evaluations).values(**row, kind="manual", state="queued", created_at=now))

    assert job_directories.remove_ended(platform) == 0, "they have just ended"
    queue.now[0] = now + timedelta(hours=2)
    assert job_directories.remove_ended(platform) == 1
    assert sorted(path.name for path in root.iterdir()) == sorted([waiting, reserved, evaluated, "ftjob-of-nobody"])
    assert [mark.exists() for mark in launched] == [True, False]
    with platform.engine.begin() as conn:
        conn.execute(sa.update(reservations).values(released_at=now))
        conn.execute(sa.update(evaluations).values(state="succeeded"))
    assert job_directories.remove_ended(platform) == 2
    assert job_directories.remove_ended(platform) == 0
