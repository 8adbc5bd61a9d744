"""The training process, under torchrun where it has several ranks, as a child of the agent that the kernel kills with it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from agent.prewarmed_trainer import PrewarmedTrainer
from core.processes.parent_death import die_with

KILL_TIMEOUT_S = 15.0
TORCHRUN = "engine.training.runtime.parallel.torchrun"
ONE_NODE = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Environment of ranks that are all on this node."""


class ProcessGroup:
    """One training with its ranks. It must be started from the main thread: the kernel kills it when the thread that started it ends."""

    def __init__(
        self, command: Sequence[str], *, cwd: Path, log: Path, env: Mapping[str, str], prewarmed: PrewarmedTrainer | None = None
    ) -> None:
        """Start `command`, of which a `prewarmed` process runs the module and its argument, with which it ends."""
        agent = os.getpid()

        def with_default_signals() -> None:
            for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(signum, signal.SIG_DFL)
            if not die_with(agent):
                os._exit(1)

        self.started_at = time.time()
        self._killed_after: float | None = None
        if prewarmed is not None and prewarmed.start(command[-2:], cwd=cwd, log=log, env=env):
            self._process: subprocess.Popen[bytes] | PrewarmedTrainer = prewarmed
            return
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                command,
                cwd=cwd,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                preexec_fn=with_default_signals,
            )

    @property
    def exit_code(self) -> int | None:
        """Exit code of the rank or of torchrun, negative for a signal; None while it runs."""
        return self._process.poll()

    def stop(self, grace_s: float) -> None:
        """Ask for a checkpoint and the end; :meth:`enforce` kills what is left after `grace_s`. A second call changes nothing."""
        if self._killed_after is None:
            self._killed_after = time.monotonic() + grace_s
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def enforce(self) -> None:
        """Kill the group if its time is over."""
        if self._killed_after is not None and time.monotonic() > self._killed_after:
            self.kill()

    def kill(self) -> None:
        """Kill the process; the kernel kills what torchrun started with it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait(KILL_TIMEOUT_S)


def training_command(module: str, run_file: Path, *, num_processes: int, node: int, num_nodes: int, leader: str) -> list[str]:
    """Return the command that runs `module` in `num_processes` ranks on this node of a gang whose node 0 has the address `leader`.

    A single rank opens no port. The ranks of one node meet on the loopback interface and exchange everything over it.
    """
    start = [sys.executable, "-m", module, str(run_file)]
    if num_nodes == num_processes == 1:
        return start
    endpoint = leader if num_nodes > 1 else "127.0.0.1:0"
    meeting = ["--rdzv-backend=bound", f"--rdzv-endpoint={endpoint}", f"--rdzv-conf=rank={node}", f"--nnodes={num_nodes}"]
    ranks = [f"--nproc-per-node={num_processes}", f"--node-rank={node}", "--max-restarts=0"]
    return [sys.executable, "-m", TORCHRUN, *meeting, *ranks, *start[1:]]


def free_address(control_plane: str) -> str:
    """Return ``host:port`` of this node: its address on the way to the control plane, and a port that is free now."""
    url = urlsplit(control_plane)
    family, _, _, _, target = socket.getaddrinfo(url.hostname, url.port or 443, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as way, socket.socket(family) as free:
        way.connect(target)  # a datagram socket sends nothing here
        host = way.getsockname()[0]
        free.bind((host, 0))
        return f"{host}:{free.getsockname()[1]}"
