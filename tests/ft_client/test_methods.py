"""The client's methods against the routes of the API."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import ft_client as package
from control_plane.api.app import create_app
from control_plane.platform.job_states import JobState
from ft_client import FtClient
from ft_client.connection import Resource
from ft_client.resources.jobs import STATES

SOURCE = Path(inspect.getfile(package)).parent / "resources"
HTTP_OF = {"pages": "GET", "content": "GET", "growing": "GET", "events": "GET", "download": "GET", "send_file": "POST", "create": "POST"}
"""What the connection's own words for calls are in HTTP; `call`, `stream` and `data_of` name their method."""
WITHOUT_A_METHOD = {
    ("GET", "/livez"): "of whoever runs the process",
    ("GET", "/healthz"): "of whoever runs the process",
    ("GET", "/readyz"): "of whoever runs the process",
    ("GET", "/metrics"): "of the operator's Prometheus",
    ("POST", "/v1/fine_tuning/estimate"): "jobs.estimate by another name",
    ("POST", "/v1/models/{adapter_id}/promote"): "adapters.promote by another name, and so the next four",
    ("POST", "/v1/models/{adapter_id}/rollback"): "adapters.rollback",
    ("POST", "/v1/models/{adapter_id}/deprecate"): "adapters.deprecate",
    ("POST", "/v1/models/{adapter_id}/approve"): "adapters.approve",
    ("POST", "/v1/models/{adapter_id}/reject"): "adapters.reject",
}
TAKEN_OTHERWISE = {"stream", "follow", "accept", "idempotency-key", "idempotency_key", "last-event-id"}
"""Parameters that choose what a method does, or that the connection sends by itself."""


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return create_app(None).openapi()  # type: ignore[arg-type]  # nobody calls it


class Call(NamedTuple):
    """One call of the API in the client's source."""

    where: str
    method: str
    path: str
    function: ast.FunctionDef
    http: str
    """What the connection calls it."""


def calls() -> Iterator[Call]:
    for file in sorted(SOURCE.rglob("*.py")):
        for cls in ast.walk(ast.parse(file.read_text())):
            if isinstance(cls, ast.ClassDef):
                for function in cls.body:
                    if isinstance(function, ast.FunctionDef):
                        yield from _calls_of(function, f"{cls.name}.{function.name}")


def _calls_of(function: ast.FunctionDef, where: str) -> Iterator[Call]:
    """The templates of `at` in a method, with the HTTP method that stands in its calls of the connection."""
    templates = [n.args[0].value for n in ast.walk(function) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "at"]  # type: ignore[attr-defined]
    for node in ast.walk(function):
        of_connection = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "self._api"
        if not of_connection or node.func.attr in ("wait", "send"):  # type: ignore[attr-defined]
            continue
        name, args = node.func.attr, [ast.unparse(a) for a in node.args]  # type: ignore[attr-defined]
        method = HTTP_OF.get(name) or args[0].strip("'")
        assert len(set(templates)) == 1, f"{where} names {templates}: one method, one route"
        yield Call(where, method, templates[0], function, name)


def test_every_route_has_a_method(document: dict[str, Any]) -> None:
    """Other spellings of a route are not in the document, and need no method."""
    routes = {(method.upper(), path) for path, operations in document["paths"].items() for method in operations}
    called = {(c.method, c.path) for c in calls()}
    assert len(routes) > 60, "the routes were found"
    assert sorted(routes - called - set(WITHOUT_A_METHOD)) == []
    assert sorted(called - routes) == [], "no method calls what is not there"
    assert set(WITHOUT_A_METHOD) <= routes


def test_every_method_takes_what_its_route_takes(document: dict[str, Any]) -> None:
    """Query parameters and fields of bodies stand in the method by their names, or in its docstring as options."""
    missing = []
    by_route: dict[tuple[str, str], set[str]] = {}
    for call in calls():
        function = call.function
        words = {n.value for n in ast.walk(function) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        words |= {n.arg for n in ast.walk(function) if isinstance(n, ast.keyword | ast.arg) and n.arg}
        words |= set(re.findall(r"`(\w+)`", (ast.get_docstring(function) or "").partition("Options:")[2]))
        by_route.setdefault((call.method, call.path), set()).update(words)
    for (method, path), words in by_route.items():
        operation = document["paths"][path][method.lower()]
        asked = {p["name"] for p in operation.get("parameters", ()) if p["in"] != "path"}
        for content in operation.get("requestBody", {}).get("content", {}).values():
            schema = content.get("schema", {})
            reference = next((s["$ref"] for s in (schema, *schema.get("anyOf", ())) if "$ref" in s), "")
            asked |= set(document["components"]["schemas"].get(reference.rpartition("/")[2], schema).get("properties", {}))
        missing += [(method, path, name) for name in sorted(asked - words - TAKEN_OTHERWISE)]
    assert missing == []


def test_every_method_names_the_type_of_its_response(document: dict[str, Any]) -> None:
    """The annotation is the schema of the response; a list is a page of it, or pages."""
    seen = 0
    for call in calls():
        answers = document["paths"][call.path][call.method.lower()]["responses"]
        content = next(answer for status, answer in answers.items() if status[0] == "2").get("content", {})
        name = content.get("application/json", {}).get("schema", {}).get("$ref", "").rpartition("/")[2]
        if name and call.http not in ("content", "growing"):
            item = name.removeprefix("ListOf_").rstrip("_").replace("dict_str__Any", "Record")
            allowed = {f"Page[{item}]", f"Pages[{item}]", f"Iterator[{item}]"} if name.startswith("ListOf_") else {item, SPELLED.get(name)}
            assert ast.unparse(call.function.returns or ast.Constant(None)) in allowed, call.where
            seen += 1
    assert seen > 120


SPELLED = {"PermissionList": "Pages[CheckpointPermission]"}
"""Types of responses that are lists by another name."""


def test_every_method_says_what_it_does() -> None:
    undocumented, methods = [], 0

    def walk(owner: Any) -> None:
        nonlocal methods
        for value in vars(owner).values():
            if isinstance(value, Resource):
                for name, function in inspect.getmembers(type(value), inspect.isfunction):
                    methods += not name.startswith("_")
                    if not name.startswith("_") and not function.__doc__:
                        undocumented.append(function.__qualname__)
                walk(value)

    walk(FtClient(base_url="http://api", api_key="k"))
    assert methods > 80, "the methods were found"
    assert undocumented == []


def test_the_client_loads_neither_the_server_nor_pandas() -> None:
    code = "import sys; from ft_client import FtClient; print(*sorted(m for m in sys.modules))"
    loaded = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout.split())
    assert "ft_client.resources.jobs" in loaded
    kept_out = ("fastapi", "pydantic", "sqlalchemy", "pandas", "control_plane", "engine", "typer")
    assert [m for m in loaded if m in kept_out] == []


def test_the_client_knows_the_states_of_a_job() -> None:
    assert frozenset(JobState) == STATES
