"""Tool calls and results that do not belong together are warned about, with their rows; those that do are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.data.checks.tool_rows import WARNINGS, found_in
from engine.data.ingest import Policies, validate_file
from engine.data.schema import Example, Message, ToolCall

ASKED, DONE = Message(role="user", content="Water both."), Message(role="assistant", content="Done.")
TOOL = {"type": "function", "function": {"name": "water", "parameters": {"type": "object", "properties": {"plant": {"type": "string"}}}}}


def calls(*ids: str | None, name: str = "water", **arguments: Any) -> Message:
    return Message(role="assistant", tool_calls=tuple(ToolCall(name=name, arguments=arguments, id=id_) for id_ in ids))


def result(id_: str | None = None, content: str = "ok") -> Message:
    return Message(role="tool", content=content, tool_call_id=id_)


CASES: dict[str, tuple[tuple[Message, ...], set[str]]] = {
    "a call with its result": ((ASKED, calls("a"), result("a"), DONE), set()),
    "a call that is the answer": ((ASKED, calls("a", "b")), set()),
    "parallel calls answered in another order": ((ASKED, calls("a", "b"), result("b"), result("a"), DONE), set()),
    "ids that start again": ((ASKED, calls("a"), result("a"), DONE, ASKED, calls("a"), result("a"), DONE), set()),
    "calls without ids": ((ASKED, calls(None, None), result(), result(), DONE), set()),
    "one list for calls without ids": ((ASKED, calls(None, None), result(content='[{"ok": 1}, {"ok": 2}]'), DONE), set()),
    "results without ids": ((ASKED, calls("a", "b"), result(), result(), DONE), set()),
    "a call without a result": ((ASKED, calls("a", "b"), result("a"), DONE), {"missing_tool_result"}),
    "a call that the user interrupts": ((ASKED, calls("a"), ASKED, DONE), {"missing_tool_result"}),
    "one of two calls without ids": ((ASKED, calls(None, None), result(), DONE), {"missing_tool_result"}),
    "a result of no call": ((ASKED, calls("a"), result("a"), result("zzz"), DONE), {"orphaned_tool_result"}),
    "a result of a later call": ((ASKED, calls("a"), result("b"), DONE), {"missing_tool_result", "orphaned_tool_result"}),
    "one result too many": ((ASKED, calls(None), result(), result(), DONE), {"orphaned_tool_result"}),
    "two results of one call": ((ASKED, calls("a"), result("a"), result("a"), DONE), {"repeated_tool_call_id"}),
    "two calls with one id": ((ASKED, calls("a", "a"), result("a"), result("a"), DONE), {"repeated_tool_call_id"}),
    "a function that is not declared": ((ASKED, calls("a", name="feed")), {"undeclared_function"}),
    "a null that the schema does not allow": ((ASKED, calls("a", plant=None)), {"null_argument"}),
    "a null that the schema does not know": ((ASKED, calls("a", plant="ivy", ml=None)), {"null_argument"}),
}


@pytest.mark.parametrize("name", CASES)
def test_calls_and_results_are_paired(name: str) -> None:
    messages, found = CASES[name]
    assert set(found_in(Example(kind="chat", messages=messages, tools=(TOOL,)))) == found


def test_every_warning_has_a_case() -> None:
    assert {code for _, found in CASES.values() for code in found} == set(WARNINGS)


def test_both_answers_of_a_preference_are_looked_at() -> None:
    preference = Example(kind="preference", messages=(ASKED,), chosen=(DONE,), rejected=(calls("a", name="feed"),), tools=(TOOL,))
    assert set(found_in(preference)) == {"undeclared_function"}


def test_nulls_in_nested_arguments_are_found() -> None:
    inner = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": ["integer", "null"]}}}
    schema = {"type": "object", "properties": {"points": {"type": "array", "items": inner}}}
    tool = {"name": "draw", "parameters": schema}

    def found(point: dict[str, Any]) -> set[str]:
        return set(found_in(Example(kind="chat", messages=(ASKED, calls(None, name="draw", points=[{"x": 1}, point])), tools=(tool,))))

    assert found({"x": 1, "y": None}) == set()
    assert found({"x": None}) == {"null_argument"}


def test_a_warning_names_its_rows_and_keeps_them(jsonl: Callable[..., Path]) -> None:
    def row(number: int) -> dict[str, Any]:
        called = {"id": "a", "type": "function", "function": {"name": "water", "arguments": "{}"}}
        turns = [{"role": "user", "content": f"q {number}"}, {"role": "assistant", "content": None, "tool_calls": [called]}]
        results = [{"role": "tool", "tool_call_id": "a", "content": "ok"}] * (number % 2)
        return {"messages": [*turns, *results, {"role": "assistant", "content": f"a {number}"}], "tools": [TOOL]}

    path = jsonl(*map(row, range(24)))
    report = validate_file(path, filename=path.name, policies=Policies(near_duplicates="off"), block_bytes=1000).report
    assert report.examples == 24
    (warning,) = (w for w in report.warnings if w["code"] in WARNINGS)
    assert warning["code"] == "missing_tool_result"
    assert warning["message"].startswith("12 rows (1, 3, 5, 7, 9, 11, 13, 15, 17, 19, ...) hold a tool call")
