"""Rows are appended to a model on disk: new ones are the mean, old ones keep their bytes, and memory does not grow with the model."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the training environment")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from control_plane.models import embedding_rows  # noqa: E402
from control_plane.models.embedding_rows import CHUNK_BYTES, Rows, copy_shard, extended_config, extended_index, plan  # noqa: E402
from core.errors import InvalidRequest  # noqa: E402
from tests.support.models.tiny_model import VOCAB, build_tiny_model  # noqa: E402


def with_weights(directory: Path, *, config: dict[str, Any] | None = None, **changed: Any) -> Path:
    """A tiny model with other tensors (None: without it), and other fields in its config."""
    build_tiny_model(directory)
    weights = {name: tensor for name, tensor in (load_file(directory / "model.safetensors") | changed).items() if tensor is not None}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    body = json.loads((directory / "config.json").read_text()) | (config or {})
    (directory / "config.json").write_text(json.dumps(body))
    return directory


@pytest.mark.parametrize(
    ("rows", "first_id", "num_tokens", "wanted"),
    [
        (260, 260, 1, Rows(old=260, new=264, first=260, end=264)),
        (260, 250, 3, Rows(old=260, new=260, first=250, end=253)),
        (260, 250, 10, Rows(old=260, new=260, first=250, end=260)),
        (260, 258, 3, Rows(old=260, new=264, first=258, end=264)),
        (257, 257, 2, Rows(old=257, new=259, first=257, end=259)),
        (320, 320, 2, Rows(old=320, new=384, first=320, end=384)),
        (260, 262, 1, Rows(old=260, new=264, first=260, end=264)),
    ],
    ids=[
        "appended",
        "in padding",
        "all of the padding",
        "padding and appended",
        "an odd number",
        "a multiple of 64",
        "ids beyond the rows",
    ],
)
def test_padding_is_used_first_and_the_size_stays_aligned(tmp_path: Path, rows: int, first_id: int, num_tokens: int, wanted: Rows) -> None:
    table = torch.zeros(rows, 64)
    changed = {"model.embed_tokens.weight": table, "lm_head.weight": table.clone()}
    model = with_weights(tmp_path / "m", config={"vocab_size": rows}, **changed)
    assert plan(model, first_id=first_id, num_tokens=num_tokens) == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "rows", [Rows(old=40, new=48, first=36, end=48), Rows(old=40, new=40, first=30, end=33)], ids=["appended", "padding"]
)
def test_new_rows_are_the_mean_of_those_of_existing_tokens(tmp_path: Path, dtype: Any, rows: Rows) -> None:
    made = torch.Generator().manual_seed(1)
    old = {
        "a.weight": torch.randn(7, 3, generator=made).double(),
        "model.embed_tokens.weight": torch.randn(40, 24, generator=made).to(dtype),
        "lm_head.weight": torch.randn(40, 24, generator=made).to(dtype),
        "z.weight": torch.randint(0, 100, (5,), generator=made, dtype=torch.int8),
    }
    save_file(old, tmp_path / "old.safetensors", metadata={"format": "pt", "by": "a test"})
    copy_shard(tmp_path / "old.safetensors", tmp_path / "new.safetensors", rows)
    copy_shard(tmp_path / "old.safetensors", tmp_path / "again.safetensors", rows)
    assert (tmp_path / "new.safetensors").read_bytes() == (tmp_path / "again.safetensors").read_bytes()
    new = load_file(tmp_path / "new.safetensors")
    assert list(new) == list(load_file(tmp_path / "old.safetensors"))
    for name, tensor in old.items():
        if "weight" in name and tensor.dtype == dtype:
            mean = tensor[: rows.first].double().mean(dim=0).to(dtype)
            assert len(new[name]) == rows.new
            assert all(torch.equal(row, mean) for row in new[name][rows.first : rows.end])
            kept = [i for i in range(rows.old) if not rows.first <= i < rows.end]
            assert torch.equal(new[name][kept], tensor[kept])
        else:
            assert torch.equal(new[name], tensor)
    with safe_open(tmp_path / "new.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "by": "a test"}


def test_memory_holds_a_few_chunks_of_a_large_table(tmp_path: Path) -> None:
    table = torch.ones(40_000, 1024, dtype=torch.float32)
    save_file({"model.embed_tokens.weight": table}, tmp_path / "old.safetensors")
    tracemalloc.start()
    copy_shard(tmp_path / "old.safetensors", tmp_path / "new.safetensors", Rows(old=40_000, new=40_064, first=40_000, end=40_064))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * CHUNK_BYTES < table.nbytes / 2
    new = np.memmap(tmp_path / "new.safetensors", mode="r")
    assert len(new) > table.nbytes + 64 * 4096


ONE = torch.zeros(VOCAB, 64)
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a second embedding": ({"model.layers.9.embed_tokens.weight": ONE}, {}, r"2 tensors \*embed_tokens.weight and 1 \*lm_head.weight"),
    "no output layer": ({"lm_head.weight": None}, {}, r"1 tensors \*embed_tokens.weight and 0 \*lm_head.weight"),
    "a bias of the output layer": ({"lm_head.bias": torch.zeros(VOCAB)}, {}, r"tensor lm_head.bias \(F32, shape \[260\]\)"),
    "rows that the config does not have": ({}, {"vocab_size": 256}, r"shape \[260, 64\]\) for 256 token ids"),
    "integers": ({"lm_head.weight": ONE.to(torch.int8)}, {}, r"lm_head.weight \(I8"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_model_with_other_tables_is_refused(tmp_path: Path, what: str) -> None:
    changed, config, says = REFUSED[what]
    with pytest.raises(InvalidRequest, match=says) as refused:
        plan(with_weights(tmp_path / "m", config=config, **changed), first_id=VOCAB, num_tokens=1)
    assert refused.value.code == "model_not_extendable"


def test_a_tied_model_needs_no_output_layer(tmp_path: Path) -> None:
    model = with_weights(tmp_path / "m", config={"tie_word_embeddings": True}, **{"lm_head.weight": None})
    rows = plan(model, first_id=VOCAB, num_tokens=1)
    assert embedding_rows.added_to(model, rows) == (4 * 64 * 4, 4 * 64)


def test_the_config_says_the_new_size_wherever_it_said_the_old_one() -> None:
    rows = Rows(old=260, new=264, first=260, end=264)
    assert extended_config({"vocab_size": 260, "hidden_size": 1}, rows) == {"vocab_size": 264, "hidden_size": 1}
    nested = {"text_config": {"vocab_size": 260}, "vision_config": {"vocab_size": 260}}
    assert extended_config(nested, rows) == {"text_config": {"vocab_size": 264}, "vision_config": {"vocab_size": 260}}
    assert extended_config({**nested, "vocab_size": 260}, rows)["vocab_size"] == 264
    assert extended_config({"text_config": {}, "vocab_size": 7}, rows) == {"text_config": {"vocab_size": 264}, "vocab_size": 7}


def test_an_index_counts_what_was_added() -> None:
    index = {"metadata": {"total_size": 100, "format": "pt"}, "weight_map": {"a": "b"}}
    wanted = {"metadata": {"total_size": 108, "format": "pt"}, "weight_map": {"a": "b"}}
    assert extended_index(index, num_bytes=8, num_parameters=4) == wanted
    assert extended_index({"weight_map": {}}, num_bytes=8, num_parameters=4) == {"weight_map": {}, "metadata": {}}
