"""Advice from planted curves and reports: each fault gives its own advice, health none."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial as later
from pathlib import Path
from typing import Any

import pytest

from engine.evals.config import EvalConfig
from engine.evals.gate import advice as advice_module
from engine.evals.gate.advice import Advice, LastRun, advise, combined_changes
from engine.evals.gate.gates import judge
from engine.evals.scoring.report import EvalReport
from tests.support.jobs.evaluation_results import UNSAFE, built, items, report, result, subject, suite_scores

RUN = LastRun(learning_rate=2e-4, num_epochs=3, rank=16, batch_size=8, warmup_ratio=0.03, num_examples=2000)


def curve(losses: list[float], evals: list[float] | None = None, *, rate: float = 2e-4, norms: Any = None) -> list[dict[str, float]]:
    rows = [{"step": i, "loss": loss, "learning_rate": rate, "epoch": i / 10} for i, loss in enumerate(losses, 1)]
    rows = [row | ({"grad_norm": norms(i)} if norms else {}) for i, row in enumerate(rows)]
    every = len(losses) // max(1, len(evals or []))
    return rows + [{"step": (i + 1) * every, "eval_loss": loss} for i, loss in enumerate(evals or [])]


def falling(n: int, start: float, end: float, *, half: float) -> list[float]:
    """An exponential fall with half-life `half` (as a share of the run)."""
    return [end + (start - end) * 0.5 ** (i / (n * half)) for i in range(n)]


HEALTHY = curve(falling(60, 3.0, 0.5, half=0.08), [1.0, 0.8, 0.79, 0.80])


@pytest.mark.parametrize(
    ("rows", "codes"),
    [
        pytest.param(curve(falling(60, 3.0, 0.5, half=0.08)), [], id="a good run needs no advice"),
        pytest.param(curve(falling(60, 3.0, 0.2, half=0.1), [1.0, 0.8, 0.9, 1.2]), ["overfit"], id="validation loss turned"),
        pytest.param(HEALTHY, [], id="a flat validation loss is no overfit"),
        pytest.param(curve([2.0, 1.5, math.nan, math.nan]), ["learning_rate_too_high"], id="the loss is no number"),
        pytest.param(curve([2.0 + 0.2 * i for i in range(30)]), ["learning_rate_too_high"], id="the loss rises"),
        pytest.param(curve([2.0, 0.8] * 20), ["learning_rate_too_high"], id="the loss swings"),
        pytest.param(curve([2.0 - 0.001 * i for i in range(40)]), ["learning_rate_too_low"], id="the loss does not move"),
        pytest.param(curve([3.0 - 0.04 * i for i in range(40)]), ["too_few_steps"], id="it ended while falling"),
        pytest.param(curve([3.0, 2.0, 1.0]), ["too_few_steps"], id="three steps have no shape"),
        pytest.param([], ["too_few_steps"], id="no curve at all"),
        pytest.param(
            curve([5.0, 2.0] * 20, [5.0, 2.6, 1.2]), ["too_few_steps"], id="the loss swings while validation loss falls to the end"
        ),
        pytest.param(
            curve([5.0, 2.0] * 20, [5.0, 1.3, 1.25, 1.24]), ["learning_rate_too_high"], id="it swings and validation loss is flat"
        ),
        pytest.param(curve(falling(60, 3.0, 0.5, half=0.08), norms=lambda i: 1.0), [], id="steady gradients"),
        pytest.param(
            curve(falling(60, 3.0, 0.5, half=0.08), norms=lambda i: 25.0 if i % 9 == 8 else 1.0), ["unstable"], id="gradients that spike"
        ),
    ],
)
def test_advice_from_curves(rows: list[dict[str, float]], codes: list[str]) -> None:
    assert [a.code for a in advise(rows)] == codes


def test_advice_on_a_rate_of_points_changes_no_warm_up_which_points_do_not_read() -> None:
    spiking = curve(falling(60, 3.0, 0.5, half=0.08), norms=lambda i: 25.0 if i % 9 == 8 else 1.0)
    of_points = LastRun.of_spec({"optimization": {"schedule": [[0, 1], [1, 0]], "warmup_ratio": 0.0}})
    of_cosine = LastRun.of_spec({"optimization": {"schedule": "cosine", "warmup_ratio": 0.03}})
    assert [dict(a.changes) for a in advise(spiking, run=of_cosine)] == [{"warmup_ratio": 0.1}]
    assert [dict(a.changes) for a in advise(spiking, run=of_points)] == [{}]


@pytest.mark.parametrize(
    ("warmup", "decay", "advised"),
    [(0.03, 0.2, 0.1), (0.1, 0.85, 0.15), (0.03, 0.955, 0.04), (0.1, 0.9, None), (0.0, 1.0, None), (0.5, 0.2, None)],
)
def test_advice_on_wsd_leaves_room_for_its_fall(warmup: float, decay: float, advised: float | None) -> None:
    spiking = curve(falling(60, 3.0, 0.5, half=0.08), norms=lambda i: 25.0 if i % 9 == 8 else 1.0)
    run = LastRun.of_spec({"optimization": {"schedule": "wsd", "warmup_ratio": warmup, "schedule_decay_ratio": decay}})
    (found,) = advise(spiking, run=run)
    assert dict(found.changes) == ({} if advised is None else {"warmup_ratio": advised})
    assert advised is None or advised + decay <= 1


LOST = {"base": {"arc": suite_scores(120)}, "adapter": {"arc": suite_scores(90)}}
LABEL = "Yes."


def labels(exact: int, *, loosely: bool) -> EvalReport:
    """Of 100 labels `exact` are right to the letter and, `loosely`, all but for case and full stop."""
    asked = items(100, LABEL)
    adapter = subject(asked, exact, wrong="yes" if loosely else "no", nll=1.5)
    return built(result(subject(asked, 0, wrong="no"), adapter), asked)


@pytest.mark.parametrize(
    ("make", "run", "codes", "changes"),
    [
        pytest.param(report, RUN, [], {}, id="health"),
        pytest.param(later(report, scored=LOST), RUN, ["forgetting"], {"learning_rate": 1e-4, "rank": 8, "n_epochs": 1.5}, id="forgetting"),
        pytest.param(
            later(report, base_part={"refusals": len(UNSAFE)}, refusals=5), RUN, ["safety_loss"], {"safety_share": 0.05}, id="refusals lost"
        ),
        pytest.param(
            later(report, base_part={"refusals": len(UNSAFE)}, refusals=5), LastRun(safety_share=0.05),
            ["safety_loss"], {"safety_share": 0.1}, id="refusals lost in spite of safety examples",
        ),
        pytest.param(later(report, golden_ok=6), RUN, ["empty_answers"], {}, id="general questions answered with nothing"),
        pytest.param(later(report, expected='{"a": 1}', adapter=70), RUN, ["wrong_form"], {}, id="JSON that is none"),
        pytest.param(later(labels, 60, loosely=True), RUN, ["wrong_form"], {}, id="labels that are right but for the letter"),
        pytest.param(later(report, base=0, adapter=2), RUN, ["hold_out_more"], {}, id="a gain that may be noise"),
        pytest.param(later(report, adapter=20), LastRun(num_examples=120), ["too_little_data"], {}, id="too few examples"),
        pytest.param(later(report, adapter=20), RUN, ["underfit"], {"rank": 32, "n_epochs": 6.0}, id="nothing learned from many examples"),
        pytest.param(
            later(report, adapter=20), replace(RUN, max_rank=16), ["underfit"], {"n_epochs": 6.0}, id="no rank that the servers do not load"
        ),
    ],
)  # fmt: skip
def test_advice_from_reports(make: Callable[[], EvalReport], run: LastRun, codes: list[str], changes: dict[str, Any]) -> None:
    made = make()
    found = advise(HEALTHY, report=made, verdict=judge(made, EvalConfig()), run=run)
    assert [a.code for a in found] == codes
    assert combined_changes(found) == changes
    for advice in found:
        assert advice.evidence
        assert Advice.from_dict(json.loads(json.dumps(asdict(advice)))) == advice


def test_safety_examples_are_advised_where_refusals_were_counted_and_not_where_no_prompt_was_asked() -> None:
    asked, unasked = report(base_part={"refusals": 0}, refusals=0), report()
    found = [advise(HEALTHY, report=made, verdict=judge(made, EvalConfig(), safety_policy="block"), run=RUN) for made in (asked, unasked)]
    assert [[a.code for a in advice] for advice in found] == [["safety_loss"], []]


def test_an_adapter_that_is_not_applied_is_told_apart_from_one_that_did_not_learn() -> None:
    made = built(result(subject(), None, applied={"applied": False, "max_logit_difference": 0.0}))
    verdict = judge(made, EvalConfig())
    (broken,) = advise(HEALTHY, report=made, verdict=verdict, run=RUN)
    assert (broken.code, broken.changes, "Tell the operator" in broken.message) == ("not_applied", {}, True)
    (idle,) = advise(curve([2.0] * 40), report=made, verdict=verdict, run=RUN)
    assert (idle.code, idle.changes) == ("not_applied", {"learning_rate": 0.002})


def test_advice_names_the_numbers_to_change() -> None:
    (overfit,) = advise(curve(falling(60, 3.0, 0.2, half=0.1), [1.0, 0.8, 0.9, 1.2]), run=RUN)
    assert "after epoch 3.0 (0.800) and then rose to 1.200" in overfit.message
    assert overfit.changes == {"n_epochs": 3.0, "rank": 8}
    (low,) = advise(curve([2.0 - 0.001 * i for i in range(40)]))
    assert "from 2.0e-04 to about 6.0e-04" in low.message
    assert low.changes == {"learning_rate": 6e-4}
    (late,) = advise(curve([3.0 - 0.04 * i for i in range(40)]), run=RUN)
    assert late.changes == {"n_epochs": 4.5}


def test_where_advice_disagrees_the_first_counts() -> None:
    made = [Advice(code="a", message="", changes={"rank": 8}), Advice(code="b", message="", changes={"rank": 32, "n_epochs": 2})]
    assert combined_changes(made) == {"rank": 8, "n_epochs": 2}


def test_a_run_is_read_from_its_stored_spec_and_advice_of_old_reports_too() -> None:
    spec = {"optimization": {"learning_rate": 1e-4, "num_epochs": 2, "per_device_batch_size": 4, "accumulation_steps": 2}, "world_size": 1}
    assert LastRun.of_spec({**spec, "lora": {"rank": 8}}, num_examples=5) == LastRun(
        learning_rate=1e-4, num_epochs=2, rank=8, batch_size=8, num_examples=5
    )
    assert LastRun.of_spec(None) == LastRun()
    assert LastRun.of_spec({"lora": {"rank": 8, "init_lora_weights": "pissa"}}, max_rank=64).max_rank == 32
    assert Advice.from_dict("Lower it.").message == "Lower it."


def test_every_code_is_documented() -> None:
    codes = re.findall(r"^\d+\. ``(\w+)``", advice_module.__doc__ or "", re.MULTILINE)
    assert len(codes) == 15
    for page in ("errors.md", "evaluations.md"):
        told = (Path(__file__).parents[4] / "docs" / page).read_text()
        assert [code for code in codes if f"`{code}`" not in told] == [], page
