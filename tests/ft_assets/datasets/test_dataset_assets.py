"""The assets of this stage, run by Dagster itself on a platform of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from control_plane.service import files, jobs, tenants
from control_plane.service.platform import Platform
from control_plane.service.submission import JobRequest
from ft_assets.base_models import Catalogue
from ft_assets.datasets.assets import dataset, tokenized_pack
from resources.dagster_platform import PlatformResource
from tests.tiny_model import build_tiny_model


def metadata_of(result: dg.ExecuteInProcessResult, asset: Any) -> dict[str, Any]:
    (made,) = result.asset_materializations_for_node(asset.op.name)
    return {name: value.value for name, value in made.metadata.items()}


def test_a_job_is_pinned_and_packed_with_what_a_person_wants_to_see(
    new_platform: Callable[..., Platform], write_chat_rows: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = build_tiny_model(tmp_path / "tiny-chat")
    catalogue = tmp_path / "models.yaml"
    catalogue.write_text(yaml.safe_dump({"models": [{"id": "tiny-chat", "path": str(directory), "license": "Apache-2.0"}]}))
    made = new_platform()
    platform = replace(made, models=Catalogue.load([catalogue]))
    for name, value in (("HOME", str(made.settings.home)), ("DATABASE_URL", made.settings.database_url), ("BASE_MODELS", str(catalogue))):
        monkeypatch.setenv(f"FT_{name}", value)
    tenants.create(platform, "acme")
    with write_chat_rows(120).open("rb") as stream:
        file = files.create(platform, "acme", stream, filename="support.jsonl", purpose="fine-tune", policies={"near_duplicates": "warn"})
    job = jobs.submit(platform, "acme", JobRequest.from_body({"model": "tiny-chat", "training_file": file["id"]})).job["id"]
    partition = f"acme:{job}"
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("jobs", [partition])
        result = dg.materialize(
            [dataset, tokenized_pack], instance=instance, partition_key=partition, resources={"platform": PlatformResource()}
        )
    assert result.success
    seen = metadata_of(result, dataset)
    assert seen["dataset_id"] == file["dataset_id"]
    for shown in ("**valid**", "for training", "data:image/svg+xml", "near_duplicates | warn"):
        assert shown in seen["report"]
    packed = metadata_of(result, tokenized_pack)
    assert packed["examples"] > 0
    told = [e["message"] for e in jobs.list_events(platform, "acme", job).items if e["code"] == "dataset_progress"]
    assert told, "packing says how far it is"
