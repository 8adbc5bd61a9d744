"""A process with a training's imports done, which becomes the watcher, the agent and the trainer of the next one.

``python -m resources.launcher.prewarmed_process DIRECTORY`` detaches itself, imports at low priority, and waits in the launcher's directory
for one order. It forks the watcher of that workload and ends; the watcher forks the agent, and that one the trainer, before any of them
has read anything of a tenant. So each has the parent, the session and the descriptors of a cold start.

    prewarmed.lock   held while it lives: there is one at a time
    prewarmed.json   its pid and identity
    prewarmed.sock   where it listens, for this user alone
    prewarmed.log    its output
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from agent import prewarmed_trainer
from agent.prewarmed_trainer import ForkedProcess
from control_plane.capacity import gpu_devices
from core.processes.forked_process import Forked, Order, become
from core.telemetry import spans
from engine.training import method_named
from resources.launcher import workload_watcher
from resources.launcher.prewarmed import ANSWER_TIMEOUT_S, unix_socket
from resources.launcher.process_identity import identity

IDLE_S = 600.0
"""It ends when it was not used for so long, so that an idle installation costs nothing."""
LOWEST_PRIORITY = 19
LATE = (gpu_devices.VISIBLE, spans.PARENT, "LC_CTYPE")
"""Variables that are read after the imports, as ``FT_*`` are; the last one is set by each interpreter."""
LATE_IMPORTS = ("agent.supervise", "agent.evaluation", "engine.training.runtime.train")


def serve(directory: Path, *, idle_s: float = IDLE_S) -> None:
    """Import, then wait for one order. Raises :class:`Forked` in the agent of the workload."""
    if os.fork():
        os._exit(0)
    os.setsid()
    with (directory / "prewarmed.lock").open("ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        workload_watcher.write_json(directory / "prewarmed.json", {"pid": os.getpid(), "identity": identity(os.getpid())})
        since, env = time.time(), _read_by_imports(os.environ)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(_import_at_low_priority).result()
        if threading.active_count() > 1 or _holds_device():
            sys.exit("an import started a thread or opened a GPU, which no forked process can use: trainings start cold")
        (directory / "prewarmed.sock").unlink(missing_ok=True)
        try:
            _await_order(directory, lock, env, since=since, idle_s=idle_s)
        finally:
            if not lock.closed:  # not in the watcher
                (directory / "prewarmed.sock").unlink(missing_ok=True)


def _await_order(directory: Path, lock: BinaryIO, env: Mapping[str, str], *, since: float, idle_s: float) -> None:
    with unix_socket(directory) as (listener, address):
        before = os.umask(0o177)
        listener.bind(address)
        os.umask(before)
        listener.listen(1)
        listener.settimeout(idle_s)
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            return
        with connection:
            connection.settimeout(ANSWER_TIMEOUT_S)
            with connection.makefile("rb") as stream:
                order = json.loads(stream.readline())
            workload = Path(order["workload"])
            launch = json.loads((workload / "launch.json").read_text())
            if order["python"] != sys.executable or _read_by_imports(launch["env"]) != env or _changed(since):
                sys.exit("code, interpreter or environment changed since the imports: the training starts cold")
            detached = os.fork()
            if detached:
                os.waitpid(detached, 0)
                connection.sendall(b"1")
                return
    lock.close()
    os.environ.clear()
    os.environ.update(order["env"])
    workload_watcher.main(workload, start=_fork_agent)
    os._exit(0)


def _fork_agent(spec: Mapping[str, Any], env: Mapping[str, str], output: int) -> ForkedProcess:
    """Fork the agent in a session of its own. Raises :class:`Forked` in it."""
    pid = os.fork()
    if pid:
        return ForkedProcess(pid)
    os.setsid()
    raise Forked(Order(name="ft-agent", argv=spec["argv"][2:], env=env, cwd=spec["cwd"]), os.dup(output))


def _import_at_low_priority() -> None:
    """Give way to everything else, in this thread only: no process can take its low priority back, and the trainer needs its own."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
    imports = importlib.import_module("engine.training.runtime.imports")
    imports.import_stack(method_named("sft"))
    for name in LATE_IMPORTS:
        importlib.import_module(name)


def _holds_device() -> bool:
    """Whether CUDA was initialized, which no forked process could do again, and with other devices."""
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if str(link.readlink()).startswith("/dev/nvidia"):
                return True
    return False


def _read_by_imports(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that libraries may have read when they were imported, which must be the trainer's own."""
    return {name: value for name, value in env.items() if name not in LATE and not name.startswith("FT_")}


def _changed(since: float) -> bool:
    """Whether the file of an imported module was changed, replaced or removed."""
    specs = [getattr(module, "__spec__", None) for module in [*sys.modules.values()]]
    try:
        return any(Path(spec.origin).stat().st_ctime > since for spec in specs if spec is not None and spec.has_location and spec.origin)
    except OSError:
        return True


def main(directory: Path) -> None:
    try:
        serve(directory)
        return
    except Forked as forked:
        order, output = forked.order, forked.output
    try:
        order = replace(order, env={**order.env, prewarmed_trainer.VARIABLE: prewarmed_trainer.fork_waiting()})
    except Forked as forked:
        os.close(output)
        order, output = forked.order, forked.output
    become(order, output)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
