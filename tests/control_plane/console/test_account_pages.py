"""Budgets, invoices, settings, rotation of keys and of signing secrets, failed deliveries, and the end of a tenant's data."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest

from control_plane.billing import budgets
from control_plane.notifications import deliveries, outbox, webhook_endpoints
from control_plane.platform.context import Platform
from control_plane.tenant_data import deletion
from control_plane.tenants import members
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from control_plane.tracking import service as integrations
from resources.tracking.wandb_server import HttpWandb
from tests.control_plane.console.conftest import Visitor
from tests.support.servers.webhook_receiver import until


@pytest.fixture(scope="module")
def platform(new_platform: Callable[..., Platform]) -> Platform:
    """Sends webhooks to this machine, and metrics nowhere."""
    return replace(new_platform(webhook_allow="127.0.0.0/8"), wandb=HttpWandb(url="http://127.0.0.1:9"))


def test_a_budget_is_created_changed_and_deleted(platform: Platform, tenant: Tenant, visitor: Visitor, other: Visitor) -> None:
    path = "/console/usage/budgets"
    assert "No budget" in visitor.get(path).text
    visitor.post(path, name="Support", limit="$1,250.50", thresholds="50, 80 100%")
    (made,) = budgets.list_budgets(platform, tenant.id).items
    assert (made.name, made.limit_micros, list(made.thresholds)) == ("Support", 1_250_500_000, [50, 80, 100])
    assert other.post(f"{path}/{made.id}", name="x", limit="1", thresholds="1").status_code == 404
    assert other.post(f"{path}/{made.id}/delete").status_code == 404
    visitor.post(f"{path}/{made.id}", name="Bot", limit="2.01", thresholds="90")
    changed = budgets.get(platform, tenant.id, made.id)
    assert (changed.name, changed.limit_micros, list(changed.thresholds)) == ("Bot", 2_010_000, [90]), "to the cent"
    for wrong in (
        {"limit": "much"},
        {"limit": "0"},
        {"thresholds": "most"},
        {"thresholds": "0"},
        {"thresholds": "1" * 5000},
        {"name": " "},
    ):
        answer = visitor.post(f"{path}/{made.id}", **{"name": "Bot", "limit": "99", "thresholds": "90", **wrong})
        assert answer.status_code == 400, wrong
    visitor.post(f"{path}/{made.id}/delete")
    assert budgets.list_budgets(platform, tenant.id).items == []


@pytest.mark.parametrize("wrong", [{"name": "a\0b"}, {"name": "a" * 101}, {"days": "1" * 5000}])
def test_a_key_that_the_api_would_refuse_is_refused_by_the_console(
    platform: Platform, tenant: Tenant, visitor: Visitor, wrong: dict[str, str]
) -> None:
    assert visitor.post("/console/keys", **{"name": "ci", **wrong}).status_code == 400
    assert {key.name for key in tenants.list_keys(platform, tenant.id).items} == {"first", "test"}


def test_a_webhook_endpoint_that_the_api_would_refuse_is_refused_by_the_console(
    platform: Platform, tenant: Tenant, visitor: Visitor
) -> None:
    for name in ("", "a\0b", "a" * 101):
        assert visitor.post("/console/webhooks", name=name, url="http://127.0.0.1:9/hook").status_code == 400, name
    made = webhook_endpoints.create(platform, tenant.id, name="a", url="http://127.0.0.1:9/hook", event_types=["*"]).endpoint
    assert visitor.post(f"/console/webhooks/{made.id}/state", state="broken").status_code == 400
    assert webhook_endpoints.get(platform, tenant.id, made.id).state == "enabled"


def test_what_happens_at_the_cap_is_stated(visitor: Visitor) -> None:
    page = visitor.get("/console/usage/budgets").text
    assert "What happens at the cap" in page
    assert "running jobs are paused at their next checkpoint" in page


def test_the_invoice_of_an_empty_month_is_not_there_and_of_this_month_a_draft(platform: Platform, visitor: Visitor) -> None:
    month = f"{platform.clock():%Y-%m}"
    assert "Draft" in visitor.get("/console/usage/invoices").text
    page = visitor.get(f"/console/usage/invoices/{month}")
    assert (page.status_code, "Nothing was billed so far" in page.text) == (200, True)
    assert visitor.get("/console/usage/invoices/2020-01").status_code == 404
    assert visitor.get("/console/usage/invoices/never").status_code == 400


def test_a_member_gets_no_mail_once_it_is_switched_off(platform: Platform, tenant: Tenant, visitor: Visitor) -> None:
    person = members.add(platform, tenant.id, email="ada@example.com", role="member")
    for chosen, is_on in (("off", False), ("on", True)):
        visitor.post(f"/console/settings/members/{person.id}/notify", notify=chosen)
        assert members.get(platform, tenant.id, person.id).notify is is_on
    assert "ada@example.com" in visitor.get("/console/settings").text


def test_a_key_for_weights_and_biases_is_stored_replaced_and_removed_and_never_shown(
    platform: Platform, tenant: Tenant, visitor: Visitor
) -> None:
    path = "/console/settings/wandb"
    assert "No key is stored" in visitor.get("/console/settings").text
    assert visitor.post(path, api_key="short").status_code == 400
    for key in ("0123456789abcdef" * 3, "fedcba9876543210" * 3):
        visitor.post(path, api_key=key)
        page = visitor.get("/console/settings").text
        assert integrations.get_wandb(platform, tenant.id).hint == f"...{key[-4:]}" and f"...{key[-4:]}" in page
        assert key not in page
    visitor.post(f"{path}/remove")
    assert integrations.find_wandb(platform, tenant.id) is None


def test_a_rotated_key_works_beside_its_successor_until_the_stated_time(platform: Platform, tenant: Tenant, visitor: Visitor) -> None:
    old = tenants.create_key(platform, tenant.id, name="ci", scopes=["write"])
    asked = visitor.get(f"/console/keys/{old.id}/rotate").text
    assert "write" in asked
    assert "this session ends" not in asked
    page = visitor.post(f"/console/keys/{old.id}/rotate", overlap="3600").text
    (secret,) = re.findall(r"<pre>(ft-sk-[\w-]+)</pre>", page)
    assert [tenants.authenticate(platform, one).tenant.id for one in (old.secret, secret)] == [tenant.id] * 2
    end = tenants.get_key(platform, tenant.id, old.id).expires_at
    assert end is not None
    assert timedelta(minutes=59) < end - platform.clock() <= timedelta(hours=1)
    assert f'<time datetime="{end:%Y-%m-%dT%H:%M:%SZ}"' in page, "the page says until when the old one works"
    assert secret not in visitor.get("/console/keys").text


def test_the_key_of_another_tenant_is_not_rotated(platform: Platform, tenant: Tenant, other: Visitor) -> None:
    key = tenants.create_key(platform, tenant.id, name="ci", scopes=["write"])
    assert other.get(f"/console/keys/{key.id}/rotate").status_code == 404
    assert other.post(f"/console/keys/{key.id}/rotate").status_code == 404
    assert tenants.get_key(platform, tenant.id, key.id).expires_at is None


def test_a_signing_secret_is_rotated_and_failed_deliveries_are_sent_again(platform: Platform, tenant: Tenant, visitor: Visitor) -> None:
    made = webhook_endpoints.create(platform, tenant.id, name="hook", url="http://127.0.0.1:9/hooks", event_types=["*"])
    path = f"/console/webhooks/{made.endpoint.id}"
    page = visitor.post(f"{path}/rotate", keep_old="yes").text
    (secret,) = re.findall(r"<pre>(whsec_[\w+/=-]+)</pre>", page)
    assert "also signs until" in page
    assert [one.secret for one in webhook_endpoints.get(platform, tenant.id, made.endpoint.id).secrets] == [secret, made.secret]
    assert "no longer signs" in visitor.post(f"{path}/rotate").text
    assert len(webhook_endpoints.get(platform, tenant.id, made.endpoint.id).secrets) == 1
    assert secret not in visitor.get(path).text
    answer = visitor.post(f"{path}/replay", hours="24")
    assert "No delivery has failed" in visitor.get(answer.headers["location"]).text


def test_only_failed_deliveries_of_the_chosen_time_are_sent_again(platform: Platform, tenant: Tenant, visitor: Visitor) -> None:
    made = webhook_endpoints.create(platform, tenant.id, name="hook", url="http://127.0.0.1:9/hooks", event_types=["*"])
    path = f"/console/webhooks/{made.endpoint.id}"
    with platform.engine.begin() as conn:
        outbox.publish(conn, tenant.id, "budget.threshold_reached", "bud_1", {"threshold": 50}, now=platform.clock())
    until(lambda: deliveries.list_deliveries(platform, tenant.id, made.endpoint.id).items)
    visitor.post(f"{path}/state", state="disabled")  # ends pending deliveries, which then count as failed
    visitor.post(f"{path}/state", state="enabled")
    assert [one.state for one in deliveries.list_deliveries(platform, tenant.id, made.endpoint.id).items] == ["dead"]
    assert "budget.threshold_reached" in visitor.get(f"{path}?state=dead").text
    assert "No delivery in this state" in visitor.get(f"{path}?state=delivered").text
    answer = visitor.post(f"{path}/replay", hours="1")
    assert "are sent again" in visitor.get(answer.headers["location"]).text
    assert [one.state for one in deliveries.list_deliveries(platform, tenant.id, made.endpoint.id).items] == ["pending"]
    assert visitor.post(f"{path}/replay", hours="100000").status_code == 400


def test_all_data_is_deleted_only_if_the_tenant_is_named(
    platform: Platform, tenant: Tenant, visitor: Visitor, other: Visitor, visit: Callable[[str], Visitor]
) -> None:
    path = "/console/settings/data"
    assert "This cannot be undone" in visitor.get(path).text
    for refused in (
        visitor.post(f"{path}/delete", confirm="another", reason="end"),
        other.post(f"{path}/delete", confirm=tenant.id, reason="x"),
    ):
        assert (refused.status_code, "not_confirmed" in refused.text) == (400, True)
    assert visitor.post(f"{path}/delete", confirm=tenant.id, reason=" ").status_code == 409
    assert deletion.list_deletions(platform, tenant.id).items == []
    answer = visitor.post(f"{path}/delete", confirm=tenant.id, reason="contract ended")
    (asked,) = deletion.list_deletions(platform, tenant.id).items
    assert (asked.subject_kind, asked.reason, asked.done_at) == ("tenant", "contract ended", None)
    assert "contract ended" in visitor.get(answer.headers["location"]).text
    assert not asked.closes_account
    admin = members.add(platform, tenant.id, email="admin@example.com", role="admin")
    as_admin = visit(tenants.create_key(platform, tenant.id, name="a", scopes=["admin"], member_id=admin.id).secret)
    assert "close_account" not in as_admin.get(path).text and "close_account" in visitor.get(path).text
    assert as_admin.post(f"{path}/delete", confirm=tenant.id, reason="x", close_account="on").status_code == 403
    answer = visitor.post(f"{path}/delete", confirm=tenant.id, reason="contract ended", close_account="on")
    assert [one.closes_account for one in deletion.list_deletions(platform, tenant.id).items] == [True]
    assert "All data and the account" in visitor.get(answer.headers["location"]).text


def test_everything_is_exported_with_the_session(visitor: Visitor) -> None:
    assert 'href="/v1/data_export"' in visitor.get("/console/settings/data").text
    answer = visitor.get("/v1/data_export")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/zip")
    assert b"manifest.json" in answer.content


def test_settings_and_rotation_need_the_scope_admin(platform: Platform, tenant: Tenant, visit: Callable[[str], Visitor]) -> None:
    writer = visit(tenants.create_key(platform, tenant.id, name="w", scopes=["write"]).secret)
    for path in ("/console/settings", "/console/settings/data"):
        assert writer.get(path).status_code == 403, path
    assert "/console/settings" not in writer.get("/console").text
    assert writer.post("/console/settings/data/delete", confirm=tenant.id, reason="x").status_code == 403
