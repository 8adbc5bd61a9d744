"""The packing self-test passes what is exact and refuses what leaks, whichever way it leaks."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the training environment")

from ft_assets.training.runtime.endings import PackingRefused  # noqa: E402
from ft_assets.training.runtime.self_test import Batch, SelfTest, check_packing, choose_windows  # noqa: E402

VOCAB, WIDTH = 50, 16


class Attention:
    """One causal attention layer over random embeddings: enough to leak."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embed, self.head = (torch.randn(*shape, generator=generator) for shape in ((VOCAB, WIDTH), (WIDTH, VOCAB)))

    def __call__(self, batch: Batch, *, boundaries: bool = True) -> torch.Tensor:
        ids, labels = batch["input_ids"], batch["labels"]
        n = ids.shape[1]
        allowed = torch.tril(torch.ones(n, n)).bool()
        if boundaries and "position_ids" in batch:
            example = (batch["position_ids"][0] == 0).cumsum(0)
            allowed &= example[:, None] == example[None, :]
        x = self.embed[ids]
        weights = (x @ x.transpose(1, 2) / WIDTH**0.5).masked_fill(~allowed, float("-inf")).softmax(-1)
        logits = (weights @ x) @ self.head
        return torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none", ignore_index=-100)

    def leaking(self, batch: Batch) -> torch.Tensor:
        return self(batch, boundaries=False)


def collate(rows: list[Batch], *, mask_starts: bool = True) -> Batch:
    lengths = [n for r in rows for n in r["seq_lengths"]]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    labels = torch.tensor([t for r in rows for t in r["labels"]])[None]
    if mask_starts:
        labels[positions == 0] = -100
    return {"input_ids": torch.tensor([t for r in rows for t in r["input_ids"]])[None], "labels": labels, "position_ids": positions}


def windows(*shapes: list[int]) -> list[dict[str, Any]]:
    rng = random.Random(0)
    rows = [{"input_ids": [rng.randrange(VOCAB) for _ in range(sum(lengths))], "seq_lengths": lengths} for lengths in shapes]
    return [{**r, "labels": [-100] * len(r["input_ids"])} for r in rows]


def check(rows: list[dict[str, Any]], **changes: Any) -> SelfTest:
    model = Attention()
    arguments: dict[str, Any] = {"collate": collate, "packed": model, "alone": model, "device": torch.device("cpu"), **changes}
    return check_packing(rows, **arguments)


def test_exact_packing_passes_and_says_how_many_boundaries_it_saw() -> None:
    found = check(windows([9, 7, 5], [12, 8]))
    assert (found.examples, found.boundaries) == (5, 3)
    assert found.worst <= 1e-5


def test_attention_across_a_boundary_is_refused() -> None:
    with pytest.raises(PackingRefused, match="examples see each other"):
        check(windows([9, 7]), packed=Attention().leaking)


def test_attention_across_windows_of_a_micro_batch_is_refused() -> None:
    with pytest.raises(PackingRefused, match="examples see each other"):
        check(windows([9], [7]), packed=Attention().leaking)


def test_a_label_across_a_boundary_is_refused() -> None:
    with pytest.raises(PackingRefused, match="keeps a label at the start"):
        check(windows([9, 7]), collate=lambda rows: collate(rows, mask_starts=False))


def test_a_loss_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(PackingRefused):
        check(windows([9, 7]), packed=lambda batch: Attention()(batch) * float("nan"))


def test_windows_of_several_examples_are_tested_first() -> None:
    rows = windows([9], [4, 4], [8], [2, 3])
    assert [r["seq_lengths"] for r in choose_windows(rows, count=3)] == [[4, 4], [2, 3], [9]]
