"""Uploads in parts: whatever dies, races or runs out, there is the whole file or none."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO

import pytest
import sqlalchemy as sa

from control_plane.datasets import orphaned_objects
from control_plane.datasets.tables import files as file_rows
from control_plane.datasets.tables import loose_objects as loose_rows
from control_plane.datasets.uploads import multipart_uploads, uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.notifications.tables import outbox
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant, tier_named
from control_plane.worker.periodic_work import CLEANUP
from core.errors import Conflict, IntegrityError, InvalidRequest, QuotaExceeded, Unavailable
from resources.object_store import LocalObjectStore
from tests.support.jobs.followed_jobs import until


def send(platform: Platform, tenant: str, data: bytes, *, size: int = 5000, expires_after_s: int | None = None) -> tuple[str, list[str]]:
    usual = {"filename": "rows.jsonl", "purpose": "fine-tune", "mime_type": "application/jsonl"}
    made = multipart_uploads.create(platform, tenant, num_bytes=len(data), expires_after_s=expires_after_s, **usual)
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    return made.row.id, [multipart_uploads.add_part(platform, tenant, made.row.id, io.BytesIO(p)).id for p in pieces]


def later(platform: Platform, **time: float) -> Platform:
    return replace(platform, clock=lambda: platform.clock() + timedelta(**time))


def keys(platform: Platform, tenant: str, kind: str) -> list[str]:
    return [o.key for o in platform.objects.list(f"tenants/{tenant}/{kind}")]


@pytest.fixture
def rows(write_chat_rows: Callable[..., Path]) -> bytes:
    return write_chat_rows().read_bytes()


HOLDERS = (
    "SELECT pg_terminate_backend(pid) FROM pg_locks JOIN pg_database d ON d.oid = database "
    "WHERE locktype = 'advisory' AND granted AND datname = current_database()"
)


class Dying(BaseException):
    """A process that ends here."""


class DiesBehindThePut(LocalObjectStore):
    def put_stream(self, key: str, stream: BinaryIO) -> int:
        super().put_stream(key, stream)
        raise Dying


class Away(LocalObjectStore):
    def put_stream(self, key: str, stream: BinaryIO) -> int:
        stream.read(1000)
        raise Unavailable("the object store is away", code="object_store_unavailable")


@pytest.mark.parametrize(("store", "error"), [(DiesBehindThePut, Dying), (Away, Unavailable)])
def test_a_join_that_dies_is_made_again_from_the_parts(
    platform: Platform, tenant: Tenant, rows: bytes, store: type[LocalObjectStore], error: type[BaseException]
) -> None:
    upload, parts = send(platform, tenant.id, rows)
    assert isinstance(platform.objects, LocalObjectStore)
    with pytest.raises(error):
        multipart_uploads.complete(replace(platform, objects=store(platform.objects.root)), tenant.id, upload, part_ids=parts)
    view = multipart_uploads.get(platform, tenant.id, upload)
    assert (view.status, len(view.parts), view.file) == ("pending", len(parts), None)
    made = multipart_uploads.complete(platform, tenant.id, upload, part_ids=parts)
    assert made.file is not None
    assert (made.file.status, made.file.sha256) == ("processed", hashlib.sha256(rows).hexdigest())
    assert keys(platform, tenant.id, "uploads") == []


def test_a_part_that_was_damaged_in_the_store_makes_no_file(platform: Platform, tenant: Tenant, rows: bytes) -> None:
    upload, parts = send(platform, tenant.id, rows)
    key = keys(platform, tenant.id, "uploads")[0]
    data = bytearray(platform.objects.get_bytes(key))
    data[7] ^= 1
    platform.objects.put_bytes(key, bytes(data))
    with pytest.raises(IntegrityError):
        multipart_uploads.complete(platform, tenant.id, upload, part_ids=parts)
    assert keys(platform, tenant.id, "files") == []


def test_an_upload_that_is_over_takes_nothing_and_loses_its_parts(platform: Platform, tenant: Tenant, rows: bytes) -> None:
    upload, parts = send(platform, tenant.id, rows)
    soon, over = later(platform, minutes=59), later(platform, minutes=61)
    assert multipart_uploads.get(soon, tenant.id, upload).status == "pending"
    assert multipart_uploads.get(over, tenant.id, upload).status == "expired"
    for call in (
        lambda: multipart_uploads.add_part(over, tenant.id, upload, io.BytesIO(b"x")),
        lambda: multipart_uploads.complete(over, tenant.id, upload, part_ids=parts),
        lambda: multipart_uploads.cancel(over, tenant.id, upload),
    ):
        with pytest.raises(Conflict) as refused:
            call()
        assert refused.value.code == "upload_expired"
    CLEANUP.run(soon)
    assert len(keys(platform, tenant.id, "uploads")) == len(parts)
    assert "failed" not in CLEANUP.run(over)
    assert keys(platform, tenant.id, "uploads") == []
    assert multipart_uploads.get(platform, tenant.id, upload).status == "expired"


def test_each_part_gives_an_upload_another_hour_and_none_more_than_a_day(platform: Platform, tenant: Tenant) -> None:
    made = multipart_uploads.create(platform, tenant.id, num_bytes=100, filename="a", purpose="fine-tune", mime_type="text/plain").row
    for hours in range(1, 31):
        at = later(platform, hours=0.9 * hours)
        try:
            multipart_uploads.add_part(at, tenant.id, made.id, io.BytesIO(bytes([hours])))
        except Conflict:
            break
    assert hours == 27  # 24.3 hours
    assert multipart_uploads.get(platform, tenant.id, made.id).row.expires_at - made.created_at == timedelta(hours=24)


def test_parts_of_a_completed_upload_that_were_left_are_removed_later(platform: Platform, tenant: Tenant, rows: bytes) -> None:
    class Undeletable(LocalObjectStore):
        def delete(self, key: str) -> None:
            raise Unavailable("the object store is away", code="object_store_unavailable")

    upload, parts = send(platform, tenant.id, rows)
    assert isinstance(platform.objects, LocalObjectStore)
    made = multipart_uploads.complete(replace(platform, objects=Undeletable(platform.objects.root)), tenant.id, upload, part_ids=parts)
    assert made.status == "completed"
    assert len(keys(platform, tenant.id, "uploads")) == len(parts)
    CLEANUP.run(platform)
    assert keys(platform, tenant.id, "uploads") == []
    assert made.file is not None
    assert platform.objects.get_bytes(made.file.object_key) == rows


def test_a_file_whose_time_is_over_is_deleted_once_no_job_needs_it(platform: Platform, tenant: Tenant, rows: bytes) -> None:
    upload, parts = send(platform, tenant.id, rows, expires_after_s=3600)
    file = multipart_uploads.complete(platform, tenant.id, upload, part_ids=parts).file
    assert file is not None
    job = jobs.submit(platform, tenant.id, JobRequest.from_body({"model": "tiny-base", "training_file": file.id})).job.id
    over = later(platform, minutes=61)
    uploaded_files.delete_expired(over)
    assert uploaded_files.get(platform, tenant.id, file.id).deleted_at is None
    jobs.cancel(platform, tenant.id, job)
    uploaded_files.delete_expired(platform)
    assert len(keys(platform, tenant.id, "files")) == 1
    uploaded_files.delete_expired(over)
    assert keys(platform, tenant.id, "files") == []
    assert uploaded_files.list_files(platform, tenant.id).items == []


def test_what_became_of_a_file_is_told_with_its_row(platform: Platform, tenant: Tenant, rows: bytes) -> None:
    good = uploaded_files.create(platform, tenant.id, io.BytesIO(rows), filename="good.jsonl", purpose="fine-tune")
    bad = uploaded_files.create(platform, tenant.id, io.BytesIO(b"no json\n"), filename="bad.jsonl", purpose="fine-tune")
    with platform.engine.connect() as conn:
        told = conn.execute(sa.select(outbox.c.type, outbox.c.data).where(outbox.c.tenant_id == tenant.id).order_by(outbox.c.seq)).all()
    assert [kind for kind, _ in told] == ["file.processed", "file.refused"]
    assert told[0].data == {"id": good.id, "status": "processed", "dataset_id": good.dataset_id}
    assert told[1].data == {"id": bad.id, "status": "error", "status_code": bad.status_code}


def test_an_upload_that_is_cancelled_while_it_is_joined_makes_no_file(platform: Platform, tenant: Tenant, rows: bytes) -> None:
    upload, parts = send(platform, tenant.id, rows)

    class Cancelled(LocalObjectStore):
        def put_stream(self, key: str, stream: BinaryIO) -> int:
            multipart_uploads.cancel(platform, tenant.id, upload)
            return super().put_stream(key, stream)

    assert isinstance(platform.objects, LocalObjectStore)
    with pytest.raises(Conflict) as refused:
        multipart_uploads.complete(replace(platform, objects=Cancelled(platform.objects.root)), tenant.id, upload, part_ids=parts)
    assert refused.value.code == "upload_cancelled"
    assert keys(platform, tenant.id, "files") == keys(platform, tenant.id, "uploads") == []


def test_one_that_lost_its_turn_takes_nothing_from_the_one_that_finished(platform: Platform, tenant: Tenant, rows: bytes) -> None:
    upload, parts = send(platform, tenant.id, rows)
    made: list[multipart_uploads.View] = []

    class Late(LocalObjectStore):
        def put_stream(self, key: str, stream: BinaryIO) -> int:
            num_bytes = super().put_stream(key, stream)
            with platform.engine.connect() as conn:  # its session dies, and somebody else has the turn
                conn.execute(sa.text(HOLDERS))
            made.append(multipart_uploads.complete(platform, tenant.id, upload, part_ids=parts))
            return num_bytes

    assert isinstance(platform.objects, LocalObjectStore)
    view = multipart_uploads.complete(replace(platform, objects=Late(platform.objects.root)), tenant.id, upload, part_ids=parts)
    file = made[0].file
    assert file is not None and view.file is not None
    assert view.file.id == file.id
    assert platform.objects.get_bytes(file.object_key) == rows


def announce(platform: Platform, tenant: str, num_bytes: int) -> str:
    usual = {"filename": "rows.jsonl", "purpose": "fine-tune", "mime_type": "application/jsonl"}
    return str(multipart_uploads.create(platform, tenant, num_bytes=num_bytes, **usual).row.id)


def test_no_more_uploads_are_open_than_may_be_however_many_are_announced_at_once(platform: Platform, tenant: Tenant) -> None:
    def one(_: int) -> str:
        try:
            return announce(platform, tenant.id, 1)
        except QuotaExceeded as refused:
            return refused.code

    with ThreadPoolExecutor(8) as pool:
        made = sorted(pool.map(one, range(multipart_uploads.MAX_PENDING + 8)))
    assert made[:8] == ["too_many_uploads"] * 8
    assert all(id_.startswith("upload_") for id_ in made[8:])
    multipart_uploads.cancel(platform, tenant.id, made[8])
    announce(platform, tenant.id, 1)


def test_open_uploads_announce_no_more_than_two_of_the_largest_files(platform: Platform, tenant: Tenant) -> None:
    largest = tier_named("standard").max_file_bytes
    first = announce(platform, tenant.id, largest)
    announce(platform, tenant.id, largest)
    with pytest.raises(QuotaExceeded, match="20 GiB"):
        announce(platform, tenant.id, 1)
    multipart_uploads.cancel(platform, tenant.id, first)
    announce(platform, tenant.id, largest)


def test_a_file_whose_content_repeats_names_one_part_again_but_not_without_end(platform: Platform, tenant: Tenant, rows: bytes) -> None:
    upload, parts = send(platform, tenant.id, rows * 3, size=len(rows))
    assert (len(parts), len(set(parts)), len(keys(platform, tenant.id, "uploads"))) == (3, 1, 1)
    with pytest.raises(InvalidRequest) as refused:
        multipart_uploads.complete(platform, tenant.id, upload, part_ids=parts[:1] * (multipart_uploads.MAX_PARTS + 1))
    assert (refused.value.code, refused.value.param) == ("too_many_parts", "part_ids")
    file = multipart_uploads.complete(platform, tenant.id, upload, part_ids=parts).file
    assert file is not None
    assert platform.objects.get_bytes(file.object_key) == rows * 3


def loose(platform: Platform, tenant: str) -> list[str]:
    with platform.engine.connect() as conn:
        return list(conn.execute(sa.select(loose_rows.c.object_key).where(loose_rows.c.tenant_id == tenant)).scalars())


def test_what_a_killed_process_stored_is_removed_when_nobody_can_claim_it_any_more(platform: Platform, tenant: Tenant, rows: bytes) -> None:
    upload, parts = send(platform, tenant.id, rows)
    assert isinstance(platform.objects, LocalObjectStore)
    dying = replace(platform, objects=DiesBehindThePut(platform.objects.root))
    for killed in (
        lambda: multipart_uploads.add_part(dying, tenant.id, upload, io.BytesIO(rows[:5000])),
        lambda: multipart_uploads.complete(dying, tenant.id, upload, part_ids=parts),
        lambda: uploaded_files.create(dying, tenant.id, io.BytesIO(rows), filename="good.jsonl", purpose="fine-tune"),
    ):
        with pytest.raises(Dying):
            killed()
    kept = uploaded_files.create(platform, tenant.id, io.BytesIO(rows), filename="kept.jsonl", purpose="fine-tune")
    lie = {*keys(platform, tenant.id, "uploads"), *keys(platform, tenant.id, "files")}
    assert (len(lie), len(loose(platform, tenant.id))) == (len(parts) + 1 + 3, 3)
    CLEANUP.run(later(platform, hours=1.5))
    assert len(loose(platform, tenant.id)) == 3
    CLEANUP.run(later(platform, hours=49))
    assert [*keys(platform, tenant.id, "uploads"), *keys(platform, tenant.id, "files")] == [kept.object_key]
    assert loose(platform, tenant.id) == []


def test_bytes_that_nobody_claimed_in_time_become_no_file(platform: Platform, tenant: Tenant, rows: bytes) -> None:
    stored = uploaded_files.store(platform, tenant.id, io.BytesIO(rows), filename="late.jsonl")
    CLEANUP.run(later(platform, hours=49))
    with pytest.raises(Unavailable, match="send the call again"):
        uploaded_files.register(platform, tenant.id, stored, purpose="fine-tune")
    assert uploaded_files.list_files(platform, tenant.id).items == []


class Sticky(LocalObjectStore):
    """It does not remove some objects."""

    stuck: frozenset[str] = frozenset()

    def delete(self, key: str) -> None:
        if key in self.stuck:
            raise Unavailable("the object store is away", code="object_store_unavailable")
        super().delete(key)


def test_a_file_that_is_deleted_while_the_store_is_away_is_removed_later_and_hides_no_other(
    platform: Platform, tenant: Tenant, rows: bytes
) -> None:
    assert isinstance(platform.objects, LocalObjectStore)
    store = Sticky(platform.objects.root)
    sticky = replace(platform, objects=store)
    made = [uploaded_files.create(platform, tenant.id, io.BytesIO(rows), filename="a.jsonl", purpose="fine-tune") for _ in range(2)]
    store.stuck = frozenset(file.object_key for file in made)
    for file in made:
        uploaded_files.delete(sticky, tenant.id, file.id)
    assert uploaded_files.list_files(platform, tenant.id).items == []
    assert len(keys(platform, tenant.id, "files")) == 2
    CLEANUP.run(sticky)
    store.stuck = frozenset([made[0].object_key])
    assert orphaned_objects.remove_due(sticky) == 0  # both were tried a moment ago
    CLEANUP.run(later(sticky, minutes=11))
    assert keys(platform, tenant.id, "files") == loose(platform, tenant.id) == [made[0].object_key]
    CLEANUP.run(later(platform, minutes=30))
    assert keys(platform, tenant.id, "files") == loose(platform, tenant.id) == []


COMPLETER = """
    import hashlib, json, resource, sys
    from pathlib import Path
    from control_plane.datasets.uploads import multipart_uploads as uploads
    from control_plane.composition import open_platform
    from control_plane.platform.settings import load

    class Rows:
        def __init__(self, n): self.left = n
        def read(self, size=-1):
            data = bytes(min(size, self.left))
            self.left -= len(data)
            return data

    def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

    tenant, total, part = sys.argv[1], int(sys.argv[2]), 64 << 20
    platform = open_platform(load())
    made = uploads.create(platform, tenant, num_bytes=total + 1, filename="a.jsonl", purpose="fine-tune", mime_type="text/plain").row.id
    uploads.add_part(platform, tenant, made, Rows(1))
    before = peak()
    ids = [uploads.add_part(platform, tenant, made, Rows(part - i)).id for i in range(total // part)]
    rest = total - sum(part - i for i in range(total // part))
    ids.append(uploads.add_part(platform, tenant, made, Rows(rest)).id)
    ids.append(next(p.id for p in uploads.get(platform, tenant, made).parts if p.bytes == 1))
    view = uploads.complete(platform, tenant, made, part_ids=ids)
    print(json.dumps({"grown": peak() - before, "bytes": view.file.bytes, "status": view.status}))
"""


@pytest.mark.slow
def test_joining_parts_takes_no_memory(fresh_platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_DATABASE_URL", fresh_platform.engine.url.render_as_string(hide_password=False))
    monkeypatch.setenv("FT_HOME", str(fresh_platform.settings.home))
    owner, _ = tenants.create(fresh_platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
    total = 300 << 20
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(COMPLETER), owner.id, str(total)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["bytes"], said["status"]) == (total + 1, "completed")
    assert said["grown"] < 32 << 20
    with fresh_platform.engine.connect() as conn:
        assert conn.execute(sa.select(file_rows.c.bytes)).scalars().all() == [total + 1]


KILLED = """
    import sys
    from control_plane.datasets.uploads import multipart_uploads as uploads
    from control_plane.platform.settings import load
    from control_plane.composition import open_platform

    uploads.complete(open_platform(load()), sys.argv[1], sys.argv[2], part_ids=sys.argv[3:])
"""


@pytest.mark.slow
def test_a_join_that_was_killed_is_made_again(fresh_platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_DATABASE_URL", fresh_platform.engine.url.render_as_string(hide_password=False))
    monkeypatch.setenv("FT_HOME", str(fresh_platform.settings.home))
    owner, _ = tenants.create(fresh_platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
    data = bytes(range(256)) * (1 << 19)
    upload, parts = send(fresh_platform, owner.id, data, size=(30 << 20) + 1)
    staged = fresh_platform.settings.home / "objects" / ".staging"
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(KILLED), owner.id, upload, *parts], stderr=subprocess.DEVNULL) as child:
        until(lambda: list(staged.iterdir()), timeout_s=60)
        child.kill()
    assert child.returncode == -9
    view = multipart_uploads.get(fresh_platform, owner.id, upload)
    assert (view.status, len(view.parts), keys(fresh_platform, owner.id, "files")) == ("pending", len(parts), [])
    made = multipart_uploads.complete(fresh_platform, owner.id, upload, part_ids=parts).file
    assert made is not None
    assert made.sha256 == hashlib.sha256(data).hexdigest()
