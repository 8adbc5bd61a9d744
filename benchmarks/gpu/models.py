"""Base models of real shapes with random weights, and packs of random tokens.

    python -m benchmarks.gpu.models NAME DIRECTORY

Weights are drawn on the GPU if there is one, in a process of its own: nothing of it stays behind on the GPU.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from benchmarks.gpu.cases import FINGERPRINT, SHAPES
from engine.training.model_shapes import ModelShape

SPECIAL = ("<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
SHARD_BYTES = 4 * 2**30
DEVIATION = 0.02
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EXAMPLE_TOKENS, EXAMPLE_SPREAD = 0.13, 0.7
"""Median of an example's length as a share of the window (530 tokens of 4,096) and the deviation of its logarithm."""
PROMPT_SHARE = 3
"""One token of so many belongs to the prompt and carries no loss."""


def config(shape: ModelShape) -> dict[str, Any]:
    """``config.json`` of a model of this shape; ``model_shapes.from_config`` is its inverse."""
    family = "Qwen2" if shape.qkv_bias else "Llama"
    return {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": family.lower(),
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context_length,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": shape.tied_embeddings,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": 259,
        "pad_token_id": 257,
        "dtype": "bfloat16",
    }


def tensors(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each weight; vectors are norms, or biases by their name."""
    yield "model.embed_tokens.weight", (shape.vocab, shape.hidden)
    layers = (
        "self_attn.q_proj",
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    )
    for layer in range(shape.num_layers):
        at = f"model.layers.{layer}"
        for name, (inputs, outputs) in zip(layers, shape.linears, strict=True):
            yield f"{at}.{name}.weight", (outputs, inputs)
            if shape.qkv_bias and name[10:] in ("q_proj", "k_proj", "v_proj"):
                yield f"{at}.{name}.bias", (outputs,)
        yield f"{at}.input_layernorm.weight", (shape.hidden,)
        yield f"{at}.post_attention_layernorm.weight", (shape.hidden,)
    yield "model.norm.weight", (shape.hidden,)
    if not shape.tied_embeddings:
        yield "lm_head.weight", (shape.vocab, shape.hidden)


def write_model(shape: ModelShape, directory: Path) -> None:
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    index: dict[str, str] = {}
    shard: dict[str, Any] = {}
    filled = 0

    def flush() -> None:
        nonlocal filled
        file = f"model-{len(set(index.values())) + 1:05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(shard, file))
        shard.clear()
        filled = 0

    for name, size in tensors(shape):
        if len(size) == 1:
            tensor = (torch.zeros if name.endswith("bias") else torch.ones)(size, dtype=torch.bfloat16)
        else:
            tensor = torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16).mul_(DEVIATION).cpu()
        shard[name] = tensor
        filled += tensor.nbytes
        if filled > SHARD_BYTES:
            flush()
    if shard:
        flush()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (directory / "config.json").write_text(json.dumps(config(shape), indent=1))
    write_tokenizer(directory)


def write_tokenizer(directory: Path) -> None:
    """One token a byte; the ids above are never met as text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    body = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|pad|>", "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(body))


def lengths(rng: np.random.Generator, max_seq_len: int, count: int) -> list[int]:
    """Of examples as conversations have them: many short, few long."""
    drawn = np.exp(rng.normal(math.log(EXAMPLE_TOKENS * max_seq_len), EXAMPLE_SPREAD, count))
    return [int(n) for n in np.clip(drawn, 16, max_seq_len)]


def fill(examples: list[int], max_seq_len: int) -> list[list[int]]:
    """Examples in windows, first fit decreasing: as the platform packs."""
    windows: list[list[int]] = []
    room: list[int] = []
    for n in sorted(examples, reverse=True):
        place = next((i for i, left in enumerate(room) if left >= n), None)
        if place is None:
            windows.append([n])
            room.append(max_seq_len - n)
        else:
            windows[place].append(n)
            room[place] -= n
    return windows


def write_pack(directory: Path, *, vocab: int, max_seq_len: int, packed: bool, examples: int = 1500) -> dict[str, Any]:
    """The same examples, packed or one to a window; returns what the manifest says of them."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    drawn = lengths(rng, max_seq_len, examples)
    windows = fill(drawn, max_seq_len) if packed else [[n] for n in drawn]
    columns: dict[str, list[Any]] = {"input_ids": [], "labels": [], "seq_lengths": windows}
    for parts in windows:
        ids = rng.integers(0, vocab, sum(parts), dtype=np.int32)
        prompt = np.concatenate([np.arange(n) < n // PROMPT_SHARE for n in parts])
        columns["input_ids"].append(ids)
        columns["labels"].append(np.where(prompt, -100, ids).astype(np.int32))
    path = directory / "shard-00000.parquet"
    pq.write_table(pa.table({k: pa.array(v, pa.list_(pa.int32())) for k, v in columns.items()}), path)
    tokens = sum(drawn)
    shard = {"name": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "num_windows": len(windows)}
    body = {"fingerprint": FINGERPRINT, "dataset_id": "ds_benchmark", "max_seq_len": max_seq_len, "num_examples": examples}
    body |= {"num_windows": len(windows), "num_tokens": tokens, "shards": [shard], "validation": None}
    (directory / "manifest.json").write_text(json.dumps(body))
    return {"examples": examples, "windows": len(windows), "tokens": tokens, "fill": round(tokens / len(windows) / max_seq_len, 4)}


if __name__ == "__main__":
    write_model(SHAPES[sys.argv[1]], Path(sys.argv[2]))
