"""PiSSA (Meng et al. 2024): an adapter that begins with the principal part of each weight, and ends as an ordinary adapter of the base.

With W = P + R, where s B0 A0 = P has the r largest singular values, PiSSA trains A and B in R x + s B A x. The same function is
W x + s (B A - B0 A0) x, an adapter of rank 2r on the unchanged base, and that is what is trained here:

    lora_A = [A; A0], lora_B = [B, -B0]        while training: A0 and B0 get no gradient, and every checkpoint is a valid adapter
    lora_A = [A; A - A0], lora_B = [B - B0, B0]  as computed, and in the finished adapter: small differences survive half precision

PEFT makes the same adapter from its own when it saves with ``path_initial_model_for_weight_conversion``. Here nothing has to be
converted: the base keeps its weights, quantized ones too, and a resumed run reads A0 and B0 instead of decomposing again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from peft.utils.integrations import dequantize_module_weight
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

from engine.training.runtime.model.weights import ADAPTER_WEIGHTS
from engine.training.spec import LoraSettings


class HalfFrozenA(torch.nn.Linear):
    """Maps with [A; A - A0], for a weight [A; A0] of shape (2r, in)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(input, differences_a(self.weight, start=self.weight.detach()))


class HalfFrozenB(torch.nn.Linear):
    """Maps with [B - B0, B0], for a weight [B, -B0] of shape (out, 2r)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(input, differences_b(self.weight, start=self.weight.detach()))


def differences_a(weight: torch.Tensor, *, start: torch.Tensor) -> torch.Tensor:
    """Returns [A; A - A0], with A of `weight` and A0 of `start`."""
    rank = len(weight) // 2
    return torch.cat([weight[:rank], weight[:rank] - start[rank:]])


def differences_b(weight: torch.Tensor, *, start: torch.Tensor) -> torch.Tensor:
    """Returns [B - B0, B0], with B of `weight` and -B0 of `start`."""
    rank = weight.shape[1] // 2
    return torch.cat([weight[:, :rank] + start[:, rank:], -start[:, rank:]], dim=1)


def begin(model: Any, lora: LoraSettings, *, touch: Callable[[], None]) -> None:
    """Decomposes the weight under each LoRA layer of `model` and freezes half of the layer's matrices; nothing without PiSSA.

    A full decomposition of a matrix of 4,096 rows takes seconds on a GPU, so `touch` is called before each.
    """
    if not lora.init_lora_weights:
        return
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            touch()
            weight = dequantize_module_weight(layer.get_base_layer())
            a, b = principal_part(weight.detach().float(), lora.rank, lora.init_lora_weights, scale=lora.scale)
            layer.lora_A["default"] = _linear(HalfFrozenA, torch.cat([a, a]))
            layer.lora_B["default"] = _linear(HalfFrozenB, torch.cat([b, -b], dim=1))


def principal_part(weight: torch.Tensor, rank: int, how: str, *, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns A (rank, in) and B (out, rank), whose product times `scale` has the `rank` largest singular values of `weight` (out, in).

    ``pissa_niter_N`` approximates them in N subspace iterations, from torch's generator.
    """
    if how == "pissa":
        u, s, vh = torch.linalg.svd(weight, full_matrices=False)
    else:
        u, s, v = torch.svd_lowrank(weight, q=min(rank, *weight.shape), niter=int(how.rpartition("_")[2]))
        vh = v.T
    root = (s[:rank] / scale).sqrt()
    rest = rank - len(root)  # of a matrix that has no more singular values
    return pad(root[:, None] * vh[:rank], (0, 0, 0, rest)), pad(u[:, :rank] * root, (0, rest))


def finish(directory: Path, lora: LoraSettings) -> None:
    """Rewrites the adapter in `directory` in the form in which it was computed; nothing without PiSSA."""
    if not lora.init_lora_weights:
        return
    path = directory / ADAPTER_WEIGHTS
    tensors = load_file(path)
    for name, tensor in tensors.items():
        tensors[name] = (differences_a if ".lora_A." in name else differences_b)(tensor, start=tensor).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def _linear(kind: type[torch.nn.Linear], weight: torch.Tensor) -> torch.nn.Linear:
    made = kind(weight.shape[1], weight.shape[0], bias=False, device="meta")
    made.weight = torch.nn.Parameter(weight.contiguous())
    return made
