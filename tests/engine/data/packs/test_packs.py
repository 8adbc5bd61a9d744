"""A pack holds every token once, is made once, and survives a crash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pyarrow.parquet as pq
import pytest

from core.errors import IntegrityError, InvalidDataset, InvalidRequest
from engine.data.packs.build import PackManifest, PackProgress, PackSettings, build_pack, pack_fingerprint
from engine.data.packs.manifest import verify_pack
from engine.data.packs.source import has_own_split
from engine.data.report.histogram import histogram, histogram_svg, length_stats
from engine.data.schema import Example, Message
from engine.data.split import Part
from engine.data.tokens.chat_tokenizer import ChatTokenizer
from engine.data.tokens.loss_mask import IGNORE
from tests.engine.data.examples_of import chat_example, varied_chats
from tests.engine.data.packed_rows import write_rows

SETTINGS = PackSettings(max_seq_len=1024, shard_examples=16)


def windows(directory: Path, prefix: str) -> list[tuple[list[int], list[int], list[int]]]:
    tables = [pq.read_table(p).to_pydict() for p in sorted(directory.glob(f"{prefix}-*.parquet"))]
    return [w for t in tables for w in zip(t["input_ids"], t["labels"], t["seq_lengths"], strict=True)]


def examples_in(directory: Path, prefix: str = "shard") -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(ids, labels) of each example, cut out of its window."""
    out = []
    for ids, labels, lengths in windows(directory, prefix):
        assert sum(lengths) == len(ids) == len(labels)
        at = 0
        for length in lengths:
            out.append((tuple(ids[at : at + length]), tuple(labels[at : at + length])))
            at += length
    return out


def encoded(tokenizer: ChatTokenizer, examples: list[Example], max_seq_len: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    tokens = tokenizer.encode_batch(examples, max_seq_len=max_seq_len)
    return [(tuple(t.input_ids.tolist()), tuple(t.labels.tolist())) for t in tokens]


def test_packing_loses_and_doubles_no_token(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    examples = varied_chats(100, weights=False)
    manifest = build_pack(examples, tokenizer, SETTINGS, tmp_path, dataset_id="ds_1")
    packed, alone = examples_in(tmp_path), encoded(tokenizer, examples, 1024)
    assert sorted(packed) == sorted(alone)
    assert manifest.num_windows < len(examples) / 3  # guards against windows of one example
    assert manifest.num_examples == 100
    assert manifest.num_tokens == sum(len(ids) for ids, _ in alone)
    assert manifest.num_trained_tokens == sum(label != IGNORE for _, labels in alone for label in labels)
    assert manifest.fill == round(manifest.num_tokens / (manifest.num_windows * 1024), 6)
    assert sum(manifest.lengths["counts"]) == 100
    assert PackManifest.read(tmp_path) == verify_pack(tmp_path) == manifest
    assert not list(tmp_path.glob(".*"))


def test_no_example_starts_with_loss_inside_a_window(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    texts = [Example(kind="text", text=f"text number {i}", row=i) for i in range(50)]
    build_pack(texts, tokenizer, SETTINGS, tmp_path, dataset_id="ds_1")
    packed = examples_in(tmp_path)
    assert len(packed) == 50
    assert all(labels[0] == IGNORE and IGNORE not in labels[1:] for _, labels in packed)


def test_equal_inputs_give_byte_identical_packs(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    made = [build_pack(varied_chats(60), tokenizer, SETTINGS, tmp_path / name, dataset_id="ds_1") for name in "ab"]
    assert made[0] == made[1]  # digests of the files included
    assert made[0].fingerprint.startswith("pk_")


def test_a_second_build_under_the_same_key_tokenizes_nothing(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    seen: list[PackProgress] = []
    first = build_pack(varied_chats(60), tokenizer, SETTINGS, tmp_path, dataset_id="ds_1", progress=seen.append)
    assert [p.num_examples for p in seen if p.stage == "tokenize"] == [16, 32, 48, 60]
    assert [(p.num_examples, p.num_tokens) for p in seen if p.stage == "pack"] == [(60, first.num_tokens)]
    assert [p.num_tokens for p in seen if p.stage == "tokenize"][-1] == first.num_tokens
    again: list[PackProgress] = []
    assert build_pack(varied_chats(60), tokenizer, SETTINGS, tmp_path, dataset_id="ds_1", progress=again.append) == first
    assert again == []


@pytest.mark.parametrize("crash_after", [1, 2, 5])
def test_a_crash_costs_at_most_one_shard(tokenizer: ChatTokenizer, tmp_path: Path, crash_after: int) -> None:
    examples = varied_chats(100)

    class CrashError(Exception):
        pass

    def crash(progress: PackProgress) -> None:
        seen.append(progress)
        if len(seen) == crash_after:
            raise CrashError

    seen: list[PackProgress] = []
    with pytest.raises(CrashError):
        build_pack(examples, tokenizer, SETTINGS, tmp_path / "crashed", dataset_id="ds_1", progress=crash)
    with pytest.raises(IntegrityError, match="not finished"):
        PackManifest.read(tmp_path / "crashed")
    torn = next((tmp_path / "crashed").glob(".tokens-*")) / "train-16" / f".{crash_after:05d}.tmp"
    torn.mkdir()  # what a kill in the middle of the next shard leaves
    (torn / "ids.npy").write_bytes(b"torn")
    after: list[PackProgress] = []
    resumed = build_pack(examples, tokenizer, SETTINGS, tmp_path / "crashed", dataset_id="ds_1", progress=after.append)
    assert sum(p.stage == "tokenize" for p in after) == 7 - crash_after
    assert resumed == build_pack(examples, tokenizer, SETTINGS, tmp_path / "clean", dataset_id="ds_1")


def test_the_validation_part_is_held_out_and_packed_apart(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    examples = varied_chats(200)
    settings = replace(SETTINGS, validation_fraction=0.2)
    manifest = build_pack(examples, tokenizer, settings, tmp_path, dataset_id="ds_1")
    assert manifest.validation is not None
    assert manifest.num_examples + manifest.validation["num_examples"] == 200
    assert 15 < manifest.validation["num_examples"] < 70
    assert sorted(examples_in(tmp_path) + examples_in(tmp_path, "val")) == sorted(encoded(tokenizer, examples, 1024))


def test_rows_go_by_their_split_key_and_not_by_their_own_content(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    examples = varied_chats(300)
    keys = [hashlib.sha256(b"%d" % (i // 3)).hexdigest() for i in range(300)]  # clusters of three
    rows = write_rows(tmp_path / "rows.parquet", examples, split_keys=keys)
    settings = replace(SETTINGS, validation_fraction=0.3)
    build_pack(rows, tokenizer, settings, tmp_path / "pack", dataset_id="ds_1")
    trained = {row for window in pq.read_table(tmp_path / "pack" / "rows.parquet").to_pydict()["rows"] for row in window}
    clusters = {(row - 1) // 3 for row in trained}
    assert trained == {3 * c + i for c in clusters for i in (1, 2, 3)}
    assert 40 < len(clusters) < 95  # guards against a split that held nothing out


def test_the_datasets_own_split_is_kept(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    examples = varied_chats(40)
    parts: list[Part | None] = ["validation" if e.row % 4 == 0 else "train" for e in examples]
    rows = write_rows(tmp_path / "rows.parquet", examples, parts=parts)
    manifest = build_pack(rows, tokenizer, SETTINGS, tmp_path / "pack", dataset_id="ds_1")
    assert has_own_split(rows)
    assert manifest.validation is not None
    assert (manifest.num_examples, manifest.validation["num_examples"]) == (30, 10)
    held_out = [e for e in examples if e.row % 4 == 0]
    assert sorted(examples_in(tmp_path / "pack", "val")) == sorted(encoded(tokenizer, held_out, 1024))
    assert not has_own_split(write_rows(tmp_path / "none.parquet", examples))


def test_files_of_a_large_pack_hold_the_windows_once(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    examples = varied_chats(300)
    manifest = build_pack(examples, tokenizer, replace(SETTINGS, file_tokens=8 * 1024), tmp_path, dataset_id="ds_1")
    assert len(manifest.shards) >= 3
    assert sorted(examples_in(tmp_path)) == sorted(encoded(tokenizer, examples, 1024))
    by_row = dict(zip((e.row for e in examples), encoded(tokenizer, examples, 1024), strict=True))
    rows = [row for window in pq.read_table(tmp_path / "rows.parquet").to_pydict()["rows"] for row in window]
    assert [by_row[row] for row in rows] == examples_in(tmp_path)


def test_windows_are_shuffled_and_the_key_decides_how(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    examples = varied_chats(200)
    orders = []
    for name in ("ds_1", "ds_2", "ds_1"):
        directory = tmp_path / f"{name}-{len(orders)}"
        build_pack(examples, tokenizer, replace(SETTINGS, packing=False), directory, dataset_id=name)
        orders.append([row for window in pq.read_table(directory / "rows.parquet").to_pydict()["rows"] for row in window])
    assert orders[0] == orders[2] != orders[1]
    assert abs(float(np.corrcoef(orders[0], range(200))[0, 1])) < 0.2  # no trace of the file's order


def test_the_key_decides_which_rows_share_a_window(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    shared = []
    for name in ("ds_1", "ds_2", "ds_1"):
        directory = tmp_path / f"{name}-{len(shared)}"
        build_pack(varied_chats(100), tokenizer, SETTINGS, directory, dataset_id=name)
        shared.append({frozenset(window) for window in pq.read_table(directory / "rows.parquet").to_pydict()["rows"]})
    assert shared[0] == shared[2]
    assert len(shared[0] & shared[1]) < len(shared[0]) / 2


def test_shorter_windows_keep_a_longer_example_whole_and_their_fill_counts_it_once(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    examples = [*(chat_example(f"question {n}", "answer", row=n) for n in range(60)), chat_example("q", "long answer " * 40, row=60)]
    manifest = build_pack(examples, tokenizer, replace(SETTINGS, min_windows=20), tmp_path, dataset_id="ds_1")
    rows = [len(ids) for ids, _, _ in windows(tmp_path, "shard")]
    assert manifest.window is not None
    assert len(rows) == manifest.num_windows >= 20
    assert manifest.max_seq_len == max(rows) > manifest.window
    assert manifest.fill == pytest.approx(sum(rows) / sum(max(manifest.window, row) for row in rows), abs=1e-6)
    assert sorted(examples_in(tmp_path)) == sorted(encoded(tokenizer, examples, 1024))


def test_a_window_for_each_example_is_not_made_shorter(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    settings = replace(SETTINGS, packing=False, min_windows=100)
    manifest = build_pack(varied_chats(20), tokenizer, settings, tmp_path, dataset_id="ds_1")
    assert (manifest.window, manifest.max_seq_len, manifest.num_windows) == (1024, 1024, 20)


def test_an_own_validation_file_takes_the_place_of_the_split(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    settings = replace(SETTINGS, validation_dataset_id="ds_2")
    train, own = varied_chats(30), varied_chats(20, seed=9)
    manifest = build_pack(train, tokenizer, settings, tmp_path, dataset_id="ds_1", validation=own)
    assert manifest.validation is not None
    assert (manifest.num_examples, manifest.validation["num_examples"]) == (30, 20)
    assert sorted(examples_in(tmp_path, "val")) == sorted(encoded(tokenizer, own, 1024))


def test_without_packing_each_example_has_its_window(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    manifest = build_pack(varied_chats(20), tokenizer, replace(SETTINGS, packing=False), tmp_path, dataset_id="ds_1")
    assert manifest.num_windows == 20
    assert all(len(lengths) == 1 for _, _, lengths in windows(tmp_path, "shard"))


def test_windows_tell_which_rows_are_in_them(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    examples = varied_chats(40)
    build_pack(examples, tokenizer, SETTINGS, tmp_path, dataset_id="ds_1")
    by_row = dict(zip((e.row for e in examples), encoded(tokenizer, examples, 1024), strict=True))
    rows = [row for window in pq.read_table(tmp_path / "rows.parquet").to_pydict()["rows"] for row in window]
    assert [by_row[row] for row in rows] == examples_in(tmp_path)


LONG = [chat_example("q", "long answer " * 40, row=3), chat_example("short", "one", row=4)]


def test_over_long_examples_are_cut_dropped_or_refused_and_counted(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    settings = PackSettings(max_seq_len=100)
    cut = build_pack(LONG, tokenizer, settings, tmp_path / "cut", dataset_id="ds_1")
    assert (cut.num_examples, cut.truncated, cut.dropped) == (2, 1, {})
    dropped = build_pack(LONG, tokenizer, replace(settings, over_long="drop"), tmp_path / "dropped", dataset_id="ds_1")
    assert (dropped.num_examples, dropped.dropped, dropped.dropped_rows) == (1, {"example_too_long": 1}, {"example_too_long": [3]})
    with pytest.raises(InvalidDataset, match=r"over 100 tokens \(rows 3\)"):
        build_pack(LONG, tokenizer, replace(settings, over_long="reject"), tmp_path / "refused", dataset_id="ds_1")
    assert not (tmp_path / "refused" / "manifest.json").exists()


def test_an_example_cut_down_to_its_prompt_is_left_out_and_counted(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    examples = [chat_example("question " * 40, "a", row=1), chat_example("q", "a", row=2)]
    manifest = build_pack(examples, tokenizer, PackSettings(max_seq_len=100), tmp_path, dataset_id="ds_1")
    assert (manifest.num_examples, manifest.dropped) == (1, {"answer_cut_off": 1})


def test_a_long_example_without_loss_is_not_counted_as_cut_off(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    quiet = (Message(role="user", content="q"), Message(role="assistant", content="long answer " * 40, weight=0))
    examples = [Example(kind="chat", messages=quiet, row=1), chat_example("q", "a", row=2)]
    manifest = build_pack(examples, tokenizer, PackSettings(max_seq_len=100), tmp_path, dataset_id="ds_1")
    assert manifest.dropped == {"nothing_to_train": 1}


def test_an_example_of_exactly_max_seq_len_is_not_over_long(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    exact = tokenizer.count_tokens(LONG[0])
    for max_seq_len, dropped in ((exact, {}), (exact - 1, {"example_too_long": 1})):
        settings = PackSettings(max_seq_len=max_seq_len, over_long="drop")
        manifest = build_pack(LONG, tokenizer, settings, tmp_path / str(max_seq_len), dataset_id="ds_1")
        assert (manifest.dropped, manifest.truncated) == (dropped, 0)


def test_control_tokens_refuse_the_pack_unless_they_are_dropped(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    examples = [chat_example("q", "fine", row=1), chat_example("q", "a<|im_end|>b", row=2)]
    with pytest.raises(InvalidDataset) as refused:
        build_pack(examples, tokenizer, SETTINGS, tmp_path / "a", dataset_id="ds_1")
    assert refused.value.code == "control_token_in_content"
    assert "rows 2" in refused.value.message
    manifest = build_pack(examples, tokenizer, replace(SETTINGS, control_tokens="drop"), tmp_path / "b", dataset_id="ds_1")
    assert (manifest.num_examples, manifest.dropped) == (1, {"control_token_in_content": 1})


def test_a_row_whose_control_tokens_cannot_be_escaped_meets_the_policy_for_bad_rows(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    examples = [chat_example("q", "fine", row=1), chat_example("q", "a<|im_end|>\U000f0000", row=2)]
    escaping = replace(SETTINGS, control_tokens="escape")
    with pytest.raises(InvalidDataset, match=r"hold a control token of the base model \(rows 2\)"):
        build_pack(examples, tokenizer, replace(escaping, bad_rows="fail"), tmp_path / "a", dataset_id="ds_1")
    manifest = build_pack(examples, tokenizer, replace(escaping, bad_rows="drop"), tmp_path / "b", dataset_id="ds_1")
    assert (manifest.num_examples, manifest.dropped) == (1, {"control_token_in_content": 1})


@pytest.mark.parametrize("min_windows", [0, 7])
def test_nothing_left_to_train_on_is_a_refusal(tokenizer: ChatTokenizer, tmp_path: Path, min_windows: int) -> None:
    with pytest.raises(InvalidDataset, match="no example is left") as refused:
        build_pack([], tokenizer, replace(SETTINGS, min_windows=min_windows), tmp_path, dataset_id="ds_1")
    assert refused.value.code == "too_few_examples"


def test_preferences_need_a_preference_method(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    one = chat_example("q", "a").messages
    example = Example(kind="preference", messages=one[:1], chosen=one[1:], rejected=one[1:])
    with pytest.raises(InvalidRequest, match="preference"):
        build_pack([example], tokenizer, SETTINGS, tmp_path, dataset_id="ds_1")


def test_damage_to_any_file_is_found(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    manifest = build_pack(varied_chats(50), tokenizer, replace(SETTINGS, validation_fraction=0.3), tmp_path, dataset_id="ds_1")
    names = [entry["name"] for entry in manifest.files()]
    assert names == ["shard-00000.parquet", "val-00000.parquet", "rows.parquet"]
    for name in names:
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[:-1] + b"?")
        with pytest.raises(IntegrityError, match=name):
            verify_pack(tmp_path)
        (tmp_path / name).write_bytes(whole)
    verify_pack(tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(IntegrityError, match="is not a pack manifest"):
        verify_pack(tmp_path)


@pytest.mark.parametrize("damage", ["shard-00000.parquet", "manifest.json"])
def test_a_damaged_pack_is_built_again(tokenizer: ChatTokenizer, tmp_path: Path, damage: str) -> None:
    examples = varied_chats(50)
    first = build_pack(examples, tokenizer, SETTINGS, tmp_path, dataset_id="ds_1")
    (tmp_path / damage).write_bytes(b"torn")
    assert build_pack(examples, tokenizer, SETTINGS, tmp_path, dataset_id="ds_1") == first == verify_pack(tmp_path)


def test_a_pack_with_another_fingerprint_in_the_directory_is_replaced(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    examples = varied_chats(50)
    small_files = replace(SETTINGS, file_tokens=4 * 1024)
    first = build_pack(examples, tokenizer, small_files, tmp_path, dataset_id="ds_1")
    second = build_pack(examples[:20], tokenizer, SETTINGS, tmp_path, dataset_id="ds_2")
    assert len(first.shards) > len(second.shards)
    assert (second.dataset_id, second) == ("ds_2", verify_pack(tmp_path))
    assert sorted(examples_in(tmp_path)) == sorted(encoded(tokenizer, examples[:20], 1024)), "files of the other pack are gone"


CHANGES: list[Callable[[PackSettings], PackSettings]] = [
    lambda s: replace(s, max_seq_len=512),
    lambda s: replace(s, train_on_inputs=True),
    lambda s: replace(s, over_long="drop"),
    lambda s: replace(s, validation_fraction=0.1),
    lambda s: replace(s, split_seed=1),
    lambda s: replace(s, validation_dataset_id="ds_9"),
    lambda s: replace(s, packing=False),
    lambda s: replace(s, min_windows=7),
    lambda s: replace(s, control_tokens="drop"),
    lambda s: replace(s, control_tokens="escape"),
    lambda s: replace(s, safety_share=0.03),
]


def test_packs_that_are_stored_keep_their_fingerprint() -> None:
    """Where this fails, every stored pack would be built anew: raise PACK_FORMAT if that is wanted."""
    assert pack_fingerprint("ds_1", "t", "m", PackSettings(max_seq_len=128)) == "pk_a2f419effd60ef99d9bb642e588bb2c1"


def test_the_fingerprint_changes_with_all_that_decides_the_content_and_with_nothing_else() -> None:
    base = pack_fingerprint("ds_1", "t", "m", SETTINGS)
    others = {pack_fingerprint("ds_1", "t", "m", change(SETTINGS)) for change in CHANGES}
    others |= {
        pack_fingerprint("ds_2", "t", "m", SETTINGS),
        pack_fingerprint("ds_1", "u", "m", SETTINGS),
        pack_fingerprint("ds_1", "t", "n", SETTINGS),
        pack_fingerprint("ds_1", "t", "m", SETTINGS, kind="pairs"),
    }
    assert len(others | {base}) == len(CHANGES) + 5
    assert pack_fingerprint("ds_1", "t", "m", replace(SETTINGS, shard_examples=99, train_on_inputs=False)) == base


def test_a_histogram_counts_every_length_and_draws_it() -> None:
    lengths = [1, 1, 2, 50, 100]
    made = histogram(lengths)
    assert sum(made["counts"]) == 5
    assert len(made["edges"]) == len(made["counts"]) + 1
    assert length_stats(lengths) == {"min": 1, "max": 100, "mean": 30.8, "p50": 2, "p95": 100, "p99": 100, "total": 154}
    picture = histogram_svg(made["counts"], made["edges"], unit="tokens")
    assert picture.startswith("<svg")
    assert picture.count("<rect") == len(made["counts"])
    assert histogram_svg([], []) == ""
    assert json.dumps(length_stats([]))


def test_labelled_completions_are_no_examples_to_imitate(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    example = msgspec.structs.replace(chat_example("a", "b"), kind="kto", label=False)
    with pytest.raises(InvalidRequest, match="supervised training cannot use") as caught:
        build_pack([example], tokenizer, PackSettings(max_seq_len=64), tmp_path / "pack", dataset_id="ds_1")
    assert caught.value.code == "preference_rows"
