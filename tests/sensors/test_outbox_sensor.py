"""The sensor ``outbox``: what is due is sent while the API is away."""

from __future__ import annotations

from collections.abc import Callable

import dagster as dg
import pytest

from control_plane.notifications import deliveries, webhook_endpoints
from control_plane.notifications.outbox import publish
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from ft_assets.platform_resource import PlatformResource
from sensors.periodic.outbox_relay import outbox
from tests.support.servers.webhook_receiver import receiver


def test_a_tick_sends_what_is_due_and_the_next_finds_nothing(
    new_platform: Callable[..., Platform], monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = new_platform(webhook_allow="127.0.0.1/32")
    monkeypatch.setenv("FT_DATABASE_URL", platform.settings.database_url)
    monkeypatch.setenv("FT_HOME", str(platform.settings.home))
    monkeypatch.setenv("FT_MLFLOW_URI", "off")
    monkeypatch.setenv("FT_WEBHOOK_ALLOW", "127.0.0.1/32")
    tenants.create(platform, "acme")
    with receiver() as there:
        endpoint = webhook_endpoints.create(platform, "acme", name="e", url=there.url(), event_types=["*"]).row["id"]
        with platform.engine.begin() as conn:
            publish(conn, "acme", "invoice.issued", "inv_1", now=platform.clock())
        with dg.DagsterInstance.ephemeral() as instance:
            first, second = (_tick(instance) for _ in range(2))
        assert [r.event["data"]["id"] for r in there.received] == ["inv_1"]
    assert first.skip_message == "2 done, 0 old events forgotten" and second.skip_message == "nothing to send"
    assert [d["state"] for d in deliveries.list_deliveries(platform, "acme", endpoint).items] == ["delivered"]


def _tick(instance: dg.DagsterInstance) -> dg.SkipReason:
    with dg.build_sensor_context(instance=instance, resources={"platform": PlatformResource()}) as context:
        result = outbox(context)
    assert isinstance(result, dg.SkipReason)
    return result
