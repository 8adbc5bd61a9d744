"""A signed URL does one thing to one object for an hour: whoever holds it can change neither what it names nor what it does."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from urllib.parse import parse_qs, quote, urlsplit

import boto3
import httpx
import pytest

from agent.messages import PART_BYTES, Completion, PartGrant
from core.errors import FtError, NotFound
from resources.object_store.s3 import S3ObjectStore
from tests.support.servers.signed_s3 import ACCOUNT, signed_s3

MINE, OTHERS = "tenants/acme/files/f/rows.jsonl", "tenants/beta/files/f/rows.jsonl"
BODY = b"rows of acme"
HOUR_S = 3600


class Clock:
    ahead_s = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead_s


@pytest.fixture(scope="module")
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def address(clock: Clock) -> Iterator[str]:
    with signed_s3(clock=clock) as url:
        boto3.client("s3", endpoint_url=url, **ACCOUNT).create_bucket(Bucket="signed")
        yield url


@pytest.fixture
def store(address: str, clock: Clock) -> S3ObjectStore:
    clock.ahead_s = 0.0
    made = S3ObjectStore.connect(bucket="signed", prefix="deep", endpoint_url=address, **ACCOUNT)
    made.put_bytes(MINE, BODY)
    made.put_bytes(OTHERS, b"rows of beta")
    return made


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def written(store: S3ObjectStore, key: str = MINE, data: bytes = BODY) -> PartGrant:
    (part,) = store.begin_upload(key, [digest(data)]).parts
    return part


CHANGES: dict[str, Callable[[str], str]] = {
    "the object of another tenant": lambda url: url.replace("tenants/acme", "tenants/beta"),
    "the object of another tenant, by ..": lambda url: url.replace("acme/files/f", "acme/files/f/../../../beta/files/f"),
    "the same, encoded": lambda url: url.replace("acme/files/f", "acme/files/f/%2e%2e/%2e%2e/%2e%2e/beta/files/f"),
    "another name": lambda url: url.replace("rows.jsonl", "rows.jsonl2"),
    "the prefix": lambda url: url.replace("/rows.jsonl", "/"),
    "the listing of the bucket": lambda url: url.replace(f"/deep/{MINE}", "") + "&list-type=2&prefix=deep/tenants/",
    "another version": lambda url: url + "&versionId=null",
    "another type": lambda url: url + "&response-content-type=text/html",
    "another subresource": lambda url: url + "&acl",
    "another day of its life": lambda url: url.replace(f"X-Amz-Expires={HOUR_S}", f"X-Amz-Expires={HOUR_S * 24 * 7}"),
    "no expiry": lambda url: url.replace("X-Amz-Expires=3600", "X-Amz-Expires=999999999"),
    "a signature without an end": lambda url: url[:-1],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_url_that_reads_is_of_one_object(store: S3ObjectStore, change: str) -> None:
    url = store.read_url(MINE)
    assert httpx.get(url).content == BODY
    changed = CHANGES[change](url)
    assert changed != url
    answer = httpx.get(changed, follow_redirects=False)
    assert answer.status_code == 403 and b"SignatureDoesNotMatch" in answer.content
    assert b"beta" not in answer.content


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE", "HEAD", "OPTIONS"])
def test_a_url_that_reads_does_nothing_else(store: S3ObjectStore, method: str) -> None:
    assert httpx.request(method, store.read_url(MINE)).status_code == 403
    assert store.get_bytes(MINE) == BODY


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "HEAD"])
def test_a_url_that_writes_does_nothing_else(store: S3ObjectStore, method: str) -> None:
    part = written(store)
    answer = httpx.request(method, part.url, headers=dict(part.headers))
    assert answer.status_code == 403 and BODY not in answer.content
    assert store.get_bytes(MINE) == BODY


@pytest.mark.parametrize("change", [name for name in CHANGES if "type" not in name])
def test_a_url_that_writes_is_of_one_object(store: S3ObjectStore, change: str) -> None:
    part = written(store, data=b"new")
    assert httpx.put(CHANGES[change](part.url), content=b"new", headers=dict(part.headers)).status_code == 403
    assert (store.get_bytes(MINE), store.get_bytes(OTHERS)) == (BODY, b"rows of beta")
    assert httpx.put(part.url, content=b"new", headers=dict(part.headers)).is_success
    assert store.get_bytes(MINE) == b"new"


def test_a_url_writes_only_the_bytes_that_it_was_granted_for(store: S3ObjectStore) -> None:
    part = written(store, data=b"new")
    name = "x-amz-checksum-sha256"
    assert name in parse_qs(urlsplit(part.url).query)["X-Amz-SignedHeaders"][0].split(";")
    other = written(store, data=b"other").headers[name]
    for headers in (dict(part.headers), {name: other}, {}):
        assert httpx.put(part.url, content=b"other", headers=headers).status_code in (400, 403)
    for more in ({"x-amz-acl": "public-read"}, {"x-amz-website-redirect-location": "https://evil.example"}, {"x-amz-meta-a": "b"}):
        assert httpx.put(part.url, content=b"new", headers={**part.headers, **more}).status_code == 403
    assert store.get_bytes(MINE) == BODY


def test_a_part_is_of_one_number_of_one_upload(store: S3ObjectStore) -> None:
    parts = [bytes(PART_BYTES), b"end"]
    digests = [digest(part) for part in parts]
    grant = store.begin_upload(MINE, digests)
    first, last = grant.parts
    for changed in (last.url.replace("partNumber=2", "partNumber=1"), last.url.replace("uploadId=", "uploadId=x"), first.url):
        assert httpx.put(changed, content=parts[1], headers=dict(last.headers)).status_code == 403
    assert store.get_bytes(MINE) == BODY, "nothing is there until the upload is complete"
    assert grant.upload_id is not None
    with pytest.raises(FtError):
        store.complete_upload(Completion(key=OTHERS, upload_id=grant.upload_id, etags=("a", "b"), part_sha256=tuple(digests)))
    assert store.get_bytes(OTHERS) == b"rows of beta"


def test_a_url_ends_after_an_hour_and_no_caller_asks_for_longer(store: S3ObjectStore, clock: Clock) -> None:
    part = written(store)
    urls = [store.read_url(MINE), part.url, *(p.url for p in store.begin_upload(MINE, [digest(b"a"), digest(b"b")]).parts)]
    assert {parse_qs(urlsplit(url).query)["X-Amz-Expires"][0] for url in urls} == {str(HOUR_S)}
    clock.ahead_s = HOUR_S - 60
    assert httpx.get(urls[0]).content == BODY
    clock.ahead_s = HOUR_S + 1
    assert httpx.get(urls[0]).status_code == 403
    assert httpx.put(part.url, content=BODY, headers=dict(part.headers)).status_code == 403


def test_a_url_reads_what_is_there_now_and_nothing_of_what_was_deleted(store: S3ObjectStore) -> None:
    url = store.read_url(MINE)
    store.put_bytes(MINE, b"replaced")
    assert httpx.get(url).content == b"replaced"
    store.delete(MINE)
    answer = httpx.get(url)
    assert answer.status_code == 404 and BODY not in answer.content
    with pytest.raises(NotFound):
        store.read_url(MINE)


@pytest.mark.parametrize(
    "name", ["a?versionId=1", "a#b", "a&acl", "a+b", "a b", "a%2fb", "a%2e%2e", "\u00e9", "\u2215..\u2215", "a;b=c", "~a'(b)!*"]
)
def test_a_name_with_a_meaning_in_urls_is_only_a_name(store: S3ObjectStore, name: str) -> None:
    key = f"tenants/acme/{name}"
    store.put_bytes(key, name.encode())
    url = store.read_url(key)
    assert quote(name, safe="~") in url
    assert httpx.get(url).content == name.encode()
    assert [info.key for info in store.list("tenants/acme") if info.key == key] == [key]
    store.delete(key)
    assert not store.exists(key)
