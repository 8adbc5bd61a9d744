"""Claims about committed checkpoints: complete or absent, damage is found, the newest good one is used."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core import durable_files
from core.errors import IntegrityError
from engine.training import checkpoints
from engine.training.checkpoints import (
    CHECKPOINT_MANIFEST,
    RESUMABLE,
    latest_valid_checkpoint,
    read_manifest,
    retain,
    seal,
    step_name,
    verify_checkpoint,
)
from engine.training.disk_space import DiskFull
from tests.support.jobs.sealed_checkpoints import commit
from tests.support.jobs.training_specs import SPEC
from tests.support.processes.fsync_calls import Synced
from tests.support.processes.small_disk import SmallDisk, small_disk

PARTS = ("adapter_model.safetensors", "adapter_config.json", "optimizer.pt", "schedule.pt", "trainer_state.json")
OTHER = replace(SPEC, seed=8)


def fill(directory: Path) -> None:
    for name in PARTS:
        (directory / name).write_text(f"{name} of {directory.name}" * 50)


def save(root: Path, step: int, *, spec: Any = SPEC, write: Callable[[Path], None] = fill, attempt: int = 1) -> Path:
    target = root / step_name(step)
    commit(target, write, spec=spec, step=step, attempt=attempt, created_at=0.0, metrics={"num_tokens": step})
    return target


def rewrite(target: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edit a manifest as somebody would who gives it a new digest of its own."""
    body = json.loads((target / CHECKPOINT_MANIFEST).read_text())
    del body["sha256"]
    change(body)
    digest = checkpoints.hashlib.sha256(checkpoints.canonical_json(body).encode()).hexdigest()
    (target / CHECKPOINT_MANIFEST).write_text(json.dumps({**body, "sha256": digest}))


def test_a_committed_checkpoint_verifies_and_says_who_wrote_it(tmp_path: Path) -> None:
    target = save(tmp_path, 10)
    manifest = verify_checkpoint(target, required=RESUMABLE)
    assert (manifest.step, manifest.metrics, set(manifest.files)) == (10, {"num_tokens": 10}, set(PARTS))
    assert (manifest.spec_sha256, manifest.strategy, manifest.world_size) == (SPEC.sha256, SPEC.strategy, SPEC.world_size)
    assert manifest == read_manifest(target)


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fails(directory: Path) -> None:
        fill(directory)
        raise OSError("the cable was pulled")

    with pytest.raises(OSError, match="cable"):
        save(tmp_path, 10, write=fails)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_without_optimizer_is_not_committed(tmp_path: Path) -> None:
    def forgets(directory: Path) -> None:
        fill(directory)
        (directory / "optimizer.pt").unlink()

    with pytest.raises(IntegrityError, match=r"optimizer\.\*"):
        save(tmp_path, 10, write=forgets)
    assert list(tmp_path.iterdir()) == []


def test_committing_a_step_again_replaces_it(tmp_path: Path) -> None:
    target = save(tmp_path, 10)
    (target / "optimizer.pt").write_text("torn")
    save(tmp_path, 10, attempt=2)
    assert verify_checkpoint(target, required=RESUMABLE).attempt == 2
    assert [p.name for p in tmp_path.iterdir()] == [target.name]


def test_a_draft_is_sealed_by_another_thread_and_sealing_twice_is_sealing_once(tmp_path: Path) -> None:
    target = tmp_path / step_name(10)
    drafts = [checkpoints.begin(target, token="a1") for _ in range(2)]  # two ranks
    assert drafts[0] == drafts[1]
    fill(drafts[0])
    found: list[checkpoints.CheckpointManifest] = []

    def work() -> None:
        found.append(seal(drafts[0], target, checkpoints.CheckpointManifest.of(SPEC, step=10, attempt=1, created_at=1.0)))

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found == [verify_checkpoint(target)] * 2
    with pytest.raises(FileNotFoundError):
        seal(drafts[0], target, checkpoints.CheckpointManifest.of(SPEC, step=10, attempt=2, created_at=1.0))


@pytest.mark.parametrize("exists", [False, True])
def test_a_process_killed_while_it_commits_leaves_the_step_whole_or_as_it_was(tmp_path: Path, exists: bool) -> None:
    code = f"""if True:
        import os, sys
        sys.path.insert(0, {str(Path(__file__).parents[3])!r})
        from pathlib import Path
        from tests.support.jobs.sealed_checkpoints import commit
        from tests.support.jobs.training_specs import SPEC
        calls = [0]
        def trace(event, args):
            if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree") and {str(tmp_path)!r} in str(args[0]):
                calls[0] += 1
                if calls[0] == int(sys.argv[1]):
                    os._exit(9)
        def fill(directory):
            for name in {PARTS!r}:
                (directory / name).write_text(name * 50)
        sys.addaudithook(trace)
        commit(Path({str(tmp_path)!r}) / "step-00000010", fill, spec=SPEC, step=10, attempt=2, created_at=0.0)
    """
    killed = 0
    for moment in (1, 9, 20, 24, 26, 28, 1000):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        if exists:
            save(tmp_path, 10, attempt=1)
        killed += subprocess.run([sys.executable, "-c", code, str(moment)], check=False).returncode == 9
        found = latest_valid_checkpoint(tmp_path, SPEC)
        assert found is not None or not exists
        assert found is None or verify_checkpoint(found, required=RESUMABLE).attempt in (1, 2)
        checkpoints.sweep(tmp_path)
        assert found is None or latest_valid_checkpoint(tmp_path, SPEC) == found
        found = latest_valid_checkpoint(tmp_path, SPEC)  # maybe a draft that was whole
        assert len(list(tmp_path.iterdir())) == (found is not None)
    assert 3 < killed < 7


def test_a_manifest_that_omits_a_part_of_the_state_is_damage_though_its_digest_agrees(tmp_path: Path) -> None:
    for name in ("optimizer.pt", "schedule.pt", "trainer_state.json", "adapter_model.safetensors"):
        target = save(tmp_path, 10)
        (target / name).unlink()
        rewrite(target, lambda body, name=name: body["files"].pop(name))  # type: ignore[misc]
        with pytest.raises(IntegrityError, match=r"is not part of the manifest"):
            verify_checkpoint(target)
        rewrite(target, lambda body: body.update(required=[]))
        assert latest_valid_checkpoint(tmp_path, SPEC, required=RESUMABLE) is None
        assert latest_valid_checkpoint(tmp_path, SPEC) is None or name != "trainer_state.json"


def test_a_manifest_that_points_outside_is_damage(tmp_path: Path) -> None:
    target = save(tmp_path / "checkpoints", 10)
    (tmp_path / "secret").write_text("x")
    rewrite(target, lambda body: body["files"].update({"../../secret": body["files"]["optimizer.pt"]}))
    with pytest.raises(IntegrityError, match="not a path inside"):
        verify_checkpoint(target)


def test_the_newest_valid_checkpoint_of_this_spec_is_used_and_the_others_are_reported(tmp_path: Path) -> None:
    good = save(tmp_path, 10)
    (save(tmp_path, 20) / "optimizer.pt").write_text("torn")
    save(tmp_path, 30, spec=OTHER)
    (tmp_path / step_name(40)).mkdir()
    save(tmp_path, 50).rename(tmp_path / step_name(60))
    commit(tmp_path / step_name(70), fill, spec=SPEC, step=70, attempt=1, created_at=0.0, required=checkpoints.ADAPTER)
    (tmp_path / ".tmp-1-step-00000080").mkdir()
    skipped: dict[str, str] = {}
    assert latest_valid_checkpoint(tmp_path, SPEC, on_skip=lambda path, why: skipped.update({path.name: why})) == good
    assert list(skipped) == [step_name(n) for n in (70, 60, 40, 30, 20)]
    assert "manifest.json is missing" in skipped[step_name(40)]
    assert "finished model" in skipped[step_name(70)]


def test_half_the_batch_or_another_number_of_ranks_goes_on_from_the_same_checkpoint(tmp_path: Path) -> None:
    opt = SPEC.optimization
    halved = replace(SPEC, optimization=replace(opt, per_device_batch_size=2, accumulation_steps=4), gradient_checkpointing=True)
    spread = replace(SPEC, optimization=replace(opt, accumulation_steps=1), world_size=2, strategy="ddp")
    twice = replace(SPEC, optimization=replace(opt, accumulation_steps=4))
    longer = replace(SPEC, optimization=replace(opt, num_epochs=4))
    good = save(tmp_path, 10)
    assert [latest_valid_checkpoint(tmp_path, s) for s in (halved, spread)] == [good, good]
    assert [latest_valid_checkpoint(tmp_path, s) for s in (twice, longer, OTHER)] == [None] * 3
    assert len({s.sha256 for s in (SPEC, halved, spread, twice, longer)}) == 5


def test_a_balanced_router_goes_on_only_with_the_same_micro_batches(tmp_path: Path) -> None:
    """Its load-balancing loss is that of each micro-batch."""
    router = replace(SPEC, adapter="full", lora=None, train_router=True)
    halved = replace(router, optimization=replace(SPEC.optimization, per_device_batch_size=1, accumulation_steps=4))
    spread = replace(router, optimization=replace(SPEC.optimization, accumulation_steps=1), world_size=2, strategy="ddp")
    good = save(tmp_path, 10, spec=router)
    assert [latest_valid_checkpoint(tmp_path, s) for s in (router, halved, spread)] == [good, None, None]


def test_a_strategy_that_needs_other_parts_does_not_take_the_checkpoint_silently(tmp_path: Path) -> None:
    save(tmp_path, 10)
    skipped: list[str] = []
    sharded = replace(SPEC, strategy="fsdp2")
    assert latest_valid_checkpoint(tmp_path, sharded, required=("shards/*.distcp",), on_skip=lambda _, why: skipped.append(why)) is None
    assert "shards/*.distcp is not part of the manifest" in skipped[0]


def test_no_checkpoints_means_start_from_the_beginning(tmp_path: Path) -> None:
    assert latest_valid_checkpoint(tmp_path / "absent", SPEC) is None


def test_a_checkpoint_of_another_training_is_named_with_both_digests(tmp_path: Path) -> None:
    target = save(tmp_path, 10, spec=OTHER)
    ours, theirs = SPEC.resume_sha256[:12], OTHER.resume_sha256[:12]
    with pytest.raises(IntegrityError, match=rf"a different training job \({theirs}, not {ours}\)"):
        checkpoints.verify_checkpoint_for(target, SPEC)


def test_the_newest_one_says_how_large_the_next_will_be(tmp_path: Path) -> None:
    assert checkpoints.size_of_newest(tmp_path) == 0
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    (newest / "more").write_bytes(bytes(1000))
    assert checkpoints.size_of_newest(tmp_path) == sum(p.stat().st_size for p in newest.iterdir()) > 0


def test_the_digest_of_a_manifest_changes_with_any_byte_of_it(tmp_path: Path) -> None:
    target = save(tmp_path, 1)
    before = checkpoints.manifest_digest(target)
    assert before == hashlib.sha256((target / CHECKPOINT_MANIFEST).read_bytes()).hexdigest()
    (target / CHECKPOINT_MANIFEST).write_text((target / CHECKPOINT_MANIFEST).read_text() + " ")
    assert checkpoints.manifest_digest(target) != before


def test_a_draft_that_is_gone_is_not_sealed_by_a_damaged_checkpoint_in_its_place(tmp_path: Path) -> None:
    target = save(tmp_path, 1)
    (target / CHECKPOINT_MANIFEST).write_text("torn")
    with pytest.raises(FileNotFoundError):
        seal(tmp_path / ".tmp-gone", target, checkpoints.CheckpointManifest.of(SPEC, step=1, attempt=1, created_at=0.0))


def test_one_may_be_kept_and_not_none(tmp_path: Path) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    retain(tmp_path, 1)
    assert list(tmp_path.iterdir()) == [newest]
    with pytest.raises(ValueError, match="use at least 1"):
        retain(tmp_path, 0)


def test_retention_keeps_the_newest_and_sweeps_drafts_of_dead_processes_alone(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    (tmp_path / ".tmp-1-step-00000050").mkdir()
    ours = checkpoints.begin(tmp_path / step_name(60), token="a7")
    retain(tmp_path, 3)
    assert [p.name for p in checkpoints.committed_checkpoints(tmp_path)] == [step_name(n) for n in (20, 30, 40)]
    assert list(tmp_path.glob(".tmp-*")) == [ours]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk with 1 MiB."""
    with small_disk(tmp_path / "disk", "1m") as disk:
        yield disk.root


def _torch(directory: Path) -> None:
    import torch

    fill(directory)
    torch.save({"state": torch.zeros(2_000_000)}, directory / "optimizer.pt")


def _safetensors(directory: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    fill(directory)
    save_file({"w": np.zeros(2_000_000, np.float32)}, directory / "adapter_model.safetensors")


def _plainly(directory: Path) -> None:
    fill(directory)
    (directory / "optimizer.pt").write_bytes(b"0" * 8_000_000)


@pytest.mark.parametrize("write", [_torch, _safetensors, _plainly])
def test_a_full_disk_is_named_with_bytes_and_earlier_checkpoints_stand(small: Path, write: Callable[[Path], None]) -> None:
    def middling(directory: Path) -> None:
        fill(directory)
        (directory / "optimizer.pt").write_bytes(b"0" * 600_000)

    good = save(small, 10, write=middling)
    with pytest.raises(DiskFull, match=r"bytes are needed, \d+ are free") as caught:
        save(small, 20, write=write)
    assert caught.value.needed_bytes > 600_000 > 450_000 > caught.value.free_bytes
    assert latest_valid_checkpoint(small, SPEC) == good
    assert [p.name for p in small.iterdir()] == [good.name]


def test_a_disk_that_fills_with_the_last_byte_is_found_when_the_manifest_is_written(small: Path) -> None:
    def exactly(directory: Path) -> None:
        fill(directory)
        SmallDisk(small).fill()
        (small / ".filler").rename(directory / "more.pt")

    with pytest.raises(DiskFull):
        save(small, 10, write=exactly)
    assert list(small.iterdir()) == []


def test_checkpoints_newer_than_where_a_run_goes_on_never_crowd_out_what_it_writes(tmp_path: Path) -> None:
    for step in (300, 400, 500):
        save(tmp_path, step, spec=OTHER)
    assert latest_valid_checkpoint(tmp_path, SPEC) is None
    assert [p.name for p in checkpoints.set_aside_newer(tmp_path, 0)] == [step_name(n) for n in (300, 400, 500)]
    for step in (50, 100, 200):
        save(tmp_path, step, attempt=2)
        assert retain(tmp_path, 3) == []
    assert latest_valid_checkpoint(tmp_path, SPEC) == tmp_path / step_name(200)
    assert checkpoints.set_aside_newer(tmp_path, 100) == [tmp_path / step_name(200)]
    assert checkpoints.set_aside_newer(tmp_path, 100) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == [step_name(50), step_name(100)]
    assert checkpoints.set_aside_newer(tmp_path / "absent", 0) == []


@pytest.mark.parametrize("lost", ["nothing", "the new one", "the old one"])
def test_a_crash_between_two_renames_loses_no_checkpoint(tmp_path: Path, lost: str) -> None:
    """Where two names cannot be exchanged in one step."""
    code = f"""if True:
        import os, sys
        sys.path.insert(0, {str(Path(__file__).parents[3])!r})
        from pathlib import Path
        from core import durable_files
        from tests.support.jobs.sealed_checkpoints import commit
        from tests.support.jobs.training_specs import SPEC
        durable_files.ctypes = type("NoLibrary", (), {{"CDLL": staticmethod(lambda *_, **__: object())}})
        def trace(event, args):
            if event == "os.rename" and str(args[1]).endswith("/step-00000010"):
                os._exit(9)
        def fill(directory):
            for name in {PARTS!r}:
                (directory / name).write_text(name * 50)
        sys.addaudithook(trace)
        commit(Path({str(tmp_path)!r}) / "step-00000010", fill, spec=SPEC, step=10, attempt=2, created_at=0.0)
    """
    save(tmp_path, 10, attempt=1)
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    assert checkpoints.committed_checkpoints(tmp_path) == []
    (replaced,) = tmp_path.glob(".tmp-*-replaced-*")
    (draft,) = (p for p in tmp_path.iterdir() if p != replaced)
    if lost != "nothing":
        ((draft if lost == "the new one" else replaced) / "optimizer.pt").unlink()
    assert checkpoints.recover_checkpoints(tmp_path) == [tmp_path / step_name(10)]
    assert verify_checkpoint(tmp_path / step_name(10), required=RESUMABLE).attempt == (1 if lost == "the new one" else 2)
    checkpoints.sweep(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [step_name(10)]


def test_where_names_cannot_be_exchanged_the_replaced_checkpoint_goes_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 10, attempt=1)
    monkeypatch.setattr(durable_files.ctypes, "CDLL", lambda *_, **__: object())
    assert verify_checkpoint(save(tmp_path, 10, attempt=2), required=RESUMABLE).attempt == 2
    assert [p.name for p in tmp_path.iterdir()] == [step_name(10)]


@pytest.mark.parametrize(
    ("adapter", "strategy", "parts"),
    [
        ("lora", "single", "adapter_model.safetensors optimizer.*"),
        ("qlora", "ddp", "adapter_model.safetensors optimizer.*"),
        ("lora", "fsdp2", "adapter_model.safetensors optimizer.*"),
        ("full", "single", "*model*.safetensors optimizer.*"),
        ("full", "ddp", "*model*.safetensors optimizer.*"),
        ("full", "fsdp2", "distributed/.metadata distributed/*.distcp"),
        ("full", "zero1", "zero/*optim_states.pt zero/*model_states.pt"),
        ("full", "zero3", "zero/*optim_states.pt zero/*model_states.pt"),
    ],
)
def test_the_parts_that_a_resume_needs_are_those_of_the_strategy(adapter: Any, strategy: Any, parts: str) -> None:
    found = checkpoints.checkpoint_parts(replace(SPEC, adapter=adapter, strategy=strategy))
    assert found == (*parts.split(), "schedule.*", "trainer_state.json")


def test_what_was_given_up_is_not_recovered(tmp_path: Path) -> None:
    save(tmp_path, 10).rename(tmp_path / f".tmp-1-gone-{step_name(10)}")
    checkpoints.sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def with_shards(directory: Path) -> None:
    fill(directory)
    (directory / "shards").mkdir()
    (directory / "shards" / "rank-1.distcp").write_text("half of it")


def test_every_part_the_manifest_and_every_directory_are_on_the_disk_before_a_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, named = Synced(monkeypatch), []
    target = tmp_path / step_name(10)
    synced.after = lambda path: named.append(target.exists())
    save(tmp_path, 10, write=with_shards)
    draft = next(path.parent for path in synced.paths if path.name == CHECKPOINT_MANIFEST)
    parts = {draft / name for name in (*PARTS, "shards/rank-1.distcp")}
    before = [path for path, is_named in zip(synced.paths, named, strict=True) if not is_named]
    assert parts | {draft / CHECKPOINT_MANIFEST, draft / "shards", draft} <= set(before)
    assert parts <= set(before[: before.index(draft / CHECKPOINT_MANIFEST)]), "the manifest is written when its parts are on the disk"
    assert synced.paths[-1] == tmp_path and named[-1], "the name itself"


def test_a_draft_that_a_crash_kept_from_its_name_has_it_on_the_disk_once_recovered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 10).rename(tmp_path / f".tmp-1-{step_name(10)}")
    synced = Synced(monkeypatch)
    assert checkpoints.recover_checkpoints(tmp_path) == [tmp_path / step_name(10)]
    assert synced.paths == [tmp_path]


@pytest.mark.parametrize("name", ["optimizer.pt", "trainer_state.json", CHECKPOINT_MANIFEST])
def test_a_disk_that_keeps_other_bytes_than_it_was_given_commits_nothing(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes change once they are synced, so that only a second look at them can tell."""
    good = save(tmp_path, 10)
    synced = Synced(monkeypatch)

    def spoil(path: Path) -> None:
        if path.name == name:
            body = path.read_bytes()
            path.write_bytes(body[:40] + bytes([body[40] ^ 1]) + body[41:])

    synced.after = spoil
    with pytest.raises(IntegrityError, match=name):
        save(tmp_path, 20)
    assert [p.name for p in tmp_path.iterdir()] == [good.name]


def test_parts_are_read_again_from_the_disk_and_not_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten = []
    original = os.posix_fadvise

    def advise(descriptor: int, offset: int, length: int, advice: int) -> None:
        original(descriptor, offset, length, advice)
        forgotten.append((Path(f"/proc/self/fd/{descriptor}").readlink().name, offset, length, advice))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    save(tmp_path, 10)
    assert sorted(forgotten) == sorted((name, 0, 0, os.POSIX_FADV_DONTNEED) for name in PARTS)
