"""What docs/moving.md says of files and settings from elsewhere is what happens to them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from control_plane.jobs.submission import HYPERPARAMETER_ALIASES, JobRequest
from core.base_models import ENGINE_RANKS
from core.errors import InvalidRequest
from engine.data import shapes
from engine.training import methods
from engine.training.requested_hyperparameters import HYPERPARAMETER_LIMITS, checked_hyperparameters
from ft_client.cli.command_tree import build
from tests.docs.moving_rows import PAGE, ROWS, many

RUNNER, APP = CliRunner(), build()
READ_AS = {
    ("OpenAI", 0): ("chat", []),
    ("OpenAI", 1): ("preference", []),
    ("Together", 0): ("prompt_completion", []),
    ("Axolotl", 0): ("chat", ["conversations[].train"]),
    ("LLaMA-Factory", 0): ("prompt_completion", []),
    ("LLaMA-Factory", 1): ("chat", []),
    ("TRL", 0): ("prompt_completion", []),
    ("TRL", 1): ("preference", []),
    ("TRL", 2): ("kto", []),
}
"""Per row of the page: the format that it is read as, and the fields that are ignored with a warning."""


def check(path: Path, rows: list[dict[str, Any]], *options: str) -> dict[str, Any]:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = RUNNER.invoke(APP, ["check", str(path), "--json", *options])
    assert done.exit_code in (0, 1), done.output
    return dict(json.loads(done.stdout))


def test_the_page_has_the_rows_that_are_tested() -> None:
    assert set(ROWS) == set(READ_AS)


@pytest.mark.parametrize("which", READ_AS, ids=lambda which: f"{which[0]} {which[1] + 1}")
def test_a_row_from_elsewhere_is_read_and_what_is_ignored_is_named(tmp_path: Path, which: tuple[str, int]) -> None:
    report = check(tmp_path / "rows.jsonl", many(ROWS[which], 120))
    fmt, ignored = READ_AS[which]
    assert report["valid"], report["errors"][:2]
    assert (report["format"], report["rows"]) == (fmt, 120)
    named = [w["message"].partition(" is read by nothing")[0].strip("'") for w in report["warnings"] if w["code"] == "unknown_field"]
    assert named == ignored


def test_loss_lies_where_the_page_says() -> None:
    read = {}
    for which, row in ROWS.items():
        found = shapes.detect_shape(row)
        assert found is not None
        example, problems = shapes.to_example(row, found[0], row=1)
        assert example is not None, problems
        read[which] = [(m.role, m.weight) for m in example.messages if m.role == "assistant"]
    assert read["OpenAI", 0] == [("assistant", 0), ("assistant", 1)]
    assert read["LLaMA-Factory", 0] == [("assistant", 0), ("assistant", 1)], "answers in history carry none"
    assert read["Axolotl", 0] == [("assistant", 1)]
    without, _ = shapes.to_example(
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes?", "train": False}]}, "chat", row=1
    )
    assert without is not None
    assert [m.weight for m in without.messages] == [1, 1], "`train` is ignored"
    alpaca, _ = shapes.to_example(ROWS["LLaMA-Factory", 0], "prompt_completion", row=1)
    assert alpaca is not None
    assert [m.role for m in alpaca.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert alpaca.messages[3].content == "Answer the customer.\n\nMy router is broken."


@pytest.mark.parametrize(
    ("row", "code"),
    [
        pytest.param(
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
                    {"role": "assistant", "content": "A"},
                ]
            },
            "unsupported_content",
            id="OpenAI's images",
        ),
        pytest.param({"input_ids": [1, 2], "labels": [1, 2]}, "unknown_row_shape", id="Together's tokens"),
        pytest.param({"segments": [{"label": True, "text": "A"}]}, "unknown_row_shape", id="Axolotl's input_output"),
        pytest.param({"prompt": "A"}, "unknown_row_shape", id="TRL's prompt-only"),
        pytest.param({"prompt": "A", "completions": ["B"], "labels": [True]}, "unknown_row_shape", id="TRL's stepwise supervision"),
    ],
)
def test_a_row_that_the_page_calls_refused_is_bad(tmp_path: Path, row: dict[str, Any], code: str) -> None:
    report = check(tmp_path / "rows.jsonl", [row] * 20)
    assert not report["valid"]
    assert report["error_counts"].get(code) == 20


def test_kto_rows_of_llama_factory_are_ignored_labels_until_they_are_mapped(tmp_path: Path) -> None:
    rows = many({"instruction": "My router is broken.", "output": "Send it in.", "kto_tag": True}, 120)
    report = check(tmp_path / "kto.jsonl", rows)
    assert report["format"] == "prompt_completion"
    assert "unknown_field" in [w["code"] for w in report["warnings"]]
    mapped = check(tmp_path / "kto.jsonl", rows, "--map", "instruction=prompt,output=completion,kto_tag=label")
    assert (mapped["valid"], mapped["format"]) == (True, "kto")


def settings() -> list[list[str]]:
    """Cells of the table of settings, without its head."""
    table = PAGE.partition("## Settings")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| `")]
    return [row for row in rows if len(row) == 6]


def names(cell: str) -> list[str]:
    return re.findall(r"`([a-z_]+)`", cell)


KNOWN = {*HYPERPARAMETER_LIMITS, *HYPERPARAMETER_ALIASES} | {
    name for method in methods.registered_methods().values() for name in method.settings
}


def test_every_setting_of_the_table_exists_here() -> None:
    assert len(settings()) > 15
    ours = [name for row in settings() for name in names(row[0].partition(":")[0].partition(" of ")[0])]
    assert set(ours) <= KNOWN
    ranks = next(row[0] for row in settings() if "lora_rank" in row[0]).partition(":")[2]
    assert {int(n) for n in re.findall(r"\d+", ranks)} == set(ENGINE_RANKS)


def test_a_setting_under_the_name_of_another_tool_is_refused_by_name() -> None:
    theirs = sorted({name for row in settings() for cell in row[1:] for name in names(cell)} - KNOWN)
    assert {"lora_r", "num_train_epochs", "sequence_len", "cutoff_len"} <= set(theirs)
    for name in (*theirs, "modules_to_save", "bias", "added_tokens"):
        with pytest.raises(InvalidRequest) as refused:
            checked_hyperparameters({name: 1})
        assert (refused.value.code, refused.value.param) == ("invalid_hyperparameter", f"hyperparameters.{name}")
    with pytest.raises(InvalidRequest, match="rank 4 is not"):
        checked_hyperparameters({"rank": 4})


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({"wandb_project": "mine"}, "unknown_parameter"),
        ({"report_to": "wandb"}, "unknown_parameter"),
        ({"n_checkpoints": 2}, "unknown_parameter"),
        ({"method": {"type": "reinforcement"}}, "unsupported_method"),
        ({"method": "grpo"}, "unsupported_method"),
    ],
)
def test_a_request_that_the_page_calls_refused_is_refused(more: dict[str, Any], code: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        JobRequest.from_body({"model": "demo-llama-3m", "training_file": "file-1", **more})
    assert refused.value.code == code
