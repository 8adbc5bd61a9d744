"""Checkpoints of ended jobs: all that are due go in one call, whatever is wanted or cannot be deleted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.attempts import agents, checkpoint_retention
from control_plane.attempts import service as attempts
from control_plane.attempts.claims import Ending
from control_plane.attempts.tables import checkpoints
from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.platform.context import Platform
from control_plane.platform.protocols import ObjectInfo, WorkloadPhase, WorkloadStatus
from control_plane.tenants import service as tenants
from ft_assets import layout
from ft_assets.errors import Unavailable
from tests.support.jobs.started_job import start_job

NUM_JOBS = 6


@dataclass
class Ended:
    platform: Platform
    ids: list[str]

    def put(self, job_id: str) -> None:
        self.platform.objects.put_bytes(f"cp/{job_id}/manifest.json", b"{}")

    def there(self) -> list[str]:
        return [i for i in self.ids if self.platform.objects.exists(f"cp/{i}/manifest.json")]


@pytest.fixture
def ended(fresh_platform: Platform, write_chat_rows: Callable[..., Any]) -> Ended:
    """Jobs that ended long ago, the first one first, each with a checkpoint; and a job that waits."""
    owner, _ = tenants.create(fresh_platform, "owner", tier="premium")
    with write_chat_rows().open("rb") as rows:
        file = uploaded_files.create(fresh_platform, owner.id, rows, filename="rows.jsonl", purpose="fine-tune")

    def submit(seed: int) -> str:
        request = JobRequest.from_body({"model": "tiny-base", "training_file": file.id, "seed": seed})
        return str(jobs.submit(fresh_platform, owner.id, request).job.id)

    made = Ended(fresh_platform, [submit(n) for n in range(NUM_JOBS)])
    now = fresh_platform.clock()
    with fresh_platform.engine.begin() as conn:
        for n, job_id in enumerate(made.ids):
            over = {"state": "failed", "finished_at": now - timedelta(days=30 - n)}
            conn.execute(sa.update(jobs_table).where(jobs_table.c.id == job_id).values(**over))
            row = {"id": f"ckpt-{n}", "job_id": job_id, "attempt": 1, "step": 5, "object_prefix": f"cp/{job_id}", "manifest_sha256": "0"}
            conn.execute(sa.insert(checkpoints).values(**row, metrics={}, created_at=now))
            made.put(job_id)
    made.ids.append(submit(99))
    return made


def test_one_call_takes_all_that_are_due_and_leaves_what_a_waiting_job_starts_from(
    ended: Ended
) -> None:  # fmt: skip
    with ended.platform.engine.begin() as conn:
        start = {"checkpoint_id": "ckpt-0"}
        conn.execute(sa.update(jobs_table).where(jobs_table.c.id == ended.ids[-1]).values(warm_start=start))
    assert checkpoint_retention.retire_ended(ended.platform, at_a_time=2) == NUM_JOBS - 1
    assert ended.there() == ended.ids[:1]
    assert checkpoint_retention.retire_ended(ended.platform) == 0
    with ended.platform.engine.begin() as conn:
        conn.execute(
            sa.update(jobs_table).where(jobs_table.c.id == ended.ids[-1]).values(state="cancelled", finished_at=ended.platform.clock())
        )
    assert checkpoint_retention.retire_ended(ended.platform) == 1
    assert ended.there() == []


@dataclass
class Refusing:
    """A store that deletes nothing of some jobs."""

    objects: Any
    of: tuple[str, ...]

    def list(self, prefix: str) -> list[ObjectInfo]:
        return list(self.objects.list(prefix))

    def delete(self, key: str) -> None:
        if any(job_id in key for job_id in self.of):
            raise Unavailable("the store does not answer")
        self.objects.delete(key)


def test_what_the_store_does_not_delete_waits_behind_the_others(ended: Ended) -> None:
    objects: Any = Refusing(ended.platform.objects, tuple(ended.ids[:2]))
    stuck = replace(ended.platform, objects=objects)
    assert checkpoint_retention.retire_ended(stuck, at_a_time=2) == NUM_JOBS - 2
    assert ended.there() == ended.ids[:2]
    third = ended.ids[2]
    with ended.platform.engine.begin() as conn:
        conn.execute(sa.update(checkpoints).where(checkpoints.c.job_id == third).values(retired_at=None, removed_at=None))
    ended.put(third)
    with ended.platform.engine.connect() as conn:
        order = [row.id for row in conn.execute(checkpoint_retention._ended(ended.platform, ())).all()]
    assert order[0] == third, "tried in vain, the older ones come last"
    assert checkpoint_retention.retire_ended(ended.platform, budget_s=0.0) == 0
    assert checkpoint_retention.retire_ended(ended.platform) == 3
    assert ended.there() == []


def test_what_a_job_left_that_never_committed_anything_is_swept_once(fresh_platform: Platform, write_chat_rows: Callable[..., Any]) -> None:
    held = start_job(fresh_platform, write_chat_rows)
    agents.introduce(fresh_platform, held, may_read=[])
    for prefix in (attempts.checkpoint_prefix(held), attempts.final_prefix(held)):
        fresh_platform.objects.put_bytes(f"{prefix}/step-00000010/optimizer.pt", b"sent when the job was cancelled")
    jobs.cancel(fresh_platform, held.tenant, held.job_id)
    status = WorkloadStatus(name=held.workload, phase=WorkloadPhase.EXITED, exit_code=0)
    attempts.finish(fresh_platform, held, Ending(outcome="cancelled", failure=None, last_step=0, trained_tokens=0, status=status))
    left = layout.job_prefix(held.tenant, held.job_id)
    assert checkpoint_retention.retire_ended(fresh_platform) == 0
    later = replace(fresh_platform, clock=lambda: datetime.now(UTC) + timedelta(days=8))
    objects: Any = Refusing(fresh_platform.objects, (held.job_id,))
    assert checkpoint_retention.retire_ended(replace(later, objects=objects)) == 0
    assert len(list(fresh_platform.objects.list(left))) == 2
    assert checkpoint_retention.retire_ended(later) == 1
    assert list(fresh_platform.objects.list(left)) == []
    assert checkpoint_retention.retire_ended(later) == 0
