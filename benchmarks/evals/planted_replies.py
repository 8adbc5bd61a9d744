"""Adapters for free text on the demo base, one of which learned its task: who else gets past the gate?

Every adapter is really trained on replies to reports of trouble. A reply names the thing and gives the remedy for its kind of trouble, so
it is right for one report and wrong for another, while all replies are alike in style.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from benchmarks.evals.planted_data import OPENINGS, THINGS, TROUBLES, Exchange, messages, write_pack
from engine.evals import config
from engine.evals.run import run_status, runner
from engine.evals.run.run_file import EvalRun
from engine.evals.scoring import report
from engine.evals.scoring.report import EvalReport
from engine.evals.suites.suite_items import Item, holdout_items, write_items
from engine.training import methods

DEMO_BASE = Path(__file__).parents[2] / "examples" / "demo" / "base_model"
NUM_TRAIN, NUM_HOLDOUT = 480, 100
STEPS, RATE = 100, 4e-3
CONFIG = config.EvalConfig(capability=(), skip=("golden", "safety"))
"""The rules on what is taught, alone: nothing here rehearses what else the base can do."""
REMEDIES = {
    "billing": "We will send the money back to your account within three days.",
    "broken": "Please pack it up and bring it to the shop for a repair.",
    "delivery": "The driver has a new date and will call you before noon.",
    "access": "Press the button on the back and choose a new password.",
}


def replies() -> list[Exchange]:
    """Every report with its reply, in an order drawn once."""
    found = [
        (f"{opening} {thing} {trouble}.", f"We are sorry about your {thing}. {REMEDIES[kind]}")
        for kind, troubles in TROUBLES.items()
        for trouble in troubles
        for thing in THINGS
        for opening in OPENINGS
    ]
    random.Random(0).shuffle(found)
    return found


def shuffled(exchanges: list[Exchange]) -> list[Exchange]:
    """The same reports and the same replies, paired at random."""
    answers = [answer for _, answer in exchanges]
    random.Random(0).shuffle(answers)
    return [(report, answer) for (report, _), answer in zip(exchanges, answers, strict=True)]


def recipes() -> Mapping[str, tuple[str | None, list[Exchange], int]]:
    """By name: the reason for which the adapter must be refused, what it is trained on, and for how many steps."""
    train = replies()[:NUM_TRAIN]
    return {
        "good replies": (None, train, STEPS),
        "shuffled replies": ("answers_ignore_prompt", shuffled(train), STEPS),
        "repeated prompts": ("answers_repeat_prompt", [(report, report) for report, _ in train], STEPS),
        "untrained": ("adapter_not_applied", train, 0),
    }


def holdout() -> list[Item]:
    """Held-out reports with their replies; none of them is trained on."""
    return holdout_items(({"messages": messages(e)} for e in replies()[-NUM_HOLDOUT:]), limit=NUM_HOLDOUT)


def write_holdout(directory: Path) -> list[Item]:
    """:func:`holdout` as items and as a validation pack, in `directory`."""
    items = holdout()
    write_items(items, directory / "holdout.jsonl")
    write_pack(replies()[-NUM_HOLDOUT:], Tokenizer.from_file(str(DEMO_BASE / "tokenizer.json")), directory / "pack")
    return items


def evaluate(directory: Path, name: str, adapter: Path) -> dict[str, Any]:
    """The runner's result on the files of :func:`write_holdout`."""
    out = directory / "evals" / name.replace(" ", "-")
    out.mkdir(parents=True, exist_ok=True)
    run = EvalRun(
        base_model_dir=DEMO_BASE,
        adapter_dir=adapter,
        digests={"base": "demo-llama-3m", "adapter": name},
        holdout=directory / "holdout.jsonl",
        validation_pack_dir=directory / "pack",
        golden=False,
        max_new_tokens=64,
        out_dir=out,
    )
    run.write(run_path := out / "run.json")
    if (code := runner.main([str(run_path)])) != run_status.EVAL_EXIT_OK:
        raise RuntimeError(f"the evaluation of {name} ended with {code}")
    return run_status.read_eval_result(out)


def reported(result: Mapping[str, Any], items: Sequence[Item]) -> EvalReport:
    """The report of a result, as a job's own evaluation makes it."""
    return report.build_report(
        result,
        items,
        method=methods.method_named("sft"),
        base_model="demo-llama-3m",
        base_digest="0" * 64,
        adapter_manifest_sha256="0" * 64,
    )


def write_answers(results: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Answers and losses of the base and of each adapter that was asked, for tests that judge them again."""

    def kept(sections: Mapping[str, Any]) -> dict[str, Any]:
        return {
            id_: {"digest": "", "answers": sections[id_]["answers"], "seconds": 0.0, "cached": False} for id_ in ("holdout", "validation")
        }

    asked = {name: result["subjects"] for name, result in results.items() if result["subjects"].get("adapter")}
    subjects = {"base": kept(next(iter(asked.values()))["base"])} | {name: kept(found["adapter"]) for name, found in asked.items()}
    path.write_text(json.dumps({"subjects": subjects}, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")
