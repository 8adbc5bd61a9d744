"""Processes forked from one that has imported the heavy libraries already: the suite's workers, and modules as ``python -m`` runs them.

A fresh interpreter needs five to fifteen CPU seconds for these imports, a forked one none. The server that forks is started by the first
process that needs it, answers whoever knows its address (``FORKS_AT``), and ends with the process that started it. As a script with
Python's ``-u -c CODE`` this file is an interpreter for pytest-xdist (``make test``).

What differs from a fresh interpreter, so that a test that is about it needs one: imports have happened (with their warnings, and what they
read of the environment), the hash seed is the server's, garbage is collected less often, and the server is the parent process.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
FORKS_AT = "FT_TESTS_FORK_AT"
IMPORTED = (
    "torch.distributed.tensor", "trl", "datasets", "pandas", "numba", "openai", "hypothesis", "schemathesis", "kubernetes", "mlflow",
    "fastapi.testclient", "dagster", "dagster_graphql", "dagster_k8s", "ft_assets.datasets.assets", "engine.training.runtime.train",
    "engine.training.runtime.objectives.dpo_loss", "engine.training.runtime.objectives.kto_loss", "control_plane.api.app",
    "ft_client.cli.command_tree", "control_plane.sandbox.task_validate", "resources.inference.server",
    "resources.inference.engine.engine_thread", "nltk",
)  # fmt: skip
"""What the tests and the modules import that takes long."""
READY_S = 150
"""Ten times what the imports take where nothing else runs, and less than a test may."""
COLLECT_AFTER = (50_000, 20, 20)
"""Of a worker's CPU time Python's own thresholds (700, 10, 10) spend 11 % in the garbage collector, these 4 %."""
ORDER_BYTES = 1 << 20
STREAMS = 3
"""stdin, stdout, stderr."""


class Forked:
    """What tests use of ``subprocess.Popen``, for a process that is a child of the server."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection = connection
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout=0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                said = self._connection.recv(64)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0) from None
            self._connection.close()
            self.returncode = int(said or -signal.SIGKILL)  # nothing is said by a server that is gone
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(module: str, arguments: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path) -> Forked:
    """``python -m MODULE ARGUMENTS``; stdout and stderr are written to `log`."""
    with log.open("wb") as out, open(os.devnull, "rb") as nothing:
        order = {"module": module, "argv": [module, *arguments], "env": dict(env), "cwd": str(cwd)}
        return _fork(address(), order, (nothing.fileno(), out.fileno(), out.fileno()))


def address() -> str:
    """Where the server listens; it is started if there is none."""
    if FORKS_AT not in os.environ:
        where = str(Path(tempfile.mkdtemp(prefix="ft-forks-")) / "s")
        command = [sys.executable, __file__, "serve", where]
        server = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE)
        assert server.stdin is not None
        os.environ[FORKS_AT] = where
        atexit.register(_end, server, where, os.getpid())
    return os.environ[FORKS_AT]


def _end(server: subprocess.Popen[bytes], where: str, started_by: int) -> None:
    if os.getpid() == started_by and server.stdin is not None:
        server.stdin.close()
        server.wait()
        with contextlib.suppress(OSError):
            Path(where).unlink()
            Path(where).parent.rmdir()


def _fork(where: str, order: Mapping[str, Any], streams: Sequence[int]) -> Forked:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    deadline = time.monotonic() + READY_S
    while True:
        try:
            connection.connect(where)
            break
        except (FileNotFoundError, ConnectionRefusedError):  # it is importing
            if time.monotonic() > deadline:
                raise TimeoutError(f"no server that forks at {where} in {READY_S} s") from None
            time.sleep(0.05)
    socket.send_fds(connection, [json.dumps(order).encode()], streams)
    return Forked(connection, int(connection.recv(64)))


def _serve(where: str) -> dict[str, Any]:
    """Fork for every order until stdin is closed; returns in a child alone, with its order."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.disable()
        for name in IMPORTED:
            with contextlib.suppress(Exception):  # what cannot be imported fails in the tests that need it, by its name
                importlib.import_module(name)
        gc.freeze()
        gc.set_threshold(*COLLECT_AFTER)
        gc.enable()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{where}.new")
    listener.listen(100)
    Path(f"{where}.new").rename(where)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    children: dict[int, tuple[int, socket.socket]] = {}
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fd == 0:
                os._exit(0)
            elif key.fd in children:
                selector.unregister(key.fd)
                pid, connection = children.pop(key.fd)
                os.close(key.fd)
                code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(OSError):
                    connection.send(str(code).encode())
                connection.close()
            else:
                connection, _ = listener.accept()
                message, streams, _, _ = socket.recv_fds(connection, ORDER_BYTES, STREAMS)
                if pid := os.fork():
                    for fd in streams:
                        os.close(fd)
                    with contextlib.suppress(OSError):  # who asked is gone
                        connection.send(str(pid).encode())
                    ended = os.pidfd_open(pid)
                    children[ended] = pid, connection
                    selector.register(ended, selectors.EVENT_READ)
                else:
                    for number, fd in enumerate(streams):
                        os.dup2(fd, number)
                        os.close(fd)
                    for fd, (_, other) in children.items():
                        os.close(fd)
                        other.close()
                    for mine in (connection, listener, selector):
                        mine.close()
                    signal.signal(signal.SIGINT, signal.default_int_handler)
                    return dict(json.loads(message))


def _become(order: Mapping[str, Any]) -> None:
    """What a fresh interpreter would be, and then the code itself."""
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    tempfile.tempdir = None
    random.seed()
    sys.argv = list(order["argv"])
    sys.path[0] = "" if "code" in order else order["cwd"]
    if "code" in order:
        exec(order["code"], {"__name__": "__main__"})
    else:
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)


def stand_in(**order: Any) -> int:
    """Have `code`, or a `module`, with `argv` run by a forked process that has this one's streams; its exit code."""
    forked = _fork(os.environ[FORKS_AT], {**order, "env": dict(os.environ), "cwd": str(Path.cwd())}, (0, 1, 2))
    return forked.wait()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _become(_serve(sys.argv[2]))
    else:
        sys.exit(stand_in(code=sys.argv[-1], argv=["-c"]))
