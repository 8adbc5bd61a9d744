"""What finished jobs teach, read from a real database; estimates and the queue go by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.attempts.tables import attempts, checkpoints
from control_plane.jobs.estimates import expected_time, job_plan
from control_plane.jobs.estimates.rules import Correction, Kind
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.queue import snapshot
from control_plane.queue.tables import reservations
from engine.training.cost_model import Cost
from tests.support.jobs.followed_jobs import Job
from tests.support.jobs.training_specs import SPEC

SHIPPED_POOLS = Path(__file__).parents[4] / "deploy" / "pools.yaml"
TWO_TYPES = """
pools:
  - {name: local, gpu_type: local, takes: [lora], nodes: [{count: 1, gpus: 1}]}
  - {name: busy, gpu_type: h100-80gb, takes: [large, full], nodes: [{count: 1, gpus: 8}]}
"""
BEGAN = datetime(2026, 11, 1, tzinfo=UTC)
MODELLED_S = 100.0
KIND = Kind(gpu_type="local", model="tiny-base", way=f"{SPEC.method}/{SPEC.adapter}", num_gpus=1)


def ended(
    job: Job, ratio: float, *, walls: tuple[float, ...] = (), setup_s: float = 0.0, lost_s: float = 0.0, after: int = 0, **columns: Any
) -> None:
    """Write that the job was trained, taking `ratio` times what the cost model says, or in attempts of `walls` seconds."""
    took = walls or (ratio * MODELLED_S,)
    at = BEGAN + timedelta(days=after)
    values: dict[str, Any] = {
        "state": "succeeded", "modelled_s": MODELLED_S, "first_step_at": at + timedelta(seconds=setup_s), "spec": SPEC.to_dict(),
        "finished_at": at + timedelta(seconds=sum(took)),
    }  # fmt: skip
    with job.platform.engine.begin() as conn:
        conn.execute(sa.update(jobs).where(jobs.c.id == job.id).values(**values | columns))
        for number, wall in enumerate(took, 1):
            which = {"job_id": job.id, "attempt": number}
            until = at + timedelta(seconds=wall)
            conn.execute(sa.insert(reservations).values(**which, pool="local", num_gpus=1, granted_at=at, released_at=until))
            lost = lost_s if number < len(took) else 0.0
            conn.execute(sa.insert(attempts).values(**which, workload=f"w{number}", started_at=at, ended_at=until, lost_s=lost))
            at = until


def ratio(platform: Platform) -> float:
    return expected_time.learned(platform, KIND).ratio


def test_finished_jobs_correct_what_the_next_is_expected_to_take(new_job: Callable[..., Job]) -> None:
    job = new_job()
    assert ratio(job.platform) == 1.0
    ended(job, 3.0)
    learned = expected_time.learned(job.platform, KIND)
    assert 1.5 < learned.ratio < 3.0
    assert (learned.num_jobs, learned.num_alike) == (1, 1)
    assert expected_time.learned(job.platform, replace(KIND, way="dpo/lora")).num_alike == 0
    assert expected_time.learned(job.platform, replace(KIND, num_gpus=2)).num_alike == 0


def test_work_done_twice_and_set_ups_after_the_first_are_not_the_trainings_time(new_job: Callable[..., Job]) -> None:
    straight, stopped = new_job(), new_job()
    ended(straight, 3.0, setup_s=10.0)
    ended(stopped, 0.0, walls=(200.0, 160.0), setup_s=10.0, lost_s=50.0)
    assert ratio(stopped.platform) == pytest.approx(ratio(straight.platform))


@pytest.mark.parametrize(
    "columns", [{"modelled_s": None}, {"state": "failed"}, {"reused_job_id": "ftjob-x"}], ids=["no model", "failed", "reused"]
)
def test_jobs_that_say_nothing_are_left_out(new_job: Callable[..., Job], columns: dict[str, Any]) -> None:
    job = new_job()
    ended(job, 3.0, **columns)
    assert ratio(job.platform) == 1.0


def test_jobs_on_other_gpus_do_not_push_out_what_is_known_of_these(new_job: Callable[..., Job], tmp_path: Path) -> None:
    job = new_job()
    (tmp_path / "pools.yaml").write_text(TWO_TYPES)
    platform = replace(job.platform, settings=replace(job.platform.settings, pools_file=tmp_path / "pools.yaml"))
    ended(job, 3.0)
    before = expected_time.learned(platform, KIND)
    assert before.num_jobs == 1
    with platform.engine.begin() as conn:
        known = dict(conn.execute(sa.select(jobs).where(jobs.c.id == job.id)).one()._mapping)
        newer = {"started_at": BEGAN + timedelta(days=1), "ended_at": BEGAN + timedelta(days=1, hours=1)}
        for number in range(expected_time.NEWEST):
            conn.execute(sa.insert(jobs).values(**known | {"id": f"ftjob-busy{number}", "finished_at": newer["ended_at"]}))
            which = {"job_id": f"ftjob-busy{number}", "attempt": 1}
            times = {"granted_at": newer["started_at"], "released_at": newer["ended_at"]}
            conn.execute(sa.insert(reservations).values(**which, pool="busy", num_gpus=1, **times))
            conn.execute(sa.insert(attempts).values(**which, workload=f"busy{number}", **newer))
    assert expected_time.learned(platform, KIND) == before
    assert expected_time.learned(platform, replace(KIND, gpu_type="h100-80gb")).num_jobs == expected_time.NEWEST


def test_what_is_held_of_a_quota_is_what_history_lets_expect(new_job: Callable[..., Job]) -> None:
    job = new_job()
    platform = job.platform
    with platform.engine.connect() as conn:
        file = conn.execute(sa.select(jobs.c.training_file).where(jobs.c.id == job.id)).scalar_one()
    request = JobRequest.from_body({"model": "tiny-base", "training_file": file})
    model = platform.models.get("tiny-base")

    def held() -> float:
        placed = job_plan.placed(platform, request, model, tier="standard")
        expected = expected_time.of_request(platform, job.tenant, request, model, placed)
        return expected.gpu_seconds - expected_time.evaluation_s(model, 1)

    before = held()
    ended(job, 3.0)
    assert held() == pytest.approx(before * ratio(platform))
    assert held() > 1.5 * before


def test_a_wider_job_is_expected_to_end_sooner_and_not_to_cost_less(new_job: Callable[..., Job]) -> None:
    job = new_job()
    on_gpus = replace(job.platform, settings=replace(job.platform.settings, pools_file=SHIPPED_POOLS))
    model = job.platform.models.get("tiny-base")
    rows = 10_000_000

    def expected(platform: Platform, width: int) -> expected_time.Expectation:
        spec = replace(SPEC, world_size=width, strategy="single" if width == 1 else "ddp", precision="bf16")
        return expected_time.expect(platform, model, spec, num_rows=rows, tokens_per_epoch=rows * SPEC.max_seq_len)

    alone, wide = expected(on_gpus, 1), expected(on_gpus, 8)
    assert 6 * wide.expected_s < alone.expected_s <= 8 * wide.expected_s
    assert alone.modelled.setup_s < 60 < wide.expected_s
    assert alone.trained_tokens == rows * SPEC.max_seq_len
    assert expected(job.platform, 1).expected_s != alone.expected_s, "slots of this machine are no H100"


def test_whole_steps_and_no_more_than_the_most_steps_are_expected(new_job: Callable[..., Job]) -> None:
    job = new_job()
    model = job.platform.models.get("tiny-base")

    def tokens(rows: int, *, max_steps: int | None = None, num_epochs: float = 1) -> float:
        spec = replace(SPEC, optimization=replace(SPEC.optimization, max_steps=max_steps, num_epochs=num_epochs))
        return expected_time.expect(job.platform, model, spec, num_rows=rows, tokens_per_epoch=rows * 100).trained_tokens

    assert tokens(8) == tokens(3) == 800, "a step is 8 rows, filled up with those of the next epoch"
    assert tokens(800) == 80_000
    assert tokens(800, max_steps=10) == tokens(800, max_steps=10, num_epochs=3) == 8_000
    assert tokens(800, num_epochs=3) == 240_000


def test_an_expectation_rests_on_jobs_of_its_own_width(new_job: Callable[..., Job]) -> None:
    job = new_job()
    ended(job, 3.0, num_gpus=2)
    model = job.platform.models.get("tiny-base")

    def alike(width: int) -> int:
        spec = replace(SPEC, world_size=width, strategy="single" if width == 1 else "ddp")
        return expected_time.expect(job.platform, model, spec, num_rows=800, tokens_per_epoch=80_000).correction.num_alike

    assert (alike(1), alike(2)) == (0, 1)


@pytest.mark.parametrize(("setup_s", "left_s"), [(None, 30.0 + 970.0 / 4), (200.0, 200.0 + 800.0 / 4), (5000.0, 1000.0)])
def test_a_job_that_goes_on_is_set_up_again_for_as_long_as_was_expected_of_it(
    setup_s: float | None, left_s: float, new_job: Callable[..., Job]
) -> None:
    job = new_job()
    expected = {"expected_s": 1000.0, "setup_s": setup_s, "total_steps": 100}
    saved = {"job_id": job.id, "attempt": 1, "step": 75, "object_prefix": "p", "manifest_sha256": "m", "metrics": {}, "created_at": BEGAN}
    with job.platform.engine.begin() as conn:
        conn.execute(sa.update(jobs).where(jobs.c.id == job.id).values(state="queued", queued_at=BEGAN, attempt=1, **expected))
        conn.execute(sa.insert(checkpoints).values(id=f"c-{job.id}", **saved))
    (found,) = [w for w in snapshot.queue_snapshot(job.platform).waiting if w.job_id == job.id]
    assert found.expected_s == pytest.approx(left_s)


def test_an_expectation_says_what_it_learned_from() -> None:
    modelled = Cost(setup_s=30.0, steps_s=70.0)
    alone = expected_time.Expectation(modelled=modelled, correction=Correction(), trained_tokens=7000)
    assert "no finished job" in alone.in_words() and alone.tokens_per_s == 100.0
    seen = replace(alone, correction=Correction(ratio=1.8, low=1.5, high=2.1, num_jobs=12, num_alike=7))
    assert seen.expected_s == 180.0
    assert seen.in_words() == (
        "history: the cost model's time is multiplied by 1.80, learned from 12 finished jobs on these GPUs, 7 of them with this model, "
        "method, adapter and number of GPUs; eight of ten jobs are expected within 150 to 210 s of training"
    )
