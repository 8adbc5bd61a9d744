"""Merges base and adapter into one set of weights: matrix by matrix, computed in float32, stored in the base's types."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from core.base_models import ties_embeddings
from core.errors import FtError
from engine.adapters import package, servability, tensors
from engine.adapters.tensors import module_name

BESIDE = ("config.json", "generation_config.json", "model.safetensors.index.json", *package.TOKENIZER_FILES)
"""Files of the base that belong to its weights; copied unchanged."""


def merge(base_dir: Path, adapter_dir: Path, target: Path) -> int:
    """Writes the merged model into `target`; returns the number of matrices that the adapter changed.

    Each shard is copied, and the changed matrices are written over their old bytes, so that memory holds one matrix at a time: its stored
    form, its float32 form, and the adapter. A full model instead of an adapter is copied: it already has its weights.
    """
    copy_beside(base_dir, target)
    if not (adapter_dir / package.ADAPTER_WEIGHTS).is_file():
        return _take_over(adapter_dir, target)
    found = package.read_package(adapter_dir)
    changes = changes_of(load_file(adapter_dir / package.ADAPTER_WEIGHTS), dora=bool(found.config.get("use_dora")))
    config = json.loads((base_dir / "config.json").read_text())
    if "lm_head" in changes and ties_embeddings(config):
        raise FtError("the adapter changes lm_head, which this base shares with its embedding: they cannot be merged", code="export_failed")
    left = set(changes)
    for shard in sorted(base_dir.glob("*.safetensors")):
        shutil.copyfile(shard, target / shard.name)
        with safe_open(shard, framework="pt") as file, (target / shard.name).open("r+b") as out:
            for name, info in tensors.tensor_header(shard).items():
                module = module_name(name, str(config.get("model_type", ""))).removesuffix(".weight")
                if module in left:
                    merged = _merged(file.get_tensor(name), changes[module], scale=servability.scale_of(found.config, module))
                    out.seek(info.start)
                    out.write(as_bytes(merged))
                    left.discard(module)
    if left:
        raise FtError(f"the base holds no weight {min(left)}.weight, which the adapter changes", code="export_failed")
    return len(changes)


def copy_beside(base_dir: Path, target: Path, names: tuple[str, ...] = BESIDE) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for name in names:
        if (base_dir / name).is_file():
            shutil.copyfile(base_dir / name, target / name)


def _take_over(model_dir: Path, target: Path) -> int:
    shards = sorted(model_dir.glob("*.safetensors"))
    (target / "model.safetensors.index.json").unlink(missing_ok=True)
    for path in (*shards, model_dir / "model.safetensors.index.json", model_dir / "config.json"):
        if path.is_file():
            shutil.copyfile(path, target / path.name)
    return len(shards)


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What an adapter trains of one module."""

    a: torch.Tensor
    """Shape (rank, inputs)."""
    b: torch.Tensor
    """Shape (outputs, rank)."""
    magnitude: torch.Tensor | None
    """Lengths of the rows of the changed weight (DoRA); None: as they come out."""


def changes_of(weights: Mapping[str, torch.Tensor], *, dora: bool) -> dict[str, Change]:
    """Returns the change of each module."""
    sides: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in weights.items():
        pair, magnitude = servability.TENSOR.fullmatch(name), servability.MAGNITUDE.fullmatch(name)
        if pair is not None:
            sides.setdefault(pair["module"], {})[pair["side"]] = tensor
        elif magnitude is not None and dora:
            sides.setdefault(magnitude["module"], {})["magnitude"] = tensor
        else:
            raise FtError(f"tensor {name} of the adapter is not a LoRA matrix; only those can be merged or converted", code="export_failed")
    return {module: Change(a=found["A"], b=found["B"], magnitude=found.get("magnitude")) for module, found in sides.items()}


def _merged(weight: torch.Tensor, change: Change, *, scale: float) -> Any:
    whole = weight.to(torch.float32, copy=True).addmm_(change.b.float(), change.a.float(), alpha=scale)
    if change.magnitude is not None:
        whole *= (change.magnitude.float() / torch.linalg.norm(whole, dim=1))[:, None]
    return whole.to(weight.dtype)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of a tensor as safetensors stores them."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data
