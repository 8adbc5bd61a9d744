"""The drill of docs/operations/keys.md: a tenant's admin key leaks, and what was done with it is found, undone and shut out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from control_plane.notifications.dispatch import live_secrets
from control_plane.notifications.signatures import opened
from control_plane.notifications.webhook_endpoints import locked
from control_plane.platform.context import Platform
from control_plane.tenants.audit import audit_entries
from control_plane.tenants.rules import Tenant

Call = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def platform(new_platform: Callable[..., Platform]) -> Platform:
    """One that sends webhooks."""
    return new_platform(webhook_allow="127.0.0.1/32")


@pytest.fixture
def call(api_url: str) -> Call:
    def send(method: str, path: str, key: str, *, agent: str = "owner/1", **options: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}", "user-agent": agent}
        return httpx.request(method, f"{api_url}/v1/{path}", headers=headers, timeout=60, **options)

    return send


def changes_by(call: Call, owner: str, actor: str) -> list[dict[str, Any]]:
    return list(call("GET", f"audit_log?actor={actor}&limit=100", owner).json()["data"])


def test_a_leaked_key_and_everything_made_with_it_is_shut_out(
    call: Call, api_url: str, api_key: str, platform: Platform, tenant: Tenant
) -> None:
    leaked = call("POST", "api_keys", api_key, json={"name": "ci", "scopes": ["admin"]}).json()
    hook = call("POST", "webhook_endpoints", api_key, json={"name": "ops", "url": "http://127.0.0.1:9/ops", "event_types": ["*"]}).json()

    # the thief: another key, a session of the console, a webhook of their own
    second = call("POST", "api_keys", leaked["secret"], agent="thief/1", json={"name": "backup", "scopes": ["admin"]}).json()
    third = call("POST", "api_keys", second["secret"], agent="thief/1", json={"name": "spare", "scopes": ["read"]}).json()
    spy = call(
        "POST",
        "webhook_endpoints",
        second["secret"],
        agent="thief/1",
        json={"name": "spy", "url": "http://127.0.0.1:9/spy", "event_types": ["*"]},
    )
    assert spy.status_code == 200, spy.text
    browser = httpx.Client(base_url=api_url, headers={"origin": api_url, "user-agent": "thief/1"}, timeout=60)
    with browser:
        browser.post("/console/sign-in", data={"key": leaked["secret"]})
        assert browser.get("/console/keys").status_code == 200

        # 1. what was done with it, and with what it made
        found, waiting = dict[str, list[dict[str, Any]]](), [leaked["id"]]
        while waiting:
            actor = waiting.pop()
            found[actor] = changes_by(call, api_key, actor)
            waiting += [line["object_id"] for line in found[actor] if line["action"] == "api_key.created"]
        assert set(found) == {leaked["id"], second["id"], third["id"]}
        lines = [line for of in found.values() for line in of]
        assert {line["user_agent"] for line in lines} == {"thief/1"}
        assert {line["ip"] for line in lines} == {"127.0.0.1"}
        made = [line["object_id"] for line in lines if line["action"] == "webhook_endpoint.created"]
        assert made == [spy.json()["id"]]

        # 2. shut out: the key is replaced at once, what it made is revoked and deleted
        fresh = call("POST", f"api_keys/{leaked['id']}/rotate", api_key, json={"overlap": 0}).json()
        for key in (second, third):
            assert call("DELETE", f"api_keys/{key['id']}", api_key).status_code == 200
        assert call("DELETE", f"webhook_endpoints/{made[0]}", api_key).status_code == 200
        for key in (leaked, second, third):
            assert call("GET", "me", key["secret"], agent="thief/1").status_code == 401
        assert browser.get("/console/keys", follow_redirects=False).status_code != 200, "its session ended with it"
    assert call("GET", "me", fresh["secret"]).json()["scopes"] == call("GET", "me", api_key).json()["scopes"]

    # 3. what the key could read: signing secrets are shown once only, but a new one could have been made
    new = call("POST", f"webhook_endpoints/{hook['id']}/rotate_secret", api_key, json={}).json()
    with platform.engine.begin() as conn:
        endpoint = opened(platform.settings, locked(conn, tenant.id, hook["id"]))
    assert live_secrets(endpoint.secrets, platform.clock()) == [new["signing_secret"]], "the old one signs nothing any more"

    # 4. nobody edited the log
    assert audit_entries.verify(platform).findings == ()
