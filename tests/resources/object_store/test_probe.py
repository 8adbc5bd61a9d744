"""What a store must do is tried; one that does less is named with what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from control_plane.platform.protocols import ObjectStore
from core.errors import IntegrityError, Unavailable
from resources.object_store import from_url
from resources.object_store.probe import PREFIX, probe
from resources.object_store.s3 import S3ObjectStore
from tests.support.servers.checked_s3 import checked_s3

ACCOUNT = {"region_name": "us-east-1", "aws_access_key_id": "test", "aws_secret_access_key": "test"}


def bucket(host: str, port: int) -> ObjectStore:
    import boto3

    boto3.client("s3", endpoint_url=f"http://{host}:{port}", **ACCOUNT).create_bucket(Bucket="tried")
    return S3ObjectStore.connect(bucket="tried", endpoint_url=f"http://{host}:{port}", **ACCOUNT)


@contextmanager
def unchecked_s3() -> Iterator[tuple[str, int]]:
    """A store that takes any bytes through a signed URL."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()
    server.stop()


def test_a_store_that_does_what_is_needed_passes_and_keeps_nothing(tmp_path: Path) -> None:
    with checked_s3() as address:
        for store in (from_url(f"file://{tmp_path}/objects"), bucket(*address)):
            probe(store)
            assert list(store.list(PREFIX)) == []


def test_a_store_that_does_not_check_signed_checksums_is_named() -> None:
    with unchecked_s3() as address:
        store = bucket(*address)
        with pytest.raises(IntegrityError, match=r"s3://tried took other bytes .* x-amz-checksum-sha256"):
            probe(store)
        assert list(store.list(PREFIX)) == []


def test_a_store_that_is_away_is_unavailable() -> None:
    with checked_s3() as address:
        store = bucket(*address)
    with pytest.raises(Unavailable):
        probe(store)
