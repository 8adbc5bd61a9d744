"""Uploads: stored whole, validated once, never half-registered."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO, cast

import pytest
import sqlalchemy as sa

from control_plane.datasets import orphaned_objects, validation
from control_plane.datasets.tables import File
from control_plane.datasets.tables import datasets as datasets_table
from control_plane.datasets.tables import files as files_table
from control_plane.datasets.uploads import uploaded_files
from control_plane.datasets.validation_state import written
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.platform.context import Platform
from control_plane.tenants import rules as tiers
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from control_plane.worker.periodic_work import CLEANUP
from core.errors import InvalidRequest, Unavailable
from resources.object_store import LocalObjectStore
from tests.support.platform.background_worker import pass_time, work_off, working
from tests.support.platform.database_roles import as_owner
from tests.support.platform.deletable_tenants import killed_while_working
from tests.support.platform.lock_waits import wait_for_a_lock
from tests.support.processes.small_disk import small_disk


def upload(platform: Platform, tenant: Tenant, path: Path) -> File:
    with path.open("rb") as stream:
        return uploaded_files.create(platform, tenant.id, stream, filename=path.name, purpose="fine-tune")


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


def test_a_file_that_many_wait_for_is_validated_once(platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path]) -> None:
    file = upload(platform, tenant, write_chat_rows(3000))
    assert file.status == "uploaded"
    with working(platform), ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(lambda _: uploaded_files.wait_for_upload(platform, file), range(4)))
    assert {(r.status, r.dataset_id) for r in rows} == {("processed", rows[0].dataset_id)}
    assert versions(platform, tenant) == [("support", 1)]


def test_validating_at_once_registers_once(platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path]) -> None:
    file_id = left_unvalidated(platform, tenant, write_chat_rows())
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: uploaded_files.validate(platform, file_id), range(4)))
    assert uploaded_files.get(platform, tenant.id, file_id).status == "processed"
    assert versions(platform, tenant) == [("support", 1)]


def test_a_small_file_whose_upload_died_before_its_validation_is_validated_by_the_worker(
    platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path]
) -> None:
    path = write_chat_rows()
    with path.open("rb") as stream:
        stored = uploaded_files.store(platform, tenant.id, stream, filename=path.name)
    with platform.engine.begin() as conn:  # as `register` does before it validates
        given = {"column_map": None, "policies": None, "model": None}
        uploaded_files.insert(conn, tenant.id, stored, at_once=True, now=platform.clock(), **given)
    work_off(platform)
    assert uploaded_files.get(platform, tenant.id, stored.file_id).status == "uploaded", "it is somebody's work at this moment"
    pass_time(platform, uploaded_files.ABANDONED_AFTER.total_seconds())
    work_off(platform)
    assert uploaded_files.get(platform, tenant.id, stored.file_id).status == "processed"


def test_the_worker_removes_what_a_killed_process_left(platform: Platform, tenant: Tenant) -> None:
    left = killed_while_working(platform.settings.work_dir, tenant.id)
    assert left.exists()
    assert "leftovers removed: 1" in CLEANUP.run(platform)
    assert not left.exists()


def test_a_file_whose_bytes_cannot_be_reached_now_is_not_refused(
    platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path], tmp_path: Path
) -> None:
    class Away(LocalObjectStore):
        def get_file(self, key: str, path: Path) -> None:
            raise Unavailable("the store is away")

    file_id = left_unvalidated(platform, tenant, write_chat_rows())
    with pytest.raises(Unavailable):
        uploaded_files.validate(replace(platform, objects=Away(tmp_path / "away")), file_id)
    assert uploaded_files.validate(platform, file_id).status == "processed"


def test_a_full_disk_refuses_no_file(platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path]) -> None:
    path = write_chat_rows()
    with small_disk(platform.settings.work_dir, "64m") as disk:
        disk.fill()
        file = upload(platform, tenant, path)
        assert file.status == "uploaded", "its bytes are stored, and its task validates them"
        with pytest.raises(Unavailable, match="no disk space for temporary files"):
            uploaded_files.validate(platform, file.id)
        disk.free()
        assert uploaded_files.validate(platform, file.id).status == "processed"


def test_only_a_tiny_uncompressed_upload_is_read_by_the_process_that_took_it(
    platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path], tmp_path: Path
) -> None:
    for head in (b"\x1f\x8b\x08\x00", b"\x28\xb5\x2f\xfd", b"PAR1"):
        assert not validation.is_read_here(10, head)
    assert [validation.is_read_here(n << 10, b'{"a"') for n in (0, 256, 257)] == [True, True, False]
    tiny, packed = write_chat_rows(), tmp_path / "packed.jsonl.gz"
    packed.write_bytes(gzip.compress(tiny.read_bytes()))
    bigger = write_chat_rows(3000, name="bigger.jsonl")
    assert tiny.stat().st_size < validation.HERE_BYTES < bigger.stat().st_size
    assert [upload(platform, tenant, path).status for path in (tiny, packed, bigger)] == ["processed", "uploaded", "uploaded"]


def test_what_was_begun_before_is_read_apart_and_ended_at_its_limit(
    platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path]
) -> None:
    tight = replace(platform, settings=replace(platform.settings, validation_memory_bytes=1 << 20))
    path = write_chat_rows()
    assert upload(tight, tenant, path).status == "processed", "the limit is that of children"
    refused = uploaded_files.validate(tight, left_unvalidated(platform, tenant, path))
    assert (refused.status, refused.status_code) == ("error", "validation_crashed")
    assert "more than the 0.000977 GiB of memory that one file may take" in refused.status_details
    assert uploaded_files.validate_again(platform, tenant.id, refused.id).status == "uploaded"
    assert uploaded_files.validate(platform, refused.id).status == "processed"


def test_a_registered_dataset_is_not_written_again(platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path]) -> None:
    first = upload(platform, tenant, write_chat_rows())
    objects = list(platform.objects.list(f"tenants/{tenant.id}/datasets/{first.dataset_id}"))
    assert len(objects) == 3
    for stored in objects:
        platform.objects.put_bytes(stored.key, b"marked")
    second = upload(platform, tenant, write_chat_rows(name="same.jsonl"))
    assert (second.status, second.dataset_id) == ("processed", first.dataset_id)
    assert [platform.objects.get_bytes(stored.key) for stored in objects] == [b"marked"] * 3
    platform.objects.delete(next(o.key for o in objects if o.key.endswith("rows.parquet")))
    upload(platform, tenant, write_chat_rows(name="again.jsonl"))
    assert b"marked" not in [platform.objects.get_bytes(stored.key) for stored in objects], "what was lost is made whole"


def test_a_deleted_file_leaves_no_quotes_of_its_rows(platform: Platform, tenant: Tenant, tmp_path: Path) -> None:
    (tmp_path / "faq.jsonl").write_text('{"anfrage_text": "Kundin Ann", "erledigt": 1}\n' * 12)
    made = upload(platform, tenant, tmp_path / "faq.jsonl")
    assert made.status == "error" and "Kundin Ann" in str(made.report["problems"])
    uploaded_files.delete(platform, tenant.id, made.id)
    with platform.engine.connect() as conn:
        left = conn.execute(sa.select(files_table).where(files_table.c.id == made.id)).mappings().one()
    assert left["deleted_at"] is not None
    assert "Kundin Ann" not in str(dict(left))


def test_a_file_deleted_under_its_validation_leaves_no_dataset(
    platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path]
) -> None:
    class Deleting(LocalObjectStore):
        """Its tenant deletes the file as soon as its bytes are read, or just before."""

        def get_file(self, key: str, path: Path) -> None:
            if early:
                uploaded_files.delete(platform, tenant.id, file_id)
            super().get_file(key, path)
            if not early:
                uploaded_files.delete(platform, tenant.id, file_id)

    hasty = replace(platform, objects=Deleting(platform.settings.home / "objects"))
    for early in (False, True):
        file_id = left_unvalidated(platform, tenant, write_chat_rows(name=f"{early}.jsonl"))
        found = uploaded_files.validate(hasty, file_id)
        assert (found.status, found.dataset_id) == ("uploaded", None)
        assert found.deleted_at is not None
    assert versions(platform, tenant) == []
    later = replace(platform, clock=lambda: platform.clock() + orphaned_objects.WAITS + timedelta(hours=1))
    orphaned_objects.remove_due(later)
    assert [info.key for info in platform.objects.list(f"tenants/{tenant.id}")] == []


def test_the_objects_of_a_registered_dataset_stay_when_another_file_of_the_same_content_is_deleted_under_its_validation(
    platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path]
) -> None:
    def examined(name: str) -> tuple[str, validation.Accepted]:
        file_id = left_unvalidated(platform, tenant, write_chat_rows(name=name))
        outcome = validation.examine(platform, uploaded_files.get(platform, tenant.id, file_id), apart=False)
        assert isinstance(outcome, validation.Accepted)
        return file_id, outcome

    (one, first), (two, _) = examined("one.jsonl"), examined("two.jsonl")
    uploaded_files.delete(platform, tenant.id, two)
    assert written(platform, one, first, None).dataset_id == first.dataset_id
    examined("three.jsonl")
    later = replace(platform, clock=lambda: platform.clock() + orphaned_objects.WAITS + timedelta(hours=1))
    orphaned_objects.remove_due(later)
    assert len(list(platform.objects.list(f"tenants/{tenant.id}/datasets"))) == 3


def test_a_file_whose_validation_ends_while_a_job_is_submitted_on_it_holds_up_neither(
    platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path]
) -> None:
    file_id = left_unvalidated(platform, tenant, write_chat_rows())
    outcome = validation.examine(platform, uploaded_files.get(platform, tenant.id, file_id), apart=False)
    ends = list[Future[File]]()

    def locked(_conn: object, _cursor: object, statement: str, *_: object) -> None:  # by the submission, for the first time
        if "\nFROM " in statement and " FOR " in statement and not ends:
            ends.append(pool.submit(written, platform, file_id, outcome, None))
            wait_for_a_lock(platform)

    sa.event.listen(platform.engine, "after_cursor_execute", locked)
    try:
        with ThreadPoolExecutor(1) as pool:
            made = jobs.submit(platform, tenant.id, JobRequest.from_body({"model": "tiny-base", "training_file": file_id}))
    finally:
        sa.event.remove(platform.engine, "after_cursor_execute", locked)
    assert made.created
    assert ends[0].result().status == "processed", "two orders of locking would have been a deadlock"


@pytest.mark.parametrize(
    "data", [b"", b"\x00" * 500, b"\xff\xfe{\x00", b"PK\x03\x04zip", b"{" * 100_000, b"\x1f\x8b\x08broken gzip", b"PAR1junkPAR1"]
)
def test_a_hostile_upload_ends_as_a_refused_file(platform: Platform, tenant: Tenant, data: bytes) -> None:
    made = uploaded_files.create(platform, tenant.id, io.BytesIO(data), filename="x.jsonl", purpose="fine-tune")
    file = uploaded_files.validate(platform, made.id)
    assert (file.status, file.dataset_id) == ("error", None)
    assert file.status_details
    assert file.report["valid"] is False
    assert versions(platform, tenant) == []


@pytest.mark.parametrize("key", ["\\u0000", "\\ud800", "\\u001b[31m"])
def test_a_key_that_no_database_takes_is_reported_written_out(platform: Platform, tenant: Tenant, key: str) -> None:
    row = f'{{"{key}": 1, "{key}": 2}}\n'.encode()
    file = uploaded_files.create(platform, tenant.id, io.BytesIO(row * 3), filename="x.jsonl", purpose="fine-tune")
    assert (file.status, file.report["errors"][0]["code"]) == ("error", "duplicate_key")
    assert key in file.status_details
    assert file.status_details.isprintable()


def test_a_file_whose_outcome_cannot_be_recorded_is_refused_and_not_left_waiting(
    fresh_platform: Platform, write_chat_rows: Callable[..., Path]
) -> None:
    made, _ = tenants.create(fresh_platform, "unlucky")
    with as_owner(fresh_platform).begin() as conn:
        conn.execute(sa.text("ALTER TABLE datasets ADD CONSTRAINT none_at_all CHECK (row_count < 0)"))
    file = upload(fresh_platform, made, write_chat_rows())
    assert (file.status, file.dataset_id) == ("error", None)
    assert "tell your operator" in file.status_details


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
        uploaded_files.create(
            replace(platform, objects=Sink(tmp_path)), made.id, cast(BinaryIO, source), filename="x.jsonl", purpose="fine-tune"
        )
    assert refused.value.code == "file_too_large"
    assert source.num_bytes == tiers.TIERS["free"].max_file_bytes + len(chunk)
    assert uploaded_files.list_files(platform, made.id).items == []


def test_an_upload_that_breaks_off_leaves_no_file(platform: Platform, tenant: Tenant) -> None:
    class Broken(io.RawIOBase):
        def read(self, size: int = -1) -> bytes:
            raise ConnectionResetError("the sender went away")

    with pytest.raises(ConnectionResetError):
        uploaded_files.create(platform, tenant.id, cast(BinaryIO, Broken()), filename="x.jsonl", purpose="fine-tune")
    assert uploaded_files.list_files(platform, tenant.id).items == []


def test_a_summary_names_the_first_causes_and_counts_the_others() -> None:
    examples = [{"row": i, "byte_offset": 0, "path": "messages[0]", "message": "is wrong", "excerpt": None} for i in (1, 2, 3)]
    causes = [{"code": "wrong_type", "count": 2000, "path": "messages[]", "message": "is wrong", "examples": examples}] * 5
    said = validation.summary({"problems": causes}, "file-1")
    assert said.startswith("2,000 rows (1, 2, 3, ...), messages[]: is wrong (wrong_type); 2,000 rows")
    assert "and 2 more kinds of problem" in said
    assert said.endswith("GET /v1/datasets/file-1/report")
