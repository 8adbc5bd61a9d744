"""Full-parameter runs that start from an earlier whole model instead of their base."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the training environment")

from engine.training.runtime.run_errors import BadInput  # noqa: E402
from engine.training.spec import RunFile, WarmStart  # noqa: E402
from tests.engine.training.attempts import SPEC, write_pack  # noqa: E402
from tests.engine.training.in_process import Training  # noqa: E402
from tests.support.models.deterministic_torch import deterministic_only_here  # noqa: E402, F401
from tests.support.models.tiny_model import build_tiny_model  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries; a run silences them too

FULL = replace(SPEC, adapter="full", lora=None)
START = WarmStart(adapter="ft:tiny:acme::first", manifest_sha256="2" * 64)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return build_tiny_model(tmp_path / "base"), write_pack(tmp_path / "pack")


def trained(files: tuple[Path, Path], work: Path, *, rate: float = 1e-2, start: Path | None = None, **changes: Any) -> Training:
    spec = replace(FULL, optimization=replace(SPEC.optimization, learning_rate=rate, num_epochs=1, warmup_ratio=0.0), **changes)
    spec = replace(spec, warm_start=START if start else None)
    run = RunFile(spec=spec, base_model_dir=files[0], pack_dir=files[1], work_dir=work, warm_start_dir=start)
    made = Training(run_file=run)
    assert made.attempt()
    return made


def test_a_run_that_starts_from_a_whole_model_begins_with_its_weights(files: tuple[Path, Path], tmp_path: Path) -> None:
    first = trained(files, tmp_path / "first")
    start = tmp_path / "first" / "final"
    unchanged = trained(files, tmp_path / "unchanged", rate=1e-30, start=start)
    assert unchanged.final() == first.final(), "at no learning rate, its weights stay"
    onward = trained(files, tmp_path / "onward", start=start)
    assert onward.lines()[0]["loss"] < first.lines()[0]["loss"]
    assert onward.final() != first.final()


def test_a_resumed_run_continues_from_its_checkpoint_and_not_from_the_start(files: tuple[Path, Path], tmp_path: Path) -> None:
    trained(files, tmp_path / "first")
    start = tmp_path / "first" / "final"
    whole = trained(files, tmp_path / "whole", start=start)
    stopped = Training(run_file=replace(whole.run_file, work_dir=tmp_path / "stopped"))
    assert not stopped.attempt(stop_at_poll=12)
    assert stopped.attempt()
    assert stopped.details[-1]["resumed_from"] is not None
    assert (stopped.trajectory(), stopped.final()) == (whole.trajectory(), whole.final())


def test_a_spec_with_a_start_and_no_directory_is_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    run = RunFile(spec=replace(FULL, warm_start=START), base_model_dir=files[0], pack_dir=files[1], work_dir=tmp_path / "work")
    with pytest.raises(BadInput, match=r"starts from ft:tiny:acme::first, but the run file has no warm_start_dir"):
        Training(run_file=run).attempt()
