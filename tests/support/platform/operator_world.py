"""Something on every operators' page: running jobs, a reservation, backfill, late starts, a drained node, failed deliveries, bills."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from control_plane.capacity import maintenance, nodes
from control_plane.jobs.transitions import transition
from control_plane.notifications import outbox, webhook_endpoints
from control_plane.notifications.tables import deliveries
from control_plane.platform.context import Platform, utc_now
from control_plane.platform.job_states import JobState
from control_plane.tenants import suspension
from control_plane.tenants.tables import tenants
from tests.support.jobs.queued_jobs import Queued, queued
from tests.support.platform.ledger_entries import enter

OPERATOR_PAGES = {
    "operators' overview": "/console/operator",
    "operators' queue": "/console/operator/queue",
    "nodes": "/console/operator/nodes",
    "tenants": "/console/operator/tenants",
    "tenant": "/console/operator/tenants/acme",
    "suspended tenant": "/console/operator/tenants/gone",
    "failed deliveries": "/console/operator/deliveries",
    "ledger": "/console/operator/ledger",
    "plan": "/console/operator/plan",
}
"""Every page of the operators, by name."""
POOLS = """
pools:
  - {name: small, gpu_type: h100-80gb, takes: [lora], max_gpus_per_job: 8, nodes: [{count: 3, gpus: 8}, {name: small-half, gpus: 4}]}
  - {name: spot, gpu_type: h100-80gb, pricing: spot, takes: [lora], max_gpus_per_job: 2, nodes: [{name: spot-0, gpus: 2}]}
"""


@dataclass(frozen=True, kw_only=True)
class OperatorWorld:
    queue: Queued
    acme: str
    """A premium tenant with a name of its own; `beta` is a standard one, `gone` is suspended."""
    beta: str
    gone: str
    endpoint: str
    """A webhook of acme, to which a delivery was given up."""
    delivery: str
    drained: str
    """Node that an operator drained."""

    @property
    def platform(self) -> Platform:
        return self.queue.platform


def pools_file(directory: Path) -> Path:
    path = directory / "pools.yaml"
    path.write_text(POOLS)
    return path


def make_operator_world(platform: Platform, write_rows: Callable[..., Any], *, text: str = "") -> OperatorWorld:
    """`platform` has the pools of :func:`pools_file`; `text` is added to what tenants and operators write."""
    queue = queued(platform, write_rows)
    queue.now[0] = utc_now() - timedelta(minutes=40)
    acme, beta, gone = queue.tenant("premium", name="acme"), queue.tenant(name="beta"), queue.tenant(name="gone")
    with queue.platform.engine.begin() as conn:
        conn.execute(sa.update(tenants).where(tenants.c.id == acme).values(name=f"Acme Support{text}"))
    _jobs(queue, acme, beta)
    suspension.suspend(queue.platform, gone, reason=f"unpaid{text}")
    nodes.drain(queue.platform, "small-half", reason=f"fan replaced{text}", by="cli:ops")
    maintenance.start(queue.platform, pool="spot", message=f"The provider moves it.{text}", by="cli:ops")
    endpoint, delivery = _dead_delivery(queue.platform, acme, text)
    with queue.platform.engine.begin() as conn:
        for tenant, dollars in ((acme, 812), (beta, 96)):
            enter(conn, tenant, f"ftjob-{tenant}", amount_micros=dollars * 1_000_000, gpu_seconds=dollars * 1200.0)
    return OperatorWorld(queue=queue, acme=acme, beta=beta, gone=gone, endpoint=endpoint, delivery=delivery, drained="small-half")


def _jobs(queue: Queued, acme: str, beta: str) -> None:
    """Two nodes are full for hours, a wide job waits for one of them, and a short one fills its gap."""
    running = [queue.job(acme, gpus=8, hours=3), queue.job(beta, gpus=8, hours=5), queue.job(beta, gpus=5, hours=2)]
    queue.round()
    late = queue.job(acme, gpus=8, hours=2)
    queue.round(minutes=1)
    backfill = queue.job(beta, gpus=2, hours=0.6)
    queue.job(beta, gpus=1, hours=9)
    queue.round(minutes=1)
    with queue.platform.engine.begin() as conn:
        for job in (*running, backfill):
            if conn.exec_driver_sql("SELECT state FROM jobs WHERE id = %s", (job,)).scalar() == JobState.PROVISIONING:
                transition(conn, job, JobState.RUNNING, message="Training started.")
    queue.set(running[2], step=180, total_steps=400, started_at=queue.now[0])
    queue.set(late, created_at=queue.now[0] - timedelta(minutes=30))
    queue.round(minutes=38)


def _dead_delivery(platform: Platform, tenant: str, text: str) -> tuple[str, str]:
    made = webhook_endpoints.create(platform, tenant, name=f"ci{text}"[:60], url="http://127.0.0.1:9/ft", event_types=["*"]).endpoint
    with platform.engine.begin() as conn:
        outbox.publish(conn, tenant, "fine_tuning.job.failed", "ftjob-x", {"state": "failed"}, now=platform.clock())
    outbox.fan_out(platform)
    given_up = {"state": "dead", "attempts": 12, "last_status": 503, "last_error": f"the receiver answered 503{text}"}
    with platform.engine.begin() as conn:
        ours = deliveries.c.target == made.id, deliveries.c.subject == "ftjob-x"
        return made.id, conn.execute(sa.update(deliveries).where(*ours).values(given_up).returning(deliveries.c.id)).scalar_one()
