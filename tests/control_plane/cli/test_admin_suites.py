"""``ft admin contamination``: lists that ship, and public benchmarks registered by one command."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from control_plane.platform.context import Platform


def test_a_benchmark_is_registered_from_a_local_file_by_its_name_alone(
    offline: Callable[..., Any], fresh_platform: Platform, tmp_path: Path
) -> None:
    env = {"FT_DATABASE_URL": str(fresh_platform.settings.database_url)}
    rows = [{"question": f"Why is it {i}?", "best_answer": "So.", "correct_answers": ["So.", "Because."]} for i in range(4)]
    file = tmp_path / "validation.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = offline("admin", "contamination", "add-benchmark", "truthfulqa", file, "--json", **env)
    assert made.code == 0, made.err
    assert (made.json["num_items"], made.json["field"]) == (4, "question,best_answer,correct_answers")
    listed = offline("admin", "suites", "list", "--json", **env).json
    assert [(s["name"], s["owner"]) for s in listed] == [("gsm8k", "platform"), ("truthfulqa", "operator")]
    refused = offline("admin", "contamination", "add-benchmark", "mmlu", file, **env)
    assert refused.code == 1
    assert "mmlu needs question,choices or question,A,B,C,D" in refused.err


def test_what_an_operators_command_writes_below_the_home_is_for_its_owner_alone(
    offline: Callable[..., Any], fresh_platform: Platform, tmp_path: Path
) -> None:
    (tmp_path / "home").mkdir(mode=0o700)
    file = tmp_path / "validation.jsonl"
    file.write_text(json.dumps({"question": "Why is it so?", "best_answer": "So.", "correct_answers": ["So."]}) + "\n")
    before = os.umask(0o022)
    try:
        made = offline(
            "admin", "contamination", "add-benchmark", "truthfulqa", file, FT_DATABASE_URL=str(fresh_platform.settings.database_url)
        )
    finally:
        os.umask(before)
    assert made.code == 0, made.err
    written = {str(path): oct(path.stat().st_mode) for path in (tmp_path / "home").rglob("*")}
    assert any(name.endswith(".json") or "suites" in name for name in written)
    assert {name: mode for name, mode in written.items() if int(mode, 8) & 0o077} == {}
