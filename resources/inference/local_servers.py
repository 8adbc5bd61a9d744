"""Servers of whole models on this machine: an embedded server for each, found again by any process of this home.

<home>/work/servers/<model>/model         its files, fetched and verified before each start
<home>/work/servers/<model>/server.json   pid and identity of the process, its port, and how often it failed
<home>/work/servers/<model>/log           stdout and stderr
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from control_plane.platform.protocols import ModelServer
from control_plane.platform.secrets import inference_token
from control_plane.platform.settings import Settings, variable
from ft_assets.adapters import rollout_plan, servers
from ft_assets.adapters.record import AdapterRecord
from ft_assets.base_models import Catalogue
from ft_assets.errors import FtError
from ft_assets.layout import checked_id
from ft_assets.typed_json import from_json
from resources.launcher.local_processes import REPOSITORY, workload_environment
from resources.launcher.process_identity import alive, identity
from resources.launcher.workload_watcher import write_json

HOST = "127.0.0.1"
GRACE_S = 15.0
"""Seconds between SIGTERM and SIGKILL: requests in flight have 10 s."""
SETTLED_S = 60.0
"""A server that ran for so long has not failed to start."""
POLL_S = 0.05
LAST_BYTES = 4096
"""Bytes of the log that are searched for its last line."""
PASSED_ON = ("home", "object_store", "tenant_key", "secrets_key_file")
"""Settings that fetching a model's files needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Process:
    """``server.json``."""

    pid: int
    identity: str | None
    port: int
    started_at: float
    failures: int = 0
    """Starts that failed in a row before this one."""
    ending_since: float | None = None

    @property
    def runs(self) -> bool:
        return alive(self.pid, self.identity)


class LocalServers:
    """``control_plane.platform.protocols.ModelServers`` by processes. Called by one thread at a time."""

    def __init__(self, settings: Settings, models: Catalogue) -> None:
        self._settings, self._models = settings, models
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        """Those that this process started, which it has to wait for."""

    def keep(self, models: Sequence[AdapterRecord]) -> Mapping[str, ModelServer]:
        self._children = {pid: child for pid, child in self._children.items() if child.poll() is None}
        wanted = {model.id for model in models}
        for directory in _directories(self._settings):
            if directory.name not in wanted:
                _end(directory)
        return {model.id: self._keep(model) for model in models}

    def pool_urls(self) -> Sequence[str]:
        return ()

    def _keep(self, model: AdapterRecord) -> ModelServer:
        directory = self._settings.servers_dir / checked_id(model.id, what="model")
        last = _read(directory)
        if last is not None and last.ending_since is not None:
            if not _end(directory):
                return ModelServer(problem="its server is still ending")
            last = None
        if last is not None and last.runs:
            return ModelServer(url=_url(last))
        problem = None
        if last is not None:
            problem = f"its server ended: {_last_line(directory)}"
            failures = 0 if time.time() - last.started_at > SETTLED_S else last.failures + 1
            if time.time() < last.started_at + rollout_plan.wait_s(failures):
                return ModelServer(url=_url(last), problem=problem)
            last = replace(last, failures=failures)
        try:
            return ModelServer(url=_url(self._start(model, directory, last)), problem=problem)
        except (FtError, OSError) as error:
            return ModelServer(problem=str(error))

    def _start(self, model: AdapterRecord, directory: Path, last: _Process | None) -> _Process:
        _, base_dir = self._models.get_local(model.base_model, model.base_digest)
        directory.mkdir(parents=True, exist_ok=True)
        port = last.port if last is not None and _is_free(last.port) else _free_port()
        files = str((directory / "model").absolute())
        fetch = [sys.executable, *servers.fetch_arguments(model, into=files, base_dir=str(base_dir))]
        serve = [sys.executable, "-m", "resources.inference", "--model-dir", files, "--served-name", model.name, "--port", str(port)]
        with (directory / "log").open("ab") as log:
            child = subprocess.Popen(
                ["/bin/sh", "-c", f"{shlex.join(fetch)} && exec {shlex.join(serve)}"], cwd=REPOSITORY, env=self._environment(),
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._children[child.pid] = child
        failures = last.failures if last is not None else 0
        made = _Process(pid=child.pid, identity=identity(child.pid), port=port, started_at=time.time(), failures=failures)
        write_json(directory / "server.json", asdict(made))
        return made

    def _environment(self) -> dict[str, str]:
        given = {variable(name): str(getattr(self._settings, name)) for name in PASSED_ON}
        store = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        return workload_environment({**store, **given, "FT_INFERENCE_TOKEN": inference_token(self._settings), "HF_HUB_OFFLINE": "1"})


def stop_all(settings: Settings) -> list[str]:
    """Stop every server of this home and wait until it is gone; returns the ids of their models."""
    stopped = [directory.name for directory in _directories(settings)]
    while left := _directories(settings):
        for directory in left:
            _end(directory)
        time.sleep(POLL_S)
    return stopped


def _directories(settings: Settings) -> list[Path]:
    return sorted(settings.servers_dir.iterdir()) if settings.servers_dir.is_dir() else []


def _end(directory: Path) -> bool:
    """Ask a server to end, and kill it after its grace period. Returns whether it is gone; its files are deleted then."""
    found = _read(directory)
    if found is None or not found.runs:
        shutil.rmtree(directory, ignore_errors=True)
        return True
    if found.ending_since is None:
        write_json(directory / "server.json", asdict(replace(found, ending_since=time.time())))
        _signal(found, signal.SIGTERM)
    elif time.time() > found.ending_since + GRACE_S:
        _signal(found, signal.SIGKILL)
    return False


def _signal(process: _Process, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signum)


def _read(directory: Path) -> _Process | None:
    try:
        return from_json(_Process, json.loads((directory / "server.json").read_text()))
    except FileNotFoundError:
        return None


def _url(process: _Process) -> str:
    return f"http://{HOST}:{process.port}"


def _last_line(directory: Path) -> str:
    with contextlib.suppress(OSError):
        lines = (directory / "log").read_bytes()[-LAST_BYTES:].decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else "it wrote nothing"
    return "its log is gone"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
