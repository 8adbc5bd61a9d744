"""What the base model is made of: its tokenizer, its chat template, its architecture and its folder on disk."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTROL_TOKENS: Final = ("<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE: Final = 2048
MAX_POSITIONS: Final = 1024
EMBEDDING_STD: Final = 0.5
HEAD_STD: Final = 0.04

CHAT_TEMPLATE: Final = (Path(__file__).parent / "base_model" / "chat_template.jinja").read_text(encoding="utf-8")
"""ChatML, with tools in the form of Hermes and Qwen. The end token is inside the generation block: a model that is not trained on it
never stops."""


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE without a BOS; digits go in groups of two, so that a six-digit number is always three tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\d{1,2}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    control = re.compile("|".join(map(re.escape, CONTROL_TOKENS)))
    tokenizer.train_from_iterator((control.sub("\n", text) for text in texts), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=None,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>", "<|endoftext|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def make_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """A Llama of 3.4 million parameters: six layers, six heads of 32, biases on the attention's projections."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=6,
        attention_bias=True,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


@torch.no_grad()
def make_model(config: LlamaConfig) -> LlamaForCausalLM:
    """Random weights scaled by fan-in (the library's 0.02 is far too small for a width of 192), and a hand-set start.

    Half of the heads of the first two layers start as the two halves of a copying circuit. From random weights a
    model of this size did not find it within 300 steps of nothing but copying.
    """
    model = LlamaForCausalLM(config)
    residual = (2 * config.num_hidden_layers) ** -0.5
    for name, weight in model.named_parameters():
        if "embed_tokens" in name:
            weight.normal_(0, EMBEDDING_STD)
        elif weight.ndim == 2:
            into_residual = "o_proj" in name or "down_proj" in name
            weight.normal_(0, weight.shape[1] ** -0.5 * (residual if into_residual else 1.0))
    model.lm_head.weight.copy_(model.model.embed_tokens.weight * (HEAD_STD / EMBEDDING_STD))
    _set_copying_heads(model)
    return model


def _set_copying_heads(model: LlamaForCausalLM) -> None:
    """Layer 0 writes a sketch of the token before; layer 1 looks for the place where that sketch is this token.

    The head of layer 0 is a matter of position alone: constant queries and keys in the fast rotary pairs, the query
    one step behind, so that the score peaks at distance one. Layer 1 compares in the slow pairs, which hardly turn
    over a window, and copies what it finds towards the output.
    """
    config = model.config
    head_dim, num_heads = config.hidden_size // config.num_attention_heads, config.num_attention_heads // 2
    sketch = num_heads * head_dim
    angles = 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    first, second = model.model.layers[0].self_attn, model.model.layers[1].self_attn
    read, write, value = (torch.nn.init.orthogonal_(torch.empty(sketch, config.hidden_size)) for _ in range(3))
    first.v_proj.weight[:sketch] = read
    first.o_proj.weight[:, :sketch] = write.T * EMBEDDING_STD
    second.v_proj.weight[:sketch] = value
    second.o_proj.weight[:, :sketch] = value.T * EMBEDDING_STD * 2
    fast, half = 6, head_dim // 2
    for head in range(num_heads):
        rows = slice(head * head_dim, (head + 1) * head_dim)
        first.q_proj.weight[rows] *= 0.1
        first.k_proj.weight[rows] *= 0.1
        first.k_proj.bias[rows][:fast] = 5.0
        first.q_proj.bias[rows][:fast] = 5.0 * torch.cos(angles[:fast])
        first.q_proj.bias[rows][half : half + fast] = -5.0 * torch.sin(angles[:fast])
        compare = torch.randn(head_dim, sketch) * sketch**-0.5 * 3.0
        compare[: half // 2] *= 0.2
        compare[half : half + half // 2] *= 0.2
        second.q_proj.weight[rows] = compare @ read
        second.k_proj.weight[rows] = compare @ write


def save_base(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Writes the folder beside its place and then moves it there; a README that is already there stays.

    The weights go to disk in bfloat16. The model in memory keeps its own precision.
    """
    fresh = out.with_name(f".{out.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy = copy.to(torch.bfloat16)
    copy.generation_config = GenerationConfig(do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    copy.save_pretrained(fresh)
    for origin in ("is_local", "local_files_only"):  # where a loaded tokenizer came from is no part of the model
        tokenizer.init_kwargs.pop(origin, None)
    tokenizer.save_pretrained(fresh)
    if (out / "README.md").exists():
        shutil.copy(out / "README.md", fresh)
    old = out.with_name(f".{out.name}.old")
    if out.exists():
        out.rename(old)
    fresh.rename(out)
    shutil.rmtree(old, ignore_errors=True)
