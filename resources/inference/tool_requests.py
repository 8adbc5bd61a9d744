"""The tools of a chat request, and which of them may be called: read from OpenAI's fields, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from engine.data import TEMPLATE_KWARGS, ThinkMarks
from resources.inference.call_stream import NAME, CallReading
from resources.inference.engine.call_grammar import CallRules, Schema, call_grammar
from resources.inference.engine.engine_thread import Engine
from resources.inference.engine.grammar import MAX_SCHEMA_BYTES, MarkTokens, SchemaError, checked_text
from resources.inference.request_errors import RequestError
from resources.inference.schemas import ChatRequest

NO_PARAMETERS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}
"""Of a function without `parameters`, which OpenAI defines as one without arguments."""
CHOICES = '"auto", "none", "required", {"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", "allowed_tools": {...}}'
ADVICE = (
    'serve a model with another chat template, such as that of Qwen 2.5 or 3 and Llama 3.1, send "tool_choice": "none", or describe the '
    "calls in the messages and constrain the answer with response_format"
)
FUNCTION_FIELDS = frozenset(("name", "description", "parameters", "strict"))
Mode = Literal["auto", "required", "named"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Function:
    name: str
    parameters: Schema
    index: int
    """In `tools`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolUse:
    """What an answer may call."""

    functions: Sequence[Function]
    mode: Mode
    parallel: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class CallUse:
    """How an answer with tools is constrained and read."""

    tools: ToolUse
    reading: CallReading
    reasoning: ThinkMarks | None
    """Of the reasoning that a forced answer may begin with."""
    content: Schema | None
    """Schema of an answer without calls."""

    def grammar(self, tokens: MarkTokens) -> str:
        """Return the answer's grammar; ``SchemaError`` if the schema of the content exceeds the limits."""
        if self.content is not None:
            checked_text(self.content)
        rules = CallRules(
            text=self.reading.text,
            functions=[(function.name, function.parameters) for function in self.tools.functions],
            forced=self.reading.forced,
            one=not self.tools.parallel or self.reading.named,
            reasoning=self.reasoning,
            content=self.content,
        )
        return call_grammar(rules, tokens=tokens)


def call_use(body: ChatRequest, engine: Engine, *, served_name: str, content: Schema | None) -> CallUse | None:
    """Return how the calls of an answer are constrained and read; None if it may have none.

    Raises ``RequestError`` for invalid tools, and for a chat template that does not render tools, or whose calls cannot be read.
    """
    tools = read_tools(body)
    if tools is None:
        return None
    if not engine.renders_tools:
        what = f"The chat template of {served_name} does not render tools, so the model would not see them; {ADVICE}."
        raise RequestError(what, code="tools_not_rendered", param="tools")
    form, forced = engine.call_form, tools.mode != "auto"
    if form is None or form.text is None:
        what = f"The chat template of {served_name} writes tool calls in a form that this server cannot read back; {ADVICE}."
        raise RequestError(what, code="tool_calls_not_readable", param="tools")
    if content is not None and form.text.at_start and not forced:
        what = (
            f"response_format cannot be combined with tools here: {served_name} writes calls as JSON without a mark, and an answer in JSON "
            'may look alike. Send "tool_choice": "required" or "none", or leave response_format out.'
        )
        raise RequestError(what, code="unsupported_parameter", param="response_format")
    reasoning = engine.reasoning_under(_variables(body)) if forced else None
    reading = CallReading(form=form, text=form.text, forced=forced, named=tools.mode == "named")
    return CallUse(tools=tools, reading=reading, reasoning=reasoning, content=None if forced else content)


def _variables(body: ChatRequest) -> Mapping[str, Any]:
    given = (body.model_extra or {}).get(TEMPLATE_KWARGS)
    return {name: value for name, value in given.items() if name != "tools"} if isinstance(given, dict) else {}


def read_tools(body: ChatRequest) -> ToolUse | None:
    """Return the functions that the answer may call; None if it may call none. Raises ``RequestError``."""
    functions = _functions(body.tools or [])
    if not functions:
        if body.tool_choice not in (None, "none", "auto"):
            raise _refusal("tool_choice demands a call, and the request has no tools; send tools.", "tool_choice")
        if body.parallel_tool_calls is not None:
            raise _refusal("parallel_tool_calls is about the calls of tools, and the request has none; send tools.", "parallel_tool_calls")
        return None
    mode, names = _choice("auto" if body.tool_choice is None else body.tool_choice)
    for name in names or ():
        if name not in {function.name for function in functions}:
            known = ", ".join(function.name for function in functions)[:200]
            raise _refusal(f"tool_choice names the function {name[:64]!r}, which is not among tools: {known}.", "tool_choice")
    if mode == "none":
        return None
    allowed = [function for function in functions if names is None or function.name in names]
    return ToolUse(functions=allowed, mode=mode, parallel=body.parallel_tool_calls is not False)


def _functions(tools: Sequence[Any]) -> list[Function]:
    found = [_function(tool, index) for index, tool in enumerate(tools)]
    first: dict[str, int] = {}
    for function in found:
        if (other := first.setdefault(function.name, function.index)) != function.index:
            what = f"tools[{other}] and tools[{function.index}] both have the name {function.name!r}; give each function its own."
            raise _refusal(what, f"tools[{function.index}].function.name")
    size = sum(_size(function) for function in found)
    if size > MAX_SCHEMA_BYTES:
        what = f"the parameters of all tools have {size} bytes, limit {MAX_SCHEMA_BYTES}; leave tools out, or simplify their schemas."
        raise RequestError(what, code="invalid_function_parameters", param="tools")
    return found


def _size(function: Function) -> int:
    try:
        return len(checked_text(function.parameters).encode())
    except SchemaError as e:
        raise invalid_parameters(str(e), function) from e


def _function(tool: Any, index: int) -> Function:
    place = f"tools[{index}]"
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind != "function":
        shown = "missing" if kind is None else repr(kind)[:60]
        what = f'{place}.type is {shown}; only functions can be called: send {{"type": "function", "function": {{...}}}}.'
        raise RequestError(what, code="unsupported_parameter" if isinstance(kind, str) else "invalid_tools", param=f"{place}.type")
    given = tool.get("function")
    if not isinstance(given, dict):
        raise _refusal(f'{place}.function must be an object: send {{"name": ..., "parameters": {{...}}}}.', f"{place}.function")
    name, parameters = given.get("name"), given.get("parameters")
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        what = f"{place}.function.name must be 1 to 64 letters, digits, underscores and dashes, not {repr(name)[:80]}."
        raise _refusal(what, f"{place}.function.name")
    for field in given.keys() - FUNCTION_FIELDS:
        if given[field] is not None:
            what = f"{place}.function.{field[:40]} is not supported; a function has {', '.join(sorted(FUNCTION_FIELDS))}."
            raise RequestError(what, code="unsupported_parameter", param=f"{place}.function.{field[:40]}")
    return Function(name=name, parameters=_parameters(parameters, f"{place}.function.parameters"), index=index)


def _parameters(given: Any, place: str) -> Schema:
    if given is None:
        return NO_PARAMETERS
    if not isinstance(given, dict):
        raise _invalid_schema("it must be a JSON schema, an object", place)
    if given.get("type", "object") != "object":
        raise _invalid_schema(f"type is {repr(given['type'])[:60]}, and arguments are an object", place)
    return {"type": "object", **given}


def invalid_parameters(why: str, function: Function) -> RequestError:
    """Return the refusal of a function whose schema cannot be enforced."""
    return _invalid_schema(why, f"tools[{function.index}].function.parameters")


def _invalid_schema(why: str, place: str) -> RequestError:
    return RequestError(f"{place}: {why}.", code="invalid_function_parameters", param=place)


def _choice(given: Any) -> tuple[Mode | Literal["none"], list[str] | None]:
    """Return the mode of a `tool_choice`, and the names that it allows; None if it allows all."""
    if given in ("auto", "none", "required"):
        return given, None
    kind = given.get("type") if isinstance(given, dict) else None
    if kind == "function":
        return "named", [_name(given.get("function"))]
    if kind == "allowed_tools" and isinstance(allowed := given.get("allowed_tools"), dict):
        tools, mode = allowed.get("tools"), allowed.get("mode")
        if mode in ("auto", "required") and isinstance(tools, list) and tools:
            return mode, [_name(tool.get("function") if isinstance(tool, dict) else None) for tool in tools]
        message = 'allowed_tools needs "mode": "auto" or "required", and a list of tools that is not empty.'
        raise _refusal(message, "tool_choice.allowed_tools")
    code = "unsupported_parameter" if isinstance(kind, str) else "invalid_tools"
    raise RequestError(f"tool_choice is {repr(given)[:80]}; send one of {CHOICES}.", code=code, param="tool_choice")


def _name(function: Any) -> str:
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise _refusal('tool_choice needs the name of a function: {"type": "function", "function": {"name": ...}}.', "tool_choice")
    return name


def _refusal(message: str, param: str) -> RequestError:
    return RequestError(message, code="invalid_tools", param=param)
