"""Fine-tunes the base on the tickets with several seeds, and prints the scores of each.

    python -m examples.demo.measure_seeds --base examples/demo/base_model --seeds 0 1 2 3 4

It trains as the platform does: windows packed with mixed rows, flattened so that positions restart and no ticket sees its
neighbour, loss on the assistant tokens only, a LoRA adapter on every linear layer, float32 on the CPU. Recipes are
tuned with ``--split dev``; the figures of RESULTS.md are of the holdout.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer

from engine.data.packs.best_fit import mixed_fit
from ft_client.demo.tickets import KEYS, Ticket, make_dataset, to_row

IGNORED = -100
MAX_NEW_TOKENS = 64
"""The longest record of the task takes fewer than 50 tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FineTune:
    """The recommended recipe; RESULTS.md says how each value was found."""

    window: int = 512
    """Tokens of a packed window; about five tickets."""
    windows_per_batch: int = 1
    """Windows of an optimizer step: about five tickets."""
    per_device_batch_size: int = 1
    """Windows of a forward pass. Flattened windows attend in one square, so one at a time costs least on a CPU."""
    learning_rate: float = 1.5e-3
    """High for a LoRA: the usual rates are for models a thousand times wider."""
    schedule: str = "linear"
    warmup_steps: int = 38
    epochs: float = 1.25
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    adam_beta2: float = 0.99
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


def encode(tokenizer: Any, ticket: Ticket) -> tuple[list[int], list[int]]:
    """Token ids of the chat and labels that keep only what the template marks as the assistant's."""
    encoded = tokenizer.apply_chat_template(to_row(ticket)["messages"], return_dict=True, return_assistant_tokens_mask=True)
    ids, mask = encoded["input_ids"], encoded["assistant_masks"]
    return ids, [token if kept else IGNORED for token, kept in zip(ids, mask, strict=True)]


def pack(examples: Sequence[tuple[list[int], list[int]]], window: int) -> Dataset:
    """Fill windows as the platform does: large examples first, the others in an order that is the same for every seed of a training."""
    windows = mixed_fit([len(ids) for ids, _ in examples], window, seed="examples/demo")
    members = [windows[w].tolist() for w in range(len(windows))]
    return Dataset.from_dict(
        {
            "input_ids": [[token for i in group for token in examples[i][0]] for group in members],
            "labels": [[label for i in group for label in examples[i][1]] for group in members],
            "seq_lengths": [[len(examples[i][0]) for i in group] for group in members],
        }
    )


def make_trainer(base: Path, train: Dataset, recipe: FineTune, *, seed: int, out: str) -> SFTTrainer:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = SFTConfig(
        output_dir=out,
        seed=seed,
        data_seed=seed,
        max_length=recipe.window,
        packing=True,
        dataset_kwargs={"skip_prepare_dataset": True},
        per_device_train_batch_size=recipe.per_device_batch_size,
        gradient_accumulation_steps=recipe.windows_per_batch // recipe.per_device_batch_size,
        learning_rate=recipe.learning_rate,
        lr_scheduler_type=recipe.schedule,
        warmup_steps=recipe.warmup_steps,
        num_train_epochs=recipe.epochs,
        adam_beta2=recipe.adam_beta2,
        weight_decay=recipe.weight_decay,
        max_grad_norm=recipe.max_grad_norm,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=25,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    adapter = LoraConfig(
        r=recipe.lora_r,
        lora_alpha=recipe.lora_alpha,
        lora_dropout=recipe.lora_dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    tokenizer = AutoTokenizer.from_pretrained(base)
    return SFTTrainer(model=model, args=config, train_dataset=train, processing_class=tokenizer, peft_config=adapter)


def parse(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


@torch.no_grad()
def answers(model: Any, tokenizer: Any, tickets: Sequence[Ticket], batch_size: int = 60) -> list[str]:
    """Greedy answers, batched by length, padded on the left."""
    model.eval()
    prompts = [
        tokenizer.apply_chat_template(to_row(ticket)["messages"][:2], add_generation_prompt=True, tokenize=False) for ticket in tickets
    ]
    order, found = sorted(range(len(prompts)), key=lambda i: len(prompts[i])), [""] * len(prompts)
    for at in range(0, len(order), batch_size):
        chosen = order[at : at + batch_size]
        batch = tokenizer([prompts[i] for i in chosen], padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
        tokens = model.generate(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False, use_cache=True,
        )  # fmt: skip
        for i, ids in zip(chosen, tokens[:, batch["input_ids"].shape[1] :], strict=True):
            found[i] = tokenizer.decode(ids, skip_special_tokens=True)
    return found


def score(found: Sequence[str], tickets: Sequence[Ticket]) -> dict[str, float]:
    """Exact match of the parsed record: all, seen and unseen templates; valid JSON; and each key alone."""
    parsed = [parse(text) for text in found]
    right = [record == ticket.record() for record, ticket in zip(parsed, tickets, strict=True)]
    seen = [hit for hit, ticket in zip(right, tickets, strict=True) if not ticket.unseen]
    unseen = [hit for hit, ticket in zip(right, tickets, strict=True) if ticket.unseen]
    objects = [record if isinstance(record, dict) else {} for record in parsed]
    figures = {"em": right, "seen": seen, "unseen": unseen, "valid_json": [isinstance(r, dict) for r in parsed]}
    for key in KEYS:
        figures[key] = [record.get(key, 0) == ticket.record()[key] for record, ticket in zip(objects, tickets, strict=True)]
    return {name: round(sum(hits) / max(1, len(hits)), 4) for name, hits in figures.items()}


def measure(base: Path, recipe: FineTune, *, seed: int, train: Sequence[Ticket], test: Sequence[Ticket]) -> dict[str, float]:
    """One fine-tuning run and its scores; ``train_s`` and ``train_cpu_s`` are of the training loop alone."""
    set_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    packed = pack([encode(tokenizer, ticket) for ticket in train], recipe.window)
    with tempfile.TemporaryDirectory() as out:
        trainer = make_trainer(base, packed, recipe, seed=seed, out=out)
        began, began_cpu = time.monotonic(), time.process_time()
        result = trainer.train()
        train_s, train_cpu_s = time.monotonic() - began, time.process_time() - began_cpu
    began = time.monotonic()
    figures = score(answers(trainer.model, tokenizer, test), test)
    return {
        "seed": seed, **figures, "train_s": round(train_s, 1), "train_cpu_s": round(train_cpu_s, 1),
        "eval_s": round(time.monotonic() - began, 1),
        "steps": result.global_step, "last_loss": _last_loss(trainer),
    }  # fmt: skip


def _last_loss(trainer: SFTTrainer) -> float:
    return [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry][-1]


def measure_base(base: Path, test: Sequence[Ticket]) -> dict[str, float]:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return score(answers(model, AutoTokenizer.from_pretrained(base), test), test)


def table(rows: Sequence[dict[str, float]]) -> str:
    """A Markdown table, one line a seed."""
    names = list(rows[0])
    lines = [" | ".join(names), " | ".join("--" for _ in names), *(" | ".join(str(row[name]) for name in names) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Fine-tune the demo's base over several seeds and score each adapter.")
    parser.add_argument("--base", type=Path, default=Path(__file__).parent / "base_model")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--split", choices=("dev", "holdout"), default="holdout")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    for field in fields(FineTune):
        kind = type(field.default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    recipe = FineTune(**{field.name: getattr(args, field.name) for field in fields(FineTune)})
    train, test = make_dataset(holdout=args.split)
    before = measure_base(args.base, test)
    print(f"base: {json.dumps(before)}", flush=True)
    rows = []
    for seed in args.seeds:
        rows.append(measure(args.base, recipe, seed=seed, train=train, test=test))
        print(json.dumps(rows[-1]), flush=True)
    print(table(rows))
    if args.json:
        report = {"recipe": asdict(recipe), "split": args.split, "threads": args.threads, "base": before, "seeds": rows}
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
