"""One connection pool to the API: calls repeated where that is harmless, errors raised as the family they came from."""

from __future__ import annotations

import codecs
import copy
import hashlib
import json
import os
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import httpx

from control_plane.client import wire
from control_plane.client.asynchronous.pages import AsyncPages
from control_plane.client.retries import async_pause, retry_pause
from ft_assets.errors import IntegrityError, RateLimited, Unavailable

T = TypeVar("T")
SAFE = frozenset({"GET", "HEAD", "PUT", "DELETE"})
"""Methods whose repetition changes nothing more."""
PASSING = (httpx.TransportError, Unavailable, RateLimited)
"""What a wait or a stream outlives."""
OUTAGE_S = 60.0
"""A wait or a stream that has once had an answer goes on through an outage of this length, a restart of the API for instance."""


class AsyncConnection:
    """Every call names its path and gives the decoded body."""

    def __init__(
        self,
        *,
        base_url: str | None,
        api_key: str | None,
        timeout: httpx.Timeout | float,
        max_retries: int,
        transport: httpx.AsyncBaseTransport | None,
        backoff_s: float,
    ) -> None:
        self._timeout: httpx.Timeout | float | None = None  # of with_options; else each call has its own
        self._max_retries, self._backoff_s = max_retries, backoff_s
        headers = wire.headers_of(wire.key(api_key))
        self._http = httpx.AsyncClient(base_url=wire.address(base_url), headers=headers, timeout=timeout, transport=transport)

    async def close(self) -> None:
        await self._http.aclose()

    def with_options(self, *, timeout: httpx.Timeout | float | None, max_retries: int | None) -> Self:
        """The same pool under other rules."""
        other = copy.copy(self)
        other._timeout = self._timeout if timeout is None else timeout
        other._max_retries = self._max_retries if max_retries is None else max_retries
        return other

    async def call(self, kind: type[T], method: str, path: str, **options: Any) -> T:
        """The body of an answer, which is a `kind`; options as for :meth:`send`."""
        del kind  # for the reader, the type checker, and the test that holds it against the API
        answer = await self.send(method, path, **options)
        return cast(T, wire.decoded(answer))

    async def create(self, kind: type[T], path: str, *, key: str | None = None, **options: Any) -> T:
        """As a POST under an Idempotency-Key (drawn if not given) of a route that makes one object per key."""
        headers = {"idempotency-key": key or uuid.uuid4().hex}
        return await self.call(kind, "POST", path, headers=headers, repeatable=True, **options)

    async def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """A successful answer, read to its end; options as for :meth:`_tried`."""
        return await self._tried(method, path, whole=True, **options)

    async def _tried(
        self, method: str, path: str, *, whole: bool, repeatable: bool | None = None, max_retries: int | None = None, **options: Any
    ) -> httpx.Response:
        """A successful answer, `whole` or yet to be read. A call that may be repeated is; see ``retry_pause`` for when."""
        may_repeat = method in SAFE if repeatable is None else repeatable
        num_retries = self._max_retries if max_retries is None else max_retries
        if self._timeout is not None:
            options["timeout"] = self._timeout
        for retry in range(num_retries + 1):
            failure: httpx.Response | httpx.TransportError
            try:
                answer = await self._http.send(self._http.build_request(method, path, **options), stream=not whole)
                if answer.is_success:
                    return answer
                await answer.aread()
                failure = answer
            except httpx.TransportError as error:
                failure = error
            pause_s = retry_pause(failure, repeatable=may_repeat, retry=retry, backoff_s=self._backoff_s)
            if pause_s is None or retry == num_retries:
                raise failure if isinstance(failure, httpx.TransportError) else wire.error_of(failure)
            await async_pause(pause_s)
        raise AssertionError("the last try returns or raises")

    async def content(self, path: str, *, accept: str = "*/*", params: Mapping[str, Any] | None = None) -> bytes:
        """A body that is no JSON."""
        answer = await self.send("GET", path, headers={"accept": accept}, params=params)
        return answer.content

    async def send_file(self, kind: type[T], path: str, file: Path, data: Mapping[str, str]) -> T:
        """A form with a file, read as it is sent."""
        with file.open("rb") as stream:
            return await self.call(kind, "POST", path, data=dict(data), files={"file": (file.name, stream, "application/octet-stream")})

    def pages(self, kind: type[T], path: str, params: Mapping[str, Any] | None = None) -> AsyncPages[T]:
        """The objects of a list, asked for as they are read."""
        del kind
        return AsyncPages(self, path, params or {})

    @asynccontextmanager
    async def stream(self, method: str, path: str, **options: Any) -> AsyncIterator[httpx.Response]:
        """A successful answer that is read as it comes."""
        answer = await self._tried(method, path, whole=False, **options)
        try:
            yield answer
        finally:
            await answer.aclose()

    async def growing(self, path: str, params: Mapping[str, Any], *, offset: int) -> AsyncIterator[str]:
        """A log as it is written, until the server ends it; a stream that breaks off is taken up at the byte where it broke."""
        requested, retry = dict(params), 0
        heard_at: float | None = None
        text = codecs.getincrementaldecoder("utf-8")("replace")
        while True:
            has_begun = False
            options = {"params": {**requested, "offset": offset}, "timeout": wire.STREAM_TIMEOUT, "max_retries": 0}
            try:
                async with self.stream("GET", path, **options) as answer:
                    offset, retry, heard_at = int(answer.headers.get("x-log-offset", offset)), 0, time.monotonic()
                    has_begun = True
                    if "x-log-attempt" in answer.headers:
                        requested["attempt"] = answer.headers["x-log-attempt"]
                    async for chunk in answer.aiter_bytes():
                        offset, heard_at = offset + len(chunk), time.monotonic()
                        yield text.decode(chunk)
                return
            except PASSING as failure:
                if has_begun and isinstance(failure, httpx.ReadTimeout):
                    continue  # nothing was written: it is asked for again from here on, lest the server is gone
                if not self._worth_another(retry, heard_at):
                    raise
            await async_pause(min(self._backoff_s * 2**retry, 8.0))
            retry += 1

    async def data_of(self, method: str, path: str, *, decoder: wire.EventDecoder, **options: Any) -> AsyncGenerator[str]:
        """The data of each event of one stream, up to its end."""
        decoder.begin()
        async with self.stream(method, path, **options) as answer:
            async for line in answer.aiter_lines():
                data = decoder.feed(line)
                if data is not None:
                    yield data

    async def events(self, kind: type[T], path: str, *, params: Mapping[str, Any] | None = None) -> AsyncIterator[T]:
        """Events as they happen until the server says that none can follow; a stream that breaks off is taken up where it broke."""
        del kind
        decoder, retry = wire.EventDecoder(), 0
        heard_at: float | None = None
        failure: Exception
        while True:
            headers = {"accept": "text/event-stream"} | ({"last-event-id": decoder.last_id} if decoder.last_id else {})
            options = {"params": params, "headers": headers, "timeout": wire.STREAM_TIMEOUT, "max_retries": 0}
            try:
                async with aclosing(self.data_of("GET", path, decoder=decoder, **options)) as heard:
                    async for data in heard:
                        if data == wire.DONE:
                            return
                        retry, heard_at = 0, time.monotonic()
                        yield cast(T, json.loads(data))
                failure = Unavailable(f"{path} ended before the final event; does a proxy answer in place of the API?")
            except PASSING as error:
                failure = error
            if not self._worth_another(retry, heard_at):
                raise failure
            await async_pause(min(self._backoff_s * 2**retry, 8.0))
            retry += 1

    def _worth_another(self, retry: int, heard_at: float | None) -> bool:
        return retry < self._max_retries or (heard_at is not None and time.monotonic() - heard_at < OUTAGE_S)

    async def wait(
        self, look: Callable[[], Awaitable[T]], over: Callable[[T], bool], *, what: str, timeout_s: float | None, poll_s: float
    ) -> T:
        """What `look` gives once it is `over`; ``TimeoutError`` if that takes longer than `timeout_s`."""
        began = time.monotonic()
        seen_at: float | None = None
        while True:
            try:
                found = await look()
            except PASSING:
                if seen_at is None or time.monotonic() - seen_at >= OUTAGE_S:
                    raise
            else:
                if over(found):
                    return found
                seen_at = time.monotonic()
            if timeout_s is not None and time.monotonic() - began >= timeout_s:
                raise TimeoutError(f"{what} has not ended after {timeout_s:g} s; it is still running")
            await async_pause(poll_s)

    async def download(self, path: str, target: Path, *, sha256: str | None = None) -> str:
        """Write a body to `target`, whole or not at all; its sha256, which has to be the one given or the server's ``x-sha256``."""
        digest = hashlib.sha256()
        partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
        try:
            async with self.stream("GET", path) as answer:
                expected = sha256 or answer.headers.get("x-sha256")
                with partial.open("wb") as out:
                    async for chunk in answer.aiter_bytes():
                        digest.update(chunk)
                        out.write(chunk)
            if expected is not None and digest.hexdigest() != expected:
                raise IntegrityError(f"{target.name} arrived with sha256 {digest.hexdigest()} instead of {expected}; download it again")
            os.replace(partial, target)  # noqa: PTH105
        finally:
            partial.unlink(missing_ok=True)
        return digest.hexdigest()
