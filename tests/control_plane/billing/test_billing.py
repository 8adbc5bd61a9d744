"""Usage, costs, invoices, budgets and refunds over HTTP, and what `ft` makes of them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from control_plane.billing import storage_usage
from control_plane.billing.invoices import rules as invoicing
from control_plane.billing.invoices import service as invoices
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.tenants import operators
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from core.errors import Fault
from ft_client.cli import command_tree as cli
from tests.support.jobs.metered_job import AT, MeteredJob, at_time, metered_job
from tests.support.platform.database_roles import as_operator, as_owner

HOUR = 3600


@pytest.fixture
def api(api_url: str, api_key: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"{api_url}/v1", headers={"authorization": f"Bearer {api_key}"}) as client:
        yield client


@pytest.fixture
def operator(api_url: str, platform: Platform) -> Iterator[httpx.Client]:
    key = operators.create(as_operator(platform), "billing").secret
    with httpx.Client(base_url=f"{api_url}/v1/admin", headers={"authorization": f"Bearer {key}"}) as client:
        yield client


@pytest.fixture
def job(platform: Platform, tenant: Tenant) -> MeteredJob:
    """A job with an hour and a half over midnight, an hour that the platform lost, and one whose fault nobody can tell."""
    made = metered_job(platform, tenant.id)
    made.run(1, at=datetime(2026, 3, 9, 23, tzinfo=UTC), hours=1.5)
    made.run(2, at=AT, outcome="node_lost", fault=Fault.PLATFORM)
    made.run(3, at=AT + timedelta(hours=2), outcome="oom", fault=Fault.AMBIGUOUS)
    return made


def ok(answer: httpx.Response) -> Any:
    assert answer.is_success, answer.text
    return answer.json()


RANGE = {"start_time": int(datetime(2026, 3, 9, tzinfo=UTC).timestamp()), "end_time": int(datetime(2026, 3, 11, tzinfo=UTC).timestamp())}


def test_usage_by_day_splits_at_midnight_and_its_buckets_add_up_to_its_total(api: httpx.Client, job: MeteredJob) -> None:
    found = ok(api.get("/usage", params={**RANGE, "bucket_width": "day"}))
    (first,), (second,) = (bucket["results"] for bucket in found["data"])
    assert (first["gpu_seconds"], first["amount_micros"]) == (HOUR, 4_000_000)
    assert (second["gpu_seconds"], second["refunded_gpu_seconds"]) == (2.5 * HOUR, HOUR)
    assert second["amount_micros"] == 6_000_000
    assert found["total"]["amount_micros"] == 10_000_000 == ok(api.get("/ledger"))["balance_micros"]


def test_usage_is_grouped_by_what_is_asked_for(api: httpx.Client, job: MeteredJob) -> None:
    found = ok(api.get("/usage", params={**RANGE, "bucket_width": "month", "group_by": "model,kind"}))
    (bucket,) = found["data"]
    assert [(r["model"], r["kind"], r["amount_micros"]) for r in bucket["results"]] == [
        ("tiny-base", "refund", -4_000_000),
        ("tiny-base", "usage", 14_000_000),
    ]
    for params in (
        {"group_by": "metadata[]"},
        {"group_by": f"metadata[{'x' * 65}]"},
        {"group_by": "colour"},
        {"group_by": "kind,kind"},
        {"bucket_width": "week"},
        {"start_time": 9, "end_time": 5},
    ):
        assert api.get("/usage", params=params).status_code == 400
    assert api.get("/usage", params={"start_time": 0, "bucket_width": "hour"}).json()["error"]["code"] == "invalid_range"
    future = api.get("/usage", params={"start_time": 4102444800}).json()["error"]
    assert future["code"] == "invalid_range"
    assert "2100-01-01" in future["message"]
    assert "without an end it ends now" in future["message"]


def test_usage_of_too_much_time_for_its_buckets_is_refused(api: httpx.Client) -> None:
    for width, days in (("hour", 31), ("day", 395), ("month", 3650)):
        span = {"start_time": RANGE["end_time"] - days * 24 * HOUR, "end_time": RANGE["end_time"], "bucket_width": width}
        ok(api.get("/usage", params=span))
        span["start_time"] -= 50 * 24 * HOUR
        assert api.get("/usage", params=span).json()["error"]["code"] == "invalid_range"


def test_operators_see_usage_by_tenant_and_each_tenants_bills_with_who_decided(
    operator: httpx.Client, api: httpx.Client, platform: Platform, tenant: Tenant, job: MeteredJob
) -> None:
    other = metered_job(platform)
    other.run(1, at=AT)
    found = ok(operator.get("/usage", params={**RANGE, "bucket_width": "month", "group_by": "tenant"}))
    by_tenant = {r["tenant"]: r["amount_micros"] for bucket in found["data"] for r in bucket["results"]}
    assert (by_tenant[tenant.id], by_tenant[other.tenant]) == (10_000_000, 4_000_000)
    one = ok(operator.get("/usage", params={**RANGE, "tenant": other.tenant}))
    assert one["total"]["amount_micros"] == 4_000_000
    assert api.get("/usage", params={**RANGE, "group_by": "tenant"}).json()["error"]["code"] == "invalid_group_by"
    ok(operator.post(f"/refunds/{job.id}-a3/grant", json={"note": "ours"}))
    ok(operator.post("/adjustments", json={"tenant": tenant.id, "amount_micros": 5, "reason": "r"}))
    listed = ok(operator.get(f"/tenants/{tenant.id}/ledger"))["data"]
    assert {"by", "decided_by"} <= {name for e in listed for name in e["detail"]}
    theirs = [*ok(api.get("/ledger/entries"))["data"], *ok(api.get(f"/fine_tuning/jobs/{job.id}/cost"))["entries"]]
    assert not {"by", "decided_by"} & {name for e in theirs for name in e["detail"]}, "a tenant does not learn which operator it was"
    assert ok(operator.get(f"/tenants/{tenant.id}/invoices"))["data"] == []
    assert ok(operator.get(f"/tenants/{tenant.id}/invoices/2026-03"))["status"] == "draft"
    for path in ("/usage?tenant=nobody", "/tenants/nobody/ledger", "/tenants/nobody/invoices", "/tenants/nobody/invoices/2026-03"):
        assert operator.get(path).json()["error"]["code"] == "tenant_not_found"


def test_usage_is_grouped_by_the_key_that_submitted_and_by_keys_of_metadata(api: httpx.Client, platform: Platform, job: MeteredJob) -> None:
    with platform.engine.begin() as conn:
        named = {"api_key_id": "key_ci", "metadata": {"cost center": "nlp"}}
        conn.execute(sa.update(jobs).where(jobs.c.id == job.id).values(named))
    by = {**RANGE, "bucket_width": "month", "group_by": "api_key_id,metadata[cost center]"}
    (bucket,) = ok(api.get("/usage", params=by))["data"]
    assert [(r["api_key_id"], r["metadata"], r["amount_micros"]) for r in bucket["results"]] == [
        ("key_ci", {"cost center": "nlp"}, 10_000_000)
    ]
    (row,) = csv.DictReader(io.StringIO(api.get("/usage.csv", params=by).text))
    assert (row["api_key_id"], row["metadata[cost center]"], row["amount_micros"]) == ("key_ci", "nlp", "10000000")


def test_the_table_of_usage_has_the_sums_of_its_json(api: httpx.Client, job: MeteredJob) -> None:
    answer = api.get("/usage.csv", params={**RANGE, "bucket_width": "hour", "group_by": "job_id"})
    assert answer.headers["content-type"].startswith("text/csv")
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert {row["job_id"] for row in rows} == {job.id}
    assert sum(int(row["amount_micros"]) for row in rows) == 10_000_000
    assert rows[0]["start"] == "2026-03-09T23:00:00Z"


def test_what_runs_now_is_shown_as_not_billed(api: httpx.Client, platform: Platform, tenant: Tenant) -> None:
    made = metered_job(platform, tenant.id)
    with platform.engine.begin() as conn:
        made.started(conn, 1, datetime.now(UTC) - timedelta(hours=1))
    found = ok(api.get("/usage"))
    (running,) = found["unbilled"]
    assert (running["job_id"], running["attempt"]) == (made.id, 1)
    assert running["amount_micros"] >= 4_000_000
    assert found["total"]["amount_micros"] == 0
    assert ok(api.get(f"/fine_tuning/jobs/{made.id}/cost"))["unbilled"][0]["gpu_seconds"] >= HOUR


@pytest.mark.parametrize("path", ["fine_tuning/jobs", "fine-tuning/jobs", "jobs"])
def test_the_cost_of_a_job_is_itemised_under_every_spelling_of_its_path(api: httpx.Client, job: MeteredJob, path: str) -> None:
    found = ok(api.get(f"/{path}/{job.id}/cost"))
    assert [(e["attempt"], e["kind"], e["amount_micros"]) for e in found["entries"]] == [
        (1, "usage", 6_000_000), (2, "usage", 4_000_000), (2, "refund", -4_000_000), (3, "usage", 4_000_000),
    ]  # fmt: skip
    assert found["total"]["amount_micros"] == sum(e["amount_micros"] for e in found["entries"]) == 10_000_000
    assert [(c["attempt"], c["state"]) for c in found["refund_cases"]] == [(3, "pending")]


def test_another_tenant_sees_nothing_of_it(api_url: str, platform: Platform, job: MeteredJob) -> None:
    other, _ = tenants.create(platform, f"o{job.tenant}"[:30])
    key = tenants.create_key(platform, other.id, name="k", scopes=["admin"]).secret
    with httpx.Client(base_url=f"{api_url}/v1", headers={"authorization": f"Bearer {key}"}) as theirs:
        assert theirs.get(f"/fine_tuning/jobs/{job.id}/cost").status_code == 404
        assert ok(theirs.get("/usage", params=RANGE))["total"]["amount_micros"] == 0
        assert ok(theirs.get("/ledger/entries"))["data"] == []
        assert theirs.get("/invoices/2026-03").status_code == 404


def test_an_invoice_is_a_draft_then_issued_and_anyone_can_compute_its_digest(
    api: httpx.Client, platform: Platform, job: MeteredJob
) -> None:
    draft = ok(api.get("/invoices/2026-03"))
    assert (draft["status"], draft["total_micros"], draft["issued_at"]) == ("draft", 10_000_000, None)
    invoices.issue_due(at_time(platform, datetime(2026, 4, 1, 1, tzinfo=UTC)))
    found = ok(api.get("/invoices/2026-03"))
    assert (found["status"], found["sha256"]) == ("issued", draft["sha256"])
    document = {k: v for k, v in found.items() if k not in ("object", "status", "issued_at", "sha256", "unbilled")}
    assert invoicing.sha256(document) == found["sha256"]
    assert [i["month"] for i in ok(api.get("/invoices"))["data"]] == ["2026-03"]
    *lines, total = csv.DictReader(io.StringIO(api.get("/invoices/2026-03.csv").text))
    assert (len(lines), total["amount_usd"]) == (4, "10.000000")
    assert api.get("/invoices/2026-3").json()["error"]["code"] == "invalid_month"


def test_a_budget_is_made_changed_listed_and_removed(api: httpx.Client) -> None:
    made = ok(api.post("/budgets", json={"name": "team", "limit_micros": 5_000_000}))
    assert (made["thresholds"], made["spent_micros"], made["alerted"]) == ([50, 80, 100], 0, [])
    assert api.post("/budgets", json={"name": "team", "limit_micros": 1}).status_code == 409
    assert api.post("/budgets", json={"name": "x", "limit_micros": 1, "thresholds": [5000]}).status_code == 400
    for name in ("a\0b", "\ud800"):
        answer = api.post("/budgets", content=json.dumps({"name": name, "limit_micros": 1}), headers={"content-type": "application/json"})
        assert answer.status_code == 400
    changed = ok(api.post(f"/budgets/{made['id']}", json={"thresholds": [90]}))
    assert (changed["thresholds"], changed["limit_micros"]) == ([90], 5_000_000)
    assert [b["id"] for b in ok(api.get("/budgets"))["data"]] == [made["id"]]
    assert ok(api.delete(f"/budgets/{made['id']}"))["deleted"] is True
    assert api.get(f"/budgets/{made['id']}").status_code == 404


def test_operators_decide_on_refunds_and_correct_bills(api: httpx.Client, operator: httpx.Client, job: MeteredJob) -> None:
    case = f"{job.id}-a3"
    assert case in [c["id"] for c in ok(operator.get("/refunds", params={"limit": 100}))["data"]]
    assert api.post(f"/admin/refunds/{case}/grant", json={"note": "me"}).status_code in (401, 403), "a tenant does not decide"
    for _ in range(2):
        assert ok(operator.post(f"/refunds/{case}/grant", json={"note": "ours"}))["state"] == "granted"
    assert operator.post(f"/refunds/{case}/refuse", json={"note": "no"}).json()["error"]["code"] == "refund_decided"
    ok(operator.post("/adjustments", json={"tenant": job.tenant, "amount_micros": -1_000_000, "reason": "goodwill", "key": "t-1"}))
    assert ok(api.get("/ledger"))["balance_micros"] == 5_000_000
    assert [e["kind"] for e in ok(api.get("/ledger/entries", params={"kind": "adjustment"}))["data"]] == ["adjustment"]
    assert ok(api.get(f"/fine_tuning/jobs/{job.id}/cost"))["refund_cases"][0]["note"] == "ours"


def test_operators_see_the_books_and_whether_they_are_right(operator: httpx.Client, job: MeteredJob) -> None:
    books = ok(operator.get("/ledger"))
    assert books["total_micros"] == 0 == sum(books["accounts"].values())
    assert books["receivables"][job.tenant] == 10_000_000
    checked = ok(operator.get("/ledger/check"))
    assert (checked["total_micros"], checked["differences"]) == (0, [])
    assert checked["num_entries"] >= 4


def test_the_command_line_shows_usage_costs_invoices_and_budgets(
    api_url: str, api_key: str, platform: Platform, job: MeteredJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FT_API_URL", api_url)
    monkeypatch.setenv("FT_API_KEY", api_key)
    storage_usage.sample_due(at_time(platform, AT))

    def ft(*args: str) -> str:
        done = CliRunner().invoke(cli.build(), list(args), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.stdout

    span = ("--start", "2026-03-09", "--end", "2026-03-11")
    lines = ft("usage", *span).splitlines()
    assert lines[0].split("\t") == ["DAY", "GPU-HOURS", "REFUNDED", "STORAGE USD", "USD"]
    assert lines[1].split("\t") == ["2026-03-09", "1.0000", "0.0000", "0.000000", "4.000000"]
    assert lines[-1].split("\t")[-1] == "10.000000"
    assert json.loads(ft("usage", *span, "--group", "kind", "--json"))["group_by"] == ["kind"]
    assert ft("usage", *span, "--csv", "--by", "month").splitlines()[1].endswith("10.000000")
    assert ft("cost", job.id).splitlines()[-1].split("\t") == ["total", "", "", "", "", "10.000000"]
    assert "2026-03 (draft)" in ft("invoice", "2026-03")
    assert ft("invoice", "2026-03", "--csv").splitlines()[0].startswith("entry_id,kind")
    assert json.loads(ft("invoice", "--json"))["status"] == "draft"
    assert ft("invoices").splitlines() == ["MONTH\tISSUED\tUSD"]
    made = json.loads(ft("budgets", "create", "team", "--usd", "99.50", "--thresholds", "50,90", "--json"))
    assert (made["limit_micros"], made["thresholds"]) == (99_500_000, [50, 90])
    assert "team" in ft("budgets", "list")
    ft("budgets", "update", made["id"], "--usd", "1")
    ft("budgets", "delete", made["id"])


def test_operators_decide_and_check_on_the_machine(platform: Platform, job: MeteredJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FT_HOME", str(platform.settings.home))
    monkeypatch.setenv("FT_DATABASE_URL", platform.engine.url.render_as_string(hide_password=False))

    def admin(*args: str, code: int = 0) -> str:
        done = CliRunner().invoke(cli.build(), ["admin", *args], catch_exceptions=False)
        assert done.exit_code == code, done.output
        return done.stdout

    case = f"{job.id}-a3"
    assert case in admin("refunds", "list")
    assert json.loads(admin("refunds", "refuse", case, "--note", "too large a batch", "--json"))["state"] == "refused"
    span = ("--start", "2026-03-09", "--end", "2026-03-11")
    assert job.tenant in admin("usage", *span, "--group", "tenant,kind")
    of_tenant = json.loads(admin("usage", *span, "--tenant", job.tenant, "--json"))
    assert [(r["tenant"], r["amount_micros"]) for r in of_tenant["data"]] == [(job.tenant, of_tenant["total"]["amount_micros"])]
    assert json.loads(admin("adjust", job.tenant, "--usd=-0.5", "--reason", "goodwill", "--json"))["amount_micros"] == -500_000
    assert admin("ledger", "balance").splitlines()[0] == "ACCOUNT\tUSD"
    assert json.loads(admin("ledger", "check", "--json"))["differences"] == []
    with as_owner(platform).begin() as conn:
        conn.execute(sa.text("SET LOCAL session_replication_role = replica"))
        conn.execute(sa.text("UPDATE ledger_entries SET amount_micros = 1 WHERE id = :id"), {"id": f"{job.id}/a1/usage"})
    assert f"{job.id}/a1/usage" in admin("ledger", "check", code=1)
