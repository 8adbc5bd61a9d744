"""The audit log as tenants read it: who, what, from where; filtered, in pages, and theirs alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from control_plane.service import tenants
from control_plane.service.platform import Platform
from control_plane.tenants import Tenant

Call = Callable[..., httpx.Response]


@pytest.fixture
def call(api_url: str, api_key: str) -> Call:
    def send(method: str, path: str, *, key: str = api_key, **options: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}", "user-agent": "tests/1"}
        return httpx.request(method, f"{api_url}/v1/{path}", headers=headers, **options)

    return send


def test_a_line_says_who_did_what_from_where_and_in_which_call(call: Call, tenant: Tenant) -> None:
    person = call("POST", "members", json={"email": "ada@example.com", "role": "admin"}).json()
    key = call("POST", "api_keys", json={"name": "laptop", "scopes": ["admin"], "member_id": person["id"]}).json()
    done = call("POST", "api_keys", json={"name": "ci", "scopes": ["read"]}, key=key["secret"])
    (line,) = call("GET", f"audit_log?object_id={done.json()['id']}").json()["data"]
    assert line["actor"] == {"type": "key", "id": key["id"], "name": "laptop", "member_id": person["id"], "email": "ada@example.com"}
    assert (line["action"], line["object_type"], line["tenant_id"]) == ("api_key.created", "api_key", tenant.id)
    assert (line["ip"], line["user_agent"], line["request_id"]) == ("127.0.0.1", "tests/1", done.headers["x-request-id"])
    assert line["changes"]["name"] == [None, "ci"] and line["redacted_at"] is None
    assert done.json()["secret"] not in str(line)
    theirs = call("GET", f"audit_log?actor={person['id']}").json()["data"]
    assert [t["id"] for t in theirs] == [line["id"]], "a member's lines are those of all their keys"


def test_pages_follow_one_another_newest_first(call: Call) -> None:
    made = [call("POST", "api_keys", json={"name": f"k{i}"}).json()["id"] for i in range(5)]
    seen: list[str] = []
    after = ""
    while True:
        page = call("GET", f"audit_log?action=api_key.created&limit=2{after}").json()
        seen += [line["object_id"] for line in page["data"]]
        if not page["has_more"]:
            break
        after = f"&after={page['data'][-1]['id']}"
    assert [id_ for id_ in seen if id_ in made] == made[::-1]
    assert len(seen) == len(set(seen))


def test_filters_narrow_what_is_seen(call: Call) -> None:
    call("POST", "members", json={"email": "a@example.com"})
    key = call("POST", "api_keys", json={"name": "k"}).json()["id"]
    call("DELETE", f"api_keys/{key}")
    lines = call("GET", "audit_log").json()["data"]
    first, last = lines[-1]["created_at"], lines[0]["created_at"]
    assert {line["object_type"] for line in call("GET", "audit_log?object_type=member").json()["data"]} == {"member"}
    assert [line["action"] for line in call("GET", f"audit_log?object_id={key}").json()["data"]] == ["api_key.updated", "api_key.created"]
    assert call("GET", "audit_log", params={"created[lt]": first}).json()["data"] == []
    assert call("GET", "audit_log", params={"created[gte]": last + 1}).json()["data"] == []
    assert len(call("GET", "audit_log", params={"created[gte]": first, "created[lt]": last + 1}).json()["data"]) == len(lines)


@pytest.mark.parametrize(
    ("query", "code"),
    [("limit=0", "invalid_limit"), ("after=aud_1", "invalid_after"), ("after=aud_999999999999999999", "invalid_after"),
     ("after=x", "invalid_after"),
     ("created[gte]=-1", "invalid_request"), ("created[lt]=999999999999999999999", "invalid_request"),
     ("created[lt]=noon", "invalid_type")],
)  # fmt: skip
def test_a_bad_query_is_refused(call: Call, query: str, code: str) -> None:
    answer = call("GET", f"audit_log?{query}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


def test_nobody_reads_anothers_log(call: Call, platform: Platform) -> None:
    key = call("POST", "api_keys", json={"name": "secret plans"}).json()["id"]
    line = call("GET", f"audit_log?object_id={key}").json()["data"][0]["id"]
    _, stranger = tenants.create(platform, "t-stranger-of-logs")
    assert "secret plans" not in call("GET", "audit_log?limit=100", key=stranger.secret).text
    assert call("GET", f"audit_log?after={line}", key=stranger.secret).json()["error"]["code"] == "invalid_after"
    assert call("GET", f"audit_log?object_id={key}", key=stranger.secret).json()["data"] == []
