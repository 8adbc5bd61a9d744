"""Whether each method does what it is for: the same small data, fine-tuned by each, measured on held-out rows.

    python -m benchmarks.training.effects            every method (some minutes on one core), result file included
    python -m benchmarks.training.effects --quick    fewer steps and rows, LoRA only, printed only
    python -m benchmarks.training.effects --only dpo-lora
    python -m benchmarks.training.effects --preferences   each preference method at its recipe's own defaults, three seeds

The demo's base model reads the same tickets as conversations, texts, pairs and judged answers. Packs, reference log-probabilities, specs
and the training process are those of a job; the measures are plain forward passes that share no code with the trainer. Learning rates
are raised, to about twice the recipe's for SFT and CPT and to 13 to 70 times the recipe's for the preference methods: those are for
thousands of steps of a model a thousand times wider, and here some dozens of steps must show the direction. The base knows nothing of the
task, so the preference methods start where nobody would start them: the log-probability of the right answer is shown beside the margin.
What is asked of them is the margin; the share of pairs told apart stands beside it (its standard error is 4.5 points on 120 pairs).
The controls train as long at learning rate 0, and nothing may move. ``--preferences`` measures the defaults instead (see
``effects_preferences``).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.datasets.measure import cpu_seconds, machine, versions
from benchmarks.training.effects_data import build_pack, make_cases
from benchmarks.training.effects_measures import HeldOut
from benchmarks.training.effects_preferences import compare
from core.base_models import BaseModel, Catalogue
from core.typed_json import from_json
from engine.training import methods
from engine.training.hyperparameters import ModelFacts, PackFacts, plan, resolve
from engine.training.recipes import AdapterKind
from engine.training.reference_logps import reference_key_for
from engine.training.spec import RunFile, TrainingSpec

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "benchmarks" / f"training_effects_cpu_{time.strftime('%Y%m')}.json"
PREFERENCES = REPOSITORY / "benchmarks" / f"training_preferences_cpu_{time.strftime('%Y%m')}.json"
Measures = Mapping[str, float]
STILL = 1e-9
"""Change of a measure that counts as none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One fine-tuning, and what it must change."""

    method: str
    adapter: Literal["lora", "qlora", "full"]
    learning_rate: float
    batch: int
    """Rows of the pack in a step."""
    expected: str
    holds: Callable[[Measures, Measures], bool]
    """Whether it did: by the measures before and after."""
    control: bool = False

    @property
    def name(self) -> str:
        return f"{self.method}-{self.adapter}{'-control' if self.control else ''}"


def _imitates(before: Measures, after: Measures) -> bool:
    return after["answer_loss"] < 0.5 * before["answer_loss"]


def _reads(before: Measures, after: Measures) -> bool:
    return after["perplexity"] < 0.8 * before["perplexity"]


def _prefers(before: Measures, after: Measures) -> bool:
    return after["margin"] > before["margin"]


def _prefers_and_imitates(before: Measures, after: Measures) -> bool:
    return _prefers(before, after) and after["chosen_logp"] > before["chosen_logp"]


def _separates(before: Measures, after: Measures) -> bool:
    return after["separation"] > before["separation"] and after["separation_auc"] > 0.5 and after["margin"] > before["margin"]


def _nothing(before: Measures, after: Measures) -> bool:
    return all(abs(after[name] - before[name]) <= STILL * max(1.0, abs(before[name])) for name in before)


TRIALS = (
    Trial(method="sft", adapter="lora", learning_rate=5e-3, batch=2, expected="answer loss halves", holds=_imitates),
    Trial(method="sft", adapter="qlora", learning_rate=5e-3, batch=2, expected="answer loss halves", holds=_imitates),
    Trial(method="sft", adapter="full", learning_rate=1e-3, batch=2, expected="answer loss halves", holds=_imitates),
    Trial(method="cpt", adapter="lora", learning_rate=3e-3, batch=2, expected="perplexity falls by a fifth", holds=_reads),
    Trial(method="dpo", adapter="lora", learning_rate=1e-3, batch=8, expected="margin rises", holds=_prefers),
    Trial(method="orpo", adapter="lora", learning_rate=5e-3, batch=4, expected="margin and right rise", holds=_prefers_and_imitates),
    Trial(method="simpo", adapter="lora", learning_rate=1e-3, batch=4, expected="margin rises", holds=_prefers),
    Trial(method="kto", adapter="lora", learning_rate=3e-3, batch=4, expected="good rises over bad", holds=_separates),
    Trial(method="sft", adapter="lora", learning_rate=0.0, batch=2, expected="nothing changes", holds=_nothing, control=True),
    Trial(method="dpo", adapter="lora", learning_rate=0.0, batch=4, expected="nothing changes", holds=_nothing, control=True),
)
QUICK = ("sft-lora", "cpt-lora", "dpo-lora", "orpo-lora", "simpo-lora", "kto-lora", "sft-lora-control")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    steps: int = 80
    num_train: int = 480
    num_held_out: int = 120
    num_generated: int = 40


class Ground:
    """The base model, the data, and a folder for what the runs write."""

    def __init__(self, root: Path, sizes: Sizes) -> None:
        self.root, self.sizes = root, sizes
        self.model: BaseModel = Catalogue.load().get("demo-llama-3m")
        if self.model.directory is None:
            raise FileNotFoundError("demo-llama-3m has no files on this machine; see examples/demo/base_model/README.md")
        self.base: Path = self.model.directory
        self.train, self.held_out = make_cases(sizes.num_train, sizes.num_held_out)

    def run_file(self, trial: Trial) -> RunFile:
        """As a job of this trial would be given to the training process."""
        facts = ModelFacts(**{name: getattr(self.model, name) for name in ModelFacts.__slots__})
        requested: dict[str, Any] = {"max_steps": self.sizes.steps, "batch_size": trial.batch, "n_epochs": 50}
        if methods.method_named(trial.method).pack != "windows":
            requested["per_device_batch_size"] = trial.batch
        planned = plan(requested, facts, method=trial.method, adapter=trial.adapter)
        pack_dir, pack = build_pack(trial.method, self.train, self.base, planned.max_seq_len, self.root)
        spec = resolve(planned, from_json(PackFacts, asdict(pack), ignore_unknown=True), seed=5, lock_sha256="0" * 64, commit="0" * 40)
        spec = replace(spec, optimization=replace(spec.optimization, learning_rate=trial.learning_rate))
        return self._with_reference(spec, pack_dir, self.root / f"work-{trial.name}")

    def run_file_of_defaults(self, method: str, adapter: AdapterKind, *, seed: int) -> RunFile:
        """As a job that asks for nothing but `method` and `adapter`; micro-batches are whole steps, which changes no update."""
        facts = ModelFacts(**{name: getattr(self.model, name) for name in ModelFacts.__slots__})
        planned = plan({}, facts, method=method, adapter=adapter)
        pack_dir, pack = build_pack(method, self.train, self.base, planned.max_seq_len, self.root)
        batch = int(planned.value("batch_size"))
        spec = resolve(planned, from_json(PackFacts, asdict(pack), ignore_unknown=True), seed=seed, lock_sha256="0" * 64, commit="0" * 40,
                       per_device_batch_size=batch)  # fmt: skip
        return self._with_reference(spec, pack_dir, self.root / f"work-{method}-{adapter}-{seed}")

    def _with_reference(self, spec: TrainingSpec, pack_dir: Path, work: Path) -> RunFile:
        """The training computes its reference log-probabilities itself."""
        if methods.method_named(spec.method).needs_reference:
            spec = replace(spec, reference=reference_key_for(spec))
        return RunFile(spec=spec, attempt=1, base_model_dir=self.base, pack_dir=pack_dir, work_dir=work)


def _process(*arguments: str) -> None:
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def run_trials(trials: Sequence[Trial], ground: Ground, *, jobs: int = 1) -> list[dict[str, Any]]:
    """Train each, `jobs` at a time, and measure it, printing its row when it is there."""
    runs = [ground.run_file(trial) for trial in trials]
    eyes = HeldOut(ground.base, ground.held_out, num_generated=ground.sizes.num_generated)
    before = {"lora": eyes.measure(eyes.load(None, adapter="lora"))}
    before["full"] = before["lora"]
    if any(t.adapter == "qlora" for t in trials):
        before["qlora"] = eyes.measure(eyes.load(None, adapter="qlora"), quantized=True)
    print(f"{HEADER}\n{row('base', before['lora'])}", flush=True)
    results = []
    with ThreadPoolExecutor(jobs) as pool:
        for trial, run in zip(trials, pool.map(_train, runs), strict=True):
            results.append(_result(trial, run, eyes, before[trial.adapter]))
            print(row(trial.name, results[-1]["after"], verdict(results[-1])), flush=True)
    return results


def _train(run: RunFile) -> RunFile:
    """`run`, once its process has trained."""
    path = run.work_dir.with_suffix(".json")
    run.write(path)
    _process("engine.training.runtime", str(path))
    return run


def _result(trial: Trial, run: RunFile, eyes: HeldOut, before: Measures) -> dict[str, Any]:
    model = eyes.load(run.work_dir / "final", adapter=trial.adapter)
    after = eyes.measure(model, quantized=trial.adapter == "qlora")
    lines = [json.loads(line) for line in (run.work_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    tenth = max(1, len(losses) // 10)
    return {
        "trial": trial.name,
        "learning_rate": trial.learning_rate,
        "method_settings": dict(run.spec.method_settings),
        "rows_per_step": trial.batch,
        "steps": len(losses),
        "training_loss": [sum(losses[:tenth]) / tenth, sum(losses[-tenth:]) / tenth],
        "before": before,
        "after": after,
        "expected": trial.expected,
        "as_expected": trial.holds(before, after),
    }


HEADER = (
    f"{'':17}{'answer':>7}{'exact':>7}{'text':>7}{'right over':>12}{'right':>7}{'log p of':>10}{'log p of':>10}{'good over':>11}\n"
    f"{'':17}{'loss':>7}{'match':>7}{'ppl':>7}{'wrong, nats':>12}{'first':>7}{'right':>10}{'wrong':>10}{'bad, nats':>11}  expected"
)


def row(name: str, found: Measures, tail: str = "") -> str:
    return (
        f"{name:17}{found['answer_loss']:7.3f}{found['exact_match']:7.1%}{found['perplexity']:7.2f}{found['margin']:12.2f}"
        f"{found['accuracy']:7.1%}{found['chosen_logp']:10.2f}{found['rejected_logp']:10.2f}{found['separation']:11.2f}  {tail}"
    ).rstrip()


def verdict(result: Mapping[str, Any]) -> str:
    return f"{result['expected']}: {'yes' if result['as_expected'] else 'NO'}"


def main(arguments: list[str] | None = None) -> None:
    names = [t.name for t in TRIALS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps and rows; results are printed, not written")
    parser.add_argument("--only", action="append", choices=names, help="may be given more than once; printed only")
    parser.add_argument("--preferences", action="store_true", help="each preference method at its defaults, three seeds")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, a core each")
    parser.add_argument("--out", type=Path, help=f"where results go (default: {RESULTS.name}, unless --quick or --only is given)")
    given = parser.parse_args(arguments)
    if given.preferences:
        preferences(given.out or PREFERENCES)
        return
    sizes = Sizes(steps=24, num_held_out=60, num_generated=20) if given.quick else Sizes()
    wanted = given.only or (QUICK if given.quick else names)
    began, started = cpu_seconds(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ft_effects_") as directory:
        results = run_trials([t for t in TRIALS if t.name in wanted], Ground(Path(directory), sizes), jobs=given.jobs)
    missed = [r["trial"] for r in results if not r["as_expected"]]
    spent = {"cpu_s": round(cpu_seconds() - began, 1), "wall_s": round(time.monotonic() - started, 1)}
    print(f"{len(results) - len(missed)} of {len(results)} as expected; {spent['cpu_s']:.0f} s of CPU")
    out = given.out or (None if given.quick or given.only else RESULTS)
    if out is not None:
        packages = versions("torch", "transformers", "peft", "trl", "bitsandbytes")
        document = {"machine": machine(), "versions": packages, "sizes": asdict(sizes), **spent, "missed": missed, "trials": results}
        out.write_text(json.dumps(document, indent=1) + "\n")
    if missed:
        sys.exit(f"not as expected: {', '.join(missed)}")


def preferences(out: Path) -> None:
    """Train each preference method at its defaults and write what it changes, after each of them; exits 1 where one does not raise the
    accuracy."""
    began, started, sizes = cpu_seconds(), time.monotonic(), Sizes(num_train=240, num_held_out=240)
    shown = {"num_train": sizes.num_train, "num_held_out": sizes.num_held_out}
    about = {"machine": machine(), "versions": versions("torch", "transformers", "peft", "trl"), "sizes": shown}
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ft_effects_") as directory:
        ground = Ground(Path(directory), sizes)
        for result in compare(ground.run_file_of_defaults, HeldOut(ground.base, ground.held_out, num_generated=0)):
            results.append(result)
            spent = {"cpu_s": round(cpu_seconds() - began, 1), "wall_s": round(time.monotonic() - started, 1)}
            out.write_text(json.dumps({**about, **spent, "results": results}, indent=1) + "\n")
    if missed := [r["trial"] for r in results if not r["raises"]]:
        sys.exit(f"accuracy on held-out pairs not raised: {', '.join(missed)}")


if __name__ == "__main__":
    main()
