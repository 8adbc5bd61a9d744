"""The services of the local stack: their environment, their databases and when Dagster counts as ready."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import fields
from pathlib import Path

import pytest

from control_plane.platform import settings as settings_module
from core.errors import Conflict
from deploy.local import lifecycle, stack_services
from deploy.local.readiness import code_state, daemon_state, http_ok
from deploy.local.supervisor import lock
from deploy.local.supervisor.lock import StackFiles
from tests.support.processes.stack import PYTHON, free_port


def dagster_answer(*, load: str = "LOADED", error: str | None = None, beat: float = 100.0, healthy: bool = True) -> dict[str, object]:
    location = (
        {"__typename": "PythonError", "message": "it failed", "causes": [{"message": error}]}
        if error
        else {"__typename": "RepositoryLocation"}
    )
    return {
        "workspaceOrError": {"__typename": "Workspace", "locationEntries": [
            {"name": "here", "loadStatus": load, "locationOrLoadError": location},
        ]},
        "instance": {"daemonHealth": {"allDaemonStatuses": [
            {"daemonType": "SENSOR", "required": True, "healthy": healthy, "lastHeartbeatTime": beat, "lastHeartbeatErrors": []},
            {"daemonType": "BACKFILL", "required": False, "healthy": None, "lastHeartbeatTime": None, "lastHeartbeatErrors": []},
        ]}},
    }  # fmt: skip


def test_dagster_is_ready_when_its_location_has_loaded_and_its_daemons_have_beaten_since_the_start() -> None:
    assert code_state(dagster_answer()).ready
    assert not code_state(dagster_answer(load="LOADING")).ready
    failed = code_state(dagster_answer(error="No module named 'x'"))
    assert not failed.ready
    assert "No module named 'x'" in failed.detail
    assert daemon_state(dagster_answer(), 99.0).ready
    assert not daemon_state(dagster_answer(healthy=False), 99.0).ready
    assert not daemon_state(dagster_answer(beat=98.0), 99.0).ready, "a heartbeat of an earlier run does not count"
    assert daemon_state(dagster_answer(), time.time() + 600.0).ready, "the clock was set back after the start"


def test_a_second_stack_is_refused_before_it_writes_into_the_home_of_the_first(tmp_path: Path) -> None:
    settings, umask = settings_module.load({"FT_HOME": str(tmp_path)}), os.umask(0o077)
    try:
        for start in (lifecycle.up, lifecycle.up_detached):
            with lock.held(StackFiles(home=tmp_path)), pytest.raises(Conflict, match="already running"):
                start(settings, print)
            assert [path.name for path in tmp_path.iterdir()] == ["up.lock"]
    finally:
        os.umask(umask)


def test_a_shell_that_has_run_ft_env_still_owns_its_embedded_database(tmp_path: Path) -> None:
    own = {"FT_HOME": str(tmp_path), "FT_DATABASE_URL": f"postgresql+psycopg2://postgres:@/ft?host={tmp_path / 'postgres'}"}
    assert stack_services.normalised(settings_module.load(own)).embedded_database
    foreign = {**own, "FT_DATABASE_URL": "postgresql://ft@db.example/ft"}
    assert not stack_services.normalised(settings_module.load(foreign)).embedded_database
    names = [s.name for s in stack_services.services(settings_module.load(foreign))]
    assert names == ["migrate", "inference", "runs", "code-location", "dagster", "daemon", "worker", "api"], (
        "an external database is used, not started"
    )


def test_a_shell_that_has_run_ft_env_migrates_an_external_database_as_its_owner(tmp_path: Path) -> None:
    given = {"FT_HOME": str(tmp_path), "FT_DATABASE_URL": "postgresql://owner:hunter2@db.example/ft"}
    first = settings_module.load(given)
    again = stack_services.normalised(settings_module.load(given | lifecycle.shell_env(first)))
    assert stack_services.owner_env(again) == stack_services.owner_env(first)
    assert again.dagster_database_url == "", "its role and database are still prepared by the stack"


def test_a_service_gets_the_databases_that_it_needs_and_the_key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    url = "postgresql://owner:hunter2@db.example/ft"
    given = dict.fromkeys(("FT_DATABASE_URL", "FT_OWNER_DATABASE_URL", "FT_DAGSTER_DATABASE_URL", "DAGSTER_POSTGRES_URL"), url)
    for name, value in {**given, "FT_SECRETS_KEY_FILE": "my.keys"}.items():
        monkeypatch.setenv(name, value)
    settings = settings_module.load(os.environ)
    env = stack_services.process_env(settings)
    assert [name for name, value in env.items() if "hunter2" in value] == []
    assert env["FT_SECRETS_KEY_FILE"] == str(tmp_path / "my.keys")
    api = next(s for s in stack_services.services(settings) if s.name == "api")
    assert api.env()["FT_DATABASE_URL"] == "postgresql://ft_platform:hunter2@db.example/ft"


def test_a_service_inherits_no_secret_that_it_does_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smtp, prometheus = "smtp://ft:hunter2@mail.example", "http://u:hunter2@metrics.example"
    urls = {"FT_SMTP_URL": smtp, "FT_PROMETHEUS_URL": prometheus, "FT_MLFLOW_URI": "postgresql://u:hunter2@db.example/mlflow"}
    given = {**dict.fromkeys((*stack_services.DATABASES, *stack_services.SECRETS), "hunter2"), **urls, "FT_HOME": str(tmp_path)}
    given |= dict.fromkeys(stack_services.DATABASES, "postgresql://owner:hunter2@db.example/ft")
    given["FT_SIGNING_KEY_FILE"] = str(tmp_path / "hunter2.key")
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    settings = settings_module.load(os.environ)
    base = stack_services.process_env(settings)
    inherits = {
        s.name: {name for name, value in {**base, **s.env()}.items() if "hunter2" in value} for s in stack_services.services(settings)
    }
    storage = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"}
    databases = {"FT_DATABASE_URL", "FT_DAGSTER_DATABASE_URL", "DAGSTER_POSTGRES_URL"}
    assert inherits.pop("migrate") == databases | {"FT_OWNER_DATABASE_URL"}
    assert inherits.pop("inference") == {"FT_INFERENCE_TOKEN"}
    assert inherits.pop("dagster") == databases | storage | {"FT_DAGSTER_TOKEN"}
    assert [s for s, names in inherits.items() if "FT_SIGNING_KEY_FILE" in names] == ["worker"]
    assert [s for s, names in inherits.items() if "FT_OIDC_CLIENT_SECRET" in names] == ["api"]
    for service, names in inherits.items():
        assert {*databases, *storage, "FT_SMTP_URL", "FT_INFERENCE_TOKEN"} <= names, service
        assert not names & {"FT_OWNER_DATABASE_URL", "FT_HUB_TOKEN", "FT_API_KEY"}, service


def test_every_secret_setting_names_the_services_that_read_it() -> None:
    secret = {settings_module.variable(f.name) for f in fields(settings_module.Settings) if not f.repr}
    assert "FT_SMTP_URL" in secret
    assert secret <= stack_services.SECRETS.keys()


def test_probes_pass_by_the_proxies_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import http.server as h; h.HTTPServer(('127.0.0.1', %d), h.SimpleHTTPRequestHandler).serve_forever()"
    port = free_port()
    server = subprocess.Popen([*PYTHON, program % port], stderr=subprocess.DEVNULL)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    try:
        probe, deadline = http_ok(f"http://127.0.0.1:{port}/", token=lambda: "t"), time.monotonic() + 60
        while not probe(0.0).ready:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        server.kill()
        server.wait()


def test_a_remote_fleet_is_used_and_no_local_server_started(tmp_path: Path) -> None:
    settings = settings_module.load({"FT_HOME": str(tmp_path), "FT_INFERENCE_URLS": "http://gpu-1:8000,http://gpu-2:8000"})
    assert "inference" not in [s.name for s in stack_services.services(settings)]
