"""Uploads: stored whole, validated once, never half-registered."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
import sqlalchemy as sa

from control_plane import tenants as tiers
from control_plane.api.validation import ValidationWorker
from control_plane.service import examination, files, tenants
from control_plane.service.platform import Platform
from control_plane.tables import datasets as datasets_table
from control_plane.tables import files as files_table
from control_plane.tenants import Tenant
from ft_assets.errors import InvalidRequest, Unavailable
from resources.object_store import LocalObjectStore


def upload(platform: Platform, tenant: Tenant, path: Path) -> Any:
    with path.open("rb") as stream:
        return files.create(platform, tenant.id, stream, filename=path.name, purpose="fine-tune")


def left_unvalidated(platform: Platform, tenant: Tenant, path: Path, *, age: timedelta = timedelta()) -> str:
    """The row that an upload leaves when its process dies before validating."""
    key = f"tenants/{tenant.id}/files/file-{path.stem}/{path.name}"
    platform.objects.put_file(key, path)
    row = {
        "id": f"file-{tenant.id}-{path.stem}",
        "tenant_id": tenant.id,
        "filename": path.name,
        "purpose": "fine-tune",
        "bytes": 1,
        "sha256": "0",
    }
    with platform.engine.begin() as conn:
        conn.execute(sa.insert(files_table).values(**row, object_key=key, status="uploaded", created_at=platform.clock() - age))
    return row["id"]  # type: ignore[return-value]


def versions(platform: Platform, tenant: Tenant) -> list[tuple[str, int]]:
    with platform.engine.connect() as conn:
        query = sa.select(datasets_table.c.name, datasets_table.c.version).where(datasets_table.c.tenant_id == tenant.id)
        return sorted((name, version) for name, version in conn.execute(query))


def test_another_content_under_the_same_name_is_its_next_version(
    platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path]
) -> None:
    for salt in ("", "b", "", "c"):
        upload(platform, tenant, write_chat_rows(salt=salt))
    assert versions(platform, tenant) == [("support", 1), ("support", 2), ("support", 3)]


def test_validating_at_once_registers_once(platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path]) -> None:
    file_id = left_unvalidated(platform, tenant, write_chat_rows())
    with ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(lambda _: files.validate(platform, file_id), range(4)))
    assert {(r["status"], r["dataset_id"]) for r in rows} == {("processed", rows[0]["dataset_id"])}
    assert versions(platform, tenant) == [("support", 1)]


def test_what_a_dead_process_left_unvalidated_is_found_and_validated(
    platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path]
) -> None:
    old = left_unvalidated(platform, tenant, write_chat_rows(name="old.jsonl"), age=timedelta(hours=1))
    new = left_unvalidated(platform, tenant, write_chat_rows(name="new.jsonl"))
    assert files.unvalidated(platform) == [old], "a new one is somebody's work at this moment"
    worker = ValidationWorker(platform)
    worker.start()
    worker.enqueue(new)
    deadline = time.monotonic() + 20
    while any(files.get(platform, tenant.id, f)["status"] == "uploaded" for f in (old, new)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    worker.stop()
    assert files.unvalidated(platform, older_than=timedelta()) == []


def test_a_file_whose_bytes_cannot_be_reached_now_is_not_refused(
    platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path], tmp_path: Path
) -> None:
    class Away(LocalObjectStore):
        def get_file(self, key: str, path: Path) -> None:
            raise Unavailable("the store is away")

    file_id = left_unvalidated(platform, tenant, write_chat_rows())
    with pytest.raises(Unavailable):
        files.validate(replace(platform, objects=Away(tmp_path / "away")), file_id)
    assert files.validate(platform, file_id)["status"] == "processed"


@pytest.mark.parametrize(
    "data", [b"", b"\x00" * 500, b"\xff\xfe{\x00", b"PK\x03\x04zip", b"{" * 100_000, b"\x1f\x8b\x08broken gzip", b"PAR1junkPAR1"]
)
def test_a_hostile_upload_ends_as_a_refused_file(platform: Platform, tenant: Tenant, data: bytes) -> None:
    file = files.create(platform, tenant.id, io.BytesIO(data), filename="x.jsonl", purpose="fine-tune")
    assert (file["status"], file["dataset_id"]) == ("error", None)
    assert file["status_details"]
    assert file["report"]["valid"] is False
    assert versions(platform, tenant) == []


@pytest.mark.parametrize("key", ["\\u0000", "\\ud800", "\\u001b[31m"])
def test_a_key_that_no_database_takes_is_reported_written_out(platform: Platform, tenant: Tenant, key: str) -> None:
    row = f'{{"{key}": 1, "{key}": 2}}\n'.encode()
    file = files.create(platform, tenant.id, io.BytesIO(row * 3), filename="x.jsonl", purpose="fine-tune")
    assert (file["status"], file["report"]["errors"][0]["code"]) == ("error", "duplicate_key")
    assert key in file["status_details"]
    assert file["status_details"].isprintable()


def test_a_file_whose_outcome_cannot_be_recorded_is_refused_and_not_left_waiting(
    fresh_platform: Platform, write_chat_rows: Callable[..., Path]
) -> None:
    made, _ = tenants.create(fresh_platform, "unlucky")
    with fresh_platform.engine.begin() as conn:
        conn.execute(sa.text("ALTER TABLE datasets ADD CONSTRAINT none_at_all CHECK (row_count < 0)"))
    file = upload(fresh_platform, made, write_chat_rows())
    assert (file["status"], file["dataset_id"]) == ("error", None)
    assert "tell your operator" in file["status_details"]
    assert files.unvalidated(fresh_platform, older_than=timedelta()) == []


def test_an_upload_beyond_the_tier_is_cut_off(platform: Platform, tmp_path: Path) -> None:
    chunk = b"x" * (1 << 26)

    class Endless(io.RawIOBase):
        num_bytes = 0

        def read(self, size: int = -1) -> bytes:
            self.num_bytes += len(chunk)
            return chunk

    class Sink(LocalObjectStore):
        """Reads like the others, and keeps nothing: the test is about a GiB."""

        def put_stream(self, key: str, stream: BinaryIO) -> int:
            return sum(len(part) for part in iter(stream.read, b""))

    made, _ = tenants.create(platform, "small-tier", tier="free")
    source = Endless()
    with pytest.raises(InvalidRequest, match="1 GiB") as refused:
        files.create(replace(platform, objects=Sink(tmp_path)), made.id, cast(BinaryIO, source), filename="x.jsonl", purpose="fine-tune")
    assert refused.value.code == "file_too_large"
    assert source.num_bytes == tiers.TIERS["free"].max_file_bytes + len(chunk)
    assert files.list_files(platform, made.id).items == []


def test_an_upload_that_breaks_off_leaves_no_file(platform: Platform, tenant: Tenant) -> None:
    class Broken(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            raise ConnectionResetError("the sender went away")

    with pytest.raises(ConnectionResetError):
        files.create(platform, tenant.id, cast(BinaryIO, Broken()), filename="x.jsonl", purpose="fine-tune")
    assert files.list_files(platform, tenant.id).items == []


def test_a_summary_names_the_first_problems_and_counts_the_others() -> None:
    errors = [{"row": i, "path": "messages[0]", "message": "is wrong", "code": "wrong_type"} for i in range(1, 11)]
    said = examination.summary({"errors": errors, "error_counts": {"wrong_type": 2000}}, "file-1")
    assert said.startswith("2000 problems: row 1, messages[0]: is wrong (wrong_type); row 2")
    assert "and 1997 more" in said
    assert said.endswith("GET /v1/datasets/file-1/report")
