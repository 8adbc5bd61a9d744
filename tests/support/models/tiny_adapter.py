"""LoRA adapters for the tiny model, in the files that PEFT writes; made without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from engine.adapters.package import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from engine.adapters.tensors import weight_shapes

Arrays = dict[str, np.ndarray[Any, np.dtype[np.float32]]]


def adapter_arrays(base: Path, *, rank: int = 8, seed: int = 0, scale: float = 0.3) -> Arrays:
    """Random matrices for every linear module of the layers of `base`; `scale` 0 makes an adapter that changes nothing."""
    rng = np.random.default_rng(seed)
    arrays: Arrays = {}
    for name, shape in sorted(weight_shapes(base).items()):
        if ".layers." in name and len(shape) == 2:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            arrays[f"{module}.lora_A.weight"] = rng.standard_normal((rank, shape[1])).astype(np.float32) * 0.3
            arrays[f"{module}.lora_B.weight"] = (rng.standard_normal((shape[0], rank)) * scale).astype(np.float32)
    return arrays


def adapter_config(base_name: str, *, rank: int = 8, **changes: Any) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "bias": "none",
        "inference_mode": True,
        **changes,
    }


def build_tiny_adapter(
    directory: Path,
    base: Path,
    *,
    base_name: str,
    rank: int = 8,
    seed: int = 0,
    scale: float = 0.3,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write an adapter for `base` into `directory`; `config` changes keys of its adapter_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    arrays = adapter_arrays(base, rank=rank, seed=seed, scale=scale)
    if config and config.get("use_dora"):
        arrays |= {
            name.replace("lora_B.weight", "lora_magnitude_vector"): np.linspace(0.5, 2.0, len(b), dtype=np.float32)
            for name, b in arrays.items()
            if name.endswith("lora_B.weight")
        }
    save_file(arrays, directory / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    (directory / ADAPTER_CONFIG).write_text(json.dumps(adapter_config(base_name, rank=rank, **(config or {}))))
    return directory
