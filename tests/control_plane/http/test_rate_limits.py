"""Requests a minute: buckets against a clock of the test's own, and refusals that OpenAI's client gets over by itself."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import openai
import pytest
import sqlalchemy as sa
from fastapi import FastAPI, Request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.engine import Engine
from starlette.types import ASGIApp

from control_plane.api.app import create_app
from control_plane.http.rate_limits import SWEEP_EVERY, Buckets, RateLimits, site_of
from control_plane.http.tables import rate_limits
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from control_plane.tenants import suspension
from control_plane.tenants.rules import Tenant
from core.errors import Unauthenticated


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def name() -> str:
    """A bucket that no other test uses."""
    return uuid.uuid4().hex


@pytest.fixture
def engine(platform: Platform) -> Engine:
    return platform.logins.platform


def test_a_minutes_requests_are_let_through_at_once_and_no_more(engine: Engine, name: str) -> None:
    buckets = Buckets(engine, clock=(clock := Clock()))
    assert [buckets.take(name, 60).allowed for _ in range(61)] == [True] * 60 + [False]
    refused = buckets.take(name, 60)
    assert (refused.remaining, refused.reset_s, refused.retry_after_s) == (0, 60.0, 1.0)
    clock.now += refused.retry_after_s
    assert [buckets.take(name, 60).allowed for _ in range(2)] == [True, False], "a refusal costs nothing"


def test_keys_do_not_share_a_bucket(engine: Engine, name: str) -> None:
    buckets, other = Buckets(engine, clock=Clock()), f"{name}-other"
    assert [buckets.take(name, 1).allowed, buckets.take(name, 1).allowed, buckets.take(other, 1).allowed] == [True, False, True]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30)
@given(per_minute=st.integers(1, 50), pauses=st.lists(st.floats(0, 30), min_size=1, max_size=80))
def test_no_minute_lets_more_through_than_the_bucket_and_its_refill(engine: Engine, per_minute: int, pauses: list[float]) -> None:
    buckets, passed, name = Buckets(engine, clock=(clock := Clock())), list[float](), uuid.uuid4().hex
    for pause in pauses:
        clock.now += pause
        if buckets.take(name, per_minute).allowed:
            passed.append(clock.now)
    for start in passed:
        num = sum(start <= at < start + 60 for at in passed)
        assert num <= 2 * per_minute
    assert buckets.look(name, per_minute).remaining <= per_minute


def test_what_remains_counts_down_and_comes_back(engine: Engine, name: str) -> None:
    buckets = Buckets(engine, clock=(clock := Clock()))
    assert [buckets.take(name, 3).remaining for _ in range(4)] == [2, 1, 0, 0]
    clock.now += 20
    assert buckets.look(name, 3).remaining == 1
    clock.now += 40
    assert buckets.look(name, 3).remaining == 3


def test_full_buckets_leave_no_rows_and_others_stay(fresh_platform: Platform) -> None:
    engine = fresh_platform.logins.platform
    buckets = Buckets(engine, clock=(clock := Clock()))
    for i in range(80):
        buckets.take(f"old-{i}", 60)
    for _ in range(50):
        buckets.take("busy", 60)
    clock.now += 2
    for _ in range(SWEEP_EVERY):
        buckets.take("busy", 60)
    with engine.connect() as conn:
        assert conn.execute(sa.select(rate_limits.c.name)).scalars().all() == ["busy"]
    assert buckets.look("busy", 60).remaining < 60


def test_processes_of_one_database_admit_the_limit_once(engine: Engine, name: str) -> None:
    """Eight threads of two processes ask at the same time, by the database's clock."""
    processes = [Buckets(engine), Buckets(engine)]
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda i: processes[i % 2].take(name, 5), range(60)))
    assert sum(t.allowed for t in taken) == 5
    assert all(0 < t.retry_after_s <= 12 for t in taken if not t.allowed)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        (None, "testclient", False),
    ],
)
def test_addresses_of_one_site_count_as_one(one: str | None, other: str, same: bool) -> None:
    assert (site_of(one) == site_of(other)) is same


@pytest.fixture(scope="module")
def limited(platform: Platform, serve: Callable[[ASGIApp], str]) -> tuple[str, FastAPI]:
    """An API of its own, whose address table a test may fill."""
    app = create_app(platform)
    app.state.rate_limits = RateLimits(platform, unknown_keys_per_minute=5)
    return serve(app), app


def get(url: str, key: str, path: str = "/v1/models") -> httpx.Response:
    return httpx.get(url + path, headers={"authorization": f"Bearer {key}"})


def test_an_answer_says_what_is_left_and_a_refusal_when_to_come_back(
    limited: tuple[str, FastAPI], platform: Platform, tenant: Tenant
) -> None:
    key = tenants.create_key(platform, tenant.id, name="slow", scopes=["read"], requests_per_minute=2).secret
    answers = [get(limited[0], key, path) for path in ("/v1/models", "/v1/files/file-none", "/v1/models")]
    assert [a.status_code for a in answers] == [200, 404, 429]
    assert [a.headers["x-ratelimit-limit-requests"] for a in answers] == ["2"] * 3
    assert [a.headers["x-ratelimit-remaining-requests"] for a in answers] == ["1", "0", "0"]
    assert answers[0].headers["x-ratelimit-reset-requests"].endswith("s")
    refused = answers[-1]
    assert (refused.json()["error"]["code"], refused.json()["error"]["type"]) == ("rate_limit_exceeded", "requests")
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert 0 < int(refused.headers["retry-after-ms"]) <= 30_000
    assert "x-should-retry" not in refused.headers
    assert "retry-after" not in answers[0].headers


def test_two_instances_on_one_database_admit_the_limit_once(
    limited: tuple[str, FastAPI], platform: Platform, tenant: Tenant, serve: Callable[[ASGIApp], str]
) -> None:
    urls = (limited[0], serve(create_app(platform)))
    key = tenants.create_key(platform, tenant.id, name="k", scopes=["read"], requests_per_minute=6).secret
    answers = [get(urls[i % 2], key) for i in range(8)]
    assert [a.status_code for a in answers] == [200] * 6 + [429] * 2
    assert [a.headers["x-ratelimit-remaining-requests"] for a in answers] == ["5", "4", "3", "2", "1", "0", "0", "0"]


def test_openais_client_gets_over_a_refusal_by_itself(limited: tuple[str, FastAPI], platform: Platform, tenant: Tenant) -> None:
    """Of 60 a minute one comes back each second, which is when the client asks again."""
    key = tenants.create_key(platform, tenant.id, name="quick", scopes=["read"], requests_per_minute=60)
    buckets = limited[1].state.rate_limits.buckets
    with openai.OpenAI(base_url=f"{limited[0]}/v1", api_key=key.secret, max_retries=2) as client:
        client.models.list()
        while buckets.take(key.id, 60).allowed:
            pass
        assert client.models.with_raw_response.list().retries_taken > 0
        while buckets.take(key.id, 60).allowed:
            pass
        with pytest.raises(openai.RateLimitError) as refused:
            client.with_options(max_retries=0).models.list()
    assert refused.value.code == "rate_limit_exceeded"


def test_a_lower_limit_of_the_tenant_holds_for_its_keys(limited: tuple[str, FastAPI], platform: Platform, tenant: Tenant) -> None:
    key = tenants.create_key(platform, tenant.id, name="k", scopes=["read"], requests_per_minute=900).secret
    assert get(limited[0], key).headers["x-ratelimit-limit-requests"] == "900"
    suspension.update(platform, tenant.id, {"requests_per_minute": 30})
    assert get(limited[0], key).headers["x-ratelimit-limit-requests"] == "30"


def test_an_address_that_guesses_is_refused_while_keys_that_worked_go_on(
    limited: tuple[str, FastAPI], platform: Platform, tenant: Tenant, api_key: str
) -> None:
    url, app = limited
    app.state.rate_limits = RateLimits(platform, unknown_keys_per_minute=5)
    assert get(url, api_key).status_code == 200
    guesses = [get(url, f"ft-sk-{i:040d}") for i in range(7)]
    assert [g.status_code for g in guesses] == [401] * 5 + [429] * 2
    assert guesses[-1].json()["error"]["code"] == "too_many_unknown_keys"
    assert int(guesses[-1].headers["retry-after"]) <= 12
    assert get(url, api_key).status_code == 200, "it worked before the guessing"
    fresh = tenants.create_key(platform, tenant.id, name="new", scopes=["read"]).secret
    assert get(url, fresh).status_code == 429, "a key that nobody has used yet cannot be told from a guess"
    assert httpx.get(f"{url}/healthz").status_code == 200


def guessed_session(url: str, secret: str) -> httpx.Response:
    return httpx.get(f"{url}/console/sign-in", headers={"cookie": f"ft_session=ft-ss-{secret}"})


def guessed_attempt(url: str, secret: str) -> httpx.Response:
    return httpx.put(f"{url}/internal/attempt/log/0", headers={"authorization": f"Bearer {secret}"})


@pytest.mark.parametrize("guess", [guessed_session, guessed_attempt])
def test_guesses_of_sessions_and_of_attempts_tokens_count_too(
    limited: tuple[str, FastAPI], platform: Platform, guess: Callable[[str, str], httpx.Response]
) -> None:
    url, app = limited
    app.state.rate_limits = RateLimits(platform, unknown_keys_per_minute=5)
    with platform.engine.begin() as conn:
        conn.execute(rate_limits.delete())
    answers = [guess(url, f"{i:040d}") for i in range(7)]
    assert 429 not in [a.status_code for a in answers[:5]]
    assert [(a.status_code, "too_many_unknown_keys" in a.text) for a in answers[5:]] == [(429, True)] * 2


def test_an_address_that_is_named_like_a_key_takes_nothing_from_it(platform: Platform, name: str) -> None:
    limits, request = RateLimits(platform), Request({"type": "http", "client": (name, 1), "headers": [], "state": {}})
    with pytest.raises(Unauthenticated), limits.watching_unknown_keys(request, "ft-sk-guessed"):
        raise Unauthenticated("unknown")
    assert limits.buckets.look(name, 60).remaining == 60


def test_what_needs_no_key_has_no_limit(limited: tuple[str, FastAPI]) -> None:
    assert not [name for name in httpx.get(f"{limited[0]}/healthz").headers if name.startswith("x-ratelimit")]
