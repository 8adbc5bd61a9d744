"""The golden set: generic prompts on which a healthy model says something, whatever it was tuned for.

Answers are not compared with a right one. Two things are looked at, apart: whether an answer is coherent, which tells speech from the
noise of a broken adapter, and, of prompts that ask for a form (JSON, a list, one word), whether it has that form. A small base may
fail at forms and still be whole, so the gate goes by coherence; a fall of form is shown beside it.
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

from ft_assets.evals.suites.answer_metrics import NOT_JSON, parse_json

MIN_CHARS_TO_LOOP = 40
"""Shorter answers ("no no no") are not called a loop."""
MAX_PERIOD = 60
"""Longest unit, in characters, whose endless repetition is searched for."""
LOOP_SHARE = 0.6
"""An answer of which more than this share is one unit said again and again is a loop."""
JUNK_SHARE = 0.2
"""More replacement, control or unassigned characters than this is noise: readable text in any script has almost none."""
WRONG_FORMAT = "wrong_format"

Check = Mapping[str, Any]
"""``{"kind": name of a check, ...}`` with what it takes; see :data:`FORMS`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    id: str
    prompt: str
    check: Check | None = field(default=None, hash=False)
    """The form that the prompt asks for; None where it asks for none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What is wrong with an answer."""

    fault: str | None
    """``empty``, ``repeating``, ``degenerate`` or ``wrong_format``; None if nothing is. What is not coherent has no form either."""
    coherent: float
    format: float | None
    """1.0 for the form that was asked for; None where none was."""


@cache
def _file() -> tuple[str, tuple[Prompt, ...]]:
    lines = resources.files(__package__).joinpath("golden.jsonl").read_text(encoding="utf-8").splitlines()
    header, *rows = [json.loads(line) for line in lines if line.strip()]
    return str(header["version"]), tuple(Prompt(**row) for row in rows)


def version() -> str:
    """Raised with every change of a prompt or a check."""
    return _file()[0]


def golden_prompts() -> tuple[Prompt, ...]:
    """Every golden prompt, in file order."""
    return _file()[1]


def prompts() -> tuple[tuple[str, str], ...]:
    """``(id, prompt)`` of every golden prompt, in file order."""
    return tuple((p.id, p.prompt) for p in golden_prompts())


@cache
def _checks() -> dict[str, Check]:
    return {p.id: p.check for p in golden_prompts() if p.check}


def formatted_ids() -> tuple[str, ...]:
    """Prompts that ask for a form: those over which the share of right forms is taken."""
    return tuple(_checks())


def judge(prompt_id: str, text: str) -> Verdict:
    """What is wrong with the answer `text` to a golden prompt, if anything."""
    check, incoherent = _checks().get(prompt_id), fault(text)
    right = None if check is None else float(incoherent is None and has_form(check, text))
    return Verdict(fault=incoherent or (WRONG_FORMAT if right == 0.0 else None), coherent=float(incoherent is None), format=right)


def fault(text: str) -> str | None:
    """Why `text` is no coherent answer: ``empty``, ``repeating`` or ``degenerate``; None if nothing is wrong."""
    stripped = text.strip()
    if not stripped:
        return "empty"
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
    """Share of `text` that lies in its longest run of one unit repeated at least three times."""
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
    """Whether `text` has the form that `check` asks for; a Markdown fence around the whole answer does not count against it."""
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


def _list(text: str, check: Check) -> bool:
    """Lines that are items; an introduction that ends with a colon is none."""
    lines = [line for line in text.splitlines() if line.strip() and not line.rstrip().endswith(":")]
    return len(lines) == int(check["items"])


def _lines(text: str, check: Check) -> bool:
    return len([line for line in text.splitlines() if line.strip()]) == int(check["count"])


def _sentences(text: str, check: Check) -> bool:
    return len([s for s in re.split(r"(?<=[.!?\u3002\uff01\uff1f])\s+", text) if any(c.isalnum() for c in s)]) == int(check["count"])


def _words(text: str, check: Check) -> bool:
    return 1 <= len(text.split()) <= int(check["most"])


def _number(text: str, _check: Check) -> bool:
    """Digits, or one of the words that name a small number; nothing else."""
    bare = text.strip(" .!").casefold()
    return bool(re.fullmatch(r"[-+]?\d[\d,. ]*", bare)) or bare in NUMBER_WORDS


def _one_of(text: str, check: Check) -> bool:
    return text.strip(" .,!\"'").casefold() in tuple(check["options"])


def _pattern(text: str, check: Check) -> bool:
    return re.fullmatch(check["pattern"], text, re.DOTALL) is not None


NUMBER_WORDS = frozenset({"zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"})
FORMS: Mapping[str, Callable[[str, Check], bool]] = {
    "json": _json,
    "json_list": _json_list,
    "list": _list,
    "lines": _lines,
    "sentences": _sentences,
    "words": _words,
    "number": _number,
    "one_of": _one_of,
    "pattern": _pattern,
}
