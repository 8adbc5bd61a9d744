"""Errors in OpenAI's format: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ConfigDict
from sqlalchemy.exc import OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from starlette.exceptions import HTTPException

from control_plane.http.schemas import ApiModel
from core.errors import Fault, FtError, InvalidRequest, RateLimited, Unavailable
from core.storable_text import printable
from core.telemetry import correlation

TYPES = {401: "authentication_error", 403: "permission_error", 404: "invalid_request_error", 429: "insufficient_quota"}
CODES = {404: "unknown_url", 405: "method_not_allowed", 413: "body_too_large"}
BY_MINUTE = frozenset({"rate_limit_exceeded", "too_many_unknown_keys"})
"""Refusals of a bucket of requests per minute, which says when to retry; other refusals of too many requests at once say so here."""
RETRY_AFTER_S = 1
MAX_NAME, MAX_PATH = 80, 400
"""Characters of a field's name, and of a path, that an error repeats."""


class Refused(HTTPException):
    """An error that is raised while a body is read: FastAPI lets only this kind pass."""

    def __init__(self, error: FtError) -> None:
        super().__init__(error.http_status, detail=error.message)
        self.error = error


def install(app: FastAPI) -> None:
    """Install handlers that return every failure in this format."""
    app.add_exception_handler(FtError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_unreadable)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(OperationalError, _on_database)
    app.add_exception_handler(PoolTimeout, _on_database)


def body(error: FtError) -> Mapping[str, object]:
    kind = TYPES.get(error.http_status, "invalid_request_error" if error.http_status < 500 else "server_error")
    kind = "requests" if isinstance(error, RateLimited) else kind
    correlation.bind(code=error.code)  # for the request's log line and metrics
    param = None if error.param is None else printable(error.param)  # both may quote characters that JSON cannot hold
    return {"error": {"message": printable(error.message), "type": kind, "param": param, "code": error.code}}


def response(error: FtError) -> JSONResponse:
    """Return `error` as a response that tells the client whether a retry can help."""
    headers = {}
    if error.http_status in (409, 429) and not isinstance(error, RateLimited):
        headers["x-should-retry"] = "false"  # OpenAI's client would retry twice and get the same result
    if error.http_status == 503 or (isinstance(error, RateLimited) and error.code not in BY_MINUTE):
        headers["retry-after"] = str(RETRY_AFTER_S)
    if error.http_status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(body(error), status_code=error.http_status, headers=headers)


async def _on_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, FtError)
    if error.http_status >= 500 and error.fault is Fault.PLATFORM and not isinstance(error, Unavailable):
        raise error  # logged with its traceback, answered without details
    return response(error)


async def _on_unreadable(_: Request, error: Exception) -> JSONResponse:
    """Return the first invalid field of the request, by name."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    param = _param(first["loc"])
    if first["type"] == "missing":
        return response(InvalidRequest(f"{param or 'body'} is missing", code="missing_required_parameter", param=param))
    if first["type"] == "json_invalid":
        return response(InvalidRequest(f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}", code="invalid_json"))
    value = repr(first.get("input"))[:80]
    return response(InvalidRequest(f"{param or 'body'} {value} is not valid: {first['msg']}", code="invalid_type", param=param))


def _param(location: Sequence[int | str]) -> str | None:
    """Format ``("body", "metadata", "team")`` as ``metadata.team``; None for the body itself. A sender's own long names are cut."""
    return ".".join(str(part)[:MAX_NAME] for part in location[1:]) or None


async def _on_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if isinstance(error, Refused):
        return response(error.error)
    path = f"{request.method} {request.url.path[:MAX_PATH]}"
    text = {
        404: f"no route {path}; GET /openapi.json lists all routes",
        405: f"{path} is not allowed; see GET /openapi.json for the methods of this path",
    }
    message = text.get(error.status_code, str(error.detail) or HTTPStatus(error.status_code).phrase)
    refusal = InvalidRequest(message, code=CODES.get(error.status_code))
    return JSONResponse(body(refusal), status_code=error.status_code, headers=error.headers)


async def _on_database(_: Request, __: Exception) -> JSONResponse:
    return response(Unavailable("the database did not respond; retry in a moment", code="database_unavailable"))


class ErrorDetail(ApiModel):
    """What went wrong and what to do about it."""

    model_config = ConfigDict(extra="forbid")

    message: str
    """Human-readable explanation with the offending value, the limit and the next step."""
    type: str
    """Kind of error: `invalid_request_error`, `authentication_error`, `permission_error`, `insufficient_quota`, `rate_limit_error` or
    `server_error`."""
    param: str | None
    """Name of the parameter or field that caused the error; null if no single one did."""
    code: str | None
    """Stable, machine-readable error code, documented in docs/errors.md."""


class Error(ApiModel):
    """Body of every error response."""

    model_config = ConfigDict(extra="forbid")

    error: ErrorDetail
    """What went wrong."""
