"""How a chat template writes tool calls, found by rendering some, and how calls are read back from generated text.

Nothing is concluded from a model's name. A call is either a JSON object with the name and the arguments (Qwen, Hermes, Llama, Mistral), or
the name and then a JSON object of arguments (gpt-oss, DeepSeek). A template whose calls are neither (XML of Qwen3-Coder, or no calls at
all) has no form. Evaluations and the inference server read answers with the same form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from core.errors import InvalidRequest
from core.typed_json import JsonObject
from engine.data.tokens.reasoning_probe import THINK_MARKS, ThinkMarks

if TYPE_CHECKING:
    from engine.data.tokens.chat_tokenizer import ChatTokenizer

ARGUMENTS = ("arguments", "parameters")
"""Names of the arguments in a call's JSON object: most templates', and Llama's."""
PROBES: tuple[JsonObject, JsonObject] = (
    {"name": "find_order", "arguments": {"number": "A-17", "open": True, "lines": [1, 2]}},
    {"name": "send_parcel", "arguments": {"to": "Ada"}},
)
IDS = ("call00001", "call00002")
"""Of nine letters and digits: Mistral's templates refuse others."""
LONG_ID = "call_" + "a1" * 12
"""Of the form of OpenAI's."""
QUESTION = {"role": "user", "content": "Where is order A-17?"}
SAID = "Let me look."
CALL_ID = "\0"
"""Stands for the id of a call in the text of a :class:`CallText`."""
CALL_ID_PATTERN = "[A-Za-z0-9]{9}"
_NAME = r"[A-Za-z0-9_.\-]+"
_JSON_START = re.compile(r'[\[{]\W*"\w+"')
_DECODER = json.JSONDecoder()

RenderedCall = Mapping[str, Any]
"""``{"name": text, "arguments": object}``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallText:
    """The text around names and arguments of one turn's calls: ``opening name between arguments (middle name between arguments)* closing``.

    Special tokens are part of it.
    """

    lead: str = ""
    """White space in front of :attr:`opening` if the answer has no other text."""
    mark: str
    """The beginning of :attr:`opening` that tells a call from other text."""
    opening: str
    between: str
    middle: str | None
    """None if the template writes one call a turn."""
    closing: str

    @property
    def at_start(self) -> bool:
        """Whether nothing marks a call but its JSON, so that calls are the whole answer."""
        return _JSON_START.match(self.opening) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class CallForm:
    """How calls look in a generated text."""

    before: str | None = None
    """Text in front of the name, without special tokens; None if a call is one JSON object, whatever surrounds it."""
    between: str = ""
    """Text between the name and its arguments, without special tokens."""
    special: tuple[str, ...] = ()
    """Special tokens around calls, which decoding may leave out."""
    text: CallText | None = None
    """None if a call cannot be told from its text alone while it is generated."""
    long_ids: bool = True
    """Whether the template renders ids of OpenAI's form; else it takes nine letters and digits."""

    @classmethod
    def of_model(cls, directory: Path) -> Self | None:
        """Returns the form of the model's chat template; None if its calls cannot be read back from their text."""
        if not (directory / "tokenizer.json").is_file():
            return None
        from engine.data.tokens.chat_tokenizer import ChatTokenizer  # here: processes that only read items do without it

        return cls.of_tokenizer(ChatTokenizer.load(directory))

    @classmethod
    def of_tokenizer(cls, tokenizer: ChatTokenizer) -> Self | None:
        """Does :meth:`of_model` for a loaded tokenizer."""
        if tokenizer.reasoning is None or (raw := _rendered(tokenizer, PROBES[:1])) is None:
            return None
        said = _Said(tokenizer, raw)
        before, found, after = said.bare.partition(PROBES[0]["name"])
        between = after.partition("{")[0]
        shapes = (cls(), cls(before=before.strip(), between=between.strip())) if found else ()
        fitting = next((form for form in shapes if form.read(said.bare) == (PROBES[0],)), None)
        if fitting is None:
            return None
        return cls(
            before=fitting.before,
            between=fitting.between,
            special=said.special,
            text=_call_text(tokenizer, said),
            long_ids=_rendered(tokenizer, PROBES[:1], ids=(LONG_ID,)) is not None,
        )

    def read(self, text: str) -> tuple[RenderedCall, ...]:
        """Returns the calls in `text`, in their order; none if it has none, or one of them cannot be read."""
        for token in self.special:
            text = text.replace(token, "")
        return tuple(_json_calls(text) if self.before is None else self._named_calls(text))

    def _named_calls(self, text: str) -> Iterator[RenderedCall]:
        pattern = re.compile(rf"{re.escape(self.before or '')}\s*({_NAME})\s*{re.escape(self.between)}\s*(?=\{{)")
        found = pattern.search(text) if self.before else pattern.match(text.lstrip())
        text = text if self.before else text.lstrip()
        while found:
            arguments, end = _object(text, found.end())
            if arguments is None:
                return
            yield {"name": found[1], "arguments": arguments}
            found = pattern.search(text, end)


def rendered_call(tokenizer: ChatTokenizer) -> str | None:
    """Returns what a model generates to make one call, in whatever form; None if the template writes none."""
    text = None if tokenizer.reasoning is None else _rendered(tokenizer, PROBES[:1])
    return text if text is not None and PROBES[0]["name"] in text else None


class _Said:
    """What a model generates to make a call."""

    def __init__(self, tokenizer: ChatTokenizer, raw: str) -> None:
        assert tokenizer.reasoning is not None
        self.bare = tokenizer.reasoning.bare(raw)
        self.special = tuple(sorted(token for token in tokenizer.special_tokens if token in raw))


def _rendered(tokenizer: ChatTokenizer, calls: Sequence[JsonObject], *, content: str = "", ids: Sequence[str] = IDS) -> str | None:
    """Returns what a model generates to make `calls`; None if the template refuses them."""
    about = {"description": "", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": {"name": call["name"], **about}} for call in PROBES]
    made = [{"id": id_, "type": "function", "function": dict(call)} for id_, call in zip(ids, calls, strict=False)]
    turn = {"role": "assistant", "content": content, "tool_calls": made}
    try:
        prompt = tokenizer.render_text([QUESTION], tools=tools)
        whole = tokenizer.render_text([QUESTION, turn], tools=tools, add_generation_prompt=False)
    except InvalidRequest:
        return None
    shared = next((at for at, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), min(len(prompt), len(whole)))
    return whole[shared:]


def _call_text(tokenizer: ChatTokenizer, said: _Said) -> CallText | None:
    """Returns the text around calls; None if it cannot be told apart from the names and the arguments in it."""
    assert tokenizer.reasoning is not None
    marks, ends = tokenizer.reasoning.marks, [tokenizer.decode([i]) for i in tokenizer.stop_ids]
    one, two = (_pieces(tokenizer, PROBES[:n], marks=marks, ends=ends) for n in (1, 2))
    if one is None:
        return None
    lead, opening, between, closing = one
    middle = two[3] if two is not None and (*two[:3], *two[4:]) == (lead, opening, between, between, closing) else None
    token = next((t for t in said.special if opening.startswith(t)), None)
    start = _JSON_START.match(opening) or re.match(r"\S[^\s{]*", opening)
    if start is None or CALL_ID in opening or not (token or _begins_alike(tokenizer, opening, marks=marks)):
        return None
    return CallText(lead=lead, mark=token or start[0], opening=opening, between=between, middle=middle, closing=closing)


def _begins_alike(tokenizer: ChatTokenizer, opening: str, *, marks: ThinkMarks) -> bool:
    """Whether a call after text begins as one without, if the template writes text in front of calls at all."""
    raw = _rendered(tokenizer, PROBES[:1], content=SAID)
    return _JSON_START.match(opening) is not None or raw is None or SAID not in raw or opening in marks.split(raw)[1]


def _pieces(tokenizer: ChatTokenizer, calls: Sequence[JsonObject], *, marks: ThinkMarks, ends: Iterable[str]) -> tuple[str, ...] | None:
    """Returns white space, and the texts in front of, between and after names and arguments; None if they are not found in this order."""
    rest = _rendered(tokenizer, calls)
    if rest is None:
        return None
    for half in (marks, THINK_MARKS):
        rest = half.split(rest)[1]
    lead, rest = rest[: len(rest) - len(rest.lstrip())], rest.lstrip()
    for id_ in IDS:
        rest = rest.replace(id_, CALL_ID)
    found = [lead]
    for call in calls:
        before, name, rest = rest.partition(call["name"])
        start = rest.find("{")
        arguments, end = _object(rest, start) if name and start >= 0 else (None, 0)
        if arguments != call["arguments"]:
            return None
        found += [before, rest[:start]]
        rest = rest[end:]
    closing = rest[: min((at for at in map(rest.find, ends) if at >= 0), default=len(rest))]
    return (*found, closing.rstrip())


def _json_calls(text: str) -> Iterator[RenderedCall]:
    at = 0
    while (at := text.find("{", at)) >= 0:
        found, end = _object(text, at)
        call = None if found is None else _call(found)
        if call is not None:
            yield call
        at = end if call is not None else at + 1


def _call(found: JsonObject) -> RenderedCall | None:
    given = next((found[key] for key in ARGUMENTS if key in found), None)
    if isinstance(given, str):
        given = _value(given)
    name = found.get("name")
    return {"name": name, "arguments": given} if isinstance(name, str) and isinstance(given, dict) else None


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _object(text: str, at: int) -> tuple[JsonObject | None, int]:
    """Returns the JSON object that begins at `at`, and its end."""
    try:
        found, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at + 1
    return (found, end) if isinstance(found, dict) else (None, end)
