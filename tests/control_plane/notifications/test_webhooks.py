"""Endpoints of a tenant: made, changed, tried out, and disabled when they fail for too long."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import sqlalchemy as sa

from control_plane.notifications import deliveries as listed
from control_plane.notifications import dispatch
from control_plane.notifications import webhook_endpoints as webhooks
from control_plane.notifications.rules import DELAYS_S
from control_plane.notifications.tables import SigningSecret, webhook_endpoints
from control_plane.platform.context import Platform
from core.errors import Conflict, FtError, NotFound, QuotaExceeded, RateLimited
from core.public_addresses import parse_networks
from resources.webhook_sender import HttpWebhookSender
from tests.support.platform.notified_tenants import SUCCEEDED, World, forget_all
from tests.support.servers.webhook_receiver import Receiver, receiver, until


@pytest.fixture
def there() -> Iterator[Receiver]:
    with receiver() as started:
        yield started


@pytest.fixture(scope="module")
def platform(new_platform: Callable[..., Platform]) -> Platform:
    return new_platform(webhook_allow="127.0.0.0/8")


@pytest.fixture
def world(platform: Platform) -> World:
    """With nothing that earlier tests left to be sent."""
    forget_all(platform)
    return World(platform)


def test_an_endpoint_that_is_gone_is_disabled_and_the_others_are_told(world: World, there: Receiver) -> None:
    gone = world.endpoint(there.url("/status/410"), SUCCEEDED)
    world.endpoint(there.url("/ok"), "webhook_endpoint.disabled")
    world.tell()
    world.tell(SUCCEEDED, "ftjob-2")
    world.send()
    found = webhooks.get(world.platform, world.tenant, gone)
    assert (found.state, found.disabled_reason) == ("disabled", "it answered 410 Gone")
    assert set(world.states(gone)) == {"dead"}
    (told,) = there.at("/ok")
    assert told.event["data"] == {"id": gone, "reason": "gone"}
    world.tell(SUCCEEDED, "ftjob-3")
    world.send()
    assert world.states(gone) == ["dead"] * 3, "what happens meanwhile is kept"
    first = world.of(gone)[0]["created_at"]
    with pytest.raises(Conflict, match="enable it first"):
        listed.replay_dead(world.platform, world.tenant, gone, since=first)
    there.statuses["/status/410"] = 200
    webhooks.update(world.platform, world.tenant, gone, {"state": "enabled"})
    assert listed.replay_dead(world.platform, world.tenant, gone, since=first) == 3
    world.send()
    assert world.states(gone) == ["delivered"] * 3


def test_an_endpoint_that_fails_for_five_days_is_disabled(world: World, there: Receiver) -> None:
    endpoint = world.endpoint(there.url("/status/500"), SUCCEEDED)
    for day in range(6):
        assert webhooks.get(world.platform, world.tenant, endpoint).state == "enabled"
        world.tell(SUCCEEDED, f"ftjob-{day}")
        world.send()
        world.later(86_401)
    world.tell(SUCCEEDED, "ftjob-last")
    world.send()
    found = webhooks.get(world.platform, world.tenant, endpoint)
    assert found.state == "disabled" and "has not answered with 2xx since" in (found.disabled_reason or "")


def test_an_endpoint_that_was_sent_nothing_since_it_failed_is_tried_for_half_an_hour_before_it_is_disabled(
    world: World, there: Receiver
) -> None:
    endpoint = world.endpoint(there.url("/status/500"), SUCCEEDED)
    world.tell(SUCCEEDED, "ftjob-old")
    for delay_s in (*DELAYS_S[1:], 0):
        world.send()
        world.later(delay_s * 1.2)
    world.later(30 * 86_400)
    world.tell(SUCCEEDED, "ftjob-new")
    states = []
    for delay in (10, 400, 2_500, 10):
        world.send()
        states.append(webhooks.get(world.platform, world.tenant, endpoint).state)
        world.later(delay)
    assert states == ["enabled"] * 3 + ["disabled"]


def test_deleting_an_endpoint_ends_what_is_on_its_way_and_forgets_its_secret(world: World, there: Receiver) -> None:
    endpoint = world.endpoint(there.url("/status/500"))
    world.tell()
    world.send()
    webhooks.delete(world.platform, world.tenant, endpoint)
    world.later(1000)
    world.send()
    assert world.states(endpoint) == ["dead"] and len(there.received) == 1
    with pytest.raises(NotFound):
        webhooks.get(world.platform, world.tenant, endpoint)
    with world.platform.engine.connect() as conn:
        assert conn.execute(sa.select(webhook_endpoints.c.secrets).where(webhook_endpoints.c.id == endpoint)).scalar_one() == []


def test_a_tenant_whose_receivers_hang_while_they_are_tried_out_keeps_nobody_else_from_it(world: World, there: Receiver) -> None:
    hanging = world.endpoint(there.url("/hang"))
    quiet = replace(world.platform, webhooks=HttpWebhookSender(allowed=parse_networks("127.0.0.0/8"), timeout_s=60))
    codes: list[str] = []

    def try_out() -> None:
        try:
            webhooks.send_test(quiet, world.tenant, hanging)
        except FtError as e:
            codes.append(e.code)

    threads = [threading.Thread(target=try_out) for _ in range(2)]
    for t in threads:
        t.start()
    until(lambda: len(there.at("/hang")) == 2)
    with pytest.raises(RateLimited) as refused:
        webhooks.send_test(quiet, world.tenant, hanging)
    assert refused.value.code == "webhooks_busy"
    other = world.new_tenant()
    assert webhooks.send_test(quiet, other, world.endpoint(there.url(), tenant=other)).status == 200
    there.released.set()
    for t in threads:
        t.join()
    assert codes == ["webhook_not_received"] * 2


def test_an_endpoint_that_there_is_not_is_not_found_also_where_no_webhooks_are_sent(world: World) -> None:
    with pytest.raises(NotFound):
        webhooks.update(replace(world.platform, webhooks=None), world.tenant, "we_none", {"url": "https://hooks.example.com/ft"})


def test_a_tenant_has_ten_endpoints_also_when_it_makes_them_at_once(world: World, there: Receiver) -> None:
    refused: list[str] = []

    def make() -> None:
        try:
            world.endpoint(there.url())
        except QuotaExceeded as e:
            refused.append(e.code)

    threads = [threading.Thread(target=make) for _ in range(14)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert refused == ["too_many_webhook_endpoints"] * 4


def test_an_old_secret_signs_until_its_day_is_over(world: World, there: Receiver) -> None:
    endpoint = world.endpoint(there.url())
    webhooks.rotate_secret(world.platform, world.tenant, endpoint, keep_old=True)
    world.tell()
    world.send()
    world.later(86_401)
    world.tell()
    world.send()
    webhooks.rotate_secret(world.platform, world.tenant, endpoint)
    world.tell()
    world.send()
    assert [len(r.headers["webhook-signature"].split()) for r in there.received] == [2, 1, 1]
    assert dispatch.live_secrets([SigningSecret(secret="a"), SigningSecret(secret="b", until=0.0)], world.clock()) == ["a"]


def test_another_rotation_does_not_prolong_a_secret_that_is_to_end(world: World, there: Receiver) -> None:
    endpoint = world.endpoint(there.url())
    for _ in range(2):
        webhooks.rotate_secret(world.platform, world.tenant, endpoint, keep_old=True)
        world.later(50_000)
    world.tell()
    world.send()
    (received,) = there.received
    assert len(received.headers["webhook-signature"].split()) == 2, "the newest, and the one before it; the first has ended"


def test_of_secrets_that_are_replaced_one_after_the_other_the_newest_sign(world: World, there: Receiver) -> None:
    endpoint = world.endpoint(there.url())
    num = webhooks.MAX_SECRETS + 2
    made = [webhooks.rotate_secret(world.platform, world.tenant, endpoint, keep_old=True).secret for _ in range(num)]
    kept = [one.secret for one in webhooks.get(world.platform, world.tenant, endpoint).secrets]
    assert kept == made[: -webhooks.MAX_SECRETS - 1 : -1]
