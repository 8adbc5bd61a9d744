"""What a file format does to a tenant's own JSON: turns it into text, and fills objects with nulls that were never written.

A column of Parquet has one type, and pandas' ``to_json`` writes what such a column holds, so each object gets the keys of all the others,
with null. The model would learn them. They are removed:

1. In Parquet everywhere inside objects, where a null cannot be told from an absent key (``parquet_rows``).
2. Inside tools and response formats in every format, because a JSON schema needs no null under a key. Two exceptions: ``default`` and
   ``const`` stay if the schema around them allows null, and values inside ``default``, ``const``, ``enum`` and ``examples`` stay.
3. Never inside arguments of JSON, where null can be the answer: ``checks.tool_rows`` warns where the tool's schema does not take it.
"""

from __future__ import annotations

import copy
from typing import Any

from core.typed_json import JsonObject
from engine.data.problems import Problem
from engine.data.readers.json_rows import parse_json
from engine.data.readers.transcripts import begins_as_llama

JSON_FIELDS = frozenset(("messages", "conversations", "history", "tools", "functions"))
"""Fields of a row that are never plain text, so that a text in them is JSON."""
ANSWERS = frozenset(("chosen", "rejected", "preferred_output", "non_preferred_output"))
TURNS = frozenset(("prompt", "completion"))
"""Fields that are text or messages, null if absent. Texts that hold messages are read as such if those of all answers do; a prompt or a
completion if those of all these fields do."""
TEXTS = JSON_FIELDS | ANSWERS | TURNS | {"input"}
SAID = frozenset(("content", "tool_calls", "function_call"))
"""Fields of a message, one of which tells it from another object with a role."""
NAMED_SCHEMAS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""Keywords whose object has names for keys, and schemas for values."""
LITERALS = frozenset(("default", "const", "enum", "examples"))
"""Keywords whose value is data, not a schema."""


def decode_texts(value: JsonObject) -> JsonObject:
    """Returns a row with the JSON in its texts parsed, whatever file it comes from; what cannot be parsed stays text, for its reader to
    refuse."""
    found: dict[str, Any] = {}
    for name in TEXTS & value.keys():
        if name == "input" and "instruction" in value:  # Alpaca's, which is text
            continue
        parsed = parse_text(value[name])
        if parsed is value[name] or isinstance(parsed, Problem):
            continue
        if name in JSON_FIELDS or holds_messages(parsed) or (name == "input" and isinstance(parsed, dict)):
            found[name] = parsed
    for sides, decoded in ((ANSWERS, ANSWERS), (TURNS | ANSWERS, TURNS)):
        if not all(holds_messages(found.get(name, value[name])) for name in sides & value.keys() if value[name] is not None):
            found = {name: parsed for name, parsed in found.items() if name not in decoded}
    if not found:
        return value
    out: Any = copy.copy(value)  # a mapped row stays one
    out.update(found)
    return out  # type: ignore[no-any-return]


def parse_text(value: Any) -> Any:
    """Returns what a text that begins as JSON holds, or its problem; any other value as it is."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{") or begins_as_llama(value):
        return value
    return parse_json(value.strip().encode("utf-8", "surrogatepass"))


def holds_messages(value: Any) -> bool:
    """Returns whether `value` is a message, or a list of messages by its first."""
    first = value[0] if isinstance(value, list) and value else value
    if not isinstance(first, dict):
        return False
    return {"from", "value"} <= first.keys() or ("role" in first and not SAID.isdisjoint(first))


def without_nulls(value: Any, *, names: bool = False) -> Any:
    """Returns a tool or a JSON schema without nulls under keys (see the module). `names`: its keys are names of schemas, not keywords."""
    if isinstance(value, list):
        return [without_nulls(item) if isinstance(item, dict | list) else item for item in value]
    out: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, dict | list) and (names or key not in LITERALS):
            out[key] = without_nulls(item, names=not names and key in NAMED_SCHEMAS)
        elif item is not None or (not names and key in ("default", "const") and allows_null(value)):
            out[key] = item
    return out


def allows_null(schema: Any) -> bool:
    """Returns whether a JSON schema takes null, as far as its own keywords say; one that refers to another does not."""
    if not isinstance(schema, dict):
        return schema is not False
    if (kind := schema.get("type")) is not None:
        return schema.get("nullable") is True or kind == "null" or (isinstance(kind, list) and "null" in kind)
    if isinstance(choices := schema.get("anyOf") or schema.get("oneOf"), list):
        return any(map(allows_null, choices))
    if isinstance(listed := schema.get("enum"), list):
        return None in listed
    return schema.get("$ref") is None and schema.get("const") is None and not isinstance(schema.get("allOf"), list)
