"""The body of a response request: each field is passed on, repeated in the answer, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from control_plane.http.metadata import check_metadata
from control_plane.serving.responses.items import Messages
from control_plane.serving.responses.refusals import refuse_others, shown, to_callers_words, unsupported, wrong_type
from core.errors import InvalidRequest
from core.typed_json import JsonObject

NULLABLE_TEXTS = ("instructions", "user", "safety_identifier", "prompt_cache_key")
PASSED = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_completion_tokens"}
"""Names in a chat completion; the inference server checks the values."""
EXTRAS = ("seed", "stop", "chat_template_kwargs", "enable_thinking")
"""Fields of chat completions that OpenAI's responses do not have; passed on."""
READ = frozenset((*NULLABLE_TEXTS, *PASSED, *EXTRAS, "model", "input", "tools", "tool_choice", "parallel_tool_calls", "text", "stream",
                  "stream_options", "reasoning", "include", "metadata", "max_tool_calls"))  # fmt: skip
NOT_STORED = "responses are not stored; send the earlier items in input"
ONLY: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "store": ((False,), "responses are not stored; leave it out or write false, and send earlier items in input"),
    "previous_response_id": ((), NOT_STORED),
    "conversation": ((), NOT_STORED),
    "background": ((False,), "responses are made while the connection is open; leave it out, and set stream if an answer takes long"),
    "truncation": (("disabled",), "leave it out, and shorten the input to the model's context"),
    "service_tier": (("auto", "default"), "there is one tier; leave it out"),
    "prompt": ((), "prompts are not stored; write the text in instructions and input"),
    "context_management": ((), "leave it out, and shorten the input yourself"),
    "moderation": ((), "nothing is moderated; leave it out, and check input and output yourself"),
    "access_programs": ((), "leave it out"),
    "image": ((), "only text is read; leave it out"),
    "prompt_cache_options": ((), "leave it out; servers cache prompts on their own"),
    "prompt_cache_retention": ((), "leave it out; servers cache prompts on their own"),
    "top_logprobs": ((0,), "leave it out; chat completions return logprobs where the server has them"),
}
"""Fields of OpenAI's with the values that change nothing here, and what to do instead of the others."""
AS_GENERATED = "leave it out; the reasoning of an answer is returned as it was generated"
REASONING: Mapping[str, str] = {
    "effort": 'send "chat_template_kwargs": {"reasoning_effort": ...} if the model\'s chat template reads it',
    "summary": AS_GENERATED,
    "generate_summary": AS_GENERATED,
    "context": "leave it out, and send the reasoning items that the model is to see",
    "mode": "leave it out; there is one",
}
"""Fields of `reasoning` and what to do instead."""
INCLUDABLE = ("reasoning.encrypted_content",)
"""Reasoning is returned as plain text, so nothing is left to include."""
FUNCTION = frozenset(("type", "name", "description", "parameters", "strict"))
TOOL_CHOICES = ("none", "auto", "required")
FORMATS = '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "name": ..., "schema": {...}}'


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseRequest:
    """A response request as the chat completion that answers it."""

    chat: JsonObject
    """Body of the chat completion."""
    repeated: JsonObject
    """Fields of the response that repeat the request."""
    session: str | None
    """The request's `prompt_cache_key`, which ties a caller to one target of a route."""
    places: Mapping[str, str]
    """Items of `input` by their path in `chat`."""

    def in_callers_words(self, message: str, param: str | None) -> tuple[str, str | None]:
        """Return message and param of a fault in the chat completion in the words of this request."""
        return to_callers_words(message, param, self.places)

    def refusal(self, error: InvalidRequest) -> InvalidRequest:
        message, param = self.in_callers_words(error.message, error.param)
        return InvalidRequest(message, code=error.code, param=param)


def read_request(body: JsonObject) -> ResponseRequest:
    """Return the chat completion for a response request; ``InvalidRequest`` names the first field that cannot be honoured."""
    given = {name: value for name, value in body.items() if value is not None}
    _check_fields(given)
    messages = Messages()
    if given.get("instructions"):
        messages.add_instructions(given["instructions"])
    messages.add_input(given.get("input"))
    streams = _bool(given, "stream", default=False)
    chat: dict[str, Any] = {"model": given.get("model"), "messages": messages.messages}
    chat |= {theirs: given[own] for own, theirs in PASSED.items() if own in given}
    chat |= {name: given[name] for name in EXTRAS if name in given}
    tools = _tools(given.get("tools", []))
    if tools:
        choice = _tool_choice(given.get("tool_choice", "auto"))
        chat |= {"tools": tools, "tool_choice": choice}
        if "parallel_tool_calls" in given:
            chat["parallel_tool_calls"] = _bool(given, "parallel_tool_calls", default=True)
    elif given.get("tool_choice", "auto") not in ("auto", "none"):
        raise InvalidRequest(
            f"tool_choice {shown(given['tool_choice'])} needs tools; pass them, or leave it out",
            code="invalid_tools",
            param="tool_choice",
        )
    if (wanted := _response_format(given.get("text", {}))) is not None:
        chat["response_format"] = wanted
    if user := given.get("user") or given.get("safety_identifier"):
        chat["user"] = user
    if streams:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    return ResponseRequest(chat=chat, repeated=_repeated(given), session=given.get("prompt_cache_key"), places=messages.places)


def _check_fields(given: JsonObject) -> None:
    for name, value in given.items():
        if name in ONLY:
            accepted, advice = ONLY[name]
            if not any(type(value) is type(one) and value == one for one in accepted):
                raise unsupported(name, value, advice)
        elif name not in READ:
            known = ", ".join(sorted(READ | ONLY.keys()))
            raise InvalidRequest(f"unknown field {name[:80]!r}; known are {known}", code="unknown_parameter", param=name[:80])
    for name in NULLABLE_TEXTS:
        if not isinstance(given.get(name, ""), str):
            advice = "; send items in input" if name == "instructions" else ""
            raise wrong_type(name, given[name], f"a text{advice}")
    check_metadata(given.get("metadata"))
    _check_options(given)


def _check_options(given: JsonObject) -> None:
    for name, known in (("stream_options", {"include_obfuscation"}), ("reasoning", REASONING.keys()), ("text", {"format", "verbosity"})):
        value = given.get(name, {})
        if not isinstance(value, dict):
            raise wrong_type(name, value, "an object")
        refuse_others(value, frozenset(known), name)
    for name, advice in REASONING.items():
        if (value := given.get("reasoning", {}).get(name)) is not None:
            raise unsupported(f"reasoning.{name}", value, advice)
    if type(given.get("max_tool_calls", 1)) is not int:
        raise wrong_type("max_tool_calls", given["max_tool_calls"], "a number; it is about built-in tools, of which there are none")
    if given.get("stream_options", {}).get("include_obfuscation"):
        raise unsupported("stream_options.include_obfuscation", True, "leave it out; events carry no padding")
    if given.get("text", {}).get("verbosity") not in (None, "medium"):
        raise unsupported("text.verbosity", given["text"]["verbosity"], "leave it out, and ask for a length in instructions")
    included = given.get("include", [])
    if not isinstance(included, list):
        raise wrong_type("include", included, "a list")
    for index, one in enumerate(included):
        if one not in INCLUDABLE:
            raise unsupported(f"include[{index}]", one, "leave it out")


def _tools(given: Any) -> list[JsonObject]:
    if not isinstance(given, list):
        raise wrong_type("tools", given, "a list of functions")
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(given)]


def _tool(tool: Any, path: str) -> JsonObject:
    """Nest a function as in chat completions, its fields in the order that OpenAI documents, which most training rows have.

    A `strict` of false is left out, because it is what chat completions assume, and templates would render it.
    """
    if not isinstance(tool, dict):
        raise wrong_type(path, tool, 'an object such as {"type": "function", "name": ...}')
    if tool.get("type") != "function":
        raise unsupported(f"{path}.type", tool.get("type"), "only functions are called, by your own program")
    if isinstance(tool.get("function"), dict):
        raise wrong_type(f"{path}.function", tool["function"], "name, description and parameters beside type, not nested")
    refuse_others({k: v for k, v in tool.items() if (k, v) != ("allowed_callers", ["direct"])}, FUNCTION, path)
    if not isinstance(tool.get("name"), str) or not tool["name"]:
        raise wrong_type(f"{path}.name", tool.get("name"), "the function's name")
    names = ("name", "description", "parameters", *(("strict",) if tool.get("strict") else ()))
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _tool_choice(given: Any) -> Any:
    if given in TOOL_CHOICES:
        return given
    if isinstance(given, dict) and given.get("type") == "function" and isinstance(given.get("name"), str):
        refuse_others(given, frozenset(("type", "name")), "tool_choice")
        return {"type": "function", "function": {"name": given["name"]}}
    if isinstance(given, dict) and given.get("type") == "allowed_tools" and isinstance(tools := given.get("tools"), list):
        refuse_others(given, frozenset(("type", "mode", "tools")), "tool_choice")
        names = [tool.get("name") if isinstance(tool, dict) and tool.get("type") == "function" else None for tool in tools]
        allowed = [{"type": "function", "function": {"name": name}} for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": given.get("mode"), "tools": allowed}}
    write = f'{", ".join(TOOL_CHOICES)}, {{"type": "function", "name": ...}} or {{"type": "allowed_tools", "mode": ..., "tools": [...]}}'
    raise unsupported("tool_choice", given, f"write {write}")


def _response_format(text: JsonObject) -> JsonObject | None:
    wanted = text.get("format")
    if wanted is None or wanted == {"type": "text"}:
        return None
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if kind == "json_object":
        return {"type": "json_object"}
    if kind != "json_schema":
        raise InvalidRequest(f"text.format {shown(wanted)} is not one of {FORMATS}", code="invalid_response_format", param="text.format")
    if not isinstance(wanted.get("name"), str) or not isinstance(wanted.get("schema"), dict):
        raise InvalidRequest(
            f"text.format of type json_schema needs name and schema beside type; write {FORMATS}", code="invalid_response_format",
            param="text.format",
        )  # fmt: skip
    refuse_others(wanted, frozenset(("type", "name", "schema", "description", "strict")), "text.format")
    return {"type": "json_schema", "json_schema": {name: value for name, value in wanted.items() if name != "type" and value is not None}}


def _bool(given: JsonObject, name: str, *, default: bool) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise wrong_type(name, value, "true or false")
    return value


def _repeated(given: JsonObject) -> JsonObject:
    tools = [{"description": None, "parameters": None, "strict": None, **tool} for tool in given.get("tools", [])]
    names = (*NULLABLE_TEXTS, *PASSED, "max_tool_calls")
    return {
        **{name: given.get(name) for name in names},
        "metadata": given.get("metadata", {}),
        "parallel_tool_calls": given.get("parallel_tool_calls", True),
        "tools": tools,
        "tool_choice": given.get("tool_choice", "auto"),
        "text": {"format": given.get("text", {}).get("format") or {"type": "text"}},
        "reasoning": {"effort": None, "summary": None},
        "background": False,
        "store": False,
        "truncation": "disabled",
        "service_tier": "default",
        "previous_response_id": None,
        "top_logprobs": 0,
    }
