"""GPU types that jobs run on, and the memory that a process uses before it loads a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    name: str
    memory_bytes: int
    """Memory of the board, as ``nvidia-smi`` shows it; 0 for a CPU, which uses the machine's RAM."""

    @property
    def is_cpu(self) -> bool:
        return self.memory_bytes == 0


GPUS: Mapping[str, Gpu] = {
    name: Gpu(name=name, memory_bytes=mib * MIB)
    for name, mib in {
        "h100-80gb": 81_559,
        "h100-94gb": 95_830,
        "h200-141gb": 143_771,
        "a100-40gb": 40_960,
        "a100-80gb": 81_920,
        "l40s-48gb": 46_068,
        "l4-24gb": 23_034,
        "t4-16gb": 15_360,
        "v100-16gb": 16_384,
        "v100-32gb": 32_768,
        "cpu": 0,
        "local": 0,
    }.items()
}
"""MiB that ``nvidia-smi`` shows with ECC on; most boards have less than their name says. ``local`` is a slot of the embedded pool: a
process on this machine's CPU."""

CONTEXT_BYTES = 3 * GIB // 4
"""CUDA context with PyTorch's kernels (0.4 to 0.6 GiB on Ampere and Hopper) and the cuBLAS workspace."""
NCCL_BYTES = GIB
"""NCCL channels to the ranks of one node, several communicators."""
NCCL_NODES_BYTES = GIB // 2
"""Additional channels to ranks of other nodes."""
GPUS_PER_NODE = 8
CPU_PROCESS_BYTES = 700 * MIB
"""A training process on a CPU before it loads a model: 540 MiB of libraries, and 80 MiB of heap fragmentation later (measured)."""


def context_bytes(world_size: int) -> int:
    nccl = NCCL_BYTES if world_size > 1 else 0
    return CONTEXT_BYTES + nccl + (NCCL_NODES_BYTES if world_size > GPUS_PER_NODE else 0)
