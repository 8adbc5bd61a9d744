"""The cases of the GPU benchmark are sound before anybody has a GPU: specs, models and packs, without training."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest

from benchmarks.gpu import measure, models
from benchmarks.gpu.__main__ import chosen
from benchmarks.gpu.attempts import Failed, Job
from benchmarks.gpu.cases import ON_CPU, ON_GPU, SHAPES, TINY, WARM_UP, Trial
from benchmarks.gpu.report import table
from ft_assets.training.memory import GPUS
from ft_assets.training.model_shapes import ModelShape
from ft_assets.training.runtime import pack_loader
from ft_assets.training.runtime.__main__ import _check_adapter
from ft_assets.training.spec import TrainingSpec

CASES = [*ON_GPU, *ON_CPU]


@pytest.mark.parametrize("trial", CASES, ids=lambda t: t.name)
def test_the_spec_of_a_case_is_one_that_the_training_process_takes(trial: Trial) -> None:
    spec = trial.spec()
    _check_adapter(spec)
    assert TrainingSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    if trial.kind == "speed":  # nothing is written while speed is measured
        assert spec.checkpoint.every_steps > spec.optimization.total_steps(num_rows=100, world_size=1) > WARM_UP + trial.steps
    else:
        assert spec.checkpoint.every_steps < spec.optimization.total_steps(num_rows=100, world_size=1) == trial.steps


@pytest.mark.parametrize("trial", ON_GPU, ids=lambda t: t.name)
def test_each_case_fits_an_h200_by_the_estimate(trial: Trial) -> None:
    assert trial.estimated_bytes(on_cpu=False, overheads=True) < GPUS["h200-141gb"].memory_bytes


def test_cases_of_a_model_stand_together_so_that_it_is_written_once() -> None:
    order = [t.model for t in ON_GPU]
    assert len({t.name for t in CASES}) == len(CASES)
    assert sum(a != b for a, b in itertools.pairwise(order)) == len(set(order)) - 1


@pytest.mark.parametrize("name", SHAPES)
def test_a_written_model_has_the_shape_that_it_is_named_after(name: str) -> None:
    shape = SHAPES[name]
    assert ModelShape.from_config(models.config(shape)) == shape
    assert sum(math.prod(size) for _, size in models.tensors(shape)) == shape.num_parameters
    assert shape.vocab > 256 + len(models.SPECIAL)


def test_packed_and_padded_packs_hold_the_same_examples_and_are_read(tmp_path: Path) -> None:
    trial = chosen(["lora"], on_cpu=True, quick=True)[0]
    found = {}
    for packed in (True, False):
        directory = tmp_path / str(packed)
        found[packed] = models.write_pack(directory, vocab=TINY.vocab, max_seq_len=256, packed=packed, examples=60)
        assert pack_loader.load(directory, trial.spec(), vocab_size=TINY.vocab).train.num_rows == found[packed]["windows"]
    assert found[True]["tokens"] == found[False]["tokens"] and found[False]["windows"] == 60
    assert found[True]["fill"] > 0.9


def test_speed_leaves_the_warm_up_out() -> None:
    lines = [
        {"step": n, "num_tokens": 100 * n, "step_s": 9.0 if n <= WARM_UP else 0.5, "data_s": 0.0, "mfu": 0.4, "memory_bytes": 2**30}
        for n in range(1, WARM_UP + 5)
    ]
    trial = chosen(["lora-8b"], on_cpu=False, quick=True)[0]
    assert measure.throughput(lines) == {
        "steps": 4, "tokens_per_s": 200.0, "step_s": 0.5, "slowest_step_s": 0.5, "data_s": 0.0, "mfu": 0.4,
    }  # fmt: skip
    assert measure.met(trial, lines)["goal"] == {"metric": "tokens_per_s", "at_least": 10_000, "met": False}
    assert measure.memory(trial, lines, on_cpu=False)["estimate_error"] > 1


def test_a_case_that_failed_is_told_with_its_reason(tmp_path: Path) -> None:
    trial = chosen(["lora"], on_cpu=True, quick=True)[0]
    job = Job(root=tmp_path, spec=trial.spec(), base=tmp_path / "none", pack=tmp_path / "none", deadline=math.inf, on_cpu=True)
    try:
        with pytest.raises(Failed, match=r"config\.json cannot be read"):
            measure.run(trial, job)
    finally:
        job.kill()
    facts = {"gpu": {"name": None, "driver": None, "torch": "2", "cuda": None}, "machine": {"cpu": "some"}}
    assert "lora: failed no weights" in table(facts, [{"name": "lora", "failed": "no weights"}])
