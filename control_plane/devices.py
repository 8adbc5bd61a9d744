"""GPU device numbers: which of a node's GPUs a reservation names, and what CUDA calls them on this machine."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from itertools import count, islice, takewhile
from pathlib import Path

from ft_assets.errors import Unavailable

VISIBLE = "CUDA_VISIBLE_DEVICES"
NONE = "-1"
"""CUDA ignores this entry of the variable and all that follow it."""


def assign(placement: Iterable[tuple[str, int]], held: MutableMapping[str, set[int]]) -> list[list[int]]:
    """The lowest free device numbers of each node of `placement`, in its order; they are added to `held`, the numbers in use by node."""
    found = []
    for node, num_gpus in placement:
        in_use = held.setdefault(node, set())
        numbers = list(islice((n for n in count() if n not in in_use), num_gpus))
        in_use.update(numbers)
        found.append(numbers)
    return found


def visible(env: Mapping[str, str] = os.environ, *, dev: Path = Path("/dev")) -> tuple[str, ...]:
    """This machine's GPUs as CUDA names them: the entries of ``CUDA_VISIBLE_DEVICES`` where it is set (numbers, UUIDs of GPUs or of MIG
    instances), else a number for each device file of NVIDIA's driver. Empty: the machine has none."""
    if VISIBLE in env:
        names = (name.strip() for name in env[VISIBLE].split(","))
        return tuple(takewhile(lambda name: name not in ("", NONE), names))
    return tuple(str(n) for n, _ in enumerate(dev.glob("nvidia[0-9]*")))


def reserved(numbers: Collection[int], names: Sequence[str]) -> list[str]:
    """Names of the GPUs that a reservation numbers, one for each number; none on a machine without GPUs.

    Several jobs may share a GPU where there are more slots than GPUs, but the ranks of one job never do: NCCL refuses two ranks on one
    GPU. Where two numbers fall on the same GPU, the later one takes the next GPU that the job does not have yet.

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
    """Number of the GPU that occurs least often in `used`, which has a number for each user of a GPU. Of equals the last: reservations
    take the first. None on a machine without GPUs."""
    if not names:
        return None
    users = Counter(n % len(names) for n in used)
    return min(range(len(names)), key=lambda n: (users[n], -n))
