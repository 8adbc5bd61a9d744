"""The assets of this stage, run by Dagster itself on a platform of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from core.base_models import Catalogue
from ft_assets.datasets.assets import dataset, tokenized_pack
from ft_assets.platform_resource import PlatformResource
from tests.support.models.tiny_model import build_tiny_model


def metadata_of(result: dg.ExecuteInProcessResult, asset: Any) -> dict[str, Any]:
    (made,) = result.asset_materializations_for_node(asset.op.name)
    return {name: value.value for name, value in made.metadata.items()}


@pytest.fixture
def platform(new_platform: Callable[..., Platform], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Platform:
    """One with a tenant and a base model that has a tokenizer, and which Dagster's resource opens too."""
    directory = build_tiny_model(tmp_path / "tiny-chat")
    catalogue = tmp_path / "models.yaml"
    catalogue.write_text(yaml.safe_dump({"models": [{"id": "tiny-chat", "path": str(directory), "license": "Apache-2.0"}]}))
    made = new_platform()
    platform = replace(made, models=Catalogue.load([catalogue]))
    for name, value in (("HOME", str(made.settings.home)), ("DATABASE_URL", made.settings.database_url), ("BASE_MODELS", str(catalogue))):
        monkeypatch.setenv(f"FT_{name}", value)
    tenants.create(platform, "acme")
    return platform


def materialized(platform: Platform, file_id: str, **body: Any) -> tuple[str, dg.ExecuteInProcessResult]:
    """A job on the file, and the run of its first two assets."""
    job = jobs.submit(platform, "acme", JobRequest.from_body({"model": "tiny-chat", "training_file": file_id, **body})).job.id
    partition = f"acme:{job}"
    with dg.DagsterInstance.ephemeral() as instance:
        instance.add_dynamic_partitions("jobs", [partition])
        result = dg.materialize(
            [dataset, tokenized_pack], instance=instance, partition_key=partition, resources={"platform": PlatformResource()}
        )
    assert result.success
    return str(job), result


def test_a_job_is_pinned_and_packed_with_what_a_person_wants_to_see(platform: Platform, write_chat_rows: Callable[..., Path]) -> None:
    with write_chat_rows(120).open("rb") as stream:
        file = uploaded_files.create(
            platform, "acme", stream, filename="support.jsonl", purpose="fine-tune", policies={"near_duplicates": "warn"}
        )
    job, result = materialized(platform, file.id)
    seen = metadata_of(result, dataset)
    assert seen["dataset_id"] == file.dataset_id
    for shown in ("**valid**", "for training", "data:image/svg+xml", "near_duplicates | warn"):
        assert shown in seen["report"]
    packed = metadata_of(result, tokenized_pack)
    (row,) = [record.data for record in packed["packs"].records]
    assert (row["num_examples"], row["rows_per_epoch"], row["fingerprint"]) == (packed["examples"], packed["rows"], packed["fingerprint"])
    assert packed["examples"] > 0
    assert (packed["cost_usd"], packed["runs_of_job"].endswith(job)) == (0.0, True)
    assert packed["made_from_dataset"].startswith("/assets/dataset?partition=")
    told = [e.message for e in jobs.list_events(platform, "acme", job).items if e.code == "dataset_progress"]
    assert told, "packing says how far it is"


def test_judged_answers_show_their_labels_and_what_they_are_compared_with(platform: Platform, tmp_path: Path) -> None:
    rows = tmp_path / "judged.jsonl"
    made = [{"prompt": f"What is {i} and {i}?", "completion": f"It is {2 * i}.", "label": i % 3 > 0} for i in range(120)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in made))
    with rows.open("rb") as stream:
        file = uploaded_files.create(
            platform, "acme", stream, filename="judged.jsonl", purpose="fine-tune", policies={"near_duplicates": "off"}
        )
    _, result = materialized(platform, file.id, method="kto")
    packed = metadata_of(result, tokenized_pack)
    assert packed["kind"] == "judged"
    assert packed["good"] > packed["bad"] > 0 and packed["good"] + packed["bad"] == packed["rows"]
    assert packed["reference"].startswith("rf_") and packed["reference"] in packed["reference_files"]
    assert (packed["reference_reused"], packed["reference_quantization"], packed["reference_adapter"]) == (False, "none", "none")
