"""A checkpoint is written and sealed also where the process can start no thread to write it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the training environment")

from ft_assets.training.checkpoints import RESUMABLE, read_manifest, step_name, verify
from ft_assets.training.runtime.saving import Saver
from ft_assets.training.spec import RunFile
from tests.ft_assets.training.attempts import SPEC

MORE_THAN_ADDRESSABLE = 2**58
"""Bytes of a thread's stack; a process addresses 2^57 at most, with page tables of five levels."""
FILES = ("adapter_model.safetensors", "optimizer.pt", "schedule.pt")


class SmallState:
    """A strategy whose state is a few bytes: one rank, nothing trained."""

    rank, world_size, saves_alone = 0, 1, True

    def save(self, directory: Path, *, base_model: str) -> Callable[[], None]:
        del base_model

        def write() -> None:
            for name in FILES:
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


@pytest.fixture
def saver(tmp_path: Path) -> Saver:
    run = RunFile(spec=SPEC, attempt=1, base_model_dir=tmp_path, pack_dir=tmp_path, work_dir=tmp_path)
    strategy: Any = SmallState()
    return Saver(run, strategy)


def state(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "best_step": None, **more}


def test_a_checkpoint_is_sealed_where_no_thread_can_be_started(saver: Saver, tmp_path: Path) -> None:
    with no_more_threads():
        saver.save(state(3), {"loss": 1.5})
        saver.save_now(state(4), {})
        sealed = tmp_path / "checkpoints" / step_name(3)
        verify(sealed, required=RESUMABLE)
    assert (read_manifest(sealed).step, read_manifest(sealed).metrics["loss"], saver.committed_step) == (3, 1.5, 4)
    assert [(sealed / name).read_text() for name in FILES] == list(FILES)
    verify(tmp_path / "checkpoints" / step_name(4), required=RESUMABLE)


def test_what_goes_wrong_while_writing_is_raised_at_the_next_look(saver: Saver, tmp_path: Path) -> None:
    saver.save(state(3, last=object()), {})
    with pytest.raises(TypeError, match="not JSON serializable"):
        saver.wait()
    assert saver.committed_step == saver.offered_step == 0
    assert not list((tmp_path / "checkpoints").iterdir())
    saver.save_now(state(4), {})
    assert saver.committed_step == 4
