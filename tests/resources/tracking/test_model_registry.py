"""Registered models in a real MLflow store: made, followed, repaired, and a store that is not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from control_plane.platform.protocols import ModelRegistry, RegisteredModels, RegisteredVersion
from core.errors import Unavailable
from resources.tracking.model_registry import MlflowRegistry, synchronize

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # MLflow's own
    pytest.mark.slow,  # each writer is a process that imports MLflow
]


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    before = dict(os.environ)
    yield f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"
    os.environ.clear()
    os.environ.update(before)


def version(number: int, stage: str, *, model: str = "acme.support.base") -> RegisteredVersion:
    tags = {"ft.tenant": "acme", "ft.stage": stage, "ft.manifest_sha256": "d" * 64}
    return RegisteredVersion(model=model, adapter_id=f"adp-{number}", source=f"s3://b/adp-{number}", description="d", tags=tags)


def models(stages: list[str], **aliases: str) -> RegisteredModels:
    return RegisteredModels(versions=[version(n, s) for n, s in enumerate(stages)], aliases={"acme.support.base": aliases})


def client(uri: str) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri, registry_uri=uri)


def test_versions_tags_and_aliases_follow_and_what_others_did_stays(uri: str) -> None:
    registry: ModelRegistry = MlflowRegistry(uri=uri, limit_s=300.0)
    assert registry.mirror(models(["production", "staging"], production="adp-0", staging="adp-1")) == 4
    mlflow = client(uri)
    mlflow.set_registered_model_alias("acme.support.base", "champion", "1")
    mlflow.create_registered_model("somebody-elses")
    assert synchronize(uri, models(["production", "staging"], production="adp-0", staging="adp-1")) == 0, "twice is once"
    changed = models(["production", "production", "draft"], production="adp-1", previous="adp-0")
    assert synchronize(uri, changed) == 1 + 1 + 3, "a stage, a version, three aliases"
    found = mlflow.get_registered_model("acme.support.base")
    assert {k: str(v) for k, v in found.aliases.items()} == {"champion": "1", "production": "2", "previous": "1"}
    serving = mlflow.get_model_version_by_alias("acme.support.base", "production")
    assert (serving.tags["ft.adapter"], serving.tags["ft.stage"], serving.source) == ("adp-1", "production", "s3://b/adp-1")
    assert mlflow.get_registered_model("somebody-elses").aliases == {}
    mlflow.set_registered_model_alias("acme.support.base", "production", "1")
    mlflow.set_model_version_tag("acme.support.base", "2", "ft.stage", "draft")
    assert synchronize(uri, changed) == 2, "repaired"


@pytest.mark.parametrize("uri", ["sqlite:////nowhere/at/all/mlflow.db", "http://127.0.0.1:9"], ids=["file", "server"])
def test_a_store_that_is_not_there_says_so_and_holds_nobody_up(uri: str) -> None:
    with pytest.raises(Unavailable, match="the next round retries"):
        MlflowRegistry(uri=uri, limit_s=60.0).mirror(models(["draft"]))


def test_a_store_that_never_answers_is_given_up(uri: str, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="did not accept the registered models within 0 s"):
        replace(MlflowRegistry(uri=uri), limit_s=0.05).mirror(models(["draft"]))
