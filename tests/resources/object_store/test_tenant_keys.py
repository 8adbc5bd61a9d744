"""Objects encrypted with a key per tenant: in a directory with keys beside them, in a bucket by KMS."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.fernet import Fernet, MultiFernet

from agent.messages import PART_BYTES, Completion
from control_plane.platform.protocols import ObjectStore
from core.errors import IntegrityError, InvalidRequest
from resources.object_store import LOCAL_KEYS, from_url
from resources.object_store.s3 import S3ObjectStore
from resources.object_store.tenant_keys import KEYS
from tests.support.servers.checked_s3 import checked_s3

TEXT = b"Dear customer, your card 4111 1111 1111 1111 was charged."
ACCOUNT = {"region_name": "us-east-1", "aws_access_key_id": "test", "aws_secret_access_key": "test"}
OWN = Fernet(Fernet.generate_key())
INSTALLATION = MultiFernet([OWN])


def opened(directory: Path, *, tenant_key: str = LOCAL_KEYS, cipher: MultiFernet = INSTALLATION) -> ObjectStore:
    return from_url(f"file://{directory}", tenant_key=tenant_key, cipher=lambda: cipher)


def test_no_object_is_on_disk_as_it_was_put(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put_bytes("tenants/a/files/f/x.jsonl", TEXT)
    store.put_bytes("suites/s.jsonl", TEXT)
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) == 4  # two objects, and the keys of their owners
    assert not any(TEXT[:20] in content for content in written)
    assert {store.get_bytes(key) for key in ("tenants/a/files/f/x.jsonl", "suites/s.jsonl")} == {TEXT}
    assert [(info.key, info.size_bytes) for info in store.list("")] == [
        ("suites/s.jsonl", len(TEXT)),
        ("tenants/a/files/f/x.jsonl", len(TEXT)),
    ]


def test_an_object_is_read_under_its_own_key_only(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.put_bytes("tenants/a/x", TEXT)
    for elsewhere in ("tenants/a/y", "tenants/b/x"):
        (tmp_path / elsewhere).parent.mkdir(exist_ok=True)
        (tmp_path / elsewhere).write_bytes((tmp_path / "tenants/a/x").read_bytes())
        store.put_bytes(f"{elsewhere}-own", b"so that its owner has a key")
        with pytest.raises(IntegrityError, match=r"no key in .* decrypts object"):
            store.get_bytes(elsewhere)


def test_tenants_have_keys_of_their_own(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for tenant in "ab":
        store.put_bytes(f"tenants/{tenant}/x", TEXT)
    (tmp_path / KEYS / "a").unlink()
    with pytest.raises(IntegrityError, match="restore the keys or the object from a backup"):
        opened(tmp_path).get_bytes("tenants/a/x")
    assert not (tmp_path / KEYS / "a").exists(), "a restored key must not find a new one in its place"
    assert opened(tmp_path).get_bytes("tenants/b/x") == TEXT


def test_another_installations_key_opens_nothing(tmp_path: Path) -> None:
    opened(tmp_path).put_bytes("tenants/a/x", TEXT)
    other = MultiFernet([Fernet(Fernet.generate_key())])
    with pytest.raises(IntegrityError, match="restore the key file that belongs to it"):
        opened(tmp_path, cipher=other).get_bytes("tenants/a/x")
    rotated = MultiFernet([Fernet(Fernet.generate_key()), OWN])
    assert opened(tmp_path, cipher=rotated).get_bytes("tenants/a/x") == TEXT


def test_encryption_can_be_turned_on_and_off(tmp_path: Path) -> None:
    opened(tmp_path, tenant_key="").put_bytes("tenants/a/before", TEXT)
    opened(tmp_path).put_bytes("tenants/a/while", TEXT)
    opened(tmp_path, tenant_key="").put_bytes("tenants/a/z-after", TEXT)
    for tenant_key in ("", LOCAL_KEYS):
        store = opened(tmp_path, tenant_key=tenant_key)
        assert {store.get_bytes(info.key) for info in store.list("tenants/a")} == {TEXT}
        assert [info.size_bytes for info in store.list("tenants/a")] == [len(TEXT)] * 3
    assert [TEXT in (tmp_path / "tenants" / "a" / name).read_bytes() for name in ("before", "while", "z-after")] == [True, False, True]


def test_a_cold_object_stays_encrypted(tmp_path: Path) -> None:
    store = from_url(f"file://{tmp_path}/warm", cold_dir=tmp_path / "cold", tenant_key=LOCAL_KEYS, cipher=lambda: INSTALLATION)
    store.put_bytes("tenants/a/x", TEXT)
    assert store.cool("tenants/a") == 1
    assert TEXT not in (tmp_path / "cold" / "tenants" / "a" / "x").read_bytes()
    assert store.get_bytes("tenants/a/x") == TEXT


@pytest.mark.parametrize(
    ("url", "key"), [("file:///tmp/objects", "alias/ft-{tenant}"), ("s3://bucket", "alias/ft"), ("s3://bucket", LOCAL_KEYS)]
)
def test_a_setting_that_fits_no_store_is_refused(url: str, key: str) -> None:
    with pytest.raises(InvalidRequest, match="FT_TENANT_KEY"):
        from_url(url, tenant_key=key)


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    import boto3

    with checked_s3() as (host, port):
        client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", **ACCOUNT)
        client.create_bucket(Bucket="objects")
        yield client


@pytest.fixture(scope="module")
def bucket(s3: Any) -> ObjectStore:
    endpoint = s3.meta.endpoint_url
    options = {"kms_key": "alias/ft-{tenant}", "cold_class": "STANDARD_IA", "endpoint_url": endpoint, **ACCOUNT}
    return S3ObjectStore.connect(bucket="objects", prefix="deep", **options)


def kms_key(s3: Any, key: str) -> tuple[str | None, str | None]:
    head = s3.head_object(Bucket="objects", Key=f"deep/{key}")
    return head.get("ServerSideEncryption"), head.get("SSEKMSKeyId")


def test_objects_of_a_bucket_are_encrypted_with_their_tenants_key(bucket: ObjectStore, s3: Any, tmp_path: Path) -> None:
    bucket.put_bytes("tenants/acme/bytes", TEXT)
    (tmp_path / "large").write_bytes(bytes(20 << 20))  # more than one part
    bucket.put_file("tenants/beta/large", tmp_path / "large")
    bucket.put_bytes("base_models/m/config.json", b"{}")
    assert kms_key(s3, "tenants/acme/bytes") == ("aws:kms", "alias/ft-acme")
    assert kms_key(s3, "tenants/beta/large") == ("aws:kms", "alias/ft-beta")
    assert kms_key(s3, "base_models/m/config.json")[1] is None
    assert bucket.cool("tenants/acme") == 1
    assert kms_key(s3, "tenants/acme/bytes") == ("aws:kms", "alias/ft-acme")


def test_what_is_written_through_signed_urls_is_encrypted_too(bucket: ObjectStore, s3: Any) -> None:
    (part,) = bucket.begin_upload("tenants/acme/one", [hashlib.sha256(TEXT).hexdigest()]).parts
    assert httpx.put(part.url, content=TEXT, headers=dict(part.headers)).is_success
    assert "x-amz-server-side-encryption-aws-kms-key-id" in part.url
    assert kms_key(s3, "tenants/acme/one") == ("aws:kms", "alias/ft-acme")
    parts = [bytes(PART_BYTES), TEXT]
    digests = [hashlib.sha256(each).hexdigest() for each in parts]
    grant = bucket.begin_upload("tenants/acme/parts", digests)
    etags = [
        httpx.put(granted.url, content=content, headers=dict(granted.headers)).headers["etag"]
        for granted, content in zip(grant.parts, parts, strict=True)
    ]
    assert grant.upload_id is not None
    bucket.complete_upload(Completion(key="tenants/acme/parts", upload_id=grant.upload_id, etags=tuple(etags), part_sha256=tuple(digests)))
    assert kms_key(s3, "tenants/acme/parts") == ("aws:kms", "alias/ft-acme")
