"""Controls where autocast is enabled, and prepares models for it.

On a CPU, validation and the self-test compute in the precision of the stored weights. On a GPU they compute as training does: tensor cores
multiply float32 at a tenth of the speed of bfloat16, or not at all.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ft_assets.training.runtime.model.weights import DTYPES
from ft_assets.training.spec import TrainingSpec


def autocasts(spec: TrainingSpec) -> bool:
    """Returns whether training uses autocast. ZeRO already holds weights in the target precision."""
    return spec.precision != "fp32" and not spec.strategy.startswith("zero")


def training(spec: TrainingSpec, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Returns the context for the forward pass of a micro-batch.

    Only the output layer's weight is used twice, so a GPU does not cache cast weights: with recomputed activations the cache would take two
    bytes a parameter without benefit.
    """
    if not autocasts(spec):
        return contextlib.nullcontext()
    return torch.autocast(device.type, DTYPES[spec.precision], cache_enabled=device.type == "cpu")


def evaluation(spec: TrainingSpec, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Returns the context for forward passes without training."""
    return contextlib.nullcontext() if device.type == "cpu" else training(spec, device)


def leave_casts_to_autocast(model: Any, spec: TrainingSpec, device: torch.device) -> None:
    """Prevents LoRA layers from casting their input to the float32 of their matrices: autocast would cast it back.

    The product is the same. The float32 copy and its dropout cost 20 bytes of memory traffic for each input of each linear layer.
    """
    if device.type == "cpu" or not autocasts(spec):
        return
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False
