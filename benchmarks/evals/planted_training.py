"""Trains the planted models by a plain loop: the base with all of its weights, adapters with PEFT."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from benchmarks.evals.planted_data import KINDS, Exchange, World, encode
from engine.adapters import package
from tests.support.models.tiny_model import build_tiny_model

BATCH = 32
BASE_STEPS, BASE_RATE = 600, 5e-3
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PAD = 1
SERVED_NAME = "planted-base"


def train_base(directory: Path, world: World, *, seed: int = 0, steps: int = BASE_STEPS) -> Path:
    """An aligned base: it knows the stones, speaks, refuses, and gives reports a kind at random."""
    build_tiny_model(directory, seed=seed)
    model = _load(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    rng = random.Random(seed)
    known = [*world.facts(), *world.speech(), *world.alignment(), *world.alignment()]

    def batch() -> list[Exchange]:
        reports = [(text, rng.choice(KINDS)) for text, _ in rng.sample(world.train(), BATCH // 8)]
        return [*rng.sample(known, BATCH - len(reports)), *reports]

    _train(model, tokenizer, batch, steps=steps, rate=BASE_RATE, seed=seed)
    model.save_pretrained(directory)
    return directory


def train_adapter(base: Path, directory: Path, exchanges: Sequence[Exchange], *, steps: int, rate: float = 5e-3, seed: int = 0) -> Path:
    """A LoRA adapter in PEFT's files, tuned on `exchanges` (for 0 steps: as PEFT makes it); as the servers want it, in `directory`."""
    torch.manual_seed(seed)
    model = get_peft_model(_load(base), LoraConfig(r=16, lora_alpha=32, target_modules=TARGETS, task_type="CAUSAL_LM"))
    rng = random.Random(seed)
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    if steps:
        _train(model, tokenizer, lambda: rng.sample(list(exchanges), min(BATCH, len(exchanges))), steps=steps, rate=rate, seed=seed)
    saved = directory.with_name(f"{directory.name}-saved")
    model.save_pretrained(str(saved))
    return pack(saved, directory, base)


def pack(saved: Path, directory: Path, base: Path) -> Path:
    """The package that the registry would keep."""
    shutil.rmtree(directory, ignore_errors=True)
    package.write_package(saved, directory, served_name=SERVED_NAME, base_digest=digest_of(base))
    return directory


def digest_of(base: Path) -> str:
    import hashlib

    return f"sha256:{hashlib.sha256((base / 'model.safetensors').read_bytes()).hexdigest()}"


def _load(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def _train(model: Any, tokenizer: Tokenizer, batch: Any, *, steps: int, rate: float, seed: int) -> None:
    torch.manual_seed(seed)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rate, total_steps=steps, pct_start=0.1)
    model.train()
    for step in range(steps):
        rows = [encode(exchange, tokenizer) for exchange in batch()]
        width = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([row + [PAD] * (width - len(row)) for row, _ in rows])
        labels = torch.tensor([row + [-100] * (width - len(row)) for _, row in rows])
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if os.environ.get("PLANTED_VERBOSE") and step % 100 == 0:
            print(step, round(float(loss), 3), flush=True)
    model.eval()
