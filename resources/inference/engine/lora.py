"""Linear layers that apply a different adapter to each row of a batch.

Rows are routed once per step for all layers (:class:`Routing`). A row without an adapter passes only through the base layer, so requests
to the base and to any number of adapters share a forward pass. Several adapters are multiplied at once: their matrices are stacked, with
smaller ranks padded with zeros, and their rows gathered in groups of equal size. The stack is kept while the same adapters are in the
batch; it doubles their memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from engine.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS, TENSOR, scale_of


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraPair:
    down: torch.Tensor
    """inputs x rank"""
    up: torch.Tensor
    """rank x outputs, scaled"""

    @property
    def rank(self) -> int:
        return self.down.shape[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """Rows of several adapters as one block of ``[adapters, group size]`` rows."""

    taken: torch.Tensor
    """Batch row for each slot of the block; an arbitrary row for a group's spare slots."""
    filled: torch.Tensor
    """Slots of the block that hold a row."""
    rows: torch.Tensor
    """The batch rows in those slots."""


MAX_SPARE = 4
"""A block with more slots than this many times its rows costs more than applying the adapters one after another."""


@dataclass(kw_only=True, slots=True)
class Routing:
    """Maps adapters to rows of the current batch; shared by all layers, set before each forward pass."""

    rows: dict[str, torch.Tensor | slice] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    groups: Groups | None = None
    """None with fewer than two adapters, or if their numbers of rows differ too much."""

    def set(self, adapters: Sequence[str | None]) -> None:
        found: dict[str, list[int]] = {}
        for row, adapter in sorted(enumerate(adapters), key=lambda r: r[1] or ""):
            if adapter is not None:
                found.setdefault(adapter, []).append(row)
        whole = len(adapters)
        self.rows = {name: slice(None) if len(rows) == whole else torch.tensor(rows) for name, rows in found.items()}
        self.names = tuple(found)
        self.groups = _groups(list(found.values()))


def _groups(found: Sequence[Sequence[int]]) -> Groups | None:
    size, rows = max(map(len, found), default=0), [row for group in found for row in group]
    if len(found) < 2 or len(found) * size > MAX_SPARE * len(rows):
        return None
    taken = [row for group in found for row in [*group, *[group[0]] * (size - len(group))]]
    filled = [i * size + n for i, group in enumerate(found) for n in range(len(group))]
    return Groups(taken=torch.tensor(taken), filled=torch.tensor(filled), rows=torch.tensor(rows))


class LoraLinear(nn.Module):
    """A linear layer of the base with its attached adapters."""

    def __init__(self, base: nn.Linear, routing: Routing) -> None:
        super().__init__()
        self.base = base
        self.adapters: dict[str, LoraPair] = {}
        self._routing = routing
        self._stacked: tuple[tuple[str, ...], torch.Tensor, torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x)
        if self._routing.groups is not None:
            return self._add_groups(out, x, self._routing.groups)
        for name, rows in self._routing.rows.items():
            pair = self.adapters.get(name)
            if pair is not None:
                out[rows] += x[rows] @ pair.down @ pair.up
        return out

    def forget_stack(self) -> None:
        self._stacked = None

    def _add_groups(self, out: torch.Tensor, x: torch.Tensor, groups: Groups) -> torch.Tensor:
        """Add every adapter's contribution to `out`, with two batched products."""
        stacked = self._stack(kept=x.shape[1] == 1)
        if stacked is None:
            return out
        down, up = stacked
        block = x[groups.taken].reshape(len(down), -1, x.shape[-1])
        added = torch.bmm(torch.bmm(block, down), up).reshape(len(groups.taken), *out.shape[1:])
        return out.index_add_(0, groups.rows, added[groups.filled])

    def _stack(self, *, kept: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return ``[adapters, inputs, rank]`` and ``[adapters, rank, outputs]``; None if no adapter of the batch has this layer.

        `kept` caches the stack: for steps of the running rows, whose adapters stay the same, not for prefills.
        """
        names = self._routing.names
        if self._stacked is not None and self._stacked[0] == names:
            return self._stacked[1:]
        pairs = [self.adapters.get(name) for name in names]
        rank = max((p.rank for p in pairs if p is not None), default=0)
        if rank == 0:
            return None
        down, up = (torch.stack(sides) for sides in zip(*(self._filled_up(p, rank) for p in pairs), strict=True))
        if kept:
            self._stacked = names, down, up
        return down, up

    def _filled_up(self, pair: LoraPair | None, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        if pair is None:
            zeros = self.base.weight.new_zeros
            return zeros(self.base.in_features, rank), zeros(rank, self.base.out_features)
        if pair.rank == rank:
            return pair.down, pair.up
        more = rank - pair.rank
        return nn.functional.pad(pair.down, (0, more)), nn.functional.pad(pair.up, (0, 0, 0, more))


def install(model: nn.Module, routing: Routing) -> dict[str, LoraLinear]:
    """Wrap every linear layer of `model` except its head in a :class:`LoraLinear`; returns these by module name."""
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"]
    layers: dict[str, LoraLinear] = {}
    for name, linear in found:
        parent, _, leaf = name.rpartition(".")
        layers[name] = LoraLinear(linear, routing)
        setattr(model.get_submodule(parent), leaf, layers[name])
    return layers


def read(directory: Path, *, dtype: torch.dtype, device: str) -> dict[str, LoraPair]:
    """Read the matrices of the adapter in `directory` by module name; its package must have been verified."""
    config = json.loads((directory / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    weights = load_file(directory / ADAPTER_WEIGHTS, device=device)
    sides: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in weights.items():
        match = TENSOR.fullmatch(name)
        assert match is not None, f"verification accepted tensor {name}"
        sides.setdefault(match["module"], {})[match["side"]] = tensor.to(dtype)
    return {
        module: LoraPair(down=pair["A"].T.contiguous(), up=(pair["B"].T * scale_of(config, module)).contiguous())
        for module, pair in sides.items()
    }


def attach(layers: Mapping[str, LoraLinear], name: str, pairs: Mapping[str, LoraPair]) -> None:
    missing = sorted(set(pairs) - set(layers))
    if missing:
        raise ValueError(f"the model has no linear layer {missing[0]} (and {len(missing) - 1} more) for this adapter")
    for module, pair in pairs.items():
        layers[module].adapters[name] = pair
        layers[module].forget_stack()


def detach(layers: Mapping[str, LoraLinear], name: str) -> None:
    for layer in layers.values():
        layer.adapters.pop(name, None)
        layer.forget_stack()
