"""The OpenAPI document: what each route refuses, and with which body, stated by the same rules for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from control_plane.http.error_body import Error

ERROR = {"$ref": "#/components/schemas/Error"}
REFUSALS: Mapping[str, str] = {
    "400": "The request cannot be carried out as written; `param` names the field.",
    "401": "No key, or one that is unknown, expired or revoked.",
    "403": "The key lacks the scope of the call, or the tenant may not do this.",
    "404": "No such object of this tenant; another tenant's looks the same.",
    "409": "The state of an object forbids the call; sending it again changes nothing (`x-should-retry: false`).",
    "413": "More bytes than may be sent.",
    "429": "Too many requests of this key (`retry-after` says when), or a limit of the tenant is reached (`exceeded_quota`).",
    "500": "The platform failed; the header `x-request-id` is what its operators need.",
    "503": "A part of the platform did not answer; `retry-after` says when to ask again.",
}
NOT_OURS = ("HTTPValidationError", "ValidationError")
"""What FastAPI says of its own refusals, which never leave this process in that form."""


class Described(FastAPI):
    """An application whose document tells every answer, and is written beside the event loop: that takes most of a second."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, openapi_url=None)

        def document() -> JSONResponse:
            return JSONResponse(self.openapi())

        self.add_api_route("/openapi.json", document, include_in_schema=False)

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            schemas = document["components"]["schemas"]
            for name in NOT_OURS:
                schemas.pop(name, None)
            schemas |= _components()
            for path, methods in document["paths"].items():
                for operation in methods.values():
                    _state(operation, path=path)
        assert self.openapi_schema is not None
        return self.openapi_schema


def _state(operation: dict[str, Any], *, path: str) -> None:
    """Add the refusals of one operation; one that a route states itself stays as it is, but for its body."""
    responses: dict[str, Any] = operation["responses"]
    responses.pop("422", None)
    for status in _statuses(operation, path=path):
        responses.setdefault(status, {"description": REFUSALS[status]})
    for status, response in responses.items():
        if status[0] in "45":
            response.setdefault("content", {"application/json": {"schema": ERROR}})


def _statuses(operation: Mapping[str, Any], *, path: str) -> list[str]:
    """400: of every URL that holds a NUL character, too."""
    body: Mapping[str, Any] = operation.get("requestBody", {}).get("content", {})
    found = {"400", "500", "503"}
    if operation.get("security"):
        found |= {"401", "403", "429"}
    if "{" in path or body or any(p["in"] == "query" and p["name"] == "model" for p in operation.get("parameters", ())):
        found |= {"404", "409"}
    if body:
        found.add("413")
    return sorted(found)


def _components() -> dict[str, Any]:
    schema = Error.model_json_schema(ref_template="#/components/schemas/{model}")
    return {**schema.pop("$defs"), "Error": schema}
