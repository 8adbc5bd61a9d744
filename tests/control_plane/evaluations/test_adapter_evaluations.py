"""Evaluations of a registered adapter over HTTP: what was found, as JSON, as a page, and item by item, of that adapter alone."""

from __future__ import annotations

import uuid

import pytest
import sqlalchemy as sa

from control_plane.evaluations import service as evaluations
from control_plane.evaluations.tables import evaluations as table
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from core import layout
from core.errors import NotFound
from ft_client import FtClient
from tests.support.jobs.begun_evaluation import begin
from tests.support.jobs.evaluation_results import store_evaluation
from tests.support.jobs.registered_adapter import add_adapter


def new_adapter(platform: Platform, tenant: Tenant) -> str:
    name = f"ft:tiny-base:{tenant.id}:x:{uuid.uuid4().hex[:8]}"
    digest = platform.models.get("tiny-base").digest
    add_adapter(platform, tenant.id, name=name, stage="production", loaded=False, base_digest=digest)
    return name


@pytest.fixture
def adapter(platform: Platform, tenant: Tenant) -> str:
    return new_adapter(platform, tenant)


@pytest.fixture
def evaluation(platform: Platform, tenant: Tenant, adapter: str) -> str:
    """Id of an evaluation whose report is stored."""
    ordered = evaluations.request(platform, tenant.id, adapter)
    store_evaluation(platform, tenant.id, ordered.job_id)
    held = begin(platform, ordered.id)
    key = f"{layout.eval_prefix(tenant.id, ordered.job_id)}/report.json"
    with platform.engine.begin() as conn:
        ended = {"state": "succeeded", "outcome": "quarantined", "reasons": [], "finished_at": platform.clock(), "report_key": key}
        assert evaluations.finish(conn, held, **ended)
    return str(ordered.id)


def test_an_evaluation_is_read_as_a_jobs_own_is(ft: FtClient, adapter: str, evaluation: str) -> None:
    found = ft.adapter_evaluations.report(adapter, evaluation)
    assert (found["object"], found["id"], found["verdict"]["outcome"]) == ("adapter.evaluation.report", evaluation, "quarantined")
    assert found["verdict"]["reasons"] == ["capability_dropped", "refusals_too_few"]
    assert found["report"]["scores"]
    assert [a["code"] for a in found["advice"]] == ["forgetting", "safety_loss"]
    assert ft.adapter_evaluations.report_page(adapter, evaluation).startswith(b"<!doctype html>")
    assert found["samples_url"] == f"/v1/adapters/{found['adapter_id']}/evaluations/{evaluation}/samples"


def test_its_items_come_page_by_page_and_filtered(ft: FtClient, adapter: str, evaluation: str) -> None:
    everything = list(ft.adapter_evaluations.samples(adapter, evaluation, limit=97))
    assert len({s["id"] for s in everything}) == len(everything) > 400
    worse = list(ft.adapter_evaluations.samples(adapter, evaluation, suite="safety", only="worse"))
    assert {(s["suite"], s["change"]) for s in worse} == {("safety", "worse")}


def test_one_without_a_verdict_has_no_report_and_says_so(platform: Platform, tenant: Tenant, ft: FtClient, adapter: str) -> None:
    queued = ft.adapter_evaluations.create(adapter)["id"]
    for ask in (ft.adapter_evaluations.report, lambda a, e: list(ft.adapter_evaluations.samples(a, e))):
        with pytest.raises(NotFound, match="it is queued"):
            ask(adapter, queued)
    with platform.engine.begin() as conn:
        conn.execute(sa.update(table).where(table.c.id == queued).values(report_key=f"tenants/{tenant.id}/gone.json"))
    with pytest.raises(NotFound, match="was deleted"):
        ft.adapter_evaluations.report(adapter, queued)


def test_it_is_found_under_its_own_adapter_and_tenant_alone(
    platform: Platform, tenant: Tenant, ft: FtClient, api_url: str, adapter: str, evaluation: str
) -> None:
    other = new_adapter(platform, tenant)
    assert ft.adapter_evaluations.wait(adapter, evaluation)["id"] == evaluation
    for ask in (ft.adapter_evaluations.report, ft.adapter_evaluations.report_page, ft.adapter_evaluations.wait):
        with pytest.raises(NotFound, match="no evaluation"):
            ask(other, evaluation)
    _, key = tenants.create(platform, "other", tier="standard")
    with FtClient(base_url=api_url, api_key=key.secret) as stranger, pytest.raises(NotFound):
        stranger.adapter_evaluations.report(adapter, evaluation)
