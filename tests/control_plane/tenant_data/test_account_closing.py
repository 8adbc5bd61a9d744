"""Closing an account with a deletion of all data: keys and members stop working; names, addresses and secrets are erased."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import sqlalchemy as sa

from control_plane.billing import budgets
from control_plane.billing.tables import ledger_entries
from control_plane.notifications import webhook_endpoints
from control_plane.tenant_data import deletion, deletion_requests, erasure
from control_plane.tenants import members, suspension
from control_plane.tenants import service as tenants
from core.errors import Conflict, Forbidden, Unauthenticated
from core.public_addresses import parse_networks
from resources.webhook_sender import HttpWebhookSender
from tests.support.platform.deletable_tenants import World, texts_of_database
from tests.support.platform.ledger_entries import enter


def closed(world: World, tenant: str) -> str:
    """Close an account; returns the id of the deletion."""
    asked = deletion_requests.request_tenant(
        world.platform, tenant, confirm=tenant, reason="contract ended", requested_by="key_1", close_account=True
    )
    world.clock.now += 2 * erasure.QUIET
    assert world.carried_out(asked.id)
    return asked.id


def test_a_closed_account_keeps_no_name_address_or_secret_and_another_one_all_of_its_own(world: World) -> None:
    world.platform = replace(world.platform, webhooks=HttpWebhookSender(allowed=parse_networks("127.0.0.0/8")))
    tenant, other = world.tenant(), world.tenant()
    job_id = world.row(world.trained(tenant)).job_id
    for one, name in ((tenant, "closes"), (other, "stays")):
        suspension.update(world.platform, one, {"name": f"{name} Inc."})
        owner, leaver = (
            members.add(world.platform, one, email=f"{who}@{name}.example", role="owner", name=f"{who} of {name}")
            for who in ("owner", "leaver")
        )
        members.remove(world.platform, one, leaver.id)
        tenants.create_key(world.platform, one, name=f"laptop of {name}", scopes=["admin"], member_id=owner.id)
        budgets.create(world.platform, one, name=f"plans of {name}", limit_micros=10**9)
        webhook_endpoints.create(
            world.platform, one, name=f"receiver of {name}", url=f"http://127.0.0.1:1/{name}.example", event_types=["*"]
        )
    with world.platform.engine.begin() as conn:
        enter(conn, tenant, job_id, amount_micros=1234, gpu_type="H200", gpu_seconds=9.0)
    texts = ("closes Inc.", "closes.example", "of closes")
    before = texts_of_database(world.platform)
    assert [text for text in texts if text not in before] == []
    id_ = closed(world, tenant)
    after = texts_of_database(world.platform)
    assert [text for text in texts if text in after] == []
    assert [text.replace("closes", "stays") for text in texts if text.replace("closes", "stays") not in after] == []
    with world.platform.engine.connect() as conn:
        assert conn.scalar(sa.select(sa.func.count()).where(ledger_entries.c.tenant_id == tenant)) == 1, "what was billed stays"
    proven = deletion.get(world.platform, tenant, id_).proof
    assert proven is not None and proven["account_closed"] is True
    assert (proven["rows"]["members"], proven["rows"]["api_keys"], proven["rows"]["budgets"], proven["rows"]["tenants"]) == (2, 2, 1, 1)
    assert erasure.CLOSED in proven["kept"] and erasure.ACCOUNT not in proven["kept"]
    assert deletion.verify_chain(world.platform).broken == ()


def test_nobody_signs_in_to_a_closed_account_and_operators_cannot_open_it_again(world: World) -> None:
    tenant = world.tenant()
    owner = members.add(world.platform, tenant, email="ada@example.com", role="owner")
    key = tenants.create_key(world.platform, tenant, name="k", scopes=["read"])
    asked = deletion_requests.request_tenant(
        world.platform, tenant, confirm=tenant, reason="r", requested_by="operator", close_account=True
    )
    assert tenants.authenticate(world.platform, key.secret).tenant.id == tenant, "keys work until it is done, to follow it"
    world.clock.now += 2 * erasure.QUIET
    assert world.carried_out(asked.id)
    with pytest.raises(Unauthenticated, match="revoked"):
        tenants.authenticate(world.platform, key.secret)
    assert members.memberships(world.platform, "ada@example.com") == []
    assert members.get(world.platform, tenant, owner.id).email == erasure.ERASED
    again = [
        lambda: tenants.create_key(world.platform, tenant, name="k", scopes=["read"]),
        lambda: members.add(world.platform, tenant, email="ada@example.com", role="owner"),
        lambda: suspension.resume(world.platform, tenant),
        lambda: suspension.update(world.platform, tenant, {"name": "back"}),
        lambda: world.delete_data(tenant),
        lambda: tenants.create(world.platform, tenant),
    ]
    codes = []
    for attempt in again:
        with pytest.raises(Conflict) as refused:
            attempt()
        codes.append(refused.value.code)
    assert codes == ["account_closed"] * 5 + ["tenant_exists"]


def test_a_deletion_closes_the_account_only_if_requested_and_also_if_requested_later(world: World) -> None:
    kept, ended = world.tenant(), world.tenant()
    for tenant in (kept, ended):
        members.add(world.platform, tenant, email=f"a@{tenant}.example", role="owner")
        id_ = world.delete_data(tenant)
        if tenant == ended:
            assert closed(world, tenant) == id_, "it is one deletion"
        else:
            assert world.carried_out(id_)
    assert tenants.get(world.platform, kept).closed_at is None
    assert [m.email for m in members.list_members(world.platform, kept).items] == [f"a@{kept}.example"]
    assert tenants.get(world.platform, ended).closed_at == world.clock.now


def test_only_an_owner_closes_an_account(world: World) -> None:
    tenant = world.tenant()
    asked = {"confirm": tenant, "reason": "r", "requested_by": "key_1"}
    with pytest.raises(Forbidden) as refused:
        deletion_requests.request_tenant(world.platform, tenant, **asked, close_account=True, by_owner=False)
    assert (refused.value.code, deletion.list_all(world.platform, tenant)) == ("owner_required", [])
    assert not deletion_requests.request_tenant(world.platform, tenant, **asked, by_owner=False).closes_account


def test_a_tenants_own_call_may_ask_for_it(world: World) -> None:
    """The database lets a tenant's role set and raise the mark, and lock its own row."""
    tenant = world.tenant()
    own = replace(world.platform, tenant=tenant)
    asked = {"confirm": tenant, "reason": "r", "requested_by": "key_1"}
    first = deletion_requests.request_tenant(own, tenant, **asked)
    second = deletion_requests.request_tenant(own, tenant, **asked, close_account=True)
    assert (first.id, first.closes_account) == (second.id, False)
    assert second.closes_account
    listed = json.loads(deletion.json_of(deletion.list_all(world.platform, tenant)[0]))
    assert (listed["id"], listed["closes_account"]) == (first.id, True)
