"""Shards of a split are joined in bounded memory, whatever a few bytes of them stand for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from core.errors import InvalidDataset
from engine.data.readers.hub.shards import MAX_HEADER_BYTES, join_shards
from engine.data.readers.row_stream import open_rows

MAX_BYTES = 10 << 30
PEAK_BYTES = 400 << 20
"""Of Arrow's memory: one batch at worst, and what is about to be written."""


def repeated(path: Path, *, length: int, count: int, encoding: str = "dictionary") -> Path:
    """A few KB that stand for `count` texts of `length`."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array(["x" * length]))
    pq.write_table(pa.table({"text": texts}), path, compression="zstd", store_schema=encoding == "stored")
    assert path.stat().st_size < 40_000
    return path


@contextmanager
def peak_of_arrow() -> Iterator[Callable[[], int]]:
    """What Arrow has taken at most since the beginning, in bytes."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    try:
        yield lambda: int(pool.max_memory())
    finally:
        pa.set_memory_pool(before)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["dictionary", "stored"])
def test_parquet_shards_of_one_long_value_repeated_are_joined_in_bounded_memory(tmp_path: Path, encoding: str) -> None:
    shards = [repeated(tmp_path / f"s{i}.parquet", length=7_000_000, count=200, encoding=encoding) for i in range(2)]
    with peak_of_arrow() as peak:
        joined = join_shards(shards, tmp_path / "joined", max_bytes=MAX_BYTES)
    assert 7_000_000 < peak() < PEAK_BYTES
    batches = pq.ParquetFile(joined).iter_batches(batch_size=1)
    assert [len(value.as_py()) for batch in batches for value in batch["text"]] == [7_000_000] * 400


def test_parquet_shards_that_stand_for_more_than_a_dataset_may_hold_are_refused_before_they_are_written(tmp_path: Path) -> None:
    shards = [repeated(tmp_path / f"s{i}.parquet", length=1_000_000, count=10_000) for i in range(2)]
    with pytest.raises(InvalidDataset, match="name one file") as refused:
        join_shards(shards, tmp_path / "joined", max_bytes=100_000_000)
    assert refused.value.code == "file_too_large"


def test_a_parquet_shard_with_a_row_that_is_far_too_long_is_refused(tmp_path: Path) -> None:
    """One row of 30 GB in a few KB."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 10_000, pa.int32()), pa.array(["y" * 3_000_000]))
    turns = pa.StructArray.from_arrays([pa.array(["user"] * 10_000), texts], ["role", "content"])
    rows = pa.ListArray.from_arrays(pa.array([0, 10_000], pa.int32()), turns)
    pq.write_table(pa.table({"messages": rows}), tmp_path / "a.parquet", compression="zstd", store_schema=False)
    pq.write_table(pa.table({"messages": rows}), tmp_path / "b.parquet", compression="zstd", store_schema=False)
    with pytest.raises(InvalidDataset, match="30000") as refused:
        join_shards([tmp_path / "a.parquet", tmp_path / "b.parquet"], tmp_path / "joined", max_bytes=MAX_BYTES)
    assert refused.value.code == "line_too_long"


def test_shards_of_dictionaries_and_of_plain_values_are_joined_with_every_value(tmp_path: Path) -> None:
    pairs = pa.map_(pa.string(), pa.string())
    one = {
        "text": pa.array(["a", None, "b"]).dictionary_encode(),
        "m": pa.array([[("k", "v")], None, []], pairs),
        "l": [[{"c": "x"}], [], None],
    }
    two = {"text": ["c"], "l": [[{"c": "y"}, {"c": None}]], "n": [7]}
    pq.write_table(pa.table(one), tmp_path / "a.parquet")
    pq.write_table(pa.table(two), tmp_path / "b.parquet")
    joined = join_shards([tmp_path / "a.parquet", tmp_path / "b.parquet"], tmp_path / "joined", max_bytes=MAX_BYTES)
    assert pq.read_table(joined).to_pylist() == [
        {"text": "a", "m": [("k", "v")], "l": [{"c": "x"}], "n": None}, {"text": None, "m": None, "l": [], "n": None},
        {"text": "b", "m": [], "l": None, "n": None}, {"text": "c", "m": None, "l": [{"c": "y"}, {"c": None}], "n": 7},
    ]  # fmt: skip


def test_many_small_batches_are_joined_into_few_row_groups(tmp_path: Path) -> None:
    texts = {name: [hashlib.sha256(f"{name} {i}".encode()).hexdigest() for i in range(30_000)] for name in "ab"}
    for name in "ab":
        pq.write_table(pa.table({"text": texts[name]}), tmp_path / f"{name}.parquet", row_group_size=1000)
    joined = join_shards([tmp_path / "a.parquet", tmp_path / "b.parquet"], tmp_path / "joined", max_bytes=MAX_BYTES)
    with pq.ParquetFile(joined) as file:
        assert file.metadata.num_row_groups == 2
        assert file.read().column("text").to_pylist() == texts["a"] + texts["b"]


def test_rows_of_uneven_lists_are_read_in_bounded_memory(tmp_path: Path) -> None:
    """All the values of a row group stand in its first row, though each row has one on average."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 1000 + [1] * 999, pa.int32()), pa.array(["y" * 3_000_000, "x"]))
    turns = pa.StructArray.from_arrays([texts], ["content"])
    rows = pa.ListArray.from_arrays(pa.array([0, *range(1000, 2000)], pa.int32()), turns)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"messages": rows}), path, compression="zstd", store_schema=False)
    with peak_of_arrow() as peak:
        values = [r.value for r in open_rows(path, filename=path.name).rows]
    assert peak() < PEAK_BYTES
    assert values[0].code == "line_too_long"
    assert values[1:] == [{"messages": [{"content": "x"}]}] * 999


def test_a_map_of_one_long_value_repeated_is_read_in_bounded_memory(tmp_path: Path) -> None:
    texts = pa.DictionaryArray.from_arrays(pa.array([0] * 300, pa.int32()), pa.array(["y" * 9_000_000]))
    rows = pa.MapArray.from_arrays(pa.array(range(0, 301, 3), pa.int32()), pa.array(["a", "b", "c"] * 100), texts)
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"x": rows, "text": ["a"] * 100}), path, compression="zstd", store_schema=False)
    with peak_of_arrow() as peak:
        codes = {r.value.code for r in open_rows(path, filename=path.name).rows}
    assert peak() < PEAK_BYTES
    assert codes == {"line_too_long"}


def test_a_shard_of_csv_without_a_line_feed_is_refused_by_the_length_of_its_header(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"text,b\n1,2\n")
    (tmp_path / "b.csv").write_bytes(b"text," + b"b" * (128 << 20))
    with pytest.raises(InvalidDataset, match=str(MAX_HEADER_BYTES)) as refused:
        join_shards([tmp_path / "a.csv", tmp_path / "b.csv"], tmp_path / "joined", max_bytes=MAX_BYTES)
    assert refused.value.code == "invalid_csv"


def test_a_shard_of_csv_that_is_one_line_is_its_header(tmp_path: Path) -> None:
    for name, content in (("a", b"\xef\xbb\xbftext,b"), ("b", b"text,b\n1,2"), ("c", b"text,b"), ("d", b"text,b\r\n3,4\r\n")):
        (tmp_path / f"{name}.csv").write_bytes(content)
    paths = [tmp_path / f"{name}.csv" for name in "abcd"]
    assert join_shards(paths, tmp_path / "joined", max_bytes=MAX_BYTES).read_bytes() == b"text,b\n1,2\n3,4\r\n"
    (tmp_path / "c.csv").write_bytes(b"1,2")
    with pytest.raises(InvalidDataset, match="another header"):
        join_shards(paths, tmp_path / "joined", max_bytes=MAX_BYTES)
