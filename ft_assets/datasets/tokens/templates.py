"""Renders chat templates in a sandbox and tracks which characters the assistant says.

The dialect is the one that model authors write for: ``trim_blocks``, ``lstrip_blocks``, loop controls, ``tojson`` that escapes no
HTML, ``raise_exception``, ``strftime_now``, and ``{% generation %}`` around what the assistant generates.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from ft_assets.errors import InvalidDataset, InvalidRequest

Span = tuple[int, int]
"""Characters from ... up to (not with) ... of the rendered text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    text: str
    spans: tuple[Span, ...]
    """What each ``{% generation %}`` block wrote, in order."""


class _Generation(jinja2.ext.Extension):
    """``{% generation %} ... {% endgeneration %}``: notes where its body starts and ends in the output."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Callable[[], str]) -> str:
        written = caller()
        self.environment.tracker.add(len(written))  # type: ignore[attr-defined]
        return written


class _Tracker:
    """Characters written so far by the template, and the spans of its generation blocks."""

    def __init__(self) -> None:
        self.written = 0
        self.spans: list[Span] = []

    def add(self, length: int) -> None:
        self.spans.append((self.written, self.written + length))


class ChatTemplate:
    """One compiled template. Renders one conversation at a time: not safe to share between threads."""

    def __init__(self, source: str, *, variables: Mapping[str, str]) -> None:
        self._environment = _environment()
        self._source = source
        try:
            self._template = self._environment.from_string(source)
            self._ast = self._environment.parse(source)
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the base model's chat template cannot be compiled: {error}", code="invalid_chat_template") from error
        self._variables = dict(variables)
        called = (node.call for node in self._ast.find_all(jinja2.nodes.CallBlock))
        self.marks_generation = any(isinstance(c.node, jinja2.nodes.ExtensionAttribute) for c in called)
        """Whether the template says what the assistant generates."""

    @property
    def literal_text(self) -> str:
        """Every literal of the template, separated by NUL so that none runs into the next."""
        data = [n.data for n in self._ast.find_all(jinja2.nodes.TemplateData)]
        data += [n.value for n in self._ast.find_all(jinja2.nodes.Const) if isinstance(n.value, str)]
        return "\0".join(data)

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] = (), add_generation_prompt: bool = False
    ) -> Rendered:
        """The conversation as text; ``InvalidDataset`` when the template refuses it."""
        tracker = _Tracker()
        self._environment.tracker = tracker  # type: ignore[attr-defined]
        parts: list[str] = []
        variables = {**self._variables, "documents": None, "add_generation_prompt": add_generation_prompt}
        try:
            for part in self._template.generate(messages=list(messages), tools=list(tools) or None, **variables):
                parts.append(part)
                tracker.written += len(part)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            message = f"the base model's chat template refuses the conversation: {str(error)[:200] or type(error).__name__}"
            raise InvalidDataset(message, code="template_refused") from error
        return Rendered(text="".join(parts), spans=tuple(tracker.spans))


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: dt.datetime.now().strftime(form)
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
