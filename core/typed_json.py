"""Frozen dataclasses as JSON: ``dataclasses.asdict`` writes a record, :func:`from_json` reads it."""

from __future__ import annotations

import itertools
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

R = TypeVar("R")
JsonObject = Mapping[str, Any]
"""A JSON object whose shape is not ours: a tenant's row or a message, tool or argument in it, or the settings of a foreign library."""


def from_json(of: type[R], body: Mapping[str, Any], *, ignore_unknown: bool = False) -> R:
    """Returns `body` as an `of`; ``TypeError`` if a field is missing, or unknown and not ignored.

    Nested dataclasses, tuples, mappings, enums and paths follow the types of the fields. Other values stay as they are: digests of a record
    distinguish 1 from 1.0.
    """
    kinds = _kinds(of)  # type: ignore[arg-type]  # classes are hashable
    return of(**{name: _read(kinds.get(name), value) for name, value in body.items() if name in kinds or not ignore_unknown})


@cache
def _kinds(of: type[Any]) -> Mapping[str, Any]:
    hints = get_type_hints(of)
    return {field.name: hints[field.name] for field in fields(of)}


def _read(kind: Any, value: Any) -> Any:
    origin, parts, listed = get_origin(kind), get_args(kind), isinstance(value, list | tuple)
    if value is None:
        return None
    if origin in (Union, types.UnionType):
        members = [part for part in parts if part is not types.NoneType and (get_origin(part) is tuple) == listed]
        return _read(members[0], value) if members else value
    if origin is tuple and listed:
        if parts[-1] is not Ellipsis and len(parts) != len(value):
            raise TypeError(f"{value} has {len(value)} values, not {len(parts)}")
        return tuple(map(_read, itertools.repeat(parts[0]) if parts[-1] is Ellipsis else parts, value))
    if isinstance(value, Mapping):
        return from_json(kind, value) if isinstance(kind, type) and is_dataclass(kind) else _mapping(parts, value)
    return kind(value) if isinstance(kind, type) and issubclass(kind, Enum | Path) else value


def _mapping(parts: tuple[Any, ...], value: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: _read(parts[1], inner) for name, inner in value.items()} if len(parts) == 2 else value
