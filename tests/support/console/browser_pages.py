"""Pages of the console in a real browser: a profile that tolerates no error, and axe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 360, "height": 740}
TIMEOUT_MS = 15_000
AXE_RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "best-practice"]


@contextmanager
def profile(browser: Browser, url: str) -> Iterator[BrowserContext]:
    """A browser profile of its own. A dialog, an error of a script or a breach of the policy fails the test."""
    made = browser.new_context(viewport=DESKTOP, base_url=url, locale="en-GB", timezone_id="America/New_York")
    made.set_default_timeout(TIMEOUT_MS)
    wrong: list[str] = []
    made.on("dialog", lambda dialog: (wrong.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    made.on("weberror", lambda error: wrong.append(str(error.error)))
    made.on("console", lambda said: wrong.append(said.text) if "Content Security Policy" in said.text else None)
    yield made
    made.close()
    assert wrong == []


def axe(page: Page, within: str | None = None) -> list[tuple[str, list[Any]]]:
    """What breaks a rule of accessibility, and where."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, within, options={"runOnly": AXE_RULES})
    return [(broken["id"], [node["target"] for node in broken["nodes"]][:3]) for broken in found.response["violations"]]
