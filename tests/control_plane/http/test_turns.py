"""Turns among callers: a tenant's requests beyond its share wait for each other, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager
from typing import Any

import anyio.from_thread
import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from starlette.types import ASGIApp

from control_plane.api.app import create_app
from control_plane.http import error_responses
from control_plane.http.disconnection import unless_disconnected
from control_plane.http.rate_limits import RateLimits
from control_plane.http.store_calls import Calls
from control_plane.http.turns import TURNS_OF_ONE, WAITS_OF_ONE, Download, Turns, during_turn, give_up_turn, run_waiting
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from tests.support.servers.webhook_receiver import receiver

WAIT_S = 60.0
THREADS = 40
"""Of all routes that are no coroutines: anyio's default."""


class Room:
    """An application whose routes wait until `done` is set, and how many of each caller are in it."""

    def __init__(self, platform: Platform, **limits: Any) -> None:
        self.done, self.inside = asyncio.Event(), list[str]()
        app = FastAPI()
        app.state.rate_limits = RateLimits(platform)
        for key in ("a1", "a2", "b1"):
            app.state.rate_limits.remember(key, key[0])
        error_responses.install(app)

        async def work(request: Request) -> str:
            self.inside.append(request.headers["authorization"].removeprefix("Bearer "))
            await self.done.wait()
            return "done"

        async def validation(request: Request) -> str:
            await give_up_turn(request)
            return await work(request)

        async def store(request: Request, calls: Calls) -> str:
            self.inside.append(request.headers["authorization"].removeprefix("Bearer "))
            await calls.run(lambda: anyio.from_thread.run(self.done.wait))
            return "done"

        async def stream(request: Request) -> StreamingResponse:
            async def pieces() -> AsyncIterator[bytes]:
                yield b"first"
                await work(request)

            return StreamingResponse(pieces())

        def download(request: Request) -> Download:
            def pieces() -> Generator[bytes]:
                yield b"first "
                anyio.from_thread.run(work, request)
                yield b"last"

            return Download(pieces(), media_type="text/plain")

        async def waiting(request: Request) -> str:
            return await run_waiting(request, lambda: anyio.from_thread.run(work, request))

        async def looks_up(request: Request, body: dict[str, int]) -> str:
            async def look_up() -> str:
                async with during_turn(request):
                    return await work(request)

            return await unless_disconnected(request, look_up())

        async def body(request: Request, body: dict[str, int]) -> str:
            return await work(request)

        def in_thread(request: Request) -> str:
            return str(anyio.from_thread.run(work, request))

        app.add_api_route("/work", work)
        app.add_api_route("/in_thread", in_thread)
        app.add_api_route("/validation", validation)
        app.add_api_route("/store", store)
        app.add_api_route("/stream", stream)
        app.add_api_route("/download", download)
        app.add_api_route("/waiting", waiting)
        app.add_api_route("/looks_up", looks_up, methods=["POST"])
        app.add_api_route("/body", body, methods=["POST"])
        app.add_middleware(Turns, **limits)
        self.app: ASGIApp = app

    async def until(self, num: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(self.inside) < num:
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)  # more would have come by now

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Callable[..., asyncio.Task[httpx.Response]]]:
        """Starts requests; what is still open is let go on the way out."""
        tasks: list[asyncio.Task[httpx.Response]] = []
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://room", timeout=WAIT_S) as client:

            def start(key: str, path: str = "/work", *, method: str = "GET", **given: Any) -> asyncio.Task[httpx.Response]:
                headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
                request = client.request(method, path, headers=headers, **given)
                tasks.append(asyncio.create_task(request))
                return tasks[-1]

            yield start
            self.done.set()
            await asyncio.gather(*tasks)


def test_a_caller_has_its_share_by_whatever_keys_and_another_waits_for_none_of_it(platform: Platform) -> None:
    async def scenario() -> None:
        room = Room(platform)
        async with room.open() as start:
            for n in range(3 * TURNS_OF_ONE):
                start(("a1", "a2")[n % 2])
            await room.until(TURNS_OF_ONE)
            assert len(room.inside) == TURNS_OF_ONE
            start("b1")
            await room.until(TURNS_OF_ONE + 1)
            assert room.inside[-1] == "b1" and len(room.inside) == TURNS_OF_ONE + 1
        assert len(room.inside) == 3 * TURNS_OF_ONE + 1

    asyncio.run(scenario())


def test_callers_whose_keys_never_worked_share_the_turns_of_their_address(platform: Platform) -> None:
    async def scenario() -> None:
        room = Room(platform)
        async with room.open() as start:
            for n in range(3 * TURNS_OF_ONE):
                start(f"unknown-{n}")
            await room.until(TURNS_OF_ONE)
            assert len(room.inside) == TURNS_OF_ONE

    asyncio.run(scenario())


def test_a_request_that_waits_too_long_for_others_of_its_caller_is_told_when_to_retry(platform: Platform) -> None:
    async def scenario() -> None:
        room = Room(platform, wait_s=0.1)
        async with room.open() as start:
            for _ in range(TURNS_OF_ONE):
                start("a1")
            await room.until(TURNS_OF_ONE)
            for refused in (await start("a1"), await start("a1", "/body", method="POST", json={"n": 1})):
                assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_at_once")
                assert int(refused.headers["retry-after"]) >= 1

    asyncio.run(scenario())


def test_a_request_that_watches_for_its_caller_to_leave_looks_up_in_its_turn(platform: Platform) -> None:
    async def scenario() -> None:
        room = Room(platform)
        async with room.open() as start:
            for _ in range(3 * TURNS_OF_ONE):
                start("a1", "/looks_up", method="POST", json={"n": 1})
            await room.until(TURNS_OF_ONE)
            assert len(room.inside) == TURNS_OF_ONE
        assert len(room.inside) == 3 * TURNS_OF_ONE

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/validation", "/store", "/stream"])
def test_a_request_that_only_waits_has_no_turn(platform: Platform, path: str) -> None:
    async def scenario() -> None:
        room = Room(platform)
        async with room.open() as start:
            for _ in range(2 * TURNS_OF_ONE):
                start("a1", path)
            await room.until(2 * TURNS_OF_ONE)

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["/download", "/waiting"])
def test_what_waits_for_a_server_leaves_all_turns_and_has_threads_of_its_own_a_few_for_each_caller(platform: Platform, path: str) -> None:
    async def scenario() -> None:
        room = Room(platform)
        async with room.open() as start:
            answers = [start("a1", path) for _ in range(THREADS)]
            await room.until(WAITS_OF_ONE)
            assert room.inside == ["a1"] * WAITS_OF_ONE
            start("b1", path)
            await room.until(WAITS_OF_ONE + 1)
            start("a2")
            start("b1", "/in_thread")
            await room.until(WAITS_OF_ONE + 3)
            assert room.inside[WAITS_OF_ONE] == "b1"
            assert sorted(room.inside[WAITS_OF_ONE + 1 :]) == ["a2", "b1"], "neither the caller's turns nor the threads of all are taken"
            room.done.set()
            assert {(await answer).text for answer in answers} == {{"/download": "first last", "/waiting": '"done"'}[path]}

    asyncio.run(scenario())


def test_a_download_that_its_caller_leaves_is_closed(platform: Platform) -> None:
    async def scenario() -> None:
        sent, closed, app = asyncio.Event(), asyncio.Event(), FastAPI()
        app.state.rate_limits = RateLimits(platform)

        def pieces() -> Generator[bytes]:
            try:
                while True:
                    yield b"more"
            finally:
                closed.set()

        app.add_api_route("/", lambda: Download(pieces(), media_type="text/plain"))
        app.add_middleware(Turns)
        scope = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "headers": [], "client": ("127.0.0.1", 1)}

        async def receive() -> dict[str, Any]:
            await sent.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message.get("body"):
                sent.set()

        async with asyncio.timeout(WAIT_S):
            await app(scope, receive, send)
        assert closed.is_set()

    asyncio.run(scenario())


def test_a_body_that_does_not_come_holds_no_turn(platform: Platform) -> None:
    async def scenario() -> None:
        room, sent = Room(platform), asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            yield b'{"n": '
            await sent.wait()
            yield b"1}"

        async with room.open() as start:
            for _ in range(2 * TURNS_OF_ONE):
                start("a1", "/body", method="POST", content=slow())
            await asyncio.sleep(0.1)
            start("a2")
            await room.until(1)
            assert room.inside == ["a2"]
            sent.set()
            await room.until(TURNS_OF_ONE)
            assert len(room.inside) == TURNS_OF_ONE, "with its body a request waits for a turn again"

    asyncio.run(scenario())


@pytest.mark.timeout(120)
def test_calls_that_hang_leave_the_api_threads_for_other_tenants(
    new_platform: Callable[..., Platform], serve: Callable[[ASGIApp], str]
) -> None:
    """Sixty tests of a webhook that does not answer are more than the 40 threads of the process."""
    platform = new_platform(webhook_allow="127.0.0.1/32")
    url = serve(create_app(platform))
    loud, quiet = ({"authorization": f"Bearer {tenants.create(platform, name)[1].secret}"} for name in ("loud", "quiet"))

    async def scenario(hook: str, arrived: Callable[[], int], released: Callable[[], None]) -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=90, limits=limits, trust_env=False) as client:
            (await client.get("/v1/me", headers=quiet)).raise_for_status()
            made = await client.post("/v1/webhook_endpoints", json={"name": "a", "url": hook, "event_types": ["*"]}, headers=loud)
            test = f"/v1/webhook_endpoints/{made.json()['id']}/test"
            hanging = [asyncio.create_task(client.post(test, headers=loud)) for _ in range(60)]
            while not arrived():
                await asyncio.sleep(0.01)
            answer = await client.get("/v1/me", headers=quiet)
            num_before = sum(task.done() for task in hanging)
            assert answer.status_code == 200
            assert num_before < 10, f"{num_before} calls of the other tenant came first"
            released()
            for task in hanging:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*hanging)

    with receiver() as webhooks:
        asyncio.run(scenario(webhooks.url("/hang"), lambda: len(webhooks.at("/hang")), webhooks.released.set))
