"""Maintenance of the platform, a pool or a tenant: nothing starts there, and what runs finishes or leaves in time with a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from agent.messages import Exit
from control_plane.attempts import evaluation_endings
from control_plane.attempts import service as attempts
from control_plane.attempts.claims import Ending
from control_plane.capacity import maintenance
from control_plane.capacity.tables import Maintenance, node_drains
from control_plane.jobs.tables import job_events
from control_plane.platform.context import Platform
from control_plane.platform.protocols import WorkloadPhase, WorkloadStatus
from control_plane.queue.status import view
from control_plane.queue.tables import reservations
from control_plane.tenants.tables import audit_log
from core.errors import Fault, InvalidRequest, NotFound
from engine.training.failures import FailureClass, Retry
from tests.support.jobs.claimed_job import asked_to_stop, ledger, report
from tests.support.jobs.queued_jobs import Queued, queued

POOLS = """
pools:
  - {name: left, gpu_type: local, takes: [lora], nodes: [{name: left-0, gpus: 2}]}
  - {name: right, gpu_type: local, takes: [lora], nodes: [{name: right-0, gpus: 1}]}
"""


@pytest.fixture
def world(new_platform: Callable[..., Platform], write_chat_rows: Callable[..., Path], tmp_path: Path) -> Queued:
    (tmp_path / "pools.yaml").write_text(POOLS)
    return queued(new_platform(pools=str(tmp_path / "pools.yaml")), write_chat_rows)


def begin(world: Queued, **options: Any) -> Maintenance:
    return maintenance.start(world.platform, message="new switches, back by 15:00", by="cli:ops", **options)


def pool_of(world: Queued, job: str) -> str | None:
    query = sa.select(reservations.c.pool).where(reservations.c.job_id == job, reservations.c.released_at.is_(None))
    with world.platform.engine.connect() as conn:
        return conn.execute(query).scalar_one_or_none()


def started(world: Queued, job: str, *, step: int = 40) -> attempts.Claim:
    held = attempts.claim(world.platform, world.row(job).tenant_id, job)
    attempts.mark_started(world.platform, held, started_at=world.now[0].timestamp())
    report(world.platform, held, {"step": step, "total_steps": 1000, "loss": 1.0, "learning_rate": 1e-3, "time": world.now[0].timestamp()})
    return held


def evaluating(world: Queued, job: str) -> attempts.Claim:
    """A job whose training has ended well and whose evaluation runs."""
    world.round()
    held = started(world, job)
    now = world.now[0].timestamp()
    status = WorkloadStatus(name=held.workload, phase=WorkloadPhase.EXITED, exit_code=0, started_at=now - 60, ended_at=now)
    attempts.finish(world.platform, held, Ending(outcome="succeeded", failure=None, last_step=9, trained_tokens=1, status=status))
    world.round()
    held = attempts.claim(world.platform, held.tenant, job)
    attempts.mark_started(world.platform, held, started_at=now)
    return held


def end_as_preempted(world: Queued, held: attempts.Claim) -> None:
    failure = FailureClass(
        code="preempted", fault=Fault.PLATFORM, retry=Retry.RESUME, remedy="",
        message="it gave its GPUs to another job at step 40, which is saved; nothing is lost",
    )  # fmt: skip
    now = world.now[0].timestamp()
    status = WorkloadStatus(name=held.workload, phase=WorkloadPhase.EXITED, exit_code=75, started_at=now - 60, ended_at=now)
    attempts.finish(world.platform, held, Ending(outcome="preempted", failure=failure, last_step=40, trained_tokens=9, status=status))


def messages(world: Queued, job: str) -> list[str]:
    with world.platform.engine.connect() as conn:
        return list(conn.execute(sa.select(job_events.c.message).where(job_events.c.job_id == job).order_by(job_events.c.seq)).scalars())


def test_while_the_platform_is_under_maintenance_nothing_starts_and_waiting_jobs_show_the_message(world: Queued) -> None:
    mine = world.tenant()
    begin(world)
    job = world.job(mine)
    world.round()
    row = world.row(job)
    assert (row.state, row.reason, row.expected_start_at) == ("queued", "Maintenance", None)
    assert row.reason_detail == "the platform is under maintenance since 2026-05-15 12:00 UTC: new switches, back by 15:00"
    (shown,) = view.of_all(world.platform).model_dump()["waiting"]
    assert "new switches, back by 15:00" in shown["summary"]
    assert row.barred_until == world.now[0], "the time does not count as waiting"
    maintenance.end(world.platform)
    world.round(minutes=1)
    assert world.row(job).state == "provisioning"


def test_running_jobs_finish_when_no_time_is_given(world: Queued) -> None:
    job = world.job(world.tenant())
    world.round()
    held = started(world, job)
    begin(world)
    world.round(hours=9)
    assert asked_to_stop(world.platform, held) is None


def test_running_jobs_save_a_checkpoint_a_minute_before_the_time_and_go_on_after_the_maintenance(world: Queued) -> None:
    job = world.job(world.tenant())
    world.round()
    held = started(world, job)
    begin(world, stop_in_s=1800)
    world.round(seconds=1739)
    assert asked_to_stop(world.platform, held) is None
    world.round(seconds=1)
    assert asked_to_stop(world.platform, held) == "preempt"
    attempts.record_checkpoint(world.platform, held, step=40, prefix="p", manifest_sha256="0", metrics={})
    world.round(seconds=5)
    (told,) = [m for m in messages(world, job) if "new switches" in m]
    assert told.startswith("The platform is under maintenance since") and told.endswith("returns to the queue and resumes from there.")
    end_as_preempted(world, held)
    assert "Attempt 1: it gave its GPUs back to the platform at step 40, which is saved; nothing is lost." in messages(world, job)
    world.round(seconds=5)
    assert (world.row(job).state, world.row(job).reason) == ("queued", "Maintenance")
    assert sum(entry.amount_micros for entry in ledger(world.platform, job)) > 0, "the work that is kept is paid for"
    maintenance.end(world.platform)
    world.round(seconds=5)
    assert (world.row(job).state, world.row(job).attempt) == ("provisioning", 2)


def test_a_pool_under_maintenance_is_avoided_and_only_jobs_that_need_it_wait(world: Queued) -> None:
    mine = world.tenant()
    begin(world, pool="left")
    narrow, wide = world.job(mine), world.job(mine, gpus=2)
    world.round()
    assert (pool_of(world, narrow), pool_of(world, wide)) == ("right", None)
    assert world.row(wide).reason == "Maintenance" and world.row(wide).reason_detail.startswith("pool left is under maintenance")
    second = world.job(mine)
    world.round(seconds=1)
    assert world.row(second).reason == "WaitingForQuota", "the open pool is full"
    maintenance.end(world.platform, pool="left")
    world.round(seconds=1)
    assert pool_of(world, second) == "left"


def test_only_the_jobs_of_the_pool_or_tenant_leave(world: Queued) -> None:
    one, other = world.tenant(), world.tenant()
    jobs = [world.job(one, gpus=2)]
    world.round()
    jobs.append(world.job(other))
    world.round()
    left, right = (started(world, job) for job in jobs)
    assert (pool_of(world, jobs[0]), pool_of(world, jobs[1])) == ("left", "right")
    begin(world, pool="right", stop_in_s=60)
    world.round()
    assert (asked_to_stop(world.platform, left), asked_to_stop(world.platform, right)) == (None, "preempt")
    begin(world, tenant=one, stop_in_s=0)
    world.round()
    assert asked_to_stop(world.platform, left) == "preempt"
    third = world.job(other)
    end_as_preempted(world, left)
    world.round()
    assert pool_of(world, third) == "left", "other tenants go on"
    assert world.row(jobs[0]).reason_detail.startswith(f"tenant {one} is under maintenance")


def test_an_evaluation_begins_again_after_the_maintenance(world: Queued) -> None:
    job = world.job(world.tenant())
    held = evaluating(world, job)
    now = world.now[0].timestamp()
    status = WorkloadStatus(name=held.workload, phase=WorkloadPhase.EXITED, exit_code=0, started_at=now - 60, ended_at=now)
    begin(world, stop_in_s=60)
    world.round()
    assert asked_to_stop(world.platform, held) == report(world.platform, held).stop == "preempt"
    said = Exit(exit_code=-15, evidence=None, stop_reason="preempt")
    attempts.finish(world.platform, held, evaluation_endings.judge(said, status, cancelled=False, stalled=False))
    world.round()
    assert (world.row(job).state, world.row(job).reason) == ("evaluating", "Maintenance")
    maintenance.end(world.platform)
    world.round()
    assert attempts.claim(world.platform, held.tenant, job).attempt == 3


def test_an_evaluation_on_a_sick_node_is_stopped_for_that_and_one_elsewhere_for_the_maintenance(world: Queued) -> None:
    tenant = world.tenant()
    for _ in range(3):  # two fill the left node, one the right
        evaluating(world, world.job(tenant))
    now = world.now[0]
    with world.platform.engine.begin() as conn:
        row = {"node": "left-0", "reason": "Xid 79", "drained_by": "platform", "drained_at": now, "stop_at": now}
        conn.execute(sa.insert(node_drains).values(**row))
    begin(world, pool="right", stop_in_s=60)
    world.round()
    query = sa.select(reservations.c.pool, reservations.c.preempted_for).where(reservations.c.released_at.is_(None))
    with world.platform.engine.connect() as conn:
        found = sorted(tuple(row) for row in conn.execute(query))
    assert found == [("left", "sick_node"), ("left", "sick_node"), ("right", "operators")]


def test_an_evaluation_that_was_asked_to_stop_and_is_killed_has_not_failed() -> None:
    status = WorkloadStatus(name="w", phase=WorkloadPhase.EXITED, exit_code=137, started_at=1.0, ended_at=2.0)
    outcomes = [evaluation_endings.judge(None, status, cancelled=False, stalled=False, asked=asked).outcome for asked in (True, False)]
    assert outcomes == ["preempted", "evaluation_failed"]


def test_starting_it_again_changes_message_and_time_and_the_audit_log_has_both(world: Queued) -> None:
    first = begin(world, stop_in_s=60)
    again = maintenance.start(world.platform, message="one more hour", by="cli:other", stop_in_s=3600)
    assert (again.started_at, again.started_by) == (first.started_at, "cli:ops")
    assert again.stop_at == world.now[0] + timedelta(hours=1)
    maintenance.end(world.platform)
    with world.platform.engine.connect() as conn:
        actions = sa.select(audit_log.c.action).where(audit_log.c.object_id == "platform").order_by(audit_log.c.seq)
        assert list(conn.execute(actions).scalars()) == ["maintenance.created", "maintenance.updated", "maintenance.deleted"]


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"pool": "middle"}, NotFound, "no pool 'middle'; the pools are left, right"),
        ({"tenant": "nobody"}, NotFound, "nobody"),
        ({"pool": "left", "tenant": "nobody"}, InvalidRequest, "a pool or a tenant, not both"),
    ],
)
def test_what_cannot_be_under_maintenance_is_refused(world: Queued, options: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        begin(world, **options)


def test_a_message_is_needed_and_only_what_was_started_can_end(world: Queued) -> None:
    with pytest.raises(InvalidRequest, match="message has 0 characters"):
        maintenance.start(world.platform, message="", by="x")
    with pytest.raises(NotFound, match="no maintenance of pool:left") as refused:
        maintenance.end(world.platform, pool="left")
    assert refused.value.code == "maintenance_not_found"
