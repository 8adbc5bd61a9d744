"""One connection pool to the API: requests repeated where that is harmless, errors raised as the family they came from."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from ft_assets.errors import (
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

Json = dict[str, Any]

TIMEOUT = httpx.Timeout(60.0, connect=5.0, write=300.0)
NUM_RETRIES = 2
BY_STATUS: Mapping[int, type[FtError]] = {
    400: InvalidRequest, 401: Unauthenticated, 403: Forbidden, 404: NotFound, 409: Conflict, 429: QuotaExceeded, 502: Unavailable,
    503: Unavailable, 504: Unavailable,
}  # fmt: skip


class Connection:
    """Thread-safe; every call names its path and gives the decoded body."""

    def __init__(self, *, base_url: str, api_key: str, transport: httpx.BaseTransport | None, backoff_s: float) -> None:
        self.backoff_s = backoff_s
        self._http = httpx.Client(
            base_url=base_url.rstrip("/"), headers={"authorization": f"Bearer {api_key}"}, timeout=TIMEOUT, transport=transport
        )

    def close(self) -> None:
        self._http.close()

    def json(self, method: str, path: str, *, repeatable: bool = False, **options: Any) -> Json:
        """The answer's body. A call that may be repeated is, twice, with a pause before each."""
        num_retries = NUM_RETRIES if repeatable or method == "GET" else 0
        for retry in range(num_retries + 1):
            if retry:
                time.sleep(self.backoff_s * 2 ** (retry - 1))
            try:
                answer = self._http.request(method, path, **options)
            except httpx.TransportError:
                if retry == num_retries:
                    raise
                continue
            if answer.status_code < 500 or retry == num_retries:
                break
        _raise_for_error(answer)
        body: Json = answer.json()
        return body

    def list(self, path: str, **params: Any) -> list[Json]:
        """The objects of one page."""
        return [*self.json("GET", path, params=params)["data"]]

    def pages(self, path: str, **params: Any) -> Iterator[Json]:
        """The objects of all pages, asked for as they are read."""
        after: dict[str, str] = {}
        while True:
            page = self.json("GET", path, params={**params, **after})
            yield from page["data"]
            if not page["has_more"]:
                return
            after = {"after": page["data"][-1]["id"]}

    def content(self, path: str, *, accept: str = "*/*") -> bytes:
        """A body that is no JSON."""
        answer = self._http.get(path, headers={"accept": accept})
        _raise_for_error(answer)
        return answer.content

    def send_file(self, path: str, file: Path, data: Mapping[str, str]) -> Json:
        with file.open("rb") as stream:
            return self.json("POST", path, data=dict(data), files={"file": (file.name, stream, "application/octet-stream")})

    @contextmanager
    def stream(self, method: str, path: str, **options: Any) -> Iterator[httpx.Response]:
        """An answer that is read as it comes."""
        with self._http.stream(method, path, **options) as answer:
            _raise_for_error(answer)
            yield answer


def json_fields(**objects: Mapping[str, Any] | None) -> dict[str, str]:
    """Form fields of the objects that are given."""
    return {name: json.dumps(value) for name, value in objects.items() if value}


def path_of(root: str, *segments: str) -> str:
    """`root` with segments behind it, each quoted; a colon stays, for names of adapters hold it."""
    return "/".join((root, *(quote(s, safe=":") for s in segments)))


def _raise_for_error(answer: httpx.Response) -> None:
    if answer.is_success:
        return
    answer.read()
    try:
        body = answer.json()
    except ValueError:
        body = None
    raise error_of(body, status=answer.status_code)


def error_of(body: Any, *, status: int) -> FtError:
    """The error that the body tells of; whatever stands before the API may answer in another form."""
    kind = BY_STATUS.get(status, FtError)
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or "message" not in error:
        return kind(f"the API answered with status {status} and no explanation; is something else listening there?")
    return from_dict({"code": error.get("code") or kind.default_code, "message": error["message"], "param": error.get("param")}, kind)


def server_sent(answer: httpx.Response) -> Iterator[tuple[str, str]]:
    """Id and data of each event of a stream; comments are passed over."""
    seq = ""
    for line in answer.iter_lines():
        name, _, value = line.partition(":")
        if name == "id":
            seq = value.strip()
        elif name == "data":
            yield seq, value.removeprefix(" ")
