"""What ``ft`` does without an API: help, usage, checks of files, and clear words when there is nothing to talk to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

COMMANDS = (
    "up", "down", "status", "env", "login", "check", "upload", "submit", "jobs", "job", "logs", "cancel", "pause", "resume", "promote",
    "rollback", "chat", "adapters", "models", "admin",
)  # fmt: skip
Ft = Callable[..., Any]
"""Runs ``ft`` with these arguments; see the fixtures."""


def test_help_names_every_command(offline: Ft) -> None:
    done = offline("--help")
    assert done.code == 0
    for command in COMMANDS:
        assert f"\n  {command} " in done.out, command


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["nonsense"], "No such command"),
        (["submit", "no-such-file.jsonl"], "neither a file here nor the id of an uploaded one"),
        (["submit", "file-1", "--hp", "n_epochs"], "write --hp n_epochs=3"),
        (["check", "x.csv", "--map", "text"], "write --map text=prompt"),
        (["admin", "tenants", "create"], "Missing argument"),
    ],
)
def test_a_usage_error_has_exit_code_2_and_says_what_to_write(offline: Ft, args: list[str], says: str) -> None:
    done = offline(*args)
    assert done.code == 2
    assert says in " ".join(done.err.split())
    assert done.out == ""


def test_without_a_key_the_message_says_how_to_get_one(offline: Ft) -> None:
    done = offline("jobs")
    assert done.code == 1
    assert "[no_api_key]" in done.err
    assert "ft login" in done.err


def test_an_api_that_does_not_answer_is_exit_code_4_and_names_the_way_out(offline: Ft) -> None:
    done = offline("--url", "http://127.0.0.1:9", "--api-key", "x", "models", "--json")
    assert done.code == 4
    assert "ft up" in done.err
    assert done.json["error"]["code"] == "unreachable"


def test_nothing_running_is_said_and_is_no_error_to_end(offline: Ft) -> None:
    done = offline("down")
    assert done.code == 0
    assert "nothing runs in" in done.err
    status = offline("status", "--json")
    assert status.code == 4
    assert status.json["phase"] == "stopped"
    assert {s["name"] for s in status.json["services"]} >= {"postgres", "dagster", "api", "inference"}
    assert offline("env").code == 4
    assert "ft up" in offline("admin", "tenants", "list").err


def test_a_valid_file_passes_the_check(offline: Ft, write_chat_rows: Callable[..., Path]) -> None:
    done = offline("check", write_chat_rows(120))
    assert done.code == 0
    assert "valid" in done.out
    assert "120 rows, 120 kept" in done.out


def test_every_bad_row_is_listed_with_its_fix(offline: Ft, write_chat_rows: Callable[..., Path]) -> None:
    path = write_chat_rows(120)
    lines = path.read_text().splitlines()
    lines[4], lines[90] = '{"messages": [', json.dumps({"messages": [{"role": "robot", "content": "x"}]})
    path.write_text("\n".join(lines))
    done = offline("check", path)
    assert done.code == 1
    assert "NOT VALID" in done.out
    assert "row 5 (byte " in done.out
    assert "row 91 (byte " in done.out
    assert "[invalid_role]" in done.out
    assert done.out.count("fix: ") >= 2
    report = offline("check", path, "--json")
    assert report.code == 1
    assert {e["row"] for e in report.json["errors"]} == {5, 91}


def test_columns_of_a_csv_can_be_mapped(offline: Ft, tmp_path: Path) -> None:
    path = tmp_path / "questions.csv"
    path.write_text("ticket,category\n" + "".join(f"question {i},label {i % 7}\n" for i in range(120)))
    assert offline("check", path).code == 1
    mapped = offline("check", path, "--map", "ticket=prompt,category=completion", "--json")
    assert mapped.code == 0
    assert mapped.json["examples"] == 120


def test_a_file_that_is_not_there_is_exit_code_2(offline: Ft, tmp_path: Path) -> None:
    assert offline("check", tmp_path / "none.jsonl").code == 2
    assert offline("check", tmp_path).code == 2
