"""Files that are damaged, packed or hostile, and their validation."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from engine.data.ingest import IngestResult, Policies, validate_file
from tests.engine.data.examples_of import chat

GOOD = json.dumps(chat("hi", "hello")).encode()
LINES = b"\n".join(json.dumps(chat(f"q{i}", "a")).encode() for i in range(5)) + b"\n"
FEW = Policies(min_examples=1)


def parquet_bytes(tmp_path: Path, columns: dict[str, list[Any]]) -> bytes:
    pq.write_table(pa.table(columns), tmp_path / "made.parquet")
    return (tmp_path / "made.parquet").read_bytes()


def validate(tmp_path: Path, content: bytes, *, name: str = "rows.jsonl", policies: Policies = FEW) -> IngestResult:
    path, output = tmp_path / "upload", tmp_path / "out" / "rows.parquet"
    path.write_bytes(content)
    result = validate_file(path, filename=name, policies=policies, output=output)
    assert output.exists() == result.report.valid  # stored whole, or not at all
    assert [p.name for p in output.parent.iterdir()] == (["rows.parquet"] if result.report.valid else [])
    return result


def tar_of(content: bytes) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as archive:
        member = tarfile.TarInfo("rows.jsonl")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return held.getvalue()


def zip_of(content: bytes) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("rows.jsonl", content)
    return held.getvalue()


def zstd_of(*pieces: bytes) -> bytes:
    """Compressed piece by piece: what they are together is never held."""
    compressor = zstandard.ZstdCompressor().compressobj()
    return b"".join((*map(compressor.compress, pieces), compressor.flush()))
