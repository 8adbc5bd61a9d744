"""The packing self-test of a training refuses each way in which examples of a window can see each other, at 1e-5 in fp32.

With the trainer, the collator and the forward pass of a real run: leaks are planted where a library's change would bring them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the training environment")

from ft_assets.training.runtime import data  # noqa: E402
from ft_assets.training.runtime.endings import PackingRefused  # noqa: E402
from ft_assets.training.runtime.modeling import load_base  # noqa: E402
from ft_assets.training.runtime.self_test import TOLERANCE  # noqa: E402
from ft_assets.training.runtime.train import build_trainer, self_test  # noqa: E402
from tests.ft_assets.training.attempts import SPEC, write_pack  # noqa: E402
from tests.tiny_model import VOCAB, build_tiny_model  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of the libraries; a run silences them too

Batch = dict[str, Any]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("run")
    model, tokenizer = load_base(build_tiny_model(root / "base"), SPEC)
    pack = data.load(write_pack(root / "pack"), SPEC, vocab_size=VOCAB)
    return build_trainer(SPEC, model, tokenizer, pack, total_steps=1, output_dir=root / "work")


@pytest.fixture
def planted(trainer: Any) -> Any:
    """Plants a change of what the collator returns, for one test."""
    collator = trainer.data_collator

    def plant(change: Callable[[Batch], None]) -> None:
        def collate(rows: list[Any]) -> Batch:
            batch: Batch = dict(collator(rows))
            assert "position_ids" in batch and "attention_mask" not in batch, "the run packs in another way: plant another leak"
            change(batch)
            return batch

        trainer.data_collator = collate

    yield plant
    trainer.data_collator = collator


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


def test_the_run_as_it_is_passes_over_many_boundaries(trainer: Any) -> None:
    found = self_test(trainer, SPEC)
    assert found.boundaries >= 3 and found.examples >= 5
    assert found.worst <= TOLERANCE["fp32"] == 1e-5


@pytest.mark.parametrize("leak", [positions_that_run_on, no_positions, a_mask_of_ones, one_boundary_forgotten, positions_off_by_one])
def test_a_planted_leak_is_refused(trainer: Any, planted: Any, leak: Callable[[Batch], None]) -> None:
    planted(leak)
    with pytest.raises(PackingRefused, match="examples see each other in packed windows") as refused:
        self_test(trainer, SPEC)
    detail = refused.value.detail
    assert abs(detail["packed"] - detail["alone"]) > TOLERANCE["fp32"]


def test_labels_that_cross_a_boundary_are_refused(trainer: Any, planted: Any) -> None:
    planted(labels_at_the_starts)
    with pytest.raises(PackingRefused, match="keeps a label at the start"):
        self_test(trainer, SPEC)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_model_that_attends_across_boundaries_is_refused(trainer: Any, attention: str) -> None:
    """One layer of the model, wrapped as a library's faulty kernel would be, sees the whole window."""
    layer = trainer.model.get_base_model().model.layers[0].self_attn
    faithful = layer.forward

    def leaking(*args: Any, **kwargs: Any) -> Any:
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        n = hidden.shape[1]
        causal = torch.full((n, n), float("-inf")).triu(1)[None, None]
        return faithful(*args, **{**kwargs, "attention_mask": causal})

    before = trainer.model.config._attn_implementation
    trainer.model.get_base_model().set_attn_implementation(attention)
    layer.forward = leaking
    try:
        with pytest.raises(PackingRefused, match="examples see each other"):
            self_test(trainer, SPEC)
    finally:
        layer.forward = faithful
        trainer.model.get_base_model().set_attn_implementation(before)
    assert self_test(trainer, SPEC).worst <= 1e-5  # the leak is out again
