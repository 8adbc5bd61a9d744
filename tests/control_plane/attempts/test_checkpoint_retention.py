"""Which checkpoints of a job are kept, in the store and on the disk of its machine, and which go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from agent import node_space
from agent.messages import Restored, Skipped
from control_plane.attempts import agents, checkpoint_retention, tables
from control_plane.attempts import service as attempts
from control_plane.attempts.claims import Ending
from control_plane.attempts.tables import checkpoints
from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.platform.protocols import ObjectInfo, WorkloadPhase, WorkloadStatus
from control_plane.tenants import service as tenants
from core import layout
from core.errors import Fault, Unavailable
from engine.training.checkpoints import CHECKPOINT_MANIFEST, committed_checkpoints
from engine.training.spec import CheckpointPolicy, EarlyStopping
from tests.support.jobs.followed_jobs import Job, plain_weights
from tests.support.jobs.started_job import start_job
from tests.support.jobs.training_specs import SPEC
from tests.support.processes.scripted_training import Scenario

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
    with fresh_platform.engine.connect() as conn:
        assert [conn.execute(sa.select(table)).all() for table in (tables.agents, tables.agent_tokens)] == [[], []]
    assert checkpoint_retention.retire_ended(later) == 0


def test_the_best_checkpoint_stays_for_every_one_that_training_may_resume_from(
    fresh_platform: Platform, write_chat_rows: Callable[..., Any]
) -> None:
    """The newest is the best so far; if it turns out to be damaged, an early stop returns to the one that was the best before it."""
    held = start_job(fresh_platform, write_chat_rows)
    for step, best in ((10, 10), (20, 10), (30, 10), (40, 40), (50, 50)):
        facts = {"step": step, "prefix": f"cp/{step}", "manifest_sha256": str(step), "metrics": {"step": step, "best_step": best}}
        assert attempts.record_checkpoint(fresh_platform, held, **facts)
        checkpoint_retention.retire_checkpoints(fresh_platform, held)
    assert [row.step for row in attempts.committed(fresh_platform, held.job_id)] == [50, 40, 30, 10]
    agents.introduce(fresh_platform, held, may_read=[])
    agents.restored(fresh_platform, held, Restored(step=30, skipped=(Skipped(step=50, why="damaged"), Skipped(step=40, why="damaged"))))
    assert [row.step for row in attempts.committed(fresh_platform, held.job_id)] == [30, 10]
    checkpoint_retention.retire_checkpoints(fresh_platform, held)
    assert [row.step for row in attempts.committed(fresh_platform, held.job_id)] == [30, 10]


def test_the_store_keeps_the_newest_three_and_the_api_lists_no_other(new_job: Callable[..., Job]) -> None:
    job = new_job()
    job.train(Scenario(steps=10, every=1, each_stored=True))
    kept = job.steps()
    assert kept[0] == 10 and len(kept) <= 4
    assert [c.step for c in jobs.list_checkpoints(job.platform, job.tenant, job.id).items] == kept
    rows = attempts.committed(job.platform, job.id)
    for row in rows:
        stored = {i.key.rsplit("/", 1)[1] for i in job.platform.objects.list(row.object_prefix)}
        assert CHECKPOINT_MANIFEST in stored and len(stored) > 2
    with job.platform.engine.connect() as conn:
        gone = conn.execute(sa.select(checkpoints).where(checkpoints.c.job_id == job.id, checkpoints.c.retired_at.is_not(None))).all()
    assert gone and all(r.removed_at is not None for r in gone)
    assert not {f"step-{r.step:08d}" for r in gone} & job.stored()


@pytest.mark.slow
def test_a_full_disk_frees_what_ended_jobs_left_on_the_machine(new_job: Callable[..., Job]) -> None:
    job = new_job()
    other = job.work_dir.parent / "ftjob-other" / "checkpoints"
    for step in ("step-00000001", "step-00000002"):
        (other / step).mkdir(parents=True)
    ending, state = job.train(Scenario(steps=9, every=1, step_s=0.1, end_at={"step": 5, "outcome": "disk_full", "attempt": 1}))
    assert (ending.outcome, state) == ("disk_full", JobState.QUEUED)
    assert ending.failure is not None and ending.failure.fault is Fault.PLATFORM
    assert job.events("disk_space_freed")[0].data["freed_bytes"] > 1000
    assert [p.name for p in sorted((job.work_dir / "checkpoints").iterdir())] == ["step-00000004", "step-00000005"]
    assert [p.name for p in other.iterdir()] == ["step-00000002"], "the newest of a job that may go on is kept"
    assert job.train(Scenario(steps=9))[1] is JobState.EVALUATING
    with node_space.locked(job.work_dir):
        assert node_space.free(job.work_dir.parents[1], "another") == 0, "a job that an agent holds is left alone"
    assert node_space.free(job.work_dir.parents[1], "another") > 0
    assert (job.work_dir / "final").exists() and len(list((job.work_dir / "checkpoints").iterdir())) == 1


def test_checkpoints_of_an_ended_job_go_after_a_week_and_with_them_what_was_never_committed(new_job: Callable[..., Job]) -> None:
    job = new_job()
    job.train(Scenario(steps=6, each_stored=True))
    prefix = layout.job_prefix(job.tenant, job.id)
    for left in ("checkpoints/a9/step-00000001/optimizer.pt", "final/a9/adapter_model.safetensors"):
        job.platform.objects.put_bytes(f"{prefix}/{left}", b"left by a crash")
    jobs.cancel(job.platform, job.tenant, job.id)
    assert checkpoint_retention.retire_ended(job.platform) == 0
    later = replace(job.platform, clock=lambda: datetime.now(UTC) + timedelta(days=8))
    assert checkpoint_retention.retire_ended(later) == 1
    assert checkpoint_retention.retire_ended(later) == 0
    assert [r.final for r in attempts.committed(job.platform, job.id)] == [True]
    assert list(job.platform.objects.list(f"{prefix}/checkpoints")) == []
    assert {info.key.split("/")[-2] for info in job.platform.objects.list(f"{prefix}/final")} == {"a1"}
    assert job.weights() == plain_weights(6)


@pytest.mark.slow
def test_a_full_disk_spares_what_an_early_stop_goes_back_to(new_job: Callable[..., Job]) -> None:
    job = new_job(
        optimization=replace(SPEC.optimization, early_stopping=EarlyStopping(patience=5)), checkpoint=CheckpointPolicy(keep_last=9)
    )
    job.train(Scenario(steps=9, every=1, best_step=2, step_s=0.1, end_at={"step": 5, "outcome": "disk_full", "attempt": 1}))
    assert [p.name for p in committed_checkpoints(job.work_dir / "checkpoints")] == ["step-00000002", "step-00000004", "step-00000005"]
