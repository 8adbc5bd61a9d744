"""Several processes that answer one evaluation: each holds a copy of the base on its own GPUs and answers its part of the batches.

1. Batches are composed from all requests, as by one process, and dealt out in turn (:class:`Part`): answers do not depend on the number of
   replicas, bit for bit, and neither does the key under which they are kept.
2. The first process (replica 0) is the one that the agent started. It starts the others with an equal share of its GPUs each, answers
   its own part, waits for them, and reads their journals. A replica that fails ends the evaluation.
3. Each replica keeps its journal in a directory of its own (:func:`directory`) and reads those of the others when it starts: killed and
   started again, with any number of replicas, none answers a batch that is answered.
4. A replica ends when the first process does, whatever ended that: its standard input closes then.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from core.errors import FtError, InvalidRequest, from_dict
from engine.evals.run.run_status import EVAL_EXIT_BAD_INPUT, EVAL_EXIT_OK, EXIT_STOPPED, JOURNAL_NAME, RESULT_NAME, read_eval_result

MODULE = "engine.evals.run.runner"
OPTION = "--replica"
VISIBLE = "CUDA_VISIBLE_DEVICES"
POLL_S = 0.2
STOP_S = 5.0
"""Seconds between SIGTERM and SIGKILL of a replica: half of what the agent gives the first process."""


@dataclass(kw_only=True)
class Part:
    """The batches of one suite that one of `of` replicas answers. Each batch must be asked about once, in order."""

    index: int = 0
    of: int = 1
    first: int = 0
    """Number of the suite: short suites begin with different replicas."""
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def has_next(self) -> bool:
        """Returns whether the next batch belongs to this part."""
        return (next(self._numbers) + self.first) % self.of == self.index


def directory(out_dir: Path, index: int) -> Path:
    """Returns the directory of a replica's journal and heartbeat; the first one's is the run's own."""
    return out_dir / f"replica-{index}" if index else out_dir


def journals(out_dir: Path) -> list[Path]:
    """Returns the journals of all replicas that ever ran in `out_dir`."""
    return sorted(p for p in (out_dir / JOURNAL_NAME, *out_dir.glob(f"replica-*/{JOURNAL_NAME}")) if p.exists())


def share_of(devices: Sequence[str], index: int, of: int) -> Sequence[str]:
    """Returns the devices of one replica; ``InvalidRequest`` if they cannot be divided equally."""
    each, rest = divmod(len(devices), of)
    if rest or (devices and not each):
        raise InvalidRequest(f"{len(devices)} GPUs cannot be divided equally among {of} replicas", code="bad_run_file")
    return devices[index * each : (index + 1) * each]


def visible_devices(num_visible: int) -> list[str]:
    """Returns the names of the GPUs that this process sees; `num_visible`: how many PyTorch counts."""
    named = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    return named[:num_visible] if named else [str(number) for number in range(num_visible)]


class Replicas:
    """The other processes of the first one; a context that leaves none of them running."""

    def __init__(self, run_file: Path, out_dir: Path, *, num: int) -> None:
        self._run_file, self._out_dir, self.num = run_file, out_dir, num
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, devices: Sequence[str]) -> None:
        """Starts them, each with its share of `devices`; without devices they compute on the CPU."""
        for index in range(1, self.num):
            share = share_of(devices, index, self.num)
            command = [sys.executable, "-m", MODULE, str(self._run_file), OPTION, str(index)]
            env = {**os.environ, VISIBLE: ",".join(share)}
            self._processes[index] = subprocess.Popen(command, stdin=subprocess.PIPE, env=env)

    def check(self) -> None:
        """Raises the error of a replica that has failed."""
        for index, process in self._processes.items():
            if (code := process.poll()) not in (None, EVAL_EXIT_OK):
                assert code is not None
                raise self._failure(index, code)

    def wait(self) -> None:
        """Waits until all have answered their parts; raises the error of one that fails."""
        while any(process.poll() is None for process in self._processes.values()):
            self.check()
            time.sleep(POLL_S)
        self.check()

    def _failure(self, index: int, code: int) -> FtError:
        if (directory(self._out_dir, index) / RESULT_NAME).is_file():
            error = read_eval_result(directory(self._out_dir, index))["error"]
            return from_dict(error, InvalidRequest if code == EVAL_EXIT_BAD_INPUT else FtError)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return FtError(f"replica {index} of {self.num} ended with {how}; the log says why")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        left = [process for process in self._processes.values() if process.poll() is None]
        for process in left:
            process.terminate()
        deadline = time.monotonic() + STOP_S
        for process in left:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for process in self._processes.values():
            if process.stdin is not None:
                process.stdin.close()


def end_with_first() -> None:
    """Ends this replica once the first process is gone."""

    def watch() -> None:
        while os.read(0, 1):
            pass
        os._exit(EXIT_STOPPED)

    threading.Thread(target=watch, daemon=True).start()
