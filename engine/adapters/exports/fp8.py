"""Writes a merged model with weights in FP8, in the layout of compressed-tensors that vLLM loads: a scale for each output channel.

Activations are scaled by the server for each token while it runs, so nothing is calibrated. Read back by compressed-tensors itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig

from core.errors import InvalidRequest
from engine.adapters import package, tensors
from engine.adapters.exports.merge import as_bytes, copy_beside
from engine.training.runtime.model import decoder

CONFIG, INDEX, SCALE = "config.json", "model.safetensors.index.json", "_scale"
LARGEST = torch.finfo(torch.float8_e4m3fn).max
SMALLEST_SCALE = 2.0**-40
"""Scale of a channel of zeros, which cannot be 0."""
TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
SCHEME: Mapping[str, Any] = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False},
    "input_activations": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True},
    "output_activations": None,
}
"""The scheme that llm-compressor calls FP8_DYNAMIC."""


def check_layers(model_dir: Path) -> tuple[frozenset[str], str]:
    """Returns the linear layers to quantize, and the head, which is not; ``fp8_not_supported`` if servers arrange the model otherwise.

    1. A plain text decoder: an image encoder would need a scheme of its own.
    2. No experts, whose weights servers fuse in forms of their own, and no layers with a state.
    3. Every linear layer is stored under the name that the config's layers have.
    """
    config = AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
    if config.get_text_config(decoder=True) is not config:
        raise _unsupported(f"models of type {config.model_type}, which hold more than a text decoder")
    with torch.device("meta"):
        model = decoder.auto_class(config).from_config(config)
    names = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    if any(decoder.is_expert(name) or decoder.is_router(name) for name, _ in model.named_parameters()):
        raise _unsupported("mixtures of experts")
    if any(decoder.RECURRENT.intersection(name.split(".")) for name in names):
        raise _unsupported("layers with a recurrent state")
    head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    chosen = frozenset(names) - {head}
    if lacking := sorted(chosen - {name.removesuffix(".weight") for name in tensors.weight_shapes(model_dir)}):
        raise _unsupported(f"a checkpoint that does not store {lacking[0]}.weight by itself")
    return chosen, head


def write_fp8(model_dir: Path, target: Path) -> None:
    """Writes the model in `model_dir` into `target`; one matrix at a time is in memory."""
    chosen, head = check_layers(model_dir)
    copy_beside(model_dir, target, ("generation_config.json", *package.TOKENIZER_FILES))
    places: dict[str, str] = {}
    for shard in sorted(model_dir.glob("*.safetensors")):
        _write_shard(shard, target / shard.name, chosen)
        places |= dict.fromkeys(tensors.tensor_header(target / shard.name), shard.name)
    config = json.loads((model_dir / CONFIG).read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": dict(SCHEME)}, "ignore": [head], "kv_cache_scheme": None,
    }  # fmt: skip
    (target / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    if (model_dir / INDEX).is_file():
        total = sum((target / name).stat().st_size for name in set(places.values()))
        (target / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2, sort_keys=True))


def _write_shard(source: Path, target: Path, chosen: frozenset[str]) -> None:
    contents: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, info in tensors.tensor_header(source).items():
        quantized = name.removesuffix(".weight") in chosen and name.endswith(".weight")
        contents[name] = ("F8_E4M3" if quantized else info.dtype, info.shape)
        if quantized:
            contents[name + SCALE] = ("BF16", (info.shape[0], 1))
    with safe_open(source, framework="pt") as file:

        def read(name: str) -> memoryview:
            if name not in contents or contents[name][0] != "F8_E4M3":
                of = name.removesuffix(SCALE)
                return as_bytes(file.get_tensor(name) if of == name else scale_of(file.get_tensor(of)))
            weight = file.get_tensor(name)
            scaled = weight.float() / scale_of(weight).float()
            return as_bytes(scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn))

        tensors.write(target, contents, read)


def scale_of(weight: torch.Tensor) -> torch.Tensor:
    """Returns the scale of each output channel, shape (outputs, 1), rounded to bfloat16, in which it is stored."""
    return (weight.float().abs().amax(dim=1, keepdim=True) / LARGEST).clamp(min=SMALLEST_SCALE).bfloat16()


def read_back(exported: Path, target: Path, *, dtype: torch.dtype) -> None:
    """Writes the model in `exported` into `target` with the weights that compressed-tensors computes from it, in `dtype`, for the proof."""
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    config = json.loads((exported / CONFIG).read_text(encoding="utf-8"))
    scheme = QuantizationConfig.model_validate(config.pop("quantization_config")).config_groups["group_0"].weights
    copy_beside(exported, target, ("generation_config.json", *package.TOKENIZER_FILES))
    (target / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    index: dict[str, str] = {}
    for shard in sorted(exported.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            plain = {n: t for n, t in tensors.tensor_header(shard).items() if not n.endswith(".weight" + SCALE)}
            contents = {n: (TYPES[dtype] if t.dtype == "F8_E4M3" else t.dtype, t.shape) for n, t in plain.items()}

            def read(name: str, file: Any = file, plain: Mapping[str, tensors.TensorInfo] = plain) -> memoryview:
                stored = file.get_tensor(name)
                if plain[name].dtype != "F8_E4M3":
                    return as_bytes(stored)
                return as_bytes(dequantize(stored, file.get_tensor(name + SCALE).float(), args=scheme, dtype=dtype))

            tensors.write(target / shard.name, contents, read)
            index |= dict.fromkeys(contents, shard.name)
    if (exported / INDEX).is_file():
        (target / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _unsupported(what: str) -> InvalidRequest:
    return InvalidRequest(
        f"FP8 weights are not written for {what}; export merged weights without a precision and quantize them with llm-compressor",
        code="fp8_not_supported",
        param="precision",
    )
