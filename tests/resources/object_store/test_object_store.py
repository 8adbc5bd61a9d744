"""Both object stores keep the same promises."""

from __future__ import annotations

import hashlib
import io
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, cast

import httpx
import pytest
from cryptography.fernet import Fernet, MultiFernet

from agent.messages import Completion
from control_plane.platform.protocols import ObjectStore
from core.errors import InvalidRequest, NotFound, Unavailable
from resources.object_store import LOCAL_KEYS, LocalObjectStore, from_url
from resources.object_store.local import STAGING, UNFINISHED_S, remove_unfinished

CIPHER = MultiFernet([Fernet(Fernet.generate_key())])


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def aws(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": s3_endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(params=["local", "local and encrypted", "s3", "s3 with a prefix"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "local":
        return from_url(f"file://{tmp_path}/objects")
    if request.param == "local and encrypted":
        return from_url(f"file://{tmp_path}/objects", tenant_key=LOCAL_KEYS, cipher=lambda: CIPHER)
    request.getfixturevalue("aws")
    import boto3

    bucket = f"b-{abs(hash(request.node.name))}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    return from_url(f"s3://{bucket}" + ("/deep/prefix" if "prefix" in request.param else ""))


def test_what_was_put_is_what_is_got(store: ObjectStore, tmp_path: Path) -> None:
    store.put_bytes("a/bytes", b"one")
    (tmp_path / "source").write_bytes(b"two")
    store.put_file("a/file", tmp_path / "source")
    assert store.put_stream("a/stream", io.BytesIO(b"three")) == 5
    store.get_file("a/file", tmp_path / "new" / "copy")
    assert (store.get_bytes("a/bytes"), (tmp_path / "new" / "copy").read_bytes()) == (b"one", b"two")
    with store.open("a/stream") as stream:
        assert (stream.read(2), stream.read()) == (b"th", b"ree")


def test_a_put_replaces_the_object_and_leaves_the_callers_stream_open(store: ObjectStore) -> None:
    source = io.BytesIO(b"new")
    store.put_bytes("k", b"old, and longer")
    store.put_stream("k", source)
    assert store.get_bytes("k") == b"new"
    assert not source.closed


def test_a_large_stream_arrives_whole(store: ObjectStore) -> None:
    data = bytes(range(256)) * (1 << 17)  # 32 MiB: more than one part
    assert store.put_stream("large", io.BytesIO(data)) == len(data)
    with store.open("large") as stream:
        assert stream.read() == data


def test_parts_are_written_through_granted_urls_and_an_upload_that_was_begun_before_is_aborted(aws: None) -> None:
    import boto3

    client = boto3.client("s3")
    client.create_bucket(Bucket="granted")
    store = from_url("s3://granted/deep")
    parts = [b"a" * (5 << 20), b"the rest"]
    digests = [hashlib.sha256(part).hexdigest() for part in parts]
    stale, other = store.begin_upload("large", digests), store.begin_upload("larger", digests)
    granted = store.begin_upload("large", digests)
    open_ids = {upload["UploadId"] for upload in client.list_multipart_uploads(Bucket="granted")["Uploads"]}
    assert open_ids == {granted.upload_id, other.upload_id} and stale.upload_id not in open_ids
    answers = [httpx.put(grant.url, content=part, headers=dict(grant.headers)) for grant, part in zip(granted.parts, parts, strict=True)]
    etags = tuple(answer.headers["etag"] for answer in answers)
    assert granted.upload_id is not None
    store.complete_upload(Completion(key="large", upload_id=granted.upload_id, etags=etags, part_sha256=tuple(digests)))
    assert store.get_bytes("large") == b"".join(parts)
    assert httpx.get(store.read_url("large")).content == b"".join(parts)
    with pytest.raises(NotFound):
        store.read_url("larger")


class Broken(io.RawIOBase):
    """A stream whose sender goes away in the middle."""

    def __init__(self, num_bytes: int) -> None:
        self.left = num_bytes

    def read(self, size: int = -1) -> bytes:
        if self.left <= 0:
            raise ConnectionResetError("the sender went away")
        taken = min(self.left, size if size > 0 else self.left)
        self.left -= taken
        return b"x" * taken


@pytest.mark.parametrize("num_bytes", [10, 20 << 20], ids=["in the first part", "in a later part"])
def test_an_upload_that_breaks_off_leaves_the_old_object(store: ObjectStore, num_bytes: int) -> None:
    store.put_bytes("k", b"old")
    with pytest.raises(ConnectionResetError):
        store.put_stream("k", cast(BinaryIO, Broken(num_bytes)))
    with pytest.raises(ConnectionResetError):
        store.put_stream("never", cast(BinaryIO, Broken(num_bytes)))
    assert store.get_bytes("k") == b"old"
    assert not store.exists("never")
    assert [o.key for o in store.list("")] == ["k"]


def test_an_absent_object_is_not_found_and_may_be_deleted(store: ObjectStore, tmp_path: Path) -> None:
    store.put_bytes("there/is", b"x")
    for key in ("nothing", "there/is/nothing", "there"):
        assert not store.exists(key)
        store.delete(key)
        for get in (store.get_bytes, store.open, lambda k: store.get_file(k, tmp_path / "out")):
            with pytest.raises(NotFound, match=key):
                get(key)
    assert not (tmp_path / "out").exists()
    assert store.exists("there/is")


def test_a_listing_is_of_whole_segments_and_in_key_order(store: ObjectStore) -> None:
    keys = ["a/1", "a/10", "a/2", "a-b/1", "a/b/c", "a/b-c", "ab/1", "a0/1"]
    for key in keys:
        store.put_bytes(key, key.encode())
    assert [o.key for o in store.list("a")] == ["a/1", "a/10", "a/2", "a/b-c", "a/b/c"]
    assert [o.key for o in store.list("")] == sorted(keys)
    assert [o.size_bytes for o in store.list("ab")] == [4]
    assert list(store.list("nothing")) == []
    assert list(store.list("a/1")) == []


def test_a_listing_goes_beyond_one_page_of_s3(aws: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of the server in this process holds 10 objects instead of 1,000."""
    import boto3

    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "10")
    s3 = boto3.client("s3")
    s3.create_bucket(Bucket="paged")
    store = from_url("s3://paged")
    for i in range(25):
        store.put_bytes(f"many/{i:04}", b"")
    assert len(s3.list_objects_v2(Bucket="paged")["Contents"]) == 10
    assert [o.key for o in store.list("many")] == [f"many/{i:04}" for i in range(25)]


def test_deleting_twice_is_fine(store: ObjectStore) -> None:
    store.put_bytes("k", b"x")
    store.delete("k")
    store.delete("k")
    assert not store.exists("k")


@pytest.mark.parametrize(
    "key", ["../up", "a/../../b", "/etc/passwd", "a//b", "", ".", "a/.", "a\x00b", "a\nb", "a\\b", ".staging/x", "a" * 1025]
)
def test_a_key_that_could_leave_the_store_is_refused(store: ObjectStore, key: str) -> None:
    with pytest.raises(InvalidRequest):
        store.put_bytes(key, b"x")
    with pytest.raises(InvalidRequest):
        store.get_bytes(key)


def test_the_uri_names_the_object(store: ObjectStore) -> None:
    uri = store.uri("a/b c")
    assert uri.startswith(("file:///", "s3://"))
    assert "/a/b" in uri


def test_a_crash_in_the_middle_of_a_write_leaves_no_object(tmp_path: Path) -> None:
    store = LocalObjectStore(tmp_path)
    (tmp_path / STAGING / "left-over").write_bytes(b"half")
    assert list(store.list("")) == []


def test_the_name_of_an_object_is_on_disk_before_put_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalObjectStore(tmp_path)
    synced: list[tuple[str, bool]] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        fsync(descriptor)
        synced.append((str(Path(f"/proc/self/fd/{descriptor}").readlink()), (tmp_path / "a/b/key").exists()))

    monkeypatch.setattr(os, "fsync", watched)
    store.put_bytes("a/b/key", b"one")
    assert (str(tmp_path / "a/b"), True) in synced, "a power cut takes a name whose directory was not synced"


def test_an_unreachable_endpoint_is_unavailable(aws: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(Unavailable, match="did not answer"):
        from_url("s3://bucket").get_bytes("k")


def test_a_missing_bucket_is_not_a_missing_object(aws: None) -> None:
    with pytest.raises(Unavailable, match="NoSuchBucket"):
        from_url("s3://no-such-bucket").get_bytes("k")


@pytest.mark.parametrize("url", ["", "objects", "file://host/x", "s3://", "gs://bucket"])
def test_an_unknown_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="object store"):
        from_url(url)


def test_a_cooled_object_is_read_listed_replaced_and_deleted_as_before(tmp_path: Path) -> None:
    store = from_url(f"file://{tmp_path}/objects", cold_dir=tmp_path / "cold")
    for key in ("a/1", "a/2", "a/x/3", "b/4"):
        store.put_bytes(key, key.encode())
    assert store.cool("a") == 3
    assert not (tmp_path / "objects/a/1").exists() and (tmp_path / "cold/a/1").read_bytes() == b"a/1"
    assert (tmp_path / "objects/b/4").exists()
    assert [i.key for i in store.list("a")] == ["a/1", "a/2", "a/x/3"]
    store.put_bytes("a/2", b"new")
    assert (store.get_bytes("a/1"), store.get_bytes("a/2"), store.exists("a/x/3")) == (b"a/1", b"new", True)
    assert not (tmp_path / "cold/a/2").exists(), "a new object is warm, and there is one"
    assert store.cool("a") == 3, "again"
    store.get_file("a/2", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"new"
    store.delete("a/1")
    assert not store.exists("a/1") and [i.key for i in store.list("a")] == ["a/2", "a/x/3"]
    with pytest.raises(NotFound):
        store.get_bytes("a/1")


def test_an_object_that_moves_to_cold_storage_is_there_at_every_moment(tmp_path: Path) -> None:
    store = from_url(f"file://{tmp_path}/objects", cold_dir=tmp_path / "cold")
    for n in range(400):
        store.put_bytes(f"a/{n:03d}", b"x" * 1000)
    with ThreadPoolExecutor(2) as pool:
        moving = pool.submit(store.cool, "a")
        seen = 0
        while not moving.done():
            assert len(list(store.list("a"))) == 400
            assert all(store.get_bytes(f"a/{n:03d}") == b"x" * 1000 for n in range(400))
            seen += 1
    assert (moving.result(), seen > 0) == (400, True)


def test_in_a_bucket_objects_change_their_storage_class_and_are_read_as_before(aws: None) -> None:
    import boto3

    client = boto3.client("s3")
    client.create_bucket(Bucket="cooled")
    store = from_url("s3://cooled/deep", cold_class="STANDARD_IA")
    for key in ("a/1", "a/2", "b/3"):
        store.put_bytes(key, key.encode())
    assert store.cool("a") == 2
    classes = {o["Key"]: o["StorageClass"] for o in client.list_objects_v2(Bucket="cooled")["Contents"]}
    assert classes == {"deep/a/1": "STANDARD_IA", "deep/a/2": "STANDARD_IA", "deep/b/3": "STANDARD"}
    assert (store.get_bytes("a/1"), [i.key for i in store.list("a")], store.cool("a")) == (b"a/1", ["a/1", "a/2"], 2)


@pytest.mark.usefixtures("aws")
def test_without_somewhere_cold_nothing_is_cooled(store: ObjectStore) -> None:
    store.put_bytes("a/1", b"one")
    assert store.cool("a") is None
    assert store.get_bytes("a/1") == b"one"


def test_what_a_killed_process_left_of_an_object_is_removed_once_nothing_writes_it(tmp_path: Path) -> None:
    store = LocalObjectStore(tmp_path / "objects", cold=tmp_path / "cold")
    store.put_bytes("tenants/acme/files/f/a", b"whole")
    old, new, cold = (root / STAGING / name for root, name in ((store.root, "old"), (store.root, "new"), (tmp_path / "cold", "old")))
    cold.parent.mkdir(parents=True)
    for path in (old, new, cold):
        path.write_bytes(b"half of an upload")
    for path in (old, cold):
        os.utime(path, (time.time() - UNFINISHED_S - 1,) * 2)
    os.utime(store.root / "tenants/acme/files/f/a", (0, 0))
    assert remove_unfinished(store) == 2
    assert [path.exists() for path in (old, new, cold)] == [False, True, False]
    assert store.get_bytes("tenants/acme/files/f/a") == b"whole"
    assert remove_unfinished(store) == 0
