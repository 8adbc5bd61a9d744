"""Objects joined into one, and forms stored, in a bucket: its uploader reads from threads of its own, in pieces of its own size."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import pytest
from fastapi import Request

from control_plane.datasets.receiver import receive_up_to
from control_plane.datasets.uploads.part_join import Part, join
from control_plane.http.forms import Form
from control_plane.platform.protocols import ObjectStore
from core.errors import IntegrityError, InvalidRequest
from resources.object_store import from_url

pytestmark = pytest.mark.slow


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    boto3.client("s3").create_bucket(Bucket="bucket")
    yield from_url("s3://bucket/deep")
    server.stop()


def too_large() -> InvalidRequest:
    return InvalidRequest("too large", code="file_too_large")


def test_parts_become_one_object_that_is_all_of_them(bucket: ObjectStore) -> None:
    pieces = [os.urandom(7_000_001 + i) for i in range(4)]  # none of them a multiple of what the uploader asks for
    whole = b"".join(pieces)
    parts = []
    for i, piece in enumerate(pieces):
        received = receive_up_to(bucket, f"parts/{i}", io.BytesIO(piece), 1 << 30, too_large)
        parts.append(Part(key=f"parts/{i}", num_bytes=received.num_bytes, sha256=received.sha256.hexdigest()))
    joined = join(bucket, "whole", parts, with_md5=True)
    assert bucket.get_bytes("whole") == whole
    assert (joined.num_bytes, joined.head, joined.md5) == (len(whole), whole[:4], hashlib.md5(whole).hexdigest())
    assert joined.sha256 == hashlib.sha256(whole).hexdigest()
    bucket.put_bytes("parts/2", pieces[2][:-1])
    with pytest.raises(IntegrityError):
        join(bucket, "again", parts)
    assert not bucket.exists("again")


class Body:
    """What a form reads of a request."""

    def __init__(self, file: bytes) -> None:
        self.headers = {"content-type": "multipart/form-data; boundary=B"}
        self._body = b'--B\r\nContent-Disposition: form-data; name="data"\r\n\r\n' + file + b"\r\n--B--\r\n"

    async def stream(self) -> AsyncIterator[bytes]:
        for at in range(0, len(self._body), 65536):
            yield self._body[at : at + 65536]


def test_a_form_is_stored_as_it_comes(bucket: ObjectStore) -> None:
    data = os.urandom(20_000_003)

    async def store(max_bytes: int) -> Any:
        form = Form(cast(Request, Body(data)), file_field="data")
        await form.to_file()
        received = await form.store(lambda stream: receive_up_to(bucket, "form", stream, max_bytes, too_large), tenant="t")
        await form.rest()
        return received

    with pytest.raises(InvalidRequest, match="too large"):
        asyncio.run(store(len(data) - 1))
    assert not bucket.exists("form")
    assert asyncio.run(store(len(data))).num_bytes == len(data)
    assert bucket.get_bytes("form") == data
