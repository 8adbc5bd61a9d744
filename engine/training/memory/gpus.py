"""GPU types that jobs run on, and the memory that a process takes before it holds a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.training.model_shapes.attention_kernels import Capability, Device

MIB = 2**20
GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    name: str
    memory_bytes: int
    """MiB of the board, as shown by ``nvidia-smi``; 0 for a CPU, which uses the machine's RAM."""
    capability: Capability | None = None
    """Compute capability (NVIDIA's table of CUDA GPUs); None for a CPU."""

    @property
    def is_cpu(self) -> bool:
        return self.memory_bytes == 0

    @property
    def device(self) -> Device:
        return Device(capability=self.capability)


GPUS: Mapping[str, Gpu] = {
    name: Gpu(name=name, memory_bytes=mib * MIB, capability=capability)
    for name, (mib, capability) in {
        "h100-80gb": (81_559, (9, 0)),
        "h100-94gb": (95_830, (9, 0)),
        "h200-141gb": (143_771, (9, 0)),
        "a100-40gb": (40_960, (8, 0)),
        "a100-80gb": (81_920, (8, 0)),
        "l40s-48gb": (46_068, (8, 9)),
        "l4-24gb": (23_034, (8, 9)),
        "t4-16gb": (15_360, (7, 5)),
        "v100-16gb": (16_384, (7, 0)),
        "v100-32gb": (32_768, (7, 0)),
        "cpu": (0, None),
        "local": (0, None),
    }.items()
}
"""MiB shown by ``nvidia-smi`` with ECC on, less than the name says on most boards. ``local`` is a slot of the embedded pool: a process
on this machine's CPU."""

CONTEXT_BYTES = 3 * GIB // 4
"""CUDA context with PyTorch's kernels (0.4 to 0.6 GiB on Ampere and Hopper) and the cuBLAS workspace."""
NCCL_BYTES = GIB
"""NCCL channels to the ranks of one node, several communicators."""
NCCL_NODES_BYTES = GIB // 2
"""Additional buffers for ranks on other nodes."""
GPUS_PER_NODE = 8
CPU_PROCESS_BYTES = 700 * MIB
"""Memory of a training process on a CPU before it holds a model: 540 MiB of libraries, and 80 MiB of heap fragmentation later
(measured)."""


def context_bytes(world_size: int) -> int:
    nccl = NCCL_BYTES if world_size > 1 else 0
    return CONTEXT_BYTES + nccl + (NCCL_NODES_BYTES if world_size > GPUS_PER_NODE else 0)
