"""Counts CPU seconds of this process and of the children it has waited for: other work on the machine does not count."""

from __future__ import annotations

import platform
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def cpu_seconds() -> float:
    """User and system time of this process, its threads, and children that have ended."""
    usages = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in usages)


@dataclass(slots=True)
class Clock:
    """CPU seconds by stage."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = cpu_seconds()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + cpu_seconds() - start

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def timed(work: Callable[[], T], *, repeats: int = 1) -> tuple[T, float]:
    """What `work` returns, and the CPU seconds of its least disturbed run."""
    best = float("inf")
    for _ in range(repeats):
        start = cpu_seconds()
        value = work()
        best = min(best, cpu_seconds() - start)
    return value, best


def versions(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def machine() -> dict[str, Any]:
    model = "unknown"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    cores = len(names) if cpuinfo.exists() else None
    return {"cpu": model, "cores": cores, "python": platform.python_version(), "platform": sys.platform}
