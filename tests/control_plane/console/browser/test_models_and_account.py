"""Models, the playground, the reference and the account in a real browser."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from control_plane.adapters import service as adapters
from control_plane.billing import budgets
from control_plane.serving import model_routes
from tests.support.console.browser_pages import TIMEOUT_MS, axe
from tests.support.platform.console_world import World

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

pytestmark = pytest.mark.browser


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
    page.get_by_label("Message", exact=True).fill("Answer silently")
    page.get_by_role("button", name="Send").click()
    left.get_by_text("(empty answer)").wait_for()
    page.get_by_role("button", name="New conversation").click()
    page.get_by_label("Message", exact=True).fill("Hello")
    page.get_by_role("button", name="Send").click()
    left.get_by_text("7 + 4 tokens").wait_for()
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


@pytest.mark.slow
def test_the_reference_is_accessible_and_runs_what_only_reads(page: Page, world: World) -> None:
    page.goto("/docs#me_v1_me_get")
    operation = page.locator("#me_v1_me_get")
    operation.get_by_role("button", name="Run with").click()
    operation.get_by_text(f'"tenant_id": "{world.tenant}"').wait_for()
    assert axe(page) == []


def test_codes_of_errors_are_found_by_the_words_that_are_typed(page: Page) -> None:
    page.goto("/console/guides/errors")
    codes, sections = page.locator("article h3:visible"), page.locator("article h2:visible")
    everything = (codes.count(), sections.count())
    page.get_by_label("Find a code").fill("template TOKEN")
    assert 0 < codes.count() < 20 < everything[0]
    assert page.locator("#stop_token_not_trained").is_visible()
    shown = sections.all_text_contents()
    assert "Models and training settings" in shown and "Webhooks and e-mail" not in shown, "sections without a code found are not shown"
    page.get_by_label("Find a code").fill("upload_cancelled")
    assert codes.all_text_contents() == ["upload_completed", "upload_cancelled", "upload_expired"], "codes that share a text"
    assert sections.all_text_contents() == ["Files and datasets"]
    assert axe(page) == []
    page.get_by_label("Find a code").fill("")
    assert (codes.count(), sections.count()) == everything


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
