"""Deleting a tenant's data reaches Dagster and MLflow: texts are planted wherever the platform records any, and every store is read."""

import json
import os
import shutil
import sys
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
import pytest
import sqlalchemy as sa
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.remote_origin import (
    ManagedGrpcPythonEnvCodeLocationOrigin,
    RemoteInstigatorOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.scheduler.instigation import InstigatorState, InstigatorStatus, SensorInstigatorData, TickData, TickStatus
from dagster._core.types.loadable_target_origin import LoadableTargetOrigin

from control_plane.models import mlflow_mirror
from control_plane.platform.context import Platform
from control_plane.platform.protocols import RegisteredModels, TrackedRun
from control_plane.tenant_data import deletion
from deploy.local.stack_services import project_root
from ft_assets.partitions import DATASETS, JOBS, partition_key
from resources.database import embedded
from resources.database.engine import make_engine
from resources.tenant_records import DagsterRecords, MlflowRecords
from resources.tracking.mlflow_tracker import MlflowTracker, file_of, older_artifacts
from resources.tracking.model_registry import synchronize
from sensors.submit_job import submit
from tests.support.platform.deletable_tenants import Clock, Weak, World

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # MLflow's and Dagster's own
    pytest.mark.slow,  # MLflow is imported by a process for each call
    pytest.mark.timeout(1800),
]

CANARY = "the merger with Umbrella closes in May"


@pytest.fixture
def dagster_database(postgres_dir: Path) -> str:
    admin = make_engine(embedded.socket_url(postgres_dir, "postgres")).execution_options(isolation_level="AUTOCOMMIT")
    name = f"d_{uuid.uuid4().hex[:12]}"
    with admin.connect() as conn:
        conn.execute(sa.text(f"CREATE DATABASE {name}"))
    admin.dispose()
    return embedded.socket_url(postgres_dir, name)


@pytest.fixture
def world(
    new_platform: Callable[..., Platform], dagster_database: str, write_chat_rows: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[World]:
    """A platform with a Dagster instance on PostgreSQL and an MLflow store, both configured as `ft up` does."""
    platform, before = new_platform(dagster_database_url=dagster_database), dict(os.environ)
    home = platform.settings.home
    (home / "dagster").mkdir()
    shutil.copy(project_root() / "dagster.yaml", home / "dagster" / "dagster.yaml")
    monkeypatch.setenv("DAGSTER_HOME", str(home / "dagster"))
    monkeypatch.setenv("DAGSTER_POSTGRES_URL", dagster_database)
    clock, store = Clock(now=datetime(2026, 5, 1, tzinfo=UTC)), Weak(home / "objects")
    records = (DagsterRecords(settings=platform.settings), MlflowRecords(uri=platform.settings.mlflow_uri, limit_s=300.0))
    yield World(platform=replace(platform, clock=clock, objects=store, records=records), clock=clock, store=store, write=write_chat_rows)
    os.environ.clear()
    os.environ.update(before)


@dg.asset(partitions_def=JOBS, check_specs=[dg.AssetCheckSpec("gate", asset="report", partitions_def=JOBS)])
def report(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
    """What the platform's assets do: text in metadata, in the verdict, in the log and on the output."""
    text = f"{CANARY} of {context.partition_key}"
    context.log.info(text)
    sys.stdout.write(text)
    sys.stdout.flush()
    check = dg.AssetCheckResult(passed=True, check_name="gate", metadata={"reasons": text})
    return dg.MaterializeResult(metadata={"report": dg.MetadataValue.md(text)}, check_results=[check])


@dg.asset(partitions_def=JOBS)
def broken(context: dg.AssetExecutionContext) -> None:
    raise ValueError(f"{CANARY} of {context.partition_key}")


REPORT = dg.define_asset_job("report_job", [report])
BROKEN = dg.define_asset_job("broken_job", [broken])
DEFS = dg.Definitions(assets=[report, broken], jobs=[REPORT, BROKEN])


def origin(name: str) -> RemoteInstigatorOrigin:
    location = ManagedGrpcPythonEnvCodeLocationOrigin(loadable_target_origin=LoadableTargetOrigin(module_name="ft_assets.definitions"))
    return RemoteInstigatorOrigin(repository_origin=RemoteRepositoryOrigin(location, "__repository__"), instigator_name=name)


def plant(world: World, tenant: str) -> str:
    """A trained adapter, and what Dagster and MLflow would have recorded of it; returns its id."""
    adapter_id = world.trained(tenant)
    job_id = str(world.row(adapter_id).job_id)
    key, text = partition_key(tenant, job_id), f"{CANARY} of {tenant}"
    with dg.DagsterInstance.get() as instance:
        instance.add_dynamic_partitions(str(JOBS.name), [key])
        tags = {"ft/tenant": tenant, "dagster/ft_job": job_id, "dagster/ft_reason": text}
        for name in ("report_job", "broken_job"):
            job = DEFS.get_job_def(name)
            job.execute_in_process(instance=instance, partition_key=key, tags=tags, raise_on_error=False)
        submission = {"tenant": tenant, "model": "tiny-base", "training_file": "file-1", "options": {"metadata": {"note": text}}}
        submit.execute_in_process(
            instance=instance, run_config={"ops": {"register": {"config": submission}}}, raise_on_error=False,
            resources={"platform": dg.ResourceDefinition.none_resource()},
        )  # fmt: skip
        instance.report_runless_asset_event(dg.AssetMaterialization("adapter", partition=key, metadata={"text": text}))
        version = partition_key(tenant, f"ds_{'c' * 24}")
        instance.add_dynamic_partitions(str(DATASETS.name), [version])
        instance.report_runless_asset_event(dg.AssetMaterialization("validated_dataset", partition=version, metadata={"filename": text}))
        sensor = origin("admission")
        state = SensorInstigatorData(last_run_key=f"{job_id}#1", cursor=None)
        old = instance.get_instigator_state(sensor.get_id(), sensor.get_selector().get_id())
        made = InstigatorState(sensor, InstigatorType.SENSOR, InstigatorStatus.RUNNING, state)
        (instance.update_instigator_state if old else instance.add_instigator_state)(made)
        tick = TickData(
            instigator_origin_id=sensor.get_id(), instigator_name="admission", instigator_type=InstigatorType.SENSOR,
            status=TickStatus.SKIPPED, timestamp=time.time(), skip_reason=f"{job_id}: {text}", selector_id=sensor.get_selector().get_id(),
        )  # fmt: skip
        instance.create_tick(tick)
        log = Path(instance.compute_log_manager.get_captured_local_path(["__repository__", "scheduling", job_id[-8:]], "err"))
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"granted {job_id}: {text}\n")
    track(world, tenant, job_id)
    return adapter_id


def track(world: World, tenant: str, job_id: str) -> None:
    uri = world.platform.settings.mlflow_uri
    tracker = MlflowTracker(uri=uri, objects=world.platform.objects)
    run = TrackedRun(tenant=tenant, job_id=job_id, attempt=1, tags={"tenant": tenant}, params={"template": f"{CANARY} of {tenant}"})
    log = tracker.begin(run)
    log.log([{"step": 1, "loss": 0.5}])
    log.attach({"sample.txt": f"{CANARY} of {tenant}".encode()})
    log.end(outcome="succeeded")
    tracker.flush(timeout_s=300)
    assert log.problem() is None
    models = mlflow_mirror.desired(world.platform)
    versions = [replace(version, description=f"{CANARY} of {tenant}") for version in models.versions if version.tags["ft.tenant"] == tenant]
    synchronize(uri, RegisteredModels(versions=versions, aliases={}))
    file = file_of(uri)
    assert file is not None
    older_artifacts(file, tenant).mkdir(parents=True)
    (older_artifacts(file, tenant) / "sample.txt").write_text(f"{CANARY} of {tenant}")


@dataclass(frozen=True)
class Everything:
    """Every byte that the platform, Dagster and MLflow have stored."""

    world: World

    def naming(self, *texts: str) -> list[str]:
        """Where one of `texts` stands."""
        return sorted({place for place, content in self._places() if any(text in content for text in texts)})

    def _places(self) -> Iterator[tuple[str, str]]:
        settings = self.world.platform.settings
        for url in (settings.database_url, settings.dagster_database_url):
            engine = make_engine(url)
            with engine.connect() as conn:
                for table in sa.inspect(conn).get_table_names():
                    for row in conn.execute(sa.text(f'SELECT * FROM "{table}"')).mappings():
                        yield table, "\n".join(_text(value) for value in row.values())
            engine.dispose()
        for path in settings.home.rglob("*"):
            if path.is_file():
                yield str(path.relative_to(settings.home)), path.read_bytes().decode(errors="replace")


def _text(value: object) -> str:
    if isinstance(value, memoryview | bytes):
        return zlib.decompress(bytes(value)).decode()
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


PLANTED = {
    "runs", "run_tags", "event_logs", "asset_keys", "asset_check_executions", "dynamic_partitions", "job_ticks", "instigators", "mlflow.db",
}  # fmt: skip


def test_no_text_of_a_deleted_tenant_is_left_in_dagster_or_mlflow_and_another_tenants_records_stay(world: World) -> None:
    tenant, other = world.tenant(), world.tenant()
    plant(world, other)
    adapter_id = plant(world, tenant)
    job_id = str(world.row(adapter_id).job_id)
    everything = Everything(world)
    before = everything.naming(f"{CANARY} of {tenant}", job_id)
    assert set(before) >= PLANTED, "each store holds something to find"
    assert [place for place in before if "compute_logs" in place], "the output of the steps, too"
    others = everything.naming(f"{CANARY} of {other}")
    id_ = world.delete_data(tenant)
    assert world.carried_out(id_)
    assert everything.naming(f"{CANARY} of {tenant}") == []
    with dg.DagsterInstance.get() as instance:
        assert [run.tags.get("ft/tenant") for run in instance.get_runs() if "ft/tenant" in run.tags] == [other, other]
        latest = instance.get_latest_materialization_event(dg.AssetKey("report"))
        assert latest is not None and other in str(latest.asset_materialization), "the newest that is left, in place of the tenant's"
        assert [key.split(":")[0] for name in ("jobs", "datasets") for key in instance.get_dynamic_partitions(name)] == [other, other]
    assert set(everything.naming(f"{CANARY} of {other}")) == {*others, "asset_keys"}
    proof = deletion.get(world.platform, tenant, id_).proof
    assert {one["store"] for one in proof["records"]} == {"dagster", "mlflow"}
    searched = {one["store"].split()[0]: one for one in proof["searched"]}
    assert {"event_logs.event", "runs.run_body", "job_ticks.tick_body", "asset_keys.last_materialization"} <= set(
        searched["dagster"]["searched"]
    )
    assert (searched["dagster"]["found"], searched["mlflow"]["found"]) == (0, 0)
    assert proof["kept"] and proof["not_inspected"]
    assert tenant not in {version.tags["ft.tenant"] for version in mlflow_mirror.desired(world.platform).versions}
