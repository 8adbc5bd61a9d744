"""``ft keys``, ``ft members``, ``ft whoami`` and ``ft audit`` against the real API, and ``ft admin`` against its database."""

from __future__ import annotations

import csv
import getpass
import io
import json
import uuid
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from control_plane.platform.context import Platform
from control_plane.tenants.rules import Tenant
from control_plane.tenants.tables import tenants
from core.errors import FtError, InvalidRequest
from ft_client.cli.account_commands import _cell
from ft_client.cli.command_options import span_s
from ft_client.cli.command_tree import build

Ft = Callable[..., Any]


@pytest.fixture
def run(api_url: str, api_key: str, platform: Platform, monkeypatch: pytest.MonkeyPatch) -> Ft:
    """Runs a command in this process; as another key with `key`."""
    monkeypatch.setenv("FT_API_URL", api_url)
    monkeypatch.setenv("FT_HOME", str(platform.settings.home))
    monkeypatch.setenv("FT_DATABASE_URL", platform.settings.database_url)

    def call(*args: str, key: str = api_key) -> Any:
        done = CliRunner().invoke(build(), list(args), env={"FT_API_KEY": key})
        if done.exception and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout) if "--json" in args else done.stdout

    return call


def test_a_key_is_made_shown_rotated_and_revoked(run: Ft, tenant: Tenant) -> None:
    secret = run("keys", "create", "laptop", "--scope", "read", "--expires-in", "30d").strip()
    assert secret.startswith("ft-sk-")
    me = run("whoami", "--json", key=secret)
    assert (me["tenant_id"], me["scopes"], me["key"]["name"]) == (tenant.id, ["read"], "laptop")
    assert me["key"]["expires_at"] - me["key"]["created_at"] == 30 * 86400
    assert f"{tenant.id} ({tenant.name})" in run("whoami", key=secret)
    made = run("keys", "rotate", me["key"]["id"], "--overlap", "1h", "--json")
    assert (made["name"], made["scopes"]) == ("laptop", ["read"]) and made["secret"] != secret
    assert run("whoami", "--json", key=secret)["key"]["id"] == me["key"]["id"], "the old one opens for the overlap"
    run("keys", "rotate", made["id"], "--overlap", "0")
    with pytest.raises(FtError, match="expired"):
        run("whoami", key=made["secret"])
    run("keys", "revoke", me["key"]["id"])
    with pytest.raises(FtError, match="revoked"):
        run("whoami", key=secret)
    assert me["key"]["id"] not in run("keys") and me["key"]["id"] in run("keys", "--all")
    assert "revoked" in run("keys", "show", me["key"]["id"])


def test_members_are_added_changed_and_removed(run: Ft) -> None:
    id_ = run("members", "add", "ada@example.com", "--role", "viewer", "--name", "Ada").strip()
    assert f"{id_}\tada@example.com\tAda\tviewer" in run("members")
    assert run("members", "update", id_, "--role", "admin", "--no-notify", "--json")["notify"] is False
    key = run("keys", "create", "hers", "--member", id_, "--scope", "admin").strip()
    assert "ada@example.com (admin)" in run("whoami", key=key)
    assert run("members", "remove", id_, "--json")["revoked_keys"] == 1
    assert id_ not in run("members") and "removed" in run("members", "--all")


def test_the_audit_log_is_a_table_and_is_exported_whole(run: Ft) -> None:
    names = [f"=k{i}" for i in range(3)]
    for name in names:
        run("keys", "create", name)
    shown = run("audit", "--action", "api_key.created", "-n", "2").splitlines()
    assert len(shown) == 3 and "name: none -> =k2" in shown[1]
    rows = list(csv.DictReader(io.StringIO(run("audit", "--type", "api_key", "--csv"))))
    assert [json.loads(r["changes"])["name"][1] for r in rows][:3] == names[::-1]
    assert rows[0]["actor_name"] == "test" and rows[0]["request_id"].startswith("req_")
    assert [json.loads(line)["id"] for line in run("audit", "--type", "api_key", "--jsonl").splitlines()] == [r["id"] for r in rows]
    assert run("audit", "--json", "--before", "2020-01-01") == run("audit", "--json", "--csv", "--before", "2020-01-01") == []


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@x", "\tx"])
def test_a_cell_is_no_formula(text: str) -> None:
    assert _cell(text) == f"'{text}"


@pytest.mark.parametrize(("text", "s"), [("30d", 30 * 86400), ("12h", 43200), ("90min", 5400), ("45", 45), ("0", 0)])
def test_a_span_of_time_is_read(text: str, s: int) -> None:
    assert span_s(text) == s


@pytest.mark.parametrize("text", ["", "d", "-1d", "1y", "1.5h", "soon"])
def test_what_is_no_span_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="duration"):
        span_s(text)


def test_operators_change_tenants_on_the_machine_under_their_own_name(run: Ft) -> None:
    id_ = f"t-{uuid.uuid4().hex[:8]}"
    key = run("admin", "tenants", "create", id_, "--owner", "o@example.com").strip()
    changed = run("admin", "tenants", "update", id_, "--tier", "premium", "--requests-per-minute", "77", "--json")
    assert (changed["tier"], changed["requests_per_minute"], changed["max_jobs_in_flight"]) == ("premium", 77, 20)
    assert run("admin", "tenants", "update", id_, "--requests-per-minute", "tier", "--json")["requests_per_minute"] == 6000
    run("admin", "tenants", "suspend", id_, "--reason", "unpaid")
    with pytest.raises(FtError, match="unpaid"):
        run("whoami", key=key)
    assert "unpaid" in run("admin", "tenants", "list")
    run("admin", "tenants", "resume", id_)
    lines = run("admin", "audit", "--tenant", id_, "--type", "tenant", "--json")
    assert {line["actor"]["id"] for line in lines} == {f"cli:{getpass.getuser()}"}
    assert list(lines[0]["changes"]) == ["suspended_at", "suspended_reason"]


def test_deletions_of_a_tenant_are_listed_to_operators_with_what_they_wait_for(run: Ft) -> None:
    id_ = f"t-{uuid.uuid4().hex[:8]}"
    run("admin", "tenants", "create", id_)
    asked = run("admin", "tenants", "delete-data", id_, "--reason", "left", "--confirm", id_, "--close-account", "--json")
    assert asked["closes_account"] and asked["waiting_for"]
    assert run("admin", "tenants", "deletions", id_, "--json") == [asked]
    assert "left" in run("admin", "tenants", "deletions", id_)
    with pytest.raises(FtError, match="no tenant 'nobody'"):
        run("admin", "tenants", "deletions", "nobody")


def test_an_operators_key_is_made_listed_and_revoked(run: Ft) -> None:
    made = run("admin", "operators", "create", "Ada", "--json")
    assert made["secret"].startswith("ft-op-") and made["id"] in run("admin", "operators", "list")
    run("admin", "operators", "revoke", made["id"])
    (found,) = [k for k in run("admin", "operators", "list", "--json") if k["id"] == made["id"]]
    assert found["revoked_at"] is not None and found["hint"] == f"ft-op-...{made['secret'][-4:]}"


def test_the_quota_is_shown_in_words_and_as_json(ft: Callable[..., Any], platform: Platform, tenant: Tenant) -> None:
    shown = ft("quota").out
    for said in (f"{tenant.id} (standard)", "1000 GPU-hours", "500 GPU-hours, 0 beyond it", "0 of 5", "within 60 minutes"):
        assert said in shown
    with platform.engine.begin() as conn:
        conn.execute(sa.update(tenants).where(tenants.c.id == tenant.id).values(tier="free", hard_gpu_hours=0))
    done = ft("quota")
    assert "best effort: a wait has no bound" in done.out
    assert "paused at their next checkpoint" in done.err, "the cap of nothing is reached"
    assert ft("quota", "--json").json["at_hard_cap"]
