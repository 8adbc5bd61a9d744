"""A server of answers that were written down before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx

from ft_client import FtClient

Answer = httpx.Response | Exception


class Script:
    """Gives `answers` in turn, and keeps the requests that it got."""

    def __init__(self, *answers: Answer) -> None:
        self.seen: list[httpx.Request] = []
        self._left = iter(answers)

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        answer = next(self._left)
        if isinstance(answer, Exception):
            raise answer
        return answer


def client(*answers: Answer, **options: Any) -> tuple[FtClient, list[httpx.Request]]:
    """A client of a server that gives `answers` in turn, and the requests that it got."""
    script = Script(*answers)
    given = {"base_url": "http://api", "api_key": "k", "backoff_s": 0.0} | options
    return FtClient(**given, transport=httpx.MockTransport(script)), script.seen


def ok(**body: Any) -> httpx.Response:
    return httpx.Response(200, json=body)


def error(status: int, code: str | None, **headers: str) -> httpx.Response:
    body = {"error": {"message": "why", "type": "t", "param": "p", "code": code}}
    return httpx.Response(status, json=body, headers=headers)


class BreaksOff(httpx.SyncByteStream):
    """A stream whose connection is lost after `data`."""

    def __init__(self, data: bytes, how: httpx.TransportError | None = None) -> None:
        self._data, self._how = data, how or httpx.ReadError("lost")

    def __iter__(self) -> Iterator[bytes]:
        yield self._data
        raise self._how
