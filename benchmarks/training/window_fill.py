"""How full sorted and mixed windows are, how alike the rows of a window are, and how fast both are placed.

    python -m benchmarks.training.window_fill --data DIR        prints a Markdown table; about a minute on one core

DIR holds banking77_train.csv (CC BY 4.0) and gsm8k_train.jsonl (MIT). Their lengths, counted with the tokenizer of demo-llama-3m, are drawn
with replacement up to each size. Log-normal lengths stand for data with a long tail.

*Within* is the share of the variance of log lengths that lies within windows: 1 if each window is a sample of the whole dataset, 0 if each
holds one length. *Spread* is the coefficient of variation of the examples per window, which is what trained tokens per step vary with.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.datasets.measure import timed
from benchmarks.training.windows import rows_of
from core.base_models import Catalogue
from engine.data.packs.best_fit import Windows, best_fit_decreasing, fill, mixed_fit
from engine.data.shapes import to_example
from engine.data.tokens.chat_tokenizer import ChatTokenizer

Lengths = NDArray[np.int64]
SIZES = (1_000, 10_000, 100_000, 1_000_000)
WINDOWS = (4096, 512)
COUNTED = 2_000
"""Rows of a dataset whose tokens are counted."""


def datasets(data: Path) -> Iterator[tuple[str, Lengths]]:
    model = Catalogue.load().get("demo-llama-3m")
    assert model.directory is not None
    tokenizer = ChatTokenizer.load(model.directory)
    for name in ("banking77", "gsm8k"):
        rows = random.Random(0).sample(rows_of(name, data), COUNTED)
        counts = []
        for number, row in enumerate(rows, start=1):
            example, problems = to_example(row, "chat", row=number)
            assert example is not None, problems
            counts.append(tokenizer.count_tokens(example))
        yield name, np.asarray(counts, np.int64)
    for median in (150, 700):
        drawn = np.random.default_rng(1).lognormal(np.log(median), 0.8, 100_000)
        yield f"log-normal, median {median}", np.clip(drawn, 8, 4096).astype(np.int64)


def within(lengths: Lengths, windows: Windows) -> float:
    """Share of the variance of log lengths that is within windows."""
    logs = np.log(lengths[windows.order])
    num = np.diff(windows.offsets)
    means = np.add.reduceat(logs, windows.offsets[:-1]) / num
    return float(((logs - np.repeat(means, num)) ** 2).sum() / ((logs - logs.mean()) ** 2).sum())


def row(name: str, lengths: Lengths, window: int) -> list[Any]:
    found: list[Any] = [name, f"{len(lengths):,}", f"{window:,}"]
    for place in (lambda: best_fit_decreasing(lengths, window), lambda: mixed_fit(lengths, window, seed="benchmark")):
        windows, seconds = timed(place, repeats=2)
        num = np.diff(windows.offsets)
        filled = fill(int(lengths.sum()), len(windows), window)
        shown = (f"{filled:.4%}", f"{within(lengths, windows):.2f}", f"{num.std() / num.mean():.2f}", f"{len(lengths) / seconds / 1e6:.1f}")
        found.extend(shown)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Fill, mix and speed of sorted and mixed windows.")
    parser.add_argument("--data", type=Path, required=True)
    args = parser.parse_args(argv)
    mixed_fit([1, 2], 8, seed="")  # compiled before the clock starts
    of_each = [f"{kind} {what}" for kind in ("sorted", "mixed") for what in ("fill", "within", "spread", "M rows/s")]
    print(f"| lengths | rows | window | {' | '.join(of_each)} |\n|{'---|' * (3 + len(of_each))}", flush=True)
    for name, lengths in datasets(args.data):
        for size in SIZES:
            drawn = np.random.default_rng(2).choice(lengths, size)
            for window in WINDOWS:
                if int(drawn.max()) <= window:
                    print(f"| {' | '.join(row(name, drawn, window))} |", flush=True)


if __name__ == "__main__":
    main()
