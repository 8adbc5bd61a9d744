"""Single sign-on and operators' pages in a real browser: cookies over sites, accessibility, both themes, a phone, the keyboard."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from control_plane.api.app import create_app
from control_plane.capacity import nodes
from control_plane.composition import identity_provider
from control_plane.platform.context import Platform
from control_plane.tenants import members
from tests.support.console.browser_pages import DESKTOP, PHONE, axe, profile
from tests.support.console.tenant_pages import HOSTILE
from tests.support.platform.operator_world import OPERATOR_PAGES, OperatorWorld, make_operator_world, pools_file
from tests.support.processes.openid_provider import CLIENT, SECRET, Provider, openid_provider
from tests.support.servers.served_app import served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

pytestmark = pytest.mark.browser
SPILT = """[...document.querySelectorAll('.card table')].filter(
    (table) => table.getBoundingClientRect().right > table.closest('.card').getBoundingClientRect().right + 1).length"""
"""Number of tables that are wider than their card."""
ROWS = '{"messages": [{"role": "user", "content": "question %d"}, {"role": "assistant", "content": "answer %d"}]}\n'


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    """On ``localhost``: another site than the console on 127.0.0.1."""
    with openid_provider() as running:
        yield running


@pytest.fixture(scope="module")
def world(new_platform: Callable[..., Platform], provider: Provider, tmp_path_factory: pytest.TempPathFactory) -> OperatorWorld:
    directory = tmp_path_factory.mktemp("operators")
    rows = directory / "rows.jsonl"
    rows.write_text("".join(ROWS % (i, i) for i in range(120)))
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    platform = new_platform(
        pools=str(pools_file(directory)), webhook_allow="127.0.0.0/8", public_url=f"http://127.0.0.1:{port}", oidc_issuer=provider.url,
        oidc_client_id=CLIENT, oidc_client_secret=SECRET, oidc_operators="ft-operators",
    )  # fmt: skip
    return make_operator_world(replace(platform, identity=identity_provider(platform.settings)), lambda: Path(rows), text=HOSTILE)


@pytest.fixture(scope="module")
def url(world: OperatorWorld) -> Iterator[str]:
    with served(create_app(world.platform), port=int(world.platform.settings.public_url.rpartition(":")[2])) as running:
        yield running


@pytest.fixture
def context(browser: Browser, url: str) -> Iterator[BrowserContext]:
    with profile(browser, url) as made:
        yield made


def sign_in(page: Page, subject: str, path: str = "/console") -> None:
    """Press the button, sign in at the provider, and come back."""
    page.goto(path)
    page.get_by_role("link", name="Continue with single sign-on").click()
    page.locator("input[name=sub]").fill(subject)
    page.locator("form button:not([value=deny])").first.click()
    page.wait_for_url("**/console**")


@pytest.mark.slow
def test_a_member_of_two_tenants_signs_in_with_the_provider_and_chooses_one(
    context: BrowserContext, provider: Provider, world: OperatorWorld
) -> None:
    for tenant in (world.acme, world.beta):
        members.add(world.platform, tenant, email="ada@example.com", role="admin")
    page = context.new_page()
    page.goto("/console/jobs")
    assert axe(page) == []
    sign_in(page, provider.person("ada@example.com"), "/console/jobs")
    page.get_by_role("heading", name="Where to?").wait_for()
    assert axe(page) == []
    page.get_by_role("button", name=re.compile("beta")).press("Enter")
    page.wait_for_url("**/console/jobs")
    assert page.get_by_role("heading", name="Jobs", exact=True).is_visible()
    page.reload()
    assert page.get_by_role("heading", name="Jobs", exact=True).is_visible(), "the session's strict cookie is sent"
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url("**/console/sign-in")


@pytest.mark.slow
def test_somebody_unknown_may_use_another_account(context: BrowserContext, provider: Provider) -> None:
    page = context.new_page()
    sign_in(page, provider.person("nobody@example.com"))
    page.get_by_role("heading", name="You belong to no tenant yet").wait_for()
    assert page.get_by_text("nobody@example.com").is_visible()
    assert axe(page) == []
    page.get_by_role("link", name="Use another account").click()
    page.wait_for_url(f"{provider.url}/**prompt=select_account**")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_operators_pages_are_accessible_in_both_themes_and_on_a_phone(
    context: BrowserContext, provider: Provider, world: OperatorWorld, scheme: Any
) -> None:
    page = context.new_page()
    page.emulate_media(color_scheme=scheme)
    sign_in(page, provider.person("grace@example.com", groups=["ft-operators"]))
    page.wait_for_url("**/console/operator")
    found, wide = {}, {}
    for name, path in OPERATOR_PAGES.items():
        page.goto(path, wait_until="load")
        found[name] = axe(page)
        page.set_viewport_size(PHONE)
        wide[name] = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        if scheme == "light":
            found[f"{name} on a phone"] = axe(page)
        page.set_viewport_size(DESKTOP)
        wide[f"{name}: tables"] = page.evaluate(SPILT)
    assert {name: broken for name, broken in found.items() if broken} == {}
    assert {name: pixels for name, pixels in wide.items() if pixels > 0} == {}, "wider than a phone of 360 px, or than its card"


def test_an_operator_drains_a_node_by_keyboard_and_reads_hours_in_their_own_zone(
    context: BrowserContext, provider: Provider, world: OperatorWorld
) -> None:
    page = context.new_page()
    sign_in(page, provider.person("grace@example.com", groups=["ft-operators"]), "/console/operator/nodes")
    reason = page.get_by_label("Reason for draining small-2")
    reason.fill("loud fan")
    reason.press("Enter")
    dialog = page.get_by_role("dialog")
    assert dialog.get_by_text("Drain small-2?").is_visible()
    dialog.get_by_role("button", name="Drain").press("Enter")
    page.get_by_text("Nothing new is placed on the node.").wait_for()
    drained = nodes.get(world.platform, "small-2")
    assert (drained.reason, drained.drained_by) == ("loud fan", "oidc:grace@example.com")
    page.goto("/console/operator/queue")
    tick = page.locator("text[data-clock]").first
    moment = tick.get_attribute("data-clock")
    assert moment is not None
    hour = page.evaluate("(moment) => new Date(moment).toLocaleTimeString('en-GB', {hour: '2-digit', minute: '2-digit'})", moment)
    assert tick.text_content() in (
        hour,
        page.evaluate("(m) => new Date(m).toLocaleDateString('en-GB', {weekday: 'short', day: 'numeric'})", moment),
    )


@pytest.mark.slow
def test_an_open_queue_updates_by_itself_and_keeps_the_place_and_what_is_typed(
    context: BrowserContext, provider: Provider, world: OperatorWorld
) -> None:
    page = context.new_page()
    sign_in(page, provider.person("grace@example.com", groups=["ft-operators"]), "/console/operator/queue")
    page.set_viewport_size(PHONE)
    scrolled = page.get_by_role("group", name="Timeline of pool small")
    scrolled.focus()
    scrolled.evaluate("(one) => { one.scrollLeft = 120; }")
    job = world.queue.job(world.beta, gpus=1, hours=1)
    world.queue.round()
    page.get_by_text(job).first.wait_for(state="attached")
    assert scrolled.evaluate("(one) => [one.scrollLeft, one === document.activeElement]") == [120, True]
    page.goto("/console/operator/nodes")
    reason = page.get_by_label("Reason for draining small-1")
    reason.fill("being ty")
    page.get_by_role("heading", name="Nodes").click()
    with page.expect_response(lambda answer: answer.url.endswith("/nodes") and answer.status == 200):
        nodes.drain(world.platform, "small-0", reason="hot", by="cli:test")
    assert reason.input_value() == "being ty"
    assert page.get_by_text("hot", exact=False).count() == 0, "the part waits until nothing is typed in it"
    reason.fill("")
    page.get_by_role("heading", name="Nodes").click()
    page.get_by_text("hot · cli:test").wait_for()
