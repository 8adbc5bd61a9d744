"""Checkpoints of which each node of a gang has a part: stored by its agent, committed by the first one when all are there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.api_client import ApiClient
from agent.messages import Commit
from agent.objects import Objects
from agent.restore import restore
from agent.uploads.checkpoint_uploads import Uploader, store_directory
from control_plane.attempts import agents, start
from control_plane.attempts import service as attempts
from control_plane.attempts.claims import Claim
from core.errors import Conflict, IntegrityError
from core.retries import RetryPolicy
from core.workload import StoredCheckpoint
from engine.training import checkpoints
from engine.training.checkpoints import (
    CHECKPOINT_MANIFEST,
    TRAINER_STATE,
    CheckpointManifest,
    encoded_manifest,
    merged_manifest,
    part_manifest,
    read_manifest,
    step_name,
    verify_checkpoint,
)
from tests.control_plane.attempts.test_gangs import TWO_NODES
from tests.support.jobs.followed_jobs import Job, until

FILES = (("distributed/.metadata", "distributed/__0_0.distcp", "schedule.pt", TRAINER_STATE), ("distributed/__1_0.distcp",))
"""Of each node."""
SHORT = RetryPolicy(first_s=0.05, most_s=0.1, give_up_s=1.0)


class Gang:
    """A job of two nodes that trains full parameters, and the calls of its agents."""

    def __init__(self, job: Job, root: Path) -> None:
        self.job, self.root, self.held = job, root, job.claim()
        self.workload = start.describe(job.platform, self.held)
        self.api = ApiClient(job.platform.settings.internal_url, agents.introduce(job.platform, self.held, may_read=[]))
        self.objects = Objects(self.api)
        self.alone = False
        self.uploaders = [self.uploader(node) for node in range(2)]

    def uploader(self, node: int) -> Uploader:
        return Uploader(
            self.workload, self.api, self.objects, self.root / f"node-{node}", node=node, resume_sha256=self.held.spec.resume_sha256,
            tell=lambda _: None, before_commit=lambda: None, alone=lambda: self.alone, retries=SHORT,
        )  # fmt: skip

    def part(self, node: int, step: int, **changes: Any) -> Path:
        """What the ranks of a node wrote of a checkpoint."""
        target = self.root / f"node-{node}" / "checkpoints" / step_name(step)
        draft = checkpoints.begin(target)
        for name in FILES[node]:
            (draft / name).parent.mkdir(exist_ok=True)
            (draft / name).write_text(f"{name} of step {step} {changes}")
        required = () if node else checkpoints.checkpoint_parts(self.held.spec)
        facts = {"step": step, "attempt": 1, "created_at": 0.0, "node": node, "num_nodes": 2} | changes
        checkpoints.seal(draft, target, CheckpointManifest.of(self.held.spec, required=required, **facts))
        return target

    def prefix(self, step: int) -> str:
        return f"{attempts.checkpoint_prefix(self.held)}/{step_name(step)}"

    def has_part(self, node: int, step: int) -> bool:
        return self.job.platform.objects.exists(f"{self.prefix(step)}/{part_manifest(node)}")

    def close(self) -> None:
        for uploader in self.uploaders:
            uploader.close()
        self.objects.close()
        self.api.close()


@pytest.fixture
def gang(new_job: Callable[..., Job], tmp_path: Path) -> Iterator[Gang]:
    pools = tmp_path / "pools.yaml"
    pools.write_text(TWO_NODES)
    with contextlib.closing(
        Gang(new_job(env={"pools": str(pools)}, strategy="fsdp2", world_size=2, adapter="full", lora=None), tmp_path)
    ) as made:
        yield made


def test_a_checkpoint_is_committed_once_every_node_has_stored_its_part(gang: Gang, tmp_path: Path) -> None:
    leader, follower = gang.uploaders
    assert leader.offer(gang.part(0, 4))
    until(lambda: gang.has_part(0, 4))
    assert not leader.drain(abandon=lambda: not leader.committed), "the other part is missing"
    assert gang.job.steps() == []
    assert follower.offer(gang.part(1, 4)) and follower.drain()
    assert leader.drain()
    assert gang.job.steps() == [4]
    (row,) = attempts.committed(gang.job.platform, gang.job.id)
    stored = StoredCheckpoint(step=4, attempt=1, prefix=row.object_prefix, manifest_sha256=row.manifest_sha256)
    found = restore(gang.objects, gang.held.spec, [stored], tmp_path / "there")
    assert (found.step, found.skipped) == (4, ())
    assert set(verify_checkpoint(tmp_path / "there" / step_name(4)).files) == {name for names in FILES for name in names}


def test_the_files_of_its_own_node_are_not_fetched_again(gang: Gang) -> None:
    parts = [gang.part(node, 4) for node in range(2)]
    for uploader, part in zip(gang.uploaders, parts, strict=True):
        uploader.offer(part)
    assert gang.uploaders[0].drain() and gang.uploaders[1].drain()
    (row,) = attempts.committed(gang.job.platform, gang.job.id)
    stored = StoredCheckpoint(step=4, attempt=1, prefix=row.object_prefix, manifest_sha256=row.manifest_sha256)
    own = parts[0] / "distributed" / "__0_0.distcp"
    inode = own.stat().st_ino
    gang.job.platform.objects.delete(f"{row.object_prefix}/distributed/__0_0.distcp")
    assert restore(gang.objects, gang.held.spec, [stored], parts[0].parent).step == 4
    assert own.stat().st_ino == inode
    assert verify_checkpoint(parts[0]).num_nodes == 1


def test_a_commit_is_refused_unless_the_parts_of_all_nodes_are_there_and_say_the_same(gang: Gang) -> None:
    parts = [gang.part(node, 4) for node in range(2)]
    store = gang.job.platform.objects
    for part in parts:
        store_directory(gang.objects, part, gang.prefix(4), set())
    good = store.get_bytes(f"{gang.prefix(4)}/{part_manifest(1)}")
    whole = gang.root / CHECKPOINT_MANIFEST
    whole.write_bytes(encoded_manifest(merged_manifest([read_manifest(part) for part in parts])))
    gang.objects.store(f"{gang.prefix(4)}/{CHECKPOINT_MANIFEST}", whole, None)
    commit = Commit(step=4, manifest_sha256=checkpoints.manifest_digest(gang.root))

    store.delete(f"{gang.prefix(4)}/{part_manifest(1)}")
    with pytest.raises(Conflict, match="lacks the part of a node"):
        gang.api.commit(commit)
    for changes, message in (({"metrics": {"loss": 1.0}}, "is not as the node"), ({"attempt": 2}, "differ in attempt")):
        store.put_bytes(f"{gang.prefix(4)}/{part_manifest(1)}", (gang.part(1, 4, **changes) / CHECKPOINT_MANIFEST).read_bytes())
        with pytest.raises(Conflict, match=message):
            gang.api.commit(commit)
    store.put_bytes(f"{gang.prefix(4)}/{part_manifest(1)}", good)
    store.delete(f"{gang.prefix(4)}/{FILES[1][0]}")
    with pytest.raises(Conflict, match="is not stored as its manifest lists it"):
        gang.api.commit(commit)
    assert gang.job.steps() == []


def test_of_checkpoints_that_the_nodes_stored_in_part_the_newest_whole_one_is_committed(gang: Gang) -> None:
    leader, follower = gang.uploaders
    for step in (2, 4, 6, 8):
        leader.offer(gang.part(0, step))
        until(lambda step=step: gang.has_part(0, step))  # type: ignore[misc]
    for step in (4, 6):
        follower.offer(gang.part(1, step))
        follower.drain()
    until(lambda: 6 in gang.job.steps())
    gang.alone = True
    assert not leader.drain(), "the other node has ended, and its part of step 8 will not come"
    assert gang.job.steps()[0] == 6


def test_a_node_sends_no_parts_of_an_earlier_attempt_and_a_follower_nothing_whole(gang: Gang) -> None:
    assert not gang.uploaders[0].offer(gang.part(0, 4, attempt=0))
    assert not gang.uploaders[1].offer(gang.part(1, 4, num_nodes=1))


def parts_of(held: Claim, root: Path, **changes: Any) -> list[CheckpointManifest]:
    made = []
    for node in range(2):
        files = {f"f{node}": checkpoints.CheckpointPart(sha256=f"{node}", bytes=1)}
        facts = {"step": 4, "attempt": 1, "created_at": 0.0, "node": node, "num_nodes": 2, "files": files}
        made.append(CheckpointManifest.of(held.spec, required=(), **facts))
    made[1] = replace(made[1], **changes)
    return made


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"node": 0}, r"parts of nodes \[0, 0\], of 2"), ({"step": 5}, "differ in step"), ({"attempt": 2}, "differ in attempt"),
        ({"spec_sha256": "other"}, "differ in spec_sha256"),
        ({"files": {"f0": checkpoints.CheckpointPart(sha256="2", bytes=1)}}, "the same file"),
    ],
)  # fmt: skip
def test_parts_of_different_checkpoints_make_none(gang: Gang, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert set(merged_manifest(parts_of(gang.held, tmp_path)).files) == {"f0", "f1"}
    with pytest.raises(IntegrityError, match=message):
        merged_manifest(parts_of(gang.held, tmp_path, **changes))
