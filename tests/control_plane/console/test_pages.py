"""Every page with everything on it: hostile text is escaped, tenants see their own, changes do what the API does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
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
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.jobs.transitions import record_many, transition
from control_plane.platform.context import Platform
from control_plane.platform.job_events import metrics_event
from control_plane.platform.job_states import JobState
from control_plane.tenants import members
from control_plane.tenants import service as tenants
from ft_assets.training.spec import Source
from tests.control_plane.console.conftest import Visitor
from tests.support.jobs.evaluation_results import store_evaluation
from tests.support.jobs.training_specs import SPEC
from tests.support.platform.background_worker import working
from tests.support.platform.console_world import World, make_world

HOSTILE = """<script>alert(1)</script>"><img src=x onerror=alert(1)>'{{7*7}}"""
"""In every text that a tenant gives: names, rows, metadata, messages."""


@pytest.fixture(scope="module")
def platform(new_platform: Callable[..., Platform]) -> Platform:
    """Sends webhooks to this machine."""
    return new_platform(webhook_allow="127.0.0.0/8")


@pytest.fixture(scope="module")
def world(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(platform, tmp_path_factory.mktemp("world"), tenant="hostile", text=HOSTILE)


@pytest.fixture(scope="module")
def api_url(world: World, serve: Callable[..., str]) -> Iterator[str]:
    """The API over the world's platform, whose base model has a tokenizer."""
    with working(world.platform):
        yield serve(create_app(world.platform))


@pytest.fixture
def visitor(visit: Callable[[str], Visitor], world: World) -> Visitor:
    return visit(world.key)


PAGES: dict[str, Callable[[World], str]] = {
    "start": lambda w: "/console",
    "datasets": lambda w: "/console/datasets",
    "upload": lambda w: "/console/datasets/new",
    "dataset": lambda w: f"/console/datasets/{w.dataset}",
    "dataset as trained": lambda w: f"/console/datasets/{w.dataset}?model=tiny-base",
    "refused file": lambda w: f"/console/files/{w.refused_file}",
    "file being validated": lambda w: f"/console/files/{w.validating_file}",
    "jobs": lambda w: "/console/jobs",
    "failed jobs": lambda w: "/console/jobs?status=failed",
    "new job": lambda w: "/console/jobs/new",
    "running job": lambda w: f"/console/jobs/{w.running}",
    "waiting job": lambda w: f"/console/jobs/{w.waiting}",
    "failed job": lambda w: f"/console/jobs/{w.failed}",
    "compared jobs": lambda w: f"/console/jobs/{w.running}?compare={w.evaluated}&compare={w.failed}",
    "evaluation": lambda w: f"/console/jobs/{w.evaluated}/evaluation",
    "answers that got worse": lambda w: f"/console/jobs/{w.evaluated}/evaluation?only=worse&suite=holdout",
    "models": lambda w: "/console/models",
    "model": lambda w: f"/console/models/{w.draft}",
    "model in production": lambda w: f"/console/models/{w.production}",
    "model to approve": lambda w: f"/console/models/{w.pending}",
    "routes": lambda w: "/console/models/routes",
    "route": lambda w: f"/console/models/routes/{w.route}",
    "base model": lambda w: "/console/models/base/tiny-base",
    "playground": lambda w: "/console/playground",
    "queue": lambda w: "/console/queue",
    "usage": lambda w: "/console/usage",
    "invoices": lambda w: "/console/usage/invoices",
    "invoice": lambda w: f"/console/usage/invoices/{w.month}",
    "budgets": lambda w: "/console/usage/budgets",
    "settings": lambda w: "/console/settings",
    "all data": lambda w: "/console/settings/data",
    "keys": lambda w: "/console/keys",
    "rotation of a key": lambda w: f"/console/keys/{w.key_id}/rotate",
    "members": lambda w: "/console/members",
    "webhooks": lambda w: "/console/webhooks",
    "audit log": lambda w: "/console/audit",
}


OPEN = {"/console/sign-in", "/console/static/{version}/{name}", "/console/oidc/start", "/console/oidc/callback", "/console/oidc/choose"}


def test_every_page_and_every_change_needs_a_session(world: World, api_url: str) -> None:
    found = {}
    for route in iter_route_contexts(create_app(world.platform).routes):
        if str(route.path).startswith("/console") and route.path not in OPEN:
            path = re.sub(r"\{\w+(:path)?\}", "x", str(route.path))
            for method in route.methods or ():
                answer = httpx.request(method, f"{api_url}{path}")
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


def test_jobs_are_listed_by_status_and_page(visitor: Visitor, world: World) -> None:
    failed = visitor.get("/console/jobs?status=failed").text
    assert world.failed in failed
    assert world.running not in failed
    page = visitor.get(f"/console/jobs?after={world.failed}").text
    assert world.running in page
    assert world.failed not in page
    assert visitor.get("/console/jobs?status=nonsense").status_code == 400


def test_a_waiting_job_says_where_it_is_and_why(visitor: Visitor, world: World) -> None:
    page = visitor.get(f"/console/jobs/{world.waiting}").text
    assert "Waiting for GPUs" in page
    assert "Position 1" in page


def test_the_overview_shows_how_far_jobs_are(visitor: Visitor, world: World) -> None:
    whole, part = visitor.get("/console").text, visitor.get("/console/in-progress").text
    assert 'data-refresh="/console/in-progress"' in whole
    for page in (whole, part):
        assert world.running in page
        assert re.search(r"Step \d+ of 200</span><span>\d+ %</span><span>Loss 0\.\d{4}", page)
        assert "Position 1" in page
    assert "<html" not in part


def test_a_report_begins_with_the_verdict_and_marks_differences_of_near_duplicates(visitor: Visitor, world: World) -> None:
    page = visitor.get(f"/console/datasets/{world.dataset}").text
    order = (
        "Valid: ",
        "Rows by length in tokens",
        "Rows by length in characters",
        "<h2>Languages",
        "<h2>Personal data",
        "<h2>Contamination",
    )
    places = [page.index(part) for part in (*order, "<h2>Duplicates", "Statistics and policies")]
    assert places == sorted(places)
    assert "It <mark>is</mark> sent" in page and "It <mark>was</mark> sent" in page
    assert "Rows for validation" in page and "splits.by" not in page and "None" not in re.sub(r"<[^>]*>", "", page)


def test_a_refused_file_says_how_to_fix_it_with_three_examples(visitor: Visitor, world: World) -> None:
    page = visitor.get(f"/console/files/{world.refused_file}").text
    assert "Not valid: 40 of 40 rows cannot be trained on" in page
    assert ">40 rows</span>" in page
    assert len(re.findall(r"Row \d+, byte \d+", page)) == 3
    assert "ft check" in page and "--map" in page


def test_a_dataset_lists_its_versions_and_where_they_are_used(visitor: Visitor, world: World) -> None:
    page = visitor.get(f"/console/datasets/{world.dataset}").text
    for link in (f"/console/jobs/{world.running}", f"/console/models/{world.production}", f"/console/jobs/new?dataset={world.dataset}"):
        assert f'href="{link}"' in page
    assert "Version 1" in page
    form = visitor.get(f"/console/jobs/new?dataset={world.dataset}").text
    file = jobs.get(world.platform, world.tenant, world.running).job.training_file
    assert f'<option value="{file}" selected>' in form


def test_runs_are_compared_in_one_chart(visitor: Visitor, world: World) -> None:
    page = visitor.get(f"/console/jobs/{world.running}?compare={world.evaluated}").text
    assert page.count('class="line run-2"') == 6, "loss, validation loss, and the four other charts"
    assert "Validation loss over steps" in page
    assert page.count(">A</text>") == page.count(">B</text>") == 6
    assert f'value="{world.evaluated}" checked' in page
    assert visitor.get(f"/console/jobs/{world.running}?compare=ftjob-none").status_code == 404


def _failed(world: World, error: dict[str, Any]) -> str:
    """A job that trained with the shared spec and failed."""
    file = jobs.get(world.platform, world.tenant, world.failed).job.training_file
    body = {"model": "tiny-base", "training_file": file, "suffix": "down", "hyperparameters": {"n_epochs": 2}, "force": True}
    job = jobs.submit(world.platform, world.tenant, JobRequest.from_body(body)).job.id
    with world.platform.engine.begin() as conn:
        conn.execute(sa.update(jobs_table).where(jobs_table.c.id == job).values(spec=SPEC.to_dict()))
        transition(conn, job, JobState.FAILED, message="It failed.", error=error)
    return job


def test_a_diverged_job_starts_again_with_a_third_of_its_learning_rate(visitor: Visitor, other: Visitor, world: World) -> None:
    message = "the loss of step 7 was not finite. Next: lower learning_rate to a third"
    job = _failed(world, {"code": "diverged", "message": message, "param": None})
    page = visitor.get(f"/console/jobs/{job}").text
    lower = float(f"{SPEC.optimization.learning_rate / 3:.2g}")
    assert "The loss of step 7 was not finite." in page
    assert "<strong>Next:</strong> Lower learning_rate to a third." in page
    assert f"Start again with learning rate {lower:g}" in page
    assert other.post(f"/console/jobs/{job}/retry").status_code == 404
    answer = visitor.post(f"/console/jobs/{job}/retry")
    made = jobs.get(world.platform, world.tenant, answer.headers["location"].partition("?")[0].rpartition("/")[2]).job
    assert made.id != job
    assert visitor.post(f"/console/jobs/{job}/retry").headers["location"] == answer.headers["location"], "a second click"
    assert (made.suffix, made.hyperparameters) == ("down", {"n_epochs": 2, "learning_rate": lower})
    visitor.post(f"/console/jobs/{made.id}/cancel")


def test_a_failure_shows_the_row_that_it_names(visitor: Visitor, world: World) -> None:
    job = _failed(world, {"code": "invalid_dataset", "message": "row 3: it is over 512 tokens. Next: shorten it", "param": None})
    page = visitor.get(f"/console/jobs/{job}").text
    assert "Invalid dataset: row 3" in page
    assert "user: How do I reset password 2?&lt;script&gt;" in page
    outside = _failed(world, {"code": "invalid_dataset", "message": "row 9999: it is over 512 tokens. Next: shorten it", "param": None})
    assert "row 9999" in visitor.get(f"/console/jobs/{outside}").text


def test_a_running_job_shows_its_curves_and_where_the_stream_goes_on(visitor: Visitor, world: World) -> None:
    page = visitor.get(f"/console/jobs/{world.running}").text
    for title in ("Loss", "Learning rate", "Gradient norm", "Tokens per second", "GPU memory in GiB"):
        assert f"{title} over steps" in page
    assert page.count('class="line second"') == 1, "validation beside training"
    newest = jobs.list_events(world.platform, world.tenant, world.running, limit=1).items[0].seq
    assert f'data-last="{newest}"' in page
    assert "data-over" not in page
    assert "data-over" in visitor.get(f"/console/jobs/{world.failed}").text, "nothing follows a finished job"


def test_a_mixture_shows_its_files_and_the_loss_of_each(visitor: Visitor, world: World) -> None:
    file = jobs.get(world.platform, world.tenant, world.running).job.training_file
    body = {
        "model": "tiny-base",
        "training_files": [{"file": file, "weight": 2}, {"file": world.validating_file, "weight": 1}],
        "force": True,
    }
    job = jobs.submit(world.platform, world.tenant, JobRequest.from_body(body)).job.id
    lines = [{"step": n, "train_loss": 2 / n, "train_loss/ds_a": 1 / n, "train_loss/ds_b": 3 / n} for n in range(1, 4)]
    sources = tuple(Source(dataset_id=f"ds_{name}", pack_fingerprint="pk", rows_per_epoch=1) for name in "ab")
    with world.platform.engine.begin() as conn:
        conn.execute(sa.update(jobs_table).where(jobs_table.c.id == job).values(spec=replace(SPEC, sources=sources).to_dict()))
        record_many(conn, [(job, metrics_event(line)) for line in lines], now=world.platform.clock())
    page = visitor.get(f"/console/jobs/{job}").text
    assert "Loss by file over steps" in page
    assert page.count("train_loss/ds_a") == page.count("train_loss/ds_b") == 1
    assert "weight 2" in page and "weight 1" in page
    form = visitor.get(f"/console/jobs/new?like={job}").text.partition("<template")[0]
    assert form.count("data-source>") == 2
    assert [value in form for value in (f'<option value="{file}" selected>', 'data-much value="2.0"', 'data-much value="1.0"')] == [
        True
    ] * 3
    assert f'<option value="" disabled selected>Not available: {world.validating_file}</option>' in form, "no other file takes its place"


def test_a_job_is_paused_and_resumed_and_cancelled(visitor: Visitor, world: World) -> None:
    path = f"/console/jobs/{world.waiting}"
    done = {"pause": ("paused", "pauses at"), "resume": ("queued", "queued again"), "cancel": ("cancelled", "was cancelled")}
    for change, (state, said) in done.items():
        answer = visitor.post(f"{path}/{change}")
        assert answer.status_code == 303, answer.text
        assert said in visitor.get(answer.headers["location"]).text
        assert jobs.get(world.platform, world.tenant, world.waiting).job.state.value == state
    again = visitor.post(f"{path}/pause")
    assert (again.status_code, "Not possible now" in again.text) == (409, True)


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


def test_answers_are_filtered_and_paged_by_the_address_with_disagreements_first(visitor: Visitor, world: World) -> None:
    path = f"/console/jobs/{world.evaluated}/evaluation"

    def changes(query: str) -> list[str]:
        return re.findall(r'class="sample is-(\w+)"', visitor.get(f"{path}{query}").text)

    first = changes("")
    assert len(first) == 20
    assert first == sorted(first, key=["worse", "better", "changed", "same"].index)
    assert first[0] == "worse"
    assert set(changes("?only=better&page=2")) == {"better"}
    whole = visitor.get(path).text
    pages = int(re.findall(r"Page 1 of (\d+)", whole)[0])
    shown = [len(changes(f"?page={number}")) for number in (pages, pages + 1)]
    assert 0 < shown[0] <= 20
    assert shown[1] == 0, "and a link back"
    assert 'href="?only=worse#answers"' in whole
    assert visitor.get(f"{path}?only=nonsense").status_code == 400
    safety = visitor.get(f"{path}?suite=safety").text
    assert '<option value="safety" selected>' in safety
    assert set(re.findall(r'<span class="soft">(\w+)</span><code>', safety)) == {"safety"}


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


def test_a_new_job_begins_like_an_earlier_one_with_the_advice_of_its_evaluation(visitor: Visitor, world: World) -> None:
    job = jobs.submit(
        world.platform,
        world.tenant,
        JobRequest.from_body({
            "model": "tiny-base", "training_file": jobs.get(world.platform, world.tenant, world.failed).job.training_file,
            "suffix": "again", "hyperparameters": {"n_epochs": 7, "weight_decay": 0.02}, "auto_promote": False, "seed": 9,
            "eval_config": {"approval": "required", "max_items": 5},
        }),
    ).job  # fmt: skip
    page = visitor.get(f"/console/jobs/new?like={job.id}").text
    assert [re.search(rf'data-hp="{name}" value="([^"]*)"', page)[1] for name in ("n_epochs", "weight_decay")] == ["7", "0.02"]  # type: ignore[index]
    assert 'value="again"' in page
    assert 'name="auto_promote">' in page
    assert 'name="approval" checked' in page
    assert "&#34;max_items&#34;: 5" in page
    store_evaluation(world.platform, world.tenant, job.id)
    advised = visitor.get(f"/console/jobs/new?like={job.id}").text
    assert re.search(r'data-hp="n_epochs" value="([^"]*)"', advised)[1] == "1.5"  # type: ignore[index]
    assert "Changed as advised" in advised


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
    assert httpx.get(f"{api_url}/docs", headers={"accept-encoding": "identity"}).text == answer.text
