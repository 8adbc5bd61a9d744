"""Every page with everything on it: hostile text is escaped, tenants see their own, changes do what the API does."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi.routing import iter_route_contexts

from control_plane.adapters import service as adapters
from control_plane.api.app import create_app
from control_plane.console import static_files
from control_plane.jobs import service as jobs
from control_plane.platform.job_states import JobState
from control_plane.tenants import members
from control_plane.tenants import service as tenants
from tests.control_plane.console.conftest import Visitor
from tests.support.console.tenant_pages import HOSTILE, PAGES
from tests.support.platform.console_world import World

OPEN = {"/console/sign-in", "/console/static/{version}/{name}", "/console/oidc/start", "/console/oidc/callback", "/console/oidc/choose"}


def test_every_page_and_every_change_needs_a_session(world: World, api_url: str) -> None:
    found = {}
    for route in iter_route_contexts(create_app(world.platform).routes):
        if str(route.path).startswith("/console") and route.path not in OPEN:
            path = re.sub(r"\{\w+(:path)?\}", "x", str(route.path))
            for method in route.methods or ():
                answer = httpx.request(method, f"{api_url}{path}", timeout=60)
                found[f"{method} {route.path}"] = (answer.status_code, answer.headers.get("location", "")[:16])
    assert len(found) > 25
    assert {route: answer for route, answer in found.items() if answer != (303, "/console/sign-in")} == {}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_escapes_what_tenants_wrote(visitor: Visitor, world: World, name: str) -> None:
    answer = visitor.get(PAGES[name](world))
    assert answer.status_code == 200, answer.text
    assert "<script>alert" not in answer.text and "<img src=x" not in answer.text
    assert "onerror=alert(1)>" not in answer.text.replace("&gt;", "")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=", answer.text), "the page's own policy would block it"
    assert "'49" not in answer.text and "&#39;49" not in answer.text, "a template was evaluated"


def test_the_hostile_text_is_shown_where_it_was_given(visitor: Visitor, world: World) -> None:
    """Otherwise the test above would pass on pages that show nothing."""
    given = (
        "start",
        "datasets",
        "dataset as trained",
        "refused file",
        "running job",
        "failed job",
        "new job",
        "audit log",
        "budgets",
        "invoice",
        "model in production",
    )
    assert [name for name in given if "&lt;script&gt;alert(1)" not in visitor.get(PAGES[name](world)).text] == []


@pytest.mark.parametrize("name", PAGES)
def test_another_tenant_sees_nothing_of_it(other: Visitor, world: World, name: str) -> None:
    path, ids = PAGES[name](world), {value for field, value in vars(world).items() if field not in ("platform", "key", "tenant")}
    answer = other.get(path)
    assert answer.status_code == (404 if any(id_ in path for id_ in ids) else 200), answer.text
    assert [value for value in {*ids, world.tenant, "alert(1)"} if value in answer.text and value not in path] == []


def test_another_tenant_changes_nothing_of_it(other: Visitor, world: World) -> None:
    for path in (
        f"/console/jobs/{world.running}/cancel", f"/console/jobs/{world.running}/pause", f"/console/models/{world.draft}/promote",
        f"/console/models/{world.production}/rollback", f"/console/models/{world.production}/deprecate",
        f"/console/models/{world.pending}/approve", f"/console/datasets/{world.dataset}/approve", "/console/keys/key_x/revoke",
        f"/console/members/{world.owner}/remove", f"/console/models/{world.production}/exports",
        f"/console/models/routes/{world.route}/delete", f"/console/keys/{world.key_id}/rotate",
    ):  # fmt: skip
        assert other.post(path).status_code == 404, path
    assert jobs.get(world.platform, world.tenant, world.running).job.state is JobState.RUNNING


def test_a_viewer_is_offered_no_changes_and_refused_those_it_sends(visit: Callable[[str], Visitor], world: World) -> None:
    person = members.add(world.platform, world.tenant, email="view@example.com", role="viewer")
    viewer = visit(tenants.create_key(world.platform, world.tenant, name="v", scopes=["read"], member_id=person.id).secret)
    page = viewer.get(f"/console/jobs/{world.running}").text
    assert "viewer" in page
    assert "Cancel job" not in page
    for path in (f"/console/jobs/{world.running}/cancel", f"/console/models/{world.draft}/promote", "/console/keys"):
        answer = viewer.post(path, name="x")
        assert (answer.status_code, "insufficient_scope" in answer.text) == (403, True), path
    assert viewer.get("/console/keys").status_code == 403


def test_a_model_shows_its_gain_over_the_base(visitor: Visitor, world: World) -> None:
    page = visitor.get(f"/console/models/{world.draft}").text
    assert "Exact match" in page
    assert re.findall(r'class="value[^"]*">([^<]+)</span>', page)[:2] == ["83.0 %", "+31.0"]
    assert "base 52.0 %" in page


def test_each_box_of_the_lineage_leads_to_its_page(visitor: Visitor, world: World) -> None:
    page = visitor.get(f"/console/models/{world.production}").text
    wide, tall = (set(re.findall(r'<a class="box[^"]*" href="([^"]+)"', one)) for one in re.findall(r'<svg class="lineage.*?</svg>', page))
    (table,) = re.findall(r"<details><summary>As a table.*?</details>", page, re.DOTALL)
    assert wide == tall == set(re.findall(r'href="([^"]+)"', table)), "the pictures and the table say the same"
    assert {f"/console/models/{world.production}", f"/console/models/routes/{world.route}", f"/console/datasets/{world.dataset}"} < wide
    assert len(wide) == 8
    for path in wide:
        assert visitor.http.get(path, follow_redirects=True).status_code == 200, path


def test_the_decision_about_a_model_is_taken_on_the_page_of_its_evaluation(visitor: Visitor, world: World) -> None:
    job = adapters.get_adapter(world.platform, world.tenant, world.pending).job_id
    assert f'action="/console/models/{world.pending}/approve"' in visitor.get(f"/console/jobs/{job}/evaluation").text
    assert "/approve" not in visitor.get(f"/console/jobs/{world.evaluated}/evaluation").text


def test_an_adapter_is_approved_with_a_note(visitor: Visitor, world: World) -> None:
    visitor.post(f"/console/models/{world.pending}/approve", note=f"read it {HOSTILE}")
    found = adapters.get_adapter(world.platform, world.tenant, world.pending)
    assert (found.approval, found.approval_note) == ("approved", f"read it {HOSTILE}")
    page = visitor.get(f"/console/models/{world.pending}").text
    assert "read it &lt;script&gt;" in page
    assert "<script>alert" not in page


def test_values_in_the_audit_log_are_json_and_new_fields_have_no_old_value(visitor: Visitor) -> None:
    log = visitor.get("/console/audit?type=model_route").text
    assert "&#34;weight&#34;: 90" in log and "&#39;weight&#39;" not in log
    assert "None" not in log and " → " not in log, "the route was created"


def test_a_key_is_shown_once_and_revoked(visitor: Visitor, world: World, visit: Callable[[str], Visitor]) -> None:
    made = visitor.post("/console/keys", name=f"ci {HOSTILE}"[:100], scope="read", days="30")
    secret = re.findall(r"<pre>(ft-sk-[\w-]+)</pre>", made.text)[0]
    assert "<script>alert" not in made.text
    assert secret not in visitor.get("/console/keys").text
    reader = visit(secret)
    key = tenants.authenticate(world.platform, secret)
    assert (sorted(key.scopes), key.expires_at is not None) == (["read"], True)
    visitor.post(f"/console/keys/{key.key_id}/revoke")
    assert reader.get("/console").status_code == 303, "its sessions end with it"


def test_a_member_is_added_given_a_role_and_removed(visitor: Visitor, world: World) -> None:
    visitor.post("/console/members", email="new@example.com", role="viewer")
    (made,) = [m for m in members.list_members(world.platform, world.tenant).items if m.email == "new@example.com"]
    assert "new@example.com" in visitor.get("/console/members").text
    visitor.post(f"/console/members/{made.id}/role", role="admin")
    assert members.get(world.platform, world.tenant, made.id).role == "admin"
    answer = visitor.post(f"/console/members/{made.id}/remove")
    assert "their keys were revoked" in visitor.get(answer.headers["location"]).text
    assert "new@example.com" not in visitor.get("/console/members").text
    refused = visitor.post(f"/console/members/{world.owner}/remove")
    assert (refused.status_code, "last owner" in refused.text) == (409, True)
    log = visitor.get("/console/audit?type=member").text
    assert all(action in log for action in ("member.created", "member.updated"))
    assert "job.created" not in log


def test_a_webhook_shows_its_secret_once_and_is_switched_off_and_deleted(visitor: Visitor, other: Visitor) -> None:
    given = {"name": f"hook {HOSTILE}"[:90], "url": "http://127.0.0.1:9/hooks", "event_types": "fine_tuning.job.succeeded"}
    made = visitor.post("/console/webhooks", **given)
    assert re.search(r"<pre>whsec_[\w+/=-]+</pre>", made.text)
    assert "<script>alert" not in made.text
    page = visitor.get("/console/webhooks").text
    assert "whsec_" not in page
    path = re.findall(r'href="(/console/webhooks/we_\w+)"', page)[0]
    assert other.get(path).status_code == 404
    assert other.post(f"{path}/delete").status_code == 404
    visitor.post(f"{path}/state", state="disabled")
    assert ">Enable</button>" in visitor.get(path).text
    visitor.post(f"{path}/delete")
    assert visitor.get(path).status_code == 404


def test_an_unknown_page_says_so_as_a_page(visitor: Visitor) -> None:
    answer = visitor.get("/console/nothing/here")
    assert (answer.status_code, answer.headers["content-type"]) == (404, "text/html; charset=utf-8")


def test_a_page_of_a_new_tenant_suggests_the_next_step(other: Visitor) -> None:
    assert "Upload files" in other.get("/console/datasets").text
    assert "No job yet" in other.get("/console/jobs").text
    assert "Nothing needs you" in other.get("/console").text


def test_script_and_style_of_a_page_fit_in_60_kb(visitor: Visitor, world: World) -> None:
    sizes = {}
    for name, path in PAGES.items():
        wanted = set(re.findall(r'(?:src|href)="/console/static/\w+/([\w.]+)"', visitor.get(path(world)).text))
        for script in [one for one in wanted if one.endswith(".js")]:
            wanted |= imported(script)
        sizes[name] = sum(len(static_files.files()[one].compressed) for one in wanted)
    assert min(sizes.values()) > 5_000
    assert {name: size for name, size in sizes.items() if size > 60_000} == {}


def imported(script: str) -> set[str]:
    found = set(re.findall(r'from "\./([\w.]+)"', static_files.text(script)))
    return found.union(*(imported(one) for one in found))


@pytest.mark.parametrize("name", PAGES)
def test_a_page_asks_the_database_a_bounded_number_of_questions(visitor: Visitor, world: World, name: str) -> None:
    asked: list[str] = []

    def note(_conn: Any, _cursor: Any, statement: str, *_: Any) -> None:
        asked.append(statement)

    engines = (world.platform.logins.tenant, world.platform.logins.platform)
    visitor.get(PAGES[name](world))
    for engine in engines:
        sa.event.listen(engine, "before_cursor_execute", note)
    try:
        visitor.get(PAGES[name](world))
    finally:
        for engine in engines:
            sa.event.remove(engine, "before_cursor_execute", note)
    of_page = [s for s in asked if "procrastinate" not in s and "FOR UPDATE" not in s]
    assert 0 < len(of_page) <= 40, of_page


def test_the_stylesheet_names_no_address_and_no_file_of_others() -> None:
    folder = Path(static_files.FOLDER)
    for path in folder.iterdir():
        found = re.findall(r"https?://[^\s\"')]+", path.read_text())
        assert set(found) <= {"http://www.w3.org/2000/svg"}, path


def test_the_reference_has_every_operation_of_the_document(api_url: str) -> None:
    document, answer = httpx.get(f"{api_url}/openapi.json", timeout=60).json(), httpx.get(f"{api_url}/docs", timeout=60)
    operations = [one["operationId"] for methods in document["paths"].values() for one in methods.values()]
    assert len(operations) > 100
    assert [id_ for id_ in operations if f'id="{id_}"' not in answer.text] == []
    assert "curl -X POST http://127.0.0.1:8000/v1/fine_tuning/jobs \\\n" in answer.text
    assert "<code>training_file</code>" in answer.text
    assert "starting with <code>ftjob-</code>" in answer.text, "what descriptions have between backticks is shown as code"
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|https?://(?!127\.0\.0\.1)", answer.text), "no address of others"
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert httpx.get(f"{api_url}/docs", headers={"accept-encoding": "identity"}, timeout=60).text == answer.text
