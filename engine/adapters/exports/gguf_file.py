"""Writes a merged model as one GGUF file for llama.cpp and tools built on it: Llama, Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType
from numpy.typing import NDArray
from safetensors import safe_open

from core.base_models import read_template
from core.errors import FtError, InvalidRequest
from core.typed_json import JsonObject
from engine.adapters.exports import ExportPrecision

ARCHITECTURES: Mapping[str, gguf.MODEL_ARCH] = {
    "llama": gguf.MODEL_ARCH.LLAMA, "mistral": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3,
}  # fmt: skip
"""By ``model_type``; llama.cpp reads Mistral as Llama."""
FILE_TYPES: Mapping[ExportPrecision, LlamaFileType] = {
    ExportPrecision.F32: LlamaFileType.ALL_F32, ExportPrecision.F16: LlamaFileType.MOSTLY_F16,
    ExportPrecision.Q8_0: LlamaFileType.MOSTLY_Q8_0,
}  # fmt: skip
BLOCK = 32
"""Values that share a scale in Q8_0; a matrix whose rows are not a multiple of it stays in F16."""

Array = NDArray[np.float32]


def check_architecture(config: Mapping[str, Any]) -> gguf.MODEL_ARCH:
    """Returns GGUF's name of the architecture; ``gguf_not_supported`` if it cannot be written."""
    found = ARCHITECTURES.get(str(config.get("model_type")))
    if found is None or config.get("num_experts") or config.get("num_local_experts"):
        raise InvalidRequest(
            f"models of type {config.get('model_type')!r} cannot be written as GGUF here, only {', '.join(ARCHITECTURES)}; export merged "
            "weights and convert them with llama.cpp",
            code="gguf_not_supported",
            param="format",
        )
    return found


def write_gguf(model_dir: Path, target: Path, *, name: str, precision: ExportPrecision) -> None:
    """Writes the model in `model_dir`; one matrix at a time is in memory."""
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
    head_dim = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
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
    """Returns the divisor of each frequency: 1 for high ones, the factor for low ones, and smoothly in between."""
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
    """Reorders the rows of each head for llama.cpp's rotation: adjacent pairs, where the Hub's form has two halves."""
    halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))


def _add_tensor(writer: GGUFWriter, name: str, array: Array, precision: ExportPrecision) -> None:
    if array.ndim == 1 or precision is ExportPrecision.F32:
        writer.add_tensor(name, array)
        return
    if precision is ExportPrecision.Q8_0 and array.shape[-1] % BLOCK == 0:
        kind = GGMLQuantizationType.Q8_0
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
        return
    with np.errstate(over="ignore"):
        half = array.astype(np.float16)
    if not np.isfinite(half).all():
        raise InvalidRequest(f"{name} holds numbers beyond float16's 65504; export it with precision f32", code="gguf_not_supported")
    writer.add_tensor(name, half)


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS: Mapping[str, str] = {
    rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}|{REST}": "llama-bpe",
    rf"{CONTRACTIONS}|{WORDS}|\p{{N}}|{REST}": "qwen2",
}
"""Split patterns of byte-level tokenizers, and llama.cpp's names for them."""
GENERATION = re.compile(r"\{%(-?)\s*(end)?generation\s*(-?)%\}")
BYTE = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True, kw_only=True, slots=True)
class _TokenizerFiles:
    spec: Mapping[str, Any]
    """``tokenizer.json``"""
    config: Mapping[str, Any]
    """``tokenizer_config.json``"""
    tokens: list[str]
    types: list[TokenType]
    live: tokenizers.Tokenizer


def add_tokenizer(writer: GGUFWriter, directory: Path, *, vocab_size: int) -> None:
    """Writes the tokenizer of the model in `directory`; refuses one that llama.cpp would split text for differently."""
    read = _read_tokenizer(directory, vocab_size)
    model = read.spec["model"]
    if model.get("type") != "BPE":
        raise _unsupported(f"a {model.get('type')} model")
    if model.get("byte_fallback"):
        _add_sentencepiece(writer, read)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_pre_tokenizer(read.spec))
        writer.add_token_list(read.tokens)
        writer.add_token_types(read.types)
        writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    _add_special(writer, read)
    if template := read_template(directory):
        writer.add_chat_template(plain_template(template))


def plain_template(template: str) -> str:
    """Returns the template without the blocks that mark trained text, which only trainers know; it renders the same."""
    return GENERATION.sub(lambda m: f"{{%{m[1]} {'endif' if m[2] else 'if true'} {m[3]}%}}", template)


def _read_tokenizer(directory: Path, vocab_size: int) -> _TokenizerFiles:
    spec = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    file = directory / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    live = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    by_id = {i: t for t, i in live.get_vocab(with_added_tokens=True).items()}
    if by_id and max(by_id) >= vocab_size:
        raise _unsupported(f"token ids up to {max(by_id)}, but the model has {vocab_size} rows for them")
    added = {t["id"]: t for t in spec.get("added_tokens") or ()}
    tokens, types = [], []
    for i in range(vocab_size):
        token = by_id.get(i)
        tokens.append(f"[PAD{i}]" if token is None else token)
        types.append(_token_type(token, added.get(i), spec))
    return _TokenizerFiles(spec=spec, config=config, tokens=tokens, types=types, live=live)


def _token_type(token: str | None, added: Mapping[str, Any] | None, spec: Mapping[str, Any]) -> TokenType:
    if token is None:
        return TokenType.UNUSED
    if token == spec["model"].get("unk_token"):
        return TokenType.UNKNOWN
    if added is not None:
        return TokenType.CONTROL if added.get("special") else TokenType.USER_DEFINED
    return TokenType.BYTE if spec["model"].get("byte_fallback") and BYTE.fullmatch(token) else TokenType.NORMAL


def _add_sentencepiece(writer: GGUFWriter, read: _TokenizerFiles) -> None:
    """Scores replace merges there: the pair that is merged first makes the token with the highest."""
    rank: dict[str, int] = {}
    for i, merge in enumerate(read.spec["model"]["merges"]):
        rank.setdefault("".join(merge.split(" ", 1) if isinstance(merge, str) else merge), i)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(read.tokens)
    writer.add_token_scores(
        [-float(rank.get(t, len(rank) if k is TokenType.NORMAL else 0)) for t, k in zip(read.tokens, read.types, strict=True)]
    )
    writer.add_token_types(read.types)
    writer.add_add_space_prefix('"prepend":"▁"' in json.dumps(read.spec.get("normalizer"), ensure_ascii=False, separators=(",", ":")))


def _pre_tokenizer(spec: Mapping[str, Any]) -> str:
    whole = spec.get("pre_tokenizer") or {}
    parts: list[JsonObject] = whole["pretokenizers"] if whole.get("type") == "Sequence" else [whole]
    kinds = [p.get("type") for p in parts]
    if kinds == ["ByteLevel"] and parts[0].get("use_regex", True) and not parts[0].get("add_prefix_space"):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and parts[0].get("individual_digits") and parts[1].get("use_regex", True):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not parts[1].get("use_regex", True):
        name = SPLITS.get(parts[0]["pattern"].get("Regex", ""))
        if name is not None:
            return name
    if not spec["model"]["merges"]:
        return "gpt-2"  # nothing is merged, so it does not matter where text is split
    raise _unsupported(f"a way to split text ({', '.join(map(str, kinds))}) for which llama.cpp has no name")


def _add_special(writer: GGUFWriter, read: _TokenizerFiles) -> None:
    ids: dict[str, int] = {}
    for kind, add in (("bos", writer.add_bos_token_id), ("eos", writer.add_eos_token_id), ("pad", writer.add_pad_token_id)):
        named = read.config.get(f"{kind}_token")
        token = named.get("content") if isinstance(named, dict) else named
        if token is not None and (found := read.live.token_to_id(token)) is not None:
            ids[kind] = found
            add(found)
    encoded = read.live.encode("a").ids
    writer.add_add_bos_token("bos" in ids and encoded[:1] == [ids["bos"]])
    writer.add_add_eos_token("eos" in ids and encoded[-1:] == [ids["eos"]])


def _unsupported(what: str) -> InvalidRequest:
    return InvalidRequest(
        f"the tokenizer has {what}, which GGUF cannot represent; export merged weights instead", code="gguf_not_supported"
    )
