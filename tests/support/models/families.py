"""Tiny random models of current families: their true architectures, each with what sets its family apart.

Written with transformers, under the names that its own checkpoints have. Tokenizers have a token per byte and the family's control tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.models.tiny_model import CONTEXT, VOCAB, build_tiny_model

WINDOW = 8
"""Tokens of sliding windows and chunks: fewer than the shortest example of a test."""
COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": CONTEXT, "pad_token_id": 257, "bos_token_id": 256,
    "eos_token_id": 259, "initializer_range": 0.15, "tie_word_embeddings": False,
}  # fmt: skip
VISION: Mapping[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28, "patch_size": 14,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
GRANITE = {"logits_scaling": 8.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "embedding_multiplier": 3.0}
ROPE = {
    "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": CONTEXT // 4}
GEMMA3 = {
    "query_pre_attn_scalar": 16, "sliding_window": WINDOW, "tie_word_embeddings": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 4, "out_hidden_size": 32}
QWEN_TOKENS = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    model_type: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Of the text decoder's config, from ``COMMON``."""
    text_type: str = ""
    """Model type of the text decoder, for a config that nests it."""
    vision: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields beside the nested configs."""
    packs: bool = True
    """Whether its examples may share a window."""


FAMILIES: Mapping[str, Family] = {
    "llama-3": Family(model_type="llama", changes={"tie_word_embeddings": True, "rope_parameters": ROPE}),
    "qwen-2.5": Family(model_type="qwen2", changes={"tie_word_embeddings": True}),
    "qwen-3": Family(model_type="qwen3", changes={"tie_word_embeddings": True}),
    "gemma-2": Family(
        model_type="gemma2",
        changes={
            "final_logit_softcapping": 5.0, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16, "sliding_window": WINDOW,
            "tie_word_embeddings": True,
        },
    ),
    "gemma-3-text": Family(model_type="gemma3_text", changes=GEMMA3),
    "gemma-3": Family(
        model_type="gemma3",
        text_type="gemma3_text",
        changes=GEMMA3,
        vision={"model_type": "siglip_vision_model", **VISION},
        extra={"mm_tokens_per_image": 4, "image_token_index": 250, "boi_token_index": 251, "eoi_token_index": 252},
    ),
    "mistral-7b": Family(model_type="mistral", changes={"sliding_window": WINDOW}),
    "mistral-small-3": Family(
        model_type="mistral3",
        text_type="mistral",
        vision={"model_type": "pixtral", **VISION, "head_dim": 8},
        extra={"image_token_index": 250},
    ),
    "phi-4": Family(model_type="phi3", changes={"sliding_window": None}),
    "phi-4-mini": Family(model_type="phi3", changes={"partial_rotary_factor": 0.5, "tie_word_embeddings": True, "sliding_window": WINDOW}),
    "deepseek-r1-distill-qwen": Family(model_type="qwen2"),
    "deepseek-r1-distill-llama": Family(model_type="llama", changes={"rope_parameters": ROPE}),
    "granite-3": Family(model_type="granite", changes={**GRANITE, "tie_word_embeddings": True}),
    "olmo-2": Family(model_type="olmo2"),
    "qwen-3-moe": Family(model_type="qwen3_moe", changes={**EXPERTS, "router_aux_loss_coef": 0.5}),
    "gpt-oss": Family(
        model_type="gpt_oss",
        changes={
            **LOCAL_EXPERTS, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2,
            "attention_bias": True, "rope_parameters": YARN,
        },
    ),
    "granite-3-moe": Family(model_type="granitemoe", changes={**LOCAL_EXPERTS, **GRANITE, "tie_word_embeddings": True}),
    "llama-4": Family(
        model_type="llama4",
        text_type="llama4_text",
        changes={
            **LOCAL_EXPERTS, "intermediate_size": 16, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2,
            "attention_chunk_size": WINDOW, "floor_scale": 4, "attn_scale": 0.5, "no_rope_layers": [1, 1, 1, 0],
        },
        vision={
            "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28,
            "patch_size": 14, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
        },
        packs=False,
    ),
    "qwen-3.5": Family(
        model_type="qwen3_5", text_type="qwen3_5_text", changes=DELTA, vision=QWEN_VISION, extra=QWEN_TOKENS, packs=False
    ),
    "qwen-3.5-moe": Family(
        model_type="qwen3_5_moe",
        text_type="qwen3_5_moe_text",
        changes={**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16},
        vision=QWEN_VISION,
        extra=QWEN_TOKENS,
        packs=False,
    ),
}  # fmt: skip
"""By the family's name."""


def build_family(name: str, directory: Path, **changes: Any) -> Path:
    """Writes a random model of the family with the tiny model's tokenizer into `directory`; `changes`: of its text decoder's config."""
    import torch
    import transformers

    family = FAMILIES[name]
    build_tiny_model(directory)  # its tokenizer
    text = {**COMMON, **family.changes, **changes}
    transformers.set_seed(3)
    if family.text_type:
        nested = {"text_config": {"model_type": family.text_type, **text}, "vision_config": dict(family.vision), **family.extra}
        config = transformers.AutoConfig.for_model(family.model_type, **nested, tie_word_embeddings=text["tie_word_embeddings"])
        model: Any = transformers.AutoModelForImageTextToText.from_config(config)
    else:
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family.model_type, **text))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms, biases and sinks: random ones, so that none can be left out unseen
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    written = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(written | {"dtype": "float32"}, indent=1))
    return directory
