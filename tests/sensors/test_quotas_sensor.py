"""The sensor that holds tenants to their hard caps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import dagster as dg
import pytest
import sqlalchemy as sa

from control_plane.jobs import service as jobs
from control_plane.platform.context import Platform
from control_plane.tenants.tables import tenants
from ft_assets.platform_resource import PlatformResource
from sensors.periodic.quotas import quotas
from tests.support.jobs.started_job import start_job


def test_a_tick_pauses_what_runs_beyond_the_hard_cap(
    fresh_platform: Platform, write_chat_rows: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FT_DATABASE_URL", fresh_platform.engine.url.render_as_string(hide_password=False))
    monkeypatch.setenv("FT_HOME", str(fresh_platform.settings.home))
    held = start_job(fresh_platform, write_chat_rows)
    with fresh_platform.engine.begin() as conn:
        conn.execute(sa.update(tenants).values(hard_gpu_hours=0.001))
    with dg.build_sensor_context(resources={"platform": PlatformResource()}) as context:
        result = quotas(context)
    assert isinstance(result, dg.SkipReason)
    assert "paused: 1" in str(result.skip_message)
    row = jobs.get(fresh_platform, held.tenant, held.job_id).job
    assert (row.state, row.reason, row.stop_requested) == ("pausing", "hard_cap_reached", "pause")
