"""``ft webhooks`` against the real API."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from control_plane.notifications.deliveries import backlog
from control_plane.notifications.outbox import publish
from control_plane.platform.context import Platform
from control_plane.tenants.rules import Tenant
from tests.ft_client.cli.conftest import Ft
from tests.support.servers.webhook_receiver import Receiver, receiver, until


@pytest.fixture(scope="module")
def platform(new_platform: Callable[..., Platform]) -> Platform:
    return new_platform(webhook_allow="127.0.0.1/32")


@pytest.fixture
def there() -> Iterator[Receiver]:
    with receiver() as started:
        yield started


def test_an_endpoint_is_made_tried_mended_and_sent_what_it_missed(ft: Ft, platform: Platform, tenant: Tenant, there: Receiver) -> None:
    there.statuses["/hook"] = 500
    made = ft("webhooks", "create", "prod", there.url("/hook"), "-e", "fine_tuning.job.failed", "--json").json
    assert made["signing_secret"].startswith("whsec_")
    tried = ft("webhooks", "test", made["id"])
    assert tried.code == 1 and "the receiver answered 500" in tried.err
    assert ft("webhooks", "disable", made["id"], "--json").json["state"] == "disabled"
    with platform.engine.begin() as conn:
        publish(conn, tenant.id, "fine_tuning.job.failed", "ftjob-1", now=platform.clock())
    until(lambda: backlog(platform).dead)
    there.statuses["/hook"] = 200
    assert ft("webhooks", "enable", made["id"]).code == 0
    assert "1 deliveries are sent again" in ft("webhooks", "replay", made["id"]).err
    until(lambda: "ftjob-1" in [r.event["data"]["id"] for r in there.received])
    assert "\tdelivered\t" in ft("webhooks", "deliveries", made["id"]).out
    rotated = ft("webhooks", "rotate-secret", made["id"])
    assert rotated.out.startswith("whsec_") and "24 hours" in rotated.err
    assert there.url("/hook") in ft("webhooks").out
    assert ft("webhooks", "delete", made["id"]).code == 0
