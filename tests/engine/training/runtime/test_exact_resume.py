"""Interrupted at any moment = never interrupted, bit for bit, for every method and for all that could make a difference."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the training environment")

from engine.training.checkpoints import committed_checkpoints, read_manifest  # noqa: E402
from engine.training.spec import CheckpointPolicy, EarlyStopping, LoraSettings, Quantization, RunFile, TrainingSpec  # noqa: E402
from tests.engine.training.attempts import SPEC, write_pack  # noqa: E402
from tests.engine.training.in_process import Training  # noqa: E402
from tests.engine.training.runtime.objectives.preference_runs import Site  # noqa: E402
from tests.support.models.deterministic_torch import deterministic_only_here  # noqa: E402, F401
from tests.support.models.tiny_model import build_tiny_model  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries; a run silences them too


def changed(optimization: dict[str, Any] | None = None, **spec: Any) -> TrainingSpec:
    """The tests' spec (LoRA with dropout, shuffled, packed, two micro-batches a step, several epochs), otherwise."""
    return replace(SPEC, optimization=replace(SPEC.optimization, **(optimization or {})), **spec)


assert SPEC.lora is not None
LORA = SPEC.lora
WINDOWS = {
    "lora": changed(),
    "full": changed(adapter="full", lora=None, optimization={"weight_decay": 0.1}),
    "qlora": changed(adapter="qlora", quantization=Quantization()),
    "cpt": changed(method="cpt"),
    "no accumulation": changed({"accumulation_steps": 1, "per_device_batch_size": 4}),
    "many micro-batches": changed({"accumulation_steps": 4, "per_device_batch_size": 1, "num_epochs": 2}),
    "a part of an epoch": changed({"num_epochs": 1.5}),
    "bf16": changed(precision="bf16"),
    "gradient checkpointing": changed(gradient_checkpointing=True),
    "adafactor": changed({"optimizer": "adafactor"}),
    "cosine with warm-up": changed({"schedule": "cosine", "warmup_ratio": 0.3}),
    "rslora": changed(lora=replace(LORA, use_rslora=True)),
    "dora": changed(lora=replace(LORA, use_dora=True)),
    "dora in 4 bits": changed(lora=replace(LORA, use_dora=True), adapter="qlora", quantization=Quantization()),
    "pissa": changed(lora=replace(LORA, dropout=0.0, init_lora_weights="pissa_niter_4")),
    "lora+ and other betas": changed({"loraplus_lr_ratio": 16.0, "adam_betas": (0.8, 0.95), "adam_epsilon": 1e-6, "weight_decay": 0.1}),
    "wsd": changed({"schedule": "wsd", "schedule_decay_ratio": 0.5, "schedule_decay_shape": "1-sqrt"}),
    "restarts": changed({"schedule": "cosine_with_restarts", "schedule_cycles": 2}),
    "polynomial": changed({"schedule": "polynomial", "schedule_power": 2.0}),
    "inverse square root": changed({"schedule": "inverse_sqrt", "schedule_timescale": 3}),
    "points": changed({"schedule": ((0.0, 0.0), (0.3, 1.0), (1.0, 0.1)), "warmup_ratio": 0.0}),
    "a floor of the rate": changed({"schedule": "cosine", "warmup_ratio": 0.3, "min_lr_ratio": 0.2}),
    "rates by layer": changed({"layer_lr_decay": 0.8, "weight_decay": 0.1}, adapter="full", lora=None),
    "noise on embeddings": changed({"neftune_noise_alpha": 5.0}),
    "early stopping": changed({"early_stopping": EarlyStopping(patience=2, min_delta=0.001), "num_epochs": 6, "learning_rate": 0.05}),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("files")
    return build_tiny_model(root / "base"), write_pack(root / "pack")


def training(spec: TrainingSpec, files: tuple[Path, Path], work: Path) -> Training:
    base, pack = files
    return Training(run_file=RunFile(spec=spec, attempt=1, base_model_dir=base, pack_dir=pack, work_dir=work))


def assert_exact(reference: Training, interrupted: Training) -> None:
    assert interrupted.trajectory() == reference.trajectory()
    assert interrupted.final() == reference.final()


EVERY = [29, pytest.param(7, marks=pytest.mark.slow)]
"""Looks of the loop between two interruptions that are tried: the smaller one tries every step, at another place of it each time."""


def slow_but(cases: Iterable[Any], *quick: Any) -> list[Any]:
    return [case if case in quick else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def assert_exact_when_interrupted(start: Callable[[str], Training], *, every: int) -> None:
    reference = start("reference")
    assert reference.attempt()
    spec, steps = reference.run_file.spec, sum("loss" in line for line in reference.lines())
    polls = 3 * steps if spec.optimization.accumulation_steps == 1 else 4 * steps
    interruptions = 0
    for poll in range(5, polls, every):
        interrupted = start(str(poll))
        if not interrupted.attempt(stop_at_poll=poll):
            interruptions += 1
            assert interrupted.attempt()
        assert_exact(reference, interrupted)
    assert interruptions >= polls // every // 2


@pytest.mark.parametrize("window", slow_but(WINDOWS, "lora", "full", "points"))
@pytest.mark.parametrize("every", EVERY)
def test_interrupted_at_any_step_is_never_interrupted(window: str, every: int, files: tuple[Path, Path], tmp_path: Path) -> None:
    assert_exact_when_interrupted(lambda name: training(WINDOWS[window], files, tmp_path / name), every=every)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("site"))


@pytest.mark.parametrize("adapter", slow_but(("lora", "qlora", "full"), "lora"))
@pytest.mark.parametrize("method", slow_but(("dpo", "orpo", "simpo", "kto"), "dpo"))
@pytest.mark.parametrize("every", EVERY)
def test_interrupted_preference_methods(method: str, adapter: Any, every: int, site: Site, tmp_path: Path) -> None:
    given = site.run(method, adapter=adapter)
    assert_exact_when_interrupted(lambda name: Training(run_file=replace(given, work_dir=tmp_path / name)), every=every)


@pytest.mark.slow
@pytest.mark.parametrize(
    "lora", [replace(LORA, use_dora=True), replace(LORA, dropout=0.0, init_lora_weights="pissa")], ids=["dora", "pissa"]
)
def test_interrupted_preferences_with_other_adapters(lora: LoraSettings, site: Site, tmp_path: Path) -> None:
    given = site.run("dpo", lora=lora)
    assert_exact_when_interrupted(lambda name: Training(run_file=replace(given, work_dir=tmp_path / name)), every=29)


@pytest.mark.slow
def test_a_kill_between_an_early_stop_and_the_final_weights_changes_nothing(files: tuple[Path, Path], tmp_path: Path) -> None:
    stopped = training(WINDOWS["early stopping"], files, tmp_path / "work")
    assert stopped.attempt()
    before, trajectory = stopped.final(), stopped.trajectory()
    assert stopped.details[-1]["ended_early"]
    shutil.rmtree(tmp_path / "work" / "final")
    assert stopped.attempt()
    assert stopped.details[-1]["ended_early"]
    assert (stopped.final(), stopped.trajectory()) == (before, trajectory)


@pytest.mark.slow
def test_interrupted_again_and_again(files: tuple[Path, Path], tmp_path: Path) -> None:
    reference = training(SPEC, files, tmp_path / "reference")
    assert reference.attempt()
    stopped = training(SPEC, files, tmp_path / "stopped")
    while not stopped.attempt(stop_at_poll=6):
        assert stopped.attempts < 40
    assert stopped.attempts > 5
    assert_exact(reference, stopped)


def test_half_the_batch_goes_on_where_the_whole_one_stopped(files: tuple[Path, Path], tmp_path: Path) -> None:
    """What a retry after running out of memory does: the same rows in the same steps, cut into more micro-batches."""
    spec = changed({"per_device_batch_size": 4, "accumulation_steps": 1}, lora=replace(LORA, dropout=0.0))
    reference = training(spec, files, tmp_path / "reference")
    assert reference.attempt()
    retried = training(spec, files, tmp_path / "retried")
    assert not retried.attempt(stop_at_poll=20)
    halved = replace(spec, optimization=replace(spec.optimization, per_device_batch_size=2, accumulation_steps=2))
    retried.run_file = replace(retried.run_file, spec=halved)
    assert retried.attempt()
    assert retried.details[-1]["resumed_from"] is not None
    ours, theirs = ([line["loss"] for line in t.lines() if "loss" in line] for t in (retried, reference))
    assert ours == pytest.approx(theirs, abs=1e-4)


def test_a_checkpoint_that_only_the_clock_makes_due_is_not_validated(files: tuple[Path, Path], tmp_path: Path) -> None:
    """Early stopping and the metrics are those of a run on a machine of any speed."""
    early = changed({"early_stopping": EarlyStopping(patience=50)}, checkpoint=CheckpointPolicy(every_steps=3, every_s=600, keep_last=50))
    slow = replace(early, checkpoint=replace(early.checkpoint, every_s=1e-9))
    runs = []
    for name, spec in (("fast", early), ("slow", slow)):
        run = Training(run_file=RunFile(spec=spec, attempt=1, base_model_dir=files[0], pack_dir=files[1], work_dir=tmp_path / name))
        assert run.attempt()
        runs.append(run)
    fast, other = runs
    assert other.trajectory() == fast.trajectory() and other.final() == fast.final()
    saved = {read_manifest(path).step: read_manifest(path).metrics for path in committed_checkpoints(tmp_path / "slow" / "checkpoints")}
    assert set(saved) > {read_manifest(path).step for path in committed_checkpoints(tmp_path / "fast" / "checkpoints")}
    last = max(saved)
    assert {step for step, metrics in saved.items() if "eval_loss" in metrics} == {*range(3, last + 1, 3), last}
    assert all("loss" in metrics for metrics in saved.values())


def test_a_started_epoch_is_not_replayed(files: tuple[Path, Path], tmp_path: Path) -> None:
    """Each row is trained on once an epoch, whatever the interruptions: the tokens of an epoch add up to those of the pack."""
    spec = changed({"num_epochs": 4, "accumulation_steps": 1, "per_device_batch_size": 1})
    stopped = training(spec, files, tmp_path / "work")
    while not stopped.attempt(stop_at_poll=40):
        pass
    lines = [line for line in stopped.lines() if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, 85))
    assert len({lines[i]["num_tokens"] - (lines[i - 1]["num_tokens"] if i else 0) for i in (20, 41)}) >= 1
    assert lines[20]["num_tokens"] * 4 == lines[41]["num_tokens"] * 2 == lines[83]["num_tokens"]
