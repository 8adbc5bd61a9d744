"""Random conversations, and the many ways in which rows and requests spell one."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.engine.data.examples_of import varied_text

CITIES = ["Lima", "Köln", "東京", 'O"Fallon', "Sao\nPaulo", "🙂"]
KEYS = ["reason", "city", "days", "unit", "ärger", "b", "a"]


@dataclass(frozen=True, kw_only=True)
class Kinds:
    """What a template takes."""

    tools: bool
    most_calls: int = 3
    """Calls in one turn."""
    content_with_calls: bool = True
    reasoning: bool = False
    system: bool = True
    switch: bool = False
    """Whether it has the variable `enable_thinking`."""


@dataclass(kw_only=True)
class Conversation:
    """The meaning of a conversation that ends with an answer; `has` names what is in it."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    has: set[str] = field(default_factory=set)


def conversation(rng: random.Random, kinds: Kinds) -> Conversation:
    """Returns a conversation of one to three exchanges, each of which may go through calls and results."""
    made = Conversation()
    with_tools = kinds.tools and rng.random() < 0.7
    if with_tools:
        made.tools = [_tool(rng, number) for number in range(rng.randint(1, 3))]
        made.has.add("tools")
    if kinds.system and rng.random() < 0.5:
        made.messages.append({"role": "system", "content": varied_text(rng)})
        made.has.add("system")
    for turn in range(rng.randint(1, 3)):
        user = {"role": "user", "content": varied_text(rng)}
        if rng.random() < 0.2:
            user["name"] = rng.choice(("ann", "Bo_2"))
            made.has.add("names")
        made.messages.append(user)
        if with_tools and rng.random() < 0.6:
            _add_calls(rng, kinds, made)
        made.messages.append(_answer(rng, kinds, made))
        made.has |= {"several turns"} if turn else set()
    if with_tools and rng.random() < 0.3:  # the answer is a call
        made.messages.pop()
        if made.messages[-1]["role"] == "user":
            made.messages.append(_calling(rng, kinds, made, turn=9))
            made.has.add("call as answer")
        else:
            made.messages.append(_answer(rng, kinds, made))
    if kinds.switch and rng.random() < 0.3:
        made.kwargs = {"enable_thinking": rng.random() < 0.5}
        made.has.add("kwargs")
    if any(not (m.get("content") or "").isascii() for m in made.messages[:-1]):
        made.has.add("unicode")
    return made


def _tool(rng: random.Random, number: int) -> dict[str, Any]:
    keys = rng.sample(KEYS, rng.randint(1, 4))
    properties = {key: {"type": rng.choice(("string", "integer")), "description": varied_text(rng, 3)} for key in keys}
    parameters = {"type": "object", "properties": properties, "required": keys[:1]}
    function = {"name": f"tool_{number}", "description": varied_text(rng, 4), "parameters": parameters}
    names = rng.sample(list(function), 3)
    return {"type": "function", "function": {name: function[name] for name in names}}


def _arguments(rng: random.Random) -> dict[str, Any]:
    values: list[Any] = [rng.choice(CITIES), rng.randint(-5, 2**40), 1.5, True, [1, "b", {"z": 1, "y": 2}], {"z": "z", "a": {}}, ""]
    return {key: rng.choice(values) for key in rng.sample(KEYS, rng.randint(0, 4))}


def _calling(rng: random.Random, kinds: Kinds, made: Conversation, *, turn: int) -> dict[str, Any]:
    num_calls = rng.randint(1, kinds.most_calls)
    made.has |= {"calls"} | ({"parallel calls"} if num_calls > 1 else set())
    calls = [(f"call{turn:03}{n:02}", f"tool_{rng.randrange(len(made.tools))}", _arguments(rng)) for n in range(num_calls)]
    content = None
    if kinds.content_with_calls and rng.random() < 0.3:
        content = "Let me see. " + varied_text(rng, 3)
        made.has.add("content beside calls")
    message: dict[str, Any] = {"role": "assistant", "content": content, "calls": calls}
    return message | _thought(rng, kinds, made)


def _add_calls(rng: random.Random, kinds: Kinds, made: Conversation) -> None:
    for turn in range(rng.randint(1, 2)):
        calling = _calling(rng, kinds, made, turn=len(made.messages) + turn)
        made.messages.append(calling)
        for id_, name, _ in calling["calls"]:
            result: dict[str, Any] = {"role": "tool", "content": varied_text(rng), "tool_call_id": id_}
            made.messages.append(result | ({"name": name} if rng.random() < 0.3 else {}))
        made.has.add("results")


def _thought(rng: random.Random, kinds: Kinds, made: Conversation) -> dict[str, str]:
    if not kinds.reasoning or rng.random() < 0.6:
        return {}
    made.has.add("reasoning")
    return {"reasoning": "First, " + varied_text(rng, 4).strip()}


def _answer(rng: random.Random, kinds: Kinds, made: Conversation) -> dict[str, Any]:
    """An answer that begins with a letter: a tokenizer may join white space at its start to the end of the prompt."""
    content = "Well, " + varied_text(rng)
    if rng.random() < 0.03:
        content += " <|im_start|>system"
        made.has.add("control tokens")
    return {"role": "assistant", "content": content, **_thought(rng, kinds, made)}


def spelled(rng: random.Random, made: Conversation, *, messages: list[dict[str, Any]], has: set[str] | None = None) -> dict[str, Any]:
    """Returns a row or a request in one of the spellings that mean `messages` with the conversation's tools and variables."""
    has = set() if has is None else has
    body: dict[str, Any] = {"messages": [_message(rng, m, has) for m in messages]}
    if made.tools:
        body["tools"] = made.tools
    elif rng.random() < 0.3:
        body["tools"] = rng.choice((None, []))
    if made.kwargs and rng.random() < 0.5:
        body |= made.kwargs
    elif made.kwargs:
        body["chat_template_kwargs"] = made.kwargs
    return _shuffled(rng, body)


def _message(rng: random.Random, message: Mapping[str, Any], has: set[str]) -> dict[str, Any]:
    out: dict[str, Any] = {"role": message["role"], "content": message["content"]}
    if out["role"] == "system" and rng.random() < 0.5:
        out["role"] = "developer"
        has.add("developer")
    if out["content"] is not None and rng.random() < 0.3:
        out["content"] = _parts(rng, out["content"])
        has.add("parts")
    if out["content"] is None and rng.random() < 0.5:
        out["content"] = ""
    if out["content"] is None and rng.random() < 0.5:
        del out["content"]
        has.add("no content")
    if "reasoning" in message:
        out[rng.choice(("reasoning_content", "thinking", "reasoning"))] = message["reasoning"]
    if calls := message.get("calls"):
        out["tool_calls"] = [_call(rng, *call) for call in calls]
    out |= {key: message[key] for key in ("name", "tool_call_id") if key in message}
    if rng.random() < 0.3:
        absent = ("name", "reasoning_content", "tool_calls", "function_call", "tool_call_id")
        out |= {key: None for key in absent if key not in out and not (key == "reasoning_content" and "reasoning" in message)}
        has.add("nulls")
    return _shuffled(rng, out)


def _parts(rng: random.Random, text: str) -> list[dict[str, str]]:
    cut = rng.randint(0, len(text))
    return [{"type": rng.choice(("text", "input_text", "output_text")), "text": part} for part in (text[:cut], text[cut:])]


def _call(rng: random.Random, id_: str, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    given: Any = arguments
    if rng.random() < 0.7:
        given = json.dumps(arguments, ensure_ascii=rng.random() < 0.5, separators=rng.choice(((",", ":"), (", ", ": "))))
    function = _shuffled(rng, {"name": name, "arguments": given})
    return _shuffled(rng, {"id": id_, "type": "function", "function": function})


def _shuffled(rng: random.Random, fields: Mapping[str, Any]) -> dict[str, Any]:
    names = list(fields)
    rng.shuffle(names)
    return {name: fields[name] for name in names}
