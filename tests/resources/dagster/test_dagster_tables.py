"""A tenant's names are searched for in every table of the installed Dagster, or the proof lists the table as not searched; what has
ended and names the tenant is erased."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import sqlalchemy as sa
from dagster._core.definitions.run_request import InstigatorType
from dagster._core.instance import InstanceRef
from dagster._core.scheduler.instigation import TickData, TickStatus
from dagster._core.test_utils import create_run_for_test
from dagster_postgres import DagsterPostgresStorage
from sqlalchemy.engine import Engine

from core.errors import Conflict
from resources.dagster import dagster_records
from resources.dagster.dagster_records import Names
from resources.database import embedded
from resources.database.engine import make_engine

JOB = "ftjob-0123456789abcdef01234567"
NAMES = Names(tenant="acme", ids=frozenset({JOB}))
BINARY = {("snapshots", "snapshot_body")}
"""Columns that are no text and are searched by themselves."""


@pytest.fixture
def engine(postgres_dir: Path) -> Iterator[Engine]:
    """A database with every table of the installed Dagster."""
    admin = make_engine(embedded.socket_url(postgres_dir, "postgres")).execution_options(isolation_level="AUTOCOMMIT")
    name = f"d_{uuid.uuid4().hex[:12]}"
    with admin.connect() as conn:
        conn.execute(sa.text(f"CREATE DATABASE {name}"))
    admin.dispose()
    url = embedded.socket_url(postgres_dir, name)
    storage = DagsterPostgresStorage(url, should_autocreate_tables=True)
    for part in (storage.run_storage, storage.event_log_storage, storage.schedule_storage):
        part.dispose()
    engine = make_engine(url)
    yield engine
    engine.dispose()


@pytest.fixture
def instance(engine: Engine, tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """Dagster over that database, with the output of steps in files."""
    storage = {"postgres": {"postgres_url": engine.url.render_as_string(hide_password=False)}}
    with dg.DagsterInstance.from_ref(InstanceRef.from_dir(str(tmp_path), overrides={"storage": storage})) as made:
        yield made


def tick(status: TickStatus, **fields: Any) -> TickData:
    named = {"instigator_origin_id": "o", "instigator_name": "admission", "instigator_type": InstigatorType.SENSOR, "selector_id": "s"}
    return TickData(**named, status=status, timestamp=1.0, **fields)


def test_every_column_of_the_installed_dagster_that_can_hold_text_is_searched(engine: Engine) -> None:
    with engine.connect() as conn:
        searched = set(dagster_records._columns(conn))
        found = sa.inspect(conn)
        tables = {table: {column["name"]: column["type"] for column in found.get_columns(table)} for table in found.get_table_names()}
        assert dagster_records._tables_without_id(conn) == []
    assert {table for table, columns in tables.items() if "id" not in columns} == dagster_records.NAMES_NOTHING
    numbers = (sa.Integer, sa.Float, sa.Numeric, sa.Boolean, sa.DateTime, sa.Date)
    with_id = {table: columns for table, columns in tables.items() if "id" in columns}
    may_name = {(table, name) for table, columns in with_id.items() for name, kind in columns.items() if not isinstance(kind, numbers)}
    assert may_name - BINARY == searched
    assert with_id.keys() >= dagster_records.DELETED


def test_a_table_without_an_id_that_is_not_known_is_reported_as_not_searched(engine: Engine) -> None:
    with engine.begin() as conn:
        conn.execute(sa.text("CREATE TABLE later (key text PRIMARY KEY, value text)"))
        conn.execute(sa.text("INSERT INTO later VALUES ('a', 'tenants/acme/x')"))
    with dg.DagsterInstance.ephemeral() as instance:
        result = dagster_records.search(instance, engine, NAMES)
    assert result["not_searched"] == ["later"] and result["found"] == []


def test_a_run_is_erased_with_its_output_and_with_what_names_only_the_run(instance: dg.DagsterInstance, engine: Engine) -> None:
    runs, outputs = {}, {}
    for tenant, job_id in (("acme", JOB), ("acme-2", f"ftjob-{'b' * 24}")):
        run = create_run_for_test(instance, job_name="prepare", status=dg.DagsterRunStatus.SUCCESS, tags={"ft/tenant": tenant})
        output = Path(instance.compute_log_manager.get_captured_local_path([run.run_id, "compute_logs", "pack"], "out"))
        output.parent.mkdir(parents=True)
        output.write_text("a row that names nobody")
        instance.create_tick(tick(TickStatus.SUCCESS, run_ids=[run.run_id]))
        instance.add_dynamic_partitions("jobs", [f"{tenant}:{job_id}"])
        runs[tenant], outputs[tenant] = run.run_id, output
    assert dagster_records.erase(instance, engine, NAMES, budget_s=600) == {"runs": 1, "partition_keys": 1, "job_ticks": 1}
    assert [run.run_id for run in instance.get_runs()] == [runs["acme-2"]]
    assert [output.exists() for output in outputs.values()] == [False, True]
    assert [list(found.run_ids) for found in instance.get_ticks("o", "s")] == [[runs["acme-2"]]]
    assert [key.split(":")[0] for key in instance.get_dynamic_partitions("jobs")] == ["acme-2"]


def test_a_run_and_a_tick_that_are_under_way_are_erased_once_they_have_ended(instance: dg.DagsterInstance, engine: Engine) -> None:
    run = create_run_for_test(instance, job_name="train", status=dg.DagsterRunStatus.STARTED, tags={"ft/tenant": "acme"})
    started = instance.create_tick(tick(TickStatus.STARTED, cursor=JOB))
    with pytest.raises(Conflict, match=f"Dagster run {run.run_id} is STARTED"):
        dagster_records.erase(instance, engine, NAMES, budget_s=600)
    instance.report_run_canceled(run)
    assert dagster_records.erase(instance, engine, NAMES, budget_s=600) == {"runs": 1}
    assert dagster_records.search(instance, engine, NAMES)["found"] == ["job_ticks.tick_body"]
    instance.update_tick(started.with_status(TickStatus.SKIPPED))
    assert dagster_records.erase(instance, engine, NAMES, budget_s=600) == {"job_ticks": 1}
    assert dagster_records.search(instance, engine, NAMES)["found"] == []


def test_a_tenants_validated_datasets_are_erased_and_the_same_content_of_another_tenant_stays(
    instance: dg.DagsterInstance, engine: Engine
) -> None:
    version = f"ds_{'c' * 24}"
    for tenant in ("acme-2", "acme"):
        instance.add_dynamic_partitions("datasets", [f"{tenant}:{version}"])
        reported = dg.AssetMaterialization("validated_dataset", partition=f"{tenant}:{version}", metadata={"filename": f"{tenant}.jsonl"})
        instance.report_runless_asset_event(reported)
    counts = dagster_records.erase(instance, engine, NAMES, budget_s=600)
    assert (counts["partition_keys"], counts["event_logs"]) == (1, 1)
    assert dagster_records.search(instance, engine, NAMES)["found"] == []
    assert instance.get_dynamic_partitions("datasets") == [f"acme-2:{version}"]
    latest = instance.get_latest_materialization_event(dg.AssetKey("validated_dataset"))
    assert latest is not None and latest.asset_materialization is not None
    assert latest.asset_materialization.metadata["filename"].value == "acme-2.jsonl"
