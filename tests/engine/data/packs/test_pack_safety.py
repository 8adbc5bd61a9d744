"""Safety-preserving examples are mixed into the training part alone, as many as asked for, always the same."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from core.errors import InvalidRequest
from engine.data.packs.build import PackSettings, build_pack, build_preference_pack, pack_fingerprint
from engine.data.packs.safety_mix import MAX_REPEATS, load_safety
from engine.data.tokens.chat_tokenizer import ChatTokenizer
from tests.engine.data.examples_of import varied_chats

SETTINGS = PackSettings(max_seq_len=1024, safety_share=0.1, shard_examples=64)


def rows_in(directory: Path) -> list[int]:
    return [row for window in pq.read_table(directory / "rows.parquet").to_pydict()["rows"] for row in window]


def test_the_asked_share_of_the_training_part_is_mixed_in_and_counted(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    settings = replace(SETTINGS, validation_fraction=0.2)
    plain = build_pack(varied_chats(500), tokenizer, replace(settings, safety_share=0.0), tmp_path / "plain", dataset_id="ds_1")
    mixed = build_pack(varied_chats(500), tokenizer, settings, tmp_path / "mixed", dataset_id="ds_1")
    added = [row for row in rows_in(tmp_path / "mixed") if row < 0]
    assert len(added) == mixed.num_examples - plain.num_examples == round(plain.num_examples / 9)
    assert mixed.safety == {"num_examples": len(added), "num_wanted": len(added), "num_distinct": len(set(added))}
    assert len(added) / mixed.num_examples == pytest.approx(0.1, abs=0.002)
    assert mixed.validation is not None and plain.validation is not None
    assert mixed.validation["num_tokens"] == plain.validation["num_tokens"]  # none of them is held out
    assert plain.safety is None


def test_the_choice_is_the_same_however_the_pack_is_built(tokenizer: ChatTokenizer, tiny_model: Path, tmp_path: Path) -> None:
    one = build_pack(varied_chats(300), tokenizer, SETTINGS, tmp_path / "a", dataset_id="ds_1")
    settings = replace(SETTINGS, shard_examples=17)
    two = build_pack(varied_chats(300), tokenizer, settings, tmp_path / "b", dataset_id="ds_1", workers=2, model_dir=tiny_model)
    assert one == two


def test_no_example_is_learnt_by_heart(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    made = build_pack(varied_chats(1000), tokenizer, replace(SETTINGS, safety_share=0.5), tmp_path, dataset_id="ds_1")
    times = Counter(row for row in rows_in(tmp_path) if row < 0)
    assert set(times.values()) == {MAX_REPEATS}
    assert made.safety == {"num_examples": MAX_REPEATS * len(load_safety()), "num_wanted": 1000, "num_distinct": len(load_safety())}


def test_an_operators_file_takes_the_place_of_the_set_and_decides_the_fingerprint(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    file = tmp_path / "own.jsonl"
    turns = [{"role": "user", "content": "Do harm?"}, {"role": "assistant", "content": "No."}]
    file.write_text(json.dumps({"messages": turns}) + "\n")
    settings = replace(SETTINGS, safety_file=file)
    made = build_pack(varied_chats(30), tokenizer, settings, tmp_path / "pack", dataset_id="ds_1")
    assert made.safety == {"num_examples": 3, "num_wanted": 3, "num_distinct": 1}
    prints = {pack_fingerprint("ds_1", "t", "m", s) for s in (SETTINGS, settings, replace(SETTINGS, safety_share=0.0))}
    file.write_text(json.dumps({"messages": [*turns[:1], {"role": "assistant", "content": "Never."}]}) + "\n")
    assert len(prints | {pack_fingerprint("ds_1", "t", "m", settings)}) == 4


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is empty"),
        ('{"messages": 3}\n', "line 1 holds no conversation"),
        ('{"messages": [{"role": "user", "content": "a"}]}\n', "line 1 does not end"),
        ("{\n", "line 1 holds no conversation"),
    ],
)
def test_a_file_that_holds_no_conversations_is_refused(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=why):
        load_safety(file)
    with pytest.raises(InvalidRequest, match="cannot be read"):
        load_safety(tmp_path / "absent.jsonl")


def test_preferences_are_not_mixed(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="safety_share"):
        build_preference_pack([], tokenizer, SETTINGS, tmp_path, dataset_id="ds_1")


def test_the_set_that_ships_is_of_good_rows_without_repeats(tokenizer: ChatTokenizer) -> None:
    examples = load_safety()
    assert 55 <= len(examples) <= 80
    assert len({e.prompt[0].content for e in examples}) == len(examples)
    assert all(tokenizer.encode(e, max_seq_len=4096).num_trained_tokens > 40 for e in examples)
    refusals = sum(any(w in e.answer for w in ("can't", "won't", "No.", "rather not")) for e in examples)
    assert 30 <= refusals <= len(examples) - 12  # help where a refusal would be wrong is part of it
