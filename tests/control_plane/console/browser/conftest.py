"""The console of one tenant in a real browser, over a world that the tests of a module share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from control_plane.api.app import create_app
from control_plane.platform.context import Platform
from tests.support.console.browser_pages import profile
from tests.support.console.tenant_pages import HOSTILE
from tests.support.console.word_server import word_server
from tests.support.platform.background_worker import working
from tests.support.platform.console_world import World, make_world
from tests.support.platform.fleet_in_memory import Servers
from tests.support.processes.browser import chromium
from tests.support.servers.served_app import served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page


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
    """Signed in as the tenant."""
    with profile(browser, server.url) as made:
        made.request.post("/console/sign-in", form={"key": world.key})
        yield made


@pytest.fixture
def page(context: BrowserContext) -> Page:
    return context.new_page()
