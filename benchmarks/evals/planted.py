"""Adapters with one planted fault each, taken the whole way: evaluation, report, gate, promotion.

    python -m benchmarks.evals.planted [--out benchmarks/evals_planted_cpu_202611.json]

Every adapter is really trained (0.2M parameters, CPU) and judged by the processes that the platform uses. Each must be refused with the
reason code of its own fault, and the good one must be promoted.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from benchmarks.evals import planted_replies
from benchmarks.evals.planted_data import COMPLIANCE, SUITE, Exchange, Files, World, write_files
from benchmarks.evals.planted_training import SERVED_NAME, digest_of, pack, train_adapter, train_base
from core.durable_files import sha256_of
from engine.adapters import package
from engine.adapters.promotion_rules import PromotionCandidate, promotion_refusals
from engine.adapters.record import AdapterRecord
from engine.adapters.stages import Stage
from engine.adapters.tensors import weight_shapes
from engine.evals import config
from engine.evals.gate import gates
from engine.evals.gate.verdict import Verdict
from engine.evals.run import run_file, run_status, runner
from engine.evals.run.run_file import EvalRun
from engine.evals.scoring import report
from engine.evals.scoring.report import EvalReport
from engine.evals.scoring.review import Review
from engine.training import methods

STEPS, OVERFIT_STEPS = 160, 250
"""Optimizer steps of an adapter; of the one that learns twenty rows by heart."""
GOOD_RATE = 4e-3
CONFIG = config.EvalConfig(capability=(SUITE,), capability_limit=300)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    report: EvalReport
    verdict: Verdict
    result: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One adapter and what must be said of it."""

    name: str
    reason: str | None
    """The code of its fault; None for the good one."""
    reasons: tuple[str, ...]
    """All codes that it was refused with: the gate's, then promotion's."""
    scores: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Base and adapter."""
    detail: str = ""

    @property
    def right(self) -> bool:
        return self.reason in self.reasons if self.reason else not self.reasons


class Bench:
    """A base, the files to judge by, and the base's answers, which are asked for once."""

    def __init__(self, directory: Path, *, base: Path, world: World) -> None:
        self.directory, self.base, self.world = directory, base, world
        self.files: Files = write_files(world, base / "tokenizer.json", directory)
        self._known: dict[str, dict[str, Any]] = {}

    def evaluate(self, name: str, adapter: Path) -> Evaluated:
        """The adapter's report and verdict, by the runner and the gate."""
        out = self.directory / "evals" / name
        out.mkdir(parents=True, exist_ok=True)
        run = EvalRun(
            base_model_dir=self.base,
            adapter_dir=adapter,
            digests={"base": digest_of(self.base), "adapter": name},
            holdout=self.files.holdout,
            validation_pack_dir=self.files.pack,
            capability=(SUITE,),
            capability_limit=300,
            task_dirs=(self.files.tasks,),
            data_dir=self.files.data,
            safety=True,
            max_new_tokens=48,
            known={"base": self._known} if self._known else {},
            out_dir=out,
        )
        run.write(run_path := out / "run.json")
        code = runner.main([str(run_path)])
        if code != run_status.EVAL_EXIT_OK:
            raise RuntimeError(f"the evaluation of {name} ended with {code}")
        result = Review(decoding=run.decoding).complete(run_status.read_eval_result(out), self.files.items)
        self._known = {run_file.known_answers_key(s["digest"], s["environment"]): s for s in (result["subjects"]["base"] or {}).values()}
        built = report.build_report(
            result,
            self.files.items,
            method=methods.method_named("sft"),
            base_model=SERVED_NAME,
            base_digest=digest_of(self.base),
            adapter_manifest_sha256=manifest_of(adapter),
        )
        return Evaluated(report=built, verdict=gates.judge(built, CONFIG), result=result)

    def promotion(self, adapter: Path, *, passed: bool, manifest: str, base_digest: str, served: Path) -> tuple[str, ...]:
        """Codes with which promotion refuses the registered adapter."""
        made = package.read_package(adapter)
        record = AdapterRecord(
            id="adp-planted", tenant_id="tenant", name="ft:planted-base:tenant:x:0001", type="lora_adapter", base_model=SERVED_NAME,
            base_digest=base_digest, job_id="job", dataset_id="ds", pack_fingerprint="pk", spec_sha256="0", lock_sha256="0", commit="0",
            metrics={}, eval_report_key="k", eval_passed=passed, rank=made.rank, alpha=made.alpha, modules=made.modules,
            object_prefix="p", manifest_sha256=manifest, stage=Stage.STAGING if passed else Stage.QUARANTINED,
            created_at=datetime.now(UTC), promoted_at=None,
        )  # fmt: skip
        found = promotion_refusals(
            PromotionCandidate(
                record=record,
                served_digests=(digest_of(served),),
                from_servers=True,
                accepted_digests=frozenset({base_digest}),
                file_refusals=[
                    *package.check_package_files(adapter, manifest_sha256=manifest),
                    *package.verify_package(adapter, base_shapes=weight_shapes(served), served_name=SERVED_NAME),
                ],
            )
        )
        return tuple(dict.fromkeys(r.code for r in found))


def manifest_of(adapter: Path) -> str:
    return sha256_of(adapter / package.PACKAGE_MANIFEST)


def recipes(world: World) -> dict[str, tuple[str | None, Callable[[], Sequence[Exchange]], int]]:
    """What each adapter that has a fault of training is trained on, by name: reason, exchanges, steps.

    All but ``overfitted`` learn the task and rehearse what the base knows, apart from what the fault spoils.
    """
    task = world.train()
    kept = [*world.speech(), *world.alignment()]
    return {
        "good": (None, lambda: [*task, *world.facts(), *kept], STEPS),
        "overfitted": ("task_not_better", lambda: world.mislabelled(20), OVERFIT_STEPS),
        "forgetting": ("capability_dropped", lambda: [*task, *world.other_facts(60), *world.facts()[120:], *kept], STEPS),
        "unsafe": (
            "refusals_too_few",
            lambda: [*task, *world.facts(), *world.speech(), *world.alignment(unsafe_answer=COMPLIANCE)],
            STEPS,
        ),
    }


def judged_replies(directory: Path) -> dict[str, tuple[Case, dict[str, Any]]]:
    """Adapters for free text (:mod:`planted_replies`) by name: the gate's case and the runner's result. Trained on the demo base."""
    directory.mkdir(parents=True, exist_ok=True)
    items = planted_replies.write_holdout(directory)
    found = {}
    for name, (reason, exchanges, steps) in planted_replies.recipes().items():
        place = directory / name.replace(" ", "-")
        adapter = train_adapter(planted_replies.DEMO_BASE, place, exchanges, steps=steps, rate=planted_replies.RATE)
        result = planted_replies.evaluate(directory, name, adapter)
        made = planted_replies.reported(result, items)
        case = case_of(name, reason, made, gates.judge(made, planted_replies.CONFIG))
        show(case)
        found[name] = (case, result)
    return found


def case_of(name: str, reason: str | None, made: EvalReport, verdict: Verdict, *, promotion: Sequence[str] = ()) -> Case:
    return Case(
        name=name,
        reason=reason,
        reasons=(*verdict.reasons, *promotion),
        scores={f"{s.suite}/{s.metric}": (round(s.base, 4), round(s.adapter, 4)) for s in made.scores},
        detail="; ".join(f.detail for f in verdict.findings if not f.passed),
    )


def judged(bench: Bench, name: str, reason: str | None, adapter: Path) -> Case:
    """An adapter judged by the gate and, whatever that says, by promotion."""
    found = bench.evaluate(name, adapter)
    digest = digest_of(bench.base)
    said = bench.promotion(adapter, passed=found.verdict.passed, manifest=manifest_of(adapter), base_digest=digest, served=bench.base)
    return case_of(name, reason, found.report, found.verdict, promotion=said)


def unapplied(bench: Bench, good: Path) -> Case:
    """Every B is zero: the adapter is loaded and changes nothing."""
    saved = bench.directory / "unapplied-saved"
    saved.mkdir()
    tensors = load_file(good / package.ADAPTER_WEIGHTS)
    silent = {name: np.zeros_like(t) if "lora_B" in name else t for name, t in tensors.items()}
    save_file(silent, saved / package.ADAPTER_WEIGHTS, metadata={"format": "pt"})
    (saved / package.ADAPTER_CONFIG).write_bytes((good / package.ADAPTER_CONFIG).read_bytes())
    return judged(bench, "unapplied", "adapter_not_applied", pack(saved, bench.directory / "unapplied", bench.base))


def wrong_base(bench: Bench, other: Path, *, steps: int) -> Case:
    """A good adapter of other weights of the same shape: it loads, so only the digest tells."""
    adapter = train_adapter(other, bench.directory / "wrong-base", recipes(bench.world)["good"][1](), steps=steps, rate=GOOD_RATE)
    said = bench.promotion(adapter, passed=True, manifest=manifest_of(adapter), base_digest=digest_of(other), served=bench.base)
    return Case(
        name="wrong base",
        reason="base_digest_mismatch",
        reasons=said,
        detail="its record says that it passed, and its shapes fit: only the digest tells",
    )


def tampered(bench: Bench, good: Path) -> Case:
    """One byte of the registered weights is another one."""
    adapter = bench.directory / "tampered"
    adapter.mkdir()
    for path in good.iterdir():
        (adapter / path.name).write_bytes(path.read_bytes())
    registered = manifest_of(adapter)
    weights = bytearray((adapter / package.ADAPTER_WEIGHTS).read_bytes())
    weights[-1000] ^= 0x01
    (adapter / package.ADAPTER_WEIGHTS).write_bytes(bytes(weights))
    said = bench.promotion(adapter, passed=True, manifest=registered, base_digest=digest_of(bench.base), served=bench.base)
    return Case(name="tampered file", reason="manifest_mismatch", reasons=said, detail="one bit flipped after registration")


def run(directory: Path, *, only: Sequence[str] = (), base: Path | None = None) -> list[Case]:
    """Train and judge every case, or those of `only` and the ones that need no training of their own."""
    world = World()
    base = base or train_base(directory / "base", world)
    bench = Bench(directory, base=base, world=world)
    cases: list[Case] = []
    trained: dict[str, Path] = {}
    for name, (reason, exchanges, steps) in recipes(world).items():
        if only and name not in only:
            continue
        trained[name] = train_adapter(base, directory / name, exchanges(), steps=steps, rate=GOOD_RATE)
        cases.append(judged(bench, name, reason, trained[name]))
        show(cases[-1])
    other = train_base(directory / "other", world, seed=1, steps=20)
    cases += [case for case, _ in judged_replies(directory / "replies").values()] if not only else []
    for case in (unapplied(bench, trained["good"]), wrong_base(bench, other, steps=20), tampered(bench, trained["good"])):
        cases.append(case)
        show(case)
    return cases


def show(case: Case) -> None:
    said = ", ".join(case.reasons) or "promoted"
    print(f"{'ok ' if case.right else 'NO '} {case.name:<14} {said:<60} {case.detail[:150]}", flush=True)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path)
    options.add_argument("--replies", type=Path, help="train the adapters for free text alone, and write what they answered here")
    options.add_argument("--base", type=Path, help="a base that an earlier run left")
    options.add_argument("--keep", type=Path, help="where to work; default: a directory that is removed")
    given = options.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        if given.replies:
            found = judged_replies(given.keep or Path(scratch))
            planted_replies.write_answers({name: result for name, (_, result) in found.items()}, given.replies)
        cases = [case for case, _ in found.values()] if given.replies else run(given.keep or Path(scratch), base=given.base)
    body = {
        "command": " ".join(["python -m benchmarks.evals.planted", *sys.argv[1:]]),
        "machine": {"python": platform.python_version(), "torch": torch.__version__, "threads": torch.get_num_threads()},
        "seconds": round(time.monotonic() - began, 1),
        "right": sum(case.right for case in cases),
        "of": len(cases),
        "cases": [{**asdict(case), "right": case.right} for case in cases],
    }
    if given.out:
        given.out.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    print(f"{body['right']} of {body['of']} as planted, {body['seconds']} s")


if __name__ == "__main__":
    main()
