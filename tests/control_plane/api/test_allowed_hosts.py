"""Hosts under which the API answers, and headers that protect its answers from browsers and caches."""

from __future__ import annotations

import socket
from collections.abc import Callable

import httpx
import pytest
from starlette.types import ASGIApp

from control_plane.api.app import create_app
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from control_plane.tenants import sessions
from tests.support.servers.served_app import served


@pytest.fixture(scope="module")
def at(new_platform: Callable[..., Platform]) -> Platform:
    return new_platform(
        public_url="https://ft.example.com/",
        internal_url="http://ft-api.ft.svc:8000",
        api_hosts="Proxy.example.com, other.example.com:8443",
    )


@pytest.fixture(scope="module")
def url(at: Platform, serve: Callable[[ASGIApp], str]) -> str:
    return serve(create_app(at))


def status(url: str, host: str, path: str = "/v1/models") -> int:
    return httpx.get(f"{url}{path}", headers={"host": host}).status_code


@pytest.mark.parametrize(
    "host",
    ["ft.example.com", "FT.example.com:443", "ft-api.ft.svc:8000", "proxy.example.com", "other.example.com", "localhost:1", "127.0.0.1",
     "[::1]:8000"],
)  # fmt: skip
def test_the_apis_own_names_are_allowed_with_any_port(url: str, host: str) -> None:
    assert status(url, host) == 401


@pytest.mark.parametrize("host", ["evil.example", "ft.example.com.evil.example", "10.0.0.1", "", "[", "localhost@evil.example", "*"])
def test_request_under_a_foreign_host_is_refused_on_every_path(url: str, host: str) -> None:
    """A page of evil.example whose name resolves to this machine would otherwise call the API from a browser behind the firewall."""
    for path in ("/v1/models", "/console/sign-in", "/", "/internal/attempt/heartbeat", "/openapi.json", "/v1/none"):
        answer = httpx.get(f"{url}{path}", headers={"host": host})
        if answer.status_code == 400 and not host:
            continue  # the server itself refuses it
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed"), path
        assert "FT_API_HOSTS" in answer.text


def test_two_hosts_are_none(url: str) -> None:
    with socket.create_connection(("127.0.0.1", httpx.URL(url).port or 0)) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\nconnection: close\r\n\r\n")
        assert b" 403 " in connection.recv(100)


def test_probes_come_by_any_address(url: str) -> None:
    """A kubelet and Prometheus send the pod's address as the host; a load balancer may send none."""
    assert [status(url, "10.1.2.3:8000", path) for path in ("/livez", "/healthz", "/readyz", "/metrics")] == [200] * 4


def test_the_address_of_the_connection_is_allowed_and_no_other(at: Platform) -> None:
    with served(create_app(at), host="127.0.0.2") as url:
        assert [status(url, host) for host in ("127.0.0.2:8000", "127.0.0.3")] == [401, 403]


def test_any_host_is_allowed_where_a_proxy_checks_them(new_platform: Callable[..., Platform], serve: Callable[[ASGIApp], str]) -> None:
    assert status(serve(create_app(new_platform(api_hosts="*"))), "anything.example") == 401


def test_answer_to_a_session_is_marked_no_store(at: Platform, url: str) -> None:
    _, key = tenants.create(at, "t-headers")
    secret = sessions.sign_in(at, tenants.authenticate(at, key.secret))
    session = {"cookie": f"a=b; {sessions.COOKIE}={secret}"}
    for path in ("/v1/models", "/v1/files/file-none", "/v1/none"):
        answer = httpx.get(f"{url}{path}", headers=session)
        assert (answer.headers["cache-control"], "cookie" in answer.headers["vary"]) == ("no-store", True), path
    assert httpx.get(f"{url}/v1/models", headers=session).status_code == 200
    apart = [("cookie", "a=b"), ("cookie", f"{sessions.COOKIE}={secret}")]
    for answer in (httpx.get(f"{url}/v1/models", headers=apart), httpx.post(f"{url}/v1/fine_tuning/estimate", headers=apart, json={})):
        assert answer.status_code != 401
        assert (answer.headers["cache-control"], "cookie" in answer.headers["vary"]) == ("no-store", True)
    with_key = httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key.secret}"})
    assert "cache-control" not in with_key.headers


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/none", "/livez", "/openapi.json", "/", "/console/sign-in", "/console/static/x/none.js"]
)
def test_no_browser_guesses_the_type_of_an_answer(url: str, path: str) -> None:
    assert httpx.get(f"{url}{path}").headers.get_list("x-content-type-options") == ["nosniff"]
