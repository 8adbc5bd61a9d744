"""Pages of datasets, jobs and evaluations: what they say, and what can be done there."""

from __future__ import annotations

import io
import json
import re
import uuid
from collections.abc import Callable
from dataclasses import replace
from html import unescape
from typing import Any
from urllib.parse import parse_qs

import pytest
import sqlalchemy as sa
from markupsafe import escape
from sqlalchemy.dialects.postgresql import JSONB

from control_plane.datasets import suites
from control_plane.datasets.scored_suites import service as scored_suites
from control_plane.datasets.scored_suites.service import Scoring
from control_plane.datasets.tables import datasets
from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.queue_entry import mark_packed
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.jobs.transitions import record_many, transition
from control_plane.platform.context import Platform
from control_plane.platform.job_events import metrics_event
from control_plane.platform.job_states import JobState
from control_plane.tenants import service as tenants
from engine.training.spec import Source
from tests.control_plane.console.conftest import Visitor
from tests.support.jobs.evaluation_results import store_evaluation
from tests.support.jobs.finished_job import finish
from tests.support.jobs.registered_adapter import add_adapter
from tests.support.jobs.training_specs import SPEC
from tests.support.platform.console_world import World


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
    assert f'<option value="{file}" data-dated selected>' in form


def test_files_of_one_name_are_told_apart_by_size_and_time(visitor: Visitor, world: World) -> None:
    file = jobs.get(world.platform, world.tenant, world.running).job.training_file
    found = uploaded_files.get(world.platform, world.tenant, file)
    options = re.findall(rf'<option value="{file}"[^>]*>([^<]*)</option>', visitor.get("/console/jobs/new").text)
    assert len(options) == 3, "training data, a further file, and validation data"
    for option in options:
        assert option.endswith(f"KiB, {found.created_at:%Y-%m-%dT%H:%M:%SZ})")


def test_methods_have_names_in_the_order_of_use(visitor: Visitor) -> None:
    choice = visitor.get("/console/jobs/new").text.partition('name="method"')[2].partition("</select>")[0]
    assert re.findall(r'value="(\w+)"', choice) == ["sft", "dpo", "cpt", "kto", "orpo", "simpo"]
    assert "Supervised fine-tuning (SFT): examples of good answers" in choice


def test_an_upload_offers_encodings_and_leaving_bad_rows_out(visitor: Visitor) -> None:
    page = visitor.get("/console/datasets/new").text
    assert '<option value="windows-1252">Windows-1252</option>' in page
    assert 'id="bad_rows"' in page


def test_a_model_page_shows_a_request_like_its_rows(visitor: Visitor, world: World) -> None:
    page = unescape(visitor.get(f"/console/models/{world.production}").text)
    assert '{"role": "user", "content": "How do I reset password 0?' in page.partition('id="use"')[2]
    assert "&message=How+do+I+reset+password+0%3F" in page
    assert f'href="/console/models/{world.production}#use"' in visitor.get("/console").text


@pytest.mark.parametrize(("num_chars", "is_linked"), [(1000, True), (5000, False)])
def test_a_model_page_shows_a_long_system_message_whole_and_links_it_up_to_4_096_characters(
    platform: Platform, visit: Callable[[str], Visitor], num_chars: int, is_linked: bool
) -> None:
    owner, key = tenants.create(platform, f"t-{uuid.uuid4().hex[:8]}")
    system = ('Say "tram",\nand no more. ' * 250)[:num_chars]
    turns = [(("system", system), ("user", f"Which line {n}?"), ("assistant", f"Line {n}.")) for n in range(12)]
    rows = [{"messages": [{"role": role, "content": content} for role, content in row]} for row in turns]
    lines = io.BytesIO("".join(json.dumps(row) + "\n" for row in rows).encode())
    file = uploaded_files.create(platform, owner.id, lines, filename="trams.jsonl", purpose="fine-tune")
    name = f"ft:tiny-base:{owner.id}:trams:0"
    made = add_adapter(platform, owner.id, name=name, stage="production", loaded=True, dataset_id=file.dataset_id)
    use = unescape(visit(key.secret).get(f"/console/models/{made}").text).partition('id="use"')[2]
    assert f'{{"role": "system", "content": {json.dumps(system)}}},\n' in use
    (link,) = re.findall(r'href="/console/playground#([^"]+)"', use)
    found = parse_qs(link)
    assert found["message"] == ["Which line 0?"]
    assert found.get("system", []) == ([system] if is_linked else [])
    assert ("too long for this link" in use) is not is_linked


def test_a_suite_shows_where_it_was_found_and_is_removed_by_its_owner(visitor: Visitor, other: Visitor, world: World) -> None:
    path, rows = "/console/datasets/suites", io.BytesIO(b'{"question": "What is a tram?"}\n{"question": "Who drives it?"}\n')
    suites.add(world.platform, world.tenant, rows, name="trams", filename="trams.jsonl", field="question")
    found = {"flagged": 7, "suites": {"own/trams": 7}, "checked": ["gsm8k", "own/trams"]}
    with world.platform.engine.begin() as conn:
        stats = sa.func.jsonb_set(datasets.c.report, ["stats", "contamination"], sa.cast(found, JSONB))
        conn.execute(sa.update(datasets).where(datasets.c.id == world.dataset).values(report=stats))
    row = next(one for one in visitor.get(path).text.split("<tr>") if "trams" in one)
    assert f'href="/console/datasets/{world.dataset}"' in row
    assert "(7 rows)" in row
    assert "your tenant" in row
    gsm8k = next(one for one in visitor.get(path).text.split("<tr>") if ">gsm8k<" in one)
    assert "no rows of 1 dataset<" in gsm8k
    assert "/remove" not in gsm8k
    assert "trams" not in other.get(path).text
    assert other.post(f"{path}/trams/remove").status_code == 404
    visitor.post(f"{path}/trams/remove")
    assert "trams" not in visitor.get(path).text


def test_a_scored_suite_shows_its_limits_and_is_removed_by_its_owner(visitor: Visitor, other: Visitor, world: World) -> None:
    path, rows = "/console/datasets/suites", io.BytesIO(b'{"prompt": "Who drives it?", "completion": "a driver"}\n')
    scoring = Scoring(metric="exact_match", min_score=0.75)
    scored_suites.add(world.platform, world.tenant, rows, name="drivers", filename="drivers.jsonl", scoring=scoring)
    row = next(one for one in visitor.get(path).text.split("<tr>") if "drivers" in one)
    assert "exact match" in row
    assert ">0.75<" in row
    assert "drivers" not in other.get(path).text
    assert other.post(f"{path}/scored/drivers/remove").status_code == 404
    visitor.post(f"{path}/scored/drivers/remove")
    assert "drivers" not in visitor.get(path).text


def test_runs_are_compared_in_one_chart(visitor: Visitor, world: World) -> None:
    page = visitor.get(f"/console/jobs/{world.running}?compare={world.evaluated}").text
    assert page.count('class="line run-2"') == 6, "loss, validation loss, and the four other charts"
    assert "Validation loss over steps" in page
    assert page.count(">A</text>") == page.count(">B</text>") == 6
    assert f'value="{world.evaluated}" checked' in page
    assert visitor.get(f"/console/jobs/{world.running}?compare=ftjob-none").status_code == 404
    many = "&".join(f"compare={job}" for job in (world.evaluated, world.failed, world.waiting, "ftjob-none"))
    assert visitor.get(f"/console/jobs/{world.running}?{many}").status_code == 200, "jobs beyond three are not looked up"


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


def test_a_job_shows_its_data_by_name_and_its_settings_in_words(visitor: Visitor, world: World) -> None:
    page = visitor.get(f"/console/jobs/{world.waiting}").text
    file = jobs.get(world.platform, world.tenant, world.waiting).job.training_file
    name = uploaded_files.get(world.platform, world.tenant, file).filename
    assert f'<a href="/console/datasets/{world.dataset}">{escape(name)}</a>' in page
    assert "<dt>Epochs</dt>" in page and "N epochs" not in page
    assert "LoRA of tiny-base" in page
    assert "attempt 0" not in page and "nothing billed yet" in page


def test_waiting_evaluation_is_a_row_of_the_queue(visitor: Visitor, world: World) -> None:
    file = jobs.get(world.platform, world.tenant, world.failed).job.training_file
    request = JobRequest.from_body({"model": "tiny-base", "training_file": file, "seed": 92})
    job = jobs.submit(world.platform, world.tenant, request).job.id
    mark_packed(world.platform, world.tenant, job, spec=SPEC, total_steps=10, expected_s=60.0)
    for state in (JobState.PROVISIONING, JobState.RUNNING, JobState.EVALUATING):
        with world.platform.engine.begin() as conn:
            transition(conn, job, state, message="")
    row = visitor.get("/console/queue").text.partition(f"/console/jobs/{job}")[2].partition("</tr>")[0]
    assert "Evaluating" in row and "Its evaluation waits for GPUs" in row and 'data-label="Waiting for"' in row


def test_a_failure_shows_the_row_that_it_names(visitor: Visitor, world: World) -> None:
    job = _failed(world, {"code": "invalid_dataset", "message": "row 3: it is over 512 tokens. Next: shorten it", "param": None})
    page = visitor.get(f"/console/jobs/{job}").text
    assert "Invalid dataset: row 3" in page
    assert "user: How do I reset password 2?&lt;script&gt;" in page
    outside = _failed(world, {"code": "invalid_dataset", "message": "row 9999: it is over 512 tokens. Next: shorten it", "param": None})
    assert "row 9999" in visitor.get(f"/console/jobs/{outside}").text


def test_job_that_was_trained_and_not_approved_says_so_also_without_a_report(visitor: Visitor, world: World) -> None:
    job = _failed(world, {"code": "gate_failed", "message": "Trained, not approved: it is worse. Train for longer.", "param": None})
    answer = visitor.get(f"/console/jobs/{job}")
    assert answer.status_code == 200
    assert "Trained, not approved" in answer.text and "it is worse" in answer.text
    assert 'href="/console/guides/not-approved"' in answer.text
    assert "Trained, not approved" in visitor.get("/console/jobs").text


def test_jobs_that_failed_alike_are_one_line_on_the_overview(visitor: Visitor, world: World) -> None:
    made = [_failed(world, {"code": "diverged", "message": "The loss exploded.", "param": None}) for _ in range(3)]
    attention = visitor.get("/console").text.partition('id="attention"')[2].partition("</section>")[0]
    assert attention.count("The loss exploded.") == 1
    assert "3 times" in attention
    assert [job for job in made if job in attention] == made[2:], "the newest"
    page = visitor.get(f"/console/jobs/{made[0]}").text
    assert "<p>The loss exploded.</p>" in page, "one full stop"


def test_jobs_of_one_name_that_are_not_approved_are_one_line_on_the_overview(visitor: Visitor, world: World) -> None:
    sentences = [f"Trained, not approved: it is worse. The model is kept and not served (adp-{n})." for n in range(2)]
    for sentence in sentences:
        _failed(world, {"code": "gate_failed", "message": sentence, "param": None})
    attention = visitor.get("/console").text.partition('id="attention"')[2].partition("</section>")[0]
    assert sentences[1] in attention and sentences[0] not in attention


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
    assert [
        value in form for value in (f'<option value="{file}" data-dated selected>', 'data-much value="2.0"', 'data-much value="1.0"')
    ] == [True] * 3
    assert f'<option value="" disabled selected>Not available: {world.validating_file}</option>' in form, "no other file takes its place"


def test_a_row_that_an_error_names_is_quoted_where_the_job_has_one_file(visitor: Visitor, world: World) -> None:
    file = jobs.get(world.platform, world.tenant, world.running).job.training_file
    one = {"training_file": file}
    several = {"training_files": [{"file": file, "weight": 2}, {"file": world.validating_file, "weight": 1}]}
    for named, given in ((True, one), (False, several)):
        body = {"model": "tiny-base", "force": True, **given}
        job = jobs.submit(world.platform, world.tenant, JobRequest.from_body(body)).job
        error = {"code": "invalid_dataset", "message": "row 2 is too long. Next: shorten it", "param": None}
        with world.platform.engine.begin() as conn:
            values = {"state": JobState.FAILED, "error": error}
            conn.execute(sa.update(jobs_table).where(jobs_table.c.id == job.id).values(values))
        page = visitor.get(f"/console/jobs/{job.id}").text
        assert "row 2 is too long" in page.lower()
        assert ('<pre class="trained">' in page, ": row 2" in page) == (named, named)


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
    for query in ("?", "?only=better&"):
        pages = int(re.findall(r"Page 1 of (\d+)", visitor.get(f"{path}{query}").text)[0])
        shown = [len(changes(f"{query}page={number}")) for number in (pages, pages + 1)]
        assert 0 < shown[0] <= 20
        assert shown[1] == 0, "and a link back"
    assert 'href="?only=worse#answers"' in whole
    assert visitor.get(f"{path}?only=nonsense").status_code == 400
    safety = visitor.get(f"{path}?suite=safety").text
    assert '<option value="safety" selected>' in safety
    assert set(re.findall(r'<span class="soft">(\w+)</span><code>', safety)) == {"safety"}


def test_shares_are_shown_in_percent_also_where_less_is_better(visitor: Visitor, world: World) -> None:
    page = visitor.get(f"/console/jobs/{world.evaluated}/evaluation").text
    rows = re.findall(r'data-label="Metric"><span>([\w ]+?) ?<(.*?)</tr>', page)
    found = {name: re.findall(r'<td class="n" data-label="\w+">([^<]*)</td>', row) for name, row in rows}
    assert all(value.endswith(" %") for value in found["refused without need"][1:3]), "base and previous, after the number of items"
    assert not any(value.endswith(" %") for value in found["perplexity"])


def test_experiment_that_did_not_pass_is_shown_as_not_approved(visitor: Visitor, world: World) -> None:
    file = jobs.get(world.platform, world.tenant, world.failed).job.training_file
    asked = {"model": "tiny-base", "training_file": file, "seed": 77, "eval_config": {"mode": "experiment"}}
    job_id = jobs.submit(world.platform, world.tenant, JobRequest.from_body(asked)).job.id
    form = visitor.get(f"/console/jobs/new?like={job_id}").text
    assert 'name="experiment" checked' in form and 'name="auto_promote">' in form
    adapter_id = finish(world.platform, world.tenant, job_id, stage="quarantined")
    page = visitor.get(f"/console/jobs/{job_id}").text
    assert "Succeeded, not approved" in page and "An experiment succeeds whatever its" in page
    assert f'href="/console/models/{adapter_id}"' in page and "The model is ready" not in page
    assert "Succeeded, not approved" in visitor.get("/console/jobs").text


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
