"""Checkpoints over a line that breaks off and changes bytes, to a store that speaks S3."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane.platform.protocols import ObjectStore
from control_plane.platform.transfer import Sending, fetch_committed
from ft_assets.errors import IntegrityError, Unavailable
from ft_assets.retries import RetryPolicy, with_retries
from ft_assets.training.checkpoints import ADAPTER, MANIFEST, manifest_digest, verify
from tests.support.jobs.committed_checkpoints import commit
from tests.support.jobs.training_specs import SPEC
from tests.support.servers.faulty_proxy import FaultyProxy, faulty_proxy

PREFIX = "tenants/t/jobs/j/checkpoints/a1/step-00000010"
SHORT = RetryPolicy(first_s=0.05, most_s=0.1, give_up_s=1.0)


@pytest.fixture(scope="module")
def line() -> Iterator[tuple[FaultyProxy, ObjectStore]]:
    """A proxy, and an S3 store behind it."""
    import boto3
    from botocore.config import Config
    from moto.server import ThreadedMotoServer

    from resources.object_store.s3 import S3ObjectStore

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    with faulty_proxy(*server.get_host_and_port()) as (proxy, url):
        client = boto3.client(
            "s3",
            endpoint_url=url,
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="test",
            config=Config(retries={"mode": "standard", "max_attempts": 1}, connect_timeout=2, read_timeout=5),
        )
        client.create_bucket(Bucket="checkpoints")
        yield proxy, S3ObjectStore(client, bucket="checkpoints")
    server.stop()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    def write(directory: Path) -> None:
        (directory / "adapter_model.safetensors").write_bytes(b"the weights as they were" + bytes(range(256)) * 800)
        (directory / "adapter_config.json").write_text("{}")

    target = tmp_path / "step-00000010"
    commit(target, write, spec=SPEC, step=10, attempt=1, created_at=0.0, required=ADAPTER)
    return target


def test_what_is_sent_is_what_is_fetched(line: tuple[FaultyProxy, ObjectStore], checkpoint: Path, tmp_path: Path) -> None:
    _, store = line
    sent = Sending(objects=store, directory=checkpoint, prefix=PREFIX).go_on()
    assert fetch_committed(store, PREFIX, tmp_path / "there", manifest_sha256=manifest_digest(checkpoint)) == sent
    assert verify(tmp_path / "there") == sent
    assert {p.name for p in tmp_path.iterdir()} == {"step-00000010", "there"}


def test_a_line_that_is_cut_is_gone_on_with_where_it_was(line: tuple[FaultyProxy, ObjectStore], checkpoint: Path) -> None:
    proxy, store = line
    sending = Sending(objects=store, directory=checkpoint, prefix=PREFIX)
    proxy.refuse = True
    told: list[Exception] = []
    with pytest.raises(Unavailable):
        with_retries(sending.go_on, RetryPolicy(first_s=0.01, most_s=0.01, give_up_s=0.1), on_failure=told.append)
    assert told
    threading.Timer(0.5, lambda: setattr(proxy, "refuse", False)).start()
    with_retries(sending.go_on, RetryPolicy(first_s=0.1, most_s=0.1, give_up_s=20.0))
    assert sending.sent == set(ADAPTER)


def test_bytes_that_change_on_the_way_are_found_by_reading_back(line: tuple[FaultyProxy, ObjectStore], checkpoint: Path) -> None:
    proxy, store = line
    faults = proxy.faults
    proxy.replace.append((b"the weights as they were", b"The weights as they were"))
    sending = Sending(objects=store, directory=checkpoint, prefix=PREFIX, read_back=True)
    failures: list[Exception] = []
    with_retries(sending.go_on, SHORT, on_failure=failures.append)
    assert proxy.faults == faults + 1 and failures
    assert store.get_bytes(f"{PREFIX}/adapter_model.safetensors").startswith(b"the weights")


def test_bytes_that_change_on_the_way_back_are_fetched_again(
    line: tuple[FaultyProxy, ObjectStore], checkpoint: Path, tmp_path: Path
) -> None:
    proxy, store = line
    Sending(objects=store, directory=checkpoint, prefix=PREFIX).go_on()
    for spoilt in ((b"the weights as", b"The weights as"), (b'"created_at"', b'"Created_at"')):
        proxy.replace.append(spoilt)
        with_retries(lambda: fetch_committed(store, PREFIX, tmp_path / "there", manifest_sha256=manifest_digest(checkpoint)), SHORT)
        assert not proxy.replace
        verify(tmp_path / "there")


def test_an_object_that_is_spoilt_in_the_store_is_damage_and_not_an_outage(
    line: tuple[FaultyProxy, ObjectStore], checkpoint: Path, tmp_path: Path
) -> None:
    _, store = line
    digest = manifest_digest(checkpoint)
    for name in (*ADAPTER, MANIFEST):
        Sending(objects=store, directory=checkpoint, prefix=PREFIX).go_on()
        whole = store.get_bytes(f"{PREFIX}/{name}")
        for n, spoilt in enumerate((whole[:-1], b"", whole.swapcase())):
            store.put_bytes(f"{PREFIX}/{name}", spoilt)
            if spoilt == whole:
                continue
            with pytest.raises(IntegrityError, match=name):
                fetch_committed(store, PREFIX, tmp_path / f"{name}{n}" / "there", manifest_sha256=digest)
        store.delete(f"{PREFIX}/{name}")
        with pytest.raises(IntegrityError, match=name):
            fetch_committed(store, PREFIX, tmp_path / f"gone {name}" / "there", manifest_sha256=digest)
        assert not list(tmp_path.glob("*/there"))


def test_damage_on_this_machine_is_not_stored(line: tuple[FaultyProxy, ObjectStore], checkpoint: Path) -> None:
    _, store = line
    with (checkpoint / "adapter_model.safetensors").open("r+b") as out:
        out.write(b"T")
    prefix = PREFIX + "-damaged"
    with pytest.raises(IntegrityError, match="does not match the digest"):
        Sending(objects=store, directory=checkpoint, prefix=prefix).go_on()
    assert not store.exists(f"{prefix}/{MANIFEST}") and not store.exists(f"{prefix}/adapter_model.safetensors")


def test_a_download_that_was_cut_off_fetches_only_what_is_missing(
    line: tuple[FaultyProxy, ObjectStore], checkpoint: Path, tmp_path: Path
) -> None:
    _, store = line
    Sending(objects=store, directory=checkpoint, prefix=PREFIX).go_on()
    digest = manifest_digest(checkpoint)
    beside = tmp_path / f".fetching-{digest[:32]}"
    beside.mkdir()
    part = beside / "adapter_config.json"
    part.write_text("{}")
    inode = part.stat().st_ino
    (beside / "adapter_model.safetensors").write_bytes(b"half of")
    fetch_committed(store, PREFIX, tmp_path / "there", manifest_sha256=digest)
    assert (tmp_path / "there" / "adapter_config.json").stat().st_ino == inode
    assert not beside.exists()
    verify(tmp_path / "there")
