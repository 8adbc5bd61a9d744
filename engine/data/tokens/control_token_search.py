"""Control tokens of the base model inside content, which would be tokenized as real ones."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator

from engine.data.problems import Problem
from engine.data.schema import Example

CODE = "control_token_in_content"
MESSAGE = "contains {token!r}, a control token of the base model's tokenizer"
FIX = "remove {token!r} or spell it another way"


def control_token_pattern(tokens: Iterable[str]) -> re.Pattern[str]:
    """Returns a pattern for any of `tokens`, longest first; without tokens it matches nothing."""
    longest_first = sorted(set(tokens), key=lambda t: (-len(t), t))
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def first_match(example: Example, pattern: re.Pattern[str]) -> tuple[str, str] | None:
    """Returns the first match of `pattern` in the example's texts as (path, match): contents, names, tool calls, tools."""
    for path, text in _texts(example):
        if match := pattern.search(text):
            return path, match.group()
    return None


def control_token_problems(example: Example, pattern: re.Pattern[str]) -> list[Problem]:
    """Returns the problem of the first control token in content, if there is one."""
    found = first_match(example, pattern)
    if found is None:
        return []
    path, token = found
    return [Problem(CODE, MESSAGE.format(token=token), path=path, fix=FIX.format(token=token))]


def _texts(example: Example) -> Iterator[tuple[str, str]]:
    for name, group in (("messages", example.messages), ("chosen", example.chosen), ("rejected", example.rejected)):
        for index, message in enumerate(group):
            yield f"{name}[{index}].content", message.content or ""
            for field in ("name", "reasoning", "tool_call_id"):
                if (text := getattr(message, field)) is not None:
                    yield f"{name}[{index}].{field}", text
            for position, call in enumerate(message.tool_calls):
                spelled = f"{call.id or ''} {call.name} {json.dumps(call.arguments, ensure_ascii=False)}"
                yield f"{name}[{index}].tool_calls[{position}]", spelled
    if example.text is not None:
        yield "text", example.text
    if example.tools:
        yield "tools", json.dumps(example.tools, ensure_ascii=False)
