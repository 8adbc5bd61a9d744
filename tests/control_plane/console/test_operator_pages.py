"""Operators' pages: what they show and change, who opens them, and that they hold nothing of a tenant's data."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import httpx
import pytest
import sqlalchemy as sa

from control_plane.api.app import create_app
from control_plane.billing import ledger
from control_plane.capacity import nodes
from control_plane.jobs.transitions import transition
from control_plane.notifications.tables import deliveries
from control_plane.platform.context import Actor, Platform
from control_plane.platform.job_states import JobState
from control_plane.tenants import audit_log, operators
from control_plane.tenants import service as tenants
from tests.support.console.tenant_pages import HOSTILE
from tests.support.platform.ledger_entries import enter
from tests.support.platform.operator_world import OPERATOR_PAGES, OperatorWorld, make_operator_world, pools_file

HERE = Actor(kind="operator", id="cli:test")


@pytest.fixture(scope="module")
def write_rows(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Writes rows that no operators' page may show."""

    def write() -> Path:
        path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
        chats = ('{"messages": [{"role": "user", "content": "secret question %d"}, {"role": "assistant", "content": "secret answer %d"}]}',)
        path.write_text("".join(chat % (i, i) + "\n" for i in range(120) for chat in chats))
        return path

    return write


@pytest.fixture(scope="module")
def world(new_platform: Callable[..., Platform], write_rows: Callable[[], Path], tmp_path_factory: pytest.TempPathFactory) -> OperatorWorld:
    file = pools_file(tmp_path_factory.mktemp("pools"))
    return make_operator_world(new_platform(pools=str(file), webhook_allow="127.0.0.0/8"), write_rows, text=HOSTILE)


@pytest.fixture(scope="module")
def platform(world: OperatorWorld) -> Platform:
    return world.platform


@pytest.fixture(scope="module")
def api_url(world: OperatorWorld, serve: Callable[..., str]) -> str:
    return serve(create_app(world.platform))


class Visitor:
    """An operator with a session."""

    def __init__(self, url: str, key: str) -> None:
        self.http = httpx.Client(base_url=url, headers={"accept": "text/html"}, timeout=60)
        assert self.http.post("/console/sign-in", data={"key": key}).headers["location"] == "/console/operator"

    def get(self, path: str) -> str:
        answer = self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.text

    def post(self, path: str, **fields: str) -> httpx.Response:
        token = re.search(r'name="csrf-token" content="([0-9a-f]{64})"', self.get("/console/operator"))
        assert token is not None
        return self.http.post(path, data={"csrf_token": token[1], **fields})


@pytest.fixture(scope="module")
def operator(world: OperatorWorld, api_url: str) -> Iterator[Visitor]:
    made = Visitor(api_url, operators.create(world.platform.acting_as(HERE), "Grace Hopper").secret)
    yield made
    made.http.close()


@pytest.mark.parametrize("path", OPERATOR_PAGES.values(), ids=OPERATOR_PAGES.keys())
def test_pages_escape_what_tenants_write_and_show_none_of_their_rows(operator: Visitor, path: str) -> None:
    page = operator.get(path)
    assert HOSTILE not in page
    assert "<img src=x" not in page
    assert "secret" not in page
    assert "Grace Hopper" in page
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=", page)


@pytest.mark.parametrize("path", OPERATOR_PAGES.values(), ids=OPERATOR_PAGES.keys())
def test_tenants_and_strangers_open_no_operators_page(world: OperatorWorld, api_url: str, path: str) -> None:
    stranger = httpx.get(f"{api_url}{path}", timeout=60)
    assert stranger.headers["location"].startswith("/console/sign-in?next=%2Fconsole%2Foperator")
    with httpx.Client(base_url=api_url, timeout=60) as tenant:
        tenant.post("/console/sign-in", data={"key": world.queue.key(world.acme)})
        refused = tenant.get(path)
        assert (refused.status_code, "operator_key_required" in refused.text) == (403, True)
        assert tenant.get("/console").status_code == 200, "the tenant's session stays"


def test_an_operator_opens_no_tenants_page_and_keeps_the_session(operator: Visitor) -> None:
    refused = operator.http.get("/console/jobs")
    assert (refused.status_code, "tenant_key_required" in refused.text) == (403, True)
    assert operator.http.get("/console/sign-in?next=/console/jobs").headers["location"] == "/console/operator"
    operator.get("/console/operator")


def test_the_overview_says_which_alerts_hold_and_which_starts_were_missed(world: OperatorWorld, operator: Visitor) -> None:
    page = operator.get("/console/operator")
    assert "FtPremiumWaits" in page
    assert "Premium jobs that wait for longer than the 5 minutes that were promised to them: 1" in page
    assert "docs/operations/runbook/FtPremiumWaits.md" in page
    assert "FtApiSlow" in page.partition("rules need Prometheus")[2]
    missed = page.partition('id="missed"')[2].partition("</section>")[0]
    assert missed.count("<tr><td") == 2, "one waits, one started late"
    assert "Waits" in missed
    assert "Maintenance of pool spot" in page
    assert "small-half" in page


def test_the_queue_draws_running_jobs_reservations_and_backfill_with_a_table_beside(world: OperatorWorld, operator: Visitor) -> None:
    page = operator.get("/console/operator/queue")
    assert page.count('role="img"') == 2, "a timeline for each pool"
    running, waiting = page.partition('id="running"')[2], page.partition('id="waiting"')[2]
    with world.platform.engine.connect() as conn:
        held = conn.exec_driver_sql("SELECT job_id, backfill FROM reservations WHERE released_at IS NULL").all()
        waits = conn.exec_driver_sql("SELECT id FROM jobs WHERE state = 'queued'").scalars().all()
    assert {filled for _, filled in held} == {True, False}
    assert all(job in running for job, _ in held)
    assert all(job in waiting for job in waits)
    drawn = page.partition('role="img"')[2].partition("</svg>")[0]
    assert all(f"{job} of " in drawn for job, _ in held), "each bar has its words"
    assert ", backfill," in drawn
    assert 'class="premium reserved"' in drawn
    hours = re.findall(r'data-clock="(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)"', drawn)
    assert hours, "in the reader's time zone"
    assert datetime.fromisoformat(max(hours)) < world.platform.clock() + timedelta(hours=18), "they end soon after the last job"


LIVE = [OPERATOR_PAGES[name] for name in ("operators' overview", "operators' queue", "nodes", "failed deliveries")]


@pytest.mark.parametrize("path", LIVE)
def test_an_open_page_is_rendered_again_when_something_has_changed_or_a_minute_has_passed(
    world: OperatorWorld, operator: Visitor, path: str
) -> None:
    def again(mark: str) -> tuple[int, str]:
        answer = operator.http.get(path, headers={"if-none-match": mark})
        assert bool(answer.text) == (answer.status_code == 200)
        found = re.search(r'name="live-mark" content="([^"]+)"', answer.text)
        return answer.status_code, unescape(found[1]) if found else mark

    assert 'data-live="' in operator.get(path)
    _, mark = again("")
    assert again(mark) == (304, mark)
    nodes.drain(world.platform, "small-1", reason="loud fan", by="cli:test")
    status, drained = again(mark)
    assert (status, drained != mark) == (200, True)
    nodes.undrain(world.platform, "small-1")
    with world.platform.engine.begin() as conn:
        conn.execute(sa.update(deliveries).where(deliveries.c.id == world.delivery).values(state="pending"))
    status, sent = again(drained)
    assert (status, sent != drained) == (200, True)
    with world.platform.engine.begin() as conn:
        conn.execute(sa.update(deliveries).where(deliveries.c.id == world.delivery).values(state="dead"))
    _, mark = again(sent)
    world.queue.now[0] += timedelta(minutes=1)
    assert again(mark)[0] == 200, "ages and expected ends have moved"


def test_jobs_lead_to_their_runs_in_dagster(world: OperatorWorld, operator: Visitor) -> None:
    links = re.findall(r'href="(/console/operator/dagster\?[^"]+)"', operator.get("/console/operator/queue"))
    to = operator.http.get(links[0]).headers["location"]
    assert re.fullmatch(r"http://127\.0\.0\.1:3000/runs\?q\[0\]=tag:dagster/ft_job=ftjob-[0-9a-f]+", unquote(to))
    assert operator.http.get("/console/operator/dagster?to=https://evil.example").headers["location"] == "http://127.0.0.1:3000/"


def test_a_node_is_drained_and_taken_back_by_the_operator_who_signed_in(world: OperatorWorld, operator: Visitor) -> None:
    assert operator.http.post("/console/operator/nodes/small-2/drain", data={"reason": "x"}).status_code == 403, "without the token"
    answer = operator.post("/console/operator/nodes/small-2/drain", reason="loud fan")
    assert answer.headers["location"] == "/console/operator/nodes?notice=drained"
    assert "loud fan" in operator.get("/console/operator/nodes")
    drained = nodes.get(world.platform, "small-2")
    assert drained.drained_by is not None
    assert drained.drained_by.startswith("opk_")
    assert operator.post("/console/operator/nodes/small-2/undrain").status_code == 303
    assert nodes.get(world.platform, "small-2").drained_at is None
    assert operator.post("/console/operator/nodes/small-9/undrain").status_code == 404
    assert operator.post("/console/operator/nodes/small-2/drain", reason="  ").status_code == 400


def test_a_dead_letter_is_released_or_closed_on_the_overview(world: OperatorWorld, operator: Visitor) -> None:
    job = world.queue.job(world.beta)
    error = {"code": "dead_letter", "message": f"3 attempts ended as node_lost{HOSTILE}", "param": None}

    def give_up() -> None:
        for state in (JobState.PROVISIONING, JobState.DEAD_LETTER):
            with world.platform.engine.begin() as conn:
                transition(conn, job, state, message="", error=error)

    give_up()
    page = operator.get("/console/operator")
    assert job in page and "3 attempts ended as node_lost" in page and HOSTILE not in page
    assert operator.post(f"/console/operator/dead-letters/{job}/release").headers["location"] == "/console/operator?notice=released"
    assert world.queue.row(job).state == "queued"
    give_up()
    assert operator.post(f"/console/operator/dead-letters/{job}/close").headers["location"] == "/console/operator?notice=closed"
    assert world.queue.row(job).state == "failed"
    assert job not in operator.get("/console/operator")


def test_a_tenant_is_suspended_with_a_reason_and_resumed(world: OperatorWorld, operator: Visitor) -> None:
    path = "/console/operator/tenants/beta"
    assert operator.post(f"{path}/suspend", reason="card declined").status_code == 303
    assert tenants.get(world.platform, "beta").suspended_reason == "card declined"
    assert "card declined" in operator.get(path)
    line = audit_log.read(world.platform, "beta", audit_log.Wanted(object_type="tenant")).items[0]
    assert (line.actor_kind, line.actor_name) == ("operator", "Grace Hopper")
    assert operator.post(f"{path}/resume").status_code == 303
    assert tenants.get(world.platform, "beta").suspended_at is None
    assert operator.http.get("/console/operator/tenants/nobody").status_code == 404


def test_tenants_have_their_limits_and_spending(operator: Visitor) -> None:
    page = operator.get("/console/operator/tenants")
    acme = page[page.index("/console/operator/tenants/acme") :].partition("</tr>")[0]
    assert "$812.00" in acme
    assert "Premium" in acme
    assert "6,000" in acme
    assert "$908.00 billed" in page
    assert "$812.00" in operator.get("/console/operator/tenants/acme")


def test_a_failed_delivery_is_sent_again_without_showing_what_it_says(world: OperatorWorld, operator: Visitor) -> None:
    page = operator.get("/console/operator/deliveries")
    assert "the receiver answered 503" in page
    action = f"/console/operator/deliveries/{world.acme}/{world.endpoint}/{world.delivery}/replay"
    assert action in page
    assert operator.post(action.replace(world.acme, world.beta)).status_code == 404, "of another tenant"
    assert operator.post(action).status_code == 303
    with world.platform.engine.connect() as conn:
        state = conn.execute(sa.select(deliveries.c.state).where(deliveries.c.id == world.delivery)).scalar_one()
    assert state == "pending"
    assert "Every event arrived" in operator.get("/console/operator/deliveries")


def test_the_ledger_is_checked_and_differences_are_named(world: OperatorWorld, operator: Visitor) -> None:
    assert "$812.00" in operator.get("/console/operator/ledger")
    found = operator.post("/console/operator/ledger/check")
    assert found.status_code == 200
    with world.platform.engine.begin() as conn:
        enter(conn, world.beta, "ftjob-odd", amount_micros=5_000_000, detail={"prices_of": "2026-01-01"})
    found = operator.post("/console/operator/ledger/check")
    assert "ftjob-odd/a1/usage" in found.text
    assert "No reports tell of what it bills" in found.text
    assert ledger.trial_balance(world.platform).total == 0


def test_signing_out_ends_the_operators_session(world: OperatorWorld, api_url: str) -> None:
    key = operators.create(world.platform.acting_as(HERE), "Alan").secret
    one, two = Visitor(api_url, key), Visitor(api_url, key)
    assert one.post("/console/operator/sign-out").headers["location"] == "/console/sign-in"
    assert [v.http.get("/console/operator").status_code for v in (one, two)] == [303, 200]
    two.post("/console/operator/sign-out-everywhere")
    assert two.http.get("/console/operator").status_code == 303
    for visitor in (one, two):
        visitor.http.close()


def test_pages_of_a_new_installation_suggest_what_to_do(new_platform: Callable[..., Platform], serve: Callable[..., str]) -> None:
    fresh = new_platform()
    visitor = Visitor(serve(create_app(fresh)), operators.create(fresh.acting_as(HERE), "First").secret)
    said = {path: visitor.get(path) for name, path in OPERATOR_PAGES.items() if "tenant" not in name or name == "tenants"}
    assert "ft admin tenants create" in said["/console/operator/tenants"]
    assert "All starts were in time" in said["/console/operator"]
    assert "No job is waiting" in said["/console/operator/queue"]
    assert "Every event arrived" in said["/console/operator/deliveries"]
    assert "No entry yet" in said["/console/operator/ledger"]
    assert "small adapters" in said["/console/operator/plan"]
    visitor.http.close()
