"""Trains the base model from scratch on generated text, with no download.

    python -m examples.demo.pretrain --out DIR

The same seed, step count and library versions on the same kind of CPU give the same bytes. Three stages:

1. copying: runs of random tokens, each run repeated; a model this small finds its copying heads there or never;
2. text in windows of 256 tokens, a copying batch now and then in the first half;
3. the last part of the text in windows of 1,024, while the learning rate falls.

Tokens of a system or user turn count ``PROMPT_WEIGHT`` in the loss: what a customer writes next is mostly chance.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from examples.demo.base import MAX_POSITIONS, make_config, make_model, save_base, train_tokenizer
from examples.demo.corpus import documents

PROMPT_WEIGHT = 0.3
NUM_TOKENIZER_DOCUMENTS = 12_000
FIRST_TEXT_TOKEN = 300
"""Random copying runs use tokens from here on: 4 control tokens and 256 bytes come first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    steps: int = 1400
    batch_tokens: int = 4096
    window: int = 256
    long_share: float = 0.06
    """Share of the steps, the last ones, in windows of ``MAX_POSITIONS``."""
    copy_steps: int = 100
    matrix_lr: float = 0.02
    """Muon, for the matrices inside the layers; the rate of its author's own recipe."""
    other_lr: float = 3e-3
    """AdamW, for embeddings, head and norms."""
    warmup_steps: int = 40
    decay_share: float = 0.5
    """Share of the steps, the last ones, over which the rate falls linearly to zero."""
    seed: int = 0
    threads: int = 1

    def lr_factor(self, step: int) -> float:
        left = (self.steps - step) / (self.steps * self.decay_share)
        return min(1.0, (step + 1) / self.warmup_steps, max(0.005, left))

    def is_long(self, step: int) -> bool:
        return step >= self.steps * (1 - self.long_share)

    def is_copying(self, step: int) -> bool:
        return step < self.copy_steps or (step < self.steps // 2 and step % 20 == 0)


def prompt_weights(ids: np.ndarray, tokenizer: PreTrainedTokenizerFast) -> np.ndarray:
    """``PROMPT_WEIGHT`` inside system and user turns, 1 elsewhere: assistant turns, end tokens, plain text."""
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assistant = tokenizer("assistant", add_special_tokens=False)["input_ids"][0]
    positions = np.arange(len(ids))
    next_id = np.append(ids[1:], -1)
    opens = np.maximum.accumulate(np.where((ids == start) & (next_id != assistant), positions, -1))
    closes = np.maximum.accumulate(np.where(ids == end, positions, -1))
    return np.where(opens > closes, PROMPT_WEIGHT, 1.0).astype(np.float32)


def token_stream(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Endless ``(ids, weights)`` of 2,000 documents each."""
    texts = documents(seed)
    while True:
        encoded = tokenizer.backend_tokenizer.encode_batch([next(texts) for _ in range(2000)], add_special_tokens=False)
        ids = np.concatenate([np.asarray(item.ids) for item in encoded])
        yield ids, prompt_weights(ids, tokenizer)


class TextBatches:
    """Hands out consecutive windows of the stream, ``(ids, weights)``, both of shape (batch, window + 1)."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._stream = token_stream(tokenizer, seed)
        self._ids, self._weights = next(self._stream)

    def take(self, num_rows: int, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        need = num_rows * (window + 1)
        while len(self._ids) < need:
            ids, weights = next(self._stream)
            self._ids, self._weights = np.concatenate([self._ids, ids]), np.concatenate([self._weights, weights])
        ids, weights = self._ids[:need], self._weights[:need]
        self._ids, self._weights = self._ids[need:], self._weights[need:]
        return torch.from_numpy(ids).view(num_rows, -1), torch.from_numpy(weights).view(num_rows, -1)


def copying_batch(num_rows: int, window: int, vocab_size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row repeats one random run of 8 to 64 tokens; the first pass over the run counts nothing."""
    period = int(torch.randint(8, 65, (1,), generator=generator))
    run = torch.randint(FIRST_TEXT_TOKEN, vocab_size, (num_rows, period), generator=generator)
    ids = run.repeat(1, window // period + 2)[:, : window + 1]
    weights = (torch.arange(window + 1) > period).float().expand(num_rows, -1)
    return ids, weights


def make_optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    inner, other = [], []
    for name, weight in model.named_parameters():
        (inner if weight.ndim == 2 and ".layers." in name else other).append(weight)
    return [
        torch.optim.Muon(inner, lr=recipe.matrix_lr, weight_decay=0.01),
        torch.optim.AdamW(other, lr=recipe.other_lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def weighted_loss(model: LlamaForCausalLM, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    losses = cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    wanted = weights[:, 1:].flatten()
    return (losses * wanted).sum() / wanted.sum()


@torch.no_grad()
def copy_accuracy(model: LlamaForCausalLM, vocab_size: int) -> float:
    """Share of right next tokens on the second pass over random runs of 24 tokens: the copying heads, alone."""
    run = torch.randint(FIRST_TEXT_TOKEN, vocab_size, (32, 24), generator=torch.Generator().manual_seed(7))
    guesses = model(input_ids=torch.cat([run, run], 1), use_cache=False).logits[:, 24:-1].argmax(-1)
    return (guesses == run[:, 1:]).float().mean().item()


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, recipe: Recipe, *, out: Path, save_every: int) -> None:
    """The whole run; writes the folder every ``save_every`` steps and at the end."""
    batches = TextBatches(tokenizer, recipe.seed)
    generator = torch.Generator().manual_seed(recipe.seed)
    optimizers = make_optimizers(model, recipe)
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    loss_fn = torch.compile(weighted_loss)
    losses, began = list[float](), time.monotonic()
    for step in range(recipe.steps):
        window = MAX_POSITIONS if recipe.is_long(step) else recipe.window
        num_rows = recipe.batch_tokens // window
        if recipe.is_copying(step):
            ids, weights = copying_batch(num_rows, window, model.config.vocab_size, generator)
        else:
            ids, weights = batches.take(num_rows, window)
        loss = loss_fn(model, ids.contiguous(), weights.contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, group_rates in zip(optimizers, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, group_rates, strict=True):
                group["lr"] = rate * recipe.lr_factor(step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            accuracy, seconds = copy_accuracy(model, model.config.vocab_size), time.monotonic() - began
            print(f"step {step + 1} loss {sum(losses[-50:]) / 50:.3f} copying {accuracy:.2f} {seconds:.0f} s", flush=True)
        if (step + 1) % save_every == 0 and step + 1 < recipe.steps:
            save_base(model, tokenizer, out)
    save_base(model, tokenizer, out)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train the demo's base model from scratch.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model; replaced as a whole")
    parser.add_argument("--steps", type=int, default=Recipe().steps)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=500, help="steps between usable folders")
    args = parser.parse_args(argv)
    recipe = Recipe(steps=args.steps, seed=args.seed, threads=args.threads)
    torch.set_num_threads(recipe.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(recipe.seed)
    texts = documents(recipe.seed + 1_000_000)
    tokenizer = train_tokenizer([next(texts) for _ in range(NUM_TOKENIZER_DOCUMENTS)])
    model = make_model(make_config(tokenizer))
    print(f"copying at the start: {copy_accuracy(model, model.config.vocab_size):.2f}", flush=True)
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)
    train(model, tokenizer, recipe, out=args.out, save_every=args.save_every)


if __name__ == "__main__":
    main()
