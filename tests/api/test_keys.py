"""API keys: made, scoped, expired, revoked."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import httpx
import pytest

from control_plane.service import tenants
from control_plane.service.platform import Platform
from control_plane.tenants import Tenant
from ft_assets.errors import Unauthenticated


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
