"""Trains the base model from scratch on generated text, with no download.

    python -m examples.demo.pretrain --out DIR

The same seed, steps and library versions on the same kind of CPU give the same bytes. Three stages:

1. general: first runs of random tokens, each run repeated, which is where the copying heads settle; then the general
   mix of the corpus in windows of 256 tokens, a copying batch now and then;
2. support: more questions and records about support messages, and classes to be told from their evidence;
3. cooling: the same text while the learning rate falls to zero, the last steps in windows of 1,024. Most of what it learns
   about topics it learns at low rates.

Between the stages the weights go through the folder on disk, so that ``--start FOLDER --stage 2`` goes on from there.
Tokens of a system or user turn count less in the loss: what a customer writes next is mostly chance.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.demo.base import MAX_POSITIONS, VOCAB_SIZE, make_config, make_model, save_base, train_tokenizer
from examples.demo.corpus import GENERAL, SUPPORT, Mix, documents, message

WINDOW = 256
BATCH_TOKENS = 4096
WARMUP_STEPS = 40
NUM_TOKENIZER_DOCUMENTS, NUM_TOKENIZER_MESSAGES = 4_000, 24_000
"""What the tokenizer is trained on: mostly support messages, so that the words of their topics are whole tokens."""
FIRST_TEXT_TOKEN = 300
"""Random copying runs use tokens from here on: 4 control tokens and 256 bytes come first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    name: str
    mix: Mix
    steps: int
    decay_from: int
    """Step from which the rate falls, linearly, to be zero at ``decay_to``."""
    decay_to: int
    matrix_lr: float
    """Muon, for the matrices inside the layers; its author's recipe has 0.02."""
    other_lr: float
    """AdamW, for embeddings, head and norms."""
    prompt_weight: float
    """Weight in the loss of a token in a system or user turn; others count 1."""
    copy_steps: int = 0
    """First steps that are copying batches only; up to ``decay_from`` every twentieth is one more."""
    long_steps: int = 0
    """Last steps, in windows of ``MAX_POSITIONS``."""
    seed: int = 0

    def lr_factor(self, step: int) -> float:
        left = (self.decay_to - step) / (self.decay_to - self.decay_from)
        return min(1.0, (step + 1) / WARMUP_STEPS, max(0.005, left))

    def is_long(self, step: int) -> bool:
        return step >= self.steps - self.long_steps

    def is_copying(self, step: int) -> bool:
        return step < self.copy_steps or (self.copy_steps > 0 and step < self.decay_from and step % 20 == 0)


STAGES = (
    Stage(
        name="general", mix=GENERAL, steps=600, decay_from=600, decay_to=1200, matrix_lr=0.02, other_lr=3e-3, prompt_weight=0.3,
        copy_steps=100,
    ),
    Stage(
        name="support", mix=SUPPORT, steps=800, decay_from=400, decay_to=1600, matrix_lr=0.012, other_lr=2e-3, prompt_weight=0.1, seed=1,
    ),
    Stage(
        name="cooling", mix=SUPPORT, steps=400, decay_from=0, decay_to=400, matrix_lr=0.008, other_lr=1.33e-3, prompt_weight=0.1,
        long_steps=10, seed=2,
    ),
)  # fmt: skip


def token_weights(ids: np.ndarray, tokenizer: PreTrainedTokenizerFast, prompt_weight: float) -> np.ndarray:
    """``prompt_weight`` inside system and user turns, 1 elsewhere: assistant turns, end tokens, plain text."""
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assistant = tokenizer("assistant", add_special_tokens=False)["input_ids"][0]
    positions = np.arange(len(ids))
    next_id = np.append(ids[1:], -1)
    opens = np.maximum.accumulate(np.where((ids == start) & (next_id != assistant), positions, -1))
    closes = np.maximum.accumulate(np.where(ids == end, positions, -1))
    return np.where(opens > closes, prompt_weight, 1.0).astype(np.float32)


def token_stream(tokenizer: PreTrainedTokenizerFast, stage: Stage) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Endless ``(ids, weights)`` of 2,000 documents each."""
    texts = documents(stage.seed, stage.mix)
    while True:
        encoded = tokenizer.backend_tokenizer.encode_batch([next(texts) for _ in range(2000)], add_special_tokens=False)
        ids = np.concatenate([np.asarray(item.ids) for item in encoded])
        yield ids, token_weights(ids, tokenizer, stage.prompt_weight)


class TextBatches:
    """Hands out consecutive windows of the stream, ``(ids, weights)``, both of shape (batch, window + 1)."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, stage: Stage) -> None:
        self._stream = token_stream(tokenizer, stage)
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


def make_optimizers(model: LlamaForCausalLM, stage: Stage) -> list[torch.optim.Optimizer]:
    inner, other = [], []
    for name, weight in model.named_parameters():
        (inner if weight.ndim == 2 and ".layers." in name else other).append(weight)
    return [
        torch.optim.Muon(inner, lr=stage.matrix_lr, weight_decay=0.01),
        torch.optim.AdamW(other, lr=stage.other_lr, betas=(0.9, 0.95), weight_decay=0.0),
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


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, stage: Stage, *, out: Path, save_every: int) -> None:
    """One stage; writes the folder every ``save_every`` steps and at the end."""
    batches = TextBatches(tokenizer, stage)
    generator = torch.Generator().manual_seed(stage.seed)
    optimizers = make_optimizers(model, stage)
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    model.train()
    compiled = torch.compile(weighted_loss)
    losses, began = list[float](), time.monotonic()
    for step in range(stage.steps):
        window = MAX_POSITIONS if stage.is_long(step) else WINDOW
        num_rows = BATCH_TOKENS // window
        if stage.is_copying(step):
            ids, weights = copying_batch(num_rows, window, model.config.vocab_size, generator)
        else:
            ids, weights = batches.take(num_rows, window)
        loss_fn = weighted_loss if stage.is_long(step) else compiled  # compiling for another window takes longer than its few steps
        loss = loss_fn(model, ids.contiguous(), weights.contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, group_rates in zip(optimizers, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, group_rates, strict=True):
                group["lr"] = rate * stage.lr_factor(step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if (step + 1) % 50 == 0:
            accuracy, seconds = copy_accuracy(model, model.config.vocab_size), time.monotonic() - began
            print(f"{stage.name} {step + 1} loss {sum(losses[-50:]) / 50:.3f} copying {accuracy:.2f} {seconds:.0f} s", flush=True)
        if (step + 1) % save_every == 0 and step + 1 < stage.steps:
            save_base(model, tokenizer, out)
    save_base(model, tokenizer, out)


def new_base(seed: int) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The tokenizer, trained on text that the model is not, and untrained weights."""
    torch.manual_seed(seed)
    texts = documents(seed + 1_000_000)
    rng = random.Random(f"tokenizer/{seed}")
    tokenizer = train_tokenizer(
        [
            *(next(texts) for _ in range(NUM_TOKENIZER_DOCUMENTS)),
            *(message(rng).text for _ in range(NUM_TOKENIZER_MESSAGES)),
        ]
    )
    return make_model(make_config(tokenizer)), tokenizer


def load_base(folder: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train the demo's base model from scratch.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model; replaced as a whole")
    parser.add_argument("--start", type=Path, help="folder that an earlier stage left; goes with --stage")
    parser.add_argument("--stage", type=int, default=1, choices=range(1, len(STAGES) + 1), help="stage to begin with")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=200, help="steps between usable folders")
    args = parser.parse_args(argv)
    if (args.start is None) != (args.stage == 1):
        parser.error("--start FOLDER and --stage 2 or later go together")
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    model, tokenizer = load_base(args.start) if args.start else new_base(args.seed)
    print(f"{model.num_parameters():,} parameters; copying {copy_accuracy(model, VOCAB_SIZE):.2f} before training", flush=True)
    for stage in STAGES[args.stage - 1 :]:
        train(model, tokenizer, replace(stage, seed=stage.seed + args.seed), out=args.out, save_every=args.save_every)
        model, tokenizer = load_base(args.out)


if __name__ == "__main__":
    main()
