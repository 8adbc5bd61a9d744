"""The examples whose likelihood is measured, from each kind of pack."""

from __future__ import annotations

import math
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from engine.data.packs.build import PackSettings, build_pack
from engine.data.tokens.chat_tokenizer import ChatTokenizer
from engine.data.tokens.loss_mask import IGNORE
from engine.evals.suites.preferences import held_out
from tests.engine.data.examples_of import varied_chats
from tests.engine.training.preference_packs import build_judged, build_preferences
from tests.support.models.tiny_model import build_tiny_model


def rows_of(pack: Path) -> list[dict[str, list[int]]]:
    return [row for file in sorted(pack.glob("val-*.parquet")) for row in pq.read_table(file).to_pylist()]


def test_of_pairs_both_answers_are_measured(tmp_path: Path) -> None:
    build_preferences(tmp_path / "pack", build_tiny_model(tmp_path / "base"))
    rows = rows_of(tmp_path / "pack")
    found = held_out(tmp_path / "pack", limit=1000)
    assert found.kind == "pairs"
    assert found.wanted == [(r["chosen_input_ids"], r["chosen_labels"]) for r in rows]
    assert found.unwanted == [(r["rejected_input_ids"], r["rejected_labels"]) for r in rows]


def test_fewer_pairs_are_still_pairs(tmp_path: Path) -> None:
    build_preferences(tmp_path / "pack", build_tiny_model(tmp_path / "base"))
    rows = rows_of(tmp_path / "pack")
    chosen = {tuple(r["chosen_input_ids"]): r["rejected_input_ids"] for r in rows}
    found = held_out(tmp_path / "pack", limit=4)
    assert 1 < len(found.wanted) == len(found.unwanted) <= 4
    assert all(chosen[tuple(ids)] == other for (ids, _), (other, _) in zip(found.wanted, found.unwanted, strict=True))


def test_of_judged_answers_the_good_are_told_from_the_bad(tmp_path: Path) -> None:
    build_judged(tmp_path / "pack", build_tiny_model(tmp_path / "base"))
    rows = rows_of(tmp_path / "pack")
    found = held_out(tmp_path / "pack", limit=1000)
    assert found.kind == "judged"
    assert found.wanted == [(r["input_ids"], r["labels"]) for r in rows if r["label"]]
    assert found.unwanted == [(r["input_ids"], r["labels"]) for r in rows if not r["label"]]
    assert found.wanted and found.unwanted


def test_windows_are_cut_back_into_their_examples(tmp_path: Path) -> None:
    settings = PackSettings(max_seq_len=512, validation_fraction=0.3)
    tokenizer = ChatTokenizer.load(build_tiny_model(tmp_path / "base"))
    manifest = build_pack(varied_chats(60), tokenizer, settings, tmp_path / "pack", dataset_id="ds_1")
    found = held_out(tmp_path / "pack", limit=1000)
    assert found.kind is None and found.unwanted == []
    assert manifest.validation is not None and len(found.wanted) == manifest.validation["num_examples"]
    assert all(len(ids) == len(labels) and labels[0] == IGNORE for ids, labels in found.wanted)
    assert held_out(tmp_path / "pack", limit=5).wanted == found.wanted[:: math.ceil(len(found.wanted) / 5)]


def test_only_the_chosen_examples_of_a_large_file_become_lists(tmp_path: Path) -> None:
    tokens = np.arange(100_000, 600_000, dtype=np.int32).reshape(1000, 500)
    columns = {"input_ids": list(tokens), "labels": list(tokens), "seq_lengths": [np.array([200, 300], dtype=np.int32)] * 1000}
    pq.write_table(pa.table(columns), tmp_path / "val-00000.parquet")
    tracemalloc.start()
    try:
        found = held_out(tmp_path, limit=10)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.wanted[1] == (tokens[100, :200].tolist(), [IGNORE, *tokens[100, 1:200].tolist()])
    assert len(found.wanted) == 10 and most < 5_000_000, "all of them take 72 bytes a token, 36 MB"
