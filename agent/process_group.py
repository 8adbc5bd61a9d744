"""The training process under torchrun, as a child of the agent that the kernel kills with it."""

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
from ft_assets.parent_death import die_with

KILL_TIMEOUT_S = 15.0


class ProcessGroup:
    """One torchrun with its ranks. It must be started from the main thread: the kernel kills it when the thread that started it ends."""

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
        """Exit code of torchrun, negative for a signal; None while it runs."""
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
        """Kill torchrun; the kernel kills the ranks with it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait(KILL_TIMEOUT_S)


def torchrun(module: str, run_file: Path, *, num_processes: int, meeting: Sequence[str]) -> list[str]:
    """Return the command that runs `module` in `num_processes` ranks on this node, which meets the others as in `meeting`."""
    launch = ["torch.distributed.run", *meeting, f"--nproc-per-node={num_processes}", "--max-restarts=0", "-m"]
    return [sys.executable, "-m", *launch, module, str(run_file)]


def meeting(leader: str, *, node: int, num_nodes: int) -> list[str]:
    """Return torchrun's options for one node of a gang whose node 0 has the address `leader`; alone, a node needs no address."""
    if num_nodes == 1:
        return ["--standalone"]
    host, _, port = leader.rpartition(":")
    return [f"--nnodes={num_nodes}", f"--node-rank={node}", f"--master-addr={host}", f"--master-port={port}"]


def free_address(control_plane: str) -> str:
    """Return ``host:port`` of this node: its address on the way to the control plane, and a port that is free now."""
    url = urlsplit(control_plane)
    family, _, _, _, target = socket.getaddrinfo(url.hostname, url.port or 443, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as way, socket.socket(family) as free:
        way.connect(target)  # a datagram socket sends nothing here
        host = way.getsockname()[0]
        free.bind((host, 0))
        return f"{host}:{free.getsockname()[1]}"
