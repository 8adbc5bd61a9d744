"""Preference methods through the real training process: alone, on two ranks, and across a stop."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the training environment")

from engine.training import methods
from engine.training.checkpoints import ADAPTER
from engine.training.pack_stream import ARRIVING
from engine.training.reference_logps import verify
from engine.training.runtime import reference
from engine.training.runtime.objectives.batches import Judged
from engine.training.runtime.run_errors import BadExample
from engine.training.spec import LoraSettings, RunFile
from tests.engine.training.attempts import REPOSITORY
from tests.engine.training.in_process import Training
from tests.engine.training.runtime.objectives.preference_runs import Site
from tests.engine.training.runtime.parallel.test_torchrun import torchrun

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of the libraries; a run silences them too

ALONE = ("engine.training.runtime",)
OF_THE_MACHINE = ("tokens_per_s", "steps_per_s", "step_s", "data_s", "memory_bytes", "gpu_utilization", "mfu", "time")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("site"))


def start(run: RunFile, *, module: Sequence[str] = ALONE) -> subprocess.Popen[bytes]:
    run.write(run.work_dir / f"run-a{run.attempt}.json")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    with (run.work_dir / f"log-a{run.attempt}").open("wb") as log:
        command = [sys.executable, "-m", *module, str(run.work_dir / f"run-a{run.attempt}.json")]
        return subprocess.Popen(command, env=env, cwd=run.work_dir, stdout=log, stderr=subprocess.STDOUT)


def train(run: RunFile, *, module: Sequence[str] = ALONE) -> list[dict[str, Any]]:
    process = start(run, module=module)
    try:
        assert process.wait(timeout=600) == 0, (run.work_dir / f"log-a{run.attempt}").read_text()
    finally:
        process.kill()
    return steps(run)


def steps(run: RunFile) -> list[dict[str, Any]]:
    file = run.work_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [{k: v for k, v in line.items() if k not in OF_THE_MACHINE} for line in lines if "loss" in line]


def weights(run: RunFile) -> list[bytes]:
    return [(run.work_dir / "final" / name).read_bytes() for name in ADAPTER]


@pytest.mark.slow
def test_a_run_computes_its_reference_proves_it_and_reports_the_methods_metrics(site: Site, tmp_path: Path) -> None:
    run = replace(site.run("dpo"), work_dir=tmp_path, reference_dir=None)
    found = train(run)
    assert set(found[0]) >= set(methods.method_named("dpo").metrics)
    assert found[0]["loss"] == pytest.approx(0.693147, abs=1e-5), "policy and reference are one before the first step"
    assert found[-1]["rewards/margins"] > 0.5 and found[-1]["loss"] < 0.5
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    validations = [line for line in lines if "eval_loss" in line]
    assert validations[-1]["eval_loss"] < validations[0]["eval_loss"] and validations[-1]["eval_rewards/accuracies"] > 0.9
    evidence = json.loads((tmp_path / "exit-a1.json").read_text())
    assert evidence["detail"]["self_test"]["reference"] < 1e-4
    assert verify(tmp_path / reference.DIRECTORY).key == run.spec.reference
    assert "arning" not in (tmp_path / "log-a1").read_text(), "a tenant reads this log"


def test_a_reference_is_computed_once_the_whole_pack_is_there(site: Site, tmp_path: Path) -> None:
    run = replace(site.run("dpo"), work_dir=tmp_path / "work", pack_dir=tmp_path / "pack", reference_dir=None)
    shutil.copytree(site.run("dpo").pack_dir, run.pack_dir)
    last = sorted(run.pack_dir.glob("shard-*"))[-1]
    assert last.name != "shard-00000.parquet"
    held_back = last.rename(tmp_path / last.name)
    (run.pack_dir / ARRIVING).touch()
    touched = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        computing = pool.submit(reference.compute_for, run, touch=touched.set)
        assert touched.wait(60) and not computing.done()
        held_back.rename(last)
        (run.pack_dir / ARRIVING).unlink()
        assert verify(computing.result(timeout=120)).key == run.spec.reference


@pytest.mark.slow
def test_a_run_that_computes_its_reference_ends_with_the_weights_of_one_that_is_given_it(site: Site, tmp_path: Path) -> None:
    given = replace(site.run("kto"), work_dir=tmp_path / "given")
    computes = replace(given, work_dir=tmp_path / "computes", reference_dir=None)
    assert train(given) == train(computes)
    assert weights(given) == weights(computes)


def test_a_row_whose_gradient_is_no_number_is_named(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KTO's mean leaves out a row that is not a number, so its step has a loss, but no gradient."""
    run = replace(site.run("kto"), work_dir=tmp_path)
    bad = run.spec.optimization.per_device_batch_size * 2 + 1
    faithful = Judged.collate

    def poisoned(self: Judged, rows: Sequence[int]) -> dict[str, Any]:
        batch: dict[str, Any] = faithful(self, rows)
        if bad in rows and self.num_rows > bad:
            batch["ref_logps"] = batch["ref_logps"].clone()
            batch["ref_logps"][list(rows).index(bad)] = float("nan")
        return batch

    monkeypatch.setattr(Judged, "collate", poisoned)
    with pytest.raises(BadExample, match=f"train row {bad} alone gives a loss that is not finite"):
        Training(run_file=run).attempt()


@pytest.mark.slow
def test_a_reference_of_other_files_ends_the_run(site: Site, tmp_path: Path) -> None:
    run = site.run("dpo")
    other = replace(run, spec=replace(run.spec, reference="rf_of_another_base"), work_dir=tmp_path, reference_dir=None)
    assert start(other).wait(timeout=120) != 0
    assert "the spec requires rf_of_another_base" in json.loads((tmp_path / "exit-a1.json").read_text())["message"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["orpo", "kto"])
def test_two_ranks_train_what_one_rank_does_in_two_micro_batches(site: Site, tmp_path: Path, method: str) -> None:
    one = replace(site.run(method), work_dir=tmp_path / "one")
    opt = replace(one.spec.optimization, accumulation_steps=1)
    shared = replace(one.spec, world_size=2, strategy="ddp", optimization=opt)
    two = replace(one, spec=shared, work_dir=tmp_path / "two", reference_dir=None)
    alone, together = train(one), train(two, module=torchrun(2))
    for mine, theirs in zip(alone, together, strict=True):
        assert theirs == pytest.approx(mine, rel=1e-5, abs=1e-6)


@pytest.mark.slow
def test_a_step_of_kto_is_the_same_on_one_rank_in_two_micro_batches_and_on_two_ranks(site: Site, tmp_path: Path) -> None:
    run = site.run("kto", lora=LoraSettings(rank=4, alpha=8, dropout=0.0))
    opt = run.spec.optimization

    def cut(name: str, rows: int, accumulation: int, **changes: Any) -> RunFile:
        cut_so = replace(opt, per_device_batch_size=rows, accumulation_steps=accumulation)
        return replace(run, spec=replace(run.spec, optimization=cut_so, **changes), work_dir=tmp_path / name)

    whole = train(cut("whole", 4, 1))
    assert max(step["kl"] for step in whole) > 0.1, "a distance that is held at 0 couples nothing"
    cuts = train(cut("micro-batches", 2, 2)), train(cut("ranks", 2, 1, world_size=2, strategy="ddp"), module=torchrun(2))
    for found in cuts:
        for step, expected in zip(found, whole, strict=True):
            assert step == pytest.approx(expected, rel=1e-3, abs=1e-4)


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(site: Site, tmp_path: Path) -> None:
    whole = site.run("dpo")
    whole = replace(whole, spec=replace(whole.spec, optimization=replace(whole.spec.optimization, num_epochs=15)))
    expected = train(replace(whole, work_dir=tmp_path / "whole"))
    first = replace(whole, work_dir=tmp_path / "stopped")
    process = start(first)
    try:
        deadline = time.monotonic() + 60
        while len(steps(first)) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) != 0 and len(steps(first)) < len(expected)
    finally:
        process.kill()
    assert train(replace(first, attempt=2)) == expected
    assert weights(first) == weights(replace(whole, work_dir=tmp_path / "whole"))
