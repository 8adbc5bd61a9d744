"""The client against the API as it is: types, methods, and the two halves."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import pytest

from control_plane import client as package
from control_plane.api.app import create_app
from control_plane.client import AsyncFtClient, FtClient, types
from control_plane.client.asynchronous.resource import AsyncResource
from control_plane.client.synchronous.resource import Resource
from tools.client import __main__ as generator
from tools.client.types import class_name, type_of, with_streamed

SOURCE = Path(inspect.getfile(package)).parent / "asynchronous"
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
TAKEN_OTHERWISE = {"stream", "follow", "accept", "idempotency-key", "last-event-id"}
"""Parameters that choose what a method does, or that the connection sends by itself."""


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return dict(with_streamed(create_app(None).openapi()))  # type: ignore[arg-type]  # nobody calls it


class Call(NamedTuple):
    """One call of the API in the client's source."""

    where: str
    kind: str | None
    method: str
    path: str
    function: ast.FunctionDef | ast.AsyncFunctionDef


def calls() -> Iterator[Call]:
    for file in sorted(SOURCE.rglob("*.py")):
        for cls in ast.walk(ast.parse(file.read_text())):
            if isinstance(cls, ast.ClassDef):
                for function in cls.body:
                    if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                        yield from _calls_of(function, f"{cls.name}.{function.name}")


def _calls_of(function: ast.FunctionDef | ast.AsyncFunctionDef, where: str) -> Iterator[Call]:
    """The templates of `at` in a method, with the HTTP method and the type that stand in its calls of the connection."""
    templates = [n.args[0].value for n in ast.walk(function) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "at"]  # type: ignore[attr-defined]
    for node in ast.walk(function):
        of_connection = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "self._api"
        if not of_connection or node.func.attr in ("wait", "send"):  # type: ignore[attr-defined]
            continue
        name, args = node.func.attr, [ast.unparse(a) for a in node.args]  # type: ignore[attr-defined]
        typed = name in ("call", "create", "pages", "events", "send_file")
        method = HTTP_OF.get(name) or args[1 if typed else 0].strip("'")
        assert len(set(templates)) == 1, f"{where} names {templates}: one method, one route"
        yield Call(where, args[0] if typed else None, method, templates[0], function)


def test_every_route_has_a_method(document: dict[str, Any]) -> None:
    """Other spellings of a route are not in the document, and need no method."""
    routes = {(method.upper(), path) for path, operations in document["paths"].items() for method in operations}
    called = {(c.method, c.path) for c in calls()}
    assert len(routes) > 60, "the routes were found"
    assert sorted(routes - called - set(WITHOUT_A_METHOD)) == []
    assert sorted(called - routes) == [], "no method calls what is not there"
    assert set(WITHOUT_A_METHOD) <= routes


def _kinds(schema: dict[str, Any] | None, document: dict[str, Any]) -> set[str]:
    """The types that a method may give for an answer: the object itself, or of a list what it holds."""
    if not schema:
        return set()
    named = document["components"]["schemas"].get(schema.get("$ref", "").rpartition("/")[2], schema)
    items = named.get("properties", {}).get("data", {}).get("items")
    found = {type_of(schema)} | ({type_of(items)} if items is not None else set())
    return {"Json" if kind in ("Any", "dict[str, Any]", "dict[str, str]") else kind for kind in found}


def test_every_method_gives_what_its_route_answers(document: dict[str, Any]) -> None:
    wrong, compared = [], 0
    for call in calls():
        answers = document["paths"][call.path][call.method.lower()]["responses"]
        success = next(answer for status, answer in answers.items() if status.startswith("2"))
        expected = _kinds(success.get("content", {}).get("application/json", {}).get("schema"), document)
        if call.kind is None or not expected:
            continue
        compared += 1
        if call.kind.removeprefix("ListOf[").removesuffix("]") not in expected:
            wrong.append((call.where, call.kind, expected))
    assert wrong == []
    assert compared > 60


def test_every_method_takes_what_its_route_takes(document: dict[str, Any]) -> None:
    """Query parameters and fields of forms stand in the method by their names, bodies as its keywords."""
    missing = []
    by_route: dict[tuple[str, str], set[str]] = {}
    for call in calls():
        function = call.function
        words = {n.value for n in ast.walk(function) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        words |= {n.arg for n in ast.walk(function) if isinstance(n, ast.keyword | ast.arg) and n.arg}
        kwargs = function.args.kwarg
        words |= {ast.unparse(kwargs.annotation)} if kwargs is not None and kwargs.annotation is not None else set()
        by_route.setdefault((call.method, call.path), set()).update(words)
    for (method, path), words in by_route.items():
        operation = document["paths"][path][method.lower()]
        asked = {p["name"] for p in operation.get("parameters", ()) if p["in"] != "path"} - TAKEN_OTHERWISE
        for kind, content in operation.get("requestBody", {}).get("content", {}).items():
            schema = content.get("schema", {})
            if kind == "multipart/form-data":
                form = document["components"]["schemas"].get(schema.get("$ref", "").rpartition("/")[2], schema)
                asked |= set(form["properties"])
            elif "$ref" in str(schema) and f"Unpack[{type_of(schema).removesuffix(' | None')}]" not in words and method != "PUT":
                missing.append((method, path, type_of(schema)))
        missing += [(method, path, name) for name in sorted(asked - words)]
    assert missing == []


def test_a_type_has_the_fields_of_its_schema(document: dict[str, Any]) -> None:
    compared = 0
    for name, schema in document["components"]["schemas"].items():
        kind = getattr(types, class_name(name), None)
        if kind is None or not schema.get("properties") or not isinstance(kind, type):
            continue
        compared += 1
        assert set(kind.__annotations__) == set(schema["properties"]), name
        required = {f for f, hint in get_type_hints(kind, include_extras=True).items() if "NotRequired" not in str(hint)}
        assert required == set(schema.get("required", ())), name
    assert compared > 50, "the types were found"


def test_what_is_generated_is_up_to_date() -> None:
    assert [path.name for path in generator.stale()] == [], "run python -m tools.client"


def _nouns(client: type) -> dict[str, type]:
    instance = client(base_url="http://api", api_key="k")
    found = {}

    def walk(owner: Any, prefix: str) -> None:
        for name, value in vars(owner).items():
            if isinstance(value, Resource | AsyncResource) and not name.startswith("_"):
                found[prefix + name] = type(value)
                walk(value, f"{prefix}{name}.")

    walk(instance, "")
    return found


def _signatures(kind: type) -> dict[str, str]:
    public = [(n, f) for n, f in inspect.getmembers(kind, inspect.isfunction) if not n.startswith("_")]
    return {name: re.sub(r"Async(?=[A-Z])", "", str(inspect.signature(f))) for name, f in public}


def test_both_clients_have_the_same_methods_with_the_same_signatures_and_words() -> None:
    mine, awaited = _nouns(FtClient), _nouns(AsyncFtClient)
    assert list(mine) == list(awaited)
    assert len(mine) > 15
    for noun, kind in {**mine, "": FtClient}.items():
        other = awaited.get(noun, AsyncFtClient)
        assert _signatures(kind) == _signatures(other), noun
        assert _signatures(kind) or noun == "admin", "it has nouns of its own"
        for name in _signatures(kind):
            assert getattr(kind, name).__doc__, f"{noun}.{name} says what it does"


@pytest.mark.slow
def test_the_type_checker_knows_the_fields_of_bodies_and_of_answers(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("""
from control_plane.client import FtClient
ft = FtClient()
job = ft.jobs.create(model="m", training_file="f", suffix="s", hyperparameters={"n_epochs": 2})
reveal_type(job["status"])
ft.jobs.create(model="m", training_file="f", sufix="s")
job["stattus"]
reveal_type(ft.jobs.list())
""")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--cache-dir", str(tmp_path), "--follow-imports=silent", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, cwd=SOURCE.parents[2])
    assert 'Revealed type is "str"' in done.stdout, done.stdout
    assert "synchronous.pages.Pages[" in done.stdout
    assert 'Unexpected keyword argument "sufix"' in done.stdout
    assert 'TypedDict "Job" has no key "stattus"' in done.stdout


def test_the_client_loads_neither_the_server_nor_its_other_half() -> None:
    code = "import sys, control_plane.client; print(*sorted(m for m in sys.modules))"
    loaded = set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout.split())
    assert "control_plane.client.synchronous.resources.jobs" in loaded
    kept_out = ("fastapi", "pydantic", "sqlalchemy", "control_plane.api", "control_plane.jobs", "control_plane.client.asynchronous")
    assert [m for m in loaded if m in kept_out] == []
