"""Takes the pictures of the console in ``docs/pictures``: ``make pictures``, or with names of pages
``python -m tests.support.console.console_pictures NAME ...``.

It serves the world of the browser tests and opens each page of ``tenant_pages.PAGES``, some also in dark and at the width of a phone. It
removes pictures of pages that are gone, and lists all in ``docs/console.md``.
"""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from control_plane.api.app import create_app
from control_plane.notifications import webhook_endpoints
from ft_assets.base_models import Catalogue
from resources.database import embedded
from tests.conftest import TEMPLATE, database_server, platform_at
from tests.support.console.tenant_pages import PAGES
from tests.support.console.word_server import word_server
from tests.support.platform.console_world import World, make_world
from tests.support.platform.fleet_in_memory import Servers
from tests.support.processes.browser import chromium
from tests.support.servers.served_app import served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

DOCS = Path(__file__).resolve().parents[3] / "docs"
FOLDER, PAGE = DOCS / "pictures", DOCS / "console.md"
HEADING = "## Pictures"
ROW = 2
"""Pictures beside each other in the document."""
DESKTOP, PHONE = {"width": 1120, "height": 800}, {"width": 390, "height": 780}
MAX_BYTES = 60_000
QUALITIES = range(80, 20, -10)
"""Of WebP, tried in this order until a picture is small enough."""
ALSO_DARK = ("start", "running job", "model in production")
ALSO_PHONE = ("start", "running job", "model in production", "playground")


def _promotion(page: Page) -> None:
    page.get_by_role("button", name="Promote", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Promote").wait_for()


def _conversation(page: Page) -> None:
    page.get_by_label("Model", exact=True).select_option("tiny-base")
    page.get_by_label("Compared with").select_option(index=2)
    page.get_by_label("Message", exact=True).fill("How do I reset my password?")
    page.get_by_role("button", name="Send").click()
    page.get_by_role("button", name="Try again").wait_for()


def _operation(page: Page) -> None:
    page.get_by_role("button", name="Python", exact=True).locator("visible=true").click()


ACTIONS: Mapping[str, Callable[[Page], None]] = {"promotion": _promotion, "playground": _conversation, "reference": _operation}
"""What is done on a page before its picture is taken."""
MORE: Mapping[str, Callable[[World], str]] = {
    "sign-in": lambda _: "/console/sign-in",
    "webhook": lambda w: f"/console/webhooks/{webhook_endpoints.list_endpoints(w.platform, w.tenant).items[0].id}",
    "promotion": lambda w: f"/console/models/{w.draft}",
    "reference": lambda _: "/docs#retrieve_v1_fine_tuning_jobs__job_id__get",
}
"""Pages besides those of the tests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shot:
    """One picture."""

    page: str
    theme: str = "light"
    is_phone: bool = False

    @property
    def name(self) -> str:
        parts = ("console", "dark" if self.theme == "dark" else "", "phone" if self.is_phone else "", self.page.replace(" ", "-"))
        return "_".join(filter(None, parts))

    @property
    def caption(self) -> str:
        suffix = ", dark" if self.theme == "dark" else ", on a phone" if self.is_phone else ""
        return f"{self.page.capitalize()}{suffix}"


def shots() -> Iterator[Shot]:
    """Return every picture: all pages in light, then some in dark and on a phone."""
    yield from (Shot(page=name) for name in (*PAGES, *MORE))
    yield from (Shot(page=name, theme="dark") for name in ALSO_DARK)
    yield from (Shot(page=name, is_phone=True) for name in ALSO_PHONE)


@contextmanager
def serving() -> Iterator[tuple[str, World]]:
    """A console with the world of the tests; yields its URL, too."""
    home = Path(tempfile.mkdtemp(prefix="ft-pictures-"))
    server = database_server(home / "data")
    try:
        with served(word_server()) as url:
            database = embedded.socket_url(home / "data", TEMPLATE)
            platform = platform_at(home / "home", database, Catalogue({}), inference_urls=url, drain_s="0", webhook_allow="127.0.0.0/8")
            (home / "world").mkdir()
            world = make_world(replace(platform, fleet=Servers(url)), home / "world", tenant="acme")
            webhook_endpoints.create(world.platform, world.tenant, name="Deployments", url="http://127.0.0.1:9/hooks", event_types=["*"])
            with served(create_app(world.platform)) as console:
                yield console, world
            platform.logins.dispose()
    finally:
        embedded.stop(server)
        shutil.rmtree(home)


def main(wanted: list[str]) -> None:
    """Take the pictures of these names or pages, or all."""
    FOLDER.mkdir(exist_ok=True)
    with serving() as (url, world), chromium() as browser:
        for shot in shots():
            if not wanted or shot.name in wanted or shot.page in wanted:
                picture = _taken(browser, url, world, shot)
                (FOLDER / f"{shot.name}.webp").write_bytes(picture)
                sys.stdout.write(f"{shot.name}.webp  {len(picture) / 1000:.0f} kB\n")
    for gone in {path.stem for path in FOLDER.glob("console_*")} - {shot.name for shot in shots()}:
        (FOLDER / f"{gone}.webp").unlink()
    before = PAGE.read_text().partition(HEADING)[0].rstrip()
    PAGE.write_text(f"{before}\n\n{HEADING}\n\n{gallery()}")


def gallery() -> str:
    """Return the table of pictures for the document."""
    taken = [shot for shot in shots() if (FOLDER / f"{shot.name}.webp").exists()]
    cells = [f"![{shot.caption}](pictures/{shot.name}.webp) {shot.caption}" for shot in taken]
    rows = [cells[at : at + ROW] for at in range(0, len(cells), ROW)]
    lines = [f"| {' | '.join([*row, ''][:ROW])} |" for row in rows]
    return "\n".join(["`make pictures` takes them again with the installed Chromium.", "", "| | |", "|---|---|", *lines]) + "\n"


def _taken(browser: Browser, url: str, world: World, shot: Shot) -> bytes:
    context = browser.new_context(
        base_url=url, viewport=PHONE if shot.is_phone else DESKTOP, color_scheme="dark" if shot.theme == "dark" else "light",
        locale="en-US", timezone_id="America/New_York", reduced_motion="reduce",
    )  # fmt: skip
    with context:
        return _compressed(_screenshot(context, world, shot))


def _screenshot(context: BrowserContext, world: World, shot: Shot) -> bytes:
    if shot.page != "sign-in":
        context.request.post("/console/sign-in", form={"key": world.key})
    page = context.new_page()
    page.goto((PAGES | MORE)[shot.page](world), wait_until="load")
    ACTIONS.get(shot.page, lambda _: None)(page)
    page.wait_for_timeout(300)  # scripts show times and estimates
    return page.screenshot()


def _compressed(png: bytes) -> bytes:
    """Return the picture as WebP below the limit."""
    image = Image.open(io.BytesIO(png)).convert("RGB")
    for quality in QUALITIES:
        image.save(made := io.BytesIO(), "WEBP", quality=quality, method=6)
        if len(made.getvalue()) <= MAX_BYTES:
            return made.getvalue()
    raise ValueError(f"a picture of {image.size} pixels is larger than {MAX_BYTES} bytes at quality {QUALITIES[-1]}")


if __name__ == "__main__":
    main(sys.argv[1:])
