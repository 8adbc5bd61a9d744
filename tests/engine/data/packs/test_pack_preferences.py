"""A pack of preferences holds each pair once, with loss on the answers alone, by the rules of every other pack."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest

from core.errors import IntegrityError, InvalidDataset, InvalidRequest
from engine.data.packs.build import PackProgress, PackSettings, build_pack, build_preference_pack
from engine.data.packs.manifest import verify_pack
from engine.data.schema import Example, Message
from engine.data.tokens.chat_tokenizer import ChatTokenizer
from engine.data.tokens.loss_mask import IGNORE
from tests.engine.data.examples_of import varied_chats
from tests.engine.data.packed_rows import write_rows
from tests.engine.data.preferences_of import varied_preferences

SETTINGS = PackSettings(max_seq_len=1024, shard_examples=16)


def pairs_in(directory: Path, prefix: str = "shard") -> list[dict[str, Any]]:
    return [row for p in sorted(directory.glob(f"{prefix}-*.parquet")) for row in pq.read_table(p).to_pylist()]


def pair(question: str, chosen: str, rejected: str, *, row: int) -> Example:
    answers = [(Message(role="assistant", content=text),) for text in (chosen, rejected)]
    return Example(kind="preference", messages=(Message(role="user", content=question),), chosen=answers[0], rejected=answers[1], row=row)


def test_each_pair_is_there_once_as_the_tokenizer_makes_it(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    examples = varied_preferences(100)
    manifest = build_preference_pack(examples, tokenizer, SETTINGS, tmp_path, dataset_id="ds_1")
    made = pairs_in(tmp_path)
    assert [m["row"] for m in made] == [e.row for e in examples]
    for found, example in zip(made, examples, strict=True):
        sides = tokenizer.encode_preference(example, max_seq_len=1024)
        for name, side in zip(("chosen", "rejected"), sides, strict=True):
            assert found[f"{name}_input_ids"] == side.input_ids.tolist()
            assert found[f"{name}_labels"] == side.labels.tolist()
        prompt = found["prompt_length"]
        assert prompt > 5
        assert found["chosen_input_ids"][:prompt] == found["rejected_input_ids"][:prompt]
        assert set(found["chosen_labels"][:prompt]) | set(found["rejected_labels"][:prompt]) == {IGNORE}
        assert found["chosen_labels"][prompt] == found["chosen_input_ids"][prompt]
    tokens = [n for m in made for n in (len(m["chosen_input_ids"]), len(m["rejected_input_ids"]))]
    assert (manifest.kind, manifest.num_examples, manifest.num_windows, manifest.num_tokens) == ("pairs", 100, 100, sum(tokens))
    assert manifest.num_trained_tokens == sum(x != IGNORE for m in made for side in ("chosen", "rejected") for x in m[f"{side}_labels"])
    assert sum(manifest.lengths["counts"]) == 100
    assert verify_pack(tmp_path) == manifest
    assert not list(tmp_path.glob(".*"))


def test_neither_workers_nor_shards_change_a_byte(tokenizer: ChatTokenizer, tiny_model: Path, tmp_path: Path) -> None:
    examples = varied_preferences(200)
    settings = replace(SETTINGS, validation_fraction=0.2, file_tokens=50 * 1024)
    rows = write_rows(tmp_path / "rows.parquet", examples)
    one = build_preference_pack(examples, tokenizer, settings, tmp_path / "one", dataset_id="ds_1")
    many = replace(settings, shard_examples=33)
    two = build_preference_pack(rows, tokenizer, many, tmp_path / "two", dataset_id="ds_1", workers=2, model_dir=tiny_model)
    assert one == two
    assert len(one.shards) > 2
    assert one.validation is not None
    assert one.num_examples + one.validation["num_examples"] == 200
    assert sorted(p["row"] for p in pairs_in(tmp_path / "two") + pairs_in(tmp_path / "two", "val")) == list(range(1, 201))


def test_a_second_build_tokenizes_nothing_and_damage_is_found(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    examples, seen = varied_preferences(40), list[PackProgress]()
    first = build_preference_pack(examples, tokenizer, SETTINGS, tmp_path, dataset_id="ds_1", progress=seen.append)
    assert [p.num_examples for p in seen if p.stage == "tokenize"] == [16, 32, 40]
    seen.clear()
    assert build_preference_pack(examples, tokenizer, SETTINGS, tmp_path, dataset_id="ds_1", progress=seen.append) == first
    assert not seen
    file = tmp_path / "shard-00000.parquet"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(IntegrityError, match=r"shard-00000\.parquet"):
        verify_pack(tmp_path)
    assert build_preference_pack(examples, tokenizer, SETTINGS, tmp_path, dataset_id="ds_1", progress=seen.append) == first
    assert seen


def test_a_crash_costs_one_shard(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    examples = varied_preferences(60)

    class CrashError(Exception):
        pass

    def crash(progress: PackProgress) -> None:
        if progress.num_examples == 32:
            raise CrashError

    with pytest.raises(CrashError):
        build_preference_pack(examples, tokenizer, SETTINGS, tmp_path, dataset_id="ds_1", progress=crash)
    seen: list[PackProgress] = []
    build_preference_pack(examples, tokenizer, SETTINGS, tmp_path, dataset_id="ds_1", progress=seen.append)
    assert sum(p.stage == "tokenize" for p in seen) == 2


def test_a_pair_is_left_out_whole_and_counted(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    examples = [
        pair("q", "long " * 60, "short", row=1),
        pair("q", "fine", "well", row=2),
        pair("question " * 40, "a", "b", row=3),
        pair("q", "a", "b<|im_end|>c", row=4),
    ]
    settings = PackSettings(max_seq_len=100, control_tokens="drop")
    cut = build_preference_pack(examples, tokenizer, settings, tmp_path / "cut", dataset_id="ds_1")
    assert [p["row"] for p in pairs_in(tmp_path / "cut")] == [1, 2]
    assert (cut.truncated, cut.dropped) == (1, {"control_token_in_content": 1, "answer_cut_off": 1})
    dropped = build_preference_pack(examples, tokenizer, replace(settings, over_long="drop"), tmp_path / "dropped", dataset_id="ds_1")
    assert dropped.dropped_rows == {"control_token_in_content": [4], "example_too_long": [1, 3]}
    with pytest.raises(InvalidDataset, match=r"over 100 tokens \(rows 1, 3\)"):
        build_preference_pack(examples, tokenizer, replace(settings, over_long="reject"), tmp_path / "refused", dataset_id="ds_1")


def test_a_pair_is_left_out_if_one_of_its_answers_has_no_loss(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    quiet = (Message(role="assistant", content="well", weight=0),)
    later = (*quiet, Message(role="user", content="long " * 60), Message(role="assistant", content="b"))
    examples = [
        pair("q", "fine", "well", row=1),
        msgspec.structs.replace(pair("q", "fine", "", row=2), rejected=quiet),
        msgspec.structs.replace(pair("q", "fine", "", row=3), rejected=later),
        msgspec.structs.replace(pair("q", "", "well", row=4), chosen=later),
    ]
    pack = build_preference_pack(examples, tokenizer, PackSettings(max_seq_len=100), tmp_path, dataset_id="ds_1")
    assert [p["row"] for p in pairs_in(tmp_path)] == [1]
    assert pack.dropped_rows == {"nothing_to_train": [2], "answer_cut_off": [3, 4]}


def test_escaped_control_tokens_are_plain_text_in_both_kinds_of_pack(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    settings = PackSettings(max_seq_len=200, control_tokens="escape")
    marked = pair("q", "a<|im_end|>b", "c", row=1)
    build_preference_pack([marked], tokenizer, settings, tmp_path / "pairs", dataset_id="ds_1")
    (found,) = pairs_in(tmp_path / "pairs")
    end = tokenizer.encode(varied_chats(1)[0], max_seq_len=10**6).labels.tolist()
    control = max(end)
    assert found["chosen_input_ids"].count(control) == 2  # one for each turn, none from the content
    chat = Example(kind="chat", messages=(*marked.messages, *marked.chosen), row=1)
    manifest = build_pack([chat], tokenizer, settings, tmp_path / "chats", dataset_id="ds_1")
    assert (manifest.num_examples, manifest.dropped) == (1, {})
    ids = pq.read_table(tmp_path / "chats" / "shard-00000.parquet")["input_ids"].to_pylist()[0]
    assert np.count_nonzero(np.asarray(ids) == control) == 2
    assert "a<|im_end|>b" in tokenizer.decode(ids)


def test_conversations_need_another_method(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="row 1 is a chat row"):
        build_preference_pack(varied_chats(3), tokenizer, SETTINGS, tmp_path, dataset_id="ds_1")
