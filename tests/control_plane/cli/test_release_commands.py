"""``ft admin dead-letters`` on the platform's machine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from control_plane.platform.context import Platform, utc_now
from tests.support.jobs import queued_jobs
from tests.support.jobs.claimed_job import give_up


def test_dead_letter_is_listed_released_and_closed(
    offline: Callable[..., Any], fresh_platform: Platform, write_chat_rows: Callable[..., Path]
) -> None:
    world = queued_jobs.queued(fresh_platform, write_chat_rows)
    world.now[0] = utc_now()
    tenant = world.tenant()
    job = world.job(tenant)
    admin = partial(offline, "admin", "dead-letters", FT_DATABASE_URL=fresh_platform.settings.database_url)
    assert admin("list", "--json").json == []
    give_up(fresh_platform, tenant, job)
    (listed,) = admin("list", "--json").json
    assert (listed["id"], listed["tenant_id"], listed["state"], listed["attempt"]) == (job, tenant, "dead_letter", 3)
    shown = admin("list").out
    assert job in shown and tenant in shown and listed["error"]["message"].split()[0] in shown
    assert f"job {job} is queued again" in admin("release", job).err
    assert (world.row(job).state, admin("list", "--json").json) == ("queued", [])
    give_up(fresh_platform, tenant, job)
    assert f"job {job} stays failed" in admin("close", job).err
    assert (world.row(job).state, admin("list", "--json").json) == ("failed", [])
    refused = admin("release", job)
    assert refused.code == 1 and f"job {job} is failed, not a dead letter" in refused.err
