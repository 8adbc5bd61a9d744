"""``/docs``: the API reference, rendered from the OpenAPI document; and the guides."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, FastAPI, Header, Request
from fastapi.responses import Response

from control_plane.console.documents import guides
from control_plane.console.jinja_environment import render
from control_plane.console.pages.page import PageDep, PageRoute
from control_plane.console.reference_calls import BODIES, FT, OPENAI, OpenAiCall
from control_plane.http.authentication import WholePlatform
from core.errors import NotFound

router = APIRouter(route_class=PageRoute, include_in_schema=False)
JSON = "application/json"
EXAMPLES: Mapping[str, Any] = {"string": "...", "integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
"""Values in examples of bodies, by type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """A parameter, or a field of a body."""

    name: str
    kind: str
    description: str
    required: bool
    place: str = "body"
    """``path``, ``query``, ``header`` or ``body``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    id: str
    method: str
    path: str
    summary: str
    description: str
    fields: tuple[Field, ...]
    returns: str
    example: str
    """A call with curl."""
    media: str
    """Type of the body; empty without one."""
    body: str
    """Example of a JSON body; empty for another type."""

    @property
    def key(self) -> str:
        return f"{self.method} {self.path}"

    @property
    def openai(self) -> OpenAiCall | None:
        """The same with OpenAI's client."""
        return OPENAI.get(self.key)

    @property
    def ft(self) -> str | None:
        """The same with ``ft``."""
        return FT.get(self.key)

    @property
    def can_run(self) -> bool:
        """Whether the page can call it: a session is no operator, and files are uploaded elsewhere."""
        return self.media in ("", JSON) and self.path.startswith("/v1/") and not self.path.startswith("/v1/admin/")


@router.get("/docs")
def reference(request: Request, platform: WholePlatform, accept_encoding: Annotated[str, Header()] = "") -> Response:
    """Show every operation of the API; made once per process."""
    app: FastAPI = request.app
    if not hasattr(app.state, "reference"):
        tags = _by_tag(app.openapi(), platform.settings.public_url)
        app.state.reference = gzip.compress(render("reference.html", tags=tags).encode(), mtime=0)
    page: bytes = app.state.reference
    headers = {"vary": "accept-encoding", "cache-control": "no-cache"}
    if "gzip" in accept_encoding:
        return Response(page, media_type="text/html", headers=headers | {"content-encoding": "gzip"})
    return Response(gzip.decompress(page), media_type="text/html", headers=headers)


@router.get(guides.PLACE)
@router.get(f"{guides.PLACE}/{{name}}")
def guide(page: PageDep, name: str = guides.INDEX) -> Response:
    """Show a guide; without a name, the list of them by task."""
    if name not in guides.names():
        raise NotFound(f"no guide {name[:60]!r}; see {guides.PLACE}")
    return page.show("guide.html", guide=guides.guide(name), has_codes=name == guides.CODES)


def _by_tag(document: Mapping[str, Any], url: str) -> Mapping[str, list[Operation]]:
    found: dict[str, list[Operation]] = {}
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            operation = _operation(document, url, method.upper(), path, described)
            found.setdefault(described.get("tags", ["other"])[0], []).append(operation)
    return dict(sorted(found.items()))


def _operation(document: Mapping[str, Any], url: str, method: str, path: str, described: Mapping[str, Any]) -> Operation:
    nothing: Mapping[str, Any] = {}
    media, body = next(iter(described.get("requestBody", nothing).get("content", nothing).items()), ("", nothing))
    schema = _resolved(document, body.get("schema", {}))
    fields = (*map(_parameter, described.get("parameters", ())), *_body_fields(schema))
    answer: Mapping[str, Any] = described["responses"].get("200", nothing).get("content", nothing)
    sample = _sample(f"{method} {path}", fields) if media == JSON else None
    return Operation(
        id=described["operationId"], method=method, path=path, summary=described["summary"], description=described.get("description", ""),
        fields=fields, example=_curl(url, method, path, media, sample, fields), media=media,
        body="" if sample is None else json.dumps(sample, indent=2),
        returns=_kind(next(iter(answer.values()), nothing).get("schema", {})) or ", ".join(answer) or "nothing",
    )  # fmt: skip


def _parameter(given: Mapping[str, Any]) -> Field:
    return Field(
        name=given["name"], place=given["in"], required=given.get("required", False), kind=_kind(given["schema"]),
        description=given.get("description", ""),
    )  # fmt: skip


def _body_fields(schema: Mapping[str, Any]) -> Iterator[Field]:
    for name, of in schema.get("properties", {}).items():
        yield Field(name=name, kind=_kind(of), description=of.get("description", ""), required=name in schema.get("required", ()))


def _kind(schema: Mapping[str, Any]) -> str:
    """Return a type in words: ``string or null``, ``array of Part``."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "anyOf" in schema:
        return " or ".join(filter(None, map(_kind, schema["anyOf"])))
    if "enum" in schema:
        return " or ".join(json.dumps(value) for value in schema["enum"])
    if schema.get("type") == "array":
        return f"array of {_kind(schema.get('items', {})) or 'values'}"
    return str(schema.get("type", ""))


def _resolved(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follow references, also through the alternative to null of an optional body."""
    while "$ref" in schema or "anyOf" in schema:
        if "anyOf" in schema:
            schema = next((one for one in schema["anyOf"] if "$ref" in one), {})
        else:
            schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return schema


def _sample(key: str, fields: tuple[Field, ...]) -> Mapping[str, Any]:
    """Return an example of a JSON body: a better one, if there is one, than its required fields."""
    needed = [one for one in fields if one.place == "body" and one.required]
    return BODIES.get(key) or {one.name: EXAMPLES.get(one.kind.split(" ")[0], "...") for one in needed}


def _curl(url: str, method: str, path: str, media: str, sample: Mapping[str, Any] | None, fields: tuple[Field, ...]) -> str:
    lines = [f"curl {url}{path}" if method == "GET" else f"curl -X {method} {url}{path}"]
    if path.startswith("/v1"):
        lines.append(f'-H "Authorization: Bearer {"$FT_OPERATOR_KEY" if path.startswith("/v1/admin") else "$FT_API_KEY"}"')
    if sample is not None:
        lines += ['-H "Content-Type: application/json"', f"-d '{json.dumps(sample)}'"]
    elif media == "multipart/form-data":
        needed = (one.name for one in fields if one.place == "body" and one.required)
        lines += [f"-F {name}={'@FILE' if name in ('file', 'data') else '...'}" for name in needed]
    return " \\\n  ".join(lines)
