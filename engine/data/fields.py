"""Parses the fields of one row into messages, tool calls and tools, and collects every problem on the way."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from core.typed_json import JsonObject
from engine.data.problems import Problem
from engine.data.readers.free_form import parse_text, without_nulls
from engine.data.readers.json_rows import parse_json
from engine.data.schema import REASONING_FIELDS, ROLES, Message, Role, TemplateValue, ToolCall

ROLE_OF: Mapping[str, Role] = {
    **{role: role for role in ROLES},
    "developer": "system",  # OpenAI's newer name
    "function": "tool",  # OpenAI's legacy function calls
}
SHAREGPT_ROLE_OF: Mapping[str, Role] = {
    **ROLE_OF,
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "function_call": "assistant",
}
"""Values of `from` in rows written for FastChat, Axolotl and LLaMA-Factory."""
PART_FIELDS = frozenset(("type", "text", "cache_control"))
"""`cache_control` is a hint about cost, not about the answer."""
CALL_FIELDS = frozenset(("id", "type", "function", "index"))
"""`index` is what is left of a call that was streamed."""
FUNCTION_FIELDS = frozenset(("name", "arguments", "parsed_arguments"))
MESSAGE_FIELDS = frozenset(("role", "content", "name", "weight", "tool_calls", "tool_call_id", "function_call", *REASONING_FIELDS))
SHAREGPT_FIELDS = frozenset(("from", "value", "weight", "name", *REASONING_FIELDS))
YES = ("true", "yes", "1", "1.0", "wahr", "ja", "vrai", "oui", "verdadero", "s\u00ed", "vero", "verdadeiro", "waar")
NO = ("false", "no", "0", "0.0", "falsch", "nein", "faux", "non", "falso", "onwaar", "nee")
TRUTH: Mapping[str, bool] = {**dict.fromkeys(YES, True), **dict.fromkeys(NO, False)}
"""Texts that stand for true and false, in lower case: those of CSV files, with what Excel writes in other languages."""
JUDGED: Mapping[str, bool] = {
    **TRUTH,
    **dict.fromkeys(("desirable", "good", "thumbs_up", "\U0001f44d"), True),
    **dict.fromkeys(("undesirable", "bad", "thumbs_down", "\U0001f44e"), False),
}
"""Texts that judge an answer."""
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of content parts that are text; the last two are those of OpenAI's Responses API."""
THOUGHT = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)
"""Reasoning in front of a call, as LLaMA-Factory and Qwen write it."""
CALL_FIX = 'write {"type": "function", "function": {"name": ..., "arguments": "{...}"}}'


MAX_MESSAGES = 10_000
"""Messages per conversation: at a dozen tokens per message, a context of 128k tokens is full before that."""
TEMPLATE_KWARGS, THINKING = "chat_template_kwargs", "enable_thinking"
"""Fields of a row with variables for the chat template, as vLLM's API and TRL name them; the second stands for the variable of its name."""
RESPONSE_FORMAT = "response_format"
"""Field of a row with the form of its answer, as in OpenAI's API."""
MAX_SCHEMA_BYTES = 64 << 10
"""As of the inference server (resources/inference/engine/grammar.py)."""
KWARG_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}", re.ASCII)
KWARG_TEXT = re.compile(r"[A-Za-z0-9 _.,:-]{0,200}", re.ASCII)
"""Texts that cannot hold a control token or markup: whatever a template does with them, they forge no turn."""
TEMPLATES_OWN = re.compile(r"messages|tools|documents|add_generation_prompt|raise_exception|strftime_now|\w+_token")
"""Variables that a row must not set."""
MAX_KWARGS = 16
MAX_PROBLEMS = 100
"""Problems reported per row: a 16 MiB row could have millions, and the next report shows the rest."""


class TooManyProblemsError(Exception):
    """Ends the parsing of a row with more problems than are reported."""


class Reading:
    """The problems of one row so far; a row with more than ``MAX_PROBLEMS`` ends with ``more_problems``."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def add(self, path: str, code: str, message: str, fix: str, *, options: str = "") -> None:
        if len(self.problems) == MAX_PROBLEMS:
            path, code, message = "", "more_problems", f"the row has more than {MAX_PROBLEMS} problems; the rest of it was not read"
            self.problems.append(Problem(code, message, path=path, fix="mend those that are named, and validate again"))
            raise TooManyProblemsError
        self.problems.append(Problem(code, message, path=path, fix=fix, options=options))

    def text(self, value: Any, path: str) -> str:
        if isinstance(value, str):
            return value
        if value is None:
            self.add(path, "missing_field", f"{path} is missing or null", "give it a text")
        else:
            self.add(path, "wrong_type", f"{path} is {kind_of(value)}, not text", "write it as a string")
        return ""

    def content(self, value: Any, path: str) -> str | None:
        """Returns text, or a list of text parts joined; None stays None (an assistant that only calls tools)."""
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, list):
            self.add(path, "wrong_type", f"{path} is {kind_of(value)}, not text", "write the content as a string")
            return None
        texts = []
        for index, part in enumerate(value):
            if isinstance(part, dict) and part.get("type", "text") in TEXT_PARTS:
                texts.append(self.text(part.get("text"), f"{path}[{index}].text"))
            else:
                kind = str(part.get("type"))[:40] if isinstance(part, dict) else kind_of(part)
                self.add(f"{path}[{index}]", "unsupported_content", f"content part of type {kind!r}", "keep text parts only")
        return "".join(texts)

    def decoded(self, value: Any, path: str) -> Any:
        """Returns `value`, or what its text holds as JSON: null if blank, the problem if it is not JSON."""
        parsed = parse_text(value)
        if isinstance(parsed, Problem):
            self.add(path, parsed.code, f"the text in {path!r}: {parsed.message}", f"write {path} as JSON, or leave it out")
        return None if isinstance(parsed, str) and parsed.strip() in ("", "null") else parsed

    def messages(self, value: Any, path: str) -> tuple[Message, ...]:
        if isinstance(self.decoded(value, path), Problem):
            return ()
        if not isinstance(value, list):
            code = "missing_field" if value is None else "wrong_type"
            self.add(path, code, f"{path} is {kind_of(value)}, not a list of messages", 'write [{"role": ..., "content": ...}, ...]')
            return ()
        if not value:
            self.add(path, "empty_messages", f"{path} is empty", "write at least a user and an assistant message")
        if len(value) > MAX_MESSAGES:
            self.too_many_messages(path, len(value))
            return ()
        return tuple([m for i, item in enumerate(value) if (m := self.message(item, f"{path}[{i}]")) is not None])

    def too_many_messages(self, path: str, count: int) -> None:
        self.add(
            path, "too_many_messages", f"{path} has {count} messages, more than {MAX_MESSAGES}", "split the conversation over several rows"
        )

    def flag(self, value: Any, path: str, *, words: Mapping[str, bool] = TRUTH, code: str = "wrong_type") -> bool | None:
        """Returns true or false, also of 1 and 0 and of the texts that stand for them; None for null."""
        known = truth(value, words)
        if known is None and value is not None:
            fix = "write true or false; yes and no, and 1 and 0 are read too"
            self.add(path, code, f"{path} is {ascii(value)[:60]}, neither true nor false", fix)
        return known

    def message(self, value: Any, path: str) -> Message | None:
        if not isinstance(value, dict):
            self.add(path, "wrong_type", f"{path} is {kind_of(value)}, not an object", 'write {"role": ..., "content": ...}')
            return None
        if "from" in value and value.get("role") is None:
            return self._sharegpt(value, path)
        role = self._role(value.get("role"), f"{path}.role", ROLE_OF)
        calls, thought = self.tool_calls(value.get("tool_calls"), f"{path}.tool_calls"), ""
        if value.get("function_call") is not None:
            thought, legacy = self._said_calls(value["function_call"], f"{path}.function_call")
            calls = (*calls, *legacy)
        called = bool(calls or value.get("tool_calls") or value.get("function_call"))  # a faulty call has its own problem
        content = self.content(value.get("content"), f"{path}.content")
        if content is None and value.get("content") is None and not (called and role == "assistant"):
            self.add(f"{path}.content", "missing_field", "content is missing or null", "give it a text; only tool calls go without")
        weight = self.weight(value.get("weight"), f"{path}.weight")
        optional = {k: self.text(v, f"{path}.{k}") for k in ("name", "tool_call_id") if (v := value.get(k)) is not None}
        reasoning = self.reasoning(value, role, path, thought=thought)
        if role is None:
            return None
        return Message(role=role, content=content, weight=weight, tool_calls=calls, reasoning=reasoning, **optional)

    def reasoning(self, value: JsonObject, role: Role | None, path: str, *, thought: str = "") -> str | None:
        """Returns the reasoning of an assistant's message, under any of its names or the `thought` before its calls; None if empty."""
        given = {
            name: text for name in REASONING_FIELDS if value.get(name) is not None and (text := self.text(value[name], f"{path}.{name}"))
        }
        if given and role not in ("assistant", None):
            fix = "move it to the assistant's message, or remove it"
            self.add(
                f"{path}.{next(iter(given))}", "invalid_reasoning", f"only an assistant's message has reasoning, this one is {role}", fix
            )
            return None
        if thought:
            given["the <think> before its call"] = thought
        if len({text.strip() for text in given.values()}) > 1:
            self.add(path, "invalid_reasoning", f"{' and '.join(given)} differ", "keep one of them")
        return next(iter(given.values()), None)

    def _sharegpt(self, value: JsonObject, path: str) -> Message | None:
        role = self._role(value["from"], f"{path}.from", SHAREGPT_ROLE_OF)
        weight = self.weight(value.get("weight"), f"{path}.weight")
        name = None if value.get("name") is None else self.text(value["name"], f"{path}.name")
        if value["from"] == "function_call":
            thought, calls = self._said_calls(value.get("value"), f"{path}.value")
            reasoning = self.reasoning(value, role, path, thought=thought)
            return Message(role="assistant", name=name, weight=weight, tool_calls=calls, reasoning=reasoning) if calls else None
        reasoning = self.reasoning(value, role, path)
        said = self.text(value.get("value"), f"{path}.value")
        return None if role is None else Message(role=role, content=said, name=name, weight=weight, reasoning=reasoning)

    def _said_calls(self, value: Any, path: str) -> tuple[str, tuple[ToolCall, ...]]:
        """Parses one call, or a list of parallel calls, and the reasoning in front of them."""
        thought, value = thought_and_calls(value)
        listed = value if isinstance(value, list) else [value]
        paths = [f"{path}[{index}]" for index in range(len(listed))] if isinstance(value, list) else [path]
        functions = [item if isinstance(item, dict) and "function" in item else {"function": item} for item in listed]
        if not functions:
            self.add(path, "invalid_tool_call", "the turn calls no function", CALL_FIX)
        return thought, tuple([c for item, place in zip(functions, paths, strict=True) if (c := self.tool_call(item, place))])

    def _role(self, value: Any, path: str, roles: Mapping[str, Role]) -> Role | None:
        role = roles.get(value) if isinstance(value, str) else None
        if role is None:
            code = "missing_field" if value is None else "invalid_role"
            known = ROLES if roles is ROLE_OF else ("human", "gpt", "system", "tool")
            message = "role is missing or null" if value is None else f"role is {ascii(value)[:60]}"
            self.add(path, code, message, f"use one of {', '.join(known)}")
        return role

    def weight(self, value: Any, path: str) -> int:
        if value is None:
            return 1
        if isinstance(value, bool) or not isinstance(value, int | float) or value not in (0, 1):
            fix = "use 0 (no loss) or 1: a loss of part weight is not computed"
            self.add(path, "invalid_weight", f"weight is {ascii(value)[:60]}", fix)
            return 1
        return int(value)

    def tool_calls(self, value: Any, path: str) -> tuple[ToolCall, ...]:
        value = self.decoded(value, path)
        if value is None or isinstance(value, Problem):
            return ()
        if not isinstance(value, list):
            self.add(path, "wrong_type", f"{path} is {kind_of(value)}, not a list", 'write [{"type": "function", "function": {...}}]')
            return ()
        return tuple([c for i, item in enumerate(value) if (c := self.tool_call(item, f"{path}[{i}]")) is not None])

    def tool_call(self, value: Any, path: str) -> ToolCall | None:
        function = value.get("function") if isinstance(value, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        arguments = _arguments(function.get("arguments")) if isinstance(function, dict) else None
        if not isinstance(name, str) or not name or arguments is None:
            self.add(path, "invalid_tool_call", "needs function.name, and function.arguments that are a JSON object", CALL_FIX)
            return None
        call_id = value.get("id")
        return ToolCall(name=name, arguments=arguments, id=None if call_id is None else self.text(call_id, f"{path}.id"))

    def tools(self, row: JsonObject, path: str = "") -> tuple[JsonObject, ...]:
        """Parses `tools`, a list of objects, JSON of either, or the `functions` of OpenAI's older form; nulls are left out.

        A bare function (ShareGPT, the Responses API) is wrapped as the tool that a chat request sends, so that both are rendered alike.
        """
        self.flag(row.get("parallel_tool_calls"), f"{path}parallel_tool_calls")
        name = "tools" if row.get("tools") is not None else "functions"
        value = self.decoded(row.get(name), f"{path}{name}")
        if isinstance(value, list):
            value = [self.decoded(tool, f"{path}{name}[{index}]") for index, tool in enumerate(value)]
        if value is None or value == [] or isinstance(value, Problem):
            return ()
        if isinstance(value, list) and any(isinstance(tool, Problem) for tool in value):
            return ()
        if not isinstance(value, list) or not all(isinstance(t, dict) for t in value):
            fix = 'write [{"type": "function", "function": {...}}]'
            self.add(f"{path}{name}", "wrong_type", f"{path}{name} must be a list of objects", fix)
            return ()
        found: list[JsonObject] = without_nulls(value)
        return tuple([_wrapped(tool) if name == "tools" else {"type": "function", "function": tool} for tool in found])

    def template_kwargs(self, row: JsonObject) -> dict[str, TemplateValue]:
        """Parses `chat_template_kwargs`, an object or its JSON, and `enable_thinking`; null stands for absent."""
        given = row.get(TEMPLATE_KWARGS)
        if isinstance(given, str):
            given = parse_json(given.encode("utf-8", "surrogatepass")) if given.strip() else None
        fix = 'write {"enable_thinking": false}'
        if isinstance(given, Problem):
            self.add(TEMPLATE_KWARGS, "invalid_template_kwargs", f"the text of {TEMPLATE_KWARGS}: {given.message}", given.fix)
            return {}
        if not isinstance(given, dict | None):
            self.add(TEMPLATE_KWARGS, "invalid_template_kwargs", f"{TEMPLATE_KWARGS} is {kind_of(given)}, not an object", fix)
            return {}
        found = {str(name): value for name, value in (given or {}).items() if value is not None}
        if row.get(THINKING) is not None:
            thinking = truth(row[THINKING])
            if thinking is None or found.get(THINKING, thinking) != thinking:
                self.add(
                    THINKING, "invalid_template_kwargs", f"{THINKING} is not true or false, or {TEMPLATE_KWARGS} differs", "write it once"
                )
                return {}
            found[THINKING] = thinking
        for name, value in found.items():
            if not KWARG_NAME.fullmatch(name) or TEMPLATES_OWN.fullmatch(name):
                self.add(TEMPLATE_KWARGS, "invalid_template_kwargs", f"{name[:40]!a} is not a variable that a row may set", fix)
            elif isinstance(value, str) and value.strip().casefold() in ("true", "false"):  # a text counts as true, whatever it says
                said = value.strip().casefold()
                self.add(
                    f"{TEMPLATE_KWARGS}.{name}",
                    "invalid_template_kwargs",
                    f"the value is the text {value!a}",
                    f"write {said} without quotes",
                )
            elif not _is_template_value(value):
                wanted = "true, false, a number (an integer of 64 bits), or at most 200 letters, digits, spaces and _.,:-"
                self.add(
                    f"{TEMPLATE_KWARGS}.{name}",
                    "invalid_template_kwargs",
                    f"the value is {kind_of(value)} of another form",
                    f"use {wanted}",
                )
        if len(found) > MAX_KWARGS:
            self.add(TEMPLATE_KWARGS, "invalid_template_kwargs", f"{len(found)} variables, more than {MAX_KWARGS}", "leave some out")
        return found

    def response_format(self, row: JsonObject) -> JsonObject:
        """Parses `response_format`, an object or its JSON; null and ``{"type": "text"}`` stand for absent."""
        given = row.get(RESPONSE_FORMAT)
        if isinstance(given, str):
            given = parse_json(given.encode("utf-8", "surrogatepass")) if given.strip() else None
        if given is None:
            return {}
        kind = given.get("type") if isinstance(given, dict) else None
        named = given.get("json_schema") if isinstance(given, dict) else None
        has_schema = isinstance(named, dict) and isinstance(named.get("schema"), dict)
        if kind not in ("text", "json_object", "json_schema") or (kind == "json_schema" and not has_schema):
            message = "it is neither a text, a JSON object nor a JSON schema, as OpenAI's API has them"
            fix = 'write {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
            self.add(RESPONSE_FORMAT, "invalid_response_format", message, fix)
            return {}
        if (size := len(json.dumps(given))) > MAX_SCHEMA_BYTES:
            message = f"it has {size} bytes, more than {MAX_SCHEMA_BYTES}"
            self.add(RESPONSE_FORMAT, "invalid_response_format", message, "shorten the schema, or leave it out")
        return {} if kind == "text" else without_nulls(given)

    def turns(self, value: Any, path: str, role: Role) -> tuple[Message, ...]:
        """Returns a text as one message of `role`, or messages unchanged (a single one may come without its list)."""
        if isinstance(value, str):
            return (Message(role=role, content=value),)
        return self.messages([value] if isinstance(value, dict) else value, path)


def thought_and_calls(value: Any) -> tuple[str, Any]:
    """Returns the reasoning in front of calls, empty if none, and the calls, parsed if they are text."""
    if not isinstance(value, str):
        return "", value
    found = THOUGHT.match(value)
    thought, rest = ("", value) if found is None else (found.group(1).strip(), value[found.end() :])
    return thought, parse_json(rest.strip().encode("utf-8", "surrogatepass"))


def fields_of_calls(message: JsonObject) -> Iterator[tuple[str, JsonObject, frozenset[str]]]:
    """Yields the path in `message`, the fields and their known names of each call and its function, also where they are JSON text."""
    named = {"tool_calls": parse_text(message.get("tool_calls")), "function_call": thought_and_calls(message.get("function_call"))[1]}
    if message.get("from") == "function_call":
        named["value"] = thought_and_calls(message.get("value"))[1]
    for name, calls in named.items():
        for index, call in enumerate(calls if isinstance(calls, list) else [calls]):
            place = f"{name}[{index}]" if isinstance(calls, list) else name
            if not isinstance(call, dict):
                continue
            is_bare = name != "tool_calls" and "function" not in call
            yield place, call, FUNCTION_FIELDS if is_bare else CALL_FIELDS
            if isinstance(function := call.get("function"), dict):
                yield f"{place}.function", function, FUNCTION_FIELDS


def _wrapped(tool: JsonObject) -> JsonObject:
    bare = "function" not in tool and isinstance(tool.get("name"), str) and tool.get("type", "function") == "function"
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}} if bare else tool


def truth(value: Any, words: Mapping[str, bool] = TRUTH) -> bool | None:
    """Returns what stands for true or false: either, 1 or 0, or a text of `words` in any case; None for anything else."""
    if isinstance(value, str):
        return words.get(value.strip().casefold().replace(" ", "_").replace("-", "_"))
    return bool(value) if isinstance(value, int | float) and value in (0, 1) else None


def kind_of(value: Any) -> str:
    """Returns the kind of a JSON value in words."""
    if value is None:
        return "missing"
    names = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def _is_template_value(value: Any) -> bool:
    if isinstance(value, str):
        return KWARG_TEXT.fullmatch(value) is not None
    if isinstance(value, int):
        return -(1 << 63) <= value < 1 << 63
    return isinstance(value, float) and math.isfinite(value)


def _arguments(value: Any) -> JsonObject | None:
    if isinstance(value, str):
        value = parse_json((value or "{}").encode("utf-8", "surrogatepass"))
    return value if isinstance(value, dict) else None
