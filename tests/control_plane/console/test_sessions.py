"""Sign-in, sessions and their ends, CSRF, and what a session may do in the API."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import httpx
import pytest
import sqlalchemy as sa

from control_plane.api.app import create_app
from control_plane.http.rate_limits import RateLimits
from control_plane.platform.context import Platform
from control_plane.tenants import members, sessions
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from control_plane.tenants.tables import console_sessions
from core.errors import Unauthenticated
from tests.control_plane.console.conftest import Visitor

HTML = {"accept": "text/html,application/xhtml+xml"}


def test_the_root_sends_a_browser_to_the_console_and_tells_a_client_where_the_api_is(api_url: str) -> None:
    browser = httpx.get(api_url, headers=HTML)
    assert (browser.status_code, browser.headers["location"]) == (303, "/console")
    client = httpx.get(api_url)
    assert client.json()["api"] == "/v1"


def test_a_page_without_a_session_leads_to_the_sign_in_and_back(api_url: str, api_key: str) -> None:
    with httpx.Client(base_url=api_url) as http:
        sent = http.get("/console/models?stage=draft")
        assert (sent.status_code, sent.headers["location"]) == (303, "/console/sign-in?next=%2Fconsole%2Fmodels%3Fstage%3Ddraft")
        form = http.get(sent.headers["location"])
        assert 'value="/console/models?stage=draft"' in form.text
        back = http.post("/console/sign-in", data={"key": f" {api_key} ", "next": "/console/models?stage=draft"})
        assert back.headers["location"] == "/console/models?stage=draft"
        assert http.get(back.headers["location"]).status_code == 200
        again = http.get("/console/sign-in")
        assert again.headers["location"] == "/console", "with a session there is nothing to sign in for"


@pytest.mark.parametrize(
    "target",
    [
        "https://elsewhere.example/",
        "//elsewhere.example",
        "/console/../v1",
        "/consoles",
        "/console/a b",
        "/v1/me",
        "/\t/elsewhere.example",
        "/console\t//elsewhere.example",
        "/console/\\elsewhere.example",
    ],
)
def test_a_sign_in_returns_to_pages_of_the_console_only(api_url: str, api_key: str, target: str) -> None:
    back = httpx.post(f"{api_url}/console/sign-in", data={"key": api_key, "next": target})
    assert (back.status_code, back.headers["location"]) == (303, "/console")


def test_the_cookie_is_out_of_reach_of_scripts_and_other_sites(api_url: str, api_key: str) -> None:
    cookie = httpx.post(f"{api_url}/console/sign-in", data={"key": api_key}).headers["set-cookie"]
    assert all(part in cookie for part in ("HttpOnly", "SameSite=strict", "Path=/", "Max-Age=43200"))
    assert "Secure" not in cookie
    proxied = httpx.post(f"{api_url}/console/sign-in", data={"key": api_key}, headers={"x-forwarded-proto": "https"})
    assert "Secure" in proxied.headers["set-cookie"]


def test_the_database_holds_no_secret_that_opens_a_session(visitor: Visitor, platform: Platform) -> None:
    secret = visitor.http.cookies[sessions.COOKIE]
    with platform.engine.connect() as conn:
        stored = conn.exec_driver_sql("SELECT string_agg(s::text, ' ') FROM console_sessions s").scalar()
    assert secret not in str(stored)
    forged = httpx.get(f"{visitor.http.base_url}/console", cookies={sessions.COOKIE: str(stored).split(",")[0].strip("(")})
    assert forged.status_code == 303


@pytest.mark.parametrize("key", ["", "ft-sk-wrong", "ft-op-wrong"])
def test_a_wrong_key_is_refused_with_the_reason(api_url: str, key: str) -> None:
    answer = httpx.post(f"{api_url}/console/sign-in", data={"key": key})
    assert answer.status_code in (401, 403)
    assert 'role="alert"' in answer.text
    assert "set-cookie" not in answer.headers


def test_sign_in_attempts_are_limited_like_calls_of_the_api(fresh_platform: Platform, serve: Callable[..., str]) -> None:
    app = create_app(fresh_platform)
    app.state.rate_limits = RateLimits(fresh_platform, unknown_keys_per_minute=3)
    url = serve(app)
    found = [httpx.post(f"{url}/console/sign-in", data={"key": f"ft-sk-{i}"}).status_code for i in range(5)]
    assert found == [401, 401, 401, 429, 429]


def test_a_session_ends_when_it_signs_out_and_no_other_does(visit: Callable[[str], Visitor], api_key: str) -> None:
    one, two = visit(api_key), visit(api_key)
    secret = one.http.cookies[sessions.COOKIE]
    assert one.post("/console/sign-out").headers["location"] == "/console/sign-in"
    assert (one.get("/console").status_code, two.get("/console").status_code) == (303, 200)
    copied = httpx.get(f"{one.http.base_url}/console", cookies={sessions.COOKIE: secret})
    assert copied.status_code == 303, "a copy of the cookie opens no page either"


def test_signing_out_everywhere_ends_the_sessions_of_the_member(
    visit: Callable[[str], Visitor], platform: Platform, tenant: Tenant, api_key: str
) -> None:
    person = members.add(platform, tenant.id, email="ada@example.com", role="member")
    keys = [tenants.create_key(platform, tenant.id, name=n, scopes=["read"], member_id=person.id).secret for n in ("a", "b")]
    hers, machine = [visit(key) for key in keys], visit(api_key)
    hers[0].post("/console/sign-out-everywhere")
    assert [v.get("/console").status_code for v in (*hers, machine)] == [303, 303, 200]


def test_a_session_ends_with_its_key_and_with_its_member(visit: Callable[[str], Visitor], platform: Platform, tenant: Tenant) -> None:
    person = members.add(platform, tenant.id, email="bo@example.com", role="member")
    of_person = tenants.create_key(platform, tenant.id, name="bo", scopes=["write"], member_id=person.id)
    of_tenant = tenants.create_key(platform, tenant.id, name="ci", scopes=["read"])
    bo, ci = visit(of_person.secret), visit(of_tenant.secret)
    assert (bo.get("/console").status_code, ci.get("/console").status_code) == (200, 200)
    members.remove(platform, tenant.id, person.id)
    tenants.revoke_key(platform, tenant.id, of_tenant.id)
    assert (bo.get("/console").status_code, ci.get("/console").status_code) == (303, 303)


def test_a_sign_in_too_many_ends_the_oldest_session_and_no_one_elses(platform: Platform, tenant: Tenant) -> None:
    who, other = (
        tenants.authenticate(platform, tenants.create_key(platform, tenant.id, name=n, scopes=["read"]).secret) for n in ("a", "b")
    )
    elsewhere, mine = sessions.sign_in(platform, other), [sessions.sign_in(platform, who) for _ in range(sessions.MAX_SESSIONS + 2)]
    for ended in mine[:2]:
        with pytest.raises(Unauthenticated):
            sessions.authenticate(platform, ended)
    assert {sessions.authenticate(platform, secret).id for secret in mine[2:]} == {who.id}
    assert sessions.authenticate(platform, elsewhere).id == other.id


def test_a_session_expires_and_its_row_goes_at_the_next_sign_in(
    visit: Callable[[str], Visitor], platform: Platform, tenant: Tenant, api_key: str
) -> None:
    visitor = visit(api_key)
    assert visitor.get("/console").status_code == 200
    with platform.engine.begin() as conn:
        conn.execute(sa.update(console_sessions).values(expires_at=platform.clock() - timedelta(seconds=1)))
    answer = visitor.get("/console/jobs")
    assert "ended=1" in answer.headers["location"]
    assert sessions.COOKIE not in visitor.http.cookies, "the browser forgets it"
    assert "Your session has ended" in visitor.get(answer.headers["location"]).text
    sessions.sign_in(platform, tenants.authenticate(platform, api_key))
    with platform.engine.connect() as conn:
        assert conn.execute(sa.select(sa.func.count()).select_from(console_sessions)).scalar() == 1


def test_a_suspended_tenant_is_told_so(platform: Platform, api_url: str) -> None:
    _, key = tenants.create(platform, "t-suspended")
    with platform.engine.begin() as conn:
        conn.exec_driver_sql("UPDATE tenants SET suspended_at = now(), suspended_reason = 'unpaid' WHERE id = 't-suspended'")
    answer = httpx.post(f"{api_url}/console/sign-in", data={"key": key.secret})
    assert answer.status_code == 403
    assert "unpaid" in answer.text


@pytest.mark.parametrize("fields", [{}, {"csrf_token": ""}, {"csrf_token": "0" * 64}])
def test_a_change_without_the_token_of_its_session_is_refused(visitor: Visitor, fields: dict[str, str]) -> None:
    answer = visitor.http.post("/console/sign-out-everywhere", data=fields)
    assert (answer.status_code, "csrf_token_invalid" in answer.text) == (403, True)
    assert visitor.get("/console").status_code == 200


def test_the_token_of_another_session_is_refused(visit: Callable[[str], Visitor], api_key: str) -> None:
    one, two = visit(api_key), visit(api_key)
    answer = one.http.post("/console/sign-out-everywhere", data={"csrf_token": two.token()})
    assert answer.status_code == 403


def test_a_form_of_another_site_signs_nobody_in(api_url: str, api_key: str) -> None:
    for headers in (
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ):
        answer = httpx.post(f"{api_url}/console/sign-in", data={"key": api_key}, headers=headers)
        assert (answer.status_code, "set-cookie" in answer.headers) == (403, False), headers
    own = httpx.post(f"{api_url}/console/sign-in", data={"key": api_key}, headers={"origin": api_url, "sec-fetch-site": "same-origin"})
    assert own.status_code == 303


def test_a_link_on_another_site_keeps_the_session(api_url: str) -> None:
    """The browser sends no SameSite=Strict cookie with it, so a page of ours asks again."""
    answer = httpx.get(f"{api_url}/console/jobs?status=failed", headers={"sec-fetch-site": "cross-site"})
    assert answer.status_code == 200
    assert "url=/console/sign-in?next=%2Fconsole%2Fjobs%3Fstatus%3Dfailed" in answer.text


def test_a_session_calls_the_api_as_its_key_does(
    visitor: Visitor, tenant: Tenant, visit: Callable[[str], Visitor], platform: Platform
) -> None:
    assert visitor.http.get("/v1/me").json()["tenant_id"] == tenant.id
    body = {"name": "b", "limit_micros": 1_000_000}
    refused = visitor.http.post("/v1/budgets", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "csrf_token_invalid")
    made = visitor.http.post("/v1/budgets", json=body, headers={"x-csrf-token": visitor.token()})
    assert made.status_code == 200, made.text
    reader = visit(tenants.create_key(platform, tenant.id, name="r", scopes=["read"]).secret)
    answer = reader.http.post("/v1/budgets", json=body | {"name": "c"}, headers={"x-csrf-token": reader.token()})
    assert answer.json()["error"]["code"] == "insufficient_scope"


def test_a_key_in_the_header_counts_and_needs_no_token(visitor: Visitor, platform: Platform) -> None:
    _, key = tenants.create(platform, "t-header")
    headers = {"authorization": f"Bearer {key.secret}"}
    assert visitor.http.get("/v1/me", headers=headers).json()["tenant_id"] == "t-header"
    assert visitor.http.post("/v1/budgets", json={"name": "b", "limit_micros": 1}, headers=headers).status_code == 200


def test_pages_allow_no_inline_script_and_are_not_kept(visitor: Visitor, api_url: str) -> None:
    for answer in (visitor.get("/console"), httpx.get(f"{api_url}/console/sign-in"), visitor.get("/console/models/none")):
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'self'")
        assert "unsafe" not in policy
        assert answer.headers["cache-control"] == "no-store"
        assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", answer.text)


def test_static_files_are_kept_for_good_under_their_digest(visitor: Visitor) -> None:
    path = re.findall(r'href="(/console/static/[^"]+\.css)"', visitor.get("/console").text)[0]
    kept = visitor.get(path)
    assert (kept.status_code, kept.headers["content-encoding"]) == (200, "gzip")
    assert "immutable" in kept.headers["cache-control"]
    old = visitor.get(re.sub(r"static/\w+/", "static/0123456789ab/", path))
    assert (old.text, old.headers["cache-control"]) == (kept.text, "no-cache")
    assert visitor.get("/console/static/x/../../jinja_environment.py").status_code == 404


def test_a_session_of_a_process_that_restarts_goes_on(visitor: Visitor, platform: Platform, serve: Callable[..., str]) -> None:
    other = serve(create_app(replace(platform)))
    assert httpx.get(f"{other}/console", cookies=dict(visitor.http.cookies)).status_code == 200
