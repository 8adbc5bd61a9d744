"""Documents and conversations of which every token is learned: what is too long is there in pieces, and nothing is lost."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import InvalidDataset
from engine.data.packs.build import PackSettings, build_pack
from engine.data.schema import Example
from engine.data.tokens.chat_tokenizer import ChatTokenizer
from engine.data.tokens.loss_mask import IGNORE
from engine.data.tokens.token_shards import piece_starts
from tests.engine.data.examples_of import varied_chats, varied_text

SETTINGS = PackSettings(max_seq_len=128, shard_examples=16, train_on_inputs=True, over_long="split", file_tokens=40 * 128)


def documents(count: int, *, longest: int = 120, seed: int = 0) -> list[Example]:
    rng = random.Random(seed)
    return [Example(kind="text", text=f"document {row}: {varied_text(rng, longest)}", row=row) for row in range(1, count + 1)]


def packed(directory: Path) -> dict[int, list[tuple[list[int], list[int]]]]:
    """(ids, labels) of the pieces of each row, in the order of their windows."""
    tables = [pq.read_table(p).to_pylist() for p in sorted(directory.glob("shard-*.parquet"))]
    windows = [w for table in tables for w in table]
    rows = pq.read_table(directory / "rows.parquet")["rows"].to_pylist()
    out: dict[int, list[tuple[list[int], list[int]]]] = defaultdict(list)
    for window, members in zip(windows, rows, strict=True):
        assert len(window["input_ids"]) <= 128
        at = 0
        for row, length in zip(members, window["seq_lengths"], strict=True):
            out[row].append((window["input_ids"][at : at + length], window["labels"][at : at + length]))
            at += length
        assert at == len(window["input_ids"])
    return out


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_splitting_and_packing_lose_and_double_no_token(tokenizer: ChatTokenizer, tmp_path: Path, kind: str) -> None:
    examples = documents(120) if kind == "text" else varied_chats(120)
    manifest = build_pack(examples, tokenizer, SETTINGS, tmp_path, dataset_id="ds_1")
    whole = tokenizer.encode_batch(examples, max_seq_len=10**9, train_on_inputs=True)
    found = packed(tmp_path)
    assert sorted(found) == [e.row for e in examples]
    num_pieces = num_split = 0
    for example, tokens in zip(examples, whole, strict=True):
        starts = piece_starts(tokens.num_tokens, 128)
        ids, labels = tokens.input_ids.tolist(), tokens.labels.tolist()
        expected = []
        for start, end in zip(starts, [*starts[1:], tokens.num_tokens], strict=True):
            expected.append((ids[start:end], [IGNORE, *labels[start + 1 : end]]))
        assert sorted(found[example.row]) == sorted(expected)
        num_pieces, num_split = num_pieces + len(starts), num_split + (len(starts) > 1)
    assert num_split > 20
    assert (manifest.num_examples, manifest.split, manifest.truncated) == (num_pieces, num_split, 0)
    assert manifest.num_tokens == sum(t.num_tokens for t in whole)
    assert manifest.num_trained_tokens == manifest.num_tokens - num_pieces  # all but the first of each piece


def test_a_short_document_ends_with_the_token_that_ends_texts(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    build_pack([Example(kind="text", text="one short line", row=1)], tokenizer, SETTINGS, tmp_path, dataset_id="ds_1")
    ((ids, labels),) = packed(tmp_path)[1]
    assert tokenizer.decode(ids) == "one short line<|im_end|>"
    assert labels == [IGNORE, *ids[1:]]


@given(st.integers(1, 700), st.integers(4, 128))
def test_pieces_are_whole_windows_and_none_is_a_token_alone(num_tokens: int, max_seq_len: int) -> None:
    starts = piece_starts(num_tokens, max_seq_len)
    lengths = [b - a for a, b in zip(starts, [*starts[1:], num_tokens], strict=True)]
    assert starts[0] == 0 and sum(lengths) == num_tokens
    assert len(starts) == -(-num_tokens // max_seq_len)
    assert all(2 <= n <= max_seq_len for n in lengths) or num_tokens == 1
    assert all(n >= max_seq_len - 1 for n in lengths[:-1])


def test_other_policies_for_long_documents_stay_what_they_are(tokenizer: ChatTokenizer, tmp_path: Path) -> None:
    examples = [Example(kind="text", text="word " * 100, row=1), Example(kind="text", text="short", row=2)]
    cut = build_pack(examples, tokenizer, replace(SETTINGS, over_long="truncate"), tmp_path / "cut", dataset_id="ds_1")
    assert (cut.num_examples, cut.truncated, cut.split) == (2, 1, 0)
    dropped = build_pack(examples, tokenizer, replace(SETTINGS, over_long="drop"), tmp_path / "dropped", dataset_id="ds_1")
    assert (dropped.num_examples, dropped.dropped) == (1, {"example_too_long": 1})
    with pytest.raises(InvalidDataset, match="over 128 tokens"):
        build_pack(examples, tokenizer, replace(SETTINGS, over_long="reject"), tmp_path / "refused", dataset_id="ds_1")


def test_pieces_are_for_packs_that_train_every_token() -> None:
    with pytest.raises(ValueError, match="needs train_on_inputs"):
        PackSettings(over_long="split")
