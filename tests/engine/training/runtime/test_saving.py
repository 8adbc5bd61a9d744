"""A checkpoint is written and sealed also where the process can start no thread to write it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the training environment")

from engine.training.checkpoints import RESUMABLE, committed_checkpoints, read_manifest, step_name, verify_checkpoint
from engine.training.runtime import checkpoint_writer
from engine.training.runtime.checkpoint_writer import Saver
from engine.training.runtime.topology import Topology
from engine.training.spec import EarlyStopping, RunFile, TrainingSpec
from tests.engine.training.attempts import SPEC

MORE_THAN_ADDRESSABLE = 2**58
"""Bytes of a thread's stack; a process addresses 2^57 at most, with page tables of five levels."""
FILES = ("adapter_model.safetensors", "optimizer.pt", "schedule.pt")


@dataclass(frozen=True)
class SmallState:
    """A strategy whose state is a few bytes, nothing trained. Where ranks save together each but the first has a file of its own."""

    rank: int = 0
    world_size: int = 1
    saves_alone: bool = True

    def save(self, directory: Path, *, base_model: str) -> Callable[[], None]:
        del base_model

        def write() -> None:
            for name in (f"shard-{self.rank}.pt",) if self.rank else FILES:
                (directory / name).write_bytes(name.encode())

        return write


@contextmanager
def no_more_threads() -> Iterator[None]:
    """The operating system refuses every thread that is started here."""
    before = threading.stack_size(MORE_THAN_ADDRESSABLE)
    try:
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threading.Thread(target=lambda: None).start()
        yield
    finally:
        threading.stack_size(before)


@dataclass(frozen=True)
class Held(SmallState):
    """Writes once `may_write`, and fails then if it `fails`."""

    may_write: threading.Event = field(default_factory=threading.Event)
    fails: bool = False

    def save(self, directory: Path, *, base_model: str) -> Callable[[], None]:
        ready = super().save(directory, base_model=base_model)

        def write() -> None:
            self.may_write.wait()
            if self.fails:
                raise OSError("no such device")
            ready()

        return write


def saver_of(strategy: Any, work_dir: Path, *, spec: TrainingSpec = SPEC, **more: Any) -> Saver:
    run = RunFile(spec=spec, attempt=1, base_model_dir=work_dir, pack_dir=work_dir, work_dir=work_dir)
    alone = Topology(rank=strategy.rank, local_rank=strategy.rank, local_world_size=strategy.world_size, node=0, num_nodes=1)
    return Saver(run, strategy, more.pop("here", alone), **more)


@pytest.fixture
def saver(tmp_path: Path) -> Saver:
    return saver_of(SmallState(), tmp_path)


def state(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "best_step": None, **more}


def test_a_checkpoint_is_sealed_where_no_thread_can_be_started(saver: Saver, tmp_path: Path) -> None:
    with no_more_threads():
        saver.save(state(3), {"loss": 1.5})
        saver.save_now(state(4), {})
        sealed = tmp_path / "checkpoints" / step_name(3)
        verify_checkpoint(sealed, required=RESUMABLE)
    assert (read_manifest(sealed).step, read_manifest(sealed).metrics["loss"], saver.committed_step) == (3, 1.5, 4)
    assert [(sealed / name).read_text() for name in FILES] == list(FILES)
    verify_checkpoint(tmp_path / "checkpoints" / step_name(4), required=RESUMABLE)


@pytest.mark.parametrize(("early_stopping", "kept"), [(EarlyStopping(patience=9), [1, 3, 4, 5]), (None, [3, 4, 5])], ids=["early", "whole"])
def test_the_checkpoint_that_an_early_stop_goes_back_to_is_kept(
    early_stopping: EarlyStopping | None, kept: list[int], tmp_path: Path
) -> None:
    saver = saver_of(SmallState(), tmp_path, spec=replace(SPEC, optimization=replace(SPEC.optimization, early_stopping=early_stopping)))
    for step in range(1, 6):
        saver.save_now(state(step, best_step=1), {})
    assert SPEC.checkpoint.keep_last == 3
    assert [path.name for path in committed_checkpoints(tmp_path / "checkpoints")] == [step_name(step) for step in kept]


def test_what_goes_wrong_while_writing_is_raised_at_the_next_look(saver: Saver, tmp_path: Path) -> None:
    saver.save(state(3, last=object()), {})
    with pytest.raises(TypeError, match="not JSON serializable"):
        saver.wait()
    assert saver.committed_step == saver.offered_step == 0
    assert not list((tmp_path / "checkpoints").iterdir())
    saver.save_now(state(4), {})
    assert saver.committed_step == 4


def test_ranks_that_save_together_commit_when_the_last_of_them_has_written_its_part(tmp_path: Path) -> None:
    first, second, third = (saver_of(SmallState(rank, 3, saves_alone=False), tmp_path) for rank in range(3))
    target = tmp_path / "checkpoints" / step_name(5)
    first.save(state(5), {})
    second.save_now(state(5), {})
    waiting = threading.Thread(target=second.await_committed, args=[5], daemon=True)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive() and not target.exists(), "the third has written nothing yet"
    third.save_now(state(5), {})
    first.wait()
    waiting.join()
    assert {*read_manifest(target).files} == {*FILES, "shard-1.pt", "shard-2.pt", "trainer_state.json"}
    assert first.committed_step == second.committed_step == third.committed_step == 5


def test_where_the_first_rank_saves_alone_the_others_write_nothing_and_count_on_it(tmp_path: Path) -> None:
    other = saver_of(SmallState(1, 2), tmp_path)
    other.save_now(state(5), {})
    assert (other.committed_step, other.offered_step) == (5, 5)
    assert not (tmp_path / "checkpoints").exists()
    saver_of(SmallState(0, 2), tmp_path).save_now(state(5), {})
    other.await_committed(5)
    verify_checkpoint(tmp_path / "checkpoints" / step_name(5), required=RESUMABLE)


@pytest.mark.parametrize(("rank", "left"), [(0, False), (1, True)])
def test_the_first_rank_alone_sweeps_drafts_of_dead_attempts(tmp_path: Path, rank: int, left: bool) -> None:
    draft = tmp_path / "checkpoints" / f".tmp-dead-{step_name(3)}"
    draft.mkdir(parents=True)
    saver_of(SmallState(rank, 2), tmp_path)
    assert draft.exists() is left


def test_waiting_for_a_slow_disk_is_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writer, "TOUCH_S", 0.01)
    held, touches = Held(), list[int]()

    def touch() -> None:
        touches.append(1)
        if len(touches) == 3:
            held.may_write.set()

    saver = saver_of(held, tmp_path, touch=touch)
    saver.save_now(state(5), {})
    assert len(touches) >= 3 and saver.committed_step == 5


def test_waiting_for_a_disk_that_hangs_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writer, "TOUCH_S", 0.01)
    monkeypatch.setattr(checkpoint_writer, "MAX_WRITE_S", 0.0)
    held, touches = Held(), list[int]()
    threading.Timer(0.2, held.may_write.set).start()
    saver_of(held, tmp_path, touch=lambda: touches.append(1)).save_now(state(5), {})
    assert not touches


def test_a_newer_checkpoint_is_written_although_the_one_before_was_not(saver: Saver) -> None:
    assert saver.stall_s == 0.0
    began = time.monotonic()
    saver.save(state(3, last=object()), {})
    saver.save_now(state(4), {})
    assert saver.committed_step == 4
    assert 0.0 < saver.stall_s <= time.monotonic() - began


def test_a_run_that_ends_before_its_first_step_leaves_no_checkpoint(saver: Saver, tmp_path: Path) -> None:
    saver.save_now(state(0), {})
    assert not list((tmp_path / "checkpoints").glob("*"))


def test_the_first_rank_says_which_parts_did_not_appear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writer, "PARTS_TIMEOUT_S", 0.05)
    first, second = (saver_of(SmallState(rank, 3, saves_alone=False), tmp_path) for rank in range(2))
    second.save_now(state(5), {})
    with pytest.raises(TimeoutError, match=r"\['\.part-2'\] of the other ranks did not appear within 0 s"):
        first.save_now(state(5), {})


def test_a_rank_that_fails_takes_no_other_ranks_part_away(tmp_path: Path) -> None:
    second, third = saver_of(SmallState(1, 3, saves_alone=False), tmp_path), Held(2, 3, saves_alone=False, fails=True)
    third.may_write.set()
    second.save_now(state(5), {})
    with pytest.raises(OSError, match="no such device"):
        saver_of(third, tmp_path).save_now(state(5), {})
    assert [p.name for p in tmp_path.rglob("shard-*")] == ["shard-1.pt"]
