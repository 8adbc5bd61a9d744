"""Reads the shape of a text decoder from a ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.base_models import context_length, rope_types, text_config
from engine.training.model_shapes.shape import ModelShape

QKV_BIAS = frozenset({"qwen2", "qwen2_moe"})
"""Families with a bias on queries, keys and values, whatever their config says."""
QK_NORM = frozenset({"qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "gemma3"})
WIDE_QK_NORM = frozenset({"olmo2", "olmo3"})
FOUR_NORMS = frozenset({"gemma2", "gemma3"})
FUSED = frozenset({"phi3"})
GATED = frozenset({"qwen3_next", "qwen3_5", "qwen3_5_moe"})
SOFT_CAPS = frozenset({"gemma2"})
SINKS = frozenset({"gpt_oss"})
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Config keys of mixtures of experts."""
RECURRENT = "linear_attention"
VARYING_ROPE = ("dynamic", "longrope")
"""Kinds of rotary scaling whose angles change with the longest position of a batch (transformers, ``dynamic_rope_update``)."""
UNKNOWN_LAYERS = frozenset({"mamba", "conv", "recurrent", "hybrid"})
"""Kinds of layers whose sizes are not known here."""


def from_config(config: Mapping[str, Any]) -> ModelShape:
    """Reads the content of ``config.json``. Raises ``ValueError`` if it is of a model whose sizes are not known here."""
    config = text_config(config)
    family = str(config.get("model_type", "llama")).removesuffix("_text")
    kinds = list(config.get("layer_types") or config.get("layers_block_type") or ())
    if config.get("kv_lora_rank"):
        raise ValueError(f"{family} compresses keys and values (kv_lora_rank {config['kv_lora_rank']}); such models are not supported")
    if unknown := sorted(UNKNOWN_LAYERS.intersection(kinds)):
        raise ValueError(f"{family} has {unknown[0]} layers; such models are not supported")
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        layers = int(config["num_hidden_layers"])
        bias = bool(config.get("attention_bias") or False)
        return ModelShape(
            num_layers=layers,
            hidden=hidden,
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            intermediate=int(config.get("intermediate_size_mlp") or config.get("intermediate_size") or 0) or _missing("intermediate_size"),
            vocab=int(config["vocab_size"]),
            tied_embeddings=bool(config.get("tie_word_embeddings")),
            context_length=context_length(config),
            qkv_bias=bias or family in QKV_BIAS,
            o_bias=bias,
            mlp_bias=bool(config.get("mlp_bias") or False),
            qk_norm=family in QK_NORM,
            wide_qk_norm=family in WIDE_QK_NORM,
            norms_per_layer=4 if family in FOUR_NORMS else 2,
            fused_projections=family in FUSED,
            gated_attention=family in GATED,
            sinks=family in SINKS,
            soft_caps=family in SOFT_CAPS and bool(config.get("attn_logit_softcapping")),
            chunked_attention=bool(config.get("attention_chunk_size")),
            attention_dropout=bool(config.get("attention_dropout")),
            varying_rope=next((kind for kind in VARYING_ROPE if kind in rope_types(config)), ""),
            max_packed_len=max_packed_len(config),
            **_recurrent(config, family, layers, kinds),
            **_experts(config, family, layers),
        )
    except KeyError as missing:
        raise ValueError(f"config.json of a {family} has no {missing}; its memory cannot be estimated") from None


def max_packed_len(config: Mapping[str, Any]) -> int | None:
    """Returns the longest window in which examples may share, of a model with this ``config.json``; 0: none; None: any.

    1. A state, or a convolution over tokens, passes from one example to the next: transformers resets neither on every machine.
    2. Chunks are counted from the start of the window, not of the example, so a window must not be longer than one.
    """
    config = text_config(config)
    family = str(config.get("model_type", "")).removesuffix("_text")
    kinds = config.get("layer_types") or ()
    if family in GATED or any(kind not in ("full_attention", "sliding_attention", "chunked_attention") for kind in kinds):
        return 0
    return int(config["attention_chunk_size"]) if config.get("attention_chunk_size") else None


def _missing(name: str) -> int:
    raise KeyError(name)


def _recurrent(config: Mapping[str, Any], family: str, layers: int, kinds: list[str]) -> dict[str, Any]:
    """Every fourth layer of these families has attention unless ``layer_types`` says otherwise."""
    if family not in GATED:
        return {}
    count = kinds.count(RECURRENT) if kinds else layers - layers // int(config.get("full_attention_interval") or 4)
    value_heads = int(config["linear_num_value_heads"])
    return {
        "num_recurrent_layers": count,
        "recurrent_key": int(config["linear_num_key_heads"]) * int(config["linear_key_head_dim"]),
        "recurrent_value": value_heads * int(config["linear_value_head_dim"]),
        "recurrent_heads": value_heads,
        "recurrent_kernel": int(config.get("linear_conv_kernel_dim") or 4),
    }


def _experts(config: Mapping[str, Any], family: str, layers: int) -> dict[str, Any]:
    key = next((name for name in EXPERTS if int(config.get(name) or 0) > 1), None)
    if key is None:
        return {}
    width = int(config.get("moe_intermediate_size") or config["intermediate_size"])
    shared = int(config.get("shared_expert_intermediate_size") or config.get("shared_intermediate_size") or 0)
    shared = shared or width * int(config.get("n_shared_experts") or (1 if family == "llama4" else 0))
    return {
        "num_moe_layers": _num_moe_layers(config, layers),
        "num_experts": int(config[key]),
        "experts_per_token": int(config.get("num_experts_per_tok") or (1 if family == "llama4" else 2)),
        "expert_intermediate": width,
        "shared_intermediate": shared,
        "shared_gate": bool(config.get("shared_expert_intermediate_size")),
        "expert_bias": family in SINKS,
    }


def _num_moe_layers(config: Mapping[str, Any], layers: int) -> int:
    if config.get("moe_layers") is not None:
        return len(config["moe_layers"])
    step = int(config.get("interleave_moe_layer_step") or config.get("decoder_sparse_step") or 1)
    dense = set(config.get("mlp_only_layers") or range(int(config.get("first_k_dense_replace") or 0)))
    return sum((layer + 1) % step == 0 and layer not in dense for layer in range(layers))
