"""Servers of whole models as processes: they outlive who started them, start again ever more slowly, and end with the stack."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from control_plane.platform import settings as settings_module
from control_plane.platform.settings import Settings
from ft_assets.adapters import whole_model
from ft_assets.adapters.record import AdapterRecord
from ft_assets.base_models import Catalogue, model_digest
from resources.inference.local_servers import LocalServers, stop_all
from resources.launcher.process_identity import alive
from resources.object_store import LocalObjectStore
from tests.resources.inference.test_kubernetes_servers import model
from tests.support.jobs.followed_jobs import until
from tests.support.models.tiny_model import build_tiny_model


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_module.load({"FT_HOME": str(tmp_path / "home")})


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return build_tiny_model(tmp_path / "base")


@pytest.fixture
def models(base: Path) -> Catalogue:
    return Catalogue({"tiny": ({"id": "tiny", "path": str(base)}, base)})


@pytest.fixture
def record(settings: Settings, base: Path, tmp_path: Path) -> AdapterRecord:
    """A whole model in the object store."""
    digest, made = model_digest(base), tmp_path / "made"
    sha256 = whole_model.write(build_tiny_model(tmp_path / "trained", seed=5), made, served_name="tiny", base_digest=digest)
    registered = replace(model("adp-1"), base_digest=digest, manifest_sha256=sha256)
    store = LocalObjectStore(settings.home / "objects")
    for path in made.iterdir():
        store.put_file(f"{registered.object_prefix}/{path.name}", path)
    return registered


def process(settings: Settings) -> dict[str, object]:
    found: dict[str, object] = json.loads((settings.servers_dir / "adp-1" / "server.json").read_text())
    return found


def is_alive(found: dict[str, object]) -> bool:
    return alive(int(str(found["pid"])), str(found["identity"]))


def ended(servers: LocalServers, settings: Settings) -> Callable[[], bool]:
    """Also waits for the process, as the worker's next pass does."""
    return lambda: not servers.keep([]) and not (settings.servers_dir / "adp-1").exists()


def test_a_server_outlives_who_started_it_and_is_found_again(settings: Settings, models: Catalogue, record: AdapterRecord) -> None:
    first, second = LocalServers(settings, models), LocalServers(settings, models)
    url = first.keep([record])["adp-1"].url
    started = process(settings)
    assert second.keep([record])["adp-1"].url == url
    assert process(settings) == started and is_alive(started)
    second.keep([])
    found = second.keep([record])["adp-1"]
    assert found.url == "" and found.problem == "its server is still ending", "no second one beside it"
    until(lambda: not is_alive(started))
    assert second.keep([record])["adp-1"].url, "a new one, once it is gone"
    assert stop_all(settings) == ["adp-1"]
    assert not (settings.servers_dir / "adp-1").exists()
    until(ended(first, settings))
    until(ended(second, settings))


def test_a_server_that_ends_says_why_and_starts_again_ever_more_slowly(
    settings: Settings, models: Catalogue, record: AdapterRecord
) -> None:
    servers = LocalServers(settings, models)
    servers.keep([replace(record, manifest_sha256="0" * 64)])
    before = process(settings)
    until(lambda: not is_alive(before))
    waits = servers.keep([record])["adp-1"]
    assert "the registry says 0000" in str(waits.problem)
    assert process(settings) == before, "not at once"
    until(lambda: servers.keep([record]) and process(settings)["pid"] != before["pid"], timeout_s=10)
    assert (before["failures"], process(settings)["failures"]) == (0, 1)
    stop_all(settings)
    until(ended(servers, settings))


def test_without_the_bytes_of_its_base_a_model_says_so(settings: Settings, models: Catalogue, record: AdapterRecord) -> None:
    found = LocalServers(settings, models).keep([replace(record, base_digest="b" * 64)])["adp-1"]
    assert (found.url, found.refused) == ("", False)
    assert f"{'b' * 64} was pinned" in str(found.problem)
    assert not settings.servers_dir.exists()
