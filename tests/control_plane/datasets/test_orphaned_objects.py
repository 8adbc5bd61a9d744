"""Objects that no row names are deleted after their wait; those that a row names stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta

import pytest

from control_plane.datasets import orphaned_objects
from control_plane.platform.context import Platform
from control_plane.tenants.rules import Tenant
from core.errors import Unavailable

Remains = Callable[[str, timedelta], bool]


@pytest.fixture
def key(platform: Platform, tenant: Tenant) -> str:
    made = f"tenants/{tenant.id}/files/x"
    platform.objects.put_bytes(made, b"rows")
    return made


@pytest.fixture
def remains(platform: Platform) -> Remains:
    """Deletes what is due after so long; returns whether the object is still there."""

    def after(key: str, passed: timedelta) -> bool:
        orphaned_objects.remove_due(replace(platform, clock=lambda: platform.clock() + passed))
        return platform.objects.exists(key)

    return after


def test_an_announced_object_has_two_days_and_a_released_one_none(platform: Platform, tenant: Tenant, key: str, remains: Remains) -> None:
    with platform.engine.begin() as conn:
        orphaned_objects.announce(conn, tenant.id, key, now=platform.clock())
    assert remains(key, orphaned_objects.WAITS - timedelta(minutes=1))
    with platform.engine.begin() as conn:
        orphaned_objects.release(conn, tenant.id, [key], now=platform.clock())
    assert not remains(key, timedelta(seconds=1))


def test_an_object_that_is_announced_again_has_two_more_days(platform: Platform, tenant: Tenant, key: str, remains: Remains) -> None:
    for passed in (timedelta(), timedelta(days=1)):
        with platform.engine.begin() as conn:
            orphaned_objects.announce(conn, tenant.id, key, now=platform.clock() + passed)
    assert remains(key, timedelta(days=2, hours=1))
    assert not remains(key, timedelta(days=3, hours=1))


def test_an_object_that_a_row_claimed_stays_and_is_claimed_once(platform: Platform, tenant: Tenant, key: str, remains: Remains) -> None:
    with platform.engine.begin() as conn:
        orphaned_objects.announce(conn, tenant.id, key, now=platform.clock())
        orphaned_objects.claim(conn, key)
        with pytest.raises(Unavailable, match="send the call again"):
            orphaned_objects.claim(conn, key)
    assert remains(key, timedelta(days=30))
