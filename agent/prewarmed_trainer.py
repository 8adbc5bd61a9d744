"""A trainer that was forked, with its imports done, before its agent read anything: it waits to be ordered what to run.

The process that becomes the agent (:mod:`resources.launcher.prewarmed`) forks it, so that it is the agent's child in the agent's process
group, which the kernel kills with the agent. ``FT_PREWARMED_TRAINER`` tells the agent of it: ``<pid>:<descriptor that takes the order>``.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from core.processes.forked_process import IGNORABLE, Forked, Order
from core.processes.parent_death import die_with

VARIABLE = "FT_PREWARMED_TRAINER"
NAME = "ft-trainer"
ANSWER_TIMEOUT_S = 5.0
"""It takes milliseconds."""


class ForkedProcess:
    """What this project uses of ``subprocess.Popen``, for a forked child."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.killed = False
        self._ended = os.pidfd_open(pid)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            select.select([self._ended], [], [], timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return code

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.killed = self.poll() is None
        self.send_signal(signal.SIGKILL)


class PrewarmedTrainer(ForkedProcess):
    """The waiting child."""

    def __init__(self, pid: int, orders: socket.socket) -> None:
        super().__init__(pid)
        self._orders = orders

    @classmethod
    def of_environment(cls) -> PrewarmedTrainer | None:
        """Return this agent's trainer; None if it was started without."""
        pid, _, orders = os.environ.pop(VARIABLE, "").partition(":")
        return cls(int(pid), socket.socket(fileno=int(orders))) if pid else None

    def start(self, argv: Sequence[str], *, cwd: Path, log: Path, env: Mapping[str, str]) -> bool:
        """Have it run ``python -m`` with `argv`, once; False if it is gone or does not answer, and the training has to start cold."""
        order = Order(name=NAME, argv=argv, env=env, cwd=str(cwd))
        self._orders.settimeout(ANSWER_TIMEOUT_S)
        with contextlib.suppress(OSError), self._orders:
            self._orders.sendall(json.dumps({"order": asdict(order), "log": str(log)}).encode())
            self._orders.shutdown(socket.SHUT_WR)
            if self._orders.recv(1):
                return True
        self.kill()
        return False

    def poll(self) -> int | None:
        """Return the exit code as torchrun reports it: 1 for any failure of its rank."""
        code = super().poll()
        return code and (code if code == -signal.SIGKILL and self.killed else 1)


def fork_waiting() -> str:
    """Fork a trainer of this process, which becomes the agent; returns the value of :data:`VARIABLE`.

    Raises :class:`Forked` in the trainer, once its order has come. It ignores signals until then: the agent answers them.
    """
    agent = os.getpid()
    orders, given = socket.socketpair()
    pid = os.fork()
    if pid:
        orders.close()
        return f"{pid}:{given.detach()}"
    for signum in IGNORABLE:
        signal.signal(signum, signal.SIG_IGN)
    given.close()
    if not die_with(agent):
        os._exit(1)
    with orders, orders.makefile("rb") as stream:
        text = stream.read()
        if not text:
            os._exit(0)  # its agent ended before the training began
        message = json.loads(text)
        output = os.open(message["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        for signum in IGNORABLE:
            signal.signal(signum, signal.SIG_DFL)
        orders.sendall(b"1")
    raise Forked(Order(**message["order"]), output)
