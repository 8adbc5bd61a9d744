"""Checkpoints over a line that breaks off and changes bytes, through signed URLs of a store that speaks S3."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from agent.api_client import ApiClient
from agent.messages import PART_BYTES, Commit, Completion, Heartbeat, Notice, Restored, WriteGrant, WriteRequest
from agent.objects import Objects
from agent.restore import restore
from agent.uploads.checkpoint_uploads import commit, commit_final, store_directory
from control_plane.attempts import agents
from control_plane.attempts import service as attempts
from control_plane.attempts.claims import Claim
from control_plane.http.store_calls import STORE_CALLS
from control_plane.platform.context import Platform
from control_plane.platform.protocols import ObjectStore
from control_plane.tenants import service as tenants
from core.durable_files import sha256_of
from core.errors import IntegrityError, InvalidRequest, Unavailable
from core.retries import RetryPolicy, with_retries
from core.workload import Kind, StoredCheckpoint, Workload
from engine.training.checkpoints import CHECKPOINT_MANIFEST, TRAINER_STATE, CheckpointManifest, manifest_digest, verify_checkpoint
from resources.object_store.s3 import S3ObjectStore
from tests.support.jobs import sealed_checkpoints
from tests.support.jobs.followed_jobs import until
from tests.support.jobs.training_specs import SPEC
from tests.support.servers.checked_s3 import checked_s3
from tests.support.servers.faulty_proxy import FaultyProxy, faulty_proxy

NAME = "step-00000010"
PARTS = ("adapter_config.json", "adapter_model.safetensors", "optimizer.pt", "schedule.pt", TRAINER_STATE)
SHORT = RetryPolicy(first_s=0.05, most_s=0.1, give_up_s=1.0)


@pytest.fixture(scope="module")
def line() -> Iterator[tuple[FaultyProxy, ObjectStore]]:
    """A proxy, and an S3 store behind it."""
    import boto3

    account = {"region_name": "us-east-1", "aws_access_key_id": "test", "aws_secret_access_key": "test"}
    with checked_s3() as address, faulty_proxy(*address) as (proxy, url):
        boto3.client("s3", endpoint_url=url, **account).create_bucket(Bucket="checkpoints")
        yield proxy, S3ObjectStore.connect(bucket="checkpoints", endpoint_url=url, **account)


@pytest.fixture(scope="module")
def platform(new_platform: Callable[..., Platform], line: tuple[FaultyProxy, ObjectStore]) -> Platform:
    return replace(new_platform(), objects=line[1])


@pytest.fixture
def proxy(line: tuple[FaultyProxy, ObjectStore]) -> FaultyProxy:
    return line[0]


@pytest.fixture
def store(line: tuple[FaultyProxy, ObjectStore]) -> ObjectStore:
    return line[1]


@pytest.fixture
def objects(api: ApiClient) -> Iterator[Objects]:
    with contextlib.closing(Objects(api)) as made:
        yield made


@pytest.fixture
def prefix(held: Claim) -> str:
    return f"{attempts.checkpoint_prefix(held)}/{NAME}"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    def write(directory: Path) -> None:
        (directory / "adapter_model.safetensors").write_bytes(b"the weights as they were" + bytes(range(256)) * 800)
        for name in ("adapter_config.json", TRAINER_STATE):
            (directory / name).write_text("{}")
        for name in ("optimizer.pt", "schedule.pt"):
            (directory / name).write_text(f"{name} as it was")

    target = tmp_path / NAME
    sealed_checkpoints.commit(target, write, spec=SPEC, step=10, attempt=1, created_at=0.0)
    return target


def restored(objects: Objects, checkpoint: Path, prefix: str, directory: Path) -> Restored:
    """Restore into `directory` what was committed."""
    row = StoredCheckpoint(step=10, attempt=1, prefix=prefix, manifest_sha256=manifest_digest(checkpoint))
    return restore(objects, SPEC, [row], directory)


def test_what_is_sent_is_what_is_fetched(objects: Objects, checkpoint: Path, prefix: str, tmp_path: Path) -> None:
    sent = store_directory(objects, checkpoint, prefix, set())
    there = tmp_path / "there"
    assert restored(objects, checkpoint, prefix, there) == Restored(step=10)
    assert verify_checkpoint(there / NAME) == sent
    assert {p.name for p in there.iterdir()} == {NAME}


def test_a_line_that_is_cut_is_gone_on_with_where_it_was(proxy: FaultyProxy, objects: Objects, checkpoint: Path, prefix: str) -> None:
    sent = set[str]()

    def cut() -> None:
        proxy.refuse = bool(sent)

    def send() -> CheckpointManifest:
        return store_directory(objects, checkpoint, prefix, sent)

    with pytest.raises(Unavailable):
        store_directory(objects, checkpoint, prefix, sent, on_bytes=cut)
    assert sent == {PARTS[0]}
    with pytest.raises(Unavailable):
        with_retries(send, RetryPolicy(first_s=0.01, most_s=0.01, give_up_s=0.1))
    threading.Timer(0.5, lambda: setattr(proxy, "refuse", False)).start()
    with_retries(send, RetryPolicy(first_s=0.1, most_s=0.1, give_up_s=20.0))
    assert sent == set(PARTS)


def test_a_finished_model_is_given_up_while_the_store_stays_away(
    proxy: FaultyProxy, held: Claim, api: ApiClient, objects: Objects, checkpoint: Path
) -> None:
    told, tries = list[Notice](), list[float]()

    def check() -> None:
        tries.append(time.monotonic())
        assert tries[-1] - tries[0] < 20, "each failure gave it more time"

    workload = Workload(name="w", kind=Kind.TRAIN, tenant=held.tenant, job=held.job_id, final_prefix=attempts.final_prefix(held))
    proxy.refuse = True
    try:
        with pytest.raises(Unavailable) as refused:
            commit_final(workload, api, objects, checkpoint, step=10, tell=told.append, check=check, retries=SHORT)
    finally:
        proxy.refuse = False
    assert refused.value.code == "object_store_unavailable"
    assert len(tries) > 2 and len(told) == 1, "it was tried again, and told once"


def test_bytes_that_change_on_the_way_are_refused_and_sent_again(
    proxy: FaultyProxy, store: ObjectStore, objects: Objects, checkpoint: Path, prefix: str
) -> None:
    faults = proxy.faults
    proxy.replace.append((b"the weights as they were", b"The weights as they were"))
    with_retries(lambda: store_directory(objects, checkpoint, prefix, set()), SHORT)
    assert proxy.faults == faults + 1
    assert store.get_bytes(f"{prefix}/adapter_model.safetensors").startswith(b"the weights")


def test_other_bytes_than_those_that_a_url_was_granted_for_are_refused(store: ObjectStore, api: ApiClient, prefix: str) -> None:
    (part,) = api.write_urls(WriteRequest(key=f"{prefix}/optimizer.pt", part_sha256=("00" * 32,))).parts
    with httpx.Client(trust_env=False) as line:
        assert line.put(part.url, content=b"other", headers=dict(part.headers)).status_code == 400
    assert not store.exists(f"{prefix}/optimizer.pt")


def test_bytes_that_change_on_the_way_back_are_fetched_again(
    proxy: FaultyProxy, objects: Objects, checkpoint: Path, prefix: str, tmp_path: Path
) -> None:
    store_directory(objects, checkpoint, prefix, set())
    for n, spoilt in enumerate(((b"the weights as", b"The weights as"), (b'"created_at"', b'"Created_at"'))):
        proxy.replace.append(spoilt)
        assert restored(objects, checkpoint, prefix, tmp_path / f"{n}") == Restored(step=10)
        assert not proxy.replace
        verify_checkpoint(tmp_path / f"{n}" / NAME)


@pytest.mark.slow
def test_an_object_that_is_spoilt_in_the_store_is_damage_and_not_an_outage(
    store: ObjectStore, objects: Objects, checkpoint: Path, prefix: str, tmp_path: Path
) -> None:
    def is_damage(where: Path) -> None:
        found = restored(objects, checkpoint, prefix, where)
        assert (found.step, [skip.step for skip in found.skipped]) == (0, [10])
        assert name in found.skipped[0].why
        assert not (where / NAME).exists()

    for name in (*PARTS, CHECKPOINT_MANIFEST):
        store_directory(objects, checkpoint, prefix, set())
        whole = store.get_bytes(f"{prefix}/{name}")
        for n, spoilt in enumerate((whole[:-1], b"", whole.swapcase())):
            if spoilt != whole:
                store.put_bytes(f"{prefix}/{name}", spoilt)
                is_damage(tmp_path / f"{name}{n}")
        store.delete(f"{prefix}/{name}")
        is_damage(tmp_path / f"gone {name}")


def test_what_the_store_has_not_as_it_was_sent_is_not_committed_and_sent_again(
    platform: Platform, held: Claim, store: ObjectStore, api: ApiClient, objects: Objects, checkpoint: Path, prefix: str
) -> None:
    what = Commit(step=10, manifest_sha256=manifest_digest(checkpoint))
    for name in (PARTS[1], CHECKPOINT_MANIFEST):
        sent = set[str]()
        store_directory(objects, checkpoint, prefix, sent)
        store.put_bytes(f"{prefix}/{name}", b"torn")
        with pytest.raises(Unavailable, match=name):
            commit(api, what, sent)
        assert (sent, attempts.committed(platform, held.job_id)) == (set(), [])
    store_directory(objects, checkpoint, prefix, sent)
    commit(api, what, sent)
    (row,) = attempts.committed(platform, held.job_id)
    assert (row.object_prefix, row.manifest_sha256) == (prefix, what.manifest_sha256)


def test_damage_on_this_node_is_not_stored(store: ObjectStore, objects: Objects, checkpoint: Path, prefix: str) -> None:
    with (checkpoint / "adapter_model.safetensors").open("r+b") as out:
        out.write(b"T")
    with pytest.raises(IntegrityError, match="does not match the digest"):
        store_directory(objects, checkpoint, prefix, set())
    assert not store.exists(f"{prefix}/{CHECKPOINT_MANIFEST}") and not store.exists(f"{prefix}/adapter_model.safetensors")


def test_a_download_that_was_cut_off_fetches_only_what_is_missing(objects: Objects, checkpoint: Path, prefix: str, tmp_path: Path) -> None:
    store_directory(objects, checkpoint, prefix, set())
    there = tmp_path / "there"
    beside = there / f".fetching-{manifest_digest(checkpoint)[:32]}"
    beside.mkdir(parents=True)
    part = beside / "adapter_config.json"
    part.write_text("{}")
    inode = part.stat().st_ino
    (beside / "adapter_model.safetensors").write_bytes(b"half of")
    assert restored(objects, checkpoint, prefix, there) == Restored(step=10)
    assert (there / NAME / "adapter_config.json").stat().st_ino == inode
    assert not beside.exists()
    verify_checkpoint(there / NAME)


def test_a_big_file_is_sent_in_parts_each_held_against_its_digest(
    proxy: FaultyProxy, objects: Objects, prefix: str, tmp_path: Path
) -> None:
    big = tmp_path / "big"
    with big.open("wb") as out:
        out.truncate(PART_BYTES)
        out.seek(0, 2)
        out.write(b"the end of it")
    proxy.replace.append((b"the end of it", b"The end of it"))
    with pytest.raises(Unavailable, match="did not take big"):
        objects.store(f"{prefix}/big", big, None)
    objects.store(f"{prefix}/big", big, None)
    objects.fetch(f"{prefix}/big", tmp_path / "back")
    assert sha256_of(tmp_path / "back") == sha256_of(big)


def test_parts_are_sent_at_once_and_their_urls_granted_again_before_they_expire(
    store: ObjectStore, api: ApiClient, prefix: str, tmp_path: Path
) -> None:
    big = tmp_path / "big"
    with big.open("wb") as out:
        out.truncate(2 * PART_BYTES)
        out.seek(0, 2)
        out.write(b"the end of it")
    asked: list[WriteRequest] = []

    class Counted(ApiClient):
        def write_urls(self, request: WriteRequest) -> WriteGrant:
            asked.append(request)
            return api.write_urls(request)

        def complete(self, completion: Completion) -> None:
            api.complete(completion)

    senders = set[int]()
    with (
        contextlib.closing(Counted("http://127.0.0.1:9", "")) as counted,
        contextlib.closing(Objects(counted, renew_after_s=0.0)) as objects,
    ):
        objects.store(f"{prefix}/big", big, None, on_bytes=lambda: senders.add(threading.get_ident()))
    assert len(senders - {threading.get_ident()}) == 3
    begun, *renewed = asked
    assert begun.upload_id is None and len(renewed) >= 3
    assert len({request.upload_id for request in renewed}) == 1 and renewed[0].upload_id is not None, "the upload that was begun goes on"
    with store.open(f"{prefix}/big") as stored:
        assert hashlib.file_digest(stored, "sha256").hexdigest() == sha256_of(big)


@pytest.mark.slow
def test_a_store_that_takes_long_to_put_a_big_file_together_is_waited_for(
    proxy: FaultyProxy, internal_url: str, platform: Platform, held: Claim, store: ObjectStore, prefix: str, tmp_path: Path
) -> None:
    big = tmp_path / "big"
    with big.open("wb") as out:
        out.truncate(PART_BYTES + 1)
    completed: list[Completion] = []

    class Slow(ApiClient):
        def complete(self, completion: Completion) -> None:
            completed.append(completion)
            proxy.hold = True
            threading.Timer(22.0, lambda: setattr(proxy, "hold", False)).start()
            super().complete(completion)

    token = agents.introduce(platform, held, may_read=[])
    with contextlib.closing(Slow(internal_url, token)) as slow, contextlib.closing(Objects(slow)) as objects:
        objects.store(f"{prefix}/big", big, None)
    assert len(completed) == 1
    with store.open(f"{prefix}/big") as stored:
        assert hashlib.file_digest(stored, "sha256").hexdigest() == sha256_of(big)


def test_an_attempt_reads_and_writes_its_own_objects_and_no_others(objects: Objects, held: Claim, checkpoint: Path) -> None:
    for key in ("tenants/other/jobs/j/checkpoints/a1/x", f"{attempts.checkpoint_prefix(replace(held, attempt=2))}/x", "x"):
        with pytest.raises(InvalidRequest, match="may not write"):
            objects.store(key, checkpoint / CHECKPOINT_MANIFEST, None)
    for key in ("tenants/other/jobs/j/checkpoints/a1/x", "base_models/x"):
        with pytest.raises(InvalidRequest, match="may not read"):
            objects.fetch(key, checkpoint / "x")
    with pytest.raises(IntegrityError, match="not in the object store"):
        objects.fetch(f"{attempts.checkpoint_prefix(held)}/absent", checkpoint / "x")


@pytest.mark.slow
def test_a_store_that_does_not_answer_delays_neither_heartbeats_nor_tenants(
    proxy: FaultyProxy, platform: Platform, internal_url: str, held: Claim, api: ApiClient, prefix: str
) -> None:
    token = agents.introduce(platform, held, may_read=[])
    tenant = {"authorization": f"Bearer {tenants.create_key(platform, held.tenant, name='reader', scopes=['read']).secret}"}
    parts = WriteRequest(key=f"{prefix}/big", part_sha256=("00" * 32,) * 2)

    def wait_for_store(number: int) -> None:
        with contextlib.suppress(Unavailable, httpx.TimeoutException), contextlib.closing(ApiClient(internal_url, token)) as calls:
            if number % 3 == 0:
                calls.read_urls((f"{prefix}/{number}",))
            elif number % 3 == 1:
                calls.write_urls(parts)
            else:
                httpx.get(f"{internal_url}/readyz", timeout=20.0, trust_env=False)

    before, proxy.hold = proxy.faults, True
    with ThreadPoolExecutor(64) as pool:
        waiting = [pool.submit(wait_for_store, number) for number in range(64)]
        try:
            until(lambda: proxy.faults >= before + STORE_CALLS)
            began, took_s = time.monotonic(), list[float]()
            while time.monotonic() < began + 5.0:
                at = time.monotonic()
                api.heartbeat(Heartbeat(number=len(took_s), phase="fetch"))
                for path in ("/v1/models", "/healthz"):
                    assert httpx.get(f"{internal_url}{path}", headers=tenant, timeout=5.0, trust_env=False).status_code == 200
                took_s.append(time.monotonic() - at)
            assert max(took_s) < 5.0
            assert not any(call.done() for call in waiting), "all of them still wait"
        finally:
            proxy.hold = False
