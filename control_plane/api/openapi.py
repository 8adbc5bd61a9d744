"""The OpenAPI document: what each route refuses, and with which body, stated by the same rules for all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from control_plane.http.error_responses import Error

ERROR = {"$ref": "#/components/schemas/Error"}
REFUSALS: Mapping[str, str] = {
    "400": "The request is invalid; `param` names the field.",
    "401": "The API key is missing, unknown, expired or revoked.",
    "403": "The key lacks the required scope, or the tenant may not do this.",
    "404": "The object does not exist, or it belongs to another tenant.",
    "409": "The object is in a state that does not allow this. Retrying does not help (`x-should-retry: false`).",
    "413": "The request body is too large.",
    "429": "The key sent too many requests (retry after `retry-after` seconds), or a limit of the tenant is reached (`exceeded_quota`).",
    "500": "The platform failed. Give its operators the `x-request-id` header.",
    "503": "Part of the platform is unavailable. Retry after `retry-after` seconds.",
}
TAGS: Mapping[str, str] = {
    "fine_tuning": "Fine-tuning jobs with their events, checkpoints, metrics, logs and evaluation; sweeps, estimates and graders.",
    "files": "Upload datasets as files and follow their validation.",
    "uploads": "Upload large files in parts, and continue after a broken connection.",
    "datasets": "Immutable dataset versions made from validated files, with reports, previews and approval.",
    "suites": "Evaluation suites that datasets are checked against for contamination.",
    "evaluations": "Capability suites that adapters are evaluated with.",
    "models": "Base models, model routes and fine-tuned models, as requests name them.",
    "adapters": "Fine-tuned models in the registry: promotion, rollback, approval, evaluations and lineage.",
    "exports": "Export adapters as files to use elsewhere.",
    "manifests": "Kubernetes manifests for serving models and routes.",
    "model routes": "Names of your own for models, answered by weighted targets.",
    "inference": "Chat and text completions.",
    "queue": "Why jobs are waiting and when they start.",
    "quota": "Limits of the tenant and its use of them this month.",
    "recipes": "Where the defaults of jobs come from.",
    "billing": "Usage, costs, the ledger, invoices and budgets.",
    "api_keys": "API keys, and who the caller is.",
    "members": "People of a tenant and their roles.",
    "audit_log": "Who changed what.",
    "webhooks": "Endpoints that events are sent to, and their deliveries.",
    "deletions": "Export or delete everything a tenant has, with proof.",
    "operators": "Operations of the whole platform. They need an operator key.",
    "health": "State of this process, for orchestrators and monitoring.",
}
NOT_OURS = ("HTTPValidationError", "ValidationError")
"""FastAPI's own error schemas, which this API never returns."""


class Described(FastAPI):
    """An application whose document states every response. Building it takes most of a second, so it is built outside the event loop."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, openapi_url=None, openapi_tags=[{"name": n, "description": d} for n, d in TAGS.items()])

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
