"""Generates the client's types from the API's OpenAPI document: a TypedDict for each object, a module for each noun.

Required properties are required here, others may be absent. Descriptions stay with their fields.
"""

from __future__ import annotations

import keyword
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

Schema = Mapping[str, Any]
SKIPPED = re.compile(r"ListOf_.*|Body_.*|HTTPValidationError|ValidationError")
"""Lists are one generic type; forms have methods with parameters; errors are raised as exceptions."""
PLAIN = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
HEADER = "# Written by `python -m tools.client` from the API's OpenAPI document: change that, and run it again.\n"
LISTING = '''class ListOf(TypedDict, Generic[T]):
    """One page of a list."""

    object: Literal["list"]
    data: list[T]
    has_more: bool


Json = dict[str, Any]
"""An object whose fields depend on its kind."""
'''


def with_streamed(document: Schema) -> Schema:
    """Returns the document with the objects of event streams, which OpenAPI cannot describe."""
    from control_plane.datasets.schemas import FileEvent

    components = document["components"]
    made: dict[str, Any] = {}
    for kind in (FileEvent,):
        schema = kind.model_json_schema(mode="serialization", ref_template="#/components/schemas/{model}")
        made |= schema.pop("$defs", {}) | {kind.__name__: schema}
    return {**document, "components": {**components, "schemas": made | components["schemas"]}}


def homes_of() -> dict[str, str]:
    """Returns each schema's noun by the schema's name; the application must be loaded."""
    homes: dict[str, str] = {}
    for kind in _subclasses(BaseModel):
        if kind.__module__.startswith("control_plane."):
            homes.setdefault(kind.__name__, kind.__module__.split(".")[1])
    return homes


def _subclasses(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for sub in kind.__subclasses__():
        yield sub
        yield from _subclasses(sub)


def modules(document: Schema, *, homes: Mapping[str, str]) -> dict[str, str]:
    """Returns the text of each module, by its path below the client's package."""
    schemas = {name: s for name, s in document["components"]["schemas"].items() if not SKIPPED.fullmatch(name)}
    where = {name: homes[class_name(name)] for name in schemas}
    made = {}
    for module in sorted(set(where.values())):
        own = {name: schema for name, schema in schemas.items() if where[name] == module}
        made[f"types/{module}.py"] = _module(module, own, where)
    made["types/http.py"] = made.get("types/http.py", _module("http", {}, where)) + "\n\n" + LISTING
    made["types/__init__.py"] = _package({**{class_name(n): m for n, m in where.items()}, "ListOf": "http", "Json": "http"})
    return made


def class_name(schema: str) -> str:
    """Returns the class name: FastAPI distinguishes a model in responses from the same in requests by a suffix."""
    return schema.removesuffix("-Output").replace("-Input", "Input")


def _package(homes: Mapping[str, str]) -> str:
    imports = "\n".join(f"from control_plane.client.types.{module} import {name}" for name, module in sorted(homes.items()))
    listed = ", ".join(f'"{name}"' for name in sorted(homes))
    return f'{HEADER}"""Objects of API requests and responses, as TypedDicts."""\n\n{imports}\n\n__all__ = [{listed}]\n'


def _module(module: str, schemas: Schema, where: Mapping[str, str]) -> str:
    used = {class_name(ref): where[ref] for schema in schemas.values() for ref in _references(schema) if where[ref] != module}
    lines = [
        HEADER + f'"""Objects of the API: {module.replace("_", " ")}."""',
        "from __future__ import annotations",
        "from typing import Any, Generic, Literal, NotRequired, TypedDict, TypeVar",
        *(f"from control_plane.client.types.{home} import {name}" for name, home in sorted(used.items())),
        'T = TypeVar("T")' if module == "http" else "",
        *(_typed_dict(class_name(name), schema) for name, schema in _in_order(schemas)),
    ]
    return "\n\n".join(line for line in lines if line) + "\n"


def _in_order(schemas: Schema) -> list[tuple[str, Schema]]:
    return sorted(schemas.items())


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, Mapping):
        if "$ref" in schema:
            yield str(schema["$ref"]).rpartition("/")[2]
        for value in schema.values():
            yield from _references(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _references(value)


def _typed_dict(name: str, schema: Schema) -> str:
    fields = schema.get("properties", {})
    if not fields or any(keyword.iskeyword(field) or not field.isidentifier() for field in fields):
        return _functional(name, schema) if fields else f"{name} = {type_of(schema)}"
    lines = [f"class {name}(TypedDict):"]
    if schema.get("description"):
        lines += [_quoted(schema["description"]), ""]
    for field, what in fields.items():
        lines.append(f"    {field}: {_declared(field, what, schema)}")
        if what.get("description"):
            lines.append(_quoted(what["description"]))
    return "\n".join(lines)


def _functional(name: str, schema: Schema) -> str:
    """Returns fields whose names are not valid in Python."""
    fields = ", ".join(f'"{field}": "{_declared(field, what, schema)}"' for field, what in schema["properties"].items())
    return f'{name} = TypedDict("{name}", {{{fields}}})'


def _declared(field: str, what: Schema, schema: Schema) -> str:
    kind = type_of(what)
    return kind if field in schema.get("required", ()) else f"NotRequired[{kind}]"


def type_of(schema: Schema) -> str:
    """Returns the annotation of a value that the schema describes."""
    if "$ref" in schema:
        return class_name(str(schema["$ref"]).rpartition("/")[2])
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return f"Literal[{', '.join(map(repr, values))}]"
    for several in ("anyOf", "oneOf"):
        if several in schema:
            kinds = [type_of(one) for one in schema[several]]
            return "Any" if "Any" in kinds else " | ".join(dict.fromkeys(kinds))
    if "allOf" in schema and len(schema["allOf"]) == 1:
        return type_of(schema["allOf"][0])
    kind = schema.get("type")
    if kind == "array":
        return f"list[{type_of(schema.get('items', {}))}]"
    if kind == "object":
        values = schema.get("additionalProperties", True)
        return f"dict[str, {type_of(values) if isinstance(values, Mapping) and values else 'Any'}]"
    return PLAIN.get(str(kind), "Any")


def _quoted(text: str) -> str:
    one_line = " ".join(text.replace("\\", "\\\\").split())
    lines = textwrap.wrap(one_line, width=125, break_long_words=False) or [""]
    end = ' """' if lines[-1].endswith('"') else '"""'
    return textwrap.indent('"""' + "\n".join(lines) + end, "    ")
