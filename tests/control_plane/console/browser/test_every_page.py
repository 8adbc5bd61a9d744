"""What holds for every page in a real browser: accessibility, both themes, the keyboard, times, and text that must not come alive."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import sqlalchemy as sa

from control_plane.adapters import service as adapters
from control_plane.tenants.tables import console_sessions
from tests.control_plane.console.browser.conftest import Server
from tests.support.console.browser_pages import DESKTOP, PHONE, axe
from tests.support.console.tenant_pages import PAGES
from tests.support.platform.console_world import World

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser


FIRST = ["start", "new job", "running job", "model"]
SIDEWAYS = "[...document.querySelectorAll('main .scroll:has(table)')].filter((one) => one.scrollWidth > one.clientWidth).length"
"""Number of tables that are scrolled sideways."""
SPILT = """[...document.querySelectorAll('.card table:not(.scroll *)')].filter(
    (table) => table.getBoundingClientRect().right > table.closest('.card').getBoundingClientRect().right + 1).length"""
"""Number of tables that are wider than their card."""
NARROW = {"width": 1120, "height": 800}
"""A laptop's window, in which the menu takes a fifth."""
TABLES_OF_TEXT = {"guide"}
"""Pages whose tables are written by hand, with a paragraph in a cell."""


@pytest.mark.parametrize(
    "names", [FIRST, *(pytest.param([*PAGES][nth::4], marks=pytest.mark.slow) for nth in range(4))], ids=["first", *"1234"]
)
def test_every_page_is_accessible_and_nothing_of_a_tenant_comes_alive(page: Page, world: World, names: list[str]) -> None:
    found, wide, sideways, spilt = {}, {}, {}, {}
    for name in names:
        page.goto(PAGES[name](world), wait_until="load")
        found[name] = axe(page)
        page.set_viewport_size(NARROW)
        spilt[name] = page.evaluate(SPILT)
        page.set_viewport_size(PHONE)
        wide[name] = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        sideways[name] = 0 if name in TABLES_OF_TEXT else page.evaluate(SIDEWAYS)
        page.set_viewport_size(DESKTOP)
    assert {name: broken for name, broken in found.items() if broken} == {}
    assert {name: tables for name, tables in sideways.items() if tables} == {}, "cards on a phone"
    assert {name: tables for name, tables in spilt.items() if tables} == {}, "wider than the card"
    assert {name: pixels for name, pixels in wide.items() if pixels > 0} == {}, "wider than a phone of 360 px"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["dark", "light"])
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


def test_a_session_that_ended_leads_to_the_sign_in(page: Page, world: World) -> None:
    page.goto(f"/console/jobs/{world.failed}")
    with world.platform.engine.begin() as conn:
        conn.execute(sa.delete(console_sessions))
    page.get_by_role("link", name="Datasets").click()
    page.get_by_text("Your session has ended").wait_for()
