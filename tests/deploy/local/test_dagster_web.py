"""Dagster's own webserver behind the front, over real HTTP and real websockets: what an attacker tries, and what the UI does."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from starlette.types import Receive, Scope, Send
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.sync.client import connect

from control_plane.http.rate_limits import UNKNOWN_KEYS_PER_MINUTE, RateLimits
from control_plane.platform.context import Platform
from control_plane.platform.secrets import cipher, dagster_token, seal, sha256_of
from control_plane.tenants import operators, sessions
from control_plane.tenants import service as tenants
from control_plane.tenants.tables import console_sessions
from deploy.local.dagster_web.access_control import COOKIE, LOGIN, MAX_FORM_BYTES, AccessControl
from tests.support.platform.database_roles import as_operator
from tests.support.servers.inference_server import free_port
from tests.support.servers.served_app import served

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.timeout(400)  # the first import of Dagster takes minutes on a busy machine
CODE = """
import dagster as dg

@dg.op
def hello():
    return 1

@dg.job
def greet():
    hello()

defs = dg.Definitions(jobs=[greet])
"""
WRITE = "mutation { setNuxSeen }"
READ = "{ version }"


@dataclass(kw_only=True)
class Web:
    platform: Platform
    port: int
    key: str
    session: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def token(self) -> dict[str, str]:
        return {"authorization": f"Bearer {dagster_token(self.platform.settings)}"}

    def sign_in(self, key: str) -> httpx.Response:
        return httpx.post(f"{self.url}/ft/login", data={"key": key}, headers={"origin": self.url})

    def end(self, cookie: str, *, in_s: float) -> None:
        """Let the session of a cookie end after so many seconds."""
        this = console_sessions.c.sha256 == sha256_of(cookie.partition("=")[2])
        ends_at = self.platform.clock() + timedelta(seconds=in_s)
        with self.platform.engine.begin() as conn:
            assert conn.execute(sa.update(console_sessions).where(this).values(expires_at=ends_at)).rowcount == 1

    def query(self, text: str, headers: dict[str, str]) -> httpx.Response:
        return httpx.post(f"{self.url}/graphql", json={"query": text}, headers=headers, timeout=60)


@pytest.fixture(scope="module")
def web(new_platform: Callable[..., Platform], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    place, port = tmp_path_factory.mktemp("dagster"), free_port()
    platform = new_platform(dagster_port=str(port))
    (place / "greetings.py").write_text(CODE)
    (place / "workspaces").mkdir()
    (place / "workspaces" / "workspace.yaml").write_text(
        "load_from:\n  - python_file: {relative_path: ../greetings.py, location_name: greetings}\n"
    )
    (place / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    settings = platform.settings
    env = {
        **os.environ, "DAGSTER_HOME": str(place), "FT_HOME": str(settings.home), "FT_DATABASE_URL": settings.database_url,
        "FT_DAGSTER_PORT": str(port), "FT_INFERENCE_URLS": ",", "PYTHONPATH": str(ROOT), "FT_DAGSTER_HOSTS": "dagster.example.com",
    }  # fmt: skip
    log = place / "web.log"
    command = [sys.executable, "-m", "deploy.local.dagster_web", str(place / "workspaces" / "workspace.yaml"), "0.0.0.0"]
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=env, cwd=place, stdout=out, stderr=out)
    made = Web(platform=platform, port=port, key=operators.create(as_operator(platform), "alice").secret)
    try:
        deadline = time.monotonic() + 350
        while True:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-5000:]
            try:
                httpx.get(f"{made.url}/server_info", headers=made.token, timeout=5)
                break
            except httpx.HTTPError:
                time.sleep(0.2)
        signed_in = made.sign_in(made.key)
        assert signed_in.status_code == 303
        made.session = {"cookie": signed_in.headers["set-cookie"].partition(";")[0]}
        yield made
    finally:
        process.send_signal(2)
        assert process.wait(timeout=40) == 0, log.read_text()[-5000:]


def test_nothing_opens_without_a_token_or_a_session(web: Web) -> None:
    assert web.query(READ, {}).status_code == 401
    for path in ("/graphql?query={version}", "/server_info", "/logs/x/compute_logs/y.out", "/download_debug/x", "/favicon.png", "/"):
        assert httpx.get(f"{web.url}{path}").status_code == 401, path
    assert httpx.post(f"{web.url}/report_asset_materialization/x", json={}).status_code == 401
    _, tenant_key = tenants.create(web.platform, "t-front")
    wrong = ("", "Bearer", "Bearer x", f"Bearer {tenant_key.secret}", f"Basic {web.key}", "Bearer ft-op-" + "x" * 43)
    assert {web.query(READ, {"authorization": a}).status_code for a in wrong} == {401, 403}
    assert {
        web.query(READ, {"cookie": c}).status_code for c in ("ft_operator=x", "ft_operator=", 'ft_operator="\\', f"ft_operator={web.key}")
    } == {401}


def test_it_listens_where_it_is_told_and_a_probe_without_a_key_gets_the_page_to_sign_in(web: Web) -> None:
    """As on a cluster: the kubelet calls the pod's address, of which the webserver does not know."""
    elsewhere = f"http://127.0.0.2:{web.port}/ft/login"
    assert httpx.get(elsewhere, headers={"host": f"localhost:{web.port}"}).status_code == 200
    assert httpx.get(elsewhere).json()["error"]["code"] == "host_not_allowed"


def test_an_operators_key_and_the_token_of_the_stack_open_it(web: Web) -> None:
    for headers in (web.token, {"authorization": f"Bearer {web.key}"}):
        assert web.query(READ, headers).json()["data"]["version"]
        assert httpx.get(f"{web.url}/graphql", params={"query": READ}, headers=headers).json()["data"]["version"]


@pytest.mark.parametrize(
    "query",
    [
        [WRITE],
        [READ, WRITE],
        [WRITE, READ],
        [f"query a {READ} mutation b {{ setNuxSeen }}"],
        ["subscription { x }"],
        ["# x\n" + WRITE],
        ["{"],
    ],
)
def test_no_mutation_by_get_even_with_a_session(web: Web, query: list[str]) -> None:
    image = {**web.session, "accept": "image/avif,image/webp,*/*;q=0.8", "sec-fetch-site": "same-site"}  # as of <img> on another port
    for headers in (image, web.token):
        for method in ("GET", "HEAD"):
            for path in ("/graphql", "/graphql/"):
                answer = httpx.request(method, f"{web.url}{path}", params=[("query", q) for q in query], headers=headers)
                assert answer.status_code == 400, (method, path)
        assert answer.status_code == 400


def test_a_form_of_another_page_posts_no_query(web: Web) -> None:
    for media_type in ("text/plain", "application/x-www-form-urlencoded", "text/plain; application/json", ""):
        headers = {**web.session, "origin": web.url, "content-type": media_type}
        answer = httpx.post(f"{web.url}/graphql", params={"query": WRITE}, content=json.dumps({"query": WRITE}), headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "graphql_not_json")


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1", "http://127.0.0.1.evil.example"])
def test_a_page_of_another_origin_is_refused_whatever_it_sends(web: Web, origin: str) -> None:
    for headers in ({}, web.session, web.token):
        answers = [web.query(READ, {**headers, "origin": origin}), httpx.get(f"{web.url}/", headers={**headers, "origin": origin})]
        answers += [httpx.post(f"{web.url}/ft/login", data={"key": web.key}, headers={**headers, "origin": origin})]
        assert [(a.status_code, a.json()["error"]["code"]) for a in answers] == [(403, "origin_not_allowed")] * 3


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "dagster.example.com.evil.example", ""]
)
def test_a_foreign_name_that_resolves_to_this_machine_opens_nothing(web: Web, host: str) -> None:
    for headers in ({}, web.session, web.token):
        answer = web.query(READ, {**headers, "host": host.format(port=web.port)})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")


def test_two_hosts_are_none(web: Web) -> None:
    with socket.create_connection(("127.0.0.1", web.port)) as sock:
        host = f"Host: 127.0.0.1:{web.port}\r\n"
        auth = f"authorization: {web.token['authorization']}\r\n"
        sock.sendall(f"GET /server_info HTTP/1.1\r\n{host}Host: evil.example\r\n{auth}Connection: close\r\n\r\n".encode())
        assert b" 403 " in sock.recv(65536).split(b"\r\n")[0] + b" "


def test_a_host_of_the_settings_is_served(web: Web) -> None:
    headers = {"host": "dagster.example.com", "origin": "https://dagster.example.com", **web.session}
    assert web.query(READ, headers).json()["data"]["version"]


def test_a_session_that_changes_something_says_where_from(web: Web) -> None:
    assert web.query(READ, web.session).json()["error"]["code"] == "origin_not_allowed"
    assert web.query(WRITE, {**web.session, "origin": web.url}).json()["data"] == {"setNuxSeen": True}


def test_the_session_is_a_cookie_that_no_script_and_no_other_site_uses(web: Web) -> None:
    answer = web.sign_in(web.key)
    (cookie,) = answer.headers.get_list("set-cookie")
    assert answer.headers["location"] == "/"
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= {part.strip() for part in cookie.split(";")}
    assert web.key not in cookie
    for wrong in ("", "x", "ft-op-" + "x" * 43, "ft-sk-x"):
        refused = web.sign_in(wrong)
        assert refused.status_code in (401, 403) and "set-cookie" not in refused.headers
    assert httpx.post(f"{web.url}/ft/login", content=b"key=" + b"x" * 5000, headers={"origin": web.url}).status_code == 413


@pytest.mark.parametrize(("left_s", "status"), [(600, 200), (-600, 401)])
def test_a_session_ends_by_itself(web: Web, left_s: int, status: int) -> None:
    session = web.sign_in(web.key).headers["set-cookie"].partition(";")[0]
    web.end(session, in_s=left_s)
    assert httpx.get(f"{web.url}/server_info", headers={"cookie": session}).status_code == status


def test_the_consoles_session_of_an_operator_opens_it_and_ends_here_when_it_ends_there(web: Web) -> None:
    secret = sessions.sign_in(web.platform, operators.authenticate(web.platform, web.key))
    session = {"cookie": f"{sessions.COOKIE}={secret}"}
    assert web.query(READ, {**session, "origin": web.url}).json()["data"]["version"]
    assert web.query(READ, session).json()["error"]["code"] == "origin_not_allowed"
    beside = {"cookie": f"{COOKIE}=ft-ss-ended; {sessions.COOKIE}={secret}"}
    assert httpx.get(f"{web.url}/server_info", headers=beside).status_code == 200, "an older session of this server does not hide it"
    sessions.sign_out(web.platform, secret)
    assert httpx.get(f"{web.url}/server_info", headers=session).status_code == 401


def test_a_tenants_session_opens_nothing_and_the_page_says_why(web: Web) -> None:
    _, key = tenants.create(web.platform, "t-curious")
    secret = sessions.sign_in(web.platform, tenants.authenticate(web.platform, key.secret))
    session = {"cookie": f"{sessions.COOKIE}={secret}"}
    refused = web.query(READ, {**session, "origin": web.url})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "operator_key_required")
    page = httpx.get(f"{web.url}/runs", headers={**session, "accept": "text/html"})
    assert page.status_code == 403
    assert "signed in for the tenant t-curious" in page.text
    assert "/console/operator/dagster" in page.text
    ticket = seal(web.platform.settings, secret)
    assert httpx.get(f"{web.url}/ft/login", params={"ticket": ticket}).status_code == 403


def test_a_ticket_of_the_console_begins_a_session_once_and_soon(web: Web) -> None:
    secret = sessions.sign_in(web.platform, operators.authenticate(web.platform, web.key))
    ticket = seal(web.platform.settings, secret)
    answer = httpx.get(f"{web.url}/ft/login", params={"ticket": ticket, "to": "/runs?q[0]=tag:a=b&x=<"})
    assert (answer.status_code, "url=/runs?q[0]=tag:a=b&amp;x=&lt;" in answer.text) == (200, True)
    session = {"cookie": answer.headers["set-cookie"].partition(";")[0]}
    assert httpx.get(f"{web.url}/server_info", headers=session).status_code == 200
    late = cipher(web.platform.settings).encrypt_at_time(secret.encode(), int(time.time()) - 60).decode()
    for refused in (ticket, late, "", "x"):
        again = httpx.get(f"{web.url}/ft/login", params={"ticket": refused})
        assert (again.status_code, "set-cookie" in again.headers) == (403, False), refused
    # browsers leave tabs and line ends out of an address: the last three are //evil.example to them
    for elsewhere in (
        "https://evil.example",
        "//evil.example",
        "/\\evil.example",
        "/\t/evil.example",
        "/\n\\evil.example",
        "/\r\n/evil.example",
    ):
        fresh = seal(web.platform.settings, secret)
        assert 'url=/"' in httpx.get(f"{web.url}/ft/login", params={"ticket": fresh, "to": elsewhere}).text


def test_a_ticket_that_is_shown_several_times_at_once_begins_one_session(web: Web) -> None:
    ticket = seal(web.platform.settings, sessions.sign_in(web.platform, operators.authenticate(web.platform, web.key)))

    async def show() -> list[int]:
        async with httpx.AsyncClient(base_url=web.url, timeout=60) as client:
            answers = await asyncio.gather(*(client.get("/ft/login", params={"ticket": ticket}) for _ in range(4)))
            return sorted(answer.status_code for answer in answers)

    assert asyncio.run(show()) == [200, 403, 403, 403]


def test_an_address_that_guesses_keys_or_sessions_is_refused_as_at_the_api(web: Web) -> None:
    with httpx.Client(base_url=web.url, transport=httpx.HTTPTransport(local_address="127.0.0.9")) as guesser:
        for _ in range(UNKNOWN_KEYS_PER_MINUTE - 3):
            RateLimits(web.platform).buckets.take("address:127.0.0.9", UNKNOWN_KEYS_PER_MINUTE)
        for attempt in range(60):  # a few more are allowed each second
            bearer, cookie = {"authorization": f"Bearer ft-op-{attempt:043d}"}, {"cookie": f"ft_operator=ft-ss-{attempt:043d}"}
            refused = [guesser.get("/server_info", headers=headers) for headers in (bearer, cookie)]
            refused.append(guesser.post("/ft/login", data={"key": f"ft-op-x{attempt:042d}"}, headers={"origin": web.url}))
            if all(r.status_code == 429 for r in refused):
                break
        assert [r.status_code for r in refused] == [429] * 3
        assert refused[0].json()["error"]["code"] == "too_many_unknown_keys"
        assert int(refused[0].headers["retry-after"]) >= 1
        assert guesser.get("/server_info", headers=web.token).status_code == 200, "the stack's own token is no guess"
        assert guesser.get("/server_info", headers=web.session).status_code == 200, "it worked before the guessing"
    assert httpx.get(f"{web.url}/server_info", headers={"authorization": f"Bearer {web.key}"}).status_code == 200, "another address"


def test_revoking_the_key_ends_its_session(web: Web) -> None:
    made = operators.create(as_operator(web.platform), "bob")
    session = {"cookie": web.sign_in(made.secret).headers["set-cookie"].partition(";")[0]}
    assert httpx.get(f"{web.url}/server_info", headers=session).status_code == 200
    operators.revoke(as_operator(web.platform), made.id)
    assert httpx.get(f"{web.url}/server_info", headers=session).status_code == 401


def test_the_ui_loads_and_queries_in_a_session(web: Web) -> None:
    html = {"accept": "text/html,application/xhtml+xml"}
    assert "Sign in" in httpx.get(f"{web.url}/runs", headers=html).text
    page = httpx.get(f"{web.url}/runs", headers={**html, **web.session})
    assert page.status_code == 200 and "Dagster" in page.text and page.headers["x-frame-options"] == "DENY"
    script = page.text.partition('src="')[2].partition('"')[0]
    assert httpx.get(f"{web.url}{script}", headers=web.session).status_code == 200
    found = web.query(
        "{ repositoriesOrError { ... on RepositoryConnection { nodes { jobs { name } } } } }", {**web.session, "origin": web.url}
    )
    jobs = [job["name"] for node in found.json()["data"]["repositoriesOrError"]["nodes"] for job in node["jobs"]]
    assert "greet" in jobs


def socket_to(web: Web, **headers: str) -> Any:
    origin = headers.pop("origin", None)
    return connect(
        f"ws://127.0.0.1:{web.port}/graphql", additional_headers=headers, origin=origin, subprotocols=["graphql-ws"], open_timeout=30
    )  # type: ignore[arg-type]


def test_a_websocket_needs_a_token_or_a_session_of_an_allowed_page(web: Web) -> None:
    bearer = web.token["authorization"]
    refused: list[dict[str, str]] = [
        {}, {"origin": web.url}, {"origin": "https://evil.example", "authorization": bearer}, {"authorization": "Bearer x"},
        {**web.session, "origin": "https://evil.example"}, web.session, {"cookie": "ft_operator=x", "origin": web.url},
    ]  # fmt: skip
    for headers in refused:
        with pytest.raises(InvalidStatus) as status:
            socket_to(web, **headers)
        assert status.value.response.status_code == 403
    for headers in ({"authorization": bearer}, {**web.session, "origin": web.url}):
        with socket_to(web, **headers) as ws:
            ws.send(json.dumps({"type": "connection_init"}))
            assert json.loads(ws.recv(timeout=30)) == {"type": "connection_ack"}


@pytest.mark.slow
def test_an_open_websocket_ends_with_its_session_and_with_its_key(web: Web) -> None:
    made = operators.create(as_operator(web.platform), "carol")
    signed_in = {"cookie": web.sign_in(made.secret).headers["set-cookie"].partition(";")[0]}
    nearly_over = web.sign_in(web.key).headers["set-cookie"].partition(";")[0]
    web.end(nearly_over, in_s=20)
    with (
        socket_to(web, **signed_in, origin=web.url) as revoked,
        socket_to(web, authorization=f"Bearer {made.secret}") as by_key,
        socket_to(web, cookie=nearly_over, origin=web.url) as expired,
        socket_to(web, **web.session, origin=web.url) as other,
    ):
        for ws in (revoked, by_key, expired, other):
            ws.send(json.dumps({"type": "connection_init"}))
            assert json.loads(ws.recv(timeout=30)) == {"type": "connection_ack"}
        operators.revoke(as_operator(web.platform), made.id)
        for ws in (revoked, by_key, expired):
            with pytest.raises(ConnectionClosedError) as closed:
                ws.recv(timeout=90)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008
        other.send(json.dumps({"type": "start", "id": "1", "payload": {"query": WRITE}}))
        assert json.loads(other.recv(timeout=30))["type"] == "error", "still served"


def test_a_websocket_carries_no_mutation(web: Web) -> None:
    with socket_to(web, **web.session, origin=web.url) as ws:
        ws.send(json.dumps({"type": "connection_init"}))
        ws.recv(timeout=30)
        ws.send(json.dumps({"type": "start", "id": "1", "payload": {"query": WRITE}}))
        assert json.loads(ws.recv(timeout=30))["type"] == "error"


def test_the_front_bounds_heads_as_the_api_does(web: Web) -> None:
    with socket.create_connection(("127.0.0.1", web.port)) as sock:
        sock.sendall(b"GET /?" + b"a" * 40_000)
        assert sock.recv(65536).startswith(b"HTTP/1.1 431 ")


def test_only_the_front_listens(web: Web) -> None:
    """No second port leads around it: every listener of the process and its children is the front's, or a Unix socket."""
    import psutil

    parent = next(c.pid for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == web.port)
    family = [psutil.Process(parent), *psutil.Process(parent).children(recursive=True)]
    assert len(family) > 1, "the code server was not seen"
    listening = {c.laddr.port for p in family for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert listening == {web.port}


@pytest.mark.parametrize(("sent", "status"), [(b"key=f", 408), (b"key=" + b"f" * MAX_FORM_BYTES, 413)])
def test_a_sign_in_that_does_not_come_in_time_or_is_too_long_closes_its_connection(platform: Platform, sent: bytes, status: int) -> None:
    async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError

    port = free_port()
    front = AccessControl(nothing, platform=platform, token="t", hosts=frozenset({f"127.0.0.1:{port}"}), form_s=0.5)
    with served(front, port=port, lifespan="off"), socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        head = f"POST {LOGIN} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 1000000\r\n\r\n"
        connection.sendall(head.encode() + sent)
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()) and b"</html>" in answer
