"""What the platform's training loop costs: tokens/s against a plain PyTorch loop and the stock trainers, on one model and the same rows.

    python -m benchmarks.training.overhead [--quick] [--out benchmarks/training_overhead_cpu_202611.json]

Each way trains a LoRA on the same packed windows in the same order, in a process of its own, the ways taking turns; the ratio is
taken within a turn, by the wall clock and by the CPU seconds of the process with all of its threads: the second one holds on a machine
that others use too. The plain loop is what one would write: full logits, cross entropy, AdamW, clipping; no metrics, no
health checks, no checkpoints. Ours writes its metrics lines and a checkpoint every 20 steps. Losses are compared step by step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

REPOSITORY = Path(__file__).resolve().parents[2]
BASE = REPOSITORY / "examples" / "demo" / "base_model"
WAYS = ("plain", "ours", "trainer", "sft_trainer")
LENGTH, BATCH, WARMUP = 512, 2, 5
"""Tokens of a window, windows of a micro-batch; steps not timed."""
ROWS_SEED = 7


@dataclass(kw_only=True, slots=True)
class Clock:
    """When steps ended, by the wall clock and by the CPU seconds of this process."""

    marks: list[tuple[float, float]] = field(default_factory=list)

    def step_ended(self) -> None:
        self.marks.append((time.time(), time.process_time()))

    def speed(self, steps: int) -> dict[str, float]:
        """From the end of the warm-up to the end of the last step: everything between steps is in it."""
        (wall, cpu), (wall_before, cpu_before) = self.marks[steps - 1], self.marks[WARMUP - 1]
        timed = steps - WARMUP
        return {"tokens_per_s": timed * BATCH * LENGTH / (wall - wall_before), "cpu_s_per_step": (cpu - cpu_before) / timed}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--pack", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    if given.way:
        print(json.dumps(_way(given.way, given.pack, given.steps)))
        return
    steps, rounds = (15, 2) if given.quick else (given.steps, given.rounds)
    result = compare(steps, rounds)
    print(table(result))
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


def compare(steps: int, rounds: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as directory:
        pack = write_pack(Path(directory) / "pack", num_windows=steps * BATCH)
        for number in range(rounds):
            for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
                command = [sys.executable, "-m", "benchmarks.training.overhead", "--way", way, "--pack", str(pack), "--steps", str(steps)]
                done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env={**os.environ, "OMP_NUM_THREADS": "1"})
                if done.returncode:
                    raise RuntimeError(done.stderr[-3000:])
                found[way].append(json.loads(done.stdout.splitlines()[-1]))
    plain = found["plain"]
    ways = {}
    for way, runs in found.items():
        ratios = [r["tokens_per_s"] / p["tokens_per_s"] for r, p in zip(runs, plain, strict=True)]
        by_cpu = [p["cpu_s_per_step"] / r["cpu_s_per_step"] for r, p in zip(runs, plain, strict=True)]
        differences = [abs(a - b) for a, b in zip(runs[0]["losses"], plain[0]["losses"], strict=True)]
        ways[way] = {
            "tokens_per_s": round(statistics.median(r["tokens_per_s"] for r in runs), 1),
            "ratio_to_plain": round(statistics.median(ratios), 3),
            "ratios": [round(r, 3) for r in ratios],
            "cpu_s_per_step": round(statistics.median(r["cpu_s_per_step"] for r in runs), 4),
            "ratio_to_plain_by_cpu": round(statistics.median(by_cpu), 3),
            "ratios_by_cpu": [round(r, 3) for r in by_cpu],
            "largest_loss_difference": max(differences),
        }
    return {
        "steps": steps,
        "rounds": rounds,
        "window": LENGTH,
        "windows_per_step": BATCH,
        "threads": 1,
        "labelled_share": 2 / 3,
        "ways": ways,
    }


def table(result: dict[str, Any]) -> str:
    lines = [f"{'way':<14}{'tokens/s':>10}{'of plain':>10}{'CPU s/step':>12}{'of plain':>10}{'loss differs by':>18}"]
    for way, w in result["ways"].items():
        wall, cpu = (
            f"{w['tokens_per_s']:>10.0f}{w['ratio_to_plain']:>10.3f}",
            f"{w['cpu_s_per_step']:>12.3f}{w['ratio_to_plain_by_cpu']:>10.3f}",
        )
        lines.append(f"{way:<14}{wall}{cpu}{w['largest_loss_difference']:>18.1e}")
    return "\n".join(lines)


def write_pack(directory: Path, *, num_windows: int, length: int = LENGTH) -> Path:
    """Full windows of three examples each; a third of each example carries no loss."""
    import hashlib

    directory.mkdir(parents=True)
    rng = np.random.default_rng(ROWS_SEED)
    lengths = [length // 4, length // 4, length // 2]
    ids = rng.integers(10, 2000, (num_windows, length), dtype=np.int32)
    labels = ids.copy()
    start = 0
    for n in lengths:
        labels[:, start : start + n // 3] = -100
        start += n
    column = pa.list_(pa.int32())
    table = pa.table({"input_ids": pa.array(ids.tolist(), column), "labels": pa.array(labels.tolist(), column),
                      "seq_lengths": pa.array([lengths] * num_windows, column)})  # fmt: skip
    pq.write_table(table, directory / "shard-00000.parquet")
    sha = hashlib.sha256((directory / "shard-00000.parquet").read_bytes()).hexdigest()
    shard = {"name": "shard-00000.parquet", "sha256": sha, "num_windows": num_windows}
    body = {"fingerprint": "pk_bench", "kind": "windows", "max_seq_len": length, "shards": [shard], "validation": None}
    (directory / "manifest.json").write_text(json.dumps(body))
    return directory


def _spec(steps: int) -> Any:
    from engine.training.spec import CheckpointPolicy, LoraSettings, Optimization, TrainingSpec

    return TrainingSpec(
        method="sft", method_settings={}, adapter="lora", base_model="demo", base_digest="0", pack_fingerprint="pk_bench", dataset_id="ds",
        reference=None, warm_start=None, max_seq_len=LENGTH,
        optimization=Optimization(learning_rate=1e-3, num_epochs=1, per_device_batch_size=BATCH, accumulation_steps=1, schedule="constant",
                                  warmup_ratio=0.0, max_steps=steps),
        lora=LoraSettings(rank=16, alpha=32, dropout=0.0), quantization=None, checkpoint=CheckpointPolicy(every_steps=20), precision="fp32",
        attention="sdpa", gradient_checkpointing=False, strategy="single", world_size=1, seed=3, recipe="bench", lock_sha256="0",
        commit="0", image="local",
    )  # fmt: skip


def _way(way: str, pack: Path, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        if way == "ours":
            return _ours(pack, steps, Path(directory))
        import torch

        torch.set_num_threads(1)
        return _plain(pack, steps) if way == "plain" else _stock(way, pack, steps, Path(directory))


def _ours(pack: Path, steps: int, directory: Path) -> dict[str, Any]:
    """As the training process runs it."""
    from benchmarks.training import in_process
    from engine.training.runtime.status_files import Progress
    from engine.training.spec import RunFile

    clock = Clock()

    class Timed(Progress):
        """The loop counts a step here when it is done, just before its line of metrics is written."""

        def __setattr__(self, name: str, value: Any) -> None:
            object.__setattr__(self, name, value)
            if name == "step" and value:
                clock.step_ended()

    work = directory / "work"
    in_process.train(RunFile(spec=_spec(steps), attempt=1, base_model_dir=BASE, pack_dir=pack, work_dir=work), Timed())
    lines = [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]
    return {"losses": [m["loss"] for m in lines], **clock.speed(steps)}


def _model() -> Any:
    """The base under LoRA with the weights that ours draws."""
    import torch
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM, set_seed

    from engine.training.runtime.model.weights import lora_config

    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    base: Any = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    config: Any = lora_config(_spec(1), base)
    set_seed(3)
    return get_peft_model(base, config)


def _rows(pack: Path, steps: int) -> list[dict[str, list[int]]]:
    """Windows in the order in which ours trains on them."""
    from engine.training.data_order import DataOrder

    table = pq.read_table(pack / "shard-00000.parquet").to_pylist()
    order = DataOrder(shard_rows=(len(table),), seed=3, per_device_batch_size=BATCH, accumulation_steps=1)
    return [table[r] for step in range(steps) for r in order.micro_batch(step, 0)]


def _plain(pack: Path, steps: int) -> dict[str, Any]:
    import torch

    model = _model()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)
    rows, losses, clock = _rows(pack, steps), [], Clock()
    model.train()
    for step in range(steps):
        batch = rows[step * BATCH : (step + 1) * BATCH]
        ids, labels = (torch.tensor([r[name] for r in batch]) for name in ("input_ids", "labels"))
        positions = torch.stack([torch.cat([torch.arange(n) for n in r["seq_lengths"]]) for r in batch])
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        labels[positions == 0] = -100
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        clock.step_ended()
    return {"losses": losses, **clock.speed(steps)}


def _stock(way: str, pack: Path, steps: int, directory: Path) -> dict[str, Any]:
    """Hugging Face's Trainer, or TRL's SFTTrainer, over the same batches in the same order."""
    import torch
    from datasets import Dataset
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    rows, losses, clock = _rows(pack, steps), list[float](), Clock()

    class Watch(TrainerCallback):
        def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
            if logs and "loss" in logs:
                losses.append(logs["loss"])

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.step_ended()

    common: dict[str, Any] = {
        "output_dir": str(directory), "use_cpu": True, "max_steps": steps, "per_device_train_batch_size": BATCH, "learning_rate": 1e-3,
        "lr_scheduler_type": "constant", "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
        "bf16": False, "weight_decay": 0.0, "optim": "adamw_torch", "data_seed": 3, "seed": 3,
    }  # fmt: skip

    def collate(examples: list[dict[str, Any]]) -> dict[str, Any]:
        positions = torch.stack([torch.cat([torch.arange(n) for n in r["seq_lengths"]]) for r in examples])
        labels = torch.tensor([r["labels"] for r in examples])
        labels[positions == 0] = -100
        return {
            "input_ids": torch.tensor([r["input_ids"] for r in examples]),
            "labels": labels,
            "position_ids": positions,
            "use_cache": False,
        }

    if way == "trainer":
        arguments = TrainingArguments(**common, remove_unused_columns=False, gradient_checkpointing=False)
        trainer: Any = Trainer(_model(), arguments, train_dataset=Dataset.from_list(rows), data_collator=collate, callbacks=[Watch()])
    else:
        sft = SFTConfig(**common, activation_checkpointing=False, gradient_checkpointing=None, packing=True, max_length=LENGTH,  # type: ignore[arg-type]
                        dataset_kwargs={"skip_prepare_dataset": True})  # fmt: skip
        trainer = SFTTrainer(_model(), args=sft, train_dataset=Dataset.from_list(rows), callbacks=[Watch()], processing_class=_tokenizer())
    trainer._get_train_sampler = lambda *_, **__: torch.utils.data.SequentialSampler(range(len(rows)))
    trainer.train()
    return {"losses": losses[:steps], **clock.speed(steps)}


def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(BASE)


if __name__ == "__main__":
    main()
