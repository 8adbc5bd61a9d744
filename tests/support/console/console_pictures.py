"""Takes the pictures of the console in ``docs/pictures``: ``make pictures``, or with names of pages
``python -m tests.support.console.console_pictures NAME ...``.

It serves the world of the browser tests and opens each page of ``tenant_pages.PAGES``, some also in dark and at the width of a phone. It
removes pictures of pages that are gone, and lists all in ``docs/console.md``.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from control_plane.api.app import create_app
from control_plane.console.pages.page import OPERATORS
from control_plane.datasets import service as datasets
from control_plane.datasets.uploads import uploaded_files
from control_plane.notifications import webhook_endpoints
from control_plane.platform.context import Actor
from control_plane.tenants import operators
from core.base_models import Catalogue
from resources.database import embedded
from resources.database.engine import make_engine
from resources.tracking.wandb_server import HttpWandb
from tests.conftest import TEMPLATE, database_server, platform_at
from tests.support.console.tenant_pages import PAGES
from tests.support.console.word_server import word_server
from tests.support.models.reasoning_templates import SWITCHED
from tests.support.models.tiny_model import build_tiny_model
from tests.support.platform.console_world import World, make_world
from tests.support.platform.fleet_in_memory import Servers
from tests.support.platform.operator_world import OPERATOR_PAGES, make_operator_world, pools_file
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
TIMEOUT_MS = 300_000
MAX_BYTES = 60_000
QUALITIES = range(80, 20, -10)
"""Of WebP, tried in this order until a picture is small enough."""
ALSO_DARK = ("start", "running job", "model in production", "operators' queue")
ALSO_PHONE = ("start", "running job", "model in production", "playground", "operators' queue")
REASONER = "tiny-reasoner"


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


def _mixture(page: Page) -> None:
    page.get_by_role("radio", name=REASONER).check()  # the other model's template drops the reasoning of one of the files
    page.get_by_role("button", name="Add another file").click()
    for nth, weight in enumerate(("2", "1")):
        source = page.locator("[data-source]").nth(nth)
        source.locator("[data-file]").select_option(index=nth)
        source.locator("[data-how]").select_option("weight")
        source.locator("[data-much]").fill(weight)
    page.locator("[data-price]").wait_for()


def _plan(page: Page) -> None:
    page.get_by_label("Jobs a day").fill("200")
    for nth, share in enumerate(("78", "22", "", "")):  # the pools take adapters of small models only
        page.get_by_label("Share, %").nth(nth).fill(share)
    page.get_by_role("button", name="Plan", exact=True).click()
    page.get_by_text("GPUs that jobs need by hour").wait_for()


ACTIONS: Mapping[str, Callable[[Page], None]] = {
    "promotion": _promotion, "playground": _conversation, "reference": _operation, "mixture": _mixture, "computed plan": _plan,
}  # fmt: skip
"""What is done on a page before its picture is taken."""
ANCHORS = {"dataset as trained": "trained", "answers that got worse": "answers"}
"""What of a page is shown, by the id of its heading."""
MORE: Mapping[str, Callable[[World], str]] = {
    "sign-in": lambda _: "/console/sign-in",
    "webhook": lambda w: f"/console/webhooks/{webhook_endpoints.list_endpoints(w.platform, w.tenant).items[0].id}",
    "promotion": lambda w: f"/console/models/{w.draft}",
    "reference": lambda _: "/docs#retrieve_v1_fine_tuning_jobs__job_id__get",
    "mixture": lambda _: "/console/jobs/new",
    "reasoning": lambda w: f"/console/datasets/{_reasoning(w)}?model={REASONER}#trained",
}
"""Pages besides those of the tests."""
OF_OPERATORS = {name: path for name, path in OPERATOR_PAGES.items() if name != "suspended tenant"} | {"computed plan": f"{OPERATORS}/plan"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """A console with the key of a tenant or an operator, and the addresses of its pages."""

    url: str
    key: str
    paths: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shot:
    """One picture."""

    page: str
    theme: str = "light"
    is_phone: bool = False

    @property
    def name(self) -> str:
        words = self.page.replace(" ", "-").replace("'", "")
        parts = ("console", "dark" if self.theme == "dark" else "", "phone" if self.is_phone else "", words)
        return "_".join(filter(None, parts))

    @property
    def caption(self) -> str:
        suffix = ", dark" if self.theme == "dark" else ", on a phone" if self.is_phone else ""
        return f"{self.page.capitalize()}{suffix}"


def shots() -> Iterator[Shot]:
    """Return every picture: all pages in light, then some in dark and on a phone."""
    yield from (Shot(page=name) for name in (*PAGES, *MORE, *OF_OPERATORS))
    yield from (Shot(page=name, theme="dark") for name in ALSO_DARK)
    yield from (Shot(page=name, is_phone=True) for name in ALSO_PHONE)


@contextmanager
def serving() -> Iterator[Sequence[Site]]:
    """Consoles with the worlds of the tests, of a tenant and of an operator."""
    home = Path(tempfile.mkdtemp(prefix="ft-pictures-"))
    server = database_server(home / "data")
    try:
        with served(word_server()) as url, _operators(home / "operators", home / "data") as operators_site:
            database = embedded.socket_url(home / "data", TEMPLATE)
            platform = platform_at(home / "home", database, Catalogue({}), inference_urls=url, drain_s="0", webhook_allow="127.0.0.0/8")
            (home / "world").mkdir()
            world = make_world(
                replace(platform, fleet=Servers(url), wandb=HttpWandb(url="http://127.0.0.1:9")), home / "world", tenant="acme"
            )
            webhook_endpoints.create(world.platform, world.tenant, name="Deployments", url="http://127.0.0.1:9/hooks", event_types=["*"])
            world = _with_reasoner(world, home / "world")
            with served(create_app(world.platform)) as console:
                paths = {name: path(world) for name, path in (PAGES | MORE).items()}
                yield Site(url=console, key=world.key, paths=paths), operators_site
            platform.logins.dispose()
    finally:
        embedded.stop(server)
        shutil.rmtree(home)


@contextmanager
def _operators(home: Path, data: Path) -> Iterator[Site]:
    """The operators' pages over a database of their own."""
    home.mkdir()
    admin = make_engine(embedded.socket_url(data, "postgres")).execution_options(isolation_level="AUTOCOMMIT")
    with admin.connect() as conn:
        conn.exec_driver_sql(f"CREATE DATABASE ft_operators TEMPLATE {TEMPLATE}")
    admin.dispose()
    base = build_tiny_model(home / "tiny-base")
    models = Catalogue({"tiny-base": ({"id": "tiny-base", "path": str(base), "license": "Apache-2.0"}, base)})
    database = embedded.socket_url(data, "ft_operators")
    platform = platform_at(home / "home", database, models, pools=str(pools_file(home)), webhook_allow="127.0.0.0/8")
    rows = home / "rows.jsonl"
    rows.write_text("".join(_row(f"question {i}", f"answer {i}") for i in range(120)))
    world = make_operator_world(platform, lambda: rows)
    key = operators.create(world.platform.acting_as(Actor(kind="operator", id="cli:pictures")), "Grace Hopper").secret
    with served(create_app(world.platform)) as console:
        yield Site(url=console, key=key, paths=OF_OPERATORS)
    platform.logins.dispose()


def _with_reasoner(world: World, directory: Path) -> World:
    """Add a base model whose template has reasoning, and data with it."""
    base = build_tiny_model(directory / REASONER, seed=1, template=SWITCHED)
    known = {"tiny-base": directory / "tiny-base", REASONER: base}
    models = Catalogue({name: ({"id": name, "path": str(path), "license": "Apache-2.0"}, path) for name, path in known.items()})
    made = replace(world, platform=replace(world.platform, models=models))
    thought = "The order was placed on day {0}. Delivery takes three days, so it comes on day {1}."
    rows = directory / "reasoning.jsonl"
    rows.write_text("".join(_row(f"When does order {i} come?", f"On day {i + 3}.", thought.format(i, i + 3)) for i in range(120)))
    with rows.open("rb") as stream:
        uploaded_files.create(made.platform, made.tenant, stream, filename="reasoning.jsonl", purpose="fine-tune", model=REASONER)
    return made


def _reasoning(world: World) -> str:
    """Return the id of the dataset with reasoning."""
    return next(one.id for one in datasets.list_datasets(world.platform, world.tenant).items if one.name == "reasoning")


def _row(question: str, answer: str, thought: str | None = None) -> str:
    said = {"role": "assistant", "content": answer} | ({"reasoning_content": thought} if thought else {})
    return json.dumps({"messages": [{"role": "user", "content": question}, said]}) + "\n"


def main(wanted: list[str]) -> None:
    """Take the pictures of these names or pages, or all."""
    FOLDER.mkdir(exist_ok=True)
    with serving() as sites, chromium() as browser:
        for shot in shots():
            if not wanted or shot.name in wanted or shot.page in wanted:
                picture = _taken(browser, next(site for site in sites if shot.page in site.paths), shot)
                (FOLDER / f"{shot.name}.webp").write_bytes(picture)
                sys.stdout.write(f"{shot.name}.webp  {len(picture) / 1000:.0f} kB\n")
                sys.stdout.flush()
    for gone in {path.stem for path in FOLDER.glob("console_*")} - {shot.name for shot in shots()}:
        (FOLDER / f"{gone}.webp").unlink()
    before = PAGE.read_text().partition(HEADING)[0].rstrip()
    PAGE.write_text(f"{before}\n\n{HEADING}\n\n{gallery()}")


def gallery() -> str:
    """Return the table of pictures for the document; the caption beside a picture says what it shows, so the picture has no other text."""
    taken = [shot for shot in shots() if (FOLDER / f"{shot.name}.webp").exists()]
    cells = [f"![](pictures/{shot.name}.webp) {shot.caption}" for shot in taken]
    rows = [cells[at : at + ROW] for at in range(0, len(cells), ROW)]
    lines = [f"| {' | '.join([*row, ''][:ROW])} |" for row in rows]
    return "\n".join(["`make pictures` takes them again with the installed Chromium.", "", "| | |", "|---|---|", *lines]) + "\n"


def _taken(browser: Browser, site: Site, shot: Shot) -> bytes:
    context = browser.new_context(
        base_url=site.url, viewport=PHONE if shot.is_phone else DESKTOP, color_scheme="dark" if shot.theme == "dark" else "light",
        locale="en-US", timezone_id="America/New_York", reduced_motion="reduce",
    )  # fmt: skip
    context.set_default_timeout(TIMEOUT_MS)
    with context:
        return _compressed(_screenshot(context, site, shot))


def _screenshot(context: BrowserContext, site: Site, shot: Shot) -> bytes:
    if shot.page != "sign-in":
        context.request.post("/console/sign-in", form={"key": site.key}, timeout=TIMEOUT_MS)
    page = context.new_page()
    anchor = f"#{ANCHORS[shot.page]}" if shot.page in ANCHORS else ""
    page.goto(site.paths[shot.page] + anchor, wait_until="load")
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
