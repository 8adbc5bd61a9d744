"""Which checkpoints of a followed training are kept, in the store and on the disk of its machine, and which go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from agent import node_space
from control_plane.attempts import checkpoint_retention
from control_plane.attempts import service as attempts
from control_plane.attempts.tables import checkpoints as checkpoints_table
from control_plane.jobs import service as jobs
from control_plane.platform.job_states import JobState
from ft_assets import layout
from ft_assets.errors import Fault
from ft_assets.training.checkpoints import MANIFEST, committed
from ft_assets.training.spec import CheckpointPolicy, EarlyStopping
from tests.support.jobs.followed_jobs import Job, plain_weights
from tests.support.jobs.training_specs import SPEC
from tests.support.processes.scripted_training import Scenario


def test_the_store_keeps_the_newest_three_and_the_api_lists_no_other(new_job: Callable[..., Job]) -> None:
    job = new_job()
    job.train(Scenario(steps=10, every=1, each_stored=True))
    kept = job.steps()
    assert kept[0] == 10 and len(kept) <= 4
    assert [c.step for c in jobs.list_checkpoints(job.platform, job.tenant, job.id).items] == kept
    rows = attempts.committed(job.platform, job.id)
    for row in rows:
        stored = {i.key.rsplit("/", 1)[1] for i in job.platform.objects.list(row.object_prefix)}
        assert MANIFEST in stored and len(stored) > 2
    with job.platform.engine.connect() as conn:
        gone = conn.execute(
            sa.select(checkpoints_table).where(checkpoints_table.c.job_id == job.id, checkpoints_table.c.retired_at.is_not(None))
        ).all()
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
    assert (job.work_dir / "final").exists() and not (job.work_dir / "checkpoints").exists()


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
    assert [p.name for p in committed(job.work_dir / "checkpoints")] == ["step-00000002", "step-00000004", "step-00000005"]
