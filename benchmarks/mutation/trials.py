"""Runs the tests of an area against one mutant after the other, in copies of the working tree."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.mutation.drawing import Mutant

TEST_TIMEOUT_S = 90
"""Of a single test: a mutant may loop for ever."""
WALL_S = 300.0
"""Of all tests of one mutant, three times what the slowest area takes; one that takes longer counts as caught, as its users would wait."""
CAUGHT, SURVIVED, TIMEOUT = "caught", "survived", "timeout"
NO_FAILURE, FAILURES = 0, (1, 2, 3)
"""Exit codes of pytest: all passed; tests failed, the run was broken off (a file cannot be imported), an internal error."""
NO_CONFTEST = "ImportError while loading conftest"
"""What pytest says where not even that can be imported."""
CRASHES = tuple(-number for number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL))
"""And those of a process that a compiled kernel with the mistake in it has ended."""


class Copy:
    """A copy of the tree in which files are changed and tests run."""

    def __init__(self, root: Path, directory: Path) -> None:
        self.root, self.path = root, directory / "tree"
        for name in subprocess.run(["git", "ls-files"], cwd=root, check=True, capture_output=True, text=True).stdout.splitlines():
            if (root / name).is_file():
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self.path / name)
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, check=True, capture_output=True, text=True)
        self._commit = head.stdout.strip()
        """What git says of the root: the copy has no git."""
        self._times = itertools.count(1_000_000_000)
        self.said = ""
        """The end of what the last run said."""
        (self.path / ".venv").symlink_to(sys.prefix)
        with contextlib.suppress(FileExistsError):
            (directory / "shared").symlink_to(root.parent / "shared")

    @contextlib.contextmanager
    def with_mistake(self, mutant: Mutant) -> Iterator[None]:
        self._write(mutant.path, mutant.source)
        try:
            yield
        finally:
            self._write(mutant.path, (self.root / mutant.path).read_text())

    def _write(self, path: str, source: str) -> None:
        """Give the file another modification time at each write: by it, in whole seconds, Python tells whether a compiled file is stale."""
        (self.path / path).write_text(source)
        now = next(self._times)
        os.utime(self.path / path, (now, now))

    def run(self, tests: Sequence[str]) -> tuple[str, str, float]:
        """(outcome, the first failure or the closing line, seconds)."""
        argv = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "not slow",
            f"--timeout={TEST_TIMEOUT_S}",
            *tests,
        ]
        env = {**os.environ, "PYTHONPATH": str(self.path), "FT_COMMIT": self._commit}
        began = time.monotonic()
        process = subprocess.Popen(
            argv, cwd=self.path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        try:
            output, _ = process.communicate(timeout=WALL_S)
        except subprocess.TimeoutExpired:
            _end(process)
            return TIMEOUT, f"over {WALL_S:.0f} s", time.monotonic() - began
        self.said = output[-4000:]
        lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))] or output.splitlines()[-1:]
        took = time.monotonic() - began
        if process.returncode == NO_FAILURE:
            return SURVIVED, lines[0], took
        if process.returncode in CRASHES:
            return CAUGHT, signal.Signals(-process.returncode).name, took
        if process.returncode not in FAILURES and NO_CONFTEST not in output:
            raise RuntimeError(f"pytest ended with {process.returncode}:\n{self.said}")
        return CAUGHT, lines[0], took


def _end(process: subprocess.Popen[str]) -> None:
    """Ctrl-C first: the tests end the servers that they started."""
    for number, seconds in ((signal.SIGINT, 30.0), (signal.SIGKILL, 30.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=seconds)
            return
