"""A tenant uses the console in a real browser, on the real processes: from a file that is refused to a model that is rolled back."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.journey.conftest import Stack
from tests.journey.test_upload_to_answer import wait_for
from tests.support.processes.browser import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.slow, pytest.mark.browser, pytest.mark.timeout(1500)]
TIMEOUT_MS, TRAINED_MS = 120_000, 700_000
SKIPPED = ("It gains at its task", "Held-out rows do not become less likely", "Golden prompts are still answered coherently")
"""A few steps on a few rows teach nothing that these rules would accept."""


def with_other_columns(tickets: Path, target: Path) -> Path:
    """The same tickets under names that nothing reads without a mapping."""
    rows = [json.loads(line)["messages"] for line in tickets.read_text().splitlines()]
    asked = [(next(m["content"] for m in row if m["role"] == "user"), row[-1]["content"]) for row in rows]
    target.write_text("".join(json.dumps({"question": q, "ground_truth": a}) + "\n" for q, a in asked))
    return target


def restart_api(stack: Stack) -> None:
    """Kill the API; the supervisor starts it again."""
    services = json.loads(stack.ft("status", "--json").stdout)["services"]
    os.kill(next(s["pid"] for s in services if s["name"] == "api"), signal.SIGKILL)


def upload_and_map(page: Page, *files: Path) -> None:
    """Upload a file with readable rows and one with unknown columns, whose suggested mapping is accepted."""
    page.goto("/console/datasets/new")
    page.locator("#files").set_input_files([str(path) for path in files])
    rows = page.locator("[data-uploads] li")
    rows.get_by_text("Not valid", exact=True).wait_for()
    rows.get_by_role("button", name="Upload with this mapping").click()
    rows.get_by_text("Valid", exact=True).nth(1).wait_for()


def submit(page: Page, file: str) -> str:
    page.goto("/console/jobs/new")
    page.get_by_role("radio", name=re.compile("demo-llama-3m")).check()
    option = page.locator("#training_file option", has_text=file).first
    page.get_by_label("Training data").select_option(option.get_attribute("value"))
    page.get_by_label("Epochs").fill("2")
    page.get_by_label("Name suffix").fill("tickets")
    page.get_by_label("Promote the model when it passes").uncheck()
    for rule in SKIPPED:
        page.get_by_label(rule).uncheck()
    page.get_by_text("Limits of the rules").click()
    page.get_by_label("Most held-out items").fill("8")
    page.locator("[data-price]").filter(has_text="$").wait_for()
    page.get_by_role("button", name="Start job").click()
    page.wait_for_url("**/console/jobs/ftjob-*")
    return page.url.rpartition("/")[2]


def watch_through_a_restart(page: Page, stack: Stack) -> None:
    """Steps appear while the page stays open, also after the API was killed; the end shows by itself."""
    page.evaluate("window.stays = true")
    step = page.locator("[data-step]")
    step.filter(has_text=re.compile(r"^[1-9]")).wait_for(timeout=TRAINED_MS)
    restart_api(stack)
    page.get_by_text("The model is ready").wait_for(timeout=TRAINED_MS)
    assert int(step.text_content() or 0) > 3
    assert page.locator("[data-charts] polyline").count() > 2
    assert page.evaluate("window.stays"), "the page was loaded once"


def answer(page: Page, model: str) -> str:
    page.goto("/console/playground")
    page.get_by_label("Model", exact=True).select_option(model)
    page.get_by_label("Message", exact=True).fill("My router arrived broken.")
    page.get_by_role("button", name="Send").click()
    page.locator('[data-side="left"] [data-time]').filter(has_text="s").wait_for()
    return page.locator('[data-side="left"] .turn.assistant p').text_content() or ""


def decide(page: Page, path: str, change: str) -> None:
    """Make a change on a model's page, and confirm it."""
    page.goto(path)
    page.get_by_role("button", name=change, exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name=change).click()


def test_the_way_of_a_tenant_through_the_console(stack: Stack, tickets: Path, tmp_path: Path) -> None:
    key = json.loads(stack.ft("admin", "tenants", "create", "console", "--tier", "standard", "--json").stdout)["api_key"]
    before = _served(stack, key, tickets)
    bad = with_other_columns(tickets, tmp_path / "questions.jsonl")
    good = tmp_path / "chats.jsonl"
    good.write_bytes(tickets.read_bytes())
    with chromium() as browser:
        context = browser.new_context(base_url=stack.endpoints["api"], viewport={"width": 1280, "height": 850})
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.goto("/console")
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Sign in").click()
        upload_and_map(page, bad, good)
        job = submit(page, "questions.jsonl")
        watch_through_a_restart(page, stack)
        page.get_by_role("link", name="evaluation", exact=True).click()
        page.get_by_text("Passed", exact=True).wait_for()
        page.get_by_role("heading", name="Answers side by side").wait_for()
        made: Any = stack.client(key).fine_tuning.jobs.retrieve(job)
        model = f"/console/models/{made.adapter_id}"
        decide(page, model, "Promote")
        page.get_by_text("The model is in production.").wait_for()
        assert answer(page, made.fine_tuned_model)
        decide(page, model, "Roll back")
        page.get_by_text("the one before it serves again").wait_for()
        assert answer(page, before)
        page.get_by_role("button", name="Sign out").click()
        page.get_by_label("API key").wait_for()
        page.goto("/console/jobs")
        assert "/console/sign-in" in page.url
        context.close()


def _served(stack: Stack, key: str, tickets: Path) -> str:
    """The model that is in production before: trained and promoted through the API, under the same name."""
    client = stack.client(key)
    file = client.files.create(file=tickets, purpose="fine-tune")
    rules = {"skip": ["golden", "task", "perplexity"], "max_items": 8, "max_new_tokens": 40}
    extra = {"eval_config": rules, "hyperparameters": {"n_epochs": 1}}
    made = client.fine_tuning.jobs.create(model="demo-llama-3m", training_file=file.id, suffix="tickets", extra_body=extra)
    done: Any = wait_for(client, made.id)
    assert done.status == "succeeded", done.error
    return str(done.fine_tuned_model)
