"""A two-layer Llama of about 0.2M random parameters with a byte-level tokenizer and a ChatML-like template.

Written without torch, in well under a second: the same bytes for the same seed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, CONTEXT = 64, 176, 2, 4, 2, 512
SPECIAL = ("<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
VOCAB = 256 + len(SPECIAL)
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build_tiny_model(directory: Path, *, seed: int = 0, template: str | None = CHAT_TEMPLATE) -> Path:
    """Write ``config.json``, ``model.safetensors``, ``tokenizer.json`` and ``tokenizer_config.json`` into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_config(), indent=1))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": VOCAB - 1, "pad_token_id": VOCAB - 3}))
    save_file(_weights(np.random.default_rng(seed)), directory / "model.safetensors", metadata={"format": "pt"})
    _tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|im_end|>",
                "pad_token": "<|pad|>",
                "model_max_length": CONTEXT,
                "clean_up_tokenization_spaces": False,
                "chat_template": template,
            },
            indent=1,
        )
    )
    return directory


def _config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": VOCAB - 1,
        "pad_token_id": VOCAB - 3,
        "dtype": "float32",
    }


def _weights(rng: np.random.Generator) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    def matrix(rows: int, columns: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        # Four times the usual scale, so that attention matters and a leak across a boundary shows.
        return (rng.standard_normal((rows, columns)) * 4 * 0.02).astype(np.float32)

    kv = HIDDEN // HEADS * KV_HEADS
    weights = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN) * 4}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, rows, columns in (
            ("self_attn.q_proj", HIDDEN, HIDDEN),
            ("self_attn.k_proj", kv, HIDDEN),
            ("self_attn.v_proj", kv, HIDDEN),
            ("self_attn.o_proj", HIDDEN, HIDDEN),
            ("mlp.gate_proj", MLP, HIDDEN),
            ("mlp.up_proj", MLP, HIDDEN),
            ("mlp.down_proj", HIDDEN, MLP),
        ):
            weights[f"{prefix}.{name}.weight"] = matrix(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{name}.weight"] = np.ones(HIDDEN, dtype=np.float32)
    weights["model.norm.weight"] = np.ones(HIDDEN, dtype=np.float32)
    weights["lm_head.weight"] = matrix(VOCAB, HIDDEN)
    return weights


def _tokenizer() -> Tokenizer:
    """One token a byte: no training, and every text has a predictable length."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    return tokenizer
