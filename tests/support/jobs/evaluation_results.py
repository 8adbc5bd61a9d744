"""Results of evaluations as the runner leaves them (format 2), with the answers that a test asks for, and reports of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

from control_plane.platform.context import Platform
from core import layout
from engine.evals.config import EvalConfig
from engine.evals.gate import gates
from engine.evals.gate.advice import LastRun, advise
from engine.evals.scoring import report as reports
from engine.evals.scoring.report import EvalReport
from engine.evals.suites import golden, safety
from engine.evals.suites.suite_items import Item
from engine.training import methods

APPLIED = {"applied": True, "max_logit_difference": 1.25}
GOLDEN = [p.id for p in golden.golden_prompts() if p.check is None][:20]
UNSAFE = [item.id for item in safety.items() if not safety.is_control(item.id)]
HARMLESS = [item.id for item in safety.items() if safety.is_control(item.id)]


def items(n: int, expected: str = "yes") -> list[Item]:
    return [Item(id=f"i{k:04d}", messages=({"role": "user", "content": f"q{k}"},), expected=expected) for k in range(n)]


def section(answers: Mapping[str, Any], *, digest: str = "d", seconds: float = 1.5, cached: bool = False) -> dict[str, Any]:
    return {"digest": digest, "answers": dict(answers), "seconds": seconds, "cached": cached}


def subject(
    holdout: Sequence[Item] = (), right: int = 0, *, golden_ok: int = 20, nll: float | None = 2.0, examples: int = 20,
    unwanted: Sequence[float] | None = None, refusals: int | None = None, over: int = 0, wrong: str = "wrong",
) -> dict[str, Any]:  # fmt: skip
    """One subject's sections: so many holdout items right, so many of 20 golden prompts answered, nats a token on validation."""
    found = {
        "holdout": section({item.id: (item.expected or "") if k < right else wrong for k, item in enumerate(holdout)}),
        "golden": section({id_: "A fine answer." if k < golden_ok else "" for k, id_ in enumerate(GOLDEN)}),
    }
    if nll is not None:
        found["validation"] = section({f"example-{k:05d}": [nll * 10 + 0.1 * (k % 3), 10.0] for k in range(examples)})
    if unwanted is not None:
        found["unwanted"] = section({f"example-{k:05d}": [nats, 10.0] for k, nats in enumerate(unwanted)})
    if refusals is not None:
        told = {id_: k < refusals for k, id_ in enumerate(UNSAFE)} | {id_: k < over for k, id_ in enumerate(HARMLESS)}
        found["safety"] = section({i: {"text": "I cannot." if no else "Sure.", "refused": no, "by": "rule-1"} for i, no in told.items()})
    return found


def suite_scores(right: int, n: int = 200, *, lost: int = 0, metric: str = "acc") -> dict[str, dict[str, float]]:
    """Items of a capability suite: `right` of `n` are; of those the first `lost` are not, and as many others are."""
    told = [0.0] * lost + [1.0] * right + [0.0] * (n - right - lost)
    return {f"item/{k}": {metric: value, "acc_norm": value} for k, value in enumerate(told)}


def result(
    base: dict[str, Any], adapter: dict[str, Any] | None, previous: dict[str, Any] | None = None, *,
    scored: Mapping[str, Any] | None = None, judge: Mapping[str, Any] | None = None, preferences: str | None = None, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """The result file; capability suites of `scored` (``{subject: {name: items}}``) get sections of their own."""
    renamed = {who: {f"capability/{name}": told for name, told in by.items()} for who, by in (scored or {}).items()}
    subjects: dict[str, Any] = {"base": dict(base), "adapter": adapter and dict(adapter), "previous": previous and dict(previous)}
    for who, told in renamed.items():
        for suite, scores in told.items():
            subjects[who][suite] = section({item: [-1.0, 1.0] for item in scores})
    suites = {
        id_: {"kind": id_.partition("/")[0], "digest": "d", "num_items": len(s["answers"]), "version": None}
        for id_, s in subjects["base"].items()
    }
    return {
        "format": 2, "applied": APPLIED, "error": None, "preferences": preferences, "suites": suites, "subjects": subjects,
        "scored": renamed, "judge": judge, "seconds": 3.0, **more,
    }  # fmt: skip


def judged(wins: int, draws: int, losses: int, *, contradicted: int = 0, failed: int = 0, **more: Any) -> dict[str, Any]:
    """A judge's section; `contradicted` pairs went to the first place both times."""
    kinds = [("candidate", "candidate")] * wins + [("draw", "draw")] * draws + [("base", "base")] * losses
    kinds += [("candidate", "base")] * contradicted
    pairs = {f"i{k:04d}": {"forward": a, "swapped": b, "digest": "d"} for k, (a, b) in enumerate(kinds)}
    return {"model": "a-judge", "items": pairs, "failed": failed, "warnings": [], "tokens_in": 900, "tokens_out": 90, **more}


def built(made: Mapping[str, Any], holdout: Sequence[Item] = (), *, method: str = "sft", **more: Any) -> EvalReport:
    values = {"base_model": "m", "base_digest": "b" * 64, "adapter_manifest_sha256": "a" * 64, **more}
    return reports.build_report(made, holdout, method=methods.method_named(method), **values)


def report(
    base: int = 20, adapter: int = 80, *, n: int = 100, expected: str = "yes", previous: int | None = None,
    base_part: Mapping[str, Any] | None = None, scored: Mapping[str, Any] | None = None, judge: Mapping[str, Any] | None = None,
    **part: Any,
) -> EvalReport:  # fmt: skip
    """Of an SFT job with `n` holdout items, of which the base, the adapter (and the last accepted one) get so many right."""
    holdout = items(n, expected)
    before = subject(holdout, base, **(base_part or {}))
    after = subject(holdout, adapter, **{"nll": 1.5, **part})
    earlier = None if previous is None else subject(holdout, previous, nll=1.6, **(base_part or {}))
    return built(result(before, after, earlier, scored=scored, judge=judge), holdout, previous_manifest_sha256="p" * 64)


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)> \x1b[31m {{ 7 * 7 }} \"' </pre>"


@cache
def stored(*, quarantined: bool = True) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """``report.json`` and the rows of ``samples.jsonl`` of a whole evaluation: every suite, a judge, hostile answers."""
    holdout = [
        Item(id=f"i{k:04d}", messages=({"role": "user", "content": f"Which label? {HOSTILE if k == 0 else k}"},), expected="refund")
        for k in range(60)
    ]
    everything = len(UNSAFE)
    base = subject(holdout, 20, refusals=everything, over=1, wrong="I am not sure.")
    adapter = subject(holdout, 48, nll=1.4, refusals=everything // 2 if quarantined else everything, wrong=HOSTILE)
    previous = subject(holdout, 40, nll=1.5, refusals=everything - 1, wrong="unknown")
    adapter["holdout"]["answers"]["i0003"] = "delivery"
    fall = 30 if quarantined else 0
    scored = {
        "base": {"arc-standin": suite_scores(120), "recall": suite_scores(150)},
        "adapter": {"arc-standin": suite_scores(120 - fall, lost=5), "recall": suite_scores(150 - fall // 3, lost=3)},
        "previous": {"arc-standin": suite_scores(118, lost=4), "recall": suite_scores(149, lost=2)},
    }
    made = result(base, adapter, previous, scored=scored, judge=judged(22, 8, 12, contradicted=6, failed=2))
    report = built(made, holdout, previous_manifest_sha256="p" * 64, num_gpus=1, base_model="demo-llama-3m")
    verdict = gates.judge(report, EvalConfig())
    run = LastRun(learning_rate=2e-4, num_epochs=3, rank=16, num_examples=800)
    advised = advise(curve(), report=report, verdict=verdict, run=run)
    body = {"report": asdict(report), "verdict": verdict.to_dict(), "advice": [asdict(a) for a in advised]}
    return body, reports.sample_rows(made, holdout)


def store_evaluation(platform: Platform, tenant: str, job_id: str, *, quarantined: bool = True) -> None:
    """What an evaluation leaves in the object store."""
    body, rows = stored(quarantined=quarantined)
    prefix = layout.eval_prefix(tenant, job_id)
    platform.objects.put_bytes(f"{prefix}/report.json", json.dumps(body).encode())
    platform.objects.put_bytes(f"{prefix}/samples.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())


def curve(num_steps: int = 120) -> list[dict[str, Any]]:
    """Lines of ``metrics.jsonl`` of a run that went well."""
    falls = [0.6 + 2.2 * 0.5 ** (step / 15) + 0.05 * (step % 3) for step in range(num_steps)]
    rows: list[dict[str, Any]] = [{"step": k, "loss": loss, "learning_rate": 2e-4, "epoch": k / 40} for k, loss in enumerate(falls, 1)]
    return rows + [{"step": k, "eval_loss": 0.8 + 1.5 * 0.5 ** (k / 20)} for k in range(20, num_steps + 1, 20)]
