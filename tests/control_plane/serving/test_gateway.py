"""The gateway between a request and the inference servers: where it goes, when it goes elsewhere, and when it must not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.types import Message

from control_plane.serving.gateway import MAX_LACKS, MAX_RESENDS, SKIP_S, Gateway, ServerFailed, Target, _in_openai_form, _Server
from core.errors import RateLimited, Unavailable

URLS = ("http://one", "http://two", "http://three")
Behaviour = Callable[[httpx.Request], httpx.Response | Awaitable[httpx.Response]]


def answers(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"model": json.loads(request.content)["model"], "from": request.url.host})


def raises(error: Exception) -> Behaviour:
    def behave(_: httpx.Request) -> httpx.Response:
        raise error

    return behave


def status(code: int) -> Behaviour:
    return lambda _: httpx.Response(code, json={"error": {"message": "said so", "code": code}})


class Words(httpx.AsyncByteStream):
    """An event stream of chunks; an exception among them breaks it off."""

    def __init__(self, *chunks: str | Exception) -> None:
        self._chunks = chunks
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk.encode()

    async def aclose(self) -> None:
        self.closed = True


def delta(**content: str) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': content, 'finish_reason': None}]})}\n\n"


def streams(*chunks: str | Exception) -> Behaviour:
    return lambda _: httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Words(*chunks))


ROLE, HELLO, DONE = delta(role="assistant", content=""), delta(content="hello"), "data: [DONE]\n\n"


@dataclass
class Servers(httpx.AsyncBaseTransport):
    """What each server does; all answer unless they are told otherwise."""

    does: dict[str, Behaviour] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.url.host)
        made = self.does.get(request.url.host, answers)(request)
        return made if isinstance(made, httpx.Response) else await made


@dataclass
class Setting:
    servers: Servers = field(default_factory=Servers)
    now: float = 0.0
    urls: tuple[str, ...] = URLS
    resolved: int = 0

    def __post_init__(self) -> None:
        self.gateway = Gateway(httpx.AsyncClient(transport=self.servers), clock=lambda: self.now)

    async def ask(self) -> Response:
        async def resolve() -> Target:
            self.resolved += 1
            self.now += 0.1
            return Target(model="ft:m", servers=self.urls, headers={"x-ft-model": "ft:m"})

        return await self.gateway.forward("/v1/chat/completions", {"model": "logical"}, resolve)

    async def whole(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(bytes((await self.ask()).body))
        return body


async def sent(response: Response) -> str:
    """The body as a caller gets it."""
    out: list[Message] = []

    async def receive() -> Message:
        await asyncio.sleep(10)
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        out.append(message)

    await response({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send)
    return b"".join(m.get("body", b"") for m in out).decode()


def test_the_answer_names_the_version_and_servers_take_turns() -> None:
    async def run() -> None:
        s = Setting()
        made = await s.ask()
        assert made.headers["x-ft-model"] == "ft:m"
        assert json.loads(bytes(made.body))["model"] == "ft:m"
        for _ in range(5):
            await s.ask()
        assert sorted(s.servers.asked) == sorted([*["one", "two", "three"] * 2])

    asyncio.run(run())


def test_a_request_goes_to_the_server_with_the_fewest_under_way() -> None:
    async def run() -> None:
        s, go = Setting(urls=URLS[:2]), asyncio.Event()

        async def slow(request: httpx.Request) -> httpx.Response:
            await go.wait()
            return answers(request)

        s.servers.does["one"] = slow
        waiting = [asyncio.create_task(s.whole()) for _ in range(2)]
        await asyncio.sleep(0.01)
        for _ in range(6):
            assert (await s.whole())["from"] == "two"
        go.set()
        assert sorted([(await task)["from"] for task in waiting]) == ["one", "two"]

    asyncio.run(run())


@pytest.mark.parametrize(
    "trouble",
    [
        raises(httpx.ConnectError("refused")),
        raises(httpx.ConnectTimeout("slow")),
        raises(httpx.RemoteProtocolError("cut")),
        raises(httpx.ReadError("reset")),
        status(404),
        status(500),
        status(503),
        streams(httpx.RemoteProtocolError("cut")),
        streams(ROLE, httpx.ReadError("reset")),
    ],
)
def test_another_server_answers_as_long_as_nothing_was_shown(trouble: Behaviour) -> None:
    async def run() -> None:
        s = Setting(servers=Servers({"one": trouble}))
        for _ in range(6):
            assert (await s.whole())["from"] != "one"
        assert s.resolved == 6

    asyncio.run(run())


def test_a_server_where_too_many_of_the_callers_own_wait_goes_on_with_the_others() -> None:
    at = Setting(servers=Servers({"one": status(429)}))
    assert {asyncio.run(at.whole())["from"] for _ in range(6)} == {"two", "three"}
    at = Setting(servers=Servers(dict.fromkeys(("one", "two", "three"), status(429))))
    with pytest.raises(RateLimited, match="your answers") as refused:
        asyncio.run(at.ask())
    assert refused.value.code == "too_many_in_flight"
    assert all(server.failed_at is None for server in at.gateway._servers.values())


@pytest.mark.parametrize("code", [401, 403])
def test_a_refusal_of_the_platforms_token_is_not_the_callers(code: int) -> None:
    at = Setting(servers=Servers({"one": status(code), "two": status(code)}))
    assert asyncio.run(at.whole())["from"] == "three"
    at = Setting(servers=Servers(dict.fromkeys(("one", "two", "three"), status(code))))
    with pytest.raises(Unavailable, match="refuses the platform's token"):
        asyncio.run(at.ask())


def test_a_server_that_refuses_the_platforms_token_is_asked_last_for_a_while() -> None:
    at = Setting(servers=Servers({"one": status(401)}))
    for _ in range(5):
        asyncio.run(at.whole())
    assert at.servers.asked.count("one") == 1


def test_a_stream_is_passed_on_and_not_repeated_after_its_first_words() -> None:
    async def run() -> None:
        s = Setting(servers=Servers(dict.fromkeys(("one", "two", "three"), streams(ROLE, HELLO, DONE))))
        made = await s.ask()
        assert isinstance(made, StreamingResponse)
        assert await sent(made) == ROLE + HELLO + DONE
        s.servers.does = dict.fromkeys(("one", "two", "three"), streams(ROLE, HELLO, httpx.ReadError("reset")))
        s.servers.asked.clear()
        text = await sent(await s.ask())
        assert text.startswith(ROLE + HELLO)
        assert json.loads(text.rsplit("data: ", 1)[1])["error"]["code"] == "inference_unavailable"
        assert len(s.servers.asked) == 1
        assert all(server.under_way == 0 for server in s.gateway._servers.values())

    asyncio.run(run())


def test_a_request_that_takes_down_servers_is_not_given_a_third() -> None:
    async def run() -> None:
        s = Setting(servers=Servers(dict.fromkeys(("one", "two", "three"), raises(httpx.RemoteProtocolError("cut")))))
        with pytest.raises(Unavailable, match="broke off"):
            await s.ask()
        assert len(s.servers.asked) == 1 + MAX_RESENDS

    asyncio.run(run())


def test_a_server_that_failed_is_left_out_and_then_tried_by_one_request() -> None:
    async def run() -> None:
        s = Setting(urls=URLS[:2], servers=Servers({"one": raises(httpx.ConnectError("refused"))}))
        for _ in range(3):
            await s.ask()
        tries = s.servers.asked.count("one")
        assert tries == 1
        s.now += SKIP_S
        go = asyncio.Event()

        async def back(request: httpx.Request) -> httpx.Response:
            await go.wait()
            return answers(request)

        s.servers.does["one"] = back
        several = [asyncio.create_task(s.whole()) for _ in range(6)]
        await asyncio.sleep(0.05)
        assert s.servers.asked.count("one") == tries + 1, "one request finds out"
        go.set()
        assert sorted([(await task)["from"] for task in several]) == ["one", *["two"] * 5]

    asyncio.run(run())


def test_a_server_that_failed_once_is_well_again_while_streams_run_on_it() -> None:
    async def run() -> None:
        s = Setting(urls=URLS[:1], servers=Servers({"one": streams(ROLE, HELLO, DONE)}))
        running = await s.ask()
        s.urls, s.servers.does["one"] = URLS[:2], raises(httpx.ConnectError("refused"))
        s.servers.does["two"] = streams(ROLE, HELLO, DONE)
        others = [await s.ask() for _ in range(3)]  # of which one finds out that the first server is away
        assert s.servers.asked.count("one") == 2
        s.now += SKIP_S
        s.servers.does["one"] = answers
        assert (await s.whole())["from"] == "one", "it has fewer requests under way"
        for made in (running, *others):
            await sent(made)
        assert all(server.under_way == 0 and not server.trial_under_way for server in s.gateway._servers.values())

    asyncio.run(run())


def test_what_a_server_lacks_is_remembered_of_so_many_models_and_no_more() -> None:
    s, server = Setting(), _Server()
    missing = httpx.Response(404)
    for n in range(2 * MAX_LACKS):
        s.now += SKIP_S / MAX_LACKS / 2
        with pytest.raises(ServerFailed):
            s.gateway._refused(server, missing, f"ft:{n}")
    assert len(server.lacks) == MAX_LACKS and f"ft:{2 * MAX_LACKS - 1}" in server.lacks
    s.now += SKIP_S
    with pytest.raises(ServerFailed):
        s.gateway._refused(server, missing, "ft:late")
    assert set(server.lacks) == {"ft:late"}, "what is no news any more goes"


@pytest.mark.parametrize("fails", [raises(httpx.ConnectError("refused")), status(503), status(404)])
def test_a_server_that_could_not_answer_is_asked_again_after_another_look(fails: Behaviour) -> None:
    async def run() -> None:
        s = Setting(urls=URLS[:1])

        def at_first(request: httpx.Request) -> httpx.Response:
            s.servers.does.clear()
            return fails(request)  # type: ignore[return-value]

        s.servers.does["one"] = at_first
        assert (await s.whole())["from"] == "one"
        assert (s.resolved, s.servers.asked) == (2, ["one", "one"])

    asyncio.run(run())


def test_what_is_served_where_is_looked_up_again_until_a_server_has_it() -> None:
    async def run() -> None:
        s = Setting(urls=())

        async def appear() -> None:
            await asyncio.sleep(0.15)
            s.urls = URLS[:1]

        task = asyncio.create_task(appear())
        assert (await s.whole())["from"] == "one"
        await task
        assert s.resolved > 1
        s.urls = ()
        with pytest.raises(Unavailable, match="no inference server answers for ft:m"):
            await s.ask()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("content", "code"),
    [
        pytest.param(
            {"error": {"message": "m", "code": "unsupported_parameter", "param": "p"}}, "unsupported_parameter", id="its own code"
        ),
        pytest.param({"error": {"message": "m", "code": 400, "param": "p"}}, "inference_refused", id="vLLM repeats the status"),
        pytest.param(
            {"error": {"message": "The decoder prompt is longer than the maximum model length of 512.", "code": 400, "param": "p"}},
            "context_length_exceeded",
            id="vLLM refuses a long prompt",
        ),
        pytest.param(
            {"error": {"message": "This model's maximum context length is 512 tokens.", "code": 400, "param": "p"}},
            "context_length_exceeded",
            id="vLLM refuses a long answer",
        ),
    ],
)
def test_the_code_of_a_refusal_reaches_the_client(content: dict[str, Any], code: str) -> None:
    found = json.loads(_in_openai_form(json.dumps(content).encode()))["error"]
    assert found == {"message": content["error"]["message"], "type": "invalid_request_error", "param": "p", "code": code}


def test_a_refusal_is_the_answer_and_not_repeated() -> None:
    async def run() -> None:
        s = Setting(servers=Servers(dict.fromkeys(("one", "two", "three"), status(400))))
        made = await s.ask()
        assert (made.status_code, json.loads(bytes(made.body))["error"]["code"]) == (400, "inference_refused")
        assert len(s.servers.asked) == 1

    asyncio.run(run())
