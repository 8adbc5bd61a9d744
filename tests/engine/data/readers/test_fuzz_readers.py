"""A short run of the fuzzer of tests/fuzz: no file crashes anything, and none is half registered."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.files import CONTAINERS, ROWS
from tests.fuzz.readers import check, read

FIXTURE = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


def test_damaged_files_of_every_container_give_rows_or_a_refusal(tmp_path: Path) -> None:
    met: Counter[str] = Counter()
    for seed in range(600):
        met.update(check(seed, tmp_path))
    assert met["good"] > 50, "the damage left nothing to read"
    assert len(met) > 15, "the damage has too little variety to mean anything"


def test_damaged_files_never_register_half(tmp_path: Path) -> None:
    met: Counter[str] = Counter()
    for seed in range(10_000, 10_060):
        met.update(check(seed, tmp_path, whole=True))
    assert met["good"]
    assert len(met) > 5


@settings(max_examples=150, deadline=None, suppress_health_check=FIXTURE)
@given(content=st.binary(max_size=300), name=st.sampled_from(["a.jsonl", "a.json", "a.csv", "a.parquet", "a"]))
def test_any_bytes_give_rows_or_a_refusal(tmp_path: Path, content: bytes, name: str) -> None:
    (tmp_path / "upload").write_bytes(content)
    assert read(tmp_path / "upload", name, None) is not None


def test_every_damaged_byte_of_a_parquet_file_gives_rows_or_a_refusal(tmp_path: Path) -> None:
    """Parquet's own library ends the process on some of these."""
    whole = CONTAINERS["parquet"](ROWS["completion"])
    met: Counter[str] = Counter()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << (at % 8)
        (tmp_path / "upload").write_bytes(damaged)
        met.update(read(tmp_path / "upload", "a.parquet", None))
    assert met["truncated_container"] > 100
    assert met["good"] > 100, "some bytes matter to nobody"
