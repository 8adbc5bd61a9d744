"""Dagster's resources: what the UI shows of the configuration, and that the platform is composed from them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.instance import InstanceRef
from dagster._core.workspace.context import WorkspaceProcessContext
from dagster._core.workspace.load_target import ModuleTarget
from dagster_graphql.test.utils import execute_dagster_graphql

from control_plane.composition import open_platform
from control_plane.platform.settings import load
from ft_assets.platform_resource import PlatformResource
from resources.dagster.configured_resources import DatabaseResource, FleetResource, LauncherResource, ObjectStoreResource
from resources.object_store import LocalObjectStore

SHOWN = """query($selector: RepositorySelector!) { allTopLevelResourceDetailsOrError(repositorySelector: $selector) {
  ... on ResourceDetailsList { results { name configuredValues { key value type } nestedResources { name } } } } }"""


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {
        "FT_HOME": str(tmp_path / "home"), "FT_DATABASE_URL": "postgresql://any:hunter2@127.0.0.1:9/ft", "FT_OBJECT_STORE": "s3://bucket/deep",
        "FT_MLFLOW_URI": "postgresql+psycopg2://any:hunter2@127.0.0.1:9/mlflow", "FT_INFERENCE_URLS": "http://a:1,http://b:2",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_DEFAULT_REGION": "eu-central-1", "AWS_SECRET_ACCESS_KEY": "hunter2",
    }  # fmt: skip
    for name, value in told.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    (tmp_path / "dagster").mkdir()
    with dg.DagsterInstance.from_ref(InstanceRef.from_dir(str(tmp_path / "dagster"))) as made:
        yield made


def shown(instance: dg.DagsterInstance) -> dict[str, Any]:
    """The code location's resources in the UI, by name."""
    target = ModuleTarget("ft_assets.definitions", attribute=None, working_directory=None, location_name="ft")
    selector = {"repositoryLocationName": "ft", "repositoryName": "__repository__"}
    with WorkspaceProcessContext(instance, target) as workspace:
        answer = execute_dagster_graphql(workspace.create_request_context(), SHOWN, {"selector": selector})
    return {one["name"]: one for one in answer.data["allTopLevelResourceDetailsOrError"]["results"]}


@pytest.mark.slow
@pytest.mark.usefixtures("environment")
def test_the_ui_shows_how_the_code_location_is_configured_and_no_secret(instance: dg.DagsterInstance, tmp_path: Path) -> None:
    found = shown(instance)
    values = {name: {v["key"]: (v["type"], v["value"]) for v in one["configuredValues"]} for name, one in found.items()}
    assert values["database"] == {"url": ("ENV_VAR", "FT_DATABASE_URL")}
    assert values["tracker"] == {"uri": ("ENV_VAR", "FT_MLFLOW_URI")}
    assert values["objects"] == {"url": ("VALUE", '"s3://bucket/deep"')}
    assert values["launcher"] == {"directory": ("VALUE", f'"{tmp_path}/home/work/launcher"')}
    assert values["fleet"] == {"urls": ("VALUE", '["http://a:1", "http://b:2"]')}
    assert (values["s3"]["region_name"], values["s3"]["endpoint_url"]) == (("VALUE", '"eu-central-1"'), ("VALUE", '"http://127.0.0.1:9"'))
    assert {n["name"] for n in found["platform"]["nestedResources"]} == {"database", "objects", "launcher", "tracker", "fleet"}
    assert [n["name"] for n in found["objects"]["nestedResources"]] == ["s3"]
    assert "hunter2" not in str(found)


def opened(**given: dg.ConfigurableResource[Any]) -> PlatformResource:
    """The platform as an asset gets it: with the values of the variables that its resources name."""
    with dg.build_sensor_context(resources={"platform": PlatformResource(**given)}) as context:
        found = context.resources.platform
    assert isinstance(found, PlatformResource)
    return found


def test_the_platform_is_composed_once_per_process_from_the_given_resources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_HOME", str(tmp_path))
    monkeypatch.setenv("FT_DATABASE_URL", "postgresql://any:hunter2@127.0.0.1:9/ft")
    assert opened().get() is opened().get() is open_platform(load())
    other = opened(
        objects=ObjectStoreResource(url=f"file://{tmp_path}/elsewhere"),
        database=DatabaseResource(url="postgresql://any@127.0.0.1:9/other"),
        launcher=LauncherResource(directory=str(tmp_path / "workloads")),
        fleet=FleetResource(urls=["http://a:1"]),
    )
    platform = other.get()
    assert isinstance(platform.objects, LocalObjectStore) and platform.objects.uri("k") == f"file://{tmp_path}/elsewhere/k"
    assert (platform.engine.url.database, platform.settings.inference_urls) == ("other", ("http://a:1",))
    assert platform is not open_platform(load())
