"""Errors in an example of the right shape: order of roles, empty answers, control tokens, length.

Each check takes an example and yields problems; none raises or looks at other rows.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator

from ft_assets.datasets.report.problems import Problem
from ft_assets.datasets.schema import Example, Message

SUSPECT = re.compile(r"<\|[A-Za-z0-9_]{2,40}\|>")
"""Text that looks like a control token: a warning while the base model is unknown."""


def control_token_pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern for any of `tokens`, longest first; without tokens it matches nothing."""
    longest_first = sorted(set(tokens), key=lambda t: (-len(t), t))
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def order_problems(example: Example) -> Iterator[Problem]:
    """Checks roles and answers of a chat, of both continuations of a preference, or the text."""
    if example.kind == "text":
        if not (example.text or "").strip():
            yield Problem(path="text", code="empty_content", message="the text is empty", fix="remove the row")
    elif example.kind != "preference":
        yield from _turns(example.messages, "messages")
        yield from _ending(example.messages, "messages")
        if all(m.weight == 0 for m in example.messages if m.role == "assistant") and any(m.role == "assistant" for m in example.messages):
            fix = "give at least one assistant message weight 1"
            yield Problem(path="messages", code="nothing_to_train", message="every assistant message has weight 0", fix=fix)
    else:
        yield from _turns(example.messages, "prompt")
        for path, turns in (("chosen", example.chosen), ("rejected", example.rejected)):
            yield from _turns((*example.messages, *turns), path, skip=len(example.messages))
            yield from _ending(turns, path)
        if example.chosen and example.chosen == example.rejected:
            fix = "remove the row, or correct one of the answers"
            yield Problem(path="chosen", code="identical_preference", message="chosen and rejected are the same", fix=fix)


def _turns(messages: tuple[Message, ...], path: str, *, skip: int = 0) -> Iterator[Problem]:
    """Yields problems of the messages from index `skip` on; earlier ones are context only."""
    requested = called = False
    for index, message in enumerate(messages):
        where = f"{path}[{index - skip}]"
        found: Problem | None = None
        if message.role == "system" and index > 0:
            fix = "put system text into the first message"
            found = Problem(path=f"{where}.role", code="system_not_first", message=f"system message at position {index + 1}", fix=fix)
        elif message.role == "assistant" and not requested:
            fix = "put a user message before it"
            found = Problem(
                path=f"{where}.role", code="no_user_before_assistant", message="this assistant turn answers no user turn", fix=fix
            )
        elif message.role == "tool" and not called:
            fix = "put the assistant message with tool_calls before it"
            found = Problem(path=f"{where}.role", code="unexpected_tool_message", message="no tool call came before it", fix=fix)
        if found is not None and index >= skip:
            yield found
        if index >= skip and message.role == "assistant" and not message.tool_calls and not (message.content or "").strip():
            yield Problem(
                path=f"{where}.content",
                code="empty_content",
                message="the assistant message is empty",
                fix="write the answer or remove the row",
            )
        requested = requested or message.role == "user"
        called = called or bool(message.tool_calls)


def _ending(messages: tuple[Message, ...], path: str) -> Iterator[Problem]:
    if messages and messages[-1].role != "assistant":
        message = f"the last message is from {messages[-1].role}"
        yield Problem(
            path=f"{path}[{len(messages) - 1}].role", code="last_not_assistant", message=message, fix="end with the assistant's answer"
        )


def has_consecutive_turns(example: Example) -> bool:
    """Returns whether two user or two assistant messages are adjacent, which the chat templates of Mistral and Gemma refuse."""
    roles = [m.role for m in (*example.messages, *example.chosen)]
    return any(one == other and one in ("user", "assistant") for one, other in itertools.pairwise(roles))


def first_match(example: Example, pattern: re.Pattern[str]) -> tuple[str, str] | None:
    """Returns the first match of `pattern` in the example's texts as (path, match): contents, names, tool calls, tools."""
    for path, text in _texts(example):
        if match := pattern.search(text):
            return path, match.group()
    return None


def control_token_problems(example: Example, pattern: re.Pattern[str]) -> Iterator[Problem]:
    """Reports control tokens in content: they would be tokenized as real ones and could end or forge a turn."""
    if (found := first_match(example, pattern)) is not None:
        path, token = found
        message = f"contains {token!r}, a control token of the base model's tokenizer"
        yield Problem(path=path, code="control_token_in_content", message=message, fix=f"remove {token!r} or spell it another way")


def _texts(example: Example) -> Iterator[tuple[str, str]]:
    for name, group in (("messages", example.messages), ("chosen", example.chosen), ("rejected", example.rejected)):
        for index, message in enumerate(group):
            yield f"{name}[{index}].content", message.content or ""
            if message.name is not None:
                yield f"{name}[{index}].name", message.name
            if message.reasoning is not None:
                yield f"{name}[{index}].reasoning", message.reasoning
            if message.tool_call_id is not None:
                yield f"{name}[{index}].tool_call_id", message.tool_call_id
            for position, call in enumerate(message.tool_calls):
                spelled = f"{call.id or ''} {call.name} {json.dumps(call.arguments, ensure_ascii=False)}"
                yield f"{name}[{index}].tool_calls[{position}]", spelled
    if example.text is not None:
        yield "text", example.text
    if example.tools:
        yield "tools", json.dumps(example.tools, ensure_ascii=False)


def length_problem(num_tokens: int, max_seq_len: int, *, at_least: bool = False) -> Problem:
    message = f"{'at least ' if at_least else ''}{num_tokens} tokens, over max_seq_len {max_seq_len}"
    return Problem(path="", code="example_too_long", message=message, fix="shorten it, raise max_seq_len, or choose the policy 'truncate'")
