"""Renders chat templates in a sandbox and tracks which characters the assistant generates.

Supports the dialect that model authors use: ``trim_blocks``, ``lstrip_blocks``, loop controls, ``tojson`` without HTML escapes,
``raise_exception``, ``strftime_now``, and ``{% generation %}`` around what the assistant generates.

``strftime_now`` returns :data:`TODAY`, never the clock: the same rows must give the same ids tomorrow, or no pack could be found again.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from core.base_models import read_template
from core.errors import InvalidDataset, InvalidRequest
from core.typed_json import JsonObject
from engine.data.tokens.probes import OPEN, Opaque, Probe

TODAY = dt.datetime(2024, 7, 26)
"""The date that templates see: the one that Llama 3.1 to 3.3 use themselves without a clock ("26 Jul 2024")."""
TRACKED_FILTERS = frozenset(
    ("trim", "tojson", "length", "count", "default", "d", "string", "list", "first", "last", "reverse", "selectattr", "rejectattr", "items")
)
"""Filters that keep a probe, or record that it was examined."""
NO_KWARGS: Mapping[str, Any] = MappingProxyType({})
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
Span = tuple[int, int]
"""Characters of the rendered text from start to end (exclusive)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    text: str
    spans: tuple[Span, ...]
    """Output of each ``{% generation %}`` block, in order."""


class _Generation(jinja2.ext.Extension):
    """``{% generation %} ... {% endgeneration %}``: records where its body starts and ends in the output."""

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
    """One compiled template. Renders one conversation at a time: not thread-safe."""

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
        """Whether the template marks what the assistant generates."""

    @property
    def literal_text(self) -> str:
        """Every literal of the template, separated by NUL so that none runs into the next."""
        data = [n.data for n in self._ast.find_all(jinja2.nodes.TemplateData)]
        data += [n.value for n in self._ast.find_all(jinja2.nodes.Const) if isinstance(n.value, str)]
        return "\0".join(data)

    @cached_property
    def read_literals(self) -> frozenset[str]:
        """Literals that the template searches for (in comparisons and arguments of calls), not those that it only writes."""
        readers = self._ast.find_all((jinja2.nodes.Compare, jinja2.nodes.Call))
        return frozenset(c.value for r in readers for c in r.find_all(jinja2.nodes.Const) if isinstance(c.value, str))

    @cached_property
    def can_be_watched(self) -> bool:
        """Whether content stays a probe on every path through the template: nothing copies it into text before it is written."""
        nodes = jinja2.nodes
        calls = [c for c in self._ast.find_all(nodes.CallBlock) if not isinstance(c.call.node, nodes.ExtensionAttribute)]
        joined = {id(n) for out in self._ast.find_all(nodes.Output) for n in out.nodes if isinstance(n, nodes.Concat)}
        return not (
            calls
            or any(True for _ in self._ast.find_all((nodes.Macro, nodes.AssignBlock, nodes.FilterBlock, nodes.Import)))
            or any(isinstance(n.left, nodes.Const) for n in self._ast.find_all(nodes.Mod))
            or any(id(n) not in joined for n in self._ast.find_all(nodes.Concat))
            or any(n.name not in TRACKED_FILTERS for n in self._ast.find_all(nodes.Filter))
        )

    def render(
        self,
        messages: Sequence[JsonObject],
        *,
        tools: Sequence[JsonObject] = (),
        add_generation_prompt: bool = False,
        kwargs: Mapping[str, Any] = NO_KWARGS,
    ) -> Rendered:
        """Returns the conversation as text, with `kwargs` as further variables; ``InvalidDataset`` if the template refuses it."""
        tracker = _Tracker()
        self._environment.tracker = tracker  # type: ignore[attr-defined]
        parts: list[str] = []
        variables = {**kwargs, **self._variables, "documents": None, "add_generation_prompt": add_generation_prompt}
        try:
            for part in self._template.generate(messages=list(messages), tools=list(tools) or None, **variables):
                parts.append(part)
                tracker.written += len(part)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            message = f"the base model's chat template refuses the conversation: {str(error)[:200] or type(error).__name__}"
            raise InvalidDataset(message, code="template_refused") from error
        return Rendered(text="".join(parts), spans=tuple(tracker.spans))


def special_tokens(config: JsonObject) -> dict[str, str]:
    """Returns the variables of a ``tokenizer_config.json`` that templates write, such as ``bos_token``."""
    return {name: _token_text(config[name]) for name in SPECIAL_NAMES if config.get(name)}


def load_template(model_dir: Path) -> ChatTemplate | None:
    """Returns the chat template of a model directory, without its tokenizer; None if it has none."""
    source, config = read_template(model_dir), model_dir / "tokenizer_config.json"
    given = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    return None if source is None else ChatTemplate(source, variables=special_tokens(given))


def _token_text(value: Any) -> str:
    return str(value["content"]) if isinstance(value, dict) else str(value)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = TODAY.strftime
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if OPEN in text and _holds_probe(value):
        raise Opaque("tojson")
    return text


def _holds_probe(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_holds_probe(v) for v in value.values())
    return isinstance(value, Probe) or (isinstance(value, list | tuple) and any(_holds_probe(v) for v in value))


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
