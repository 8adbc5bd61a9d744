"""A pack's shards arrive in the order in which the training reads them, also from a store that is slow, full of errors or wrong."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agent.api_client import ApiClient
from agent.inputs import NodeInputs, Stream
from agent.objects import Objects
from control_plane.attempts import agents, start
from control_plane.attempts.claims import Claim
from control_plane.platform.context import Platform
from core import layout
from core.errors import IntegrityError
from core.workload import Input, Kind, Workload
from engine.training.pack_stream import ARRIVING, arrival_order
from engine.training.runtime import pack_loader
from engine.training.spec import Source
from tests.engine.training.attempts import SPEC, VOCAB, write_pack
from tests.support.jobs.followed_jobs import until

SHARDS = 9
PACK = "pack_streamed"


@pytest.fixture
def pack(platform: Platform, held: Claim, tmp_path: Path) -> Input:
    """A stored pack of nine shards, as a workload names it."""
    directory, prefix = write_pack(tmp_path / "pack", num_windows=27, shards=SHARDS), layout.pack_prefix(held.tenant, PACK)
    for path in sorted(directory.iterdir()):
        platform.objects.put_file(f"{prefix}/{path.name}", path)
    return start.pack_input(platform.objects, held.tenant, replace(SPEC, pack_fingerprint=PACK))


@pytest.fixture
def objects(platform: Platform, internal_url: str, held: Claim) -> Iterator[Objects]:
    token = agents.introduce(platform, held, may_read=[f"{layout.pack_prefix(held.tenant, PACK)}/"])
    with contextlib.closing(ApiClient(internal_url, token)) as api, contextlib.closing(Objects(api)) as made:
        yield made


@pytest.fixture
def stage(objects: Objects, pack: Input, held: Claim, tmp_path: Path) -> Callable[[], tuple[Path, Callable[[int], Stream]]]:
    """Have the first files; returns their directory, and what begins the stream."""

    def begin() -> tuple[Path, Callable[[int], Stream]]:
        inputs = NodeInputs(
            objects, (pack,), cache=tmp_path / "node" / "inputs", tenant=held.tenant, target=tmp_path / "node" / "inputs-a1"
        )
        directory = inputs.stage(lambda: None)[start.PACK]
        return directory, lambda step: inputs.stream(SPEC, step, make_room=lambda: None)

    return begin


def arrived(directory: Path) -> list[str]:
    found = sorted(directory.glob("shard-*"), key=lambda path: path.lstat().st_ctime_ns)
    return [path.name for path in found]


@pytest.mark.parametrize("step", [0, 4])
def test_shards_arrive_in_the_order_of_their_use(stage: Callable[[], tuple[Path, Callable[[int], Stream]]], pack: Input, step: int) -> None:
    directory, begin = stage()
    assert arrived(directory) == ["shard-00000.parquet"] and (directory / "val-00000.parquet").exists()
    begin(step)
    assert (directory / ARRIVING).exists()
    until(lambda: not (directory / ARRIVING).exists())
    expected = [f"shard-{n:05d}.parquet" for n in arrival_order(SPEC, [3] * SHARDS, step=step) if n]
    assert arrived(directory)[1:] == expected


def test_a_shard_with_other_bytes_ends_the_stream_and_says_which(
    stage: Callable[[], tuple[Path, Callable[[int], Stream]]], platform: Platform, pack: Input
) -> None:
    directory, begin = stage()
    wrong = next(file for file in pack.later if file.path == "shard-00005.parquet")
    platform.objects.put_bytes(wrong.key, b"not that shard")
    stream = begin(0)
    until(lambda: stream.error is not None)
    assert isinstance(stream.error, IntegrityError) and wrong.key in str(stream.error)
    assert (directory / ARRIVING).exists() and not (directory / wrong.path).exists(), "the training waits until it is ended"


def test_a_closed_stream_begins_no_further_shard(stage: Callable[[], tuple[Path, Callable[[int], Stream]]]) -> None:
    directory, begin = stage()
    begin(0).close()
    time.sleep(1.0)
    assert len(arrived(directory)) < SHARDS


def test_shards_of_a_mixture_arrive_in_a_directory_per_pack(platform: Platform, internal_url: str, held: Claim, tmp_path: Path) -> None:
    names = ("pack_one", "pack_two")
    for seed, name in enumerate(names):  # equal shards would be one file in the cache
        directory = write_pack(tmp_path / name, num_windows=18, shards=6, fingerprint=name, seed=seed)
        for path in directory.iterdir():
            platform.objects.put_file(f"{layout.pack_prefix(held.tenant, name)}/{path.name}", path)
    sources = tuple(
        Source(dataset_id=f"ds_{name}", pack_fingerprint=name, rows_per_epoch=rows) for name, rows in zip(names, (30, 6), strict=True)
    )
    spec = replace(SPEC, pack_fingerprint=names[0], sources=sources)
    given = start.pack_input(platform.objects, held.tenant, spec)
    workload = Workload(name="w", kind=Kind.TRAIN, tenant=held.tenant, job=held.job_id, inputs=(given,))
    prefixes = start._prefixes(workload)
    assert prefixes == sorted(f"{layout.pack_prefix(held.tenant, name)}/" for name in names), "no more than its own packs"
    token = agents.introduce(platform, held, may_read=prefixes)
    with contextlib.closing(ApiClient(internal_url, token)) as api, contextlib.closing(Objects(api)) as objects:
        inputs = NodeInputs(objects, (given,), cache=tmp_path / "cache", tenant=held.tenant, target=tmp_path / "inputs-a1")
        directory = inputs.stage(lambda: None)[start.PACK]
        assert sorted(str(p.relative_to(directory)) for p in directory.rglob("shard-*")) == [f"{n}/shard-00000.parquet" for n in names]
        inputs.stream(spec, 0, make_room=lambda: None)
        until(lambda: not (directory / ARRIVING).exists())
    found = sorted((p for p in directory.rglob("shard-*") if p.name != "shard-00000.parquet"), key=lambda p: p.lstat().st_ctime_ns)
    shards = [f"{name}/shard-{n:05d}.parquet" for name in names for n in range(6)]
    order = [shards[n] for n in arrival_order(spec, [3] * 6, [3] * 6, step=0)]
    assert [str(p.relative_to(directory)) for p in found] == [path for path in order if not path.endswith("00000.parquet")]
    assert pack_loader.load(directory, spec, vocab_size=VOCAB).train.num_rows == 36
