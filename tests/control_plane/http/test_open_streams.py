"""Streams end with the key that opened them, and a key and a tenant have so many at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from starlette.types import ASGIApp

from control_plane.api.app import create_app
from control_plane.http.streams import OpenStreams, last_seen
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from control_plane.tenants import suspension
from control_plane.tenants.rules import Tenant
from core.errors import Unauthenticated
from ft_client import FtClient

PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def few(platform: Platform, serve: Callable[[ASGIApp], str]) -> tuple[str, OpenStreams]:
    """Root URL of an API that allows two streams of a key and three of a tenant, and looks at keys all the time."""
    app = create_app(platform)
    app.state.streams = OpenStreams(max_of_key=2, max_of_tenant=3, look_at_key_s=0.0)
    return serve(app), app.state.streams


@pytest.fixture
def job(ft: FtClient, training_file: str) -> Iterator[str]:
    made = ft.jobs.create(model="tiny-base", training_file=training_file)["id"]
    yield made
    ft.jobs.cancel(made)


def new_key(platform: Platform, tenant: Tenant) -> tenants.NewKey:
    return tenants.create_key(platform, tenant.id, name="streams", scopes=["read"])


def streaming(url: str, secret: str, path: str) -> Any:
    return httpx.stream("GET", f"{url}/v1/fine_tuning/jobs/{path}", headers={"authorization": f"Bearer {secret}"}, timeout=PATIENCE_S)


@pytest.mark.parametrize("path", ["events?stream=true", "logs?follow=true"])
def test_streams_are_cut_when_the_process_ends(
    few: tuple[str, OpenStreams], platform: Platform, tenant: Tenant, job: str, path: str
) -> None:
    key = new_key(platform, tenant)
    with streaming(few[0], key.secret, f"{job}/{path}") as answer:
        assert answer.status_code == 200
        few[1].end()
        try:
            with pytest.raises(httpx.RemoteProtocolError):
                answer.read()
        finally:
            few[1].ending = False


@pytest.mark.parametrize("path", ["events?stream=true", "logs?follow=true"])
def test_a_stream_is_cut_when_its_key_is_revoked(
    few: tuple[str, OpenStreams], platform: Platform, tenant: Tenant, job: str, path: str
) -> None:
    key = new_key(platform, tenant)
    with streaming(few[0], key.secret, f"{job}/{path}") as answer:
        assert answer.status_code == 200
        tenants.revoke_key(platform, tenant.id, key.id)
        with pytest.raises(httpx.RemoteProtocolError):
            answer.read()


def test_a_client_whose_key_is_revoked_is_told_so(few: tuple[str, OpenStreams], platform: Platform, tenant: Tenant, job: str) -> None:
    key = new_key(platform, tenant)
    with FtClient(base_url=few[0], api_key=key.secret) as ft:
        events = ft.jobs.follow(job)
        assert next(events)["code"] == "job_created"
        tenants.revoke_key(platform, tenant.id, key.id)
        with pytest.raises(Unauthenticated, match="revoked"):
            next(events)


@pytest.mark.parametrize("path", ["events?stream=true", "logs?follow=true"])
def test_a_stream_is_cut_when_its_tenant_is_suspended(
    few: tuple[str, OpenStreams], platform: Platform, tenant: Tenant, job: str, path: str
) -> None:
    with streaming(few[0], new_key(platform, tenant).secret, f"{job}/{path}") as answer:
        suspension.suspend(platform, tenant.id, reason="unpaid")
        try:
            with pytest.raises(httpx.RemoteProtocolError):
                answer.read()
        finally:
            suspension.resume(platform, tenant.id)


def test_the_stream_of_a_job_that_has_ended_holds_all_its_events(platform: Platform, ft: FtClient, training_file: str) -> None:
    job = ft.jobs.create(model="tiny-base", training_file=training_file)["id"]
    many = """INSERT INTO job_events (id, job_id, level, type, code, message, data, created_at)
        SELECT 'ev-' || substr(md5(:job || n), 1, 20), :job, 'info', 'message', 'job_note', 'note ' || n, '{}', now()
        FROM generate_series(1, 1100) n"""
    with platform.engine.begin() as conn:
        conn.execute(sa.text(many), {"job": job})
    ft.jobs.cancel(job)
    followed = [event["message"] for event in ft.jobs.follow(job)]
    assert [one for one in followed if one.startswith("note ")] == [f"note {n}" for n in range(1, 1101)]


def test_a_key_and_a_tenant_have_so_many_streams(few: tuple[str, OpenStreams], platform: Platform, tenant: Tenant, job: str) -> None:
    url, streams = few
    first, second = new_key(platform, tenant), new_key(platform, tenant)
    with contextlib.ExitStack() as opened:

        def status_of(key: tenants.NewKey) -> int:
            answer = opened.enter_context(streaming(url, key.secret, f"{job}/events?stream=true"))
            if answer.status_code == 429:
                assert answer.read() and answer.json()["error"]["code"] == "too_many_streams"
                assert answer.headers["x-should-retry"] == "false"
            return int(answer.status_code)

        assert [status_of(first) for _ in range(3)] == [200, 200, 429]
        assert [status_of(second) for _ in range(2)] == [200, 429]
    deadline = time.monotonic() + PATIENCE_S
    while len(streams):
        assert time.monotonic() < deadline, "streams that were closed are still counted"
        time.sleep(0.05)
    with streaming(url, first.secret, f"{job}/events?stream=true") as answer:
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("header", "number"), [("12", 12), ("", 0), (None, 0), ("9" * 18, 10**18 - 1), ("9" * 25, 0), ("1" * 5000, 0), ("١٢", 0), ("-1", 0)]
)
def test_a_last_event_id_is_a_number_that_the_database_knows(header: str | None, number: int) -> None:
    assert last_seen(header) == number
