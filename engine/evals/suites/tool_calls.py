"""Tool calls of answers and of rows, compared as values.

Answers and expected calls are compared in one canonical form, a JSON array of ``{"name", "arguments"}``. Calls of one turn are parallel, so
their order does not count. :mod:`engine.data.tokens.call_form` reads them from generated text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.data import RenderedCall
from engine.evals.suites.answer_metrics import parse_json, same_json

SURROGATE = re.compile(r"[\ud800-\udfff]")


def canonical(calls: Sequence[RenderedCall]) -> str:
    """Returns calls as the text that answers and expected answers are compared by.

    Half a surrogate pair, which cannot be stored, is replaced.
    """
    text = json.dumps([{"name": c["name"], "arguments": c["arguments"]} for c in calls], ensure_ascii=False)
    return SURROGATE.sub("\ufffd", text)


def calls_of(text: str) -> list[RenderedCall]:
    """Returns the calls of a canonical text; none of any other text."""
    found = parse_json(text)
    if not isinstance(found, list) or not all(isinstance(c, dict) and c.keys() == {"name", "arguments"} for c in found):
        return []
    return found


def tool_names(output: str, expected: str) -> float:
    """Returns 1.0 if the same tools are called, each as often."""
    return float(sorted(str(c["name"]) for c in calls_of(output)) == sorted(str(c["name"]) for c in calls_of(expected)))


def tool_calls(output: str, expected: str) -> float:
    """Returns 1.0 if the same tools are called with equal arguments."""
    return float(tool_arguments(output, expected) == 1.0)


def tool_arguments(output: str, expected: str) -> float:
    """Returns the share of arguments that are right: of each expected call the fields with equal values, in the most similar call of the
    same tool. Fields and calls that are not expected count as wrong."""
    left, shares = calls_of(output), []
    wanted = calls_of(expected)
    for call in wanted:
        same = [(_share(call["arguments"], given["arguments"]), -at) for at, given in enumerate(left) if given["name"] == call["name"]]
        share, at = max(same, default=(0.0, 1))
        shares.append(share)
        if at <= 0:
            left.pop(-at)
    return sum(shares) / (len(wanted) + len(left)) if wanted else 0.0


def _share(wanted: Any, given: Any) -> float:
    if not isinstance(wanted, dict) or not isinstance(given, dict):
        return 0.0
    right = sum(key in given and same_json(given[key], value) for key, value in wanted.items())
    return right / len(wanted.keys() | given.keys()) if wanted or given else 1.0


METRICS: Mapping[str, Callable[[str, str], float]] = {
    "tool_calls": tool_calls,
    "tool_names": tool_names,
    "tool_arguments": tool_arguments,
}
"""Scores of items whose expected answer is calls, from 0 to 1: ``(output, expected)``, both canonical."""
TOOL_CHOICE = "tool_choice"
"""Score of every item that offers tools: 1.0 if the answer calls a tool exactly when calls are expected."""


def tool_choice(output: str, *, calls: bool) -> float:
    return float(bool(calls_of(output)) == calls)
