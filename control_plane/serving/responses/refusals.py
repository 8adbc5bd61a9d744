"""Refusals of ``/v1/responses``, and the way back from a path in the chat completion to the caller's own field."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from core.errors import InvalidRequest

MAX_SHOWN = 60
"""Characters of a caller's own value that an error repeats."""
FIELD_OF: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""The field of a response request that became this one of the chat completion."""
NESTED = re.compile(r"^((?:tools|input)\[\d+\]|tool_choice)\.function\.")
"""Functions of tools and calls are nested in chat completions only."""


def unsupported(path: str, value: Any, advice: str) -> InvalidRequest:
    """Return the refusal of a field that OpenAI has and this platform does not."""
    return InvalidRequest(f"{path} {shown(value)} is not supported: {advice}", code="unsupported_parameter", param=path)


def wrong_type(path: str, value: Any, wanted: str) -> InvalidRequest:
    return InvalidRequest(f"{path} {shown(value)} is not valid: write {wanted}", code="invalid_type", param=path)


def shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=True, default=str)[:MAX_SHOWN]


def refuse_others(given: Mapping[str, Any], known: frozenset[str], path: str) -> None:
    """Refuse fields outside `known`; null, false and empty ones are absent."""
    for name, value in given.items():
        if name not in known and value not in (None, False, "", [], {}):
            raise unsupported(f"{path}.{name[:MAX_SHOWN]}", value, f"remove it; known are {', '.join(sorted(known))}")


def to_callers_words(message: str, param: str | None, places: Mapping[str, str]) -> tuple[str, str | None]:
    """Return an error's message and param with the caller's own path instead of that of the chat completion.

    `places` maps paths such as ``messages[2].tool_calls[0]`` to items such as ``input[3]``; the longest that fits is replaced.
    """
    if param is None:
        return message, None
    own = param
    fitting = [place for place in places if param == place or param.startswith((f"{place}.", f"{place}["))]
    if fitting:
        longest = max(fitting, key=len)
        own = places[longest] + param.removeprefix(longest)
    else:
        head, dot, rest = param.partition(".")
        own = FIELD_OF.get(head, head) + dot + rest
    own = NESTED.sub(r"\1.", own)
    return re.sub(rf"\b{re.escape(param)}(?!\w)", lambda _: own, message), own
