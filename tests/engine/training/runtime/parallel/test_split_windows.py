"""Ranks that share windows compute what one rank computes, whatever the boundaries of examples and the numbers of heads."""

from __future__ import annotations

import functools
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from engine.training.checkpoints import step_name
from engine.training.runtime.model import attention, split_windows
from engine.training.runtime.model.split_windows import Context
from engine.training.runtime.objectives.tokens import collate
from engine.training.runtime.self_test import Window
from tests.engine.training.attempts import SPEC, Job, job
from tests.engine.training.runtime.parallel.test_parallel import FULL, run_ranks, stop_after
from tests.engine.training.runtime.test_endings import _rewrite

assert SPEC.lora is not None
TOLERANCE = 1e-5
"""In float32; ranks add up in another order."""
PLAIN: dict[str, Any] = {"lora": replace(SPEC.lora, dropout=0.0)}
"""Without dropout, whose masks are drawn for the tokens of a rank."""
SPLIT: dict[str, Any] = {"world_size": 2, "context_parallel": 2, "strategy": "ddp"}


class Mail:
    """Ranks as threads: what each sends is there once all have sent."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._sent: dict[int, torch.Tensor] = {}
        self._barrier = threading.Barrier(size)

    def context(self, rank: int) -> Context:
        return Context(rank=rank, size=self.size, group=None, exchange=functools.partial(self._exchange, of=rank))

    def _exchange(self, tensor: torch.Tensor, *, of: int) -> torch.Tensor:
        self._sent[of] = tensor
        self._barrier.wait(timeout=60)
        received = torch.stack([self._sent[rank][of] for rank in range(self.size)])
        self._barrier.wait(timeout=60)
        return received


@pytest.mark.parametrize(("size", "heads", "kv_heads", "window"), [(2, 4, 2, None), (4, 8, 2, None), (4, 4, 4, 5), (8, 8, 1, 3)])
def test_exchanged_heads_give_each_rank_the_attention_of_its_tokens(size: int, heads: int, kv_heads: int, window: int | None) -> None:
    mail = Mail(size)
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, n, 16, 8, generator=generator) for n in (heads, kv_heads, kv_heads))
    options: dict[str, Any] = {
        "cu_seq_lens_q": torch.tensor([0, 7, 9, 16], dtype=torch.int32), "scaling": 0.3, "sliding_window": window, "dropout": 0.0,
    }  # fmt: skip
    expected = attention.masked_attention(None, query, key, value, None, **options)[0]
    found: dict[int, torch.Tensor] = {}

    def run(rank: int) -> None:
        part = [x.chunk(size, dim=2)[rank] for x in (query, key, value)]
        found[rank] = split_windows.attention(None, *part, None, context=mail.context(rank), inner=attention.masked_attention, **options)[0]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert torch.equal(torch.cat([found[rank] for rank in range(size)], dim=1), expected)


def test_parts_of_a_batch_hold_every_token_and_label_once() -> None:
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 97, 23, dtype=np.int32)
    labels = np.where(rng.random(23) < 0.5, -100, ids).astype(np.int32)
    batch = collate([Window(ids, labels, np.array([9, 14], np.int32))], pad=0, joined=True, width=24)
    batch["sources"] = torch.arange(len(batch["scored"]))
    assert batch["cu_seq_lens_q"].tolist() == [0, 9, 23, 24], "padding is an example of its own"
    parts = [Mail(4).context(rank).part(batch) for rank in range(4)]
    for name in ("input_ids", "position_ids"):
        assert torch.equal(torch.cat([part[name] for part in parts], dim=1), batch[name])
    targets = [part["labels"].flatten()[part["scored"] + 1] for part in parts]
    assert torch.equal(torch.cat(targets), batch["labels"].flatten()[batch["scored"] + 1])
    assert sum(int((part["labels"][:, 1:] != -100).sum()) for part in parts) == len(batch["scored"])
    assert [part["num_tokens"] for part in parts] == [6, 6, 6, 5]
    assert torch.equal(torch.cat([part["sources"] for part in parts]), batch["sources"])


def compared(made: Job) -> list[dict[str, Any]]:
    """What ranks report of each step and validation, without times."""
    names = ("step", "loss", "num_tokens", "mean_token_accuracy", "num_trained_tokens", "grad_norm", "learning_rate", "eval_loss", "epoch")
    return [{name: m[name] for name in names if name in m} for m in made.metrics()]


def assert_alike(found: Job, expected: Job) -> None:
    assert len(compared(found)) == len(compared(expected)) > 8
    for one, other in zip(compared(found), compared(expected), strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=TOLERANCE)
    assert [m["num_tokens"] for m in found.steps()] == [m["num_tokens"] for m in expected.steps()]


def weights(made: Job) -> dict[str, torch.Tensor]:
    name = "model.safetensors" if made.spec.adapter == "full" else "adapter_model.safetensors"
    return load_file(made.work / "final" / name)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("changes", [PLAIN, FULL], ids=["lora", "full"])
def test_two_ranks_that_share_windows_train_what_one_trains(strategy: str, changes: dict[str, Any], tmp_path: Path) -> None:
    with job(tmp_path / "single", **changes) as single, job(tmp_path / "pair", **SPLIT | {"strategy": strategy}, **changes) as pair:
        run_ranks(single)
        run_ranks(pair)
        assert_alike(pair, single)
        for name, tensor in weights(single).items():
            torch.testing.assert_close(weights(pair)[name], tensor, rtol=1e-3, atol=1e-4)
        detail = pair.exit()["detail"]
        assert detail["kernels"]["context_parallel"] == 2 and detail["self_test"]["boundaries"] > 0
        assert detail["self_test"]["worst"] < 1e-5


@pytest.mark.slow
def test_a_rank_whose_part_has_no_labels_stays_with_the_others(tmp_path: Path) -> None:
    recomputed = PLAIN | {"gradient_checkpointing": True}
    with job(tmp_path / "single", **PLAIN) as single, job(tmp_path / "pair", **SPLIT, **recomputed) as pair:
        for made in (single, pair):
            rows = pq.read_table(made.pack / "shard-00000.parquet").to_pylist()
            for row in rows:
                row["labels"] = [-100] * (len(row["labels"]) - 1) + row["labels"][-1:]
            _rewrite(made.pack, rows)
            run_ranks(made)
        assert_alike(pair, single)


@pytest.mark.slow
def test_four_ranks_are_two_pairs_with_windows_of_their_own(tmp_path: Path) -> None:
    halves = replace(SPEC.optimization, accumulation_steps=1)
    with (
        job(tmp_path / "single", **PLAIN) as single,
        job(tmp_path / "four", **SPLIT | {"world_size": 4}, **PLAIN, optimization=halves) as four,
    ):
        run_ranks(single)
        run_ranks(four)
        assert_alike(four, single)


@pytest.mark.slow
def test_ranks_that_share_windows_resume_exactly_and_one_goes_on_with_what_they_began(tmp_path: Path) -> None:
    longer: dict[str, Any] = {"optimization": replace(SPEC.optimization, num_epochs=12)}
    with (
        job(tmp_path / "whole", **SPLIT, **PLAIN, **longer) as whole,
        job(tmp_path / "cut", **SPLIT, **PLAIN, **longer) as cut,
        job(tmp_path / "single", **PLAIN, **longer) as single,
    ):
        run_ranks(whole)
        step = stop_after(cut, 5)
        run_ranks(cut)
        assert cut.exit()["detail"]["resumed_from"] == step_name(step)
        assert compared(cut) == compared(whole)
        files = [(made.work / "final" / "adapter_model.safetensors").read_bytes() for made in (cut, whole)]
        assert files[0] == files[1]
        pair = single.spec
        single.spec = replace(pair, **SPLIT)
        step = stop_after(single, 5)
        single.spec = pair
        run_ranks(single)
        assert single.exit()["detail"]["resumed_from"] == step_name(step)
        assert_alike(single, whole)
