"""Rows of an assistant that looks up orders and switches lamps: a question, calls, their results and an answer; some calls are parallel."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOMS = ("hall", "kitchen", "attic", "garage", "study")
STATES = ("packed", "sent", "delivered")


def _tool(name: str, description: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS: Sequence[dict[str, Any]] = (
    _tool("find_order", "Find an order.", number={"type": "integer", "minimum": 100, "maximum": 999}),
    _tool("set_lamp", "Switch a lamp.", room={"enum": list(ROOMS)}, on={"type": "boolean"}),
    _tool("read_temperature", "Read a thermometer.", room={"enum": list(ROOMS)}),
)
SCHEMAS: Mapping[str, Any] = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


def write_tool_rows(file: Path, *, count: int = 300, seed: int = 5) -> Path:
    """Write `count` rows of chat with tools as JSONL."""
    file.write_text("".join(json.dumps(row) + "\n" for row in tool_rows(count, seed=seed)))
    return file


def tool_rows(count: int, *, seed: int) -> Iterator[dict[str, Any]]:
    rng = random.Random(seed)
    for number in range(count):
        question, calls, results, answer = _turn(rng)
        ids = [f"call{number:04d}{n}" for n in range(len(calls))]
        called = [
            {"id": id_, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for id_, (name, arguments) in zip(ids, calls, strict=True)
        ]
        told = [{"role": "tool", "tool_call_id": id_, "content": json.dumps(result)} for id_, result in zip(ids, results, strict=True)]
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": None, "tool_calls": called}, *told]
        messages = [*turns, {"role": "assistant", "content": answer}] if number % 3 else turns[:2]
        yield {"messages": messages, "tools": list(TOOLS)}


def _turn(rng: random.Random) -> tuple[str, list[tuple[str, Any]], list[Any], str]:
    kind, room, on = rng.randrange(4), rng.choice(ROOMS), rng.random() < 0.5
    if kind == 0:
        number, state = rng.randint(100, 999), rng.choice(STATES)
        return f"Where is order {number}?", [("find_order", {"number": number})], [{"state": state}], f"Order {number} is {state}."
    if kind == 1:
        word = "on" if on else "off"
        return f"Switch {word} the lamp in the {room}.", [("set_lamp", {"room": room, "on": on})], [{"ok": True}], f"The lamp is {word}."
    if kind == 2:
        degrees = rng.randint(12, 25)
        return f"How warm is the {room}?", [("read_temperature", {"room": room})], [{"degrees": degrees}], f"It has {degrees} degrees."
    rooms = rng.sample(ROOMS, 2)
    degrees = [rng.randint(12, 25) for _ in rooms]
    calls: list[tuple[str, Any]] = [("read_temperature", {"room": each}) for each in rooms]
    answer = f"The {rooms[0]} has {degrees[0]} degrees, the {rooms[1]} {degrees[1]}."
    return f"Compare {rooms[0]} and {rooms[1]}.", calls, [{"degrees": each} for each in degrees], answer
