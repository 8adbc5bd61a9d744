"""Types of the client's results, from the API's description: ``python -m tools.client_types`` writes ``ft_client/types.py``.

Each schema of a response becomes a subclass of :class:`ft_client.record.Record` with annotated fields, for type checkers and editors; what
the client returns stays a plain record.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.lock import ROOT

DOCUMENT = ROOT / "tests" / "control_plane" / "api" / "openapi.json"
OUT = ROOT / "ft_client" / "types.py"
REF = "#/components/schemas/"
LIST_OF = "ListOf_"
"""Beginning of the schema of a page, for which the client has :class:`ft_client.pages.Page`."""
SIMPLE = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None", "object": "dict[str, Any]"}
METHODS = frozenset(dir(dict)) | {"frame"}
"""Names that a record already has: such a field is read with brackets."""
HEAD = '''"""What the client's methods return, for type checkers and editors: records with the fields of the API's schemas.

Written by ``python -m tools.client_types``; docs/api.md describes the fields.
"""

from __future__ import annotations

from typing import Any, Literal

from ft_client.record import Record
'''


def module(document: Mapping[str, Any]) -> str:
    """Return the text of the module for an OpenAPI document."""
    schemas = document["components"]["schemas"]
    names = sorted({name for name in _reachable(document, schemas) if not name.startswith(LIST_OF)})
    return HEAD + "".join(f"\n\n{_class(name, schemas[name])}" for name in names)


def _reachable(document: Mapping[str, Any], schemas: Mapping[str, Any]) -> set[str]:
    """Return the schemas of successful responses, and those that they refer to."""
    operations = [op for methods in document["paths"].values() for op in methods.values()]
    left = [ref for op in operations for status, answer in op["responses"].items() if status[0] == "2" for ref in _references(answer)]
    found: set[str] = set()
    while left:
        if (name := left.pop()) not in found:
            found.add(name)
            left += _references(schemas[name])
    return found


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        if isinstance(ref := node.get("$ref"), str):
            yield ref.removeprefix(REF)
        for value in node.values():
            yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)


def _class(name: str, schema: Mapping[str, Any]) -> str:
    fields = {field: _type(of) for field, of in schema.get("properties", {}).items() if field not in METHODS}
    description = (schema.get("description") or "").partition("\n")[0].strip()
    lines = [f'    """{description}"""\n'] if description else []
    lines += [f"    {field}: {kind}\n" for field, kind in fields.items()]
    return f"class {name}(Record):\n" + ("".join(lines) or "    pass\n")


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).removeprefix(REF)
    if "const" in schema:
        return f"Literal[{schema['const']!r}]"
    if "enum" in schema:
        return f"Literal[{', '.join(map(repr, schema['enum']))}]"
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " | ".join(dict.fromkeys(_type(one) for one in choices))
    if schema.get("type") == "array":
        return f"list[{_type(schema.get('items') or {})}]"
    values = schema.get("additionalProperties")
    if schema.get("type") == "object" and isinstance(values, Mapping):
        return f"dict[str, {_type(values)}]"
    return SIMPLE.get(str(schema.get("type")), "Any")


def main() -> None:
    OUT.write_text(module(json.loads(DOCUMENT.read_text())))
    subprocess.run([str(Path(sys.executable).parent / "ruff"), "format", "--quiet", str(OUT)], check=True)


if __name__ == "__main__":
    main()
