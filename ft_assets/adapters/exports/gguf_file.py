"""A merged model as one GGUF file, as llama.cpp and what is built on it read it: Llama, Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from numpy.typing import NDArray
from safetensors import safe_open

from ft_assets.adapters.exports import Precision
from ft_assets.adapters.exports.gguf_tokenizer import add_tokenizer
from ft_assets.errors import FtError, InvalidRequest

ARCHITECTURES: Mapping[str, gguf.MODEL_ARCH] = {
    "llama": gguf.MODEL_ARCH.LLAMA, "mistral": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3,
}  # fmt: skip
"""By ``model_type``; llama.cpp reads Mistral as Llama."""
QUANTIZED: Mapping[Precision, GGMLQuantizationType] = {
    Precision.F32: GGMLQuantizationType.F32, Precision.F16: GGMLQuantizationType.F16, Precision.Q8_0: GGMLQuantizationType.Q8_0,
}  # fmt: skip
FILE_TYPES: Mapping[Precision, LlamaFileType] = {
    Precision.F32: LlamaFileType.ALL_F32, Precision.F16: LlamaFileType.MOSTLY_F16, Precision.Q8_0: LlamaFileType.MOSTLY_Q8_0,
}  # fmt: skip
BLOCK = 32
"""Values that share a scale in Q8_0; a matrix whose rows are no multiple of it stays in F16."""

Array = NDArray[np.float32]


def check_architecture(config: Mapping[str, Any]) -> gguf.MODEL_ARCH:
    """What GGUF calls the architecture; ``gguf_not_supported`` if we cannot write it."""
    found = ARCHITECTURES.get(str(config.get("model_type")))
    if found is None or config.get("num_experts") or config.get("num_local_experts"):
        raise InvalidRequest(
            f"models of type {config.get('model_type')!r} cannot be written as GGUF here, only {', '.join(ARCHITECTURES)}; export merged "
            "weights and convert them with llama.cpp",
            code="gguf_not_supported",
            param="format",
        )
    return found


def write_gguf(model_dir: Path, target: Path, *, name: str, precision: Precision) -> None:
    """Write the model in `model_dir`; one matrix at a time is in memory."""
    config = json.loads((model_dir / "config.json").read_text())
    architecture = check_architecture(config)
    writer = GGUFWriter(target, gguf.MODEL_ARCH_NAMES[architecture], use_temp_file=True)
    writer.add_name(name)
    _add_shape(writer, config, architecture)
    writer.add_file_type(FILE_TYPES[precision])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_tokenizer(writer, model_dir, vocab_size=int(config["vocab_size"]))
    names = gguf.get_tensor_name_map(architecture, int(config["num_hidden_layers"]))
    for hf_name, array in _arrays(model_dir, config, permuted=architecture is gguf.MODEL_ARCH.LLAMA):
        known = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        if known is None:
            raise FtError(f"GGUF has no name for the tensor {hf_name}", code="export_failed")
        _add_tensor(writer, known, array, precision)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: GGUFWriter, config: Mapping[str, Any], architecture: gguf.MODEL_ARCH) -> None:
    heads = int(config["num_attention_heads"])
    head_dim = _head_dim(config)
    writer.add_vocab_size(int(config["vocab_size"]))
    writer.add_context_length(int(config["max_position_embeddings"]))
    writer.add_embedding_length(int(config["hidden_size"]))
    writer.add_block_count(int(config["num_hidden_layers"]))
    writer.add_feed_forward_length(int(config["intermediate_size"]))
    writer.add_head_count(heads)
    writer.add_head_count_kv(int(config.get("num_key_value_heads") or heads))
    writer.add_layer_norm_rms_eps(float(config["rms_norm_eps"]))
    if architecture is gguf.MODEL_ARCH.LLAMA:
        writer.add_rope_dimension_count(head_dim)
    if config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    _add_rope(writer, config, head_dim)


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _add_rope(writer: GGUFWriter, config: Mapping[str, Any], head_dim: int) -> None:
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    writer.add_rope_freq_base(theta)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(rope["factor"]))
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(float(rope["factor"]))
        writer.add_rope_scaling_orig_ctx_len(int(rope.get("original_max_position_embeddings") or config["max_position_embeddings"]))
    elif kind == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, theta, head_dim, int(config["max_position_embeddings"])))
    elif kind != "default":
        raise InvalidRequest(
            f"positions scaled by {kind!r} cannot be written as GGUF here; export merged weights", code="gguf_not_supported"
        )


def llama3_factors(rope: Mapping[str, Any], theta: float, head_dim: int, context: int) -> Array:
    """By how much each frequency is divided: high ones by 1, low ones by the factor, and smoothly in between."""
    original = float(rope.get("original_max_position_embeddings") or context)
    factor, low, high = float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    smooth = (original / wavelengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wavelengths < original / high, 1.0, np.where(wavelengths > original / low, factor, between)).astype(np.float32)


def _arrays(model_dir: Path, config: Mapping[str, Any], *, permuted: bool) -> Iterator[tuple[str, Array]]:
    heads = int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    for shard in sorted(model_dir.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.get("tie_word_embeddings")):
                    continue
                array: Array = file.get_tensor(name).float().numpy()
                if permuted and ".self_attn.q_proj." in name:
                    array = interleaved(array, heads)
                if permuted and ".self_attn.k_proj." in name:
                    array = interleaved(array, kv_heads)
                yield name, array


def interleaved(array: Array, heads: int) -> Array:
    """Rows of each head in the order in which llama.cpp rotates them: pairs side by side, where the Hub's form has two halves."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def _add_tensor(writer: GGUFWriter, name: str, array: Array, precision: Precision) -> None:
    if array.ndim == 1 or precision is Precision.F32:
        writer.add_tensor(name, array)
        return
    if precision is Precision.Q8_0 and array.shape[-1] % BLOCK == 0:
        kind = QUANTIZED[precision]
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        return
    with np.errstate(over="ignore"):
        half = array.astype(np.float16)
    if not np.isfinite(half).all():
        raise InvalidRequest(f"{name} holds numbers beyond float16's 65504; export it with precision f32", code="gguf_not_supported")
    writer.add_tensor(name, half)
