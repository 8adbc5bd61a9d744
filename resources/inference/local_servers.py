"""Servers of whole models on this machine: an embedded server for each, found again by any process of this home.

<home>/work/servers/<model>/model         its files, fetched and verified before each start
<home>/work/servers/<model>/server.json   pid and identity of the process, its port, and how often it failed
<home>/work/servers/<model>/log           stdout and stderr
"""

from __future__ import annotations

import contextlib
import json
import logging
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
from core.base_models import Catalogue
from core.errors import FtError
from core.layout import checked_id
from core.telemetry.logs import warn_once
from core.typed_json import from_json
from engine.adapters import AdapterRecord, fetch_arguments, rollout_wait_s
from resources.launcher.local_processes import REPOSITORY, workload_environment
from resources.launcher.process_identity import alive, identity
from resources.launcher.workload_watcher import write_json

log = logging.getLogger(__name__)
HOST = "127.0.0.1"
RECORD = "server.json"
GRACE_S = 15.0
"""Seconds between SIGTERM and SIGKILL: requests in flight have 10 s."""
SETTLED_S = 600.0
"""A server that ran for so long has not failed to start: fetching its files takes minutes."""
STOP_S = GRACE_S + 5.0
"""Seconds after which :func:`stop_all` leaves what has not ended."""
POLL_S = 0.05
UNREADABLE = (FtError, OSError, ValueError)
"""Errors of one server's directory or record, which concern no other."""
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

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


ENDING = ModelServer(problem="its server is still ending")


class LocalServers:
    """``control_plane.platform.protocols.ModelServers`` by processes. Called by one thread at a time."""

    def __init__(self, settings: Settings, models: Catalogue) -> None:
        self._settings, self._models = settings, models
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        """Those that this process started, which it has to wait for."""
        self._ended_at: dict[int, float] = {}
        """When the end of a process was first seen, in Unix seconds."""

    def keep(self, models: Sequence[AdapterRecord]) -> Mapping[str, ModelServer]:
        self._children = {pid: child for pid, child in self._children.items() if child.poll() is None}
        wanted, found = {model.id for model in models}, dict[str, ModelServer]()
        for directory in _directories(self._settings):
            if directory.name not in wanted and not _is_gone(directory):
                found[directory.name] = ENDING
        return found | {model.id: self._keep(model) for model in models}

    def pool_urls(self) -> Sequence[str]:
        return ()

    def _keep(self, model: AdapterRecord) -> ModelServer:
        directory = self._settings.servers_dir / checked_id(model.id, what="model")
        try:
            last = _read(directory)
            if last is not None and last.ending_since is not None:
                if not _is_gone(directory):
                    return ENDING
                last = None
            if last is None:
                return ModelServer(url=self._start(model, directory))
            if last.runs:
                return ModelServer(url=last.url)
            return self._start_again(model, directory, last)
        except UNREADABLE as error:
            return ModelServer(problem=str(error))

    def _start_again(self, model: AdapterRecord, directory: Path, last: _Process) -> ModelServer:
        problem = f"its server ended: {_last_line(directory)}"
        ended_at = self._ended_at.setdefault(last.pid, time.time())
        failures = 0 if ended_at - last.started_at > SETTLED_S else last.failures + 1
        if time.time() < ended_at + rollout_wait_s(failures):
            return ModelServer(problem=problem)
        url = self._start(model, directory, port=last.port, failures=failures)
        del self._ended_at[last.pid]
        return ModelServer(url=url, problem=problem)

    def _start(self, model: AdapterRecord, directory: Path, *, port: int = 0, failures: int = 0) -> str:
        """Start a server and return its URL."""
        _, base_dir = self._models.get_local(model.base_model, model.base_digest)
        directory.mkdir(parents=True, exist_ok=True)
        port = port if port and _is_free(port) else _free_port()
        files = str((directory / "model").absolute())
        fetch = [sys.executable, *fetch_arguments(model, into=files, base_dir=str(base_dir))]
        serve = [sys.executable, "-m", "resources.inference", "--model-dir", files, "--served-name", model.name, "--port", str(port)]
        with (directory / "log").open("ab") as output:
            child = subprocess.Popen(
                ["/bin/sh", "-c", f"read recorded && {shlex.join(fetch)} && exec {shlex.join(serve)}"], cwd=REPOSITORY,
                env=self._environment(), stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._children[child.pid] = child
        assert child.stdin is not None
        with child.stdin as gate:  # closed unwritten, also by our own end, it ends the child: none runs that is not recorded
            made = _Process(pid=child.pid, identity=identity(child.pid), port=port, started_at=time.time(), failures=failures)
            write_json(directory / RECORD, asdict(made))
            gate.write(b"yes\n")
        return made.url

    def _environment(self) -> dict[str, str]:
        given = {variable(name): str(getattr(self._settings, name)) for name in PASSED_ON}
        store = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        return workload_environment({**store, **given, "FT_INFERENCE_TOKEN": inference_token(self._settings), "HF_HUB_OFFLINE": "1"})


def stop_all(settings: Settings) -> list[str]:
    """Stop every server of this home, and wait until it is gone; returns the ids of their models.

    It does not wait for servers whose record cannot be read: it cannot stop them.
    """
    left = there = _directories(settings)
    until = time.monotonic() + STOP_S
    while (left := [directory for directory in left if not _is_gone(directory)]) and time.monotonic() < until:
        if not any(_is_readable(directory) for directory in left):
            break
        time.sleep(POLL_S)
    if left:
        log.error("servers of %s could not be stopped", ", ".join(directory.name for directory in left))
    return [directory.name for directory in there if directory not in left]


def _directories(settings: Settings) -> list[Path]:
    found = settings.servers_dir.iterdir() if settings.servers_dir.is_dir() else ()
    return sorted(path for path in found if path.is_dir())


def _is_gone(directory: Path) -> bool:
    """Ask a server to end, and kill it after its grace period. Returns whether it is gone, and its files are deleted."""
    try:
        found = _read(directory)
        if found is None or not found.runs:
            shutil.rmtree(directory)
            return True
        if found.ending_since is None:
            write_json(directory / RECORD, asdict(replace(found, ending_since=time.time())))
            _signal(found, signal.SIGTERM)
        elif time.time() > found.ending_since + GRACE_S:
            _signal(found, signal.SIGKILL)
    except UNREADABLE as error:
        warn_once(log, f"{directory} cannot be removed: {error}")
    return False


def _signal(process: _Process, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signum)


def _read(directory: Path) -> _Process | None:
    try:
        return from_json(_Process, json.loads((directory / RECORD).read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{directory / RECORD} cannot be read: {error}; see to its process, and delete the directory") from error


def _is_readable(directory: Path) -> bool:
    try:
        _read(directory)
    except UNREADABLE:
        return False
    return True


def _last_line(directory: Path) -> str:
    with contextlib.suppress(OSError), (directory / "log").open("rb") as output:
        output.seek(max(0, output.seek(0, os.SEEK_END) - LAST_BYTES))
        lines = output.read().decode(errors="replace").strip().splitlines()
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
