"""Asset checks, executed by Dagster with the assets of a job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow.parquet as pq
import pytest
import yaml

from control_plane.adapters import lineage, promotions
from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from core import layout
from core.base_models import Catalogue
from core.durable_files import sha256_of
from core.errors import Unavailable
from engine.data.packs import manifest
from ft_assets.adapters.assets import adapter
from ft_assets.datasets.assets import dataset, tokenized_pack
from ft_assets.platform_resource import PlatformResource, checked
from tests.support.jobs.finished_job import finish
from tests.support.models.tiny_model import build_tiny_model


@pytest.fixture
def platform(new_platform: Callable[..., Platform], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Platform:
    """One with a tenant and a base model, which Dagster's resource opens too."""
    directory = build_tiny_model(tmp_path / "tiny-chat")
    catalogue = tmp_path / "models.yaml"
    catalogue.write_text(yaml.safe_dump({"models": [{"id": "tiny-chat", "path": str(directory), "license": "Apache-2.0"}]}))
    made = new_platform()
    for name, value in (("HOME", str(made.settings.home)), ("DATABASE_URL", made.settings.database_url), ("BASE_MODELS", str(catalogue))):
        monkeypatch.setenv(f"FT_{name}", value)
    tenants.create(made, "acme")
    return replace(made, models=Catalogue.load([catalogue]))


def job_on(platform: Platform, rows: Path) -> str:
    with rows.open("rb") as stream:
        file = uploaded_files.create(
            platform, "acme", stream, filename=rows.name, purpose="fine-tune", policies={"near_duplicates": "warn"}
        )
    return str(jobs.submit(platform, "acme", JobRequest.from_body({"model": "tiny-chat", "training_file": file.id})).job.id)


def checks_of(job: str, *assets: Any) -> dict[str, tuple[bool, Any]]:
    """Materialize `assets`: whether each of their checks passed, with its findings."""
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("jobs", [f"acme:{job}"])
        result = dg.materialize(list(assets), instance=instance, partition_key=f"acme:{job}", resources={"platform": PlatformResource()})
    assert result.success
    return {e.check_name: (e.passed, e.metadata["findings"].value) for e in result.get_asset_check_evaluations()}


def test_data_without_doubts_passes_and_its_pack_is_exact(platform: Platform, write_chat_rows: Callable[..., Path]) -> None:
    found = checks_of(job_on(platform, write_chat_rows(500)), dataset, tokenized_pack)
    assert found["packing_exact"] == (True, [])
    passed, warnings = found["valid"]
    assert passed is not bool(warnings)


def test_a_reused_pack_whose_counts_are_wrong_fails_its_check_and_stops_no_job(
    platform: Platform, write_chat_rows: Callable[..., Path]
) -> None:
    first = job_on(platform, write_chat_rows(120))
    checks_of(first, dataset, tokenized_pack)
    directory = platform.settings.work_dir / "packs" / "acme" / str(jobs.get(platform, "acme", first).job.pack_fingerprint)
    shard = directory / "shard-00000.parquet"
    pq.write_table(pq.read_table(shard).slice(1), shard)
    stated = manifest.PackManifest.read(directory)
    stated.shards[0]["sha256"] = sha256_of(shard)
    stated.write(directory)
    prefix = layout.pack_prefix("acme", stated.fingerprint)
    for changed in (shard, directory / "manifest.json"):
        platform.objects.put_file(f"{prefix}/{changed.name}", changed)
    passed, findings = checks_of(first, dataset, tokenized_pack)["packing_exact"]
    assert not passed
    assert findings[0].startswith(f"training: num_examples is {stated.num_examples}, and its files have ")


def test_an_adapter_has_a_check_for_its_lineage_and_one_for_its_files(platform: Platform, write_chat_rows: Callable[..., Path]) -> None:
    assert {spec.name for spec in adapter.check_specs} == {"lineage_complete", "servable"}
    id_ = finish(platform, "acme", job_on(platform, write_chat_rows(120)))
    assert lineage.broken_links(platform, "acme", id_) == []
    assert promotions.obstacles(platform, "acme", id_), "its weights are no tensors"
    platform.objects.put_bytes(f"{layout.adapter_prefix('acme', id_)}/adapter_model.safetensors", b"other weights")
    assert lineage.broken_links(platform, "acme", id_) == ["adapter file adapter_model.safetensors: not what was recorded"]


def test_what_cannot_be_read_is_a_finding() -> None:
    def find() -> list[str]:
        raise Unavailable("the object store did not respond")

    result = checked("servable", find)
    assert (result.passed, result.metadata["findings"].value) == (False, ["Unavailable: the object store did not respond"])
