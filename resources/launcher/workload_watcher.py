"""The watcher of one workload: ``python -m resources.launcher.workload_watcher DIR`` starts it, waits for it, records its end.

The command returns at once; the watcher continues in its own session and outlives its caller. The workload is started at most once: the
marker ``launched`` is created first, and a second watcher that finds it does nothing.

    launch.json    what to run (written by the launcher, beside workload.json and token for the agent)
    launched       empty marker: the workload was started
    watcher.json   pid and identity of the watcher
    process.json   pid and identity of the workload's leader, started_at
    status.json    exit_code, started_at, ended_at: present once it ended
    log            stdout and stderr of the workload
    forgotten      empty marker: the workload ended and the other files were deleted, except for launched
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from resources.launcher.process_identity import identity


class Process(Protocol):
    """What the watcher uses of ``subprocess.Popen``."""

    pid: int

    def wait(self) -> int: ...


Start = Callable[[Mapping[str, Any], Mapping[str, str], int], Process]
"""Starts what ``launch.json`` describes, with an environment, in a session of its own; its output goes to the descriptor."""


def main(directory: Path, start: Start | None = None) -> None:
    if os.fork():
        os._exit(0)
    os.setsid()
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    try:
        os.close(os.open(directory / "launched", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return
    write_json(directory / "watcher.json", {"pid": os.getpid(), "identity": identity(os.getpid())})
    write_json(directory / "status.json", run(directory, start or _start))


def run(directory: Path, start: Start) -> dict[str, Any]:
    """Start the workload in its own process group, wait for the leader, then kill what is left of the group."""
    spec = json.loads((directory / "launch.json").read_text())
    env = {**spec["env"], **{name: os.environ[name] for name in spec.get("secrets", ()) if name in os.environ}}
    started_at = time.time()
    with (directory / "log").open("ab") as log:
        try:
            process = start(spec, env, log.fileno())
        except OSError as e:
            log.write(f"cannot start {spec['argv'][0]}: {e}\n".encode())
            return {"exit_code": 127, "started_at": started_at, "ended_at": time.time()}
    write_json(directory / "process.json", {"pid": process.pid, "identity": identity(process.pid), "started_at": started_at})
    exit_code = process.wait()
    ended_at = time.time()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    return {"exit_code": exit_code, "started_at": started_at, "ended_at": ended_at}


def _start(spec: Mapping[str, Any], env: Mapping[str, str], output: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        spec["argv"],
        cwd=spec["cwd"],
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        preexec_fn=_default_signals,
        start_new_session=True,
    )


def write_json(path: Path, body: Mapping[str, Any]) -> None:
    """Replace `path` atomically and durably."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("w") as f:
        json.dump(body, f)
        f.flush()
        os.fsync(f.fileno())
    draft.replace(path)


def _default_signals() -> None:
    """Restore the default handling of signals that the watcher ignores."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
