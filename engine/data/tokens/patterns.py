"""Renders a template once per sequence of roles, and fills in contents where the template only copies them.

A pattern is made by rendering probes (see ``probes``), and is checked against the template itself before it is used. Contents that answer
the template's conditions differently from the probes, tools, calls and names are rendered by the template, row by row: a pattern never
guesses.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.errors import InvalidRequest
from engine.data.schema import Example, Message, Role, TemplateValue
from engine.data.tokens.assistant_turns import Turns
from engine.data.tokens.probes import OPEN, PROBE, Guard, Opaque, Slot, Watch, spell
from engine.data.tokens.templates import NO_KWARGS, ChatTemplate, Span

MAX_PATTERNS = 1024
"""Role sequences that are remembered; a dataset of ordinary chats has as many as it has lengths."""
SAMPLE = " \n Is it 5 o'clock? <b>{{ no }}</b> \u00e9\u0301 "
"""Content with white space at its edges and characters that escaping would change, to check a new pattern."""

Piece = tuple[str | Slot, int]
"""A literal or a content, and the number of its assistant turn (-1: none)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern:
    pieces: tuple[Piece, ...]
    num_turns: int
    rewritten: tuple[bool, ...]
    """For each turn; see ``assistant_turns``."""
    guards: tuple[Guard, ...]

    def holds(self, contents: Sequence[str]) -> bool:
        return all(guard.holds(contents[guard.slot.index]) for guard in self.guards)

    def text(self, contents: Sequence[str]) -> str:
        return "".join(p if isinstance(p, str) else p.fill(contents[p.index]) for p, _ in self.pieces)


class Patterns:
    """The patterns of one template, made on demand."""

    def __init__(self, template: ChatTemplate, turns: Turns) -> None:
        self._template = template
        self._turns = turns
        self._known: dict[Any, Pattern | None] = {}

    def find(self, roles: tuple[Role, ...], kwargs: Mapping[str, TemplateValue] = NO_KWARGS) -> Pattern | None:
        """Returns the pattern of `roles` under `kwargs`; None if the template does more than copy."""
        key = roles, tuple([(name, type(value), value) for name, value in kwargs.items()])
        if key not in self._known:
            if len(self._known) >= MAX_PATTERNS:
                self._known.clear()
            self._known[key] = self._make(roles, kwargs) if self._template.can_be_watched else None
        return self._known[key]

    def _make(self, roles: tuple[Role, ...], kwargs: Mapping[str, TemplateValue]) -> Pattern | None:
        watch = Watch()
        try:
            probed = [{"role": role, "content": watch.probe(Slot(index))} for index, role in enumerate(roles)]
            written = self._template.render(probed, kwargs=kwargs).text
            found = [watch.slots[int(m.group(1))] for m in PROBE.finditer(written)]
            if written.count(OPEN) != len(found):
                return None
            for index, role in enumerate(roles[:-1]):
                if role == "assistant":  # the template's conditions on an answer may differ from those on history
                    self._template.render(probed[: index + 1], kwargs=kwargs)
            plain = self._turns.render([Message(role=role, content=spell(index)) for index, role in enumerate(roles)], kwargs=kwargs)
        except (Opaque, InvalidRequest):
            return None
        if plain.text != PROBE.sub(lambda m: spell(watch.slots[int(m.group(1))].index), written):
            return None
        pieces = _pieces(plain.text, found, plain.spans, content_may_end_a_turn=self._template.marks_generation)
        if pieces is None or not _teaches(pieces, roles):
            return None
        pattern = Pattern(pieces=pieces, num_turns=len(plain.spans), rewritten=plain.rewritten, guards=tuple(watch.guards))
        return pattern if self._agrees(pattern, roles, kwargs) else None

    def _agrees(self, pattern: Pattern, roles: tuple[Role, ...], kwargs: Mapping[str, TemplateValue]) -> bool:
        """Returns whether `pattern` and the template render a sample the same way."""
        contents = [f"{SAMPLE}{index}{SAMPLE}" for index in range(len(roles))]
        messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
        return not pattern.holds(contents) or pattern.text(contents) == self._template.render(messages, kwargs=kwargs).text


def _teaches(pieces: Sequence[Piece], roles: Sequence[Role]) -> bool:
    """Returns whether the contents of answers and results are in the text, that of the last answer with loss."""
    written = {piece.index for piece, _ in pieces if isinstance(piece, Slot)}
    trained = {piece.index for piece, turn in pieces if isinstance(piece, Slot) and turn >= 0}
    wanted = {index for index, role in enumerate(roles) if role in ("assistant", "tool")}
    return wanted <= written and (not roles or roles[-1] != "assistant" or len(roles) - 1 in trained)


def plain_contents(example: Example) -> list[str] | None:
    """Returns the contents of a conversation that has only roles and contents, else None."""
    if example.tools:
        return None
    contents = []
    for message in example.messages:
        if message.content is None or message.tool_calls or message.name is not None or message.tool_call_id is not None:
            return None
        if message.reasoning is not None:
            return None
        contents.append(message.content)
    return contents


def literal_pieces(text: str, spans: Sequence[Span]) -> tuple[Piece, ...]:
    """Returns `text` cut at the edges of `spans`."""
    out: list[Piece] = []
    done = 0
    for turn, (start, end) in enumerate(spans):
        out += [(text[done:start], -1), (text[start:end], turn)]
        done = end
    return tuple(p for p in (*out, (text[done:], -1)) if p[0])


def _pieces(text: str, found: Sequence[Slot], spans: Sequence[Span], *, content_may_end_a_turn: bool) -> tuple[Piece, ...] | None:
    """Returns `text` cut at its probes and at the edges of `spans`; None if an edge depends on content."""
    out: list[Piece] = []
    edges = sorted({0, len(text), *(edge for span in spans for edge in span)})
    probes = [(m.start(), m.end()) for m in PROBE.finditer(text)]
    if any(start < edge < end for start, end in probes for edge in edges):
        return None
    if not content_may_end_a_turn and {end for _, end in probes} & {end for _, end in spans}:
        return None
    cuts = sorted({*edges, *(edge for probe in probes for edge in probe)})
    slots = dict(zip((start for start, _ in probes), found, strict=True))
    for start, end in itertools.pairwise(cuts):
        turn = next((number for number, span in enumerate(spans) if span[0] <= start and end <= span[1]), -1)
        out.append((slots.get(start, text[start:end]), turn))
    return tuple(out)
