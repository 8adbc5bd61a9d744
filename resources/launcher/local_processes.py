"""Workloads of one node as processes on this machine. All state is in files, so any process can adopt, watch and stop a workload."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from control_plane.capacity import gpu_devices
from control_plane.platform.protocols import WorkloadPhase, WorkloadStatus
from core.errors import Unavailable
from core.layout import checked_id
from core.telemetry import spans
from core.workload import NODE, NODE_DIR, TOKEN_FILE, VARIABLE, Workload
from resources.launcher import prewarmed
from resources.launcher.process_identity import alive, group_alive
from resources.launcher.workload_watcher import write_json

REPOSITORY = Path(__file__).resolve().parents[2]
PASSED_ON = ("PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "SSL_CERT_FILE", "PYTHONHASHSEED")
PASSED_ON_PREFIXES = ("LC_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "OMP_", "MKL_", "TORCH_", "PYTORCH_")
"""Other variables are not passed on: they include database URLs, API keys and cloud credentials."""
SECRETS = (spans.HEADERS,)
"""Passed on to processes, but written to no file."""
DEFAULTS = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) - 1))}
"""Leaves one core to the platform, and OpenMP threads sleep instead of spinning while they wait. Measured on two cores with a 3M-parameter
model: one thread trains a step in 0.38 s; two take 0.45 s alongside the platform's services, and ten times as long if they spin alongside
another training."""
START_TIMEOUT_S = 30.0
HAND_OVER_TIMEOUT_S = 5.0
KILL_TIMEOUT_S = 15.0
POLL_S = 0.05


class LocalLauncher:
    """``control_plane.platform.protocols.Launcher`` by subprocesses, for one node: one directory per workload under `root`, beside which
    the node's directories lie."""

    def __init__(self, root: Path, *, prewarms: bool = False) -> None:
        self._root = root
        self._prewarms = prewarms
        """Whether a training that one process can run leaves one with its imports done for the next."""

    def start_or_adopt(self, workload: Workload, *, token: str = "", node: int = 0) -> WorkloadStatus:
        """Start `workload` on this `node` of its gang unless one of that name was started here before, by any process."""
        directory = self._directory(workload.name)
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / "start.lock"):
            if not (directory / "launched").exists():
                _write_secret(directory / "token", token)
                (directory / "workload.json").write_text(workload.to_json())
                write_json(directory / "launch.json", self._launch(directory, workload, node))
                self._watch(directory, workload)
                if self._prewarms and prewarmed.fits(workload):
                    prewarmed.start(self._root, workload_environment({}))
        return self.get(workload.name)

    def list(self) -> list[WorkloadStatus]:
        """Return the status of every workload that was started here and not forgotten."""
        described = sorted(self._root.glob("*/workload.json")) if self._root.is_dir() else []
        found = (self.get(path.parent.name) for path in described)
        return [status for status in found if status.phase is not WorkloadPhase.ABSENT]

    def get(self, name: str) -> WorkloadStatus:
        """Return the status from disk and the process table; nothing is cached."""
        directory = self._directory(name)
        if (directory / "forgotten").exists():
            return WorkloadStatus(name=name, phase=WorkloadPhase.LOST)
        process = _read(directory / "process.json")
        leader_alive = process is not None and alive(process["pid"], process["identity"])
        watcher = _read(directory / "watcher.json")
        watched = watcher is not None and alive(watcher["pid"], watcher["identity"])
        ended = _read(directory / "status.json")  # read last: it may appear in the meantime
        if ended is not None:
            return WorkloadStatus(
                name=name,
                phase=WorkloadPhase.EXITED,
                exit_code=ended["exit_code"],
                started_at=ended["started_at"],
                ended_at=ended["ended_at"],
            )
        if process is None:
            return WorkloadStatus(name=name, phase=self._unstarted(directory, watched=watched))
        running = leader_alive or watched or group_alive(process["pid"])
        return WorkloadStatus(
            name=name, phase=WorkloadPhase.RUNNING if running else WorkloadPhase.LOST, started_at=float(process["started_at"])
        )

    def stop(self, name: str, *, grace_s: float) -> WorkloadStatus:
        status = self._wait_while(name, {WorkloadPhase.PENDING}, START_TIMEOUT_S)
        for signum, limit_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_TIMEOUT_S)):
            if status.phase is not WorkloadPhase.RUNNING:
                return status
            self._signal(name, signum)
            status = self._wait_while(name, {WorkloadPhase.RUNNING}, limit_s)
        if status.phase is WorkloadPhase.RUNNING:
            raise Unavailable(
                f"workload {name} is still running {KILL_TIMEOUT_S:.0f} s after SIGKILL; look for a process in uninterruptible sleep"
            )
        return status

    def forget(self, name: str) -> None:
        """Delete the files of an ended workload, except for the marks that its name was used; one that runs keeps all."""
        if self.get(name).phase not in (WorkloadPhase.EXITED, WorkloadPhase.LOST):
            return
        (self._directory(name) / "forgotten").touch()
        for path in self._directory(name).iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in ("launched", "forgotten"):
                path.unlink(missing_ok=True)

    def _directory(self, name: str) -> Path:
        return self._root / checked_id(name, what="workload")

    def _watch(self, directory: Path, workload: Workload) -> None:
        """Start the watcher, which detaches itself, and wait until it has started the workload."""
        env = workload_environment({name: os.environ[name] for name in SECRETS if name in os.environ})
        detached = self._hand_over(directory, workload, env) or self._start_watcher(directory, env)
        if not (detached and _appears(directory, ("process.json", "status.json"), START_TIMEOUT_S)):
            raise Unavailable(f"workload {workload.name} did not start within {START_TIMEOUT_S:.0f} s; see {directory / 'watch.log'}")

    def _hand_over(self, directory: Path, workload: Workload, env: Mapping[str, str]) -> bool:
        """Return whether a prewarmed process has begun to watch. If it begins later, it finds that the workload was started."""
        fits = self._prewarms and prewarmed.fits(workload)
        return fits and prewarmed.hand_over(self._root, directory, env) and _appears(directory, ("launched",), HAND_OVER_TIMEOUT_S)

    def _start_watcher(self, directory: Path, env: Mapping[str, str]) -> bool:
        with (directory / "watch.log").open("ab") as log:
            done = subprocess.run(
                [sys.executable, "-m", "resources.launcher.workload_watcher", str(directory.absolute())],
                cwd=REPOSITORY,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
                timeout=START_TIMEOUT_S,
            )
        return done.returncode == 0

    def _launch(self, directory: Path, workload: Workload, node: int) -> dict[str, Any]:
        own = {
            gpu_devices.VISIBLE: ",".join(gpu_devices.reserved(workload.devices_of(node), gpu_devices.visible())),
            VARIABLE: str(directory.absolute() / "workload.json"),
            TOKEN_FILE: str(directory.absolute() / "token"),
            NODE: str(node),
            NODE_DIR: str(self._root.parent.absolute()),
        }
        return {
            "argv": [sys.executable, "-m", *workload.command],
            "cwd": str(directory.absolute()),
            "env": workload_environment({**workload.env, **own}),
            "secrets": list(SECRETS),
        }

    def _unstarted(self, directory: Path, *, watched: bool) -> WorkloadPhase:
        if not (directory / "launched").exists():
            return WorkloadPhase.ABSENT
        fresh = time.time() - (directory / "launched").stat().st_mtime < START_TIMEOUT_S
        return WorkloadPhase.PENDING if watched or (fresh and not (directory / "watcher.json").exists()) else WorkloadPhase.LOST

    def _signal(self, name: str, signum: signal.Signals) -> None:
        process = _read(self._directory(name) / "process.json")
        if process and (alive(process["pid"], process["identity"]) or group_alive(process["pid"])):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process["pid"], signum)

    def _wait_while(self, name: str, phases: set[WorkloadPhase], limit_s: float) -> WorkloadStatus:
        deadline = time.monotonic() + limit_s
        while (status := self.get(name)).phase in phases and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return status


def _write_secret(path: Path, text: str) -> None:
    with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "w") as file:  # with this mode from the start
        file.write(text)


def workload_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return a workload's environment: a few of the caller's variables, the repository on the module path, and `extra`."""
    kept = {k: v for k, v in os.environ.items() if k in PASSED_ON or k.startswith(PASSED_ON_PREFIXES)}
    return {**DEFAULTS, **kept, "PYTHONPATH": str(REPOSITORY), "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", **extra}


def _appears(directory: Path, names: Sequence[str], limit_s: float) -> bool:
    """Wait until one of these files exists; False if none does in time."""
    deadline = time.monotonic() + limit_s
    while not any((directory / name).exists() for name in names):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S / 5)
    return True


def _read(path: Path) -> dict[str, Any] | None:
    try:
        body: dict[str, Any] = json.loads(path.read_text())
        return body
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes and threads; the kernel releases it if the holder dies."""
    with path.open("a") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield
