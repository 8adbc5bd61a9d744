"""Linear layers that apply a different adapter to each row of a batch.

Rows are routed once a step for all layers (:class:`Routing`). A row without an adapter passes the base layer alone, so
requests to the base and to any number of adapters share one forward pass.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from ft_assets.adapters.package import CONFIG, TENSOR, WEIGHTS, scale_of


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraPair:
    a: torch.Tensor
    """rank x inputs"""
    b: torch.Tensor
    """outputs x rank"""
    scale: float


@dataclass(kw_only=True, slots=True)
class Routing:
    """Which rows of the present batch belong to which adapter; shared by all layers, set before each forward pass."""

    rows: dict[str, torch.Tensor | slice] = field(default_factory=dict)

    def set(self, adapters: Sequence[str | None]) -> None:
        found: dict[str, list[int]] = {}
        for row, adapter in enumerate(adapters):
            if adapter is not None:
                found.setdefault(adapter, []).append(row)
        whole = len(adapters)
        self.rows = {name: slice(None) if len(rows) == whole else torch.tensor(rows) for name, rows in found.items()}


class LoraLinear(nn.Module):
    """A linear layer of the base with the adapters that are attached to it."""

    def __init__(self, base: nn.Linear, routing: Routing) -> None:
        super().__init__()
        self.base = base
        self.adapters: dict[str, LoraPair] = {}
        self._routing = routing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x)
        for name, rows in self._routing.rows.items():
            pair = self.adapters.get(name)
            if pair is not None:
                low = nn.functional.linear(x[rows], pair.a)
                out[rows] += nn.functional.linear(low, pair.b) * pair.scale
        return out


def install(model: nn.Module, routing: Routing) -> dict[str, LoraLinear]:
    """Put a :class:`LoraLinear` around every linear layer of `model` but its head; returns them by module name."""
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"]
    layers: dict[str, LoraLinear] = {}
    for name, linear in found:
        parent, _, leaf = name.rpartition(".")
        layers[name] = LoraLinear(linear, routing)
        setattr(model.get_submodule(parent), leaf, layers[name])
    return layers


def read(directory: Path, *, dtype: torch.dtype, device: str) -> dict[str, LoraPair]:
    """Matrices of the adapter in `directory` by module name; its package was verified before."""
    config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    weights = load_file(directory / WEIGHTS, device=device)
    sides: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in weights.items():
        match = TENSOR.fullmatch(name)
        assert match is not None, f"{name} passed verification"
        sides.setdefault(match["module"], {})[match["side"]] = tensor.to(dtype)
    return {module: LoraPair(a=pair["A"], b=pair["B"], scale=scale_of(config, module)) for module, pair in sides.items()}


def attach(layers: Mapping[str, LoraLinear], name: str, pairs: Mapping[str, LoraPair]) -> None:
    missing = sorted(set(pairs) - set(layers))
    if missing:
        raise ValueError(f"the model has no linear layer {missing[0]} (and {len(missing) - 1} more) for this adapter")
    for module, pair in pairs.items():
        layers[module].adapters[name] = pair


def detach(layers: Mapping[str, LoraLinear], name: str) -> None:
    for layer in layers.values():
        layer.adapters.pop(name, None)
