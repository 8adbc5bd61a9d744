"""Members: roles that bound their keys, owners that cannot all go, and the keys that go with a member."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from control_plane.platform.context import Platform
from control_plane.tenants import members
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Role, Tenant, person_of
from control_plane.tenants.tables import members as members_table
from core.errors import FtError

Call = Callable[..., httpx.Response]


@pytest.fixture
def call(api_url: str, api_key: str) -> Call:
    def send(method: str, path: str, *, key: str = api_key, **options: Any) -> httpx.Response:
        return httpx.request(method, f"{api_url}/v1/{path}", headers={"authorization": f"Bearer {key}"}, **options)

    return send


def add(call: Call, email: str, role: str, **more: Any) -> Any:
    answer = call("POST", "members", json={"email": email, "role": role}, **more)
    assert answer.status_code == 200, answer.text
    return answer.json()


def key_of(call: Call, member: Any, *scopes: str) -> str:
    answer = call("POST", "api_keys", json={"name": "theirs", "scopes": list(scopes), "member_id": member["id"]})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["secret"])


def test_a_member_is_added_changed_listed_and_removed(call: Call) -> None:
    made = add(call, "ada@example.com", "member")
    assert (made["email"], made["name"], made["role"], made["notify"]) == ("ada@example.com", "ada@example.com", "member", True)
    changed = call("POST", f"members/{made['id']}", json={"name": "Ada", "notify": False}).json()
    assert (changed["name"], changed["notify"], changed["role"]) == ("Ada", False, "member")
    assert [m["id"] for m in call("GET", "members").json()["data"]] == [made["id"]]
    assert call("DELETE", f"members/{made['id']}").json() == {"id": made["id"], "object": "member", "deleted": True, "revoked_keys": 0}
    assert call("GET", "members").json()["data"] == []
    assert [m["id"] for m in call("GET", "members?removed=true").json()["data"]] == [made["id"]]
    assert call("GET", f"members/{made['id']}").json()["removed_at"] is not None
    gone = call("DELETE", f"members/{made['id']}")
    assert (gone.status_code, gone.json()["error"]["code"]) == (409, "member_removed")
    assert add(call, "ada@example.com", "viewer")["id"] != made["id"], "the person may come back"


def test_member_beyond_the_limit_is_refused_until_one_is_removed(call: Call, platform: Platform, tenant: Tenant) -> None:
    first = add(call, "first@example.com", "member")
    many = [person_of(tenant.id, f"p{n}@example.com", Role.VIEWER, name=None, now=platform.clock()) for n in range(members.MAX_MEMBERS - 1)]
    with platform.engine.begin() as conn:
        conn.execute(sa.insert(members_table), many)
    refused = call("POST", "members", json={"email": "last@example.com", "role": "viewer"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_members")
    assert "limit 500" in refused.text
    assert call("DELETE", f"members/{first['id']}").status_code == 200
    add(call, "last@example.com", "viewer")


@pytest.mark.parametrize(
    ("role", "may", "may_not"),
    [("viewer", ["read"], ["write"]), ("member", ["read", "write"], ["admin"]), ("admin", ["admin"], []), ("owner", ["admin"], [])],
)
def test_a_role_bounds_the_scopes_of_a_members_keys(call: Call, role: str, may: list[str], may_not: list[str]) -> None:
    person = add(call, "who@example.com", role)
    assert call("GET", "me", key=key_of(call, person, *may)).json()["member"]["role"] == role
    for scope in may_not:
        refused = call("POST", "api_keys", json={"name": "k", "scopes": ["read", scope], "member_id": person["id"]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "scope_beyond_role")


def test_a_lower_role_narrows_the_keys_that_there_are_at_once(call: Call) -> None:
    person = add(call, "who@example.com", "admin")
    key = key_of(call, person, "admin")
    assert call("GET", "members", key=key).status_code == 200
    call("POST", f"members/{person['id']}", json={"role": "viewer"})
    assert call("GET", "members", key=key).json()["error"]["code"] == "insufficient_scope"
    assert call("GET", "me", key=key).json()["scopes"] == ["read"]


def test_removing_a_member_revokes_its_keys_and_no_others(call: Call) -> None:
    person, other = add(call, "a@example.com", "member"), add(call, "b@example.com", "member")
    key, others = key_of(call, person, "read"), key_of(call, other, "read")
    assert call("DELETE", f"members/{person['id']}").json()["revoked_keys"] == 1
    assert call("GET", "models", key=key).status_code == 401
    assert call("GET", "models", key=others).status_code == 200
    refused = call("POST", "api_keys", json={"name": "k", "scopes": ["read"], "member_id": person["id"]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "member_not_found")


def test_the_last_owner_stays_an_owner(call: Call) -> None:
    owner = add(call, "a@example.com", "owner")
    for answer in (call("DELETE", f"members/{owner['id']}"), call("POST", f"members/{owner['id']}", json={"role": "admin"})):
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "last_owner")
    second = add(call, "b@example.com", "owner")
    assert call("DELETE", f"members/{owner['id']}").status_code == 200
    assert call("DELETE", f"members/{second['id']}").status_code == 409


def test_two_owners_who_remove_each_other_leave_one(platform: Platform, tenant: Tenant) -> None:
    owners = [members.add(platform, tenant.id, email=f"{n}@example.com", role="owner").id for n in "ab"]
    outcomes: list[str] = []
    at_once = threading.Barrier(2)

    def remove(member_id: str) -> None:
        at_once.wait()
        try:
            members.remove(platform, tenant.id, member_id)
            outcomes.append("removed")
        except FtError as refused:
            outcomes.append(refused.code)

    threads = [threading.Thread(target=remove, args=(o,)) for o in owners]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(outcomes) == ["last_owner", "removed"]


def test_an_admin_names_no_owners(call: Call) -> None:
    owner, admin = add(call, "o@example.com", "owner"), add(call, "a@example.com", "admin")
    add(call, "p@example.com", "owner")
    key = key_of(call, admin, "admin")
    refused = [
        call("POST", "members", json={"email": "x@example.com", "role": "owner"}, key=key),
        call("POST", f"members/{admin['id']}", json={"role": "owner"}, key=key),
        call("POST", f"members/{owner['id']}", json={"role": "viewer"}, key=key),
        call("DELETE", f"members/{owner['id']}", key=key),
    ]
    assert [(r.status_code, r.json()["error"]["code"]) for r in refused] == [(403, "owner_required")] * 4
    assert call("POST", f"members/{owner['id']}", json={"role": "admin"}, key=key_of(call, owner, "admin")).status_code == 200


@pytest.mark.parametrize(
    "email",
    ["", "a", "a@b", "@b.de", "a@b..de", "a b@c.de", "a@b.de\nBcc: x@y.z", "a@b.de, c@d.ef", "<a@b.de>", "a@-b.de",
     "ü@b.de", "a" * 250 + "@b.de"],
)  # fmt: skip
def test_what_is_no_e_mail_address_is_refused(call: Call, email: str) -> None:
    answer = call("POST", "members", json={"email": email})
    assert (answer.status_code, answer.json()["error"]["code"], answer.json()["error"]["param"]) == (400, "invalid_email", "email")


def test_an_address_is_a_member_once_whatever_its_case(call: Call) -> None:
    add(call, "ada.lovelace+x@mail.example.com", "viewer")
    twice = call("POST", "members", json={"email": "Ada.Lovelace+x@mail.example.com"})
    assert (twice.status_code, twice.json()["error"]["code"]) == (409, "member_exists")


@pytest.mark.parametrize(("body", "code"), [({"role": "root"}, "invalid_role"), ({"name": "a\nb"}, "invalid_request")])
def test_a_bad_change_is_refused(call: Call, body: dict[str, str], code: str) -> None:
    person = add(call, "a@example.com", "viewer")
    answer = call("POST", f"members/{person['id']}", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


def test_another_tenants_member_is_not_there(call: Call, platform: Platform) -> None:
    person = add(call, "a@example.com", "viewer")
    _, stranger = tenants.create(platform, "t-stranger-of-members")
    for method, body in (("GET", None), ("POST", {"name": "x"}), ("DELETE", None)):
        answers = [call(method, f"members/{id_}", key=stranger.secret, json=body) for id_ in (person["id"], "mem_none")]
        assert [a.status_code for a in answers] == [404, 404]
    taken = call("POST", "api_keys", key=stranger.secret, json={"name": "k", "member_id": person["id"]})
    assert taken.status_code == 404
