"""A pack of judged answers holds each once, with loss on the answer alone, and beside it another prompt's answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import InvalidDataset, InvalidRequest
from engine.data.packs.answer_packs import mismatched
from engine.data.packs.build import PackProgress, PackSettings, build_judged_pack, pack_fingerprint
from engine.data.packs.manifest import verify_pack
from engine.data.schema import Example, Message
from engine.data.tokens.chat_tokenizer import ChatTokenizer
from engine.data.tokens.loss_mask import IGNORE
from tests.engine.data.examples_of import varied_chats
from tests.engine.data.packed_rows import write_rows
from tests.engine.data.preferences_of import varied_judged

SETTINGS = PackSettings(max_seq_len=1024, shard_examples=16)


def rows_in(directory: Path, prefix: str = "shard") -> list[dict[str, Any]]:
    return [row for p in sorted(directory.glob(f"{prefix}-*.parquet")) for row in pq.read_table(p).to_pylist()]


def judged(question: str, answer: str, *, label: bool, row: int) -> Example:
    messages = (Message(role="user", content=question), Message(role="assistant", content=answer))
    return Example(kind="kto", messages=messages, label=label, row=row)


def test_each_answer_is_there_once_with_loss_on_itself_alone(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    examples = varied_judged(100)
    manifest = build_judged_pack(examples, tokenizer, SETTINGS, tmp_path, dataset_id="ds_1")
    made = rows_in(tmp_path)
    assert [(m["row"], m["label"]) for m in made] == [(e.row, e.label) for e in examples]
    for found, example in zip(made, examples, strict=True):
        whole = tokenizer.encode(Example(kind="chat", messages=example.messages), max_seq_len=1024)
        assert found["input_ids"] == whole.input_ids.tolist()
        quiet = found["prompt_length"]
        assert set(found["labels"][:quiet]) == {IGNORE}
        trained = [x for x in found["labels"] if x != IGNORE]
        assert tokenizer.decode(trained) == f"{example.messages[-1].content}<|im_end|>"
        assert tokenizer.decode(found["input_ids"][:quiet]).endswith("<|im_start|>assistant\n")
    good = sum(bool(e.label) for e in examples)
    assert (manifest.kind, manifest.num_rows, manifest.num_examples) == ("judged", 100, 100)
    assert (manifest.num_desirable, manifest.num_undesirable) == (good, 100 - good)
    assert manifest.num_tokens == sum(len(m["input_ids"]) for m in made)
    assert manifest.num_trained_tokens == sum(x != IGNORE for m in made for x in m["labels"])
    assert sum(manifest.lengths["counts"]) == 100
    assert verify_pack(tmp_path) == manifest
    assert not list(tmp_path.glob(".*"))


def test_beside_each_answer_is_one_to_another_prompt(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    build_judged_pack(varied_judged(100), tokenizer, SETTINGS, tmp_path, dataset_id="ds_1")
    made = rows_in(tmp_path)
    by_answer = {tuple(m["input_ids"][m["prompt_length"] :]): m for m in made}
    labels = []
    for row in made:
        prompt, quiet = row["input_ids"][: row["prompt_length"]], row["prompt_length"]
        assert row["kl_input_ids"][:quiet] == prompt
        other = by_answer[tuple(row["kl_input_ids"][quiet:])]
        assert other["input_ids"][: other["prompt_length"]] != prompt
        assert row["kl_labels"] == [IGNORE] * quiet + other["labels"][other["prompt_length"] :]
        labels.append(other["label"])
    assert 20 < sum(labels) < 80, "good answers and bad ones are drawn"


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_no_row_is_matched_with_its_own_prompt_where_there_is_another(prompts: list[int]) -> None:
    others = mismatched(prompts)
    if len(set(prompts)) > 1:
        assert all(prompts[i] != prompts[j] for i, j in enumerate(others))
    else:
        assert others == [(i + 1) % len(prompts) for i in range(len(prompts))]


def test_rows_of_one_prompt_step_over_each_other() -> None:
    assert mismatched("abcd") == [1, 2, 3, 0]
    assert mismatched("aabbcc") == [2, 3, 4, 5, 0, 1]


def test_neither_workers_nor_shards_change_a_byte(tokenizer: ChatTokenizer, tiny_model: Path, tmp_path: Path) -> None:
    examples = varied_judged(201)
    settings = replace(SETTINGS, validation_fraction=0.2, file_tokens=40 * 1024)
    rows = write_rows(tmp_path / "rows.parquet", examples)
    one = build_judged_pack(examples, tokenizer, settings, tmp_path / "one", dataset_id="ds_1")
    many = replace(settings, shard_examples=33)
    two = build_judged_pack(rows, tokenizer, many, tmp_path / "two", dataset_id="ds_1", workers=2, model_dir=tiny_model)
    assert one == two
    assert len(one.shards) > 2
    assert (
        one.validation is not None and one.validation["num_desirable"] + one.validation["num_undesirable"] == one.validation["num_windows"]
    )
    assert sorted(p["row"] for p in rows_in(tmp_path / "two") + rows_in(tmp_path / "two", "val")) == list(range(1, 202))


@pytest.mark.parametrize("count", [20, 21, 22, 41])
def test_no_file_holds_one_row_alone(tokenizer: ChatTokenizer, tmp_path: Path, count: int) -> None:
    examples = [judged(f"question {i}", "answer", label=i % 2 == 0, row=i + 1) for i in range(count)]
    manifest = build_judged_pack(examples, tokenizer, replace(SETTINGS, file_tokens=20 * 1024), tmp_path, dataset_id="ds_1")
    sizes = [s["num_windows"] for s in manifest.shards]
    assert sum(sizes) == count and min(sizes) >= 2 and max(sizes) <= 21


def test_a_crash_costs_one_shard_and_a_second_build_does_nothing(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    examples, seen = varied_judged(60), list[PackProgress]()

    class CrashError(Exception):
        pass

    def crash(progress: PackProgress) -> None:
        if progress.num_examples == 32:
            raise CrashError

    with pytest.raises(CrashError):
        build_judged_pack(examples, tokenizer, SETTINGS, tmp_path, dataset_id="ds_1", progress=crash)
    first = build_judged_pack(examples, tokenizer, SETTINGS, tmp_path, dataset_id="ds_1", progress=seen.append)
    assert sum(p.stage == "tokenize" for p in seen) == 2
    seen.clear()
    assert build_judged_pack(examples, tokenizer, SETTINGS, tmp_path, dataset_id="ds_1", progress=seen.append) == first
    assert not seen


def test_what_is_too_long_is_cut_or_dropped_and_every_answer_keeps_a_token(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    examples = [
        judged("q", "long " * 60, label=True, row=1),
        judged("q" * 50, "short", label=False, row=2),
        judged("question " * 40, "a", label=True, row=3),
        judged("q", "a<|im_end|>b", label=True, row=4),
        judged("p", "fine", label=False, row=5),
    ]
    settings = PackSettings(max_seq_len=100, control_tokens="drop")
    cut = build_judged_pack(examples, tokenizer, settings, tmp_path / "cut", dataset_id="ds_1")
    made = rows_in(tmp_path / "cut")
    assert [m["row"] for m in made] == [1, 2, 5]
    assert all(len(m["input_ids"]) <= 100 and len(m["kl_input_ids"]) == len(m["kl_labels"]) <= 100 for m in made)
    assert all(any(x != IGNORE for x in m[name]) for m in made for name in ("labels", "kl_labels"))
    assert (cut.truncated, cut.dropped) == (1, {"control_token_in_content": 1, "answer_cut_off": 1})
    dropped = replace(settings, over_long="drop")
    with pytest.raises(InvalidDataset, match=r"all 2 answers .* bad \(.*2 x example_too_long.*add good") as refused:
        build_judged_pack(examples, tokenizer, dropped, tmp_path / "dropped", dataset_id="ds_1")
    assert refused.value.code == "one_label"


@pytest.mark.parametrize(("label", "message"), [(True, "all 5 answers for training are good; .* add bad"), (False, "are bad; .* add good")])
def test_answers_that_are_all_alike_are_refused(tokenizer: ChatTokenizer, tmp_path: Path, label: bool, message: str) -> None:
    examples = [judged(f"question {i}", "answer", label=label, row=i) for i in range(5)]
    with pytest.raises(InvalidDataset, match=message) as refused:
        build_judged_pack(examples, tokenizer, SETTINGS, tmp_path, dataset_id="ds_1")
    assert refused.value.code == "one_label"


def test_what_has_no_meaning_for_answers_is_refused(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="row 1 is a chat row"):
        build_judged_pack(varied_chats(3), tokenizer, SETTINGS, tmp_path, dataset_id="ds_1")
    for setting in ({"safety_share": 0.1}, {"train_on_inputs": True}):
        with pytest.raises(InvalidRequest, match=next(iter(setting))):
            build_judged_pack(varied_judged(9), tokenizer, replace(SETTINGS, **setting), tmp_path, dataset_id="ds_1")


def test_each_kind_of_pack_has_its_own_fingerprint() -> None:
    keys = {pack_fingerprint("ds_1", "t", "c", SETTINGS, kind=kind) for kind in ("windows", "pairs", "judged")}
    assert len(keys) == 3
