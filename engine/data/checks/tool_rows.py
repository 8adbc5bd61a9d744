"""Tool calls without a result, results without a call, and arguments that the tool's schema does not take: kept, with a warning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from core.typed_json import JsonObject
from engine.data.blocks.block_result import BlockResult, ReadRow
from engine.data.blocks.decision import Decision
from engine.data.checks.check import Check
from engine.data.readers.free_form import allows_null
from engine.data.schema import Example, Message

WARNINGS: Mapping[str, str] = {
    "missing_tool_result": "hold a tool call that the conversation goes on without a result of; add its tool message, or remove the call",
    "orphaned_tool_result": "hold a tool message whose tool_call_id belongs to no call before it; correct the id, or remove the message",
    "repeated_tool_call_id": "hold two calls in one turn, or two results, with the same id, so that it is open which belongs to which; "
    "give each call an id of its own",
    "undeclared_function": "call a function that their `tools` do not declare, so the model learns to call what it was not offered; add it "
    "to `tools`",
    "null_argument": "hold calls with a null argument that the tool's schema does not know or does not allow to be null, as pandas' "
    "to_json fills them in; leave such arguments out, or the model learns to write them",
}
"""Why each warning is given, after the number of its rows."""


class ToolCallsInRows(Check):
    name = "tool_calls"
    order = 32

    def screen(self, rows: list[ReadRow], result: BlockResult) -> list[ReadRow]:
        """Counts rows with each of :data:`WARNINGS`; keeps all."""
        for row in rows:
            if row.example.uses_tools():
                for code in sorted(set(found_in(row.example))):
                    result.note(code, row.number)
        return rows

    def warnings(self, total: BlockResult, decision: Decision) -> Iterator[tuple[str, str]]:  # noqa: ARG002 - no row is flagged
        for code, why in WARNINGS.items():
            if (noted := total.noted.get(code)) is not None:
                yield code, f"{noted.words()} {why}"


CHECK = ToolCallsInRows


def found_in(example: Example) -> Iterator[str]:
    """Yields the code of each finding in a row's conversation, or in both of a preference's."""
    sides: list[Sequence[Message]] = [example.messages]
    if example.kind == "preference":
        sides = [(*example.messages, *turns) for turns in (example.chosen, example.rejected)]
    functions = {str(f.get("name")): f for tool in example.tools if isinstance(f := tool.get("function", tool), dict)}
    for messages in sides:
        yield from _unpaired(messages)
        for call in (call for message in messages for call in message.tool_calls):
            if call.name not in functions:
                yield "undeclared_function"
            elif _has_stray_null(call.arguments, functions[call.name].get("parameters")):
                yield "null_argument"


def _unpaired(messages: Sequence[Message]) -> Iterator[str]:
    """Pairs calls and results by their ids; those without ids by their order, where one result may be a list for several calls."""
    waiting: list[str | None] = []
    answered: set[str] = set()
    for message in messages:
        if message.role == "tool":
            yield from _answer(message, waiting, answered)
            continue
        if waiting:
            yield "missing_tool_result"
        waiting = [call.id for call in message.tool_calls]
        given = [id_ for id_ in waiting if id_ is not None]
        answered -= set(given)  # ids may start again in each turn
        if len(set(given)) < len(given):
            yield "repeated_tool_call_id"


def _answer(message: Message, waiting: list[str | None], answered: set[str]) -> Iterator[str]:
    """Removes what a tool message answers from the `waiting` calls."""
    id_ = message.tool_call_id
    if id_ is not None and id_ in waiting:
        waiting.remove(id_)
        answered.add(id_)
    elif id_ is not None and id_ in answered:
        yield "repeated_tool_call_id"
    elif waiting and (id_ is None or None in waiting):
        waiting.remove(None if None in waiting else waiting[0])
        if id_ is None and (message.content or "").lstrip().startswith("["):
            waiting.clear()
    else:
        yield "orphaned_tool_result"


def _has_stray_null(value: Any, schema: JsonObject | None) -> bool:
    """Returns whether `value` has a null under a key that its schema lists without null, or does not list."""
    known = schema.get("properties") if isinstance(schema, dict) else None
    if isinstance(value, list):
        return any(_has_stray_null(item, schema.get("items") if isinstance(schema, dict) else None) for item in value)
    if not isinstance(value, dict) or not isinstance(known, dict):
        return False
    return any(
        (key not in known or not allows_null(known[key])) if item is None else _has_stray_null(item, known.get(key))
        for key, item in value.items()
    )
