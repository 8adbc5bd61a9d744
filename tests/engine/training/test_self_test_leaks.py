"""The packing self-test of a training refuses each way in which examples of a window can see each other, at 1e-5 in fp32.

With the trainer, the collator and the forward pass of a real run: leaks are planted where a library's change would bring them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the training environment")

from engine.training.runtime import (  # noqa: E402
    pack_loader,
    parallel,
)
from engine.training.runtime.objectives.tokens import Tokens  # noqa: E402
from engine.training.runtime.run_errors import PackingRefused  # noqa: E402
from engine.training.runtime.self_test import TOLERANCE, Window  # noqa: E402
from engine.training.runtime.train import build_objective  # noqa: E402
from engine.training.spec import RunFile  # noqa: E402
from tests.engine.training.attempts import SPEC, write_pack  # noqa: E402
from tests.support.models.tiny_model import VOCAB, build_tiny_model  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of the libraries; a run silences them too

Batch = dict[str, Any]


@pytest.fixture(scope="module")
def objective(tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    root = tmp_path_factory.mktemp("run")
    run = RunFile(
        spec=SPEC,
        attempt=1,
        base_model_dir=build_tiny_model(root / "base"),
        pack_dir=write_pack(root / "pack"),
        work_dir=root / "work",
    )
    built = build_objective(run, pack_loader.load(run.pack_dir, SPEC, vocab_size=VOCAB), parallel.build(SPEC))
    assert isinstance(built, Tokens)
    return built


@pytest.fixture
def planted(objective: Tokens) -> Iterator[Callable[[Callable[[Batch], None]], None]]:
    """Plants a change of what the collator returns, for one test."""
    faithful = objective.collate_windows

    def plant(change: Callable[[Batch], None]) -> None:
        def collate(windows: Sequence[Window]) -> Batch:
            batch: Batch = dict(faithful(windows))
            assert "position_ids" in batch and "attention_mask" not in batch, "the run packs in another way: plant another leak"
            change(batch)
            return batch

        objective.collate_windows = collate  # type: ignore[method-assign]

    yield plant
    del objective.collate_windows  # the method shows again


def positions_that_run_on(batch: Batch) -> None:
    batch["position_ids"] = torch.arange(batch["input_ids"].shape[1])[None]


def no_positions(batch: Batch) -> None:
    del batch["position_ids"]


def a_mask_of_ones(batch: Batch) -> None:
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])


def one_boundary_forgotten(batch: Batch) -> None:
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    positions = batch["position_ids"].clone()
    at, end = starts[1], starts[2]
    positions[0, at:end] += int(positions[0, at - 1]) + 1
    batch["position_ids"] = positions


def positions_off_by_one(batch: Batch) -> None:
    batch["position_ids"] = torch.roll(batch["position_ids"], 1, dims=1)


def labels_at_the_starts(batch: Batch) -> None:
    batch["labels"] = batch["input_ids"].clone()


def test_the_run_as_it_is_passes_over_many_boundaries(objective: Tokens) -> None:
    found = objective.self_test(objective.model)
    assert found["boundaries"] >= 3 and found["examples"] >= 5
    assert found["worst"] <= TOLERANCE["fp32"] == 1e-5


@pytest.mark.parametrize("leak", [positions_that_run_on, no_positions, a_mask_of_ones, one_boundary_forgotten, positions_off_by_one])
def test_a_planted_leak_is_refused(objective: Tokens, planted: Any, leak: Callable[[Batch], None]) -> None:
    planted(leak)
    with pytest.raises(PackingRefused, match="examples see each other in packed windows") as refused:
        objective.self_test(objective.model)
    detail = refused.value.detail
    assert abs(detail["packed"] - detail["alone"]) > TOLERANCE["fp32"]


def test_labels_that_cross_a_boundary_are_refused(objective: Tokens, planted: Any) -> None:
    planted(labels_at_the_starts)
    with pytest.raises(PackingRefused, match="keeps a label at the start"):
        objective.self_test(objective.model)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_model_that_attends_across_boundaries_is_refused(objective: Tokens, attention: str) -> None:
    """One layer of the model, wrapped as a library's faulty kernel would be, sees the whole window."""
    layer = objective.model.get_base_model().model.layers[0].self_attn
    faithful = layer.forward

    def leaking(*args: Any, **kwargs: Any) -> Any:
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        n = hidden.shape[1]
        causal = torch.full((n, n), float("-inf")).triu(1)[None, None]
        return faithful(*args, **{**kwargs, "attention_mask": causal})

    before = objective.model.config._attn_implementation
    objective.model.get_base_model().set_attn_implementation(attention)
    layer.forward = leaking
    try:
        with pytest.raises(PackingRefused, match="examples see each other"):
            objective.self_test(objective.model)
    finally:
        layer.forward = faithful
        objective.model.get_base_model().set_attn_implementation(before)
    assert objective.self_test(objective.model)["worst"] <= 1e-5  # the leak is out again
