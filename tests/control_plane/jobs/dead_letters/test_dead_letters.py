"""Jobs that were given up after repeated failures of the platform, and what operators do about them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa

from control_plane.api.app import create_app
from control_plane.jobs import service as jobs
from control_plane.jobs.dead_letters import service as dead_letters
from control_plane.notifications.tables import outbox
from control_plane.platform.context import Platform, utc_now
from control_plane.platform.job_states import JobState, openai_status
from control_plane.quotas.tables import quota_holds
from control_plane.tenants import operators
from core.errors import Conflict, NotFound
from engine.training.failures import StopReason
from tests.support.jobs import queued_jobs
from tests.support.jobs.claimed_job import give_up, held_by, lose
from tests.support.platform.database_roles import as_operator

Queued = Callable[[], tuple[Platform, str, str]]


@pytest.fixture
def queued(fresh_platform: Platform, write_chat_rows: Callable[..., Path]) -> Queued:
    """Makes a tenant with one job that waits for GPUs."""
    world = queued_jobs.queued(fresh_platform, write_chat_rows)
    world.now[0] = utc_now()

    def make() -> tuple[Platform, str, str]:
        tenant = world.tenant()
        return fresh_platform, tenant, world.job(tenant)

    return make


def given_up(queued: Queued) -> tuple[Platform, str, str]:
    platform, tenant, job_id = queued()
    give_up(platform, tenant, job_id)
    return as_operator(platform), tenant, job_id


def num_held(platform: Platform, job_id: str) -> int:
    query = sa.select(sa.func.count()).where(quota_holds.c.job_id == job_id, quota_holds.c.released_at.is_(None))
    with platform.engine.connect() as conn:
        return int(conn.execute(query).scalar_one())


@pytest.mark.parametrize("exit_code", [-9, 137, None], ids=["killed", "killed under a shell", "lost with its node"])
def test_third_attempt_that_is_gone_without_progress_makes_a_dead_letter(queued: Queued, exit_code: int | None) -> None:
    platform, tenant, job_id = queued()
    states = [lose(platform, held_by(platform, tenant, job_id), exit_code=exit_code) for _ in range(3)]
    assert states == [JobState.QUEUED, JobState.QUEUED, JobState.DEAD_LETTER]
    job = jobs.get(platform, tenant, job_id).job
    assert (openai_status(job.state), job.error and job.error["code"]) == ("failed", "dead_letter")
    assert job.finished_at is not None and num_held(platform, job_id) == 0
    assert [(d.id, d.tenant_id, d.attempt) for d in dead_letters.list_all(as_operator(platform)).items] == [(job_id, tenant, 3)]


def test_preemptions_make_no_dead_letter(queued: Queued) -> None:
    platform, tenant, job_id = queued()
    for _ in range(5):
        assert lose(platform, held_by(platform, tenant, job_id), stop=StopReason.PREEMPT) is JobState.QUEUED
    assert dead_letters.list_all(as_operator(platform)).items == []


def test_released_dead_letter_may_fail_three_times_more(queued: Queued) -> None:
    platform, tenant, job_id = given_up(queued)
    released = dead_letters.release(platform, job_id)
    assert (released.state, released.error, released.finished_at) == (JobState.QUEUED, None, None)
    assert num_held(platform, job_id) == 1, "its time is held against the cap again"
    states = []
    for number in (4, 5, 6):
        held = held_by(platform, tenant, job_id)
        assert held.attempt == number
        states.append(lose(platform, held))
    assert states == [JobState.QUEUED, JobState.QUEUED, JobState.DEAD_LETTER]


def test_only_a_dead_letter_is_released_or_closed(queued: Queued) -> None:
    platform, _, job_id = queued()
    for move in (dead_letters.release, dead_letters.close):
        with pytest.raises(Conflict, match="is queued, not a dead letter; list them with `ft admin dead-letters list`"):
            move(as_operator(platform), job_id)
    with pytest.raises(NotFound):
        dead_letters.release(as_operator(platform), "ftjob-none")


def test_closed_dead_letter_stays_failed_and_notifies_its_tenant_once(queued: Queued) -> None:
    platform, tenant, job_id = given_up(queued)
    ended = jobs.get(platform, tenant, job_id).job
    closed = dead_letters.close(platform, job_id)
    assert (closed.state, closed.error, closed.finished_at) == (JobState.FAILED, ended.error, ended.finished_at)
    told = sa.select(sa.func.count()).where(outbox.c.subject == job_id, outbox.c.type == "fine_tuning.job.failed")
    with platform.engine.connect() as conn:
        assert conn.execute(told).scalar_one() == 1
    assert dead_letters.list_all(platform).items == []


def test_operators_release_and_close_dead_letters_over_http(queued: Queued, serve: Callable[..., str]) -> None:
    platform, tenant, job_id = given_up(queued)
    key = operators.create(platform, "ops").secret
    url, headers = serve(create_app(platform)), {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=f"{url}/v1/admin", headers=headers, timeout=60) as admin:
        (listed,) = admin.get("dead_letters").json()["data"]
        assert (listed["id"], listed["tenant"], listed["state"], listed["attempt"]) == (job_id, tenant, "dead_letter", 3)
        assert listed["error"]["code"] == "dead_letter"
        released = admin.post(f"dead_letters/{job_id}/release").json()
        assert (released["id"], released["state"], released["error"]) == (job_id, "queued", None)
        assert jobs.get(platform, tenant, job_id).job.state is JobState.QUEUED
        assert admin.get("dead_letters").json()["data"] == []
        give_up(platform, tenant, job_id)
        closed = admin.post(f"dead_letters/{job_id}/close").json()
        assert (closed["state"], closed["error"]["code"]) == ("failed", "dead_letter")
        assert jobs.get(platform, tenant, job_id).job.state is JobState.FAILED
        late = admin.post(f"dead_letters/{job_id}/release")
        assert (late.status_code, late.json()["error"]["code"]) == (409, "invalid_state")
        for verb in ("release", "close"):
            unknown = admin.post(f"dead_letters/ftjob-none/{verb}")
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "fine_tune_not_found")
