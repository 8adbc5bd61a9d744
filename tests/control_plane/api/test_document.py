"""The OpenAPI document and ``docs/api.md`` say what the routes are; ``FT_UPDATE_SNAPSHOTS=1`` writes the list of routes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tools import error_codes

DOCS = Path(__file__).resolve().parents[3] / "docs"
ROUTES = re.compile(r"(?<=\n## Routes\n\n).*", re.DOTALL)
WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+")
FILLERS = {"a", "an", "the", "of", "its", "this", "for", "is"}
JOBS, OTHERS = "/v1/fine_tuning/jobs", ("/v1/fine-tuning/jobs", "/v1/jobs")
HEALTH = ("/livez", "/healthz", "/readyz", "/metrics", "/.well-known/ft-signing-keys.json")


@pytest.fixture(scope="module")
def document(api_url: str) -> dict[str, Any]:
    described: dict[str, Any] = httpx.get(f"{api_url}/openapi.json", timeout=60).json()
    return described


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in sorted(document["paths"].items()):
        for method, operation in methods.items():
            yield method.upper(), path, operation


def descriptions(document: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Place, name and description of every operation, parameter, object and field."""
    for method, path, operation in operations(document):
        where = f"{method} {path}"
        yield where, operation["operationId"], operation.get("description", "")
        yield from ((f"{where} ?{p['name']}", p["name"], p.get("description", "")) for p in operation.get("parameters", ()))
        for content in operation.get("requestBody", {}).get("content", {}).values():
            yield from _of_fields(where, content["schema"])
    for name, schema in document["components"]["schemas"].items():
        yield name, name, schema.get("description", "")
        yield from _of_fields(name, schema)


def _of_fields(where: str, schema: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    return ((f"{where}.{name}", name, field.get("description", "")) for name, field in schema.get("properties", {}).items())


def says_something(name: str, description: str) -> bool:
    """At least three words, and one that the name does not have; no white space around them."""
    if description != description.strip():
        return False
    words = [word.lower() for word in WORD.findall(description)]
    return len(words) >= 3 and not set(words) <= {part.lower() for part in WORD.findall(name)} | FILLERS


def listing(document: dict[str, Any]) -> str:
    """List the routes with their summaries, by tag."""
    groups = []
    for tag in document["tags"]:
        routes = [(m, path, op["summary"]) for m, path, op in operations(document) if op["tags"] == [tag["name"]]]
        lines = "".join(f"- `{method} {path}`: {summary}\n" for method, path, summary in routes)
        groups.append(f"### {tag['name'].replace('_', ' ').capitalize()}\n\n{lines}")
    return "\n".join(groups)


def test_the_documentation_lists_the_routes_that_there_are(document: dict[str, Any]) -> None:
    page = DOCS / "api.md"
    if os.environ.get("FT_UPDATE_SNAPSHOTS"):
        page.write_text(ROUTES.sub(lambda _: listing(document), page.read_text()))
    listed = ROUTES.search(page.read_text())
    assert listed is not None
    assert listed[0] == listing(document), (
        "routes changed: FT_UPDATE_SNAPSHOTS=1 pytest tests/control_plane/api/test_document.py writes the list"
    )


def test_everything_in_the_document_is_described(document: dict[str, Any]) -> None:
    found = list(descriptions(document))
    assert len(found) > 1500
    assert [where for where, name, text in found if not says_something(name, text)] == []


def test_every_operation_has_a_summary_of_its_own(document: dict[str, Any]) -> None:
    """FastAPI's default is the name of the function, `List Jobs`."""
    summaries = [(path, operation["summary"]) for _, path, operation in operations(document)]
    assert [(path, summary) for path, summary in summaries if " " not in summary or summary.istitle()] == []


@pytest.mark.parametrize(
    ("name", "description", "expected"),
    [
        ("created_at", "", False),
        ("created_at", "Created at.", False),
        ("job_id", "The id of the job.", False),
        ("job_id", "Id of the job that trained it.", True),
        ("RefundCase", "A refund case.", False),
        ("job_id", "Id of the job that trained it.\n    ", False),
    ],
)
def test_a_name_said_again_is_no_description(name: str, description: str, expected: bool) -> None:
    assert says_something(name, description) is expected


def test_every_tag_is_described(document: dict[str, Any]) -> None:
    described = {tag["name"] for tag in document["tags"] if tag["description"]}
    assert described == {tag for _, _, operation in operations(document) for tag in operation["tags"]}


def test_every_refusal_has_the_one_body(document: dict[str, Any]) -> None:
    for method, path, operation in operations(document):
        refusals = {status: answer for status, answer in operation["responses"].items() if status[0] in "45"}
        assert {"400", "500", "503"} <= set(refusals), (method, path)
        assert "422" not in refusals, (method, path)
        bodies = [answer["content"]["application/json"]["schema"]["$ref"] for answer in refusals.values()]
        assert set(bodies) == {"#/components/schemas/Error"}, (method, path)
        if path not in HEALTH:
            assert {"401", "403", "429"} <= set(refusals), (method, path)
    error = document["components"]["schemas"]["ErrorDetail"]
    assert sorted(error["required"]) == ["code", "message", "param", "type"]
    assert not [name for name in document["components"]["schemas"] if "ValidationError" in name]


def test_jobs_have_every_route_under_each_spelling(document: dict[str, Any], api_url: str) -> None:
    below = [(method, path.removeprefix(JOBS)) for method, path, _ in operations(document) if path == JOBS or path.startswith(f"{JOBS}/")]
    assert len(below) > 12
    with httpx.Client(base_url=api_url) as client:
        for method, rest in below:
            for prefix in (JOBS, *OTHERS):
                _exists(client, method, prefix + rest)


def test_every_other_spelling_that_is_documented_is_a_route(api_url: str) -> None:
    section = (DOCS / "api.md").read_text().partition("## Aliases")[2].partition("\n## ")[0]
    paths = re.findall(r"`(DELETE )?(/v1/[^`]+)`", section)
    assert len(paths) > 12
    for method, path in paths:
        methods = [method.strip()] if method else ["GET" if path.endswith("/jobs") else "POST"]
        with httpx.Client(base_url=api_url) as client:
            _exists(client, methods[0], path)


def _exists(client: httpx.Client, method: str, path: str) -> None:
    """A route that is there asks for a key first."""
    answer = client.request(method, re.sub(r"\{[a-z_]+\}", "x", path))
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "missing_api_key"), (method, path)


def test_every_code_says_what_it_means_and_what_to_do() -> None:
    codes = error_codes.load().values()
    assert len(codes) > 500
    assert [code.name for code in codes if code.statuses and code.fault == "user" and not code.next] == []
    assert {"400", "401", "403", "404", "409", "429", "503"} <= {status for code in codes for status in code.statuses}


def test_the_kinds_of_errors_are_all_there() -> None:
    section = (DOCS / "errors.md").read_text().partition("## Kinds")[2].partition("\n## ")[0]
    kinds = re.findall(r"^\| ([a-z ]+) \|", section, re.MULTILINE)
    assert kinds[1:] == [
        "request", "authentication", "permission", "not found", "conflict", "quota", "rate", "data", "job failures", "platform",
    ]  # fmt: skip
