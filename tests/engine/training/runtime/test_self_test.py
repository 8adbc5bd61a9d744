"""The packing self-test passes what is exact and refuses what leaks, whichever way it leaks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the training environment")

from engine.training.runtime import self_test  # noqa: E402
from engine.training.runtime.objectives.tokens import collate  # noqa: E402
from engine.training.runtime.run_errors import PackingRefused  # noqa: E402
from engine.training.runtime.self_test import Batch, SelfTest, Window, check_packing, choose_windows  # noqa: E402

VOCAB, WIDTH = 50, 16


class Attention:
    """One causal attention layer over random embeddings with positions of their own: enough to leak."""

    def __init__(self, *, boundaries: bool = True, cap: float | None = None, coarse_from: int | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        shapes = ((VOCAB, WIDTH), (WIDTH, VOCAB), (64, WIDTH))
        self.embed, self.head, self.place = (torch.randn(*shape, generator=generator) for shape in shapes)
        self.boundaries, self.cap, self.coarse_from = boundaries, cap, coarse_from

    def logits(self, ids: Any, positions: Any) -> Any:
        n = ids.shape[1]
        positions = torch.arange(n)[None] if positions is None else positions
        allowed = torch.tril(torch.ones(n, n)).bool().expand(len(ids), n, n)
        if self.boundaries:
            example = (positions.diff(dim=1, prepend=positions[:, :1]) != 1).cumsum(1)
            allowed = allowed & (example[:, :, None] == example[:, None, :])
        x = self.embed[ids] + self.place[positions]
        weights = (x @ x.transpose(1, 2) / WIDTH**0.5).masked_fill(~allowed, float("-inf")).softmax(-1)
        if self.coarse_from is not None and n >= self.coarse_from:  # another kernel for longer rows
            weights = weights.bfloat16().float()
        found = (weights @ x) @ self.head
        return found if self.cap is None else self.cap * torch.tanh(found / self.cap)

    def __call__(self, batch: Batch) -> Any:
        labels = batch["labels"][:, 1:]
        chosen = self.logits(batch["input_ids"], batch["position_ids"])[:, :-1][labels != -100]
        return -torch.nn.functional.cross_entropy(chosen, labels[labels != -100], reduction="none")

    def alone(self, ids: Any, positions: Any) -> float:
        tokens = torch.from_numpy(ids.astype(np.int64))[None]
        return float(torch.nn.functional.cross_entropy(self.logits(tokens, None)[0, positions], tokens[0, positions + 1]))


def windows(*shapes: list[int]) -> list[Window]:
    rng = np.random.default_rng(0)
    found = [(rng.integers(0, VOCAB, sum(lengths), dtype=np.int32), np.array(lengths, np.int32)) for lengths in shapes]
    return [Window(ids, np.full_like(ids, -100), lengths) for ids, lengths in found]


def check(rows: list[Window], *, joined: bool = True, **changes: Any) -> SelfTest:
    arguments: dict[str, Any] = {
        "collate": lambda ws: collate(ws, pad=0, joined=joined), "forward": Attention(), "alone": Attention().alone, **changes
    }  # fmt: skip
    return check_packing(rows, **arguments)


@pytest.mark.parametrize("joined", [True, False], ids=["in one row", "a row each"])
def test_exact_packing_passes_and_says_how_many_boundaries_it_saw(joined: bool) -> None:
    found = check(windows([9, 7, 5], [12, 8]), joined=joined)
    assert (found.examples, found.boundaries) == (5, 3)
    assert found.worst <= 1e-5


def test_of_a_long_example_the_first_and_the_last_tokens_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "MAX_COMPARED", 6)
    asked: list[list[int]] = []

    def alone(ids: Any, positions: Any) -> float:
        asked.append(positions.tolist())
        return Attention().alone(ids, positions)

    assert check(windows([30, 7]), alone=alone).worst <= 1e-5
    assert asked == [[0, 1, 2, 26, 27, 28], [0, 1, 2, 3, 4, 5]]
    with pytest.raises(PackingRefused, match="examples see each other"):
        check(windows([7, 30]), forward=Attention(boundaries=False))


@pytest.mark.parametrize("joined", [True, False], ids=["in one row", "a row each"])
def test_attention_across_a_boundary_is_refused(joined: bool) -> None:
    with pytest.raises(PackingRefused, match="examples see each other"):
        check(windows([9, 7]), joined=joined, forward=Attention(boundaries=False))


def test_attention_across_windows_of_a_micro_batch_is_refused() -> None:
    with pytest.raises(PackingRefused, match="examples see each other"):
        check(windows([9], [7]), forward=Attention(boundaries=False))


def test_a_label_across_a_boundary_is_refused() -> None:
    def keeping(rows: Sequence[Window]) -> Batch:
        batch = collate(rows, pad=0, joined=True)
        return {**batch, "labels": batch["input_ids"].clone()}

    with pytest.raises(PackingRefused, match="keeps a label at the start"):
        check(windows([9, 7]), collate=keeping)


def shifted(rows: Sequence[Window]) -> Batch:
    batch = collate(rows, pad=0, joined=True)
    return {**batch, "position_ids": batch["position_ids"] + 3} if len(rows) > 1 or len(rows[0].seq_lengths) > 1 else batch


def shifted_after_the_first(rows: Sequence[Window]) -> Batch:
    batch, first = collate(rows, pad=0, joined=True), int(rows[0].seq_lengths[0])
    batch["position_ids"][:, first:] += 3
    return batch


@pytest.mark.parametrize(
    ("changes", "cause", "says"),
    [
        ({"forward": Attention(boundaries=False)}, "attention", "other tokens in the rest move the loss of example"),
        ({"alone": Attention(cap=2.0).alone}, "output_layer", "packing is not the cause: training scores it"),
        ({"collate": shifted}, "positions", "its positions do not restart at 0"),
        ({"collate": shifted_after_the_first}, "positions", "its positions do not restart at 0"),
        ({"forward": Attention(coarse_from=12)}, "rounding", "no other example moves it"),
        ({"alone": lambda *_: float("nan")}, "model", "no finite loss in fp32 even to one example alone"),
    ],
)
def test_a_refusal_names_its_cause(changes: dict[str, Any], cause: str, says: str) -> None:
    with pytest.raises(PackingRefused, match=says) as refused:
        check(windows([9, 7, 5]), **changes)
    assert refused.value.detail["cause"] == cause


def test_a_loss_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(PackingRefused):
        check(windows([9, 7]), forward=lambda batch: Attention()(batch) * float("nan"))


def test_windows_of_several_examples_are_tested_first() -> None:
    rows = windows([9], [4, 4], [8], [2, 3])
    assert [r.seq_lengths.tolist() for r in choose_windows(rows, count=3)] == [[4, 4], [2, 3], [9]]
