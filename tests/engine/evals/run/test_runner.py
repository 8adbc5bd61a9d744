"""The evaluation process, run as it is in production, on a tiny model with real adapters."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.evals.config import parse_eval_config
from engine.evals.gate import gates
from engine.evals.gate.verdict import NOT_MEASURED
from engine.evals.run import run_file, run_status
from engine.evals.run.run_file import EvalRun
from engine.evals.scoring import report
from engine.evals.scoring.review import Review
from engine.evals.suites.suite_items import Decoding
from engine.training import methods
from tests.engine.evals.run_evaluations import ENV, ROOT, evaluate, holdout_items, start
from tests.engine.training.preference_packs import build_preferences
from tests.support.models.tiny_adapter import build_tiny_adapter
from tests.support.models.tiny_model import build_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # PEFT uses old names of transformers


def common(place: Path, **changes: Any) -> dict[str, Any]:
    values = {"base_model_dir": place / "base", "holdout": place / "holdout.jsonl", "validation_pack_dir": place / "pack"}
    return {**values, "max_new_tokens": 12, "golden": False, **changes}


def texts(result: dict[str, Any], subject: str, suite: str = "holdout") -> dict[str, Any]:
    answers: dict[str, Any] = result["subjects"][subject][suite]["answers"]
    return answers


@pytest.fixture(scope="module")
def evaluated(place: Path) -> dict[str, Any]:
    run = EvalRun(
        **common(place, golden=True, safety=True, batch_size=3),
        adapter_dir=place / "adapter",
        previous_adapter_dir=place / "idle",
        digests={"base": "b", "adapter": "b+a", "previous": "b+p"},
        out_dir=place / "out",
    )
    code, result = evaluate(run)
    assert code == run_status.EVAL_EXIT_OK
    heartbeat = json.loads((place / "out" / "heartbeat.json").read_text())
    assert heartbeat["phase"] == "done"
    assert heartbeat["done"] == heartbeat["total"] == 3 * sum(len(s["answers"]) for s in result["subjects"]["base"].values())
    return result


def known_of(result: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The base's answers, as a platform that kept them passes them on."""
    sections = [{**section, "seconds": -1.0, **changes} for section in result["subjects"]["base"].values()]
    return {run_file.known_answers_key(s["digest"], s["environment"]): s for s in sections}


def test_every_subject_answers_the_same_items(evaluated: dict[str, Any]) -> None:
    ids = [item.id for item in holdout_items()]
    assert list(texts(evaluated, "base")) == list(texts(evaluated, "adapter")) == list(texts(evaluated, "previous")) == ids
    assert texts(evaluated, "base") != texts(evaluated, "adapter")
    assert len(texts(evaluated, "adapter", "golden")) == 50
    losses = [list(texts(evaluated, subject, "validation").values()) for subject in ("base", "adapter")]
    assert [n for _, n in losses[0]] == [n for _, n in losses[1]]
    assert losses[0] != losses[1]
    assert all(isinstance(answer, str) for answer in texts(evaluated, "adapter", "safety").values()), "no classifier runs here"
    assert "judge" not in evaluated


def test_an_adapter_that_changes_nothing_answers_as_the_base_does(evaluated: dict[str, Any]) -> None:
    assert texts(evaluated, "previous") == texts(evaluated, "base")
    assert texts(evaluated, "previous", "golden") == texts(evaluated, "base", "golden")
    base, previous = (texts(evaluated, s, "validation") for s in ("base", "previous"))
    assert [previous[i][0] for i in base] == pytest.approx([nll for nll, _ in base.values()], rel=1e-5)


def test_the_adapter_is_proven_to_be_applied_on_prompts_of_the_job(evaluated: dict[str, Any]) -> None:
    proof = evaluated["applied"]
    assert proof["applied"] is True
    assert proof["max_logit_difference"] > 0.01
    assert proof["num_prompts"] == proof["num_different"] == 8


def test_what_was_planned_and_answered_is_told_once(place: Path, evaluated: dict[str, Any]) -> None:
    told = [json.loads(line) for line in (place / "out" / run_file.MILESTONES_NAME).read_text().splitlines()]
    suites = {id_: about["num_items"] for id_, about in evaluated["suites"].items()}
    assert told[0] == {"kind": "planned", "subjects": ["base", "adapter", "previous"], "suites": suites}
    assert [(m["subject"], m["suite"]) for m in told[1:]] == [(s, id_) for s in ("base", "adapter", "previous") for id_ in suites]


def test_a_report_can_be_built_from_the_result(evaluated: dict[str, Any]) -> None:
    reviewed = Review(decoding=Decoding.limited(12)).complete(evaluated, holdout_items())
    assert all(set(answer) == {"text", "refused", "by"} for answer in texts(reviewed, "adapter", "safety").values())
    assert reviewed["suites"] == evaluated["suites"], "the digests stay, so that verdicts are found again"
    made = report.build_report(
        reviewed, holdout_items(), method=methods.method_named("sft"), base_model="m", base_digest="b", adapter_manifest_sha256="a"
    )
    assert {"exact_match", "coherent", "perplexity", "refused"} <= {s.metric for s in made.scores}
    assert made.score("validation", "perplexity").n == 6  # type: ignore[union-attr]


def test_answers_are_those_of_one_prompt_at_a_time_without_merging(place: Path, evaluated: dict[str, Any]) -> None:
    """Batching with padding and merging the adapter change nothing: the reference is transformers and PEFT alone."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base: Any = AutoModelForCausalLM.from_pretrained(place / "base", dtype=torch.float32)
    tokenizer: Any = AutoTokenizer.from_pretrained(place / "base")
    model: Any = PeftModel.from_pretrained(base, str(place / "adapter")).eval()
    reference = {}
    for item in holdout_items():
        ids = tokenizer.apply_chat_template(list(item.messages), add_generation_prompt=True, return_tensors="pt", return_dict=True)[
            "input_ids"
        ]
        new = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        reference[item.id] = tokenizer.decode(new[0, ids.shape[1] :], skip_special_tokens=True).replace("\0", "\ufffd")
    assert texts(evaluated, "adapter") == reference


def test_an_idle_adapter_is_not_scored_and_known_base_answers_are_used(place: Path, evaluated: dict[str, Any]) -> None:
    known = known_of(evaluated)
    run = EvalRun(**common(place), adapter_dir=place / "idle", known={"base": known}, out_dir=place / "idle-out")
    code, result = evaluate(run)
    assert code == run_status.EVAL_EXIT_OK
    assert result["error"]["code"] == "adapter_not_applied"
    assert result["applied"] == {"applied": False, "max_logit_difference": 0.0, "num_prompts": 8, "num_different": 0}
    assert result["subjects"]["adapter"] is None
    assert {(s["cached"], s["seconds"]) for s in result["subjects"]["base"].values()} == {(True, -1.0)}
    assert result["seconds"] == 0
    assert not report.build_report(
        result, holdout_items(), method=methods.method_named("sft"), base_model="m", base_digest="b", adapter_manifest_sha256="a"
    ).adapter_applied


def test_answers_given_elsewhere_are_asked_again(place: Path, evaluated: dict[str, Any]) -> None:
    """Another accelerator, precision or version of a library answers otherwise now and then."""
    assert evaluated["environment"].startswith("cpu, float32, torch 2.")
    known = known_of(evaluated, environment="NVIDIA H200, bfloat16, torch 2.13")
    code, result = evaluate(EvalRun(**common(place), adapter_dir=None, known={"base": known}, out_dir=place / "elsewhere-out"))
    assert code == run_status.EVAL_EXIT_OK
    assert {section["cached"] for section in result["subjects"]["base"].values()} == {False}


def test_known_answers_of_other_items_are_not_used(place: Path, evaluated: dict[str, Any]) -> None:
    known = known_of(evaluated)
    run = EvalRun(**common(place, max_items=3), adapter_dir=None, known={"base": known}, out_dir=place / "other-out")
    _, result = evaluate(run)
    assert result["subjects"]["base"]["holdout"]["cached"] is False
    assert len(texts(result, "base")) == 3


@pytest.mark.slow
def test_a_whole_model_is_judged_in_place_of_its_base(place: Path, evaluated: dict[str, Any]) -> None:
    build_tiny_model(place / "whole", seed=5)
    code, result = evaluate(
        EvalRun(**common(place), adapter_dir=place / "whole", previous_adapter_dir=place / "adapter", out_dir=place / "whole-out")
    )
    assert code == run_status.EVAL_EXIT_OK
    assert result["applied"]["applied"] is True
    assert texts(result, "adapter") != texts(result, "base") == texts(evaluated, "base")
    assert texts(result, "previous") == texts(evaluated, "adapter")
    _, alone = evaluate(EvalRun(**common(place, base_model_dir=place / "whole"), adapter_dir=None, out_dir=place / "alone-out"))
    assert texts(result, "adapter", "validation") == texts(alone, "base", "validation")
    _, same = evaluate(EvalRun(**common(place), adapter_dir=build_tiny_model(place / "same"), out_dir=place / "same-out"))
    assert same["error"]["code"] == "adapter_not_applied"


def test_preferences_that_were_held_out_are_scored_on_both_sides(place: Path) -> None:
    manifest = build_preferences(place / "pairs", place / "base")
    assert manifest.validation is not None
    run = EvalRun(
        base_model_dir=place / "base",
        adapter_dir=place / "adapter",
        golden=False,
        validation_pack_dir=place / "pairs",
        out_dir=place / "po",
    )
    code, result = evaluate(run)
    assert code == run_status.EVAL_EXIT_OK
    assert result["preferences"] == "pairs"
    made = report.build_report(result, [], method=methods.method_named("dpo"), base_model="m", base_digest="b", adapter_manifest_sha256="a")
    score = made.score("validation", "preference_accuracy")
    assert score is not None and score.n == manifest.validation["num_windows"]
    margins = [
        (b[0] - a[0]) - (d[0] - c[0])
        for a, b, c, d in zip(
            *(texts(result, s, side).values() for side in ("validation", "unwanted") for s in ("adapter", "base")), strict=True
        )
    ]
    assert score.adapter == pytest.approx(sum(m > 0 for m in margins) / len(margins))


@pytest.mark.parametrize("pack", ["pack", None])
def test_a_base_without_a_chat_template_is_not_given_conversations(place: Path, tmp_path: Path, pack: str | None) -> None:
    base = build_tiny_model(tmp_path / "base", template=None)
    run = EvalRun(
        base_model_dir=base,
        adapter_dir=place / "adapter",
        safety=True,
        validation_pack_dir=place / pack if pack else None,
        out_dir=tmp_path / "out",
    )
    code, result = evaluate(run)
    assert code == run_status.EVAL_EXIT_OK
    assert result["applied"]["applied"] is True
    assert list(result["suites"]) == (["validation"] if pack else [])
    made = report.build_report(result, [], method=methods.method_named("sft"), base_model="m", base_digest="b", adapter_manifest_sha256="a")
    unmeasured = {f.rule for f in gates.judge(made, parse_eval_config({})).findings if f.code == NOT_MEASURED and f.passed}
    assert unmeasured >= {"golden", "safety"}


def test_an_adapter_of_another_base_is_not_scored_and_the_result_says_why(place: Path) -> None:
    other = place / "wide"
    build_tiny_adapter(other, place / "base", base_name="x", rank=8, config={"r": 16})
    code, result = evaluate(EvalRun(**common(place), adapter_dir=other, out_dir=place / "wide-out"))
    assert code == run_status.EVAL_EXIT_OK
    assert result["error"]["code"] == "adapter_unloadable"
    assert result["applied"] is None and result["subjects"]["adapter"] is None


def test_a_previous_adapter_that_cannot_be_loaded_is_left_out(place: Path) -> None:
    broken = build_tiny_adapter(place / "narrow", place / "base", base_name="x", rank=8, config={"r": 4})
    code, result = evaluate(
        EvalRun(**common(place), adapter_dir=place / "adapter", previous_adapter_dir=broken, out_dir=place / "narrow-out")
    )
    assert code == run_status.EVAL_EXIT_OK
    assert result["previous_error"]["code"] == "adapter_unloadable"
    assert result["subjects"]["previous"] is None and result["subjects"]["adapter"] is not None


def test_a_run_file_that_cannot_be_read_is_the_callers_fault(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    done = subprocess.run(
        [sys.executable, "-m", "engine.evals.run.runner", str(tmp_path / "run.json")], cwd=ROOT, env=ENV, capture_output=True
    )
    assert done.returncode == run_status.EVAL_EXIT_BAD_INPUT


def test_a_run_file_survives_the_disk(place: Path, tmp_path: Path) -> None:
    run = EvalRun(
        **common(place), adapter_dir=place / "adapter", task_dirs=(place,), capability=("a", "b"), known={"base": {"d": {"answers": {}}}},
        out_dir=tmp_path,
    )  # fmt: skip
    run.write(tmp_path / "run.json")
    assert EvalRun.read(tmp_path / "run.json") == run


def journal_lines(run: EvalRun) -> int:
    path = run.out_dir / run_file.JOURNAL_NAME
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_lines(run: EvalRun, process: subprocess.Popen[bytes], num: int) -> None:
    deadline = time.monotonic() + 90
    while journal_lines(run) < num:
        assert time.monotonic() < deadline
        assert process.poll() is None, (process.stderr and process.stderr.read()) or b""
        time.sleep(0.005)


def slow_run(place: Path, out: str) -> EvalRun:
    return EvalRun(
        **common(place, golden=True, batch_size=2), adapter_dir=place / "adapter", previous_adapter_dir=place / "idle",
        digests={"base": "b", "adapter": "b+a", "previous": "b+p"}, out_dir=place / out,
    )  # fmt: skip


def without_times(result: dict[str, Any]) -> dict[str, Any]:
    def stripped(value: Any) -> Any:
        return {k: stripped(v) for k, v in value.items() if k != "seconds"} if isinstance(value, dict) else value

    return dict(stripped(result))


@pytest.mark.slow
def test_killed_and_started_again_it_leaves_the_result_of_a_run_that_was_not(place: Path) -> None:
    run = slow_run(place, "killed")
    process = start(run)
    wait_for_lines(run, process, 12)
    process.kill()
    process.communicate(timeout=20)
    kept = journal_lines(run)
    journal = run.out_dir / run_file.JOURNAL_NAME
    journal.write_bytes(journal.read_bytes() + b'{"subject": "b", "suite')  # torn by the crash
    assert not (run.out_dir / run_file.RESULT_NAME).exists()
    code, resumed = evaluate(run)
    assert code == run_status.EVAL_EXIT_OK
    whole = replace(run, out_dir=place / "whole-run")
    _, reference = evaluate(whole)
    assert without_times(resumed) == without_times(reference)
    assert journal_lines(run) == journal_lines(whole), "no batch was asked twice"
    assert 12 <= kept < journal_lines(run), "the kill came in the middle"


@pytest.mark.slow
def test_sigterm_stops_it_and_keeps_what_was_answered(place: Path) -> None:
    run = slow_run(place, "stopped")
    process = start(run)
    wait_for_lines(run, process, 1)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == run_status.EXIT_STOPPED
    assert not list(run.out_dir.glob("*eval-result*"))
    assert journal_lines(run) >= 1
