"""Checks answers against the JSON schemas of a tenant's rows, in a child process (:mod:`control_plane.sandbox.sandbox_parent`).

``python -m control_plane.sandbox.task_schemas DIRECTORY``: the order has ``schemas``, and ``checks`` with the index of a schema and a text
each; the result has a verdict for each check: true, false, or null for a schema that is invalid or refers to another document. Patterns are
matched in linear time, without lookaround; references can still multiply, which is why this runs with limits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jsonschema_rs

from control_plane.sandbox.sandbox_child import main
from engine.data import PassProgress
from engine.evals import NOT_JSON, parse_json


def _work(order: Mapping[str, Any], _: str, progress: Callable[[PassProgress], None]) -> Mapping[str, Any]:  # noqa: ARG001 (it has no parts to tell of)
    validators = [_validator(schema) for schema in order["schemas"]]
    return {"verdicts": [_verdict(validators[index], text) for index, text in order["checks"]]}


def _validator(schema: dict[str, Any]) -> Any:
    try:
        return jsonschema_rs.validator_for(schema, retriever=_fetch_nothing, pattern_options=jsonschema_rs.RegexOptions())
    except ValueError:
        return None


def _fetch_nothing(uri: str) -> NoReturn:
    raise ValueError(f"{uri} is another document")


def _verdict(validator: Any, text: str) -> bool | None:
    if validator is None:
        return None
    value = parse_json(text)
    return value is not NOT_JSON and bool(validator.is_valid(value))


if __name__ == "__main__":
    main(_work)
