"""``ft quota`` against the real API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from control_plane.platform.context import Platform
from control_plane.tenants.rules import Tenant
from control_plane.tenants.tables import tenants


def test_the_quota_is_shown_in_words_and_as_json(ft: Callable[..., Any], platform: Platform, tenant: Tenant) -> None:
    shown = ft("quota").out
    for said in (f"{tenant.id} (standard)", "1000 GPU-hours", "500 GPU-hours, 0 beyond it", "0 of 5", "within 60 minutes"):
        assert said in shown
    with platform.engine.begin() as conn:
        conn.execute(sa.update(tenants).where(tenants.c.id == tenant.id).values(tier="free", hard_gpu_hours=0))
    done = ft("quota")
    assert "best effort: a wait has no bound" in done.out
    assert "paused at their next checkpoint" in done.err, "the cap of nothing is reached"
    assert ft("quota", "--json").json["at_hard_cap"]
