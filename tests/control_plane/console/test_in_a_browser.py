"""The console in a real browser: journeys, live pages, accessibility, and text that must not come alive."""

from __future__ import annotations

import json
import re
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa

from control_plane.adapters import service as adapters
from control_plane.api.app import create_app
from control_plane.billing import budgets
from control_plane.jobs import service as jobs
from control_plane.platform.context import Platform
from control_plane.serving import model_routes
from control_plane.tenants.tables import console_sessions
from tests.control_plane.console.test_pages import HOSTILE, PAGES
from tests.support.console.word_server import word_server
from tests.support.platform.background_worker import working
from tests.support.platform.console_world import World, make_world, report_steps
from tests.support.platform.fleet_in_memory import Servers
from tests.support.processes.browser import chromium
from tests.support.servers.served_app import served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

pytestmark = pytest.mark.browser
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 360, "height": 740}
TIMEOUT_MS = 15_000
AXE_RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def platform(new_platform: Callable[..., Platform]) -> Iterator[Platform]:
    with served(word_server()) as url:
        yield replace(new_platform(inference_urls=url, drain_s="0"), fleet=Servers(url))


@pytest.fixture(scope="module")
def world(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(platform, tmp_path_factory.mktemp("world"), tenant="acme", text=HOSTILE)


class Server:
    """The API over the world, on one port over restarts."""

    def __init__(self, world: World) -> None:
        self._world, self._running = world, ExitStack()
        self.url = self._running.enter_context(served(create_app(world.platform)))

    def stop(self) -> None:
        self._running.close()

    def start(self) -> None:
        self._running.enter_context(served(create_app(self._world.platform), port=int(self.url.rpartition(":")[2])))


@pytest.fixture(scope="module")
def server(world: World, browser: Browser) -> Iterator[Server]:
    with working(world.platform):
        made = Server(world)
        yield made
        made.stop()


@pytest.fixture
def context(browser: Browser, server: Server, world: World) -> Iterator[BrowserContext]:
    """A browser profile of its own, signed in. A dialog, an error of a script or a breach of the policy fails the test."""
    made = browser.new_context(viewport=DESKTOP, base_url=server.url, locale="en-GB", timezone_id="America/New_York")
    made.set_default_timeout(TIMEOUT_MS)
    made.request.post("/console/sign-in", form={"key": world.key})
    wrong: list[str] = []
    made.on("dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    made.on("weberror", lambda error: wrong.append(str(error.error)))
    made.on("console", lambda said: wrong.append(said.text) if "Content Security Policy" in said.text else None)
    yield made
    made.close()
    assert wrong == []


@pytest.fixture
def page(context: BrowserContext) -> Page:
    return context.new_page()


def axe(page: Page, within: str | None = None) -> list[tuple[str, list[Any]]]:
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, within, options={"runOnly": AXE_RULES})
    return [(broken["id"], [node["target"] for node in broken["nodes"]][:3]) for broken in found.response["violations"]]


@pytest.mark.parametrize("nth", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))])
def test_every_page_is_accessible_and_nothing_of_a_tenant_comes_alive(page: Page, world: World, nth: int) -> None:
    found, wide = {}, {}
    for name in [*PAGES][nth::4]:
        page.goto(PAGES[name](world), wait_until="load")
        found[name] = axe(page)
        page.set_viewport_size(PHONE)
        wide[name] = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        page.set_viewport_size(DESKTOP)
    assert {name: broken for name, broken in found.items() if broken} == {}
    assert {name: pixels for name, pixels in wide.items() if pixels > 0} == {}, "wider than a phone of 360 px"


@pytest.mark.parametrize("scheme", ["dark", pytest.param("light", marks=pytest.mark.slow)])
def test_both_themes_have_enough_contrast(browser: Browser, server: Server, world: World, scheme: Any) -> None:
    context = browser.new_context(viewport=PHONE, base_url=server.url, color_scheme=scheme)
    assert axe_of_sign_in(context.new_page()) == []
    context.request.post("/console/sign-in", form={"key": world.key})
    page = context.new_page()
    for name in ("start", "running job", "failed job", "models", "refused file", "model in production", "route", "all data"):
        page.goto(PAGES[name](world), wait_until="load")
        assert axe(page) == [], name
    context.close()


def axe_of_sign_in(page: Page) -> list[Any]:
    page.goto("/console")
    assert page.get_by_label("API key").is_visible()
    return axe(page)


def test_the_theme_is_switched_and_kept(page: Page) -> None:
    page.emulate_media(color_scheme="light")
    page.goto("/console")
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.get_by_role("button", name="Switch between light and dark").click()
    dark = page.evaluate(background)
    assert light != dark
    page.goto("/console/jobs")
    assert page.evaluate(background) == dark


def test_a_page_is_used_by_keyboard(page: Page, world: World) -> None:
    page.goto(f"/console/models/{world.draft}")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "content"
    page.get_by_role("button", name="Promote", exact=True).focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    assert dialog.get_by_text("Promote this model?").is_visible()
    page.keyboard.press("Escape")
    assert not dialog.is_visible()
    assert adapters.get_adapter(world.platform, world.tenant, world.draft).stage == "draft"


def test_times_are_those_of_the_readers_zone(page: Page, world: World) -> None:
    page.goto("/console/usage")
    ends = page.locator("time").first
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT00:00:00Z", ends.get_attribute("datetime") or "")
    assert ends.text_content() and re.search(r"1[89]:00", ends.text_content() or ""), "the month of UTC ends in the evening in New York"


def test_the_journey_from_a_bad_file_to_a_job_that_is_watched_and_signed_out(
    browser: Browser, server: Server, world: World, tmp_path: Path
) -> None:
    bad = tmp_path / "questions.jsonl"
    rows = [{"question": f"How long does step {i} take?", "ground_truth": f"{i} days, then it is done."} for i in range(60)]
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
    page.get_by_role("link", name="Open dataset").click()
    page.get_by_role("heading", name="questions").wait_for()
    page.goto("/console/jobs/new")
    page.get_by_label("Training data").select_option(label=f"questions.jsonl ({bad.stat().st_size / 1024:.1f} KiB)")
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


def test_a_failed_job_starts_again(page: Page, world: World) -> None:
    page.goto(f"/console/jobs/{world.failed}")
    page.get_by_role("button", name="Start again").click()
    page.get_by_text("The job was submitted again.").wait_for()
    made = page.url.split("?")[0].rpartition("/")[2]
    assert made != world.failed
    jobs.cancel(world.platform, world.tenant, made)


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
    page.locator("[data-warning] li", has_text="near duplicates").wait_for()
    assert re.search(r"LoRA: 1 GPU, \$\d+\.\d\d an hour", page.locator(".choice").first.text_content() or "")
    page.get_by_label("Unsafe prompts are refused").uncheck()
    page.get_by_text("Limits of the rules").click()
    page.get_by_label("Least gain over the base").fill("0.1")
    body = json.loads(re.findall(r"-d '(.*)'", page.locator("[data-code]").text_content() or "", re.DOTALL)[0])
    assert body["eval_config"] == {"skip": ["safety"], "min_relative_gain": 0.1}
    page.locator("[data-price]").filter(has_text="$").wait_for()


def test_a_finished_job_asks_for_nothing(page: Page, world: World) -> None:
    asked: list[str] = []
    page.goto(f"/console/jobs/{world.failed}", wait_until="networkidle")
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(1500)
    assert asked == []


def test_a_model_is_promoted_asked_and_rolled_back(page: Page, world: World) -> None:
    page.goto(f"/console/models/{world.draft}")
    page.get_by_role("button", name="Promote", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Promote").click()
    page.get_by_text("The model is in production.").wait_for()
    name = adapters.get_adapter(world.platform, world.tenant, world.draft).name
    page.goto("/console/playground")
    page.get_by_label("Model", exact=True).select_option("tiny-base")
    page.get_by_label("Compared with").select_option(name)
    for number in (1, 3):
        page.get_by_label("Message", exact=True).fill(f"Hello <b>{number}</b>")
        page.keyboard.press("Control+Enter")
        for side, model in (("left", "tiny-base"), ("right", name)):
            page.locator(f'[data-side="{side}"]').get_by_text(f"This is {model}, message {number}").wait_for()
    page.goto(f"/console/models/{world.draft}")
    page.get_by_role("button", name="Roll back").click()
    page.get_by_role("dialog").get_by_role("button", name="Roll back").click()
    page.get_by_text("the one before it serves again").wait_for()
    assert page.url.split("?")[0].endswith(world.production)
    stages = [adapters.get_adapter(world.platform, world.tenant, one).stage for one in (world.production, world.draft)]
    assert (stages[0], stages[1] == "production") == ("production", False)


def test_a_link_reproduces_the_playground(page: Page) -> None:
    page.goto("/console/playground#left=tiny-base&temperature=0.2&system=Be+brief&message=Hi")
    found = [page.locator(f"#{name}").input_value() for name in ("left", "temperature", "system", "message")]
    assert found == ["tiny-base", "0.2", "Be brief", "Hi"]


def test_an_answer_is_stopped_tried_again_counted_and_copied_as_code(page: Page, context: BrowserContext) -> None:
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto("/console/playground#left=tiny-base")
    left = page.locator('[data-side="left"]')
    page.get_by_label("Message", exact=True).fill("Hello")
    page.get_by_role("button", name="Send").click()
    left.get_by_text("7 + 4 tokens").wait_for()
    page.get_by_role("button", name="Try again").click()
    left.get_by_text("7 + 4 tokens").wait_for()
    assert left.locator(".turn").count() == 2, "the answer was replaced"
    page.get_by_role("button", name="Python", exact=True).click()
    code = page.locator("[data-code]").text_content() or ""
    assert 'messages=[{"role": "user", "content": "Hello"}]' in code
    page.get_by_label("Message", exact=True).fill("Count slowly")
    page.get_by_role("button", name="Send").click()
    left.get_by_text("again again").wait_for()
    page.get_by_role("button", name="Stop").click()
    left.get_by_text("stopped").wait_for()
    page.get_by_role("button", name="Copy link").click()
    page.get_by_text("Copied").wait_for()
    again = context.new_page()
    again.goto(page.evaluate("navigator.clipboard.readText()"))
    assert again.locator('[data-side="left"] .turn').count() == 4, "the link reproduces the conversation"


def test_what_a_schema_lacks_is_said_before_it_is_sent(page: Page) -> None:
    page.goto("/console/playground#left=tiny-base&schema=%7Bno&message=Hi")
    page.get_by_role("button", name="Send").click()
    assert page.evaluate("document.querySelector('#schema').validationMessage").startswith("This is not JSON")
    assert page.locator(".turn").count() == 0
    page.locator("#schema").fill('{"type": "object"}')
    page.get_by_role("button", name="Send").click()
    page.get_by_text("message 1").wait_for()


def test_a_broken_upload_goes_on_where_it_stopped(page: Page, context: BrowserContext, tmp_path: Path) -> None:
    big = tmp_path / "big.jsonl"
    row = json.dumps({"messages": [{"role": "user", "content": "x " * 400}, {"role": "assistant", "content": "y " * 400}]})
    with big.open("w") as out:
        for i in range(11_000):
            out.write(row.replace("x ", f"{i} ", 1) + "\n")
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


def test_uploads_are_listed_after_a_reload_and_go_on(page: Page, context: BrowserContext, tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.txt" for name in ("one", "two")]
    for path in files:
        path.write_text(f"{path.stem} {'word ' * 8}\n" * 200_000)
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
    assert sorted(name for name in names if name.endswith(".txt")) == ["one.txt", "two.txt"]
    assert axe(page) == []
    context.unroute("**/v1/uploads/*/parts")
    rows.filter(has_text="two.txt").get_by_role("button", name="Discard").click()
    with page.expect_file_chooser() as chooser:
        rows.filter(has_text="one.txt").get_by_role("button", name="Choose the file").click()
    with page.expect_request("**/complete") as completed:
        chooser.value.set_files(str(files[0]))
    assert len(json.loads(completed.value.post_data or "")["part_ids"]) == 2
    page.get_by_text(re.compile("^(Valid|Not valid)$")).wait_for(timeout=4 * TIMEOUT_MS)
    assert page.evaluate("Object.keys(localStorage).filter((key) => key.startsWith('upload:'))") == []


def test_the_reference_is_accessible_and_runs_what_only_reads(page: Page, world: World) -> None:
    page.goto("/docs#me_v1_me_get")
    operation = page.locator("#me_v1_me_get")
    operation.get_by_role("button", name="Run with").click()
    operation.get_by_text(f'"tenant_id": "{world.tenant}"').wait_for()
    assert axe(page) == []


def test_the_reference_fills_in_parameters_and_asks_before_a_change(page: Page, world: World) -> None:
    page.goto("/docs#retrieve_v1_fine_tuning_jobs__job_id__get")
    job = page.locator("#retrieve_v1_fine_tuning_jobs__job_id__get")
    job.get_by_role("button", name="Run with").click()
    job.get_by_text("Fill in job_id first").wait_for()
    job.get_by_label("job_id").fill(world.failed)
    job.get_by_role("button", name="Run with").click()
    job.get_by_text(f'"id": "{world.failed}"').wait_for()
    for language, said in {"Python": f'client.fine_tuning.jobs.retrieve("{world.failed}")', "ft": f"ft job {world.failed}"}.items():
        job.get_by_role("button", name=language, exact=True).click()
        assert said in (job.locator("[data-code]").text_content() or "")
    budget = page.locator("#create_v1_budgets_post")
    budget.locator("summary").click()
    budget.get_by_label("Body").fill('{"name": "From the reference", "limit_micros": 5000000}')
    dialog = page.get_by_role("dialog")
    budget.get_by_role("button", name="Run with").click()
    dialog.get_by_role("button", name="Keep").click()
    names = [one.name for one in budgets.list_budgets(world.platform, world.tenant).items]
    assert "From the reference" not in names, "nothing was sent"
    budget.get_by_role("button", name="Run with").click()
    dialog.get_by_role("button", name="Run with").click()
    budget.locator("[data-answer]").get_by_text('"id": "bud_').wait_for()
    assert "From the reference" in [one.name for one in budgets.list_budgets(world.platform, world.tenant).items]
    budget.get_by_label("Body").fill("{no")
    budget.get_by_role("button", name="Run with").click()
    budget.locator("[data-answer]").get_by_text("The body is not JSON").wait_for()
    assert not dialog.is_visible()
    assert axe(page, "#create_v1_budgets_post") == []


def test_shares_follow_the_weights_while_they_are_typed(page: Page, world: World) -> None:
    page.goto(f"/console/models/routes/{world.route}")
    rows = page.locator("[data-target]")
    assert [rows.nth(at).locator("[data-share]").text_content() for at in range(2)] == ["90 %", "10 %"]
    rows.nth(1).get_by_role("spinbutton").fill("30")
    assert [rows.nth(at).locator("[data-share]").text_content() for at in range(2)] == ["75 %", "25 %"]
    page.get_by_role("button", name="Set shares").click()
    page.get_by_text("The route is set").wait_for()
    shares = [round(one.share, 2) for one in model_routes.get(world.platform, world.tenant, world.route).targets]
    assert shares == [0.75, 0.25]


def test_consequences_are_read_before_a_model_is_deprecated(page: Page, world: World) -> None:
    page.goto(f"/console/models/{world.production}")
    page.get_by_role("button", name="Deprecate").click()
    dialog = page.get_by_role("dialog")
    assert "requests to it fail" in (dialog.text_content() or "")
    assert f"{world.route}:" in (dialog.text_content() or "")
    assert axe(page) == []
    dialog.get_by_role("button", name="Keep").click()
    assert adapters.get_adapter(world.platform, world.tenant, world.production).stage == "production"


def test_the_lineage_is_walked_by_keyboard(page: Page, world: World) -> None:
    page.goto(f"/console/models/{world.production}")
    page.locator("svg.lineage.wide a").first.focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.querySelector('.kind').textContent") == "Dataset"
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/console/datasets/{world.dataset}")


def test_an_export_is_made_while_the_page_waits_and_downloaded(page: Page, world: World) -> None:
    page.goto(f"/console/models/{world.production}")
    page.get_by_label("Format").select_option("tokenizer")
    page.get_by_role("button", name="Export", exact=True).click()
    with page.expect_download() as download:
        page.get_by_role("link", name="Download").click(timeout=8 * TIMEOUT_MS)
    with tarfile.open(download.value.path()) as archive:
        assert "manifest.json" in [Path(name).name for name in archive.getnames()]


def test_the_deletion_of_everything_waits_for_the_name(page: Page, world: World) -> None:
    page.goto("/console/settings/data")
    button = page.get_by_role("button", name="Delete all data")
    page.get_by_label("Reason").fill("end")
    assert button.is_disabled()
    page.get_by_label(re.compile("to confirm")).fill(world.tenant)
    assert button.is_enabled()


def test_a_session_that_ended_leads_to_the_sign_in(page: Page, world: World) -> None:
    page.goto(f"/console/jobs/{world.failed}")
    with world.platform.engine.begin() as conn:
        conn.execute(sa.delete(console_sessions))
    page.get_by_role("link", name="Datasets").click()
    page.get_by_text("Your session has ended").wait_for()
