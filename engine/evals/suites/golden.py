"""The golden set: generic prompts that a healthy model answers, whatever it was tuned for.

Answers are not compared with a correct one. Two properties are checked separately: whether an answer is coherent, which distinguishes
speech from the noise of a broken adapter, and, for prompts that require a form (JSON, a list, one word), whether it has that form. A small
base may fail at forms and still be healthy, so the gate uses coherence; a fall of form is shown beside it.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from engine.evals.suites.answer_metrics import NOT_JSON, parse_json

MIN_CHARS_TO_LOOP = 40
"""Words below which an answer ("no no no") is not called a loop."""
MAX_PERIOD = 60
"""Longest unit, in characters, whose endless repetition is detected."""
LOOP_SHARE = 0.6
"""Share of an answer above which one repeated unit makes it a loop."""
JUNK_SHARE = 0.2
"""Share of replacement, control or unassigned characters above which an answer is noise: readable text in any script has almost none."""
WRONG_FORMAT = "wrong_format"
EMPTY = "empty"

Check = Mapping[str, Any]
"""``{"kind": name of a check, ...}`` with its parameters; see :data:`FORMS`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    id: str
    prompt: str
    check: Check | None = field(default=None, hash=False)
    """The form that the prompt requires; None if any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Faults of an answer."""

    fault: str | None
    """``empty``, ``repeating``, ``degenerate`` or ``wrong_format``; None without a fault. An incoherent answer has no form either."""
    coherent: float
    format: float | None
    """1.0 for the required form; None if none is required."""


@cache
def _file() -> tuple[str, tuple[Prompt, ...]]:
    lines = resources.files(__package__).joinpath("golden.jsonl").read_text(encoding="utf-8").splitlines()
    header, *rows = [json.loads(line) for line in lines if line.strip()]
    return str(header["version"]), tuple(Prompt(**row) for row in rows)


def version() -> str:
    """Raised with every change of a prompt or a check."""
    return _file()[0]


def golden_prompts() -> tuple[Prompt, ...]:
    """Returns every golden prompt, in file order."""
    return _file()[1]


@cache
def _checks() -> dict[str, Check]:
    return {p.id: p.check for p in golden_prompts() if p.check}


def formatted_ids() -> tuple[str, ...]:
    """Prompts that require a form: the share of correct forms is taken over them."""
    return tuple(_checks())


def judge(prompt_id: str, text: str) -> Verdict:
    """Returns the faults of the answer `text` to a golden prompt, if any."""
    check, incoherent = _checks().get(prompt_id), fault(text)
    right = None if check is None else float(incoherent is None and has_form(check, text))
    return Verdict(fault=incoherent or (WRONG_FORMAT if right == 0.0 else None), coherent=float(incoherent is None), format=right)


def fault(text: str) -> str | None:
    """Returns why `text` is not coherent: ``empty``, ``repeating`` or ``degenerate``; None if it is."""
    stripped = text.strip()
    if not stripped:
        return EMPTY
    if sum(_is_junk(c) for c in stripped) > JUNK_SHARE * len(stripped):
        return "degenerate"
    if not any(c.isalnum() for c in stripped) and len(stripped) > 3:
        return "degenerate"
    if looping_share(stripped) > LOOP_SHARE:
        return "repeating"
    return None


def _is_junk(char: str) -> bool:
    return char == "\ufffd" or (unicodedata.category(char) in {"Cc", "Cn", "Co", "Cs"} and char not in "\n\r\t")


def looping_share(text: str) -> float:
    """Returns the share of `text` in its longest run of one unit repeated at least three times."""
    if len(text) < MIN_CHARS_TO_LOOP:
        return 0.0
    longest = 0
    for period in range(1, min(MAX_PERIOD, len(text) // 3) + 1):
        run = 0
        for i in range(period, len(text)):
            run = run + 1 if text[i] == text[i - period] else 0
            if run >= 2 * period and run + period > longest:
                longest = run + period
    return longest / len(text)


def has_form(check: Check, text: str) -> bool:
    """Returns whether `text` has the form that `check` requires; a Markdown fence around the whole answer is allowed."""
    return FORMS[check["kind"]](_unfenced(text), check)


def _unfenced(text: str) -> str:
    found = re.fullmatch(r"\s*```\w*\n(.*?)\n?```\s*", text, re.DOTALL)
    return (found[1] if found else text).strip()


def _json(text: str, check: Check) -> bool:
    value = parse_json(text)
    return value is not NOT_JSON and isinstance(value, dict) and set(check["keys"]) <= value.keys()


def _json_list(text: str, check: Check) -> bool:
    value = parse_json(text)
    return isinstance(value, list) and len(value) == int(check["items"])


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def _sentences(text: str) -> list[str]:
    return [s for s in re.split(r"(?<=[.!?\u3002\uff01\uff1f])\s+", text) if any(c.isalnum() for c in s)]


def _number(text: str, _check: Check) -> bool:
    """Digits, or one of the words for a small number; nothing else."""
    bare = text.strip(" .!").casefold()
    return bool(re.fullmatch(r"[-+]?\d[\d,. ]*", bare)) or bare in NUMBER_WORDS


NUMBER_WORDS = frozenset({"zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"})
FORMS: Mapping[str, Callable[[str, Check], bool]] = {
    "json": _json,
    "json_list": _json_list,
    # an introduction that ends with a colon is not an item
    "list": lambda text, check: sum(not line.rstrip().endswith(":") for line in _lines(text)) == int(check["items"]),
    "lines": lambda text, check: len(_lines(text)) == int(check["count"]),
    "sentences": lambda text, check: len(_sentences(text)) == int(check["count"]),
    "words": lambda text, check: 1 <= len(text.split()) <= int(check["most"]),
    "number": _number,
    "one_of": lambda text, check: text.strip(" .,!\"'").casefold() in tuple(check["options"]),
    "pattern": lambda text, check: re.fullmatch(check["pattern"], text, re.DOTALL) is not None,
}
