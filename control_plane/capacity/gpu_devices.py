"""GPU device numbers: which of a node's GPUs a reservation holds, and their CUDA names on this machine."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from itertools import count, islice, takewhile
from pathlib import Path

from core.errors import Unavailable

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
