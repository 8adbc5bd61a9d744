"""The real vLLM generates the answers of an evaluation: in float32 those of transformers, for base and adapters from one engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.evals.run import run_status
from engine.evals.run.run_file import EvalRun
from engine.evals.suites import suite_items
from tests.engine.evals.run_evaluations import evaluate, holdout_items
from tests.support.models.tiny_adapter import build_tiny_adapter


@pytest.fixture
def run(base: Path, tmp_path: Path) -> EvalRun:
    for name, seed in (("adapter", 1), ("previous", 2)):
        build_tiny_adapter(tmp_path / name, base, base_name=str(base), seed=seed, rank=12)
    suite_items.write_items(holdout_items(), tmp_path / "holdout.jsonl")
    return EvalRun(
        base_model_dir=base,
        adapter_dir=tmp_path / "adapter",
        previous_adapter_dir=tmp_path / "previous",
        digests={"base": "b", "adapter": "a", "previous": "p"},
        holdout=tmp_path / "holdout.jsonl",
        safety=True,
        capability=("standin_copy", "standin_choices"),
        capability_limit=8,
        max_new_tokens=24,
        out_dir=tmp_path / "transformers",
    )


def answers(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: {suite: section["answers"] for suite, section in sections.items()} for name, sections in result["subjects"].items()}


def environments(result: Mapping[str, Any]) -> dict[str, set[str]]:
    sides = ("base", "adapter", "previous")
    return {suite: {result["subjects"][name][suite]["environment"] for name in sides} for suite in result["suites"]}


def test_vllm_answers_as_transformers_does_and_the_result_says_which_engine_it_was(run: EvalRun, vllm_python: Path) -> None:
    code, plain = evaluate(run)
    assert code == run_status.EVAL_EXIT_OK and plain["engine"] == {"name": "transformers", "why": ""}
    code, found = evaluate(replace(run, vllm_python=str(vllm_python), out_dir=run.out_dir.with_name("vllm")))
    assert code == run_status.EVAL_EXIT_OK, found
    assert found["engine"]["name"].startswith("vllm 0.") and not found["engine"]["why"]
    assert answers(found) == answers(plain)
    assert answers(found)["base"]["holdout"] != answers(found)["adapter"]["holdout"] != answers(found)["previous"]["holdout"]
    assert found["applied"]["applied"] and found["scored"] == plain["scored"]
    used = environments(found)
    assert all(len(of) == 1 for of in used.values()), "base and adapters are compared on one engine"
    assert {suite for suite, of in used.items() if of.pop().startswith("vllm")} == {
        "holdout",
        "golden",
        "safety",
        "capability/standin_copy",
    }
    beat = run_status.read_heartbeat(run.out_dir.with_name("vllm"))
    assert beat["done"] == beat["total"]


def test_an_adapter_that_vllm_refuses_has_transformers_answer_for_both(run: EvalRun, vllm_python: Path) -> None:
    assert run.adapter_dir is not None
    config = run.adapter_dir / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "bias": "lora_only"}))
    asked = replace(run, vllm_python=str(vllm_python), previous_adapter_dir=None, safety=False, capability=(), out_dir=run.out_dir / "r")
    code, found = evaluate(asked)
    assert code == run_status.EVAL_EXIT_OK, found
    assert found["engine"]["name"] == "transformers" and "ias" in found["engine"]["why"]
