"""The evaluation process, run as it is in production, on a tiny model with real adapters."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ft_assets.evals import report, run_file, runner, suites
from ft_assets.evals.run_file import EvalRun
from ft_assets.training import methods
from tests.ft_assets.training.preference_packs import build_preferences
from tests.tiny_adapter import build_tiny_adapter
from tests.tiny_model import build_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # PEFT uses old names of transformers
ROOT = Path(__file__).parents[3]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def start(run: EvalRun) -> subprocess.Popen[bytes]:
    path = run.out_dir / "run.json"
    run.write(path)
    return subprocess.Popen([sys.executable, "-m", "ft_assets.evals.runner", str(path)], cwd=ROOT, env=ENV, stderr=subprocess.PIPE)


def evaluate(run: EvalRun) -> tuple[int, dict[str, Any]]:
    """Run it in this process: torch is imported once for all tests."""
    run.write(run.out_dir / "run.json")
    before = signal.getsignal(signal.SIGTERM)
    try:
        code = runner.main([str(run.out_dir / "run.json")])
    finally:
        signal.signal(signal.SIGTERM, before)
    return code, run_file.read_result(run.out_dir)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def holdout_items() -> list[suites.Item]:
    rows = [
        {"messages": [{"role": "user", "content": "hello " * (n + 1)}, {"role": "assistant", "content": f"answer {n}"}]} for n in range(7)
    ]
    return suites.holdout_items(rows)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Base model, an adapter, one that changes nothing, a holdout file, a pack with validation windows."""
    root = tmp_path_factory.mktemp("evals")
    base = build_tiny_model(root / "base")
    build_tiny_adapter(root / "adapter", base, base_name=str(base), seed=1)
    build_tiny_adapter(root / "idle", base, base_name=str(base), scale=0.0)
    suites.write_items(holdout_items(), root / "holdout.jsonl")
    (root / "pack").mkdir()
    rng = np.random.default_rng(0)
    windows = [[9, 20], [15], [6, 6, 6]]
    rows = [
        {"input_ids": rng.integers(0, 256, sum(w)).tolist(), "labels": [-100 if i % 3 == 0 else i for i in range(sum(w))], "seq_lengths": w}
        for w in windows
    ]
    pq.write_table(pa.Table.from_pylist(rows), root / "pack" / "val-00000.parquet")
    return root


@pytest.fixture(scope="module")
def evaluated(place: Path) -> dict[str, Any]:
    run = EvalRun(
        base_model_dir=place / "base",
        adapter_dir=place / "adapter",
        previous_adapter_dir=place / "idle",
        holdout=place / "holdout.jsonl",
        validation_pack_dir=place / "pack",
        max_new_tokens=12,
        batch_size=3,
        out_dir=place / "out",
    )
    code, result = evaluate(run)
    assert code == run_file.EXIT_OK
    assert result["suite_digest"] == run.suite_digest()
    heartbeat = json.loads((place / "out" / "heartbeat.json").read_text())
    assert heartbeat["phase"] == "done"
    return result


def test_base_and_adapter_answer_the_same_items(evaluated: dict[str, Any]) -> None:
    ids = [item.id for item in holdout_items()]
    assert list(evaluated["base"]["holdout"]) == list(evaluated["adapter"]["holdout"]) == ids
    assert evaluated["base"]["holdout"] != evaluated["adapter"]["holdout"]
    assert len(evaluated["adapter"]["golden"]) == 50
    assert evaluated["base"]["validation"]["tokens"] == evaluated["adapter"]["validation"]["tokens"]
    assert evaluated["base"]["validation"]["nll"] != evaluated["adapter"]["validation"]["nll"]


def test_an_adapter_that_changes_nothing_answers_as_the_base_does(evaluated: dict[str, Any]) -> None:
    assert evaluated["previous"]["holdout"] == evaluated["base"]["holdout"]
    assert evaluated["previous"]["golden"] == evaluated["base"]["golden"]
    assert evaluated["previous"]["validation"]["nll"] == pytest.approx(evaluated["base"]["validation"]["nll"], rel=1e-5)


def test_the_adapter_is_proven_to_be_applied(evaluated: dict[str, Any]) -> None:
    assert evaluated["applied"]["applied"] is True
    assert evaluated["applied"]["max_logit_difference"] > 0.01


def test_a_report_can_be_built_from_the_result(evaluated: dict[str, Any]) -> None:
    made = report.build(evaluated, holdout_items(), method=methods.get("sft"), base_model="m", base_digest="b", adapter_manifest_sha256="a")
    assert [s.metric for s in made.scores] == ["exact_match", "accuracy", "json_valid", "coherent", "perplexity"]
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
        reference[item.id] = tokenizer.decode(new[0, ids.shape[1] :], skip_special_tokens=True)
    assert evaluated["adapter"]["holdout"] == reference


def test_an_idle_adapter_is_not_scored_and_cached_base_answers_are_used(place: Path, evaluated: dict[str, Any]) -> None:
    run = EvalRun(
        base_model_dir=place / "base",
        adapter_dir=place / "idle",
        holdout=place / "holdout.jsonl",
        validation_pack_dir=place / "pack",
        max_new_tokens=12,
        base_scores={**evaluated["base"], "seconds": -1.0},
        out_dir=place / "idle-out",
    )
    code, result = evaluate(run)
    assert code == run_file.EXIT_OK
    assert result["error"]["code"] == "adapter_not_applied"
    assert result["adapter"] is None
    assert result["base"]["seconds"] == -1.0
    assert not report.build(
        result, holdout_items(), method=methods.get("sft"), base_model="m", base_digest="b", adapter_manifest_sha256="a"
    ).adapter_applied


def test_a_whole_model_is_judged_in_place_of_its_base(place: Path, evaluated: dict[str, Any]) -> None:
    build_tiny_model(place / "whole", seed=5)
    common: dict[str, Any] = {"base_model_dir": place / "base", "holdout": place / "holdout.jsonl", "golden": False}
    common |= {"validation_pack_dir": place / "pack", "max_new_tokens": 12}
    code, result = evaluate(
        EvalRun(**common, adapter_dir=place / "whole", previous_adapter_dir=place / "adapter", out_dir=place / "whole-out")
    )
    assert code == run_file.EXIT_OK
    assert result["applied"]["applied"] is True
    assert result["adapter"]["holdout"] != result["base"]["holdout"] == evaluated["base"]["holdout"]
    assert result["previous"]["holdout"] == evaluated["adapter"]["holdout"]
    _, alone = evaluate(EvalRun(**{**common, "base_model_dir": place / "whole"}, adapter_dir=None, out_dir=place / "alone-out"))
    assert result["adapter"]["validation"] == alone["base"]["validation"]
    _, same = evaluate(EvalRun(**common, adapter_dir=build_tiny_model(place / "same"), out_dir=place / "same-out"))
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
    assert code == run_file.EXIT_OK
    assert result["preferences"] == "pairs"
    made = report.build(result, [], method=methods.get("dpo"), base_model="m", base_digest="b", adapter_manifest_sha256="a")
    score = made.score("validation", "preference_accuracy")
    assert score is not None and score.n == manifest.validation["num_windows"]
    margins = [
        (b - a) - (d - c)
        for a, b, c, d in zip(*(result[s][side]["nll"] for side in ("validation", "unwanted") for s in ("adapter", "base")), strict=True)
    ]
    assert score.adapter == pytest.approx(sum(m > 0 for m in margins) / len(margins))


def test_an_adapter_of_another_base_is_refused_with_a_reason(place: Path) -> None:
    other = place / "wide"
    build_tiny_adapter(other, place / "base", base_name="x", rank=8, config={"r": 16})
    code, result = evaluate(EvalRun(base_model_dir=place / "base", adapter_dir=other, golden=False, out_dir=place / "wide-out"))
    assert code == run_file.EXIT_BAD_INPUT
    assert result["error"]["code"] == "adapter_unloadable"


def test_sigterm_stops_it_and_leaves_no_result(place: Path) -> None:
    run = EvalRun(base_model_dir=place / "base", adapter_dir=None, out_dir=place / "stopped")
    process = start(run)
    deadline = time.monotonic() + 60
    while not (run.out_dir / "heartbeat.json").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == run_file.EXIT_STOPPED
    assert not list(run.out_dir.glob("*eval-result*"))


def test_a_run_file_that_cannot_be_read_is_the_callers_fault(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    done = subprocess.run(
        [sys.executable, "-m", "ft_assets.evals.runner", str(tmp_path / "run.json")], cwd=ROOT, env=ENV, capture_output=True
    )
    assert done.returncode == run_file.EXIT_BAD_INPUT
