"""Files that unpack to far more than they hold: refused within bounded memory and time, ordinary files read whole."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from core.errors import Fault, InvalidDataset
from engine.data.ingest import Policies, validate_file
from engine.data.readers.parquet_rows import parquet_rows
from engine.data.readers.row_stream import open_rows
from tests.engine.data.bad_files import FEW, parquet_bytes, validate
from tests.engine.data.examples_of import chat


def test_a_bomb_is_cut_at_the_limit(tmp_path: Path) -> None:
    limits = Policies(min_examples=1, max_bytes=10_000_000)
    for content, name in (
        (gzip.compress(b"[" + b" " * 50_000_000), "rows.json.gz"),
        (zstandard.compress(b"x" * 50_000_000), "rows.jsonl.zst"),
        (parquet_bytes(tmp_path, {"text": ["x" * 20_000_000]}), "rows.parquet"),
    ):
        assert validate(tmp_path, content, name=name, policies=limits).report.error_counts == {"file_too_large": 1}


def dictionary_bomb(path: Path, *, nested: bool) -> None:
    """A few KB that decode to 2 GB: one long value, named again and again."""
    long = pa.array(["x" * 10_000_000])
    if nested:
        rows = pa.array([[{"role": "user", "content": "y" * 3_000_000}] for _ in range(96)])
        pq.write_table(pa.table({"messages": rows}), path, compression="zstd", store_schema=False)
    else:
        table = pa.table({"text": pa.DictionaryArray.from_arrays(pa.array([0] * 200, pa.int32()), long)})
        pq.write_table(table, path, compression="zstd", store_schema=False)


@pytest.mark.parametrize("nested", [True, False])
def test_a_parquet_file_of_one_long_value_repeated_is_read_in_bounded_memory(tmp_path: Path, nested: bool) -> None:
    path = tmp_path / "bomb.parquet"
    dictionary_bomb(path, nested=nested)
    assert path.stat().st_size < 20_000
    num_rows = 96 if nested else 200
    before = pa.total_allocated_bytes()
    peak = 0
    count = 0
    for row in parquet_rows(path, max_bytes=10 << 30)[1]:  # without the limit that refuses such a file
        count += 1
        peak = max(peak, pa.total_allocated_bytes() - before)
        assert nested or len(row.value["text"]) == 10_000_000
    assert count == num_rows
    assert peak < 600_000_000


TINY = b"{}\n" * 3_000_000
BOMBS: dict[str, tuple[Callable[[], bytes], str, str]] = {
    "gzip of empty objects": (lambda: gzip.compress(TINY), "rows.jsonl.gz", "too_many_rows"),
    "zstd of empty objects": (lambda: zstandard.compress(TINY), "rows.jsonl.zst", "too_many_rows"),
    "gzip of tiny chats": (lambda: gzip.compress(b'{"text":"a"}\n' * 2_000_000), "rows.jsonl.gz", "too_many_rows"),
    "gzip of CSV records": (lambda: gzip.compress(b"text\n" + b"a\n" * 2_000_000), "rows.csv.gz", "too_many_rows"),
    "gzip of an array": (lambda: gzip.compress(b"[" + b"{}," * 2_000_000 + b"{}]"), "rows.json.gz", "too_many_rows"),
    "empty objects in plain": (lambda: TINY, "rows.jsonl", "too_many_rows"),
}


@pytest.mark.parametrize("case", BOMBS)
def test_a_file_of_more_rows_than_its_size_can_hold_is_refused_at_once(tmp_path: Path, case: str) -> None:
    make, name, code = BOMBS[case]
    content = make()
    began = time.process_time()
    report = validate(tmp_path, content, name=name).report
    assert list(report.error_counts) == [code] or report.error_counts[code] == 1
    assert not report.valid
    error = next(e for e in report.errors if e.code == code)
    assert error.row is None and f"{len(content)} stored bytes" in error.message and "remove empty and repeated rows" in error.message
    assert time.process_time() - began < 25


def alike(num_rows: int, num_chars: int) -> bytes:
    """Chats that repeat one word and have a random digit of their own each."""
    rng, text = random.Random(0), "refund " * (num_chars // 7)
    return b"".join(json.dumps(chat(f"{text}{rng.randrange(10)}", "Yes.")).encode() + b"\n" for _ in range(num_rows))


SMALL_BOMBS = {
    "rows of 860 bytes": ((45_000, 760), "too_many_rows", 35_000),
    "rows of 16 KB": ((5_000, 16_000), "file_too_large", 4_500),
}


@pytest.mark.parametrize("suffix", ["gz", pytest.param("zst", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", SMALL_BOMBS)
def test_a_small_compressed_file_has_rows_and_bytes_for_a_minute_at_most(tmp_path: Path, case: str, suffix: str) -> None:
    (size, code, most), path = SMALL_BOMBS[case], tmp_path / "upload"
    plain = alike(*size)
    path.write_bytes(gzip.compress(plain, 6) if suffix == "gz" else zstandard.compress(plain))
    rows = open_rows(path, filename=f"rows.jsonl.{suffix}").rows
    with pytest.raises(InvalidDataset, match="or upload it as JSONL without compression") as refused:
        deque(itertools.islice(rows, most), maxlen=0)
    assert refused.value.code == code and refused.value.fault is Fault.USER


@pytest.mark.parametrize("written", ["gzip", "zstd", "parquet"])
def test_ordinary_short_chats_with_one_system_prompt_are_read_whole(tmp_path: Path, written: str) -> None:
    rng, path, num_rows = random.Random(0), tmp_path / "upload", 12_000
    words = ["refund", "card", "order", "late", "customer", "lost", "please", "help", "account", "charged", "twice", "my"]
    prompt = " ".join(rng.choice(words) for _ in range(300))
    said = [(" ".join(rng.choice(words) for _ in range(10)), rng.choice(words)) for _ in range(num_rows)]
    rows = [{"messages": [{"role": "system", "content": prompt}, *chat(*texts)["messages"]]} for texts in said]
    if written == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, compression="zstd", compression_level=19)
    else:
        plain = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
        path.write_bytes(gzip.compress(plain) if written == "gzip" else zstandard.compress(plain, 12))
    assert 10 < path.stat().st_size / num_rows < 40, "the case is not one"
    assert (
        sum(1 for _ in open_rows(path, filename={"gzip": "a.jsonl.gz", "zstd": "a.jsonl.zst"}.get(written, "a.parquet")).rows) == num_rows
    )


@pytest.mark.parametrize("long", [False, True])
def test_a_parquet_bomb_is_a_fault_of_the_file(tmp_path: Path, long: bool) -> None:
    num_rows, value = (500, "x" * 1_000_000) if long else (5_000_000, "a")
    table = pa.table({"text": pa.DictionaryArray.from_arrays(pa.array(np.zeros(num_rows, np.int32)), pa.array([value]))})
    pq.write_table(table, tmp_path / "rows.parquet", compression="zstd", store_schema=False)
    assert (tmp_path / "rows.parquet").stat().st_size < 1_000_000
    report = validate_file(tmp_path / "rows.parquet", filename="rows.parquet", policies=FEW).report
    assert ("file_too_large" if long else "too_many_rows") in report.error_counts and not report.valid


def repeated_rows(path: Path) -> str:
    """1.3 MB of 5 million tiny rows: one value in a dictionary, and a text that does not compress in the last row."""
    num_rows = 5_000_000
    noise = pa.array(["".join(random.Random(0).choices("0123456789abcdef", k=2_600_000))])
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(num_rows, np.int32)), pa.array(["a"]))
    note = pa.concat_arrays([pa.nulls(num_rows - 1, pa.string()), noise])
    pq.write_table(pa.table({"text": text, "note": note}), path, compression="zstd", store_schema=False, write_statistics=False)
    return "too_many_rows"


def empty_messages(path: Path) -> str:
    """A few bytes of 400 rows of 10,000 messages without content: all levels, no value."""
    messages = pa.StructArray.from_arrays([pa.nulls(4_000_000, pa.string())] * 2, ["role", "content"])
    offsets = pa.array(np.arange(0, 4_000_001, 10_000, dtype=np.int32))
    pq.write_table(pa.table({"messages": pa.ListArray.from_arrays(offsets, messages)}), path, compression="zstd", store_schema=False)
    return "file_too_large"


@pytest.mark.parametrize("written", [repeated_rows, empty_messages])
def test_a_parquet_file_that_claims_more_than_its_bytes_can_hold_is_refused_before_a_row_is_read(
    tmp_path: Path, written: Callable[[Path], str]
) -> None:
    path = tmp_path / "rows.parquet"
    code = written(path)
    assert path.stat().st_size < 1_500_000
    with pytest.raises(InvalidDataset, match="stored bytes") as refused:
        open_rows(path, filename="rows.parquet")
    assert refused.value.code == code
    report = validate_file(path, filename="rows.parquet", policies=FEW).report
    assert (report.valid, report.rows, report.error_counts) == (False, 0, {code: 1})


def test_long_conversations_of_short_messages_are_no_bomb(tmp_path: Path) -> None:
    rng = random.Random(0)
    said = [f"{rng.getrandbits(20)}" for _ in range(600_000)]
    messages = pa.array([m for text in said for m in ({"role": "user", "content": text}, {"role": "assistant", "content": "yes"})])
    offsets = pa.array(np.arange(0, len(messages) + 1, 100, dtype=np.int32))
    pq.write_table(pa.table({"messages": pa.ListArray.from_arrays(offsets, messages)}), tmp_path / "rows.parquet", compression="zstd")
    assert open_rows(tmp_path / "rows.parquet", filename="rows.parquet").columns == ("messages",)


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_one_long_system_prompt_in_every_row_is_no_bomb(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    rng = random.Random(1)
    prompt = " ".join(rng.choice(["refund", "card", "order", "never", "always", "customer", "ask"]) for _ in range(1300))
    rows = [
        {
            "messages": [
                {"role": "system", "content": prompt},
                *({"role": r, "content": f"{r} {rng.random()}"} for r in ("user", "assistant")),
            ]
        }
        for _ in range(3000)
    ]
    plain = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    content = compress(plain)
    assert len(plain) / len(content) > 50, "the case is not one"
    assert validate(tmp_path, content, name="rows.jsonl.gz").report.valid


def test_a_parquet_row_over_16_mib_is_reported_and_the_next_one_read(tmp_path: Path) -> None:
    content = parquet_bytes(tmp_path, {"text": ["a", "x" * (16 * 1024 * 1024 + 1), "b"]})
    report = validate(tmp_path, content, name="rows.parquet").report
    assert [(e.row, e.code) for e in report.errors] == [(2, "line_too_long")]
    assert report.examples == 2


def test_a_parquet_column_that_claims_too_many_values_is_refused(tmp_path: Path) -> None:
    table = pa.table({"x": pa.ListArray.from_arrays([0, 72 << 20], pa.array(np.zeros(72 << 20, np.int8)))})
    pq.write_table(table, tmp_path / "rows.parquet", compression="zstd")
    assert (tmp_path / "rows.parquet").stat().st_size < 1_000_000
    report = validate_file(tmp_path / "rows.parquet", filename="rows.parquet", policies=FEW).report
    assert report.error_counts == {"file_too_large": 1}


def test_a_parquet_file_of_too_many_rows_is_told_as_one_that_is_packed(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"text": ["a"] * 100_000}), path)
    with pytest.raises(InvalidDataset, match=r"under 10 bytes a row; .* or upload it as JSONL without compression") as refused:
        deque(open_rows(path, filename=path.name).rows, maxlen=0)
    assert refused.value.code == "too_many_rows"
