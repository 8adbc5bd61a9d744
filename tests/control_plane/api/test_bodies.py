"""Bodies on the wire: without a key, or beyond its path's limit, none is read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlsplit

import httpx
import pytest
import sqlalchemy as sa
from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from control_plane.api.app import create_app
from control_plane.api.request_bodies import (
    INLINE_BYTES,
    MAX_BODY_BYTES,
    MAX_FORM_BYTES,
    MAX_OPEN_FORM_BYTES,
    MAX_VALUES,
    MIB,
    OPEN_FORMS,
    READING_EACH,
    RequestBodies,
    check_structure,
    limit_of,
)
from control_plane.http import error_responses
from control_plane.http.error_responses import Refused
from control_plane.http.rate_limits import RateLimits, TenantLimiter
from control_plane.http.turns import TURNS_OF_ONE, UNREADABLE_BYTES, announced_bytes
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from core.storable_text import MAX_DEPTH
from resources.database.engine import make_engine

PATIENCE_S = 20.0
JOBS = "/v1/fine_tuning/jobs"


def exchange(url: str, path: str, *, headers: str, body: bytes) -> tuple[str, int]:
    """What is answered to the head of a request, and how many bytes of `body` are taken after that."""
    kind = "" if "Content-Type" in headers else "Content-Type: application/json\r\n"
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=PATIENCE_S) as connection:
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{kind}{headers}\r\n".encode())
        said, sent = b"", 0
        with contextlib.suppress(ConnectionError, TimeoutError):
            while b"}}" not in said and (piece := connection.recv(1 << 16)):
                said += piece
        with contextlib.suppress(ConnectionError, TimeoutError):
            while sent < len(body):
                sent += connection.send(body[sent : sent + MIB])
        return said.decode(), sent


@pytest.mark.parametrize(
    ("path", "authorization"),
    [(JOBS, ""), (JOBS, "Authorization: Basic abc\r\n"), ("/v1/suites", ""), ("/v1/chat/completions", "Authorization: Bearer \r\n")],
)
def test_without_a_key_a_body_is_refused_before_it_comes(api_url: str, path: str, authorization: str) -> None:
    said, sent = exchange(api_url, path, headers=f"Content-Length: {32 * MIB}\r\n{authorization}", body=bytes(32 * MIB))
    assert said.startswith("HTTP/1.1 401 ")
    assert '"missing_api_key"' in said
    assert "connection: close" in said.lower()
    assert sent < 32 * MIB, "it was read"


def test_without_a_key_nothing_of_a_chunked_body_is_read(api_url: str) -> None:
    said, _ = exchange(api_url, JOBS, headers="Transfer-Encoding: chunked\r\n", body=b"")
    assert said.startswith("HTTP/1.1 401 ")


def test_a_refusal_reaches_a_client_that_sends_its_whole_body_first(api_url: str) -> None:
    address, body = urlsplit(api_url), bytes(6 * MIB)
    with socket.create_connection((address.hostname, address.port), timeout=PATIENCE_S) as connection:
        connection.sendall(f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        time.sleep(0.3)  # the refusal is there, and the client does not look
        for start in range(0, len(body), MIB):
            connection.sendall(body[start : start + MIB])
        said = b""
        while piece := connection.recv(1 << 16):
            said += piece
    assert said.startswith(b"HTTP/1.1 401 ") and b'"missing_api_key"' in said


def test_nothing_of_a_suite_is_read_for_a_key_that_is_unknown(api_url: str) -> None:
    form = "Content-Type: multipart/form-data; boundary=b"
    headers = f"{form}\r\nContent-Length: {200 * MIB}\r\nAuthorization: Bearer ft-sk-wrong\r\n"
    said, sent = exchange(api_url, "/v1/suites", headers=headers, body=bytes(64 * MIB))
    assert said.startswith("HTTP/1.1 401 ")
    assert sent < 64 * MIB, "it was read"


def test_a_suite_needs_its_fields(api_url: str, api_key: str) -> None:
    def sent(**parts: str) -> tuple[int, str]:
        form = {name: ("a.jsonl" if name == "file" else None, text) for name, text in parts.items()}
        answer = httpx.post(f"{api_url}/v1/suites", files=form, headers={"authorization": f"Bearer {api_key}"})
        return answer.status_code, answer.json()["error"]["param"]

    file = '{"question": "1?"}\n'
    assert sent(name="a", field="question") == (400, "file")
    assert sent(field="question", file=file) == (400, "name")
    assert sent(name="a", file=file) == (400, "field")
    assert sent(name="a", field="question", file=file, x="") == (400, "x")


def test_a_body_beyond_the_limit_is_refused_by_its_announced_length(api_url: str, api_key: str) -> None:
    headers = f"Content-Length: {2 * MIB}\r\nAuthorization: Bearer {api_key}\r\n"
    said, _ = exchange(api_url, JOBS, headers=headers, body=b"")
    assert said.startswith("HTTP/1.1 413 ")
    assert '"body_too_large"' in said
    assert "1 MiB" in said


@pytest.mark.parametrize("length", ["{:020d}", "{:030d}", "{} ", "{}\t \t"])
def test_a_length_with_zeros_or_blanks_around_bounds_a_body_like_any_other(api_url: str, api_key: str, length: str) -> None:
    key = f"Authorization: Bearer {api_key}\r\n"
    for of_caller, status in (("", 401), ("Authorization: Bearer nonsense\r\n", 413), (key, 413)):
        headers = f"Content-Length: {length.format(5 * MIB)}\r\n{of_caller}"
        said, sent = exchange(api_url, "/v1/completions", headers=headers, body=b"[" * (32 * MIB))
        assert said.startswith(f"HTTP/1.1 {status} ") and "connection: close" in said.lower()
        assert sent < 32 * MIB, "it was read"
    body = BODIES["objects"]().encode()
    with socket.create_connection((urlsplit(api_url).hostname, urlsplit(api_url).port), timeout=PATIENCE_S) as connection:
        head = (
            f"POST {JOBS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{key}Content-Length: {length.format(len(body))}"
        )
        connection.sendall(f"{head}\r\n\r\n".encode() + body)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413 ")


def test_a_length_that_cannot_be_read_is_above_every_limit() -> None:
    for length, size in {
        "0": 0,
        "000": 0,
        " 0017 ": 17,
        "9" * 5000: UNREADABLE_BYTES,
        "1e3": UNREADABLE_BYTES,
        "\xb2": UNREADABLE_BYTES,
    }.items():
        assert announced_bytes(Headers({"content-length": length})) == size
    assert announced_bytes(Headers()) == 0


def test_a_chunked_body_is_counted_as_it_comes(api_url: str, api_key: str) -> None:
    address = urlsplit(api_url)
    with socket.create_connection((address.hostname, address.port), timeout=PATIENCE_S) as connection:
        head = f"POST {JOBS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
        connection.sendall(f"{head}Authorization: Bearer {api_key}\r\n\r\n".encode())
        chunk = b"10000\r\n" + bytes(1 << 16) + b"\r\n"
        for _ in range(MAX_BODY_BYTES >> 16):
            connection.sendall(chunk)
        connection.sendall(b"1\r\n \r\n")  # one byte more; that nothing follows is not said
        said = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert said.startswith(b"HTTP/1.1 413 ")
    assert b'"body_too_large"' in said


def test_what_fits_is_read(api_url: str, api_key: str) -> None:
    body = b'{"model": "tiny-base", "x": "' + b"y" * (MIB * 9 // 10) + b'"}'
    answer = httpx.post(
        f"{api_url}{JOBS}", content=body, headers={"authorization": f"Bearer {api_key}", "content-type": "application/json"}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] != "body_too_large"


FORM = "Content-Type: application/x-www-form-urlencoded\r\nCookie: ft_session=x\r\n"


@pytest.mark.parametrize("path", ["/v1/files", "/v1/suites", "/console/keys"])
@pytest.mark.parametrize("announced", [True, False])
def test_a_large_form_of_an_unknown_session_is_refused_before_it_is_parsed(api_url: str, path: str, announced: bool) -> None:
    size = MAX_FORM_BYTES + 1
    if announced:
        said, _ = exchange(api_url, path, headers=f"{FORM}Content-Length: {size}\r\n", body=b"")
    else:
        address = urlsplit(api_url)
        with socket.create_connection((address.hostname, address.port), timeout=PATIENCE_S) as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{FORM}Transfer-Encoding: chunked\r\n\r\n{size:x}\r\n"
            connection.sendall(head.encode() + bytes(size) + b"\r\n")  # that nothing follows is not said
            said = connection.recv(1 << 16).decode()
    status = 413 if announced else 303 if path == "/console/keys" else 403
    assert said.startswith(f"HTTP/1.1 {status} ")


def head_of(method: str, path: str, authorization: str, *, kind: str) -> bytes:
    return (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{authorization}\r\nContent-Type: {kind}\r\nContent-Length: 5000\r\n\r\n"
    ).encode()


@pytest.fixture(scope="module")
def patient(new_platform: Callable[..., Platform], serve: Callable[[ASGIApp], str]) -> tuple[FastAPI, str]:
    """An API, with its URL, that takes as many unknown keys as it gets."""
    made = create_app(platform := new_platform())
    made.state.rate_limits = RateLimits(platform, unknown_keys_per_minute=10**6)
    return made, serve(made)


@pytest.mark.parametrize("authorization", ["Authorization: Bearer nonsense", "Cookie: ft_session=nonsense", "X-None: 1"])
@pytest.mark.parametrize("kind", ["application/json", "application/x-www-form-urlencoded"])
def test_no_route_waits_for_the_body_of_an_unknown_caller(patient: tuple[FastAPI, str], authorization: str, kind: str) -> None:
    """Only heads are sent: a route that reads would wait."""
    app, url = patient
    found = [
        (method, re.sub(r"\{\w+(?::path)?\}", "1", str(route.path)))
        for route in iter_route_contexts(app.routes)
        for method in sorted((route.methods or set()) - {"GET", "HEAD"})
        if route.path not in OPEN_FORMS
    ]
    assert len(found) > 100, "the search found too little to mean anything"
    address, statuses = urlsplit(url), Counter[int]()
    for method, path in found:
        with socket.create_connection((address.hostname, address.port), timeout=PATIENCE_S / 2) as connection:
            connection.sendall(head_of(method, path, authorization, kind=kind))
            answer = connection.recv(1 << 16)
        status = int(answer.split(b" ", 2)[1])
        statuses[status] += 1
        assert status in (303, 401, 403, 409), (method, path, answer)
    assert statuses.total() == len(found)


def test_the_form_of_a_sign_in_is_small(api_url: str) -> None:
    said, _ = exchange(api_url, "/console/sign-in", headers=f"{FORM}Content-Length: {MAX_OPEN_FORM_BYTES + 1}\r\n", body=b"")
    assert said.startswith("HTTP/1.1 413 ")
    assert httpx.post(f"{api_url}/console/sign-in", data={"key": "ft-sk-no"}).status_code in (200, 401, 403)


@pytest.mark.parametrize("path", [JOBS, "/v1/chat/completions", "/v1/webhook_endpoints"])
def test_deep_json_is_refused_before_it_is_parsed(api_url: str, api_key: str, path: str) -> None:
    headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
    for depth in (100, 20_000):
        answer = httpx.post(f"{api_url}{path}", content=b'{"a":' + b"[" * depth + b"]" * depth + b"}", headers=headers, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "too_deep")
        assert f"deeper than {MAX_DEPTH}" in answer.json()["error"]["message"]
    check_structure(path, b"[" * MAX_DEPTH + b'"' + b"[" * 500 + b'"' + b"]" * MAX_DEPTH + b",[]" * 100)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_json_in_another_encoding_is_refused_because_its_structure_cannot_be_seen(api_url: str, api_key: str, encoding: str) -> None:
    headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
    for hidden in ("[" * 500 + "]" * 500, f"[{'0,' * MANY}0]"):
        body = f'{{"\u5c22": {hidden}}}'.encode(encoding)  # in UTF-16 the letter looks like a quote and a backslash
        answer = httpx.post(f"{api_url}{JOBS}", content=body, headers=headers, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
        assert "send UTF-8" in answer.json()["error"]["message"]


async def large(app: FastAPI, key: str) -> httpx.Response:
    """Send a body that is large enough to be checked in a thread."""
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=60) as client:
        body = {"model": "tiny-base", "training_file": "x" * 2 * INLINE_BYTES}
        return await client.post(JOBS, json=body, headers={"authorization": f"Bearer {key}"})


def test_large_bodies_of_a_tenant_are_checked_one_at_a_time_whatever_its_keys(platform: Platform, tenant: Tenant) -> None:
    keys = [tenants.create_key(platform, tenant.id, name=name, scopes=["admin"]).secret for name in ("a", "b")]
    other = tenants.create(platform, f"other-{tenant.id}")[1].secret

    async def scenario() -> None:
        app = create_app(platform)
        checks = app.state.body_checks = TenantLimiter(total=4, each=1, wait_s=0.1, code="bodies_busy")
        async with checks.turn(tenant.id):
            for key in keys:
                refused = await large(app, key)
                assert (refused.status_code, refused.json()["error"]["code"]) == (429, "bodies_busy")
            assert (await large(app, other)).json()["error"]["code"] != "bodies_busy"
        assert [(await large(app, key)).json()["error"]["param"] for key in keys] == ["training_file"] * 2

    asyncio.run(scenario())


def test_large_bodies_of_a_tenant_come_into_memory_a_few_at_a_time_whatever_its_keys(platform: Platform, tenant: Tenant) -> None:
    keys = [tenants.create_key(platform, tenant.id, name=name, scopes=["admin"]).secret for name in ("a", "b")]
    other = tenants.create(platform, f"other-{tenant.id}")[1].secret

    async def scenario() -> None:
        app, going_on, began = create_app(platform), asyncio.Event(), list[str]()

        async def slow(key: str) -> AsyncIterator[bytes]:
            began.append(key)
            yield b'{"model": "' + b"x" * INLINE_BYTES
            await going_on.wait()
            yield b'"}'

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=60) as client:

            def send(key: str) -> asyncio.Task[httpx.Response]:
                headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
                return asyncio.create_task(client.post(JOBS, content=slow(key), headers=headers))

            async def until(number: int) -> None:
                async with asyncio.timeout(PATIENCE_S):
                    while len(began) < number:
                        await asyncio.sleep(0.01)
                await asyncio.sleep(0.2)

            asked = [send(keys[n % 2]) for n in range(2 * READING_EACH)]
            await until(READING_EACH)
            assert len(began) == READING_EACH
            asked.append(send(other))
            await until(READING_EACH + 1)
            assert began[READING_EACH:] == [other]
            going_on.set()
            assert {answer.status_code for answer in await asyncio.gather(*asked)} == {400}
            assert len(began) == 2 * READING_EACH + 1

    asyncio.run(scenario())


def test_keys_of_unknown_callers_are_looked_up_in_the_turns_of_their_address(fresh_platform: Platform) -> None:
    """Those with a body too, which is read only after the look-up."""
    waiting = sa.text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")

    owner = make_engine(fresh_platform.settings.database_url)

    def num_waiting() -> int:
        with owner.connect() as conn:
            return int(conn.execute(waiting).scalar_one())

    async def scenario() -> None:
        app = create_app(fresh_platform)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=60) as client:
            with owner.begin() as conn:
                conn.execute(sa.text("LOCK TABLE api_keys"))
                callers = [{"authorization": f"Bearer ft-sk-{'x' * 42}{n}"} for n in range(3 * TURNS_OF_ONE)]
                asked = [asyncio.create_task(client.post(JOBS, json={"n": 1}, headers=caller)) for caller in callers]
                deadline = time.monotonic() + PATIENCE_S
                while not (found := await asyncio.to_thread(num_waiting)):
                    assert time.monotonic() < deadline
                for _ in range(5):
                    await asyncio.sleep(0.1)
                    found = max(found, await asyncio.to_thread(num_waiting))
            assert [answer.status_code for answer in await asyncio.gather(*asked)] == [401] * len(asked)
            assert 1 <= found <= TURNS_OF_ONE

    asyncio.run(scenario())
    owner.dispose()


def test_a_body_that_does_not_come_holds_no_turn_after_its_key_was_looked_up(platform: Platform, tenant: Tenant) -> None:
    keys = [tenants.create_key(platform, tenant.id, name=f"k{n}", scopes=["admin"]).secret for n in range(TURNS_OF_ONE + 1)]

    async def scenario() -> None:
        app, sent = create_app(platform), asyncio.Event()

        async def slow() -> AsyncIterator[bytes]:
            await sent.wait()
            yield b'{"model": 1}'

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", timeout=60) as client:
            *callers, last = ({"authorization": f"Bearer {key}", "content-type": "application/json"} for key in keys)
            waiting = [asyncio.create_task(client.post(JOBS, content=slow(), headers=caller)) for caller in callers]
            async with asyncio.timeout(PATIENCE_S):
                while not all(app.state.rate_limits.knows(key) for key in keys[:-1]):
                    await asyncio.sleep(0.01)
            answer = await client.get("/v1/me", headers=last)
            assert answer.status_code == 200, answer.text
            sent.set()
            await asyncio.gather(*waiting)

    asyncio.run(scenario())


def test_a_body_that_comes_too_slowly_is_refused(serve: Callable[[ASGIApp], str]) -> None:
    """Nothing in time, or too little; a pause of the route does not count."""

    async def reads(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0.6)
        try:
            read = await Request(scope, receive).body()
        except Refused as refused:
            await error_responses.response(refused.error)(scope, receive, send)
        else:
            await PlainTextResponse(str(len(read)))(scope, receive, send)

    address = urlsplit(serve(RequestBodies(reads, grace_s=0.5)))

    def sent(*pieces: bytes, every_s: float) -> bytes:
        with socket.create_connection((address.hostname, address.port), timeout=PATIENCE_S) as connection:
            connection.sendall(b"POST /console/sign-in HTTP/1.1\r\nHost: localhost\r\nContent-Length: 12000\r\n\r\n")
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(every_s)
            return connection.recv(1 << 16)

    assert b"200 OK" in sent(b" " * 12_000, every_s=0)
    assert b"200 OK" in sent(b" " * 6_000, b" " * 6_000, every_s=0.7)
    late = sent(b"x", every_s=0)
    assert late.startswith(b"HTTP/1.1 408 ") and b'"body_too_slow"' in late and b"connection: close" in late.lower()


def test_a_form_field_is_no_csrf_token_outside_the_console(api_url: str) -> None:
    said, _ = exchange(api_url, "/v1/files", headers=f"{FORM}Content-Length: {MIB // 8}\r\n", body=b"")
    assert said.startswith("HTTP/1.1 403 "), "it waited for the form"
    assert '"csrf_token_invalid"' in said


@pytest.mark.parametrize(
    ("path", "limit"),
    [
        ("/v1/files", None),
        ("/v1/uploads/upload_1/parts", None),
        ("/v1/uploads", 1),
        ("/v1/chat/completions", 4),
        ("/internal/attempt/log/0", 4),
        ("/v1/suites", 257),
    ],
)
def test_each_path_has_its_limit(path: str, limit: int | None) -> None:
    assert limit_of(path, Headers()) == (None if limit is None else limit * MIB)


MANY = 120_000
BODIES = {
    "keys": lambda: json.dumps({f"{i:x}": 1 for i in range(MANY // 2)}, separators=(",", ":")),
    "elements": lambda: json.dumps({"model": "tiny-base", "training_file": [1] * MANY}),
    "objects": lambda: json.dumps({"model": "tiny-base", "training_file": [{}] * MANY}, separators=(",", ":")),
    "keys with blanks": lambda: json.dumps({f"{i:x}": 1 for i in range(MANY // 2)}, separators=(" , ", " : ")),
    "strings without end": lambda: '{"a": ' + '""' * MANY + "," * MANY,
}


@pytest.mark.parametrize("case", BODIES)
def test_a_body_of_many_values_is_refused_before_it_is_parsed(api_url: str, api_key: str, case: str) -> None:
    headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
    body = BODIES[case]()
    httpx.get(f"{api_url}/healthz")
    began = time.process_time()  # the server runs in this process
    answer = httpx.post(f"{api_url}{JOBS}", content=body, headers=headers, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
    assert f"more than {MAX_VALUES} values; send fewer" in answer.json()["error"]["message"]
    assert time.process_time() - began < 1.5


@pytest.mark.parametrize(
    "media_types",
    [
        ["application/json", "text/plain"],
        ["text/plain", "application/json"],
        ["Application/JSON", "text/plain", "text/plain"],
        ["application/problem+json", ""],
    ],
)
def test_many_values_are_refused_whichever_of_several_content_types_says_json(api_url: str, api_key: str, media_types: list[str]) -> None:
    headers = [("authorization", f"Bearer {api_key}"), *(("content-type", media_type) for media_type in media_types)]
    answer = httpx.post(f"{api_url}{JOBS}", content=BODIES["keys"](), headers=headers, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_commas_in_a_text_are_no_values(api_url: str, api_key: str) -> None:
    body = {"model": "no-such", "messages": [{"role": "user", "content": 'a, "b", \\, ' * 100_000}]}
    answer = httpx.post(f"{api_url}/v1/chat/completions", json=body, headers={"authorization": f"Bearer {api_key}"}, timeout=60)
    assert answer.json()["error"]["code"] == "model_not_found"
    check_structure(JOBS, json.dumps({"suffix": 'a, "b", \\", \\' * 100_000}).encode())


def test_texts_with_a_comma_each_are_counted_once(api_url: str, api_key: str) -> None:
    body = {"model": "tiny-base", "training_file": ["a, b"] * (MAX_VALUES * 6 // 10)}
    answer = httpx.post(f"{api_url}{JOBS}", json=body, headers={"authorization": f"Bearer {api_key}"}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "training_file")
