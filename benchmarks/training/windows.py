"""What the choice of windows does to small jobs: held-out loss with and without shorter windows, and with sorted and mixed ones.

    python -m benchmarks.training.windows --data DIR            both comparisons, three datasets, three seeds (about 15 minutes on one core)
    python -m benchmarks.training.windows --data DIR --quick    one dataset and seed, printed only

``--runs FILE`` keeps each finished run as a line of FILE, and does not repeat those that it holds.

DIR holds banking77_train.csv (CC BY 4.0) and gsm8k_train.jsonl (MIT); tickets are the demo's. The base is demo-llama-3m with the recipe
any-lora at the demo's learning rate, so that windows have 1,024 tokens, the base's context, and nothing but the windows differs within a
comparison. Held-out loss is per trained token over rows that are in no window of the training part; packing is exact, so it does not
depend on how the held-out rows are packed. Another seed draws other rows of the dataset, another order, other adapter weights and another
mix.
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from benchmarks.datasets.measure import machine, versions
from benchmarks.training import in_process
from core.base_models import Catalogue
from core.durable_files import sha256_of
from core.typed_json import from_json
from engine.data.packs import best_fit
from engine.data.packs.build import PackManifest, PackSettings, build_pack
from engine.data.packs.windows import write_table
from engine.data.schema import Example
from engine.data.shapes import to_example
from engine.data.tokens.chat_tokenizer import ChatTokenizer
from engine.training.hyperparameters import ModelFacts, PackFacts, min_windows, plan, resolve
from engine.training.spec import RunFile
from ft_client.demo.tickets import make_split, to_row

RESULTS = Path(__file__).resolve().parents[1] / f"training_windows_cpu_{time.strftime('%Y%m')}.json"
SEEDS = (1, 2, 3)
HELD_OUT = 64
"""Rows: the trainer validates on all of them."""
ROWS: Mapping[str, tuple[int, int]] = {"banking77": (450, 1200), "gsm8k": (120, 300), "tickets": (240, 600)}
"""By dataset: rows of the small job, whose windows get shorter, and of the larger one, whose windows are sorted or mixed."""
LEARNING_RATE = 1.5e-3
"""Of the recipe demo-llama-3m."""


def _chat(*turns: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in zip(("user", "assistant"), turns, strict=True)]}


def rows_of(name: str, data: Path) -> list[Mapping[str, Any]]:
    """The whole dataset as rows of chat."""
    if name == "banking77":
        with (data / "banking77_train.csv").open(newline="") as stream:
            return [_chat(row["text"], row["category"]) for row in csv.DictReader(stream)]
    if name == "gsm8k":
        lines = (json.loads(line) for line in (data / "gsm8k_train.jsonl").read_text().splitlines())
        return [_chat(row["question"], row["answer"]) for row in lines]
    return [to_row(ticket) for ticket in make_split("benchmarks/windows", 2000, seed=11, unseen_share=0.0, exclude=frozenset())]


def drawn(name: str, data: Path, count: int, seed: int, tokenizer: ChatTokenizer, longest: int) -> tuple[list[Example], list[Example]]:
    """`count` rows for training and ``HELD_OUT`` others, none cut."""
    rows = rows_of(name, data)
    random.Random(seed).shuffle(rows)
    found: list[Example] = []
    for number, row in enumerate(rows, start=1):
        example, problems = to_example(row, "chat", row=number)
        assert example is not None, problems
        if tokenizer.count_tokens(example) <= longest:
            found.append(example)
        if len(found) == count + HELD_OUT:
            return found[:count], found[count:]
    raise ValueError(f"{name} has fewer than {count + HELD_OUT} rows of at most {longest} tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way to make windows."""

    comparison: str
    name: str
    shorter: bool = False
    """Windows get shorter until there are enough of them."""
    sorted: bool = False
    """Windows are filled by best-fit decreasing over all rows."""
    large: bool = False
    """The larger sample of rows, with one window to a step."""


VARIANTS = (
    Variant(comparison="length", name="max_seq_len"),
    Variant(comparison="length", name="chosen", shorter=True),
    Variant(comparison="mix", name="sorted", sorted=True, large=True),
    Variant(comparison="mix", name="mixed", large=True),
)


def sort_windows(pack: Path, manifest: PackManifest) -> PackManifest:
    """Fill the training windows of `pack` again by best-fit decreasing, in an order that its fingerprint draws."""
    (file,) = manifest.shards
    table = pq.read_table(pack / str(file["name"]))
    rows = [
        (ids[at : at + n], labels[at : at + n])
        for ids, labels, lengths in zip(*(table[name].to_pylist() for name in ("input_ids", "labels", "seq_lengths")), strict=True)
        for at, n in zip(np.cumsum([0, *lengths[:-1]]).tolist(), lengths, strict=True)
    ]
    windows = best_fit.best_fit_decreasing([len(ids) for ids, _ in rows], manifest.window or 0)
    order = random.Random(manifest.fingerprint).sample(range(len(windows)), len(windows))
    members = [[rows[i] for i in windows[w]] for w in order]
    columns = {
        "input_ids": [[t for ids, _ in held for t in ids] for held in members],
        "labels": [[t for _, labels in held for t in labels] for held in members],
        "seq_lengths": [[len(ids) for ids, _ in held] for held in members],
    }
    write_table(pack / str(file["name"]), table.schema.empty_table().from_pydict(columns, schema=table.schema))
    entry = {"name": file["name"], "sha256": sha256_of(pack / str(file["name"])), "num_windows": len(windows)}
    found = replace(manifest, num_windows=len(windows), shards=[entry])
    found.write(pack)
    return found


def run_one(root: Path, name: str, data: Path, variant: Variant, seed: int) -> dict[str, Any]:
    """Train `variant` on a sample of dataset `name` and return its row of the result."""
    model = Catalogue.load().get("demo-llama-3m")
    assert model.directory is not None
    tokenizer = ChatTokenizer.load(model.directory)
    facts = ModelFacts(**{field: getattr(model, field) for field in ModelFacts.__slots__})
    requested: dict[str, Any] = {"learning_rate": LEARNING_RATE, "n_epochs": 1, "precision": "fp32", "gradient_checkpointing": False}
    if variant.large:
        requested["batch_size"] = 1
    planned = plan(requested, facts, recipe="any-lora")
    train, held_out = drawn(name, data, ROWS[name][variant.large], seed, tokenizer, planned.max_seq_len)
    wanted = min_windows(planned, num_examples=len(train)) if variant.shorter else 0
    settings = PackSettings(max_seq_len=planned.max_seq_len, min_windows=wanted, validation_dataset_id="held-out")
    directory = root / f"{name}-{variant.name}-{seed}"
    manifest = build_pack(train, tokenizer, settings, directory / "pack", dataset_id=f"ds_{name}_{seed}", validation=held_out)
    if variant.sorted:
        manifest = sort_windows(directory / "pack", manifest)
    pack = from_json(PackFacts, asdict(manifest), ignore_unknown=True)
    spec = resolve(planned, pack, seed=seed, lock_sha256="0" * 64, commit="0" * 40)
    run = RunFile(spec=spec, attempt=1, base_model_dir=model.directory, pack_dir=directory / "pack", work_dir=directory / "work")
    began = time.process_time()
    in_process.train(run)
    lines = [json.loads(line) for line in (run.work_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    per_step = _trained_per_step(directory / "pack", manifest, spec.rows_per_step)
    return {
        "comparison": variant.comparison, "dataset": name, "variant": variant.name, "seed": seed, "rows": len(train),
        "window": manifest.window, "windows": manifest.num_windows, "fill": manifest.fill, "steps": len(losses),
        "batch": spec.rows_per_step, "held_out_loss": round([line["eval_loss"] for line in lines if "eval_loss" in line][-1], 4),
        "trained_tokens_per_step_cv": round(per_step, 3), "loss_jump": round(_jump(losses), 4),
        "tokens_per_cpu_s": round(manifest.num_tokens / (time.process_time() - began)),
    }  # fmt: skip


def _trained_per_step(pack: Path, manifest: PackManifest, batch: int) -> float:
    """Coefficient of variation of the trained tokens in `batch` windows, drawn as steps draw them: without regard to what they hold."""
    labels = pq.read_table(pack / str(manifest.shards[0]["name"]), columns=["labels"])["labels"].to_pylist()
    trained = np.array([sum(label >= 0 for label in window) for window in labels], dtype=float)
    return float(trained.std() / trained.mean() / np.sqrt(batch))


def _jump(losses: Sequence[float]) -> float:
    """Mean change of the loss from step to step over the second half, which the trend hardly adds to."""
    return float(np.abs(np.diff(losses[len(losses) // 2 :])).mean())


def _in_a_process(*arguments: Any) -> dict[str, Any]:
    import engine.training.runtime.train  # noqa: F401  once, before processes are forked

    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=lambda: send.send(run_one(*arguments)))
    child.start()
    try:
        found: dict[str, Any] = receive.recv() if receive.poll(1800) else {}
    finally:
        child.join()
    if not found:
        raise RuntimeError(f"the training of {arguments[1:]} ended with {child.exitcode}")
    return found


def compared(results: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The change of the held-out loss in each comparison and dataset, seed by seed: mean, and its 95 % interval by Student's t."""
    for comparison, (without, with_) in {"length": ("max_seq_len", "chosen"), "mix": ("sorted", "mixed")}.items():
        for name in ROWS:
            of = {(r["variant"], r["seed"]): r["held_out_loss"] for r in results if r["comparison"] == comparison and r["dataset"] == name}
            seeds = sorted({seed for _, seed in of})
            changes = [of[with_, seed] - of[without, seed] for seed in seeds if (with_, seed) in of and (without, seed) in of]
            if not changes:
                continue
            half = 4.303 * statistics.stdev(changes) / len(changes) ** 0.5 if len(changes) == len(SEEDS) else float("nan")
            yield {"comparison": comparison, "dataset": name, "change": round(statistics.mean(changes), 4), "half_width_95": round(half, 4)}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Held-out loss with and without shorter and mixed windows.")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs", type=Path, default=None)
    args = parser.parse_args(argv)
    names, seeds = (("banking77",), SEEDS[:1]) if args.quick else (tuple(ROWS), SEEDS)
    kept = args.runs.read_text().splitlines() if args.runs and args.runs.exists() else []
    results: list[dict[str, Any]] = [json.loads(line) for line in kept]
    done = {(run["dataset"], run["seed"], run["variant"]) for run in results}
    # pairs that are compared run one after the other
    wanted = [(name, seed, v) for of in (VARIANTS[:2], VARIANTS[2:]) for seed in seeds for name in names for v in of]
    with tempfile.TemporaryDirectory() as root:
        for name, seed, variant in wanted:
            if (name, seed, variant.name) in done:
                continue
            results.append(_in_a_process(Path(root), name, args.data, variant, seed))
            print(json.dumps(results[-1]), flush=True)
            if args.runs:
                with args.runs.open("a") as stream:
                    stream.write(json.dumps(results[-1]) + "\n")
    for row in compared(results):
        print(json.dumps(row))
    if not args.quick:
        body = {
            "machine": machine(),
            "versions": versions("torch", "transformers", "peft"),
            "runs": results,
            "changes": [*compared(results)],
        }
        RESULTS.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
