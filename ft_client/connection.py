"""One connection pool to the API: retries calls where that is safe, and raises errors as their original classes."""

from __future__ import annotations

import codecs
import copy
import hashlib
import os
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx

from core.errors import IntegrityError, RateLimited, Unavailable
from ft_client import wire
from ft_client.pages import Pages
from ft_client.record import parse
from ft_client.retries import retry_pause

T = TypeVar("T")
R = TypeVar("R")
"""What a method of the client says that it returns; at run time, a record."""
SAFE = frozenset({"GET", "HEAD", "PUT", "DELETE"})
"""Methods that may be repeated without further effect."""
PASSING = (httpx.TransportError, Unavailable, RateLimited)
"""Errors that a wait or a stream survives."""
OUTAGE_S = 60.0
"""Seconds of an outage, such as a restart of the API, that a wait or a stream survives after its first response."""


class Connection:
    """The transport of all calls: each names its path and returns the decoded body."""

    def __init__(
        self,
        *,
        base_url: str | None,
        api_key: str | None,
        timeout: httpx.Timeout | float,
        max_retries: int,
        transport: httpx.BaseTransport | None,
        backoff_s: float,
    ) -> None:
        self._timeout: httpx.Timeout | float | None = None  # of with_options; otherwise each call has its own
        self._max_retries, self._backoff_s = max_retries, backoff_s
        headers = wire.headers_of(wire.key(api_key))
        self._http = httpx.Client(base_url=wire.address(base_url), headers=headers, timeout=timeout, transport=transport)

    def close(self) -> None:
        self._http.close()

    def with_options(self, *, timeout: httpx.Timeout | float | None, max_retries: int | None) -> Self:
        """Returns the same pool with other options."""
        other = copy.copy(self)
        other._timeout = self._timeout if timeout is None else timeout
        other._max_retries = self._max_retries if max_retries is None else max_retries
        return other

    def call(self, method: str, path: str, **options: Any) -> R:  # type: ignore[type-var]  # the method's annotation decides
        """Returns the decoded body of a response, objects as records; options as for :meth:`send`."""
        body: R = wire.decoded(self.send(method, path, **options))
        return body

    def create(self, path: str, *, key: str | None = None, **options: Any) -> R:  # type: ignore[type-var]
        """Sends a POST with an Idempotency-Key (generated if not given) to a route that makes one object per key."""
        headers = {"idempotency-key": key or uuid.uuid4().hex}
        return self.call("POST", path, headers=headers, repeatable=True, **options)

    def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Returns a successful response, read completely; options as for :meth:`_tried`."""
        return self._tried(method, path, whole=True, **options)

    def _tried(
        self, method: str, path: str, *, whole: bool, repeatable: bool | None = None, max_retries: int | None = None, **options: Any
    ) -> httpx.Response:
        """Returns a successful response, `whole` or unread. Retries a call that may be repeated; see ``retry_pause``."""
        may_repeat = method in SAFE if repeatable is None else repeatable
        num_retries = self._max_retries if max_retries is None else max_retries
        if self._timeout is not None:
            options["timeout"] = self._timeout
        for retry in range(num_retries + 1):
            failure: httpx.Response | httpx.TransportError
            try:
                answer = self._http.send(self._http.build_request(method, path, **options), stream=not whole)
                if answer.is_success:
                    return answer
                answer.read()
                failure = answer
            except httpx.TransportError as error:
                failure = error
            pause_s = retry_pause(failure, repeatable=may_repeat, retry=retry, backoff_s=self._backoff_s)
            if pause_s is None or retry == num_retries:
                raise failure if isinstance(failure, httpx.TransportError) else wire.error_of(failure)
            time.sleep(pause_s)
        raise AssertionError("the last try returns or raises")

    def content(self, path: str, *, accept: str = "*/*", params: Mapping[str, Any] | None = None) -> bytes:
        """Sends a body that is not JSON."""
        answer = self.send("GET", path, headers={"accept": accept}, params=params)
        return answer.content

    def send_file(self, path: str, file: Path, data: Mapping[str, str]) -> R:  # type: ignore[type-var]
        """Sends a form with a file, read while it is sent."""
        with file.open("rb") as stream:
            return self.call("POST", path, data=dict(data), files={"file": (file.name, stream, "application/octet-stream")})

    def pages(self, path: str, params: Mapping[str, Any] | None = None) -> Pages[R]:
        """Returns the objects of a list, requested as they are read."""
        return Pages(self, path, params or {})

    @contextmanager
    def stream(self, method: str, path: str, **options: Any) -> Iterator[httpx.Response]:
        """Returns a successful response, read as it arrives."""
        answer = self._tried(method, path, whole=False, **options)
        try:
            yield answer
        finally:
            answer.close()

    def growing(self, path: str, params: Mapping[str, Any], *, offset: int) -> Iterator[str]:
        """Yields a log as it is written, until the server ends it; an interrupted stream resumes at the byte where it stopped."""
        requested, retry = dict(params), 0
        last_output_at: float | None = None
        text = codecs.getincrementaldecoder("utf-8")("replace")
        while True:
            has_begun = False
            options = {"params": {**requested, "offset": offset}, "timeout": wire.STREAM_TIMEOUT, "max_retries": 0}
            try:
                with self.stream("GET", path, **options) as answer:
                    offset, retry, last_output_at = int(answer.headers.get("x-log-offset", offset)), 0, time.monotonic()
                    has_begun = True
                    if "x-log-attempt" in answer.headers:
                        requested["attempt"] = answer.headers["x-log-attempt"]
                    for chunk in answer.iter_bytes():
                        offset, last_output_at = offset + len(chunk), time.monotonic()
                        yield text.decode(chunk)
                return
            except PASSING as failure:
                if has_begun and isinstance(failure, httpx.ReadTimeout):
                    continue  # nothing was written: requested again from here, in case the server is gone
                if not self._worth_another(retry, last_output_at):
                    raise
            time.sleep(min(self._backoff_s * 2**retry, 8.0))
            retry += 1

    def data_of(
        self, method: str, path: str, *, decoder: wire.EventDecoder, on_comment: Callable[[], object] | None = None, **options: Any
    ) -> Generator[str]:
        """Yields the data of each event of one stream, up to its end. `on_comment` is called for each comment: the server has no news."""
        decoder.begin()
        with self.stream(method, path, **options) as answer:
            for line in _lines(answer.iter_bytes()):
                if on_comment is not None and line.startswith(":"):
                    on_comment()
                data = decoder.feed(line)
                if data is not None:
                    yield data

    def events(self, path: str, *, params: Mapping[str, Any] | None = None) -> Iterator[R]:
        """Yields events as they happen until the server says that none can follow; an interrupted stream resumes."""
        decoder, retry = wire.EventDecoder(), 0
        last_output_at: float | None = None
        failure: Exception

        def heard_from() -> None:
            nonlocal retry, last_output_at
            retry, last_output_at = 0, time.monotonic()

        while True:
            headers = {"accept": "text/event-stream"} | ({"last-event-id": decoder.last_id} if decoder.last_id else {})
            options = {"params": params, "headers": headers, "timeout": wire.STREAM_TIMEOUT, "max_retries": 0}
            try:
                with closing(self.data_of("GET", path, decoder=decoder, on_comment=heard_from, **options)) as heard:
                    for data in heard:
                        if data == wire.DONE:
                            return
                        heard_from()
                        yield parse(data)
                failure = Unavailable(f"{path} ended before the final event; check whether a proxy answers instead of the API")
            except PASSING as error:
                failure = error
            if not self._worth_another(retry, last_output_at):
                raise failure
            time.sleep(min(self._backoff_s * 2**retry, 8.0))
            retry += 1

    def _worth_another(self, retry: int, last_output_at: float | None) -> bool:
        return retry < self._max_retries or (last_output_at is not None and time.monotonic() - last_output_at < OUTAGE_S)

    def wait(
        self,
        look: Callable[[], T],
        over: Callable[[T], bool],
        *,
        what: str,
        timeout_s: float | None,
        poll_s: float,
        each: Callable[[T], object] | None = None,
    ) -> T:
        """Returns the result of `look` once it is `over`; ``TimeoutError`` after `timeout_s`. `each` is called with every result."""
        began = time.monotonic()
        seen_at: float | None = None
        while True:
            try:
                found = look()
                seen_at = time.monotonic()
                if each is not None:
                    each(found)
            except PASSING:
                if seen_at is None or time.monotonic() - seen_at >= OUTAGE_S:
                    raise
            else:
                if over(found):
                    return found
            if timeout_s is not None and time.monotonic() - began >= timeout_s:
                raise TimeoutError(f"{what} has not finished after {timeout_s:g} s; it is still running")
            time.sleep(poll_s)

    def download(self, path: str, target: Path, *, sha256: str | None = None) -> str:
        """Writes a body to `target` atomically; returns its sha256, which must equal the given one or the server's ``x-sha256``."""
        digest = hashlib.sha256()
        partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
        try:
            with self.stream("GET", path) as answer:
                expected = sha256 or answer.headers.get("x-sha256")
                with partial.open("wb") as out:
                    for chunk in answer.iter_bytes():
                        digest.update(chunk)
                        out.write(chunk)
            if expected is not None and digest.hexdigest() != expected:
                raise IntegrityError(f"{target.name} arrived with sha256 {digest.hexdigest()} instead of {expected}; download it again")
            os.replace(partial, target)  # noqa: PTH105
        finally:
            partial.unlink(missing_ok=True)
        return digest.hexdigest()


def _lines(pieces: Iterable[bytes]) -> Iterator[str]:
    """Yields complete lines; only a line feed ends one, as JSON may contain what else Unicode calls a line break."""
    text, rest = codecs.getincrementaldecoder("utf-8")("replace"), ""
    for piece in pieces:
        *lines, rest = (rest + text.decode(piece)).split("\n")
        yield from (line.removesuffix("\r") for line in lines)


class Resource:
    """The calls of one resource."""

    def __init__(self, connection: Connection) -> None:
        self._api = connection
