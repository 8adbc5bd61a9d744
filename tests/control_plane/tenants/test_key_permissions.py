"""What keys may do to keys: an admin never becomes an owner, nobody gets another's secret, and no key makes a wider one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from control_plane.platform.context import Logins, Platform
from control_plane.tenants import members
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from control_plane.tenants.service import NewKey
from control_plane.tenants.tables import api_keys
from control_plane.tenants.tables import members as members_table
from core.errors import Forbidden, QuotaExceeded, Unauthenticated

Call = Callable[..., httpx.Response]
PEOPLE = {"owner": "owner", "owner2": "owner", "admin": "admin", "admin2": "admin", "member": "member", "viewer": "viewer"}


@pytest.fixture
def call(api_url: str) -> Call:
    def send(key: str, method: str, path: str, body: Any = None) -> httpx.Response:
        return httpx.request(method, f"{api_url}/v1/{path}", headers={"authorization": f"Bearer {key}"}, json=body)

    return send


@pytest.fixture
def person(platform: Platform, tenant: Tenant) -> Mapping[str, str]:
    """Ids of members."""
    return {who: members.add(platform, tenant.id, email=f"{who}@example.com", role=role).id for who, role in PEOPLE.items()}


@pytest.fixture
def key(platform: Platform, tenant: Tenant, person: Mapping[str, str], call: Call) -> Mapping[str, NewKey]:
    """A key of each member; of an operator's making ("own"), and of an admin's ("machine")."""
    scopes = {"member": "write", "viewer": "read"}
    made = {
        who: tenants.create_key(platform, tenant.id, name=who, scopes=[scopes.get(who, "admin")], member_id=id_)
        for who, id_ in person.items()
    }
    made["own"] = tenants.create_key(platform, tenant.id, name="own", scopes=["admin"])
    by = tenants.authenticate(platform, made["admin"].secret)
    made["machine"] = tenants.create_key(platform, tenant.id, name="machine", scopes=["admin"], by=by)
    made["reads"] = tenants.create_key(platform, tenant.id, name="reads", scopes=["read"])
    return made


def answer(found: httpx.Response) -> str:
    return "done" if found.status_code == 200 else str(found.json()["error"]["code"])


OWNER, OTHER, SCOPE = "owner_required", "key_of_another_member", "insufficient_scope"
MAKES = {
    "owner": dict.fromkeys(PEOPLE, "done"),
    "own": dict.fromkeys(PEOPLE, "done"),
    "admin": {"owner": OWNER, "owner2": OWNER, "admin": "done", "admin2": OWNER, "member": "done", "viewer": "done"},
    "machine": {"owner": OWNER, "owner2": OWNER, "admin": OWNER, "admin2": OWNER, "member": "done", "viewer": "done"},
    "member": dict.fromkeys(PEOPLE, SCOPE),
    "viewer": dict.fromkeys(PEOPLE, SCOPE),
}
ROTATES = {
    "owner": {"owner2": OTHER, "admin": OTHER, "member": OTHER, "own": "done", "machine": "done", "reads": "done", "owner": "done"},
    "own": {"owner": OTHER, "admin": OTHER, "member": OTHER, "machine": "done", "own": "done"},
    "admin": {"owner": OTHER, "admin2": OTHER, "viewer": OTHER, "own": OWNER, "machine": "done", "reads": "done", "admin": "done"},
    "machine": {"owner": OTHER, "admin": OTHER, "member": OTHER, "own": OWNER, "reads": "done", "machine": "done"},
    "member": {"member": SCOPE},
}
"""In this order, its own last: what it rotates ends within a day, and from then on gives no key that lasts longer."""
REVOKES = {
    "owner": dict.fromkeys(("owner2", "admin", "member", "own", "machine", "owner"), "done"),
    "admin": {"owner": OWNER, "own": OWNER, "admin2": "done", "member": "done", "machine": "done", "reads": "done", "admin": "done"},
    "machine": {"owner": OWNER, "own": OWNER, "admin": "done", "reads": "done", "machine": "done"},
    "viewer": {"viewer": SCOPE},
}


@pytest.mark.parametrize("by", MAKES)
def test_who_makes_a_key_for_whom(call: Call, key: Mapping[str, NewKey], person: Mapping[str, str], by: str) -> None:
    asked = {who: {"name": "k", "scopes": ["read"], "member_id": id_} for who, id_ in person.items()}
    assert {who: answer(call(key[by].secret, "POST", "api_keys", body)) for who, body in asked.items()} == MAKES[by]


@pytest.mark.parametrize("by", ROTATES)
def test_who_gets_the_secret_of_a_rotated_key(call: Call, key: Mapping[str, NewKey], by: str) -> None:
    found = {whose: answer(call(key[by].secret, "POST", f"api_keys/{key[whose].id}/rotate")) for whose in ROTATES[by]}
    assert found == ROTATES[by]


@pytest.mark.parametrize("by", REVOKES)
def test_who_revokes_whose_key(call: Call, key: Mapping[str, NewKey], by: str) -> None:
    found = {whose: answer(call(key[by].secret, "DELETE", f"api_keys/{key[whose].id}")) for whose in REVOKES[by]}
    assert found == REVOKES[by]


def test_an_admin_does_not_become_an_owner_through_a_key_that_it_makes(
    call: Call, key: Mapping[str, NewKey], person: Mapping[str, str]
) -> None:
    made = call(key["admin"].secret, "POST", "api_keys", {"name": "k", "scopes": ["admin"]}).json()
    again = call(made["secret"], "POST", "api_keys", {"name": "k", "scopes": ["admin"]}).json()
    rotated = call(again["secret"], "POST", f"api_keys/{again['id']}/rotate").json()
    for secret in (made["secret"], again["secret"], rotated["secret"]):
        assert answer(call(secret, "POST", f"members/{person['admin']}", {"role": "owner"})) == OWNER
        assert answer(call(secret, "DELETE", f"members/{person['owner']}")) == OWNER
    own = call(key["owner"].secret, "POST", "api_keys", {"name": "k", "scopes": ["admin"]}).json()["secret"]
    assert answer(call(own, "POST", f"members/{person['admin2']}", {"role": "owner"})) == "done", "one that an owner made may"


def test_a_key_makes_none_that_ends_later_or_has_more_requests(platform: Platform, tenant: Tenant) -> None:
    own = tenants.create_key(platform, tenant.id, name="own", scopes=["admin"], expires_in_s=3600, requests_per_minute=60)
    by = tenants.authenticate(platform, own.secret)

    def make(**asked: Any) -> NewKey:
        return tenants.create_key(platform, tenant.id, name="k", scopes=["read"], by=by, **asked)

    same, less = make(), make(expires_in_s=60, requests_per_minute=6)
    assert (same.expires_at, same.requests_per_minute) == (own.expires_at, 60)
    assert (less.expires_at < own.expires_at, less.requests_per_minute) == (True, 6)
    lasting = tenants.create_key(platform, tenant.id, name="lasting", scopes=["read"])
    for beyond in (
        lambda: make(expires_in_s=7200),
        lambda: make(requests_per_minute=61),
        lambda: tenants.rotate_key(platform, tenant.id, lasting.id, by=by),
        lambda: tenants.rotate_key(platform, tenant.id, own.id, by=by, expires_in_s=7200),
    ):
        with pytest.raises(Forbidden) as refused:
            beyond()
        assert refused.value.code == "wider_than_your_key"
    later = replace(platform, clock=lambda: platform.clock() + timedelta(seconds=60))
    rotated = tenants.rotate_key(later, tenant.id, own.id, by=by)
    assert rotated.expires_at - rotated.created_at == timedelta(hours=1), "its own lasts as long as it was made for"


def test_a_tenant_has_only_so_many_keys_that_open_something(platform: Platform, tenant: Tenant) -> None:
    first = tenants.create_key(platform, tenant.id, name="k", scopes=["read"])
    tenants.create_key(platform, tenant.id, name="short", scopes=["read"], expires_in_s=1)
    others = [
        {"id": f"{first.id}-{n}", "tenant_id": tenant.id, "name": "k", "sha256": f"{first.id}-{n}", "hint": "", "scopes": ["read"]}
        for n in range(tenants.MAX_KEYS - 3)  # there are the tenant's first, and these two
    ]
    with platform.engine.begin() as conn:
        conn.execute(sa.insert(api_keys).values(created_at=platform.clock()), others)
    with pytest.raises(QuotaExceeded) as refused:
        tenants.create_key(platform, tenant.id, name="k", scopes=["read"])
    assert refused.value.code == "too_many_keys"
    rotated = tenants.rotate_key(platform, tenant.id, first.id)  # takes the place of one, and both open for a day
    for gone in (first.id, rotated.id):
        tenants.revoke_key(platform, tenant.id, gone)
    tenants.create_key(platform, tenant.id, name="k", scopes=["read"])
    later = replace(platform, clock=lambda: platform.clock() + timedelta(seconds=2))
    tenants.create_key(later, tenant.id, name="k", scopes=["read"])


def test_a_key_of_a_removed_member_opens_nothing_even_if_nobody_revoked_it(
    platform: Platform, tenant: Tenant, person: Mapping[str, str]
) -> None:
    made = tenants.create_key(platform, tenant.id, name="k", scopes=["read"], member_id=person["viewer"])
    with platform.engine.begin() as conn:
        conn.execute(sa.update(members_table).where(members_table.c.id == person["viewer"]).values(removed_at=platform.clock()))
    with pytest.raises(Unauthenticated, match="removed"):
        tenants.authenticate(platform, made.secret)


def test_a_key_is_not_rotated_while_its_member_is_being_removed(platform: Platform, tenant: Tenant, person: Mapping[str, str]) -> None:
    """Both lock the tenant's row: the removal finds every key that there is."""
    made = tenants.create_key(platform, tenant.id, name="k", scopes=["read"], member_id=person["viewer"])
    hurried = sa.create_engine(platform.engine.url, connect_args={"options": "-c lock_timeout=50"}, poolclass=sa.NullPool)
    with platform.engine.connect() as conn:
        tenants.find_tenant(conn, tenant.id, lock=True)
        with pytest.raises(OperationalError, match="lock timeout"):
            tenants.rotate_key(replace(platform, logins=Logins(platform=hurried, operator=hurried, tenant=hurried)), tenant.id, made.id)
    members.remove(platform, tenant.id, person["viewer"])
    assert tenants.get_key(platform, tenant.id, made.id).revoked_at is not None
