"""Updates of base models and evaluations of adapters from the command line: what is in the way is said, with the command that helps."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from control_plane.evaluations import service as evaluations
from control_plane.evaluations.tables import evaluations as table
from control_plane.models import base_updates
from control_plane.models import catalogue as base_models
from control_plane.models.catalogue import Given, add_local
from control_plane.platform.context import Platform
from control_plane.platform.settings import load
from control_plane.tenants.rules import Tenant
from core import layout
from tests.control_plane.models.test_base_updates import variant
from tests.ft_client.cli.conftest import Done, Ft
from tests.support.jobs.begun_evaluation import begin
from tests.support.jobs.evaluation_results import store_evaluation
from tests.support.jobs.registered_adapter import add_adapter
from tests.support.models.tiny_model import build_tiny_model

MODEL = "acme/from-the-shell"


@pytest.fixture
def admin(offline: Ft, platform: Platform) -> Ft:
    url = platform.engine.url.render_as_string(hide_password=False)

    def run(*args: str | Path, **env: str) -> Done:
        return offline("admin", "models", *args, FT_DATABASE_URL=url, **env)

    return run


def test_an_operator_updates_a_base_under_an_adapter_in_production(
    admin: Ft, ft_env: dict[str, str], platform: Platform, tenant: Tenant, tmp_path: Path
) -> None:
    old = build_tiny_model(tmp_path / "old")
    new = variant(tmp_path / "new", old)
    added = add_local(load(ft_env), MODEL, old, Given(license="MIT"))
    name = f"ft:{MODEL}:{tenant.id}:x:{uuid.uuid4().hex[:8]}"
    add_adapter(platform, tenant.id, name=name, stage="production", loaded=False, base_model=MODEL, base_digest=added.digest)
    blocked = admin("update", MODEL, "--path", new)
    assert blocked.code == 1
    assert f"ft admin models evaluate {MODEL}" in blocked.err
    assert "base_update_blocked" in blocked.err
    assert name in blocked.out
    assert "running" in blocked.out
    with platform.engine.connect() as conn:
        (started,) = conn.execute(sa.select(table.c.id).where(table.c.base_model == MODEL)).scalars()
    assert admin("update", MODEL, "--apply", "--json").code == 1
    (ordered,) = admin("evaluate", MODEL, "--json").json["adapters"]
    assert (ordered["state"], ordered["evaluation_id"]) == ("running", started), "the update started it, once"
    pass_all(platform, started)
    done = admin("update", MODEL, "--apply")
    assert done.code == 0, done.err
    assert "ft down && ft up" in done.err
    catalogue = base_models.catalogue_of(load(ft_env))
    assert catalogue.get(MODEL).directory == new
    assert catalogue.get_pinned(MODEL, added.digest).directory == old


def test_the_present_bytes_do_not_apply_what_is_staged(admin: Ft, ft_env: dict[str, str], platform: Platform, tmp_path: Path) -> None:
    model, old = f"acme/{uuid.uuid4().hex[:8]}", build_tiny_model(tmp_path / "old")
    new = variant(tmp_path / "new", old)
    settings = load(ft_env)
    added = add_local(settings, model, old, Given(license="MIT"))
    base_updates.stage_local(replace(platform, settings=settings, models=base_models.catalogue_of(settings)), model, new)
    refused = admin("update", model, "--path", old)
    assert (refused.code, "update_staged" in refused.err) == (1, True)
    assert base_models.catalogue_of(settings).get(model).digest == added.digest
    dropped = admin("update", model, "--abandon", "--json")
    assert (dropped.json["digest"], dropped.json["staged"], dropped.json["blocked"]) == (added.digest, None, False)
    assert "no longer has a staged version" in dropped.err


def pass_all(platform: Platform, evaluation_id: str) -> None:
    held = begin(platform, evaluation_id)
    with platform.engine.begin() as conn:
        assert evaluations.finish(conn, held, state="succeeded", outcome="passed", reasons=[], finished_at=platform.clock())


def test_a_tenant_has_an_adapter_judged_again(ft: Ft, platform: Platform, tenant: Tenant, tmp_path: Path) -> None:
    digest = platform.models.get("tiny-base").digest
    name = f"ft:tiny-base:{tenant.id}:x:{uuid.uuid4().hex[:8]}"
    add_adapter(platform, tenant.id, name=name, stage="production", loaded=False, base_digest=digest)
    first = ft("adapters", "evaluate", name, "--json").json
    assert (first["state"], first["kind"], first["base_digest"]) == ("queued", "manual", digest)
    pass_all(platform, first["id"])
    own = ft("adapters", "evaluate", name, "--config", json.dumps({"max_items": 5}), "--json").json
    assert own["eval_config"] == {"max_items": 5}
    missing = ft("adapters", "evaluations", name, own["id"])
    assert (missing.code, "it is queued" in missing.err) == (1, True), missing
    assert ft("adapters", "evaluations", name, "--samples").code != 0
    key = f"{layout.eval_prefix(tenant.id, first['job_id'])}/report.json"
    store_evaluation(platform, tenant.id, first["job_id"])
    with platform.engine.begin() as conn:
        conn.execute(sa.update(table).where(table.c.id == own["id"]).values(report_key=key))
    shown = ft("adapters", "evaluations", name, own["id"], "--html", tmp_path / "page.html")
    assert (shown.code, (tmp_path / "page.html").read_text()[:15]) == (1, "<!doctype html>")
    assert ft("adapters", "evaluations", name, own["id"]).out.startswith("QUARANTINED\n")
    assert len(ft("adapters", "evaluations", name, own["id"], "--samples", "--json").out.splitlines()) > 400
    listed = ft("adapters", "evaluations", name).out.splitlines()
    assert [first["id"] in line and "passed" in line for line in listed] == [False, False, True]
    assert name in ft("adapters").out, "the group alone still lists"
