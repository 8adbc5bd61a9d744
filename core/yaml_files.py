"""YAML files that operators write, read into dataclasses; a mistake is named with its place, the value and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

try:
    from yaml import CSafeLoader as SafeLoader  # twenty times as fast, if PyYAML was built with libyaml
except ImportError:
    from yaml import SafeLoader  # type: ignore[assignment]

__all__ = ["SafeLoader", "parse", "read"]
T = TypeVar("T")
MAX_SHOWN = 80


def read(path: Path, of: TypeAdapter[T], *, setting: str) -> T:
    """Return what the file `path`, which `setting` names, describes; ``ValueError`` names the first mistake."""
    try:
        body = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}; {setting} names that file") from error
    return parse(body, of, origin=str(path))


def parse(body: Any, of: TypeAdapter[T], *, origin: str) -> T:
    """Return what `body` describes; ``ValueError`` names the first mistake and its place in `origin`."""
    try:
        return of.validate_python(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    *above, last = first["loc"] or ("",)
    if first["type"] == "missing":
        raise ValueError(f"{_place(origin, above)}: {last} is missing")
    if first["type"] == "unexpected_keyword_argument":
        known = ", ".join(_fields(of.json_schema(), above))
        raise ValueError(f"{_place(origin, above)}: {str(last)[:MAX_SHOWN]} is unknown; it has {known}")
    shown = "" if isinstance(first["input"], dict) else f" is {repr(first['input'])[:MAX_SHOWN]}"
    message = first["msg"].removeprefix("Value error, ").partition(" or an instance of ")[0]
    raise ValueError(f"{_place(origin, first['loc'])}{shown}: {message[0].lower()}{message[1:]}")


def _fields(schema: dict[str, Any], loc: Sequence[int | str]) -> list[str]:
    """Return the names of the fields at `loc`."""
    here = schema
    for part in loc:
        here = here["items"] if isinstance(part, int) else here.get("properties", {}).get(part) or here["additionalProperties"]
        here = schema["$defs"][here["$ref"].rpartition("/")[2]] if "$ref" in here else here
    return list(here["properties"])


def _place(origin: str, loc: Sequence[int | str]) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc)
    return f"{origin}: {path.removeprefix('.')}" if path else origin
