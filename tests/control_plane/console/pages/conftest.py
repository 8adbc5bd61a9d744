"""A tenant with something on every page, whose names and rows are hostile; the tests of a module share it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from control_plane.api.app import create_app
from control_plane.platform.context import Platform
from tests.control_plane.console.conftest import Visitor
from tests.support.console.tenant_pages import HOSTILE
from tests.support.platform.background_worker import working
from tests.support.platform.console_world import World, make_world


@pytest.fixture(scope="module")
def platform(new_platform: Callable[..., Platform]) -> Platform:
    """Sends webhooks to this machine."""
    return new_platform(webhook_allow="127.0.0.0/8")


@pytest.fixture(scope="module")
def world(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(platform, tmp_path_factory.mktemp("world"), tenant="hostile", text=HOSTILE)


@pytest.fixture(scope="module")
def api_url(world: World, serve: Callable[..., str]) -> Iterator[str]:
    """The API over the world's platform, whose base model has a tokenizer."""
    with working(world.platform):
        yield serve(create_app(world.platform))


@pytest.fixture
def visitor(visit: Callable[[str], Visitor], world: World) -> Visitor:
    return visit(world.key)
