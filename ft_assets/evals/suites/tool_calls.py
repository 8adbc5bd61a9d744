"""Tool calls in generated answers: read back from the text of the base model's chat template, and compared as values.

1. How a template writes a call is found by rendering one; nothing is concluded from a model's name. Either a JSON object with the name and
   the arguments (Qwen, Hermes, Llama), or the name and then a JSON object of arguments (gpt-oss, Mistral, DeepSeek).
2. A template whose calls cannot be read back (XML of Qwen3-Coder, or no tools at all) has no form: rows that end with calls then give no
   items.
3. Answers and expected calls are compared in one canonical form, a JSON array of ``{"name", "arguments"}``. Calls of one turn are
   parallel, so their order does not count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ft_assets.errors import InvalidRequest
from ft_assets.evals.suites.answer_metrics import parse_json, same_json
from ft_assets.typed_json import JsonObject

if TYPE_CHECKING:
    from ft_assets.datasets.tokens.chat_tokenizer import ChatTokenizer

ARGUMENTS = ("arguments", "parameters")
"""Names of the arguments in a call's JSON object: most templates', and Llama's."""
PROBE: Mapping[str, Any] = {"name": "find_order", "arguments": {"number": "A-17", "open": True, "lines": [1, 2]}}
QUESTION = {"role": "user", "content": "Where is order A-17?"}
_NAME = r"[A-Za-z0-9_.\-]+"
_DECODER = json.JSONDecoder()
SURROGATE = re.compile(r"[\ud800-\udfff]")

Call = Mapping[str, Any]
"""``{"name": text, "arguments": object}``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallForm:
    """How calls look in a generated text, without special tokens, which decoding leaves out."""

    before: str | None = None
    """Text in front of the name; None if a call is one JSON object, whatever surrounds it."""
    between: str = ""
    """Text between the name and its arguments."""

    @classmethod
    def of_model(cls, directory: Path) -> Self | None:
        """Returns the form of the model's chat template; None if its calls cannot be read back from their text."""
        if not (directory / "tokenizer.json").is_file():
            return None
        from ft_assets.datasets.tokens.chat_tokenizer import ChatTokenizer  # here: processes that only read items do without it

        tokenizer = ChatTokenizer.load(directory)
        text = _rendered(tokenizer, PROBE)
        if text is None:
            return None
        before, found, after = text.partition(PROBE["name"])
        between = after.partition("{")[0]
        forms = (cls(), cls(before=before.strip(), between=between.strip())) if found else ()
        return next((form for form in forms if form.read(text) == (PROBE,)), None)

    def read(self, text: str) -> tuple[Call, ...]:
        """Returns the calls in `text`, in their order; none if it has none, or one of them cannot be read."""
        return tuple(_json_calls(text) if self.before is None else self._named_calls(text))

    def _named_calls(self, text: str) -> Iterator[Call]:
        pattern = re.compile(rf"{re.escape(self.before or '')}\s*({_NAME})\s*{re.escape(self.between)}\s*(?=\{{)")
        found = pattern.search(text) if self.before else pattern.match(text.lstrip())
        text = text if self.before else text.lstrip()
        while found:
            arguments, end = _object(text, found.end())
            if arguments is None:
                return
            yield {"name": found[1], "arguments": arguments}
            found = pattern.search(text, end)


def _rendered(tokenizer: ChatTokenizer, call: Call) -> str | None:
    """Returns what a model generates to make `call`; None if the template refuses calls or has none."""
    tool = {"type": "function", "function": {"name": call["name"], "description": "", "parameters": {"type": "object", "properties": {}}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [{"id": "call00001", "type": "function", "function": dict(call)}]}
    try:
        prompt = tokenizer.render_text([QUESTION], tools=[tool])
        whole = tokenizer.render_text([QUESTION, turn], tools=[tool], add_generation_prompt=False)
    except InvalidRequest:
        return None
    shared = next((at for at, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), min(len(prompt), len(whole)))
    assert tokenizer.reasoning is not None  # it has a template: it rendered
    return tokenizer.reasoning.bare(whole[shared:])


def _json_calls(text: str) -> Iterator[Call]:
    at = 0
    while (at := text.find("{", at)) >= 0:
        found, end = _object(text, at)
        call = None if found is None else _call(found)
        if call is not None:
            yield call
        at = end if call is not None else at + 1


def _call(found: JsonObject) -> Call | None:
    given = next((found[key] for key in ARGUMENTS if key in found), None)
    arguments = parse_json(given) if isinstance(given, str) else given
    name = found.get("name")
    return {"name": name, "arguments": arguments} if isinstance(name, str) and isinstance(arguments, dict) else None


def _object(text: str, at: int) -> tuple[JsonObject | None, int]:
    """Returns the JSON object that begins at `at`, and its end."""
    try:
        found, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at + 1
    return (found, end) if isinstance(found, dict) else (None, end)


def canonical(calls: Sequence[Call]) -> str:
    """Returns calls as the text that answers and expected answers are compared by.

    Half a surrogate pair, which cannot be stored, is replaced.
    """
    text = json.dumps([{"name": c["name"], "arguments": c["arguments"]} for c in calls], ensure_ascii=False)
    return SURROGATE.sub("\ufffd", text)


def calls_of(text: str) -> list[Call]:
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
