"""Stage changes as events of the adapter's asset: each once, in order, and none before it is certain that no earlier one is missing."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import dagster as dg
import pytest

from control_plane.adapters import promotions, stage_changes
from control_plane.adapters.service import get_adapter
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from ft_assets.platform_resource import PlatformResource
from sensors.adapter_stages import adapter_stages
from tests.support.jobs.registered_adapter import add_adapter


@pytest.fixture
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.DagsterInstance.ephemeral() as made:
        yield made


@pytest.fixture
def deprecated(fresh_platform: Platform, monkeypatch: pytest.MonkeyPatch) -> tuple[Platform, str, str]:
    """A platform that the environment describes, its tenant, and an adapter that was in production and is deprecated."""
    monkeypatch.setenv("FT_DATABASE_URL", fresh_platform.engine.url.render_as_string(hide_password=False))
    monkeypatch.setenv("FT_HOME", str(fresh_platform.settings.home))
    tenant, _ = tenants.create(fresh_platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
    name = f"ft:tiny-base:{tenant.id}:x:{uuid.uuid4().hex[:8]}"
    digest = fresh_platform.models.get("tiny-base").digest
    adapter = add_adapter(fresh_platform, tenant.id, name=name, stage="production", loaded=False, base_digest=digest)
    promotions.deprecate(fresh_platform, tenant.id, adapter)
    return fresh_platform, tenant.id, adapter


def tick(instance: dg.DagsterInstance, cursor: str | None) -> dg.SensorResult:
    with dg.build_sensor_context(instance=instance, cursor=cursor, resources={"platform": PlatformResource()}) as context:
        result = adapter_stages(context)
    assert isinstance(result, dg.SensorResult)
    return result


def test_each_change_is_reported_once_in_order(
    deprecated: tuple[Platform, str, str], instance: dg.DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform, tenant, adapter = deprecated
    monkeypatch.setattr(stage_changes, "SETTLED", timedelta(0))
    result = tick(instance, None)
    assert [e.description for e in result.asset_events] == ["draft -> production", "production -> deprecated"]
    last = result.asset_events[-1]
    job = get_adapter(platform, tenant, adapter).job_id
    assert (last.asset_key, last.partition) == (dg.AssetKey("adapter"), f"{tenant}:{job}")
    shown = {name: value.value for name, value in last.metadata.items()}
    assert (shown["stage"], shown["stage_before"], shown["adapter_id"]) == ("deprecated", "production", adapter)
    assert shown["changed_by"].startswith("system:")
    again = tick(instance, result.cursor)
    assert (again.asset_events, again.cursor) == ([], result.cursor)


def test_a_change_waits_until_no_earlier_one_can_be_missing(deprecated: tuple[Platform, str, str]) -> None:
    platform, _, _ = deprecated
    assert stage_changes.stage_changes(platform, after=0) == ([], 0)
    later = replace(platform, clock=lambda: platform.clock() + stage_changes.SETTLED + timedelta(seconds=5))
    found, position = stage_changes.stage_changes(later, after=0)
    assert [c.after for c in found] == ["production", "deprecated"]
    assert stage_changes.stage_changes(later, after=position) == ([], position)


def test_a_full_page_continues_after_its_last_change(deprecated: tuple[Platform, str, str]) -> None:
    platform, _, _ = deprecated
    later = replace(platform, clock=lambda: platform.clock() + stage_changes.SETTLED + timedelta(seconds=5))
    first, position = stage_changes.stage_changes(later, after=0, limit=1)
    second, _ = stage_changes.stage_changes(later, after=position, limit=1)
    assert [c.after for c in (*first, *second)] == ["production", "deprecated"]
