"""Starts, uses and ends the process that has a training's imports done (:mod:`resources.launcher.prewarmed_process`).

Nothing depends on it: a launcher that gets no answer from it starts the watcher of its workload as a fresh interpreter.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from core.workload import Kind, Workload
from resources.launcher.process_identity import alive

ANSWER_TIMEOUT_S = 5.0
"""A fork takes tens of milliseconds."""
DETACH_TIMEOUT_S = 30.0


def fits(workload: Workload) -> bool:
    """Whether `workload` is a training by a single process."""
    return workload.kind is Kind.TRAIN and workload.processes == (1,)


def start(directory: Path, env: Mapping[str, str]) -> None:
    """Start the process unless there is one. It fails without consequences."""
    with contextlib.suppress(OSError, subprocess.SubprocessError), (directory / "prewarmed.log").open("ab") as log:
        subprocess.run(
            [sys.executable, "-m", "resources.launcher.prewarmed_process", str(directory.absolute())],
            cwd=directory, env=dict(env), stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False,
            timeout=DETACH_TIMEOUT_S,
        )  # fmt: skip


def hand_over(directory: Path, workload: Path, watcher_env: Mapping[str, str]) -> bool:
    """Have it watch the workload whose files are in `workload`; False if it is absent, busy or stale, or does not answer."""
    order = {"workload": str(workload.absolute()), "python": sys.executable, "env": dict(watcher_env)}
    try:
        with unix_socket(directory) as (connection, address):
            connection.settimeout(ANSWER_TIMEOUT_S)
            connection.connect(address)
            connection.sendall(json.dumps(order).encode() + b"\n")
            return connection.recv(1) == b"1"
    except OSError:
        return False


def end(directory: Path) -> None:
    """End the process if there is one."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((directory / "prewarmed.json").read_text())
        if alive(found["pid"], found["identity"]):
            os.kill(found["pid"], signal.SIGTERM)


@contextlib.contextmanager
def unix_socket(directory: Path) -> Iterator[tuple[socket.socket, str]]:
    """Yield a socket and its address: by the directory's descriptor, since the path of a socket may have 107 bytes."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
            yield made, f"/proc/self/fd/{fd}/prewarmed.sock"
    finally:
        os.close(fd)
