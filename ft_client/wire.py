"""Wire format of the client: paths, form fields, errors, server-sent events, and the platform's address."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any
from urllib.parse import quote

import httpx

from core.errors import (
    Conflict,
    Forbidden,
    FtError,
    InvalidRequest,
    NotFound,
    QuotaExceeded,
    Unauthenticated,
    Unavailable,
    from_dict,
)
from ft_client.record import parse

VERSION = version("ft-platform")
TIMEOUT = httpx.Timeout(60.0, connect=5.0, write=300.0)
GENERATION_TIMEOUT = httpx.Timeout(600.0, connect=5.0)
STREAM_TIMEOUT = httpx.Timeout(60.0, connect=5.0)
"""Seconds between two bytes of a stream. An event stream sends something at least every 15 s; a log is silent while nothing is written
to it."""
NAME = re.compile(r"{(\w+)}")
REQUEST_ID = "x-request-id"
DONE = "[DONE]"
"""Data of the event that ends a stream."""
BY_STATUS: Mapping[int, type[FtError]] = {
    401: Unauthenticated, 403: Forbidden, 404: NotFound, 409: Conflict, 429: QuotaExceeded, 502: Unavailable, 503: Unavailable,
    504: Unavailable,
}  # fmt: skip


def at(template: str, *segments: str) -> str:
    """Returns `template` with its ``{names}`` filled in order, each quoted; colons stay, because adapters' names contain them."""
    filled = dict(zip(NAME.findall(template), segments, strict=True))
    for name, value in filled.items():
        if not value:
            raise InvalidRequest(f"{name} is empty; pass the id that the API returned", param=name)
    return template.format_map({name: quote(value, safe=":") for name, value in filled.items()})


def given(**values: Any) -> dict[str, Any]:
    """Returns the values that are not None, as query parameters: true and false as in JSON."""
    message = {name: value for name, value in values.items() if value is not None}
    return {name: str(value).lower() if isinstance(value, bool) else value for name, value in message.items()}


def form(**values: Any) -> dict[str, str]:
    """Returns form fields of the given values; objects as JSON."""
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items() if value is not None}


def headers_of(api_key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {api_key}", "user-agent": f"ft-client/{VERSION} httpx/{httpx.__version__}"}


def address(base_url: str | None) -> str:
    """Returns `base_url`, else ``FT_API_URL``; with or without the ``/v1`` of OpenAI's clients at its end."""
    found = base_url or os.environ.get("FT_API_URL", "")
    if not found:
        raise InvalidRequest("base_url is missing; pass the API's address, or set FT_API_URL", param="base_url")
    return found.rstrip("/").removesuffix("/v1")


def key(api_key: str | None) -> str:
    """Returns `api_key`, else ``FT_API_KEY``."""
    found = api_key or os.environ.get("FT_API_KEY", "")
    if not found:
        raise InvalidRequest("api_key is missing; pass it, or set FT_API_KEY", param="api_key")
    return found


def decoded(answer: httpx.Response) -> Any:
    """Returns the body of a successful response; None without one. A proxy in front of the API may respond with its own page."""
    if not answer.content:
        return None
    try:
        return parse(answer.content)
    except ValueError:
        kind = answer.headers.get("content-type", "nothing")
        raise Unavailable(f"{answer.url} answered with {kind} instead of JSON; check the API's address") from None


def error_of(answer: httpx.Response) -> FtError:
    """Returns the error of a response (read completely); a proxy in front of the API may respond in another form."""
    try:
        body = answer.json()
    except ValueError:
        body = None
    found = error_from_body(body, status=answer.status_code)
    found.request_id = answer.headers.get(REQUEST_ID)
    return found


def error_from_body(body: Any, *, status: int) -> FtError:
    kind = BY_STATUS.get(status, InvalidRequest if 400 <= status < 500 else FtError)
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return kind(f"the API answered with status {status} and no error message; check the API's address")
    return from_dict({"code": error.get("code") or kind.default_code, "message": error["message"], "param": error.get("param")}, kind)


class EventDecoder:
    """Decodes lines of server-sent events; one decoder serves a stream and its resumptions."""

    def __init__(self) -> None:
        self.last_id = ""
        """Id of the last complete event."""
        self._id = ""
        self._data: list[str] = []

    def begin(self) -> None:
        """Begins a stream: drops an incomplete event of the previous one."""
        self._id, self._data = self.last_id, []

    def feed(self, line: str) -> str | None:
        """Returns the data of the event that ends with this line, if one does."""
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "id":
            self._id = value
        elif name == "data":
            self._data.append(value)
        elif not line and self._data:
            data, self._data = "\n".join(self._data), []
            self.last_id = self._id
            return data
        return None
