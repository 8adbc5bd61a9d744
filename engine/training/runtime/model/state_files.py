"""State of an optimizer and of a schedule in files that can run no code: tensors in safetensors, all else in JSON.

``optimizer.safetensors`` holds the tensors under numbers, and in its metadata, as JSON, what they belong to. ``schedule.json`` has none.
Checkpoints of earlier releases have ``optimizer.pt`` and ``schedule.pt``, which are read with ``weights_only``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

OPTIMIZER, SCHEDULE = "optimizer.safetensors", "schedule.json"
TENSOR, TUPLE, DICT = "tensor", "tuple", "dict"
"""How JSON marks what it does not know itself; keys of dictionaries may be numbers."""
TREE = "tree"


def write_optimizer(directory: Path, state: Any) -> None:
    """Write nested dictionaries, lists and tuples of tensors on the CPU, numbers, texts and None; ``TypeError`` for anything else."""
    tensors: dict[str, torch.Tensor] = {}
    tree = json.dumps(_marked(state, tensors))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / OPTIMIZER, metadata={TREE: tree})


def read_optimizer(directory: Path) -> Any:
    """Return what :func:`write_optimizer` was given, on the CPU."""
    if not (directory / OPTIMIZER).exists():
        return torch.load(directory / "optimizer.pt", map_location="cpu", weights_only=True)
    with safe_open(directory / OPTIMIZER, framework="pt") as file:
        return _unmarked(json.loads(file.metadata()[TREE]), file)


def write_schedule(directory: Path, state: Any) -> None:
    """Write the same without tensors."""
    (directory / SCHEDULE).write_text(json.dumps(_marked(state, None)))


def read_schedule(directory: Path) -> dict[str, Any]:
    """Return what :func:`write_schedule` was given."""
    if not (directory / SCHEDULE).exists():
        found: dict[str, Any] = torch.load(directory / "schedule.pt", weights_only=True)
        return found
    return dict(_unmarked(json.loads((directory / SCHEDULE).read_text()), None))


def _marked(value: Any, tensors: dict[str, torch.Tensor] | None) -> Any:
    if isinstance(value, torch.Tensor) and tensors is not None:
        name = str(len(tensors))
        tensors[name] = value
        return {TENSOR: name}
    if isinstance(value, dict):
        return {DICT: [[_marked(k, None), _marked(v, tensors)] for k, v in value.items()]}
    if isinstance(value, tuple):
        return {TUPLE: [_marked(v, tensors) for v in value]}
    if isinstance(value, list):
        return [_marked(v, tensors) for v in value]
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be written into a checkpoint")


def _unmarked(value: Any, file: Any) -> Any:
    if isinstance(value, list):
        return [_unmarked(v, file) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, body),) = value.items()
    if kind == TENSOR:
        return file.get_tensor(body)
    if kind == TUPLE:
        return tuple(_unmarked(v, file) for v in body)
    return {_unmarked(k, file): _unmarked(v, file) for k, v in body}
