"""Rows whose whole answer is truncated are counted before a job, and refused as its only rows, whatever they train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.errors import InvalidDataset
from engine.data.ingest import Policies, load_rows, validate_file
from engine.data.packs.build import PackKind, PackSettings, build_pack
from engine.data.report.validation_report import DatasetReport
from engine.data.schema import Example
from engine.data.tokens.chat_tokenizer import ChatTokenizer
from tests.engine.data.examples_of import chat, shared_case

MAX_SEQ_LEN = 256
ROWS: dict[str, tuple[PackKind, Callable[[str, int], dict[str, Any]]]] = {
    "chat": ("windows", lambda asked, i: chat(asked, f"answer {i}")),
    "kto": ("judged", lambda asked, i: {"prompt": asked, "completion": f"answer {i}", "label": i % 4 < 2}),
    "preference": ("pairs", lambda asked, i: {"prompt": asked, "chosen": f"answer {i}", "rejected": "no idea"}),
}
"""One token is a byte, so that every other prompt of :func:`rows` fills the window."""


def rows(fmt: str, *, count: int = 24, every: int = 2) -> list[dict[str, Any]]:
    return [ROWS[fmt][1](f"{i} " * (200 if i % every else 1), i) for i in range(count)]


def check(path: Path, model: Path, output: Path | None = None, **policies: Any) -> DatasetReport:
    chosen = Policies(near_duplicates="off", **policies)
    return validate_file(path, filename=path.name, policies=chosen, model_dir=model, max_seq_len=MAX_SEQ_LEN, output=output).report


def warnings(report: DatasetReport) -> dict[str, str]:
    return {warning["code"]: warning["message"] for warning in report.warnings}


@pytest.mark.parametrize("fmt", ROWS)
def test_rows_whose_whole_answer_is_cut_off_are_counted(fmt: str, tiny_model: Path, jsonl: Callable[..., Path]) -> None:
    report = check(jsonl(*rows(fmt)), tiny_model)
    assert (report.format or "").startswith(fmt) or fmt == "chat"
    assert (report.examples, report.stats["over_long"], report.stats["answer_cut_off"]) == (24, 12, 12)
    assert "12 rows (2, 4, 6, 8, 10, 12, 14, 16, 18, 20, ...)" in warnings(report)["answer_cut_off"]
    assert f"max_seq_len {MAX_SEQ_LEN}" in warnings(report)["answer_cut_off"]


@pytest.mark.parametrize("fmt", ROWS)
def test_packs_leave_the_counted_rows_out(
    fmt: str, tiny_model: Path, tokenizer: ChatTokenizer, jsonl: Callable[..., Path], tmp_path: Path
) -> None:
    report = check(jsonl(*rows(fmt)), tiny_model, tmp_path / "rows.parquet")
    manifest = build_pack(tmp_path / "rows.parquet", tokenizer, settings(), tmp_path / "pack", dataset_id="ds_1", kind=ROWS[fmt][0])
    assert manifest.dropped == {"answer_cut_off": report.stats["answer_cut_off"]}
    assert manifest.dropped_rows["answer_cut_off"] == list(range(2, 25, 2))


def settings() -> PackSettings:
    return PackSettings(max_seq_len=MAX_SEQ_LEN)


@pytest.mark.parametrize("fmt", ROWS)
def test_a_pack_of_nothing_but_cut_answers_is_refused_with_the_cause(
    fmt: str, tiny_model: Path, tokenizer: ChatTokenizer, jsonl: Callable[..., Path], tmp_path: Path
) -> None:
    check(jsonl(*(ROWS[fmt][1](f"{i} " * 200, i) for i in range(12))), tiny_model, tmp_path / "rows.parquet")
    with pytest.raises(
        InvalidDataset, match=r"max_seq_len 256 cuts off the whole answer of 12 rows .*raise max_seq_len, or shorten"
    ) as refused:
        build_pack(tmp_path / "rows.parquet", tokenizer, settings(), tmp_path / "pack", dataset_id="ds_1", kind=ROWS[fmt][0])
    assert refused.value.code == "answer_cut_off"


def test_a_rejected_answer_alone_may_be_cut_off(tiny_model: Path, jsonl: Callable[..., Path]) -> None:
    asked, context = {"role": "user", "content": "q"}, {"role": "user", "content": "b" * 300}
    answers = {"chosen": "a", "rejected": [{"role": "assistant", "content": "x"}, context, {"role": "assistant", "content": "y"}]}
    report = check(jsonl({"prompt": [asked], **answers}), tiny_model)
    assert report.stats["answer_cut_off"] == 0, "its first answer is trained"


@pytest.mark.parametrize("policy", ["drop", "reject"])
def test_rows_that_are_not_truncated_are_not_counted(policy: str, tiny_model: Path, jsonl: Callable[..., Path]) -> None:
    report = check(jsonl(*rows("chat")), tiny_model, over_long=policy)
    assert (report.stats["over_long"], report.stats["answer_cut_off"]) == (12, 0)


def test_answers_that_keep_a_token_and_texts_are_not_counted(tiny_model: Path, jsonl: Callable[..., Path]) -> None:
    assert check(jsonl(chat("q", "long " * 100)), tiny_model).stats["answer_cut_off"] == 0
    assert check(jsonl({"text": "long " * 100}, name="texts"), tiny_model).stats["answer_cut_off"] == 0


def test_an_answer_of_weight_0_is_not_what_is_cut_off(tiny_model: Path, tokenizer: ChatTokenizer, jsonl: Callable[..., Path]) -> None:
    turns = [("user", "q", 1), ("assistant", "a", 1), ("user", "b" * 300, 1), ("assistant", "c", 0)]
    path = jsonl({"messages": [{"role": role, "content": text, "weight": weight} for role, text, weight in turns]})
    assert check(path, tiny_model, path.with_name("rows")).stats["answer_cut_off"] == 0
    (example,) = load_rows(path.with_name("rows"))
    assert isinstance(example, Example)
    assert tokenizer.encode(example, max_seq_len=MAX_SEQ_LEN).num_trained_tokens > 0


def test_a_file_with_twelve_long_prompts_says_which(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "half.jsonl"
    path.write_bytes(shared_case("26b_half_cut.jsonl").read_bytes())
    report = check(path, tiny_model)
    assert report.stats["answer_cut_off"] == 12
    assert "12 rows (1, 3, 5," in warnings(report)["answer_cut_off"]
