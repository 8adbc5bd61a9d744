"""Estimates the memory of a training process part by part, and from it the number of GPUs, the sharding strategy, and the batch.

Every part is a formula over the model's shape and names what allocates it in ``ft_assets.training.runtime``. Nothing is measured here and
nothing imports torch. ``benchmarks/training/memory_cpu.py`` compares the formulas with measured peaks of real steps.
"""

from ft_assets.training.memory.cases import Case
from ft_assets.training.memory.estimates import MemoryEstimate, estimate
from ft_assets.training.memory.gpu_fit import COUNTS, Fit, fit
from ft_assets.training.memory.gpus import GPUS, Gpu

__all__ = ["COUNTS", "GPUS", "Case", "Fit", "Gpu", "MemoryEstimate", "estimate", "fit"]
