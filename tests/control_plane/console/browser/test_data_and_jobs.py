"""Data and jobs in a real browser: uploads, journeys, and pages that follow a job."""

from __future__ import annotations

import json
import re
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from control_plane.adapters import service as adapters
from control_plane.console import static_files
from control_plane.datasets import suites
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.transitions import transition
from control_plane.platform.job_states import JobState
from tests.control_plane.console.browser.conftest import Server
from tests.support.console.browser_pages import DESKTOP, PHONE, TIMEOUT_MS, axe
from tests.support.jobs.evaluation_results import store_evaluation
from tests.support.platform.console_world import World, report_steps

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

pytestmark = pytest.mark.browser


def test_the_journey_from_a_bad_file_to_a_job_that_is_watched_and_signed_out(
    browser: Browser, server: Server, world: World, tmp_path: Path
) -> None:
    bad = tmp_path / "questions.jsonl"
    rows = [{"question": f"How long does step {i} take?", "ground truth": f"{i} days, then it is done."} for i in range(60)]
    bad.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = browser.new_context(viewport=DESKTOP, base_url=server.url).new_page()
    page.set_default_timeout(TIMEOUT_MS)
    page.goto("/console/datasets/new")
    page.get_by_label("API key").fill(world.key)
    page.get_by_role("button", name="Sign in").click()
    page.wait_for_url("**/console/datasets/new")
    page.locator("#model").select_option("tiny-base")
    page.locator("#files").set_input_files(str(bad))
    page.get_by_text("Not valid", exact=True).wait_for()
    mapping = page.locator("[data-mapping]")
    mapping.get_by_role("combobox").first.wait_for()
    assert [choice.input_value() for choice in mapping.get_by_role("combobox").all()] == ["prompt", "completion"], "as the report suggests"
    mapping.get_by_role("button").click()
    page.get_by_text("Valid", exact=True).wait_for()
    page.goto("/console/datasets")
    page.get_by_role("link", name="questions.jsonl").click()
    page.get_by_role("link", name="Upload it again, read as suggested").click()
    page.get_by_text("Columns of these files are mapped: question is read as prompt, ground truth is read as completion").wait_for()
    page.locator("#files").set_input_files(str(bad))
    page.get_by_text("Valid", exact=True).wait_for()
    page.get_by_role("link", name="Open dataset").click()
    page.get_by_role("heading", name="questions").wait_for()
    page.goto("/console/jobs/new")
    option = page.locator("#training_file option", has_text=f"questions.jsonl ({bad.stat().st_size / 1024:.1f} KiB, ").first
    assert not re.search(r"T\d\d:\d\d:\d\dZ", option.text_content() or ""), "the time is the reader's"
    page.get_by_label("Training data").select_option(option.get_attribute("value"))
    page.locator("[data-price]").filter(has_text="$").wait_for()
    page.get_by_label("Epochs").fill("2")
    page.get_by_label("Name suffix").fill("from-browser")
    page.get_by_label("Require a person's approval").check()
    page.get_by_label("Only monitor").check()
    page.locator("[data-steps]").filter(has_text="over 2 epochs").wait_for()
    for language, words in {"ft": "--hp 'n_epochs=2'", "Python": 'suffix="from-browser"', "curl": '"n_epochs": 2'}.items():
        page.get_by_role("button", name=language, exact=True).click()
        assert words in (page.locator("[data-code]").text_content() or "")
    page.get_by_role("button", name="Start job").click()
    page.wait_for_url("**/console/jobs/ftjob-*")
    page.get_by_role("heading", name="from-browser").wait_for()
    made = jobs.get(world.platform, world.tenant, page.url.rpartition("/")[2]).job
    assert (made.suffix, made.hyperparameters["n_epochs"]) == ("from-browser", 2)
    assert made.request["eval_config"] == {"approval": "required", "mode": "monitor"}
    page.get_by_role("button", name="Cancel job").click()
    page.get_by_role("dialog").get_by_role("button", name="Cancel job").click()
    page.get_by_text("The job was cancelled.").first.wait_for()
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("API key").wait_for()
    page.goto("/console/jobs")
    assert "/console/sign-in" in page.url
    page.context.close()


@pytest.mark.slow
def test_the_overview_updates_running_jobs_and_keeps_the_focus(page: Page, world: World) -> None:
    page.goto("/console")
    job = page.locator("li", has=page.locator(f'a[href="/console/jobs/{world.running}"]'))
    began = int(re.findall(r"Step (\d+)", job.text_content() or "")[0])
    link = job.get_by_role("link")
    link.focus()
    report_steps(world.platform, world.running, began + 1, began + 10)
    job.get_by_text(f"Step {began + 10} of 200").wait_for()
    assert page.evaluate("document.activeElement.getAttribute('href')") == f"/console/jobs/{world.running}"


def test_a_running_job_is_followed_and_the_page_survives_a_restart(page: Page, world: World, server: Server) -> None:
    page.goto(f"/console/jobs/{world.running}")
    step = page.locator("[data-step]")
    began = int(step.text_content() or 0)
    points = "document.querySelector('svg[data-lines] polyline').getAttribute('points').split(' ').length"
    drawn = page.evaluate(points)
    report_steps(world.platform, world.running, began + 1, began + 5)
    step.filter(has_text=str(began + 5)).wait_for()
    assert page.evaluate(points) == drawn + 5
    server.stop()
    report_steps(world.platform, world.running, began + 6, began + 9)
    server.start()
    step.filter(has_text=str(began + 9)).wait_for()
    assert page.evaluate(points) == drawn + 9, "nothing was missed or counted twice"
    jobs.pause(world.platform, world.tenant, world.running)
    page.get_by_text("Pausing", exact=True).first.wait_for()


def test_expected_time_that_has_passed_is_any_moment(page: Page) -> None:
    page.goto("/console")
    shown = """async ([url, times]) => {
        const { localTimes } = await import(url), part = document.createElement("div");
        part.innerHTML = times.map(([form, time]) => `<time datetime="${time}" data-form="${form}"></time>`).join("");
        localTimes(part);
        return [...part.children].map((time) => time.textContent);
    }"""
    soon, past = ((datetime.now(UTC) + timedelta(minutes=minutes)).isoformat() for minutes in (130, -130))
    times = [("expected", past), ("expected", soon), ("relative", past)]
    assert page.evaluate(shown, [static_files.url("times.js"), times]) == ["any moment", "in 2 hours", "2 hours ago"]


@pytest.mark.slow
def test_charts_zoom_with_pointer_and_keyboard_and_compare_runs(page: Page, world: World) -> None:
    page.goto(f"/console/jobs/{world.evaluated}")
    shown, chart = page.locator("[data-range]"), page.locator("[data-charts] svg").first
    points = "document.querySelector('[data-charts] polyline').getAttribute('points').split(' ').length"
    whole, box = page.evaluate(points), chart.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 70, steps=3)
    page.mouse.up()
    first, last = map(int, re.findall(r"\d+", shown.text_content() or ""))
    assert 0 < first < last < 200
    assert page.evaluate(points) == last - first + 1 < whole, "only steps of the range are drawn"
    page.get_by_role("button", name="Zoom out").focus()
    page.keyboard.press("Enter")
    assert "to" in (shown.text_content() or "")
    page.get_by_role("button", name="Later steps").focus()
    page.keyboard.press("Enter")
    assert int(re.findall(r"\d+", shown.text_content() or "")[1]) > last
    chart.dblclick()
    assert (shown.text_content(), page.evaluate(points)) == ("", whole)
    page.get_by_role("link", name="Compare with other runs").click()
    page.locator(f'input[value="{world.running}"]').check()
    page.get_by_role("button", name="Compare").click()
    page.wait_for_url(f"**/{world.evaluated}?compare={world.running}*")
    assert page.locator("[data-charts] .run-2").count() > 4
    assert axe(page) == []


@pytest.mark.slow
def test_a_suite_is_added_after_the_reason_of_its_refusal_was_read(page: Page, world: World, tmp_path: Path) -> None:
    file = tmp_path / "our exam.jsonl"
    file.write_text('{"id": 1, "prompt": "What is a tram?"}\n{"id": 2}\n')
    page.goto("/console/datasets/suites")
    page.get_by_label("File").set_input_files(str(file))
    page.get_by_text("The file has id, prompt.").wait_for()
    assert page.get_by_label("Name").input_value() == "our-exam"
    page.get_by_label("Field").fill("prompt")
    page.get_by_role("button", name="Add list").click()
    page.get_by_text("row 2 of our exam.jsonl has no text in prompt").wait_for()
    assert axe(page) == []
    file.write_text('{"id": 1, "prompt": "What is a tram?"}\n')
    page.get_by_label("File").set_input_files(str(file))
    page.get_by_label("Field").fill("prompt")
    page.get_by_role("button", name="Add list").click()
    page.get_by_text("The list was added.").wait_for()
    page.get_by_role("row", name=re.compile("our-exam")).get_by_role("button", name="Remove").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    page.get_by_text("Deleted.").wait_for()
    assert "our-exam" not in {suite.name for suite in suites.list_suites(world.platform, world.tenant)}


def test_a_failed_job_starts_again(page: Page, world: World) -> None:
    page.goto(f"/console/jobs/{world.failed}")
    page.get_by_role("button", name="Start again").click()
    page.get_by_text("The job was submitted again.").wait_for()
    made = page.url.split("?")[0].rpartition("/")[2]
    assert made != world.failed
    jobs.cancel(world.platform, world.tenant, made)


@pytest.mark.slow
def test_answers_are_filtered_read_and_decided_on(page: Page, world: World) -> None:
    model = adapters.get_adapter(world.platform, world.tenant, world.pending)
    page.goto(f"/console/jobs/{model.job_id}/evaluation")
    page.get_by_role("link", name=re.compile("^Better")).click()
    page.wait_for_url("**only=better*")
    page.get_by_label("Suite").select_option("holdout")
    page.get_by_role("button", name="Show").click()
    page.wait_for_url("**suite=holdout*")
    page.get_by_role("link", name="Next").click()
    page.wait_for_url("**page=2*")
    assert {"better"} == set(page.locator(".sample").evaluate_all("all => all.map((one) => one.className.split('-')[1])"))
    page.get_by_label("Note").fill("Read the first 40 answers.")
    page.get_by_role("button", name="Reject").click()
    page.get_by_text("Read the first 40 answers.").wait_for()
    assert adapters.get_adapter(world.platform, world.tenant, world.pending).approval == "rejected"


def test_a_new_job_warns_about_its_data_and_leaves_rules_out(page: Page, world: World) -> None:
    page.goto(f"/console/jobs/new?dataset={world.dataset}")
    page.get_by_text("Before you start").wait_for()
    page.locator("[data-warning] li", has_text=re.compile("nearly the same as an earlier row and (was|were) left out")).wait_for()
    assert re.search(r"LoRA: 1 GPU, \$\d+\.\d\d an hour", page.locator(".choice").first.text_content() or "")
    page.get_by_label("Unsafe prompts are refused").uncheck()
    page.get_by_text("Limits of the rules").click()
    page.get_by_label("Least gain over the base").fill("0.1")
    body = json.loads(re.findall(r"-d '(.*)'", page.locator("[data-code]").text_content() or "", re.DOTALL)[0])
    assert body["eval_config"] == {"skip": ["safety"], "min_relative_gain": 0.1}
    page.locator("[data-price]").filter(has_text="$").wait_for()


def test_a_refused_setting_has_its_reason_beside_its_field(page: Page, world: World) -> None:
    page.goto(f"/console/jobs/new?dataset={world.dataset}")
    page.locator("[data-price]").filter(has_text="$").wait_for()
    rate = page.get_by_label("Learning rate", exact=True)
    said = re.compile(r"A number above 0 and at most 1\..*Default 0\.\d+: \w+")  # what is allowed, and why the default is so
    page.locator(".field", has=rate).locator(".hint").filter(has_text=said).wait_for()
    rate.fill("7")
    reason = page.locator(".field", has=rate).locator("[data-reason]")
    reason.wait_for()
    assert "learning_rate 7" in (reason.text_content() or "")
    assert rate.get_attribute("aria-describedby") == reason.get_attribute("id")
    assert "Change Learning rate" in (page.locator("[data-refusal]").text_content() or "")
    assert axe(page) == []
    rate.fill("")
    reason.wait_for(state="detached")
    page.locator("[data-price]").filter(has_text="$").wait_for()


def test_a_refusal_of_no_field_has_its_reason_beside_the_button(page: Page, context: BrowserContext, world: World) -> None:
    refusal = {
        "error": {"message": "5 jobs are in flight and the limit is 5", "type": "invalid_request_error", "param": None, "code": "jobs"}
    }
    context.route("**/v1/fine_tuning/jobs/estimate", lambda route: route.fulfill(status=400, json=refusal))
    page.goto(f"/console/jobs/new?dataset={world.dataset}")
    page.get_by_role("alert").filter(has_text="5 jobs are in flight").wait_for()


def test_job_that_was_not_approved_fits_a_phone(page: Page, world: World) -> None:
    file = jobs.get(world.platform, world.tenant, world.failed).job.training_file
    request = JobRequest.from_body({"model": "tiny-base", "training_file": file, "seed": 91})
    job = jobs.submit(world.platform, world.tenant, request).job.id
    store_evaluation(world.platform, world.tenant, job)
    with world.platform.engine.begin() as conn:
        transition(conn, job, JobState.FAILED, message="", error={"code": "gate_failed", "message": "", "param": None})
    page.set_viewport_size(PHONE)
    page.goto(f"/console/jobs/{job}")
    page.get_by_role("button", name=re.compile("Start again with learning rate .*, epochs 1.5")).wait_for()
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0


def test_a_refused_file_is_read_again_as_its_report_suggests(page: Page, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"Row {n}?"}, {"role": "assistant", "content": f"Yes {n}."}]} for n in range(20)]
    bad, excel = tmp_path / "one bad row.jsonl", tmp_path / "excel.csv"
    bad.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{not JSON}\n")
    excel.write_bytes(b"prompt,completion\n" + b"".join(f"Wo ist Nr. {n}?,Im Büro {n}.\n".encode("cp1252") for n in range(20)))
    page.goto("/console/datasets/new")
    for file, button in ((bad, "Leave out 1 bad row"), (excel, "Read it as windows-1252")):
        page.locator("#files").set_input_files(str(file))
        page.get_by_role("button", name=button).click()
        page.locator("[data-uploads] li", has_text=file.name).get_by_text("Valid", exact=True).wait_for()
    page.locator("#bad_rows").check()
    page.locator("#encoding").select_option("windows-1252")
    again = tmp_path / "again.csv"
    again.write_bytes(excel.read_bytes().replace(b"Im", b"Am"))
    page.locator("#files").set_input_files(str(again))
    page.locator("[data-uploads] li", has_text=again.name).get_by_text("Valid", exact=True).wait_for()
    assert axe(page) == []


def test_a_finished_job_asks_for_nothing(page: Page, world: World) -> None:
    asked: list[str] = []
    page.goto(f"/console/jobs/{world.failed}", wait_until="networkidle")
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(1500)
    assert [url for url in asked if not url.endswith("favicon.svg")] == [], "of the browser's own a busy machine may load the icon late"


@pytest.mark.slow
def test_a_broken_upload_goes_on_where_it_stopped(page: Page, context: BrowserContext, tmp_path: Path) -> None:
    big = tmp_path / "big.jsonl"
    big.write_bytes(b"x" * (20 << 20))  # refused at once: what is sent counts here
    sent: list[str] = []
    lost = threading.Event()

    def part(route: Any) -> None:
        sent.append(route.request.url)
        if len(sent) == 2 and not lost.is_set():
            lost.set()
            route.abort("connectionreset")
        else:
            route.continue_()

    context.route("**/v1/uploads/*/parts", part)
    page.goto("/console/datasets/new")
    page.locator("#files").set_input_files(str(big))
    page.get_by_text("Waiting for the connection").wait_for()
    page.get_by_text(re.compile("^(Valid|Not valid)$")).wait_for(timeout=4 * TIMEOUT_MS)
    assert len(sent) == 4, "three parts of 8 MiB, one of them twice"


def test_a_validation_shows_its_stage_and_how_far_it_is(page: Page, world: World) -> None:
    page.goto(f"/console/files/{world.validating_file}")
    page.get_by_text("12,000 rows, 40 %").wait_for()
    assert page.locator(".timeline .now").text_content() == "Read and check every row"
    assert page.locator(".timeline .done").count() == 1
    page.goto("/console/datasets/new")
    page.locator("[data-uploads] li", has_text="long").get_by_text("Reading rows: 12,000 rows, 40 %").wait_for()


@pytest.mark.slow
def test_uploads_are_listed_after_a_reload_and_go_on(page: Page, context: BrowserContext, tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.jsonl" for name in ("one", "two")]
    for path in files:
        path.write_bytes(b"x" * (9 << 20))  # refused at once
    begun: set[str] = set()

    def part(route: Any) -> None:
        if route.request.url in begun:
            route.abort("connectionreset")
        else:
            begun.add(route.request.url)
            route.continue_()

    context.route("**/v1/uploads/*/parts", part)
    page.goto("/console/datasets/new")
    page.locator("#files").set_input_files([str(path) for path in files])
    page.get_by_text("Waiting for the connection").nth(1).wait_for()
    page.reload()
    rows = page.locator("[data-uploads] li")
    rows.get_by_text("Interrupted").nth(1).wait_for()
    names = rows.locator("[data-name]").all_text_contents()
    assert {"one.jsonl", "two.jsonl"} <= set(names)
    assert axe(page) == []
    context.unroute("**/v1/uploads/*/parts")
    rows.filter(has_text="two.jsonl").get_by_role("button", name="Discard").click()
    with page.expect_file_chooser() as chooser:
        rows.filter(has_text="one.jsonl").get_by_role("button", name="Choose the file").click()
    with page.expect_request("**/complete") as completed:
        chooser.value.set_files(str(files[0]))
    assert len(json.loads(completed.value.post_data or "")["part_ids"]) == 2
    page.get_by_text(re.compile("^(Valid|Not valid)$")).wait_for(timeout=4 * TIMEOUT_MS)
    assert page.evaluate("Object.keys(localStorage).filter((key) => key.startsWith('upload:'))") == []
