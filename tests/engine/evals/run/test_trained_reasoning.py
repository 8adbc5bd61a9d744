"""Rows with reasoning and rows without, from the file to the scores: loss only on what is meant, and the model answers in both ways."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

pytest.importorskip("torch", reason="needs the training environment")

from engine.data.ingest import Policies, load_rows, validate_file
from engine.data.packs.build import PackSettings, build_pack
from engine.data.tokens.chat_tokenizer import ChatTokenizer
from engine.data.tokens.loss_mask import IGNORE
from engine.evals.run.run_file import EvalRun
from engine.evals.suites import suite_items
from engine.evals.suites.answer_reader import AnswerReader
from engine.training.spec import Optimization, RunFile
from tests.engine.evals.run_evaluations import evaluate
from tests.engine.training.attempts import SPEC
from tests.engine.training.in_process import Training
from tests.support.jobs.evaluation_results import built
from tests.support.models.reasoning_templates import SWITCHED
from tests.support.models.tiny_model import build_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of the libraries

NUMBERS = ("one", "six", "ten")
EPOCHS = 250


def rows() -> list[dict[str, Any]]:
    """For each number, an answer after a thought and one without, and a conversation whose first answer the template rewrites."""
    found: list[dict[str, Any]] = []
    for number in NUMBERS:
        asked = {"role": "user", "content": f"{number}?"}
        thinking = {"role": "assistant", "content": f"{number}!", "reasoning_content": f"say {number}"}
        found.append({"messages": [asked, thinking]})
        found.append({"messages": [asked, {"role": "assistant", "content": f"{number}."}], "enable_thinking": False})
    first = {"role": "assistant", "content": "never again", "reasoning_content": "lost"}
    return [*found, {"messages": [{"role": "user", "content": "and?"}, first, *found[0]["messages"]]}]


def labelled(pack: Path, tokenizer: ChatTokenizer) -> list[str]:
    """The runs of tokens with loss in the windows of a pack."""
    runs = []
    for file in sorted(pack.glob("shard-*.parquet")):
        for window in pq.read_table(file).to_pylist():
            labels = np.asarray(window["labels"])
            edges = np.flatnonzero(np.diff(np.concatenate(([0], labels != IGNORE, [0])))).reshape(-1, 2).tolist()
            runs += [tokenizer.decode(labels[start:end].tolist()) for start, end in edges]
    return sorted(runs)


def test_a_model_learns_to_think_where_its_rows_do_and_is_scored_either_way(tmp_path: Path) -> None:
    base = build_tiny_model(tmp_path / "base", template=SWITCHED)
    tokenizer = ChatTokenizer.load(base)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    policies = Policies(min_examples=1, near_duplicates="off")
    checked = validate_file(
        file, filename="r.jsonl", policies=policies, model_dir=base, max_seq_len=256, output=tmp_path / "rows.parquet"
    ).report
    assert checked.valid and [w["code"] for w in checked.warnings if "reasoning" in w["code"]] == ["reasoning_left_out"]
    pack = build_pack(tmp_path / "rows.parquet", tokenizer, PackSettings(max_seq_len=256), tmp_path / "pack", dataset_id="ds")
    thought = {n: f"<think>\nsay {n}\n</think>\n\n{n}!" for n in NUMBERS}
    assert labelled(tmp_path / "pack", tokenizer) == sorted(
        [*(f"{text}<|im_end|>" for text in (*thought.values(), thought["one"])), *(f"{n}.<|im_end|>" for n in NUMBERS)]
    )
    assert pack.untrained_turns == 1

    spec = replace(
        SPEC, adapter="full", lora=None, pack_fingerprint=pack.fingerprint, dataset_id="ds", max_seq_len=256,
        optimization=Optimization(learning_rate=3e-3, num_epochs=EPOCHS, per_device_batch_size=4, accumulation_steps=1, warmup_ratio=0.05),
        checkpoint=replace(SPEC.checkpoint, every_steps=10_000),
    )  # fmt: skip
    training = Training(run_file=RunFile(spec=spec, attempt=1, base_model_dir=base, pack_dir=tmp_path / "pack", work_dir=tmp_path / "work"))
    assert training.attempt()
    losses = [line["loss"] for line in training.lines() if "loss" in line]
    assert losses[-1] < 0.05 < losses[0], losses[-1]

    examples = [example for example in load_rows(tmp_path / "rows.parquet") if len(example.messages) == 2]
    asked = [
        {"messages": [m.as_template() for m in example.messages], "chat_template_kwargs": example.template_kwargs} for example in examples
    ]
    items = suite_items.holdout_items(asked)
    suite_items.write_items(items, tmp_path / "holdout.jsonl")
    run = EvalRun(
        base_model_dir=base, adapter_dir=tmp_path / "work" / "final", holdout=tmp_path / "holdout.jsonl", golden=False, max_new_tokens=48,
        out_dir=tmp_path / "out",
    )  # fmt: skip
    code, result = evaluate(run)
    assert code == 0
    given = result["subjects"]["adapter"]["holdout"]["answers"]
    answers = {item.expected: given[item.id] for item in items}
    assert answers == {f"{n}!": thought[n] for n in NUMBERS} | {f"{n}.": f"{n}." for n in NUMBERS}

    for mode in ("strip", "score"):
        made = built(result, items, reader=AnswerReader.of_model(base, mode=mode))  # type: ignore[arg-type]
        score = made.score("holdout", "exact_match")
        assert score is not None and (score.base, score.adapter) == (0.0, 1.0)
        assert made.reasoning is not None
        before, after = made.reasoning.subjects["base"], made.reasoning.subjects["adapter"]
        assert (before.with_reasoning, after.with_reasoning, after.unfinished, after.num_answers) == (0, 3, 0, 6)
    shown = {s.expected: s.reasoning for s in built(result, items).samples}
    assert shown["one!"] == {"adapter": "say one"} and shown["one."] is None
