"""The installed Chromium, driven by Playwright; a test that finds none is skipped, or fails where one is required (``.ci/run``)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
REQUIRED = os.environ.get("FT_TESTS_BROWSER") == "required"


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless browser, closed at the end. Playwright's event loop runs in this thread until then."""
    from playwright.sync_api import sync_playwright

    executable = next((path for name in NAMES if (path := shutil.which(name))), None)
    if executable is None:
        reason = f"no browser: none of {', '.join(NAMES)} is installed (Debian: apt-get install chromium)"
        if REQUIRED:
            pytest.fail(reason)
        pytest.skip(reason)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()
