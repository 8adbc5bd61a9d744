"""GPU device numbers: which of a node's GPUs a reservation holds, and their CUDA names on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import count, islice, takewhile
from pathlib import Path

from ft_assets.errors import Unavailable

VISIBLE = "CUDA_VISIBLE_DEVICES"
NONE = "-1"
"""CUDA ignores this entry of the variable and all that follow it."""


def assign(placement: Iterable[tuple[str, int]], held: MutableMapping[str, set[int]]) -> list[list[int]]:
    """Return the lowest free device numbers of each node of `placement`, in order, and add them to `held`, the numbers in use by node."""
    found = []
    for node, num_gpus in placement:
        in_use = held.setdefault(node, set())
        numbers = list(islice((n for n in count() if n not in in_use), num_gpus))
        in_use.update(numbers)
        found.append(numbers)
    return found


def visible(env: Mapping[str, str] = os.environ, *, dev: Path = Path("/dev")) -> tuple[str, ...]:
    """Return this machine's GPUs by CUDA name: the entries of ``CUDA_VISIBLE_DEVICES`` if it is set (numbers, UUIDs of GPUs or of MIG
    instances), else one number per NVIDIA device file. Empty if the machine has none."""
    if VISIBLE in env:
        names = (name.strip() for name in env[VISIBLE].split(","))
        return tuple(takewhile(lambda name: name not in ("", NONE), names))
    return tuple(str(n) for n, _ in enumerate(dev.glob("nvidia[0-9]*")))


def reserved(numbers: Collection[int], names: Sequence[str]) -> list[str]:
    """Return the CUDA name of each reserved device number; empty on a machine without GPUs.

    Several jobs may share a GPU if there are more slots than GPUs, but ranks of one job never do, because NCCL refuses two ranks on one
    GPU. If two numbers fall on the same GPU, the later one takes the next GPU that the job does not have yet.

    Raises ``Unavailable`` if there are fewer GPUs than numbers.
    """
    if not names:
        return []
    if len(numbers) > len(names):
        raise Unavailable(
            f"a job of {len(numbers)} ranks needs as many GPUs, and this machine has {len(names)} ({', '.join(names)}): ranks of one job "
            "cannot share a GPU; correct the GPUs of its pool in FT_POOLS, or CUDA_VISIBLE_DEVICES of ft up"
        )
    chosen: set[int] = set()
    for number in sorted(numbers):
        chosen.add(next(i for n in range(len(names)) if (i := (number + n) % len(names)) not in chosen))
    return [names[i] for i in sorted(chosen)]


def least_used(used: Iterable[int], names: Sequence[str]) -> int | None:
    """Return the number of the GPU that occurs least often in `used` (one entry per user). Ties go to the last, because reservations
    take the first. None on a machine without GPUs."""
    if not names:
        return None
    users = Counter(n % len(names) for n in used)
    return min(range(len(names)), key=lambda n: (users[n], -n))


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """A GPU used by a process without a reservation."""

    number: int
    descriptor: int
    """Descriptor of the file that counts this use: the GPU counts as used until every process that inherited it has closed it or ended."""

    @property
    def name(self) -> str:
        """CUDA name of the GPU on this machine."""
        return visible()[self.number]


@contextlib.contextmanager
def shared(work_dir: Path, held: Iterable[int]) -> Iterator[Shared | None]:
    """Choose the least used GPU of this machine for a process without a reservation; None on a machine without GPUs.

    `held`: device numbers that reservations hold. Callers choose one at a time and count earlier uses: locked files under `work_dir`, which
    the kernel unlocks however their processes end.
    """
    if not visible():
        yield None
        return
    uses = work_dir / "shared_gpus"
    uses.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as opened:
        with (work_dir / "shared_gpus.lock").open("a") as choosing:
            fcntl.flock(choosing, fcntl.LOCK_EX)
            number = least_used([*held, *_in_use(uses)], visible())
            assert number is not None
            descriptor, _ = tempfile.mkstemp(prefix=f"{number}-", dir=uses)
            opened.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield Shared(number=number, descriptor=descriptor)


def _in_use(uses: Path) -> list[int]:
    """Return the numbers of the GPUs in use, one per use; deletes the files of ended uses."""
    found = []
    for path in sorted(uses.iterdir()):
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found.append(int(path.name.partition("-")[0]))
            else:
                path.unlink()
    return found
