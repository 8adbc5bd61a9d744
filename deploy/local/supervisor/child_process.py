"""A child process in its own process group, with its output in a log file."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from resources.launcher.process_identity import identity

TAIL_LINES = 15
"""Lines of a dead child's log that an error shows: a Python traceback's last frames and its message."""
MAX_LOG_BYTES = 64 << 20
"""Size at which a log is rotated; the previous one is kept as ``NAME.log.1``."""


Fork = Callable[[Sequence[str], Mapping[str, str], Path, int], int | None]
"""Takes a command, its environment, its directory and the descriptor of its output, and returns the pid of a forked process that has become
a child of this one; None if nothing can fork it."""


@dataclass(slots=True)
class Adopted:
    """What :class:`Child` uses of ``subprocess.Popen``, for a child that another process forked."""

    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode if self.returncode is not None else self._wait(os.WNOHANG)

    def wait(self) -> int:
        return self.returncode if self.returncode is not None else self._wait(0) or 0

    def send_signal(self, signum: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def _wait(self, options: int) -> int | None:
        pid, status = os.waitpid(self.pid, options)
        if pid:
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


@dataclass(slots=True)
class Child:
    """A started process; its output begins at `log_offset` of the log file, which earlier starts share."""

    process: subprocess.Popen[bytes] | Adopted
    identity: str | None
    started_at: float
    log: Path
    log_offset: int

    @property
    def pid(self) -> int:
        return self.process.pid

    def exit_code(self) -> int | None:
        return self.process.poll()

    def tail(self) -> list[str]:
        """Return the last lines of this start's output."""
        with self.log.open("rb") as f:
            size = f.seek(0, os.SEEK_END)
            f.seek(max(self.log_offset, size - 16384))
            text = f.read().decode(errors="replace")
        return text.splitlines()[-TAIL_LINES:]

    def ask_to_end(self, stop_signal: signal.Signals) -> None:
        if self.process.poll() is None:
            self.process.send_signal(stop_signal)

    def kill_group(self) -> None:
        """Kill what is left of the process group."""
        kill_group(self.pid, signal.SIGKILL)
        self.process.wait()


def start(argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path, fork: Fork = lambda *_: None) -> Child:
    """Start `argv` as the leader of a new process group that appends to `log`; in a forked process if `fork` makes one."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        out.write(f"=== {time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(argv)}\n".encode())
        out.flush()
        offset, started_at = out.tell(), time.time()
        pid = fork(argv, env, cwd, out.fileno())
        process = Adopted(pid=pid) if pid is not None else _popen(argv, env, cwd, out.fileno())
    return Child(process=process, identity=identity(process.pid), started_at=started_at, log=log, log_offset=offset)


def _popen(argv: Sequence[str], env: Mapping[str, str], cwd: Path, output: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        list(argv), env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )


def rotate_logs(directory: Path) -> None:
    """Copy each log of `directory` that has grown to :data:`MAX_LOG_BYTES` to ``NAME.log.1`` and empty it; on a full disk, empty both.

    Its writer goes on: it appends. What it writes between the copy and the cut, some microseconds, is lost.
    """
    for log in directory.glob("*.log"):
        with contextlib.suppress(FileNotFoundError):  # deleted by hand
            if log.stat().st_size >= MAX_LOG_BYTES:
                earlier = log.with_name(f"{log.name}.1")
                try:
                    shutil.copyfile(log, earlier)
                except OSError:
                    earlier.unlink(missing_ok=True)
                os.truncate(log, 0)


def reap_others(own: Collection[int]) -> None:
    """Wait for ended orphans that this process adopted; ends of its `own` children are read by :meth:`Child.exit_code`."""
    try:
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None and ended.si_pid not in own:
            os.waitpid(ended.si_pid, 0)
    except ChildProcessError:
        return


def kill_group(pgid: int, sig: signal.Signals) -> None:
    try:
        os.killpg(pgid, sig)
    except (ProcessLookupError, PermissionError):
        return  # empty, or only zombies that belong to someone else
