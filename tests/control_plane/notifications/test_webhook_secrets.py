"""A signing secret is returned once, and what a tenant wrote into its URL is nobody else's: neither is in logs, errors or the database."""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import Callable, Iterator

import httpx
import pytest
import sqlalchemy as sa

from control_plane.notifications.outbox import publish
from control_plane.platform.context import Platform
from control_plane.tenants.rules import Tenant
from core.telemetry import logs
from tests.support.servers.raw_server import RawServer, raw_server
from tests.support.servers.webhook_receiver import until

SUCCEEDED = "fine_tuning.job.succeeded"
TOKEN = "T0kenInThePath"


@pytest.fixture(scope="module")
def platform(new_platform: Callable[..., Platform]) -> Platform:
    return new_platform(webhook_allow="127.0.0.1/32")


@pytest.fixture
def rest(api_url: str, api_key: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{api_url}/v1", headers={"authorization": f"Bearer {api_key}"}, timeout=30) as made:
        yield made


@pytest.fixture
def echo() -> Iterator[RawServer]:
    """A receiver that fails, and says back in its status line, a header and its body what it was sent."""
    started: list[RawServer] = []

    def answer(_: str) -> list[bytes]:
        said = started[0].requests[-1].replace(b"\r\n", b" ")
        return [b"HTTP/1.1 500 %s\r\nX-Said: %s\r\nContent-Length: %d\r\n\r\n%s" % (said, said, len(said), said)]

    with raw_server(answer) as server:
        started.append(server)
        yield server


def stored(platform: Platform) -> str:
    """Every row of every table, as text."""
    with platform.whole.engine.connect() as conn:
        named = sa.text("SELECT schemaname, tablename FROM pg_tables WHERE schemaname NOT IN ('pg_catalog', 'information_schema')")
        tables = [f'"{schema}"."{table}"' for schema, table in conn.execute(named)]
        return "\n".join(str(row) for table in tables for row in conn.execute(sa.text(f"SELECT t::text FROM {table} t")).scalars())


def test_a_secret_is_in_no_log_answer_or_row(
    platform: Platform, tenant: Tenant, rest: httpx.Client, echo: RawServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    kept = io.StringIO()  # of its own: a test before this one may have set up the root logger anew
    handler = logging.StreamHandler(kept)
    logging.getLogger().addHandler(handler)
    for name, level in logs.QUIET.items():
        caplog.set_level(level, name)
    body = {"name": "hook", "url": f"{echo.url}/{TOKEN}?key={TOKEN}", "event_types": [SUCCEEDED]}
    made = rest.post("/webhook_endpoints", json=body).json()
    secret, at = made["signing_secret"], f"/webhook_endpoints/{made['id']}"
    with platform.engine.begin() as conn:
        publish(conn, tenant.id, SUCCEEDED, "ftjob-1", now=platform.clock())
    until(lambda: any(row["last_error"] for row in rest.get(f"{at}/deliveries").json()["data"]))
    sent, tried = echo.requests[0].decode(), rest.post(f"{at}/test").text
    assert TOKEN in sent and "webhook-signature: v1," in sent, "the receiver got its signature"
    rotated = rest.post(f"{at}/rotate_secret", json={}).json()["signing_secret"]
    refused = rest.post("/webhook_endpoints", json=body | {"name": "hook\0"}).text
    userinfo = rest.post("/webhook_endpoints", json=body | {"url": f"https://user:{TOKEN}pw@hooks.example.com/"}).text
    answers = [rest.get(path).text for path in ("/webhook_endpoints", at, f"{at}/deliveries", "/audit_log")]
    metrics = httpx.get(f"{str(rest.base_url).removesuffix('/v1/')}/metrics").text
    logging.getLogger().removeHandler(handler)
    tables, logged = stored(platform), kept.getvalue()
    assert "webhook" in logged and made["id"] in tables
    for key in (secret, rotated):
        for part in (key, key.removeprefix("whsec_"), base64.b64decode(key.removeprefix("whsec_")).hex()):
            assert not [text for text in (*answers, tried, refused, metrics, tables, logged, sent) if part in text]
    assert not [text for text in (tried, answers[2], metrics, tables, logged) if TOKEN in text], "the URL is shown to its tenant alone"
    assert f"{TOKEN}pw" not in userinfo and "user name or password" in userinfo
