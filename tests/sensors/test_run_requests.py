"""A run that is due is asked for once, by a sensor or by the queue listener."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.test_utils import create_run_for_test

from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.platform.context import Platform
from control_plane.queue import launches
from control_plane.queue.launches import due_runs
from control_plane.tenants import service as tenants
from sensors.admission import admission
from sensors.run_coordinator import slots_of
from sensors.run_requests import KEYS_PER_QUERY, MAX_REQUESTS_PER_TICK, missing, run_request
from sensors.scheduling_cycle import scheduling


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


@pytest.fixture
def submitted(fresh_platform: Platform, write_chat_rows: Callable[..., Path]) -> list[str]:
    owner, _ = tenants.create(fresh_platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
    with write_chat_rows().open("rb") as rows:
        file = uploaded_files.create(fresh_platform, owner.id, rows, filename="rows.jsonl", purpose="fine-tune")
    body = {"model": "tiny-base", "training_file": file.id}
    return [jobs.submit(fresh_platform, owner.id, JobRequest.from_body({**body, "seed": n})).job.id for n in range(3)]


def test_of_two_that_ask_at_once_one_gets_each_run(fresh_platform: Platform, submitted: list[str], instance: dg.DagsterInstance) -> None:
    due = due_runs(fresh_platform, ("prepare",))
    with ThreadPoolExecutor(8) as threads:
        asked = list(threads.map(lambda n: missing(fresh_platform, instance, due, by=f"asker-{n}"), range(8)))
    assert sorted(d.job_id for those in asked for d in those) == sorted(submitted)


def test_a_claim_without_a_run_ends_and_one_that_was_given_up_ends_at_once(
    fresh_platform: Platform, submitted: list[str], instance: dg.DagsterInstance
) -> None:
    due = due_runs(fresh_platform, ("prepare",))
    assert len(missing(fresh_platform, instance, due, by="queue-listener")) == len(submitted)
    assert missing(fresh_platform, instance, due, by="sensor") == []
    launches.give_up(fresh_platform, [due[0].run_key], by="queue-listener")
    assert missing(fresh_platform, instance, due, by="sensor") == due[:1]
    later = replace(fresh_platform, clock=lambda: fresh_platform.clock() + timedelta(seconds=launches.CLAIM_S + 1))
    assert len(missing(later, instance, due, by="sensor")) == len(submitted)


def test_a_run_that_entered_the_queue_is_never_asked_for_again(
    fresh_platform: Platform, submitted: list[str], instance: dg.DagsterInstance
) -> None:
    due = due_runs(fresh_platform, ("prepare",))
    with fresh_platform.engine.begin() as conn:
        assert launches.bind(conn, due[0].run_key, due[0].job_id, "run-1", by="sensor") is None
        assert launches.bind(conn, due[0].run_key, due[0].job_id, "run-1", by="sensor") is None, "the same run may cross twice"
        assert launches.bind(conn, due[0].run_key, due[0].job_id, "run-2", by="queue-listener") == "run-1"
    later = replace(fresh_platform, clock=lambda: fresh_platform.clock() + timedelta(days=1))
    assert {d.run_key for d in missing(later, instance, due, by="sensor")} == {d.run_key for d in due[1:]}


def test_operators_can_filter_by_tenant_tier_pool_gpus_attempt_and_reason(fresh_platform: Platform, submitted: list[str]) -> None:
    (first, *_) = due_runs(fresh_platform, ("prepare",))
    tags = run_request(first, by="queue-listener").tags
    assert tags["dagster/ft_tier"] == "standard"
    assert (tags["dagster/ft_reason"], tags["dagster/ft_asked_by"], tags["dagster/priority"]) == ("submitted", "queue-listener", "5")
    assert tags["dagster/ft_job"] == submitted[0]
    held = run_request(replace(first, stage="train", pool="local", num_gpus=2, attempt=3, backfill=True), by="sensor").tags
    assert (held["dagster/ft_pool"], held["dagster/ft_gpus"], held["dagster/ft_attempt"], held["dagster/ft_reason"]) == (
        "local",
        "2",
        "3",
        "backfill",
    )


def test_dagsters_list_of_runs_shows_the_partition_and_the_tenant_and_names_the_sensor(
    fresh_platform: Platform, submitted: list[str]
) -> None:
    (first, *_) = due_runs(fresh_platform, ("prepare",))
    sensors = {sensor.name: {job.name for job in sensor.jobs} for sensor in (admission, scheduling)}
    for stage in ("prepare", "train", "evaluate"):
        due = replace(first, stage=stage, pool="local", num_gpus=2, attempt=3, trace_parent=f"00-{'1' * 32}-{'2' * 16}-01")
        request = run_request(due, by="queue-listener")
        run = dg.DagsterRun(job_name=stage, run_id="r", tags={**request.tags, "dagster/partition": str(request.partition_key)})
        tags = {**run.tags, **slots_of(run)}
        shown = {tag for tag in tags if not tag.startswith("dagster/") or tag in ("dagster/partition", "dagster/backfill")}
        assert shown == {"dagster/partition", "ft/tenant"}
        assert stage in sensors[tags["dagster/sensor_name"]]


def test_of_thousands_that_are_due_a_query_names_a_hundred_and_none_waits_behind_those_that_are_served(
    fresh_platform: Platform, submitted: list[str], instance: dg.DagsterInstance
) -> None:
    named: list[int] = []

    class Counted:
        """The instance, with how many keys each query named."""

        def get_runs(self, filters: dg.RunsFilter) -> list[dg.DagsterRun]:
            named.append(len(filters.tags["dagster/ft_run_key"]))
            return list(instance.get_runs(filters))

    (first, *_) = due_runs(fresh_platform, ("prepare",))
    due = [replace(first, runs=n) for n in range(1, 301)]
    for d in due[:KEYS_PER_QUERY]:
        create_run_for_test(instance, job_name="prepare", tags={"dagster/ft_run_key": d.run_key})
    won = missing(fresh_platform, Counted(), due, by="sensor")  # type: ignore[arg-type]
    assert won == due[KEYS_PER_QUERY : KEYS_PER_QUERY + MAX_REQUESTS_PER_TICK]
    assert named == [KEYS_PER_QUERY] * 2
