"""The examples whose likelihood is measured, from each kind of pack."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

from ft_assets.datasets.packs.build import PackSettings, build_pack
from ft_assets.datasets.tokens.chat_tokenizer import IGNORE, ChatTokenizer
from ft_assets.evals.runner import validation_examples
from tests.ft_assets.datasets.examples_of import varied_chats
from tests.ft_assets.training.preference_packs import build_judged, build_preferences
from tests.tiny_model import build_tiny_model


def held_out(pack: Path) -> list[dict[str, list[int]]]:
    return [row for file in sorted(pack.glob("val-*.parquet")) for row in pq.read_table(file).to_pylist()]


def test_of_a_pair_the_chosen_answer_is_measured(tmp_path: Path) -> None:
    build_preferences(tmp_path / "pack", build_tiny_model(tmp_path / "base"))
    rows = held_out(tmp_path / "pack")
    assert validation_examples(tmp_path / "pack", limit=1000) == [(r["chosen_input_ids"], r["chosen_labels"]) for r in rows]


def test_of_judged_answers_the_good_ones_are_measured(tmp_path: Path) -> None:
    build_judged(tmp_path / "pack", build_tiny_model(tmp_path / "base"))
    rows = held_out(tmp_path / "pack")
    found = validation_examples(tmp_path / "pack", limit=1000)
    assert found == [(r["input_ids"], r["labels"]) for r in rows if r["label"]]
    assert 0 < len(found) < len(rows)


def test_windows_are_cut_back_into_their_examples(tmp_path: Path) -> None:
    settings = PackSettings(max_seq_len=512, validation_fraction=0.3)
    tokenizer = ChatTokenizer.load(build_tiny_model(tmp_path / "base"))
    manifest = build_pack(varied_chats(60), tokenizer, settings, tmp_path / "pack", dataset_id="ds_1")
    found = validation_examples(tmp_path / "pack", limit=1000)
    assert manifest.validation is not None and len(found) == manifest.validation["num_examples"]
    assert all(len(ids) == len(labels) and labels[0] == IGNORE for ids, labels in found)
    assert len(validation_examples(tmp_path / "pack", limit=5)) <= 5
