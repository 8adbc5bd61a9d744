"""A child process in its own process group, with its output in a log file."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from resources.launcher.process_identity import identity

TAIL_LINES = 15
"""Lines of a dead child's log that an error shows: a Python traceback's last frames and its message."""


@dataclass(slots=True)
class Child:
    """A started process; its output begins at `log_offset` of the log file, which earlier starts share."""

    process: subprocess.Popen[bytes]
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


def start(argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path) -> Child:
    """Start `argv` as the leader of a new process group that appends to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        out.write(f"=== {time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(argv)}\n".encode())
        out.flush()
        offset = out.tell()
        process = subprocess.Popen(
            list(argv), env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    return Child(process=process, identity=identity(process.pid), started_at=time.time(), log=log, log_offset=offset)


def kill_group(pgid: int, sig: signal.Signals) -> None:
    try:
        os.killpg(pgid, sig)
    except (ProcessLookupError, PermissionError):
        return  # empty, or only zombies that belong to someone else
