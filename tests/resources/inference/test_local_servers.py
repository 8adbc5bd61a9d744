"""Servers of whole models as processes: they outlive who started them, start again ever more slowly, and end with the stack."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from control_plane.platform import settings as settings_module
from control_plane.platform.settings import Settings
from core.base_models import Catalogue, model_digest
from engine.adapters import whole_model
from engine.adapters.record import AdapterRecord
from resources.inference.local_servers import LocalServers, stop_all
from resources.launcher.process_identity import alive
from resources.object_store import LocalObjectStore
from tests.resources.inference.test_kubernetes_servers import model
from tests.support.jobs.followed_jobs import until
from tests.support.models.tiny_model import build_tiny_model
from tests.support.processes.frozen import freeze_group


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
    sha256 = whole_model.write_whole_model(build_tiny_model(tmp_path / "trained", seed=5), made, served_name="tiny", base_digest=digest)
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
    group = int(str(started["pid"]))
    freeze_group(group)  # it cannot end yet
    assert second.keep([])["adp-1"].problem == "its server is still ending"
    found = second.keep([record])["adp-1"]
    assert found.url == "" and found.problem == "its server is still ending", "no second one beside it"
    os.killpg(group, signal.SIGCONT)
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


def test_a_server_that_ended_has_no_url(settings: Settings, models: Catalogue, record: AdapterRecord) -> None:
    servers = LocalServers(settings, models)
    assert servers.keep([record])["adp-1"].url
    started = process(settings)
    os.killpg(int(str(started["pid"])), signal.SIGKILL)
    until(lambda: not is_alive(started))
    assert servers.keep([record])["adp-1"].url == "", "another program may listen there, and would get the token"
    stop_all(settings)
    until(ended(servers, settings))


def test_waits_grow_from_the_end_of_a_server_however_long_it_took_to_fail(
    settings: Settings, models: Catalogue, record: AdapterRecord
) -> None:
    directory = settings.servers_dir / "adp-1"
    directory.mkdir(parents=True)
    long_ago = {"pid": 2**22 + 1, "identity": "1@boot", "port": 1, "started_at": time.time() - 300, "failures": 5}
    (directory / "server.json").write_text(json.dumps(long_ago))
    found = LocalServers(settings, models).keep([record])["adp-1"]
    assert (found.url, process(settings)) == ("", long_ago), "the sixth failure in a row: not at once"
    settled = {**long_ago, "started_at": time.time() - 3600}
    (directory / "server.json").write_text(json.dumps(settled))
    servers = LocalServers(settings, models)
    assert servers.keep([record])["adp-1"].url
    assert process(settings)["failures"] == 0, "it had run for an hour"
    stop_all(settings)
    until(ended(servers, settings))


def test_no_server_runs_that_could_not_be_recorded(settings: Settings, models: Catalogue, record: AdapterRecord) -> None:
    servers, directory = LocalServers(settings, models), settings.servers_dir / "adp-1"
    draft, others = directory / f".server.json.{os.getpid()}", {child.pid for child in psutil.Process().children()}
    draft.mkdir(parents=True)
    found = servers.keep([record])["adp-1"]
    assert found.url == "" and "Is a directory" in str(found.problem)
    until(lambda: all(child.status() == psutil.STATUS_ZOMBIE for child in psutil.Process().children() if child.pid not in others))
    assert (directory / "log").read_text() == "", "it has not even begun to fetch"
    draft.rmdir()
    assert servers.keep([record])["adp-1"].url
    stop_all(settings)
    until(ended(servers, settings))


def test_what_cannot_be_read_in_the_directory_of_servers_concerns_no_other_server(
    settings: Settings, models: Catalogue, record: AdapterRecord
) -> None:
    (settings.servers_dir / "adp-0").mkdir(parents=True)
    (settings.servers_dir / "adp-0" / "server.json").write_text("[1, 2")
    (settings.servers_dir / "notes.txt").write_text("not a server")
    servers = LocalServers(settings, models)
    found = servers.keep([record])
    assert found["adp-1"].url and found["adp-0"].problem == "its server is still ending"
    broken = servers.keep([record, replace(record, id="adp-0")])["adp-0"]
    assert broken.url == "" and "server.json cannot be read" in str(broken.problem)
    assert stop_all(settings) == ["adp-1"], "and it ends"
    assert (settings.servers_dir / "adp-0" / "server.json").exists()
    until(lambda: servers.keep([]).keys() == {"adp-0"} and not (settings.servers_dir / "adp-1").exists())


def test_without_the_bytes_of_its_base_a_model_says_so(settings: Settings, models: Catalogue, record: AdapterRecord) -> None:
    found = LocalServers(settings, models).keep([replace(record, base_digest="b" * 64)])["adp-1"]
    assert (found.url, found.refused) == ("", False)
    assert f"{'b' * 64} was pinned" in str(found.problem)
    assert not settings.servers_dir.exists()
