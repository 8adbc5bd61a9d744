"""Runs that ended long ago are deleted with their events and output; those of live adapters, running ones and recent ones stay."""

import sys
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import dagster as dg
import pytest
from dagster._core.instance import InstanceRef
from dagster._core.test_utils import create_run_for_test

from control_plane.adapters import promotions
from control_plane.platform.context import Platform
from control_plane.platform.settings import load
from control_plane.tenants import service as tenants
from ft_assets.partitions import JOBS
from ft_assets.platform_resource import PlatformResource
from sensors import run_retention
from tests.support.jobs.registered_adapter import add_adapter


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    (tmp_path / "dagster").mkdir()
    with dg.DagsterInstance.from_ref(InstanceRef.from_dir(str(tmp_path / "dagster"))) as made:
        yield made


@pytest.fixture
def platform(fresh_platform: Platform, monkeypatch: pytest.MonkeyPatch) -> Platform:
    monkeypatch.setenv("FT_DATABASE_URL", fresh_platform.engine.url.render_as_string(hide_password=False))
    monkeypatch.setenv("FT_HOME", str(fresh_platform.settings.home))
    return fresh_platform


@dg.asset(name="adapter", partitions_def=JOBS)
def made_adapter(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
    sys.stdout.write("an adapter")
    return dg.MaterializeResult(metadata={"stage": "draft"})


def add_job(platform: Platform, stage: str) -> tuple[str, str]:
    """A tenant's adapter in `stage`; the partition key of its job, and the adapter's id."""
    tenant, _ = tenants.create(platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
    name = f"ft:tiny-base:{tenant.id}:x:{uuid.uuid4().hex[:8]}"
    digest = platform.models.get("tiny-base").digest
    adapter = add_adapter(platform, tenant.id, name=name, stage=stage, loaded=False, base_digest=digest)
    return f"{tenant.id}:{promotions.get_adapter(platform, tenant.id, adapter).job_id}", adapter


def materialize(instance: dg.DagsterInstance, key: str) -> str:
    instance.add_dynamic_partitions("jobs", [key])
    return dg.materialize([made_adapter], instance=instance, partition_key=key).run_id


def age(instance: dg.DagsterInstance, days: float, *run_ids: str) -> None:
    """Makes the runs' last change lie in the past."""
    storage = instance._run_storage
    for run_id in run_ids:
        (record,) = instance.get_run_records(dg.RunsFilter(run_ids=[run_id]))
        before = record.update_timestamp.replace(tzinfo=None) - timedelta(days=days)
        with storage.connect() as conn:  # type: ignore[attr-defined]
            conn.exec_driver_sql("UPDATE runs SET update_timestamp = ? WHERE run_id = ?", (str(before), run_id))


def retire(instance: dg.DagsterInstance) -> dict[str, object]:
    result = run_retention.run_retention.execute_in_process(instance=instance, resources={"platform": PlatformResource()})
    (output,) = [e for e in result.all_node_events if e.event_type_value == "STEP_OUTPUT"]
    return {name: value.value for name, value in output.event_specific_data.metadata.items()}  # type: ignore[union-attr]


def test_a_run_goes_with_its_events_and_output_once_it_ended_long_enough_ago(platform: Platform, instance: dg.DagsterInstance) -> None:
    key, _ = add_job(platform, "archived")
    old, recent = materialize(instance, key), materialize(instance, key)
    running = create_run_for_test(instance, job_name="train", status=dg.DagsterRunStatus.STARTED).run_id
    days = load().run_days
    age(instance, days + 1, old, running)
    age(instance, days - 1, recent)
    logs = Path(instance.compute_log_manager.get_captured_local_path([old], "out")).parent / old
    assert logs.exists() and instance.all_logs(old)
    assert retire(instance) == {"runs_deleted": 1, "dataset_keys_deleted": 0}
    assert {run.run_id for run in instance.get_runs()} >= {recent, running} and instance.get_run_by_id(old) is None
    assert not logs.exists() and not instance.all_logs(old)
    assert retire(instance)["runs_deleted"] == 0


def test_what_a_live_adapter_came_from_stays_and_a_failed_run_of_its_job_does_not(platform: Platform, instance: dg.DagsterInstance) -> None:
    keys = [add_job(platform, stage)[0] for stage in ("production", "archived", "deprecated", "archived")]
    runs = [materialize(instance, key) for key in keys]
    failed = create_run_for_test(instance, job_name="train", status=dg.DagsterRunStatus.FAILURE, tags={"dagster/partition": keys[0]}).run_id
    age(instance, 400, *runs, failed)
    assert retire(instance)["runs_deleted"] == 3
    for run_id, key, stays in zip(runs, keys, (True, False, True, False), strict=True):
        assert (instance.get_run_by_id(run_id) is not None) is stays
        shown = instance.fetch_materializations(dg.AssetRecordsFilter(dg.AssetKey("adapter"), asset_partitions=[key]), limit=1).records
        assert bool(shown) is stays


def test_kept_runs_do_not_hide_later_ones_from_a_bounded_page(
    platform: Platform, instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_retention, "PAGE", 2)
    monkeypatch.setattr(run_retention, "MAX_DATASET_KEYS", 1)
    instance.add_dynamic_partitions("datasets", ["acme:ds_1", "acme:ds_2"])
    live, _ = add_job(platform, "production")
    archived, _ = add_job(platform, "archived")
    runs = [materialize(instance, key) for key in (live, live, archived, live, archived)]
    age(instance, 400, *runs)
    assert retire(instance) == {"runs_deleted": 2, "dataset_keys_deleted": 1}
    assert [instance.get_run_by_id(run_id) is not None for run_id in runs] == [True, True, False, True, False]
    assert instance.get_dynamic_partitions("datasets") == ["acme:ds_2"]
    monkeypatch.setattr(run_retention, "LIMIT_S", 0.0)
    age(instance, 400, another := materialize(instance, archived))
    assert retire(instance)["runs_deleted"] == 0 and instance.get_run_by_id(another) is not None, "its time was up"
