"""Autocast: where it is on, and how models are prepared for it.

On a CPU, validation and the self-test compute in the precision of the weights. On a GPU they compute as training does: tensor cores
multiply float32 at a tenth of the speed of bfloat16, or not at all.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from engine.training.runtime.model.weights import DTYPES
from engine.training.spec import TrainingSpec


def autocasts(spec: TrainingSpec) -> bool:
    """Returns whether training casts as it computes; ZeRO already holds weights in the target precision."""
    return spec.precision != "fp32" and not spec.strategy.startswith("zero")


def training(spec: TrainingSpec, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Context for the forward pass of a micro-batch.

    Only the output layer's weight is used twice in it, so a GPU keeps no copies of cast weights: with recomputed activations they would use
    two bytes per parameter for nothing.
    """
    if not autocasts(spec):
        return contextlib.nullcontext()
    return torch.autocast(device.type, DTYPES[spec.precision], cache_enabled=device.type == "cpu")


def evaluation(spec: TrainingSpec, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Context for forward passes without training."""
    return contextlib.nullcontext() if device.type == "cpu" else training(spec, device)


def leave_casts_to_autocast(model: Any, spec: TrainingSpec, device: torch.device) -> None:
    """Stops LoRA layers from widening their input to the float32 of their matrices: autocast would narrow it again.

    The product is the same. The widened copy and the dropout on it cost 20 bytes of memory traffic per input of each linear layer.
    """
    if device.type == "cpu" or not autocasts(spec):
        return
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False
