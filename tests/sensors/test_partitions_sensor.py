"""Keys of jobs that ended long ago leave Dagster's lists, a few at a time, and come back when a run needs them."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import dagster as dg
import pytest
import sqlalchemy as sa

from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.platform.context import Platform
from control_plane.queue import launches
from control_plane.tenants import service as tenants
from ft_assets.platform_resource import PlatformResource
from sensors.partition_cleanup import partitions as sensor


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


@pytest.fixture
def ended(fresh_platform: Platform, write_chat_rows: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Three jobs of which two were cancelled."""
    monkeypatch.setenv("FT_DATABASE_URL", fresh_platform.engine.url.render_as_string(hide_password=False))
    monkeypatch.setenv("FT_HOME", str(fresh_platform.settings.home))
    owner, _ = tenants.create(fresh_platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
    with write_chat_rows().open("rb") as rows:
        file = uploaded_files.create(fresh_platform, owner.id, rows, filename="rows.jsonl", purpose="fine-tune")
    body = {"model": "tiny-base", "training_file": file.id}
    made = [jobs.submit(fresh_platform, owner.id, JobRequest.from_body({**body, "seed": n})).job.id for n in range(3)]
    for job_id in made[:2]:
        jobs.cancel(fresh_platform, owner.id, job_id)
    return [(owner.id, job_id) for job_id in made]


def at(platform: Platform, after: timedelta) -> Platform:
    later = platform.clock() + after
    return replace(platform, clock=lambda: later)


def test_only_ended_jobs_lose_their_keys_after_the_days_that_are_set_and_a_few_at_a_time(
    fresh_platform: Platform, ended: list[tuple[str, str]]
) -> None:
    assert launches.retirable(at(fresh_platform, timedelta(days=29)), limit=10) == []
    late = at(fresh_platform, timedelta(days=31))
    assert launches.retirable(late, limit=1) == ended[:1]
    launches.retired(late, [ended[0][1]])
    assert launches.retirable(late, limit=10) == ended[1:2]
    launches.returned(late, [ended[0][1]])
    assert launches.retirable(late, limit=10) == ended[:2]


def test_above_the_limit_of_keys_those_that_ended_first_go_early(fresh_platform: Platform, ended: list[tuple[str, str]]) -> None:
    assert launches.retirable(fresh_platform, limit=10, max_keys=2) == [], "what ended just now may still be written"
    assert launches.retirable(at(fresh_platform, timedelta(hours=2)), limit=10, max_keys=2) == ended[:1]


def test_the_sensor_takes_the_keys_out_of_dagsters_list(
    fresh_platform: Platform, ended: list[tuple[str, str]], instance: dg.DagsterInstance
) -> None:
    with fresh_platform.engine.begin() as conn:
        conn.execute(sa.update(jobs_table).values(finished_at=jobs_table.c.finished_at - timedelta(days=31)))
    keys = [f"{tenant}:{job_id}" for tenant, job_id in ended]
    instance.add_dynamic_partitions("jobs", keys)
    for _ in range(2):
        with dg.build_sensor_context(instance=instance, resources={"platform": PlatformResource()}) as context:
            told = str(sensor(context))
    assert "retired: 0" in told
    assert list(instance.get_dynamic_partitions("jobs")) == keys[2:]


def test_keys_that_an_interrupted_tick_left_in_dagsters_list_go_at_the_next(
    fresh_platform: Platform, ended: list[tuple[str, str]], instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fresh_platform.engine.begin() as conn:
        conn.execute(sa.update(jobs_table).values(finished_at=jobs_table.c.finished_at - timedelta(days=31)))
    keys = [f"{tenant}:{job_id}" for tenant, job_id in ended]
    instance.add_dynamic_partitions("jobs", keys)

    def refuse(*_: object) -> None:
        raise ConnectionError("Dagster's database went away")

    with dg.build_sensor_context(instance=instance, resources={"platform": PlatformResource()}) as context:
        with monkeypatch.context() as away:
            away.setattr(instance, "delete_dynamic_partition", refuse)
            with pytest.raises(ConnectionError):
                sensor(context)
        sensor(context)
    assert list(instance.get_dynamic_partitions("jobs")) == keys[2:]
