"""The grammar of an answer that may, or must, call tools, in the syntax of llguidance (a dialect of Lark).

1. A forced answer is calls in the template's own form, after reasoning where the template has it.
2. Otherwise any text is allowed up to the mark that opens a call; from there on the call is constrained.
3. With a schema for the content, an answer is either that JSON or calls.

Some tokens are no text for llguidance, ``<tool_call>`` among them: a grammar names them by id.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.data import CALL_ID, CALL_ID_PATTERN, CallText, ThinkMarks
from resources.inference.engine.grammar import OPTIONS, MarkTokens

Schema = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class CallRules:
    """What an answer may be."""

    text: CallText
    functions: Sequence[tuple[str, Schema]]
    """Names that may be called, with the schemas of their arguments."""
    forced: bool
    one: bool
    """At most one call."""
    reasoning: ThinkMarks | None = None
    """Of the reasoning that a forced answer may begin with; None if the template has none."""
    content: Schema | None = None
    """Schema of an answer without calls."""


def call_grammar(rules: CallRules, *, tokens: MarkTokens) -> str:
    """Return the grammar of an answer of a model with these tokens."""
    return "\n".join(_lines(rules, tokens)) + "\n"


def _lines(rules: CallRules, tokens: MarkTokens) -> Iterator[str]:
    text, mark, literals = rules.text, rules.text.mark, _Literals(tokens.ids)
    free = {i for token, i in tokens.ids.items() if token != mark and (token in tokens.visible or not text.at_start)}
    whole = f"{literals.of(text.opening)} turn"
    if rules.forced:
        yield f"start: {literals.of(text.lead)} {whole}" + ("" if rules.reasoning is None else f" | thought SPACE {whole}")
    elif rules.content is not None:
        yield f"start: content | {whole}"
        yield f"content: %json {_json(rules.content)}"
    elif text.at_start:
        yield f"start: OTHER free | {whole}"
        yield f"free: {_free(free, '{} TEXT')}"
        yield f"OTHER: /(.|\\n)*/ & ~/{_pattern(mark)}(.|\\n)*/"
    else:
        yield f"start: free TEXT | free opened {literals.of(text.opening.removeprefix(mark))} turn"
        yield f"free: {_free(free, 'TEXT {}')}"
        yield from literals.until("opened", mark)
    if rules.forced and rules.reasoning is not None:
        yield f"thought: {literals.of(rules.reasoning.before)} thought_end"
        yield from literals.until("thought_end", rules.reasoning.after)
        yield r"SPACE: /[ \n]{0,4}/"
    more = "" if rules.one or text.middle is None else f"({literals.of(text.middle)} call)*"
    yield f"turn: call {more} {literals.of(text.closing)}"
    yield f"call: {' | '.join(f'call_{n}' for n in range(len(rules.functions)))}"
    for n, (name, schema) in enumerate(rules.functions):
        yield f"call_{n}: {literals.of(name + text.between)} arguments_{n}"
        yield f"arguments_{n}: %json {_json(schema)}"
    yield r"TEXT: /(.|\n)*/"


def _free(ids: Collection[int], form: str) -> str:
    """Return any number of one of the tokens, with text in front of them or after them."""
    listed = ",".join(map(str, sorted(ids)))
    return f"({form.format(f'<[{listed}]>')})*" if ids else '""'


class _Literals:
    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = tokens
        self._split = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")

    def of(self, text: str) -> str:
        """Return `text` as a sequence of strings, patterns and tokens."""
        parts, at = [], 0
        for found in self._split.finditer(text):
            parts += [*_strings(text[at : found.start()]), self._token(found[0])]
            at = found.end()
        return " ".join((*parts, *_strings(text[at:])))

    def until(self, rule: str, end: str) -> Iterator[str]:
        """Yield rules of any text up to `end`, which may be a token or spelled out."""
        spelled = f"{rule}_spelled[lazy]: TEXT {json.dumps(end)}"
        if end in self._tokens:
            yield f"{rule}: TEXT {self._token(end)} | {rule}_spelled"
            yield spelled
        else:
            yield spelled.replace("_spelled", "")

    def _token(self, text: str) -> str:
        return f"<[{self._tokens[text]}]>"


def _strings(text: str) -> Iterator[str]:
    for n, part in enumerate(text.split(CALL_ID)):
        if n:
            yield f"/{CALL_ID_PATTERN}/"
        if part:
            yield json.dumps(part)


def _json(schema: Schema) -> str:
    return json.dumps({**schema, "x-guidance": OPTIONS}, ensure_ascii=False)


def _pattern(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]", lambda found: f"\\{found[0]}", text)
