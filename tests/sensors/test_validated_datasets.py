"""Validated dataset versions in Dagster: each reported once, in order, and the first link of an adapter's lineage there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import sqlalchemy as sa
import yaml
from dagster._core.instance import InstanceRef
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import ModuleTarget
from dagster_graphql.test.utils import execute_dagster_graphql

from control_plane.datasets.tables import datasets
from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.platform.context import Platform
from control_plane.tenant_data.erasure import KEPT_REPORT
from control_plane.tenants import service as tenants
from core.base_models import Catalogue
from ft_assets.definitions import defs
from ft_assets.platform_resource import PlatformResource
from sensors import validated_datasets as reports
from sensors.validated_datasets import validated_datasets
from tests.support.models.tiny_model import build_tiny_model


@pytest.fixture
def platform(new_platform: Callable[..., Platform], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Platform:
    """One with a tenant and a base model with a tokenizer, which Dagster's resource opens too."""
    catalogue = tmp_path / "models.yaml"
    model = build_tiny_model(tmp_path / "tiny-chat")
    catalogue.write_text(yaml.safe_dump({"models": [{"id": "tiny-chat", "path": str(model), "license": "Apache-2.0"}]}))
    made = new_platform()
    for name, value in (("HOME", str(made.settings.home)), ("DATABASE_URL", made.settings.database_url), ("BASE_MODELS", str(catalogue))):
        monkeypatch.setenv(f"FT_{name}", value)
    tenants.create(made, "acme")
    return replace(made, models=Catalogue.load([catalogue]))


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    (tmp_path / "dagster").mkdir()
    with dg.DagsterInstance.from_ref(InstanceRef.from_dir(str(tmp_path / "dagster"))) as made:
        yield made


def upload(platform: Platform, path: Path, **settings: Any) -> Any:
    with path.open("rb") as rows:
        return uploaded_files.create(platform, "acme", rows, filename=path.name, purpose="fine-tune", **settings)


def tick(instance: dg.DagsterInstance, cursor: str | None) -> dg.SensorResult | dg.SkipReason:
    with dg.build_sensor_context(instance=instance, cursor=cursor, resources={"platform": PlatformResource()}) as context:
        result = validated_datasets(context)
    assert isinstance(result, dg.SensorResult | dg.SkipReason)
    return result


def reported(instance: dg.DagsterInstance, cursor: str | None = None) -> dg.SensorResult:
    """A tick, and what the daemon does with its result."""
    result = tick(instance, cursor)
    assert isinstance(result, dg.SensorResult) and result.dynamic_partitions_requests
    for event in result.asset_events:
        instance.report_runless_asset_event(event)
    for request in result.dynamic_partitions_requests:
        assert isinstance(request, dg.AddDynamicPartitionsRequest)
        instance.add_dynamic_partitions(request.partitions_def_name, list(request.partition_keys))
    return result


def test_each_version_is_reported_once_in_order_with_its_file(
    platform: Platform, instance: dg.DagsterInstance, write_chat_rows: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "SETTLED", timedelta(0))
    first = write_chat_rows(60, name="first.jsonl")
    uploads = [upload(platform, first, model="tiny-chat"), upload(platform, write_chat_rows(60, name="second.jsonl", salt="x"))]
    again = upload(platform, write_chat_rows(60, name="copy.jsonl"), model="tiny-chat")
    assert again.dataset_id == uploads[0].dataset_id, "the same content is the same version"
    result = reported(instance)
    assert [event.partition for event in result.asset_events] == [f"acme:{file.dataset_id}" for file in uploads]
    assert instance.get_dynamic_partitions("datasets") == [event.partition for event in result.asset_events]
    event = result.asset_events[0]
    shown = {name: value.value for name, value in event.metadata.items()}
    assert event.asset_key == dg.AssetKey("validated_dataset")
    assert (shown["filename"], shown["file_id"], shown["version"]) == ("first.jsonl", uploads[0].id, 1)
    assert shown["sha256"] == hashlib.sha256(first.read_bytes()).hexdigest()
    assert shown["rows"] > 0 and shown["tokens"] > shown["rows"] and "**valid**" in shown["report"]
    assert shown["api"] == f"http://127.0.0.1:8000/v1/datasets/{uploads[0].dataset_id}/report"
    assert "tokens" not in result.asset_events[1].metadata, "no model was named whose tokens could be counted"
    assert isinstance(tick(instance, result.cursor), dg.SkipReason)
    third = upload(platform, write_chat_rows(60, name="third.jsonl", salt="y"))
    assert [event.partition for event in reported(instance, result.cursor).asset_events] == [f"acme:{third.dataset_id}"]


def test_a_version_waits_until_no_earlier_one_can_be_missing_and_a_page_continues_after_its_last(
    platform: Platform, write_chat_rows: Callable[..., Path]
) -> None:
    ids = [upload(platform, write_chat_rows(60, name=f"{salt}.jsonl", salt=salt)).dataset_id for salt in ("a", "b", "c")]
    assert reports.registered(platform, after=None) == []
    later = replace(platform, clock=lambda: platform.clock() + reports.SETTLED + timedelta(seconds=5))
    (first,) = reports.registered(later, after=None, limit=1)
    rest = reports.registered(later, after=first.position)
    assert [version.id for version in (first, *rest)] == ids
    assert reports.registered(later, after=rest[-1].position) == []


def test_a_version_whose_data_was_erased_is_not_reported(
    platform: Platform, instance: dg.DagsterInstance, write_chat_rows: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "SETTLED", timedelta(0))
    upload(platform, write_chat_rows(60))
    with platform.engine.begin() as conn:
        conn.execute(sa.update(datasets).values(report=dict(KEPT_REPORT)))
    assert isinstance(tick(instance, None), dg.SkipReason)


LINEAGE = """{ assetNodes { assetKey { path } dependencyKeys { path } partitionDefinition { name } isMaterializable } }"""
OF_A_PARTITION = """query($asset: [String!]!, $key: String!) { assetNodeOrError(assetKey: {path: $asset}) { ... on AssetNode {
  staleStatus(partition: $key) assetMaterializations(partitions: [$key]) { partition tags { key value }
    metadataEntries { label ... on UrlMetadataEntry { url } ... on IntMetadataEntry { intValue } } } } } }"""


@pytest.mark.slow
def test_the_ui_shows_the_lineage_from_the_validated_file_to_the_adapter(
    platform: Platform, instance: dg.DagsterInstance, write_chat_rows: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "SETTLED", timedelta(0))
    file, other = upload(platform, write_chat_rows(120)), upload(platform, write_chat_rows(60, name="other.jsonl", salt="x"))
    reported(instance)
    job = jobs.submit(platform, "acme", JobRequest.from_body({"model": "tiny-chat", "training_file": file.id})).job.id
    instance.add_dynamic_partitions("jobs", [f"acme:{job}"])
    prepare, resources = defs.resolve_job_def("prepare"), {"platform": PlatformResource()}
    assert prepare.execute_in_process(instance=instance, partition_key=f"acme:{job}", resources=resources).success
    target = ModuleTarget("ft_assets.definitions", attribute=None, working_directory=None, location_name="ft")
    with WorkspaceProcessContext(instance, target) as workspace:
        context = workspace.create_request_context()
        nodes = {"/".join(n["assetKey"]["path"]): n for n in execute_dagster_graphql(context, LINEAGE).data["assetNodes"]}
        pinned, version = (
            execute_dagster_graphql(context, OF_A_PARTITION, {"asset": [asset], "key": key}).data["assetNodeOrError"]
            for asset, key in (("dataset", f"acme:{job}"), ("validated_dataset", f"acme:{file.dataset_id}"))
        )
    path = ["validated_dataset", "dataset", "tokenized_pack", "checkpoint", "eval_report", "adapter"]
    for upstream, downstream in pairwise(path):
        assert [upstream] in [key["path"] for key in nodes[downstream]["dependencyKeys"]], (upstream, downstream)
    assert (nodes["validated_dataset"]["partitionDefinition"]["name"], nodes["validated_dataset"]["isMaterializable"]) == (
        "datasets",
        False,
    )
    (made,) = pinned["assetMaterializations"]
    shown = {entry["label"]: entry for entry in made["metadataEntries"]}
    assert shown["validated_dataset"]["url"] == f"/assets/validated_dataset?partition=acme%3A{file.dataset_id}"
    content = {tag["key"]: tag["value"] for tag in version["assetMaterializations"][0]["tags"]}["dagster/data_version"]
    used = {tag["key"]: tag["value"] for tag in made["tags"]}["dagster/input_data_version/validated_dataset"]
    assert used == hashlib.sha256(content.encode()).hexdigest(), "the run read exactly the version that the job is pinned to"
    assert other.dataset_id != file.dataset_id and pinned["staleStatus"] == "FRESH"
