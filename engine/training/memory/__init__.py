"""Memory of a training process, part by part, and from it the number of GPUs, the sharding strategy and the batch.

Every part is a formula over the model's shape and names what allocates it in ``engine.training.runtime``; nothing is measured here and
nothing imports torch. ``benchmarks/training/memory_cpu.py`` compares the formulas with the peaks of real steps.
"""

from engine.training.memory.cases import Case
from engine.training.memory.estimates import MemoryEstimate, estimate
from engine.training.memory.gpu_fit import GANG_SIZES, Fit, Placement
from engine.training.memory.gpus import GPUS, Gpu

__all__ = ["GANG_SIZES", "GPUS", "Case", "Fit", "Gpu", "MemoryEstimate", "Placement", "estimate"]
