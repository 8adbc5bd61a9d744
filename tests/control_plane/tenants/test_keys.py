"""API keys: made, scoped, expired, revoked."""

from __future__ import annotations

import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from control_plane.platform.context import Actor, Platform
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from control_plane.tenants.tables import api_keys
from core.errors import Conflict, Unauthenticated


def call(url: str, key: str, method: str, path: str, **options: Any) -> httpx.Response:
    return httpx.request(method, url + path, headers={"authorization": f"Bearer {key}"}, **options)


def test_a_key_is_shown_once_and_kept_as_a_hash(api_url: str, api_key: str, platform: Platform) -> None:
    made = call(api_url, api_key, "POST", "/v1/api_keys", json={"name": "ci", "scopes": ["read"]}).json()
    assert made["secret"].startswith("ft-sk-")
    listed = call(api_url, api_key, "GET", "/v1/api_keys")
    assert made["secret"] not in listed.text
    shown = next(k for k in listed.json()["data"] if k["id"] == made["id"])
    assert (shown["name"], shown["scopes"], shown["hint"]) == ("ci", ["read"], f"ft-sk-...{made['secret'][-4:]}")
    with platform.engine.connect() as conn:
        stored = conn.exec_driver_sql("SELECT string_agg(k::text, ' ') FROM api_keys k").scalar()
    assert made["secret"] not in stored


@pytest.mark.parametrize(
    ("scopes", "read", "write", "admin"),
    [(["read"], 200, 403, 403), (["write"], 200, 400, 403), (["read", "write"], 200, 400, 403), (["admin"], 200, 400, 200)],
)
def test_a_scope_opens_what_it_says(
    api_url: str, platform: Platform, tenant: Tenant, scopes: list[str], read: int, write: int, admin: int
) -> None:
    key = tenants.create_key(platform, tenant.id, name="k", scopes=scopes).secret
    assert call(api_url, key, "GET", "/v1/fine_tuning/jobs").status_code == read
    refused = call(api_url, key, "POST", "/v1/fine_tuning/jobs", json={"model": "", "training_file": ""})
    assert refused.status_code == write
    if write == 403:
        assert refused.json()["error"]["code"] == "insufficient_scope"
        assert "'write'" in refused.json()["error"]["message"] or "write" in refused.json()["error"]["message"]
    assert call(api_url, key, "GET", "/v1/api_keys").status_code == admin


def test_a_revoked_key_opens_nothing_any_more(api_url: str, api_key: str) -> None:
    made = call(api_url, api_key, "POST", "/v1/api_keys", json={"name": "lost"}).json()
    assert call(api_url, made["secret"], "GET", "/v1/models").status_code == 200
    revoked = call(api_url, api_key, "DELETE", f"/v1/api_keys/{made['id']}").json()
    assert revoked["revoked_at"] is not None
    assert call(api_url, api_key, "DELETE", f"/v1/api_keys/{made['id']}").json() == revoked
    answer = call(api_url, made["secret"], "GET", "/v1/models")
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert "revoked" in answer.json()["error"]["message"]


def test_an_expired_key_opens_nothing(platform: Platform, tenant: Tenant) -> None:
    key = tenants.create_key(platform, tenant.id, name="short", scopes=["read"], expires_in_s=60).secret
    assert tenants.authenticate(platform, key).tenant == tenant
    later = replace(platform, clock=lambda: platform.clock() + timedelta(seconds=61))
    with pytest.raises(Unauthenticated, match="expired"):
        tenants.authenticate(later, key)


def test_the_last_use_of_a_key_is_known(api_url: str, api_key: str) -> None:
    call(api_url, api_key, "GET", "/v1/models")
    assert all(k["last_used_at"] for k in call(api_url, api_key, "GET", "/v1/api_keys").json()["data"] if k["name"] == "test")


def test_another_tenants_key_cannot_be_seen_or_revoked(api_url: str, api_key: str, platform: Platform) -> None:
    _, other = tenants.create(platform, "neighbour")
    assert call(api_url, api_key, "DELETE", f"/v1/api_keys/{other.id}").status_code == 404
    assert other.id not in call(api_url, api_key, "GET", "/v1/api_keys").text
    assert call(api_url, other.secret, "GET", "/v1/models").status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "name"), ({"name": ""}, "name"), ({"name": "k", "scopes": ["root"]}, "scopes"), ({"name": "k", "scopes": []}, "scopes"),
     ({"name": "k", "expires_in": 0}, "expires_in"), ({"name": "k", "expires_at": 1}, "expires_at")],
)  # fmt: skip
def test_a_bad_key_request_is_refused_by_its_field(api_url: str, api_key: str, body: dict[str, Any], param: str) -> None:
    answer = call(api_url, api_key, "POST", "/v1/api_keys", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_key_says_who_it_is(api_url: str, platform: Platform, tenant: Tenant) -> None:
    made = tenants.create_key(platform, tenant.id, name="ci", scopes=["read", "write"], requests_per_minute=60)
    me = call(api_url, made.secret, "GET", "/v1/me").json()
    assert (me["tenant_id"], me["tier"], me["scopes"], me["member"]) == (tenant.id, "standard", ["read", "write"], None)
    assert (me["key"]["id"], me["requests_per_minute"]) == (made.id, 60)
    assert me["limits"] == {"max_jobs_in_flight": 5, "soft_gpu_hours": 500, "hard_gpu_hours": 1000, "requests_per_minute": 1200}
    assert made.secret not in str(me)


def test_one_key_is_looked_at(api_url: str, api_key: str, platform: Platform, tenant: Tenant) -> None:
    made = tenants.create_key(platform, tenant.id, name="ci", scopes=["read"])
    found = call(api_url, api_key, "GET", f"/v1/api_keys/{made.id}").json()
    assert (found["id"], found["hint"], "secret" in found) == (made.id, f"ft-sk-...{made.secret[-4:]}", False)
    _, stranger = tenants.create(platform, f"t-{uuid.uuid4().hex[:8]}")
    for method, path in (("GET", made.id), ("POST", f"{made.id}/rotate")):
        assert call(api_url, stranger.secret, method, f"/v1/api_keys/{path}").status_code == 404
    assert tenants.authenticate(platform, made.secret).key_id == made.id


def test_a_rotated_key_opens_beside_the_new_one_until_the_overlap_is_over(platform: Platform, tenant: Tenant) -> None:
    old = tenants.create_key(platform, tenant.id, name="ci", scopes=["read"], expires_in_s=7 * 86400, requests_per_minute=9)
    new = tenants.rotate_key(platform, tenant.id, old.id, overlap_s=3600)
    kept = ("name", "scopes", "member_id", "requests_per_minute")
    assert [getattr(new, k) for k in kept] == [getattr(old, k) for k in kept]
    assert new.expires_at - new.created_at == timedelta(days=7), "it lasts as long as the old one was made for"
    for hours, old_opens in ((0.9, True), (1.1, False)):
        then = replace(platform, clock=lambda h=hours: platform.clock() + timedelta(hours=h))  # type: ignore[misc]
        assert tenants.authenticate(then, new.secret).key_id == new.id
        if old_opens:
            assert tenants.authenticate(then, old.secret).key_id == old.id
        else:
            with pytest.raises(Unauthenticated, match="expired"):
                tenants.authenticate(then, old.secret)


def test_rotation_never_prolongs_the_old_key(platform: Platform, tenant: Tenant) -> None:
    old = tenants.create_key(platform, tenant.id, name="ci", scopes=["read"], expires_in_s=60)
    tenants.rotate_key(platform, tenant.id, old.id, overlap_s=86400)
    assert tenants.get_key(platform, tenant.id, old.id).expires_at == old.expires_at


@pytest.mark.parametrize("expires_in_s", [None, 90 * 86400])
def test_a_key_is_rotated_once_and_its_successor_lasts_as_long(platform: Platform, tenant: Tenant, expires_in_s: int | None) -> None:
    old = tenants.create_key(platform, tenant.id, name="ci", scopes=["read"], expires_in_s=expires_in_s)
    new = tenants.rotate_key(platform, tenant.id, old.id)
    tenants.create_key(platform, tenant.id, name="other", scopes=["read"])
    scoped = platform.in_scope_of(tenant.id, Actor(kind="key", id=new.id))
    with pytest.raises(Conflict, match=f"to {new.id}; rotate that one") as raised:
        tenants.rotate_key(scoped, tenant.id, old.id)
    assert raised.value.code == "api_key_replaced"
    newest = tenants.rotate_key(scoped, tenant.id, new.id)
    assert newest.expires_at == (None if expires_in_s is None else newest.created_at + timedelta(seconds=expires_in_s))


@pytest.mark.parametrize(("end", "word"), [("revoke", "revoked"), ("expire", "expired")])
def test_a_key_that_has_ended_is_not_rotated(platform: Platform, tenant: Tenant, end: str, word: str) -> None:
    old = tenants.create_key(platform, tenant.id, name="ci", scopes=["read"], expires_in_s=60)
    if end == "revoke":
        tenants.revoke_key(platform, tenant.id, old.id)
    later = replace(platform, clock=lambda: platform.clock() + timedelta(seconds=61))
    before = tenants.get_key(platform, tenant.id, old.id)
    with pytest.raises(Conflict, match=f"is {word}; make a new one") as raised:
        tenants.rotate_key(later, tenant.id, old.id, expires_in_s=60)
    assert raised.value.code == "api_key_ended"
    assert tenants.get_key(platform, tenant.id, old.id) == before


@pytest.mark.parametrize("seconds", [59, 60])
def test_a_key_is_rotated_until_the_second_in_which_it_expires(platform: Platform, tenant: Tenant, seconds: int) -> None:
    """The key is whole and was never replaced: only its expiry can refuse it."""
    at = platform.clock()
    old = tenants.create_key(replace(platform, clock=lambda: at), tenant.id, name="ci", scopes=["read"], expires_in_s=60)
    then = replace(platform, clock=lambda: at + timedelta(seconds=seconds))
    if seconds < 60:
        assert tenants.rotate_key(then, tenant.id, old.id).name == old.name
    else:
        with pytest.raises(Conflict, match=f"{old.id} is expired") as raised:
            tenants.rotate_key(then, tenant.id, old.id)
        assert raised.value.code == "api_key_ended"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [("", {"name": "k", "requests_per_minute": 1201}, "requests_per_minute"),
     ("", {"name": "k", "requests_per_minute": 0}, "requests_per_minute"),
     ("", {"name": "k", "member_id": "mem_none"}, "member_id"), ("/KEY/rotate", {"overlap": -1}, "overlap"),
     ("/KEY/rotate", {"overlap": 10**9}, "overlap"), ("/KEY/rotate", {"expires_in": 0}, "expires_in")],
)  # fmt: skip
def test_a_limit_of_a_key_is_within_the_tenants(
    api_url: str, api_key: str, platform: Platform, tenant: Tenant, path: str, body: dict[str, Any], param: str
) -> None:
    key = tenants.create_key(platform, tenant.id, name="ci", scopes=["read"]).id
    answer = call(api_url, api_key, "POST", f"/v1/api_keys{path.replace('KEY', key)}", json=body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param


def test_keys_are_listed_in_pages(api_url: str, api_key: str) -> None:
    made = [call(api_url, api_key, "POST", "/v1/api_keys", json={"name": str(i)}).json()["id"] for i in range(3)]
    first = call(api_url, api_key, "GET", "/v1/api_keys?limit=2").json()
    rest = call(api_url, api_key, "GET", f"/v1/api_keys?after={first['data'][-1]['id']}").json()
    assert first["has_more"] and not rest["has_more"]
    assert [k["id"] for k in first["data"] + rest["data"]][:3] == made[::-1]


def test_many_calls_at_once_write_the_last_use_once(platform: Platform, tenant: Tenant) -> None:
    """And none of them waits for another: whoever finds the row taken leaves it."""
    made = tenants.create_key(platform, tenant.id, name="busy", scopes=["read"])
    version = sa.select(sa.literal_column("xmin::text"), api_keys.c.last_used_at).where(api_keys.c.id == made.id)
    tenants.authenticate(platform, made.secret)
    with platform.engine.connect() as conn:
        before = conn.execute(version).one()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: tenants.authenticate(platform, made.secret), range(40)))
    later = replace(platform, clock=lambda: platform.clock() + timedelta(seconds=61))
    with platform.engine.connect() as conn:
        assert conn.execute(version).one() == before
    with platform.engine.begin() as held:
        held.execute(sa.select(api_keys.c.id).where(api_keys.c.id == made.id).with_for_update())
        tenants.authenticate(later, made.secret)
    tenants.authenticate(later, made.secret)
    with platform.engine.connect() as conn:
        assert conn.execute(version).one().last_used_at > before.last_used_at
