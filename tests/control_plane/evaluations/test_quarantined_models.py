"""A model that did not pass its gate, as the command line shows it, and its release through every surface by those who may release it."""

from __future__ import annotations

import getpass
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa

from control_plane.adapters import promotions
from control_plane.adapters import service as adapters
from control_plane.adapters.tables import Adapter
from control_plane.api.app import create_app
from control_plane.jobs import service as jobs
from control_plane.platform.context import Platform
from control_plane.tenants import members, operators
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from control_plane.tenants.tables import audit_log
from core.errors import Conflict
from ft_client import FtClient
from tests.control_plane.console.conftest import Visitor
from tests.control_plane.evaluations.test_releases import REASON, UNSAFE, quarantined
from tests.support.jobs.evaluated_jobs import FAILED, Evaluate
from tests.support.platform.database_roles import as_operator
from tests.support.processes.ft_command import run_ft


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """The platform as its users reach it: a URL with keys, and its home."""

    url: str
    tenant: str
    key: str
    """Of an admin of the tenant."""
    operator_key: str
    home: Mapping[str, str]
    """Variables that name the platform on its own machine."""
    cwd: Path

    def post(self, path: str, key: str) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json={"reason": REASON}, headers={"authorization": f"Bearer {key}"}, timeout=60)

    def ft(self, *args: str) -> str:
        """Run ``ft`` as the tenant's admin; what it shows."""
        return self._run(*args, env={"FT_API_URL": self.url, "FT_API_KEY": self.key, "FT_HOME": str(self.cwd / "nowhere")})

    def ft_admin(self, *args: str) -> str:
        return self._run("admin", *args, env=self.home)

    def _run(self, *args: str, env: Mapping[str, str]) -> str:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("FT_")}
        done = run_ft(*args, env={**clean, "XDG_CONFIG_HOME": str(self.cwd / "config"), **env}, cwd=self.cwd)
        return done.stdout + done.stderr


def in_python(site: Site, made: Adapter) -> str:
    with FtClient(base_url=site.url, api_key=site.key) as client:
        try:
            return str(client.adapters.release(made.name, reason=REASON)["stage"])
        except Conflict as refused:
            return refused.message


def in_api(site: Site, made: Adapter) -> str:
    return site.post(f"/v1/adapters/{made.id}/release", site.key).text


def in_api_of_operators(site: Site, made: Adapter) -> str:
    return site.post(f"/v1/admin/tenants/{site.tenant}/adapters/{made.name}/release", site.operator_key).text


def in_command(site: Site, made: Adapter) -> str:
    return site.ft("adapters", "release", made.name, "--reason", REASON)


def in_command_of_operators(site: Site, made: Adapter) -> str:
    return site.ft_admin("adapters", "release", site.tenant, made.name, "--reason", REASON)


def in_console(site: Site, made: Adapter) -> str:
    with httpx.Client(base_url=site.url, headers={"accept": "text/html"}, timeout=60) as http:
        http.post("/console/sign-in", data={"key": site.key})
        answer = Visitor(http).post(f"/console/models/{made.id}/release", reason=REASON)
        return str(answer.headers.get("location", answer.text))


Surface = Callable[[Site, Adapter], str]
"""Releases a model; returns what its user then sees."""
OF_TENANT: dict[str, Surface] = {"Python": in_python, "API": in_api, "ft adapters": in_command, "console": in_console}
OF_OPERATOR: dict[str, Surface] = {"API of operators": in_api_of_operators, "ft admin adapters": in_command_of_operators}


@pytest.fixture
def site(operated: Platform, tenant: Tenant, api_key: str, serve: Callable[..., str], tmp_path: Path) -> Site:
    settings = operated.settings
    home = {"FT_HOME": settings.home, "FT_DATABASE_URL": settings.database_url, "FT_OBJECT_STORE": settings.object_store}
    return Site(
        url=serve(create_app(operated)),
        tenant=tenant.id,
        key=api_key,
        operator_key=operators.create(as_operator(operated), "ops").secret,
        home={name: str(value) for name, value in {**home, "FT_INFERENCE_URLS": "http://127.0.0.1:9"}.items()},
        cwd=tmp_path,
    )


def audited(platform: Platform, made: Adapter) -> Iterator[tuple[str, str]]:
    """Who gave a reason for the model's release, with the reason."""
    with platform.engine.connect() as conn:
        rows = conn.execute(sa.select(audit_log.c.actor_id, audit_log.c.changes).where(audit_log.c.object_id == made.id)).all()
    return ((actor, changes["release_reason"][-1]) for actor, changes in rows if "release_reason" in changes)


def key_id(platform: Platform, secret: str) -> str:
    return tenants.authenticate(platform, secret).id


def test_commands_show_a_job_as_trained_but_not_approved_with_the_failed_rule(
    operated: Platform, tenant: Tenant, evaluated_job: Evaluate, site: Site
) -> None:
    made = quarantined(operated, tenant, evaluated_job(FAILED))
    (listed,) = (line for line in site.ft("jobs").splitlines() if made.job_id in line)
    assert "trained, not approved" in listed and "failed" not in listed.replace("gate_failed", "")
    shown = " ".join(site.ft("job", made.job_id).split())
    assert "status: trained, not approved" in shown and "error code: gate_failed" in shown
    assert "its answers are not better than the base model's (task_not_better: 0.1, needed 0.5)" in shown
    in_console(site, made)
    assert "status: succeeded" in " ".join(site.ft("job", made.job_id).split())


@pytest.mark.parametrize("surface", [*OF_TENANT.items(), *OF_OPERATOR.items()], ids=lambda named: named[0])
def test_released_model_is_in_production_and_its_reason_in_the_audit_log(
    operated: Platform, tenant: Tenant, evaluated_job: Evaluate, site: Site, surface: tuple[str, Surface]
) -> None:
    name, release = surface
    made = quarantined(operated, tenant, evaluated_job(*((FAILED, UNSAFE) if name in OF_OPERATOR else (FAILED,))))
    shown = release(site, made)
    assert "production" in shown or shown == f"/console/models/{made.id}?notice=model-released"
    released = adapters.get_adapter(operated, tenant.id, made.id)
    assert (released.stage, released.desired, released.release_reason) == ("production", "loaded", REASON)
    assert promotions.resolve_model(operated, tenant.id, made.name).model == made.name
    assert jobs.get(operated, tenant.id, made.job_id).job.state == "succeeded"
    operator = f"cli:{getpass.getuser()}" if name == "ft admin adapters" else operators.authenticate(operated, site.operator_key).id
    who = operator if name in OF_OPERATOR else key_id(operated, site.key)
    assert released.released_by == (f"operator:{who}" if name in OF_OPERATOR else who)
    assert list(audited(operated, made)) == [(who, REASON)]


@pytest.mark.parametrize("surface", OF_TENANT.values(), ids=OF_TENANT.keys())
def test_tenant_cannot_release_a_model_that_failed_the_safety_rule(
    operated: Platform, tenant: Tenant, evaluated_job: Evaluate, site: Site, surface: Surface
) -> None:
    made = quarantined(operated, tenant, evaluated_job(FAILED, UNSAFE))
    assert "only an operator may release it" in surface(site, made)
    assert adapters.get_adapter(operated, tenant.id, made.id).stage == "quarantined"


@pytest.mark.parametrize("role", ["viewer", "member"])
def test_console_releases_no_model_for_a_viewer_or_a_member(
    operated: Platform, tenant: Tenant, evaluated_job: Evaluate, site: Site, role: str
) -> None:
    made = quarantined(operated, tenant, evaluated_job(FAILED))
    person = members.add(operated, tenant.id, email=f"{role}@example.com", role=role)
    scope = {"viewer": "read", "member": "write"}[role]
    key = tenants.create_key(operated, tenant.id, name=role, scopes=[scope], member_id=person.id).secret
    with httpx.Client(base_url=site.url, headers={"accept": "text/html"}, timeout=60) as http:
        http.post("/console/sign-in", data={"key": key})
        answer = Visitor(http).post(f"/console/models/{made.id}/release", reason=REASON)
    assert (answer.status_code, "insufficient_scope" in answer.text) == (403, True)
    assert adapters.get_adapter(operated, tenant.id, made.id).stage == "quarantined"
