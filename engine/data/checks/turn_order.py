"""Errors in an example of the right shape: order of roles, empty answers, nothing to train on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from engine.data.problems import Problem
from engine.data.schema import Example, Message


def order_problems(example: Example) -> Iterator[Problem]:
    """Checks roles and answers of a chat, of both continuations of a preference, or the text."""
    if example.kind == "text":
        if not (example.text or "").strip():
            yield Problem("empty_content", "the text is empty", path="text", fix="remove the row")
    elif example.kind != "preference":
        yield from _turns(example.messages, "messages")
        yield from _ending(example.messages, "messages")
        if all(m.weight == 0 for m in example.messages if m.role == "assistant") and any(m.role == "assistant" for m in example.messages):
            fix = "give at least one assistant message weight 1"
            yield Problem("nothing_to_train", "every assistant message has weight 0", path="messages", fix=fix)
    else:
        yield from _turns(example.messages, "prompt")
        for path, turns in (("chosen", example.chosen), ("rejected", example.rejected)):
            yield from _turns((*example.messages, *turns), path, skip=len(example.messages))
            yield from _ending(turns, path)
        if example.chosen and example.chosen == example.rejected:
            fix = "remove the row, or correct one of the answers"
            yield Problem("identical_preference", "chosen and rejected are the same", path="chosen", fix=fix)


def _turns(messages: tuple[Message, ...], path: str, *, skip: int = 0) -> Iterator[Problem]:
    """Yields problems of the messages from index `skip` on; earlier ones are context only."""
    requested = called = False
    for index, message in enumerate(messages):
        where = f"{path}[{index - skip}]"
        found: Problem | None = None
        if message.role == "system" and index > 0:
            fix = "put system text into the first message"
            found = Problem("system_not_first", f"system message at position {index + 1}", path=f"{where}.role", fix=fix)
        elif message.role == "assistant" and not requested:
            fix = "put a user message before it"
            found = Problem("no_user_before_assistant", "this assistant turn answers no user turn", path=f"{where}.role", fix=fix)
        elif message.role == "tool" and not called:
            fix = "put the assistant message with tool_calls before it"
            found = Problem("unexpected_tool_message", "no tool call came before it", path=f"{where}.role", fix=fix)
        if found is not None and index >= skip:
            yield found
        if index >= skip and message.role == "assistant" and not message.tool_calls and not (message.content or "").strip():
            yield Problem(
                "empty_content", "the assistant message is empty", path=f"{where}.content", fix="write the answer or remove the row"
            )
        requested = requested or message.role == "user"
        called = called or bool(message.tool_calls)


def _ending(messages: tuple[Message, ...], path: str) -> Iterator[Problem]:
    if messages and messages[-1].role != "assistant":
        message = f"the last message is from {messages[-1].role}"
        yield Problem("last_not_assistant", message, path=f"{path}[{len(messages) - 1}].role", fix="end with the assistant's answer")


def has_consecutive_turns(example: Example) -> bool:
    """Returns whether two user or two assistant messages are adjacent, which the chat templates of Mistral and Gemma refuse."""
    roles = [m.role for m in (*example.messages, *example.chosen)]
    return any(one == other and one in ("user", "assistant") for one, other in itertools.pairwise(roles))
