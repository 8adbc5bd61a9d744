"""Nodes are taken out of service for new hardware errors and for failures of different jobs, and what ran there goes on elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.attempts import agents
from control_plane.attempts import service as attempts
from control_plane.attempts.claims import Claim, Ending
from control_plane.attempts.tables import agents as agents_table
from control_plane.capacity import node_health, nodes
from control_plane.capacity.rules import XID
from control_plane.jobs.tables import job_events
from control_plane.platform.context import Platform
from control_plane.platform.protocols import WorkloadPhase, WorkloadStatus
from control_plane.queue.status import metrics
from core.errors import Fault
from engine.training.failures import FailureClass, Retry
from tests.support.jobs.claimed_job import asked_to_stop, ledger
from tests.support.jobs.queued_jobs import Queued, queued

POOLS = """
pools:
  - name: desk
    gpu_type: local
    nodes: [{prefix: desk, count: 4, gpus: 2, fabric: rail}]
"""
GONE = {f"GPU 1 (GPU-5a)/{XID}": 79.0}
WHY = "GPU 1 (GPU-5a): Xid 79, GPU has fallen off the bus"


@pytest.fixture
def world(new_platform: Callable[..., Platform], write_chat_rows: Callable[..., Path], tmp_path: Path) -> Queued:
    (tmp_path / "pools.yaml").write_text(POOLS)
    return queued(new_platform(pools=str(tmp_path / "pools.yaml"), prometheus_url="http://127.0.0.1:9"), write_chat_rows)


def start(world: Queued, job: str, *, on: tuple[str, ...] = ()) -> Claim:
    """The job's next attempt has started, on these machines if the launcher chose them."""
    world.round(seconds=1)
    held = attempts.claim(world.platform, world.row(job).tenant_id, job)
    attempts.mark_started(world.platform, held, started_at=world.now[0].timestamp(), nodes=on)
    return held


def fail(world: Queued, held: Claim, code: str = "node_lost", *, fault: Fault = Fault.PLATFORM, retry: Retry = Retry.RESUME) -> None:
    now = world.now[0].timestamp()
    status = WorkloadStatus(name=held.workload, phase=WorkloadPhase.EXITED, exit_code=1, started_at=now - 60, ended_at=now)
    failure = FailureClass(code=code, fault=fault, retry=retry, message=f"it ended as {code}", remedy="")
    attempts.finish(world.platform, held, Ending(outcome=code, failure=failure, last_step=1, trained_tokens=0, status=status))


def state(world: Queued, node: str) -> tuple[str, str | None, str | None]:
    found = nodes.get(world.platform, node)
    return found.state, found.drained_by, found.reason


def test_a_node_with_a_new_hardware_error_is_drained_and_its_jobs_go_on_elsewhere(world: Queued) -> None:
    job = world.job(world.tenant())
    held = start(world, job)
    ((node, _),) = [(share.node, share.devices) for share in held.placement]
    assert node_health.record(world.platform, {node: GONE}) == [node]
    assert state(world, node) == ("draining", "platform", WHY)
    world.round(seconds=1)
    assert asked_to_stop(world.platform, held) == "preempt"
    with world.platform.engine.connect() as conn:
        told = conn.execute(sa.select(job_events.c.message).where(job_events.c.job_id == job, job_events.c.code == "preemption_requested"))
        assert told.scalars().all() == [
            "A node of the job is out of service because of its hardware; the job saves a checkpoint, returns to the queue and resumes "
            "from there."
        ]
    attempts.record_checkpoint(world.platform, held, step=1, prefix="p", manifest_sha256="0", metrics={})
    world.now[0] += timedelta(minutes=1)
    fail(world, held, "preempted")
    paid = [entry.amount_micros for entry in ledger(world.platform, job)]
    assert len(paid) == 2 and max(paid) > 0 and sum(paid) == 0, "refunded in full, although its checkpoint is used"
    world.round(seconds=1)
    again = attempts.claim(world.platform, held.tenant, job)
    assert again.attempt == 2 and again.placement[0].node != node


def test_a_second_reading_changes_nothing_and_an_undrained_node_stays_until_an_error_is_new(world: Queued) -> None:
    assert node_health.record(world.platform, {"desk-0": GONE}) == ["desk-0"]
    assert node_health.record(world.platform, {"desk-0": GONE}) == []
    assert state(world, "desk-0")[2] == WHY
    nodes.undrain(world.platform, "desk-0")
    assert node_health.record(world.platform, {"desk-0": GONE}) == []
    assert state(world, "desk-0")[0] == "ready"
    assert node_health.record(world.platform, {"desk-0": {f"GPU 1 (GPU-5a)/{XID}": 0.0}}) == [], "the GPU was reset"
    assert node_health.record(world.platform, {"desk-0": GONE}) == ["desk-0"]


def test_errors_of_applications_take_no_node_away(world: Queued) -> None:
    assert node_health.record(world.platform, {"desk-0": {f"GPU 0 (GPU-1)/{XID}": 31.0}}) == []
    assert state(world, "desk-0")[0] == "ready"


def test_a_node_that_an_operator_drained_keeps_his_reason_and_its_jobs_leave(world: Queued) -> None:
    held = start(world, world.job(world.tenant()))
    node = held.placement[0].node
    nodes.drain(world.platform, node, reason="a fan is loud", by="cli:ops")
    world.round(seconds=1)
    assert asked_to_stop(world.platform, held) is None, "a drain lets jobs finish"
    node_health.record(world.platform, {node: GONE})
    assert state(world, node) == ("draining", "cli:ops", f"a fan is loud; {WHY}")
    world.round(seconds=1)
    assert asked_to_stop(world.platform, held) == "preempt"


def test_a_node_that_no_pool_has_is_ignored_and_logged_once(world: Queued, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert node_health.record(world.platform, {"stranger-7": GONE}) == []
    assert [r.getMessage() for r in caplog.records if "stranger-7" in r.getMessage()] == [
        "metrics of node stranger-7 are ignored: no pool has a node of that name"
    ]


def test_two_different_jobs_that_fail_on_a_node_within_a_day_drain_it(world: Queued) -> None:
    mine = world.tenant()
    first, second = world.job(mine, gpus=2), world.job(mine, gpus=2)
    fail(world, start(world, first, on=("desk-2",)))
    assert node_health.take_out_failing(world.platform) == []
    world.now[0] += timedelta(hours=23)
    fail(world, start(world, second, on=("desk-2",)), "internal")
    assert node_health.take_out_failing(world.platform) == ["desk-2"]
    assert state(world, "desk-2") == ("drained", "platform", f"2 jobs failed on it within a day: {', '.join(sorted((first, second)))}")
    assert node_health.take_out_failing(world.platform) == []
    nodes.undrain(world.platform, "desk-2")
    assert node_health.take_out_failing(world.platform) == [], "what failed before does not count any more"


@pytest.mark.parametrize(
    ("codes", "hours"),
    [
        pytest.param(("node_lost", "bad_example"), 0, id="the tenant's fault"),
        pytest.param(("node_lost", "preempted"), 0, id="it made room"),
        pytest.param(("node_lost", "node_lost"), 25, id="more than a day apart"),
    ],
)
def test_other_ends_leave_a_node_in_service(world: Queued, codes: tuple[str, str], hours: int) -> None:
    mine = world.tenant()
    for code in codes:
        fault, retry = (Fault.USER, Retry.NEVER) if code == "bad_example" else (Fault.PLATFORM, Retry.RESUME)
        fail(world, start(world, world.job(mine, gpus=2), on=("desk-2",)), code, fault=fault, retry=retry)
        world.now[0] += timedelta(hours=hours)
    assert node_health.take_out_failing(world.platform) == []


def test_a_gang_counts_against_the_node_that_was_lost_and_not_against_those_that_followed(world: Queued) -> None:
    mine = world.tenant()
    for lost in range(2):
        held = start(world, world.job(mine, gpus=4), on=("desk-0", "desk-1"))
        agents.introduce(world.platform, held, may_read=[])
        with world.platform.engine.begin() as conn:
            follows = sa.update(agents_table).where(agents_table.c.job_id == held.job_id, agents_table.c.node == 0)
            conn.execute(follows.values(exit={"exit_code": 1, "evidence": None, "stop_reason": None, "follows": True}))
        fail(world, held)
        assert node_health.take_out_failing(world.platform) == (["desk-1"] if lost else [])


def test_failures_everywhere_drain_half_of_a_pool_at_most(world: Queued, caplog: pytest.LogCaptureFixture) -> None:
    mine = world.tenant()
    for number in range(4):
        for _ in range(2):
            fail(world, start(world, world.job(mine, gpus=2), on=(f"desk-{number}",)), "internal", retry=Retry.NEVER)
    assert node_health.take_out_failing(world.platform) == ["desk-0", "desk-1"]
    assert node_health.take_out_failing(world.platform) == []
    assert "node desk-2 stays in service, because at most half of pool desk is drained: 2 jobs failed on it within a day" in caplog.text


def test_metrics_count_the_nodes_that_the_platform_drained_and_those_that_are_not_monitored(world: Queued) -> None:
    def counted() -> Any:
        with world.platform.engine.connect() as conn:
            found = metrics.read(conn, world.platform, world.now[0]).pools["desk"]
        return found.sick_nodes, found.unmonitored_nodes

    assert counted() == (0, 4)
    nodes.drain(world.platform, "desk-3", reason="a fan is loud", by="cli:ops")
    node_health.record(world.platform, {"desk-0": {}, "desk-1": GONE})
    assert counted() == (1, 2)
    world.now[0] += timedelta(minutes=6)
    assert counted() == (1, 4)
