"""A job whose attempts are reported, and billed, as a test wants them."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.billing import ledger
from control_plane.billing.metering import service as metering
from control_plane.billing.metering.rules import Work
from control_plane.billing.rules import Entry
from control_plane.billing.tables import ledger_entries
from control_plane.datasets.tables import files
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from core.errors import Fault
from engine.scheduler.pools import Pool, equal_nodes

AT = datetime(2026, 3, 10, 12, tzinfo=UTC)
POOL = Pool(name="h100", nodes=equal_nodes(8), gpu_type="h100-80gb", max_gpus_per_job=8)


def at_time(platform: Platform, now: datetime) -> Platform:
    """The platform, with its clock stopped at `now`."""
    return replace(platform, clock=lambda: now)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeteredJob:
    platform: Platform
    tenant: str
    id: str
    tier: str

    def attempt(self, number: int) -> metering.Metered:
        return metering.Metered(tenant_id=self.tenant, job_id=self.id, attempt=number)

    def started(self, conn: Connection, attempt: int, at: datetime, *, pool: Pool = POOL, num_gpus: int = 1) -> None:
        now = self.platform.clock()
        metering.report_started(
            conn, self.attempt(attempt), tier=self.tier, model="tiny-base", pool=pool, num_gpus=num_gpus, at=at, now=now
        )

    def ended(
        self,
        conn: Connection,
        attempt: int,
        at: datetime,
        *,
        outcome: str = "succeeded",
        fault: Fault | None = None,
        work: Work | None = None,
    ) -> None:
        now = self.platform.clock()
        metering.report_ended(conn, self.attempt(attempt), outcome=outcome, fault=fault, at=at, now=now, seen=True, work=work)

    def run(
        self,
        attempt: int = 1,
        *,
        at: datetime = AT,
        hours: float = 1.0,
        outcome: str = "succeeded",
        fault: Fault | None = None,
        work: Work | None = None,
        **how: Any,
    ) -> list[Entry]:
        """An attempt from its start to its entries."""
        with self.platform.engine.begin() as conn:
            self.started(conn, attempt, at, **how)
            self.ended(conn, attempt, at + timedelta(hours=hours), outcome=outcome, fault=fault, work=work)
            return metering.settle(conn, self.platform, self.attempt(attempt))

    def entries(self) -> list[Entry]:
        with self.platform.engine.connect() as conn:
            return ledger.of_job(conn, self.tenant, self.id)

    def owes(self) -> int:
        query = sa.select(sa.func.coalesce(sa.func.sum(ledger_entries.c.amount_micros), 0)).where(ledger_entries.c.job_id == self.id)
        with self.platform.engine.connect() as conn:
            return int(conn.execute(query).scalar_one())


def metered_job(platform: Platform, tenant: str | None = None, *, tier: str = "standard") -> MeteredJob:
    """A job as a row, of a new tenant if none is named."""
    if tenant is None:
        tenant = tenants.create(platform, f"t-{uuid.uuid4().hex[:10]}", tier=tier)[0].id
    made, now = uuid.uuid4().hex, platform.clock()
    file = {
        "id": f"file-{made}", "tenant_id": tenant, "filename": "f", "purpose": "fine-tune", "bytes": 1, "sha256": "", "object_key": "k",
        "status": "processed", "created_at": now,
    }  # fmt: skip
    job = {
        "id": f"ftjob-{made}", "tenant_id": tenant, "state": "running", "tier": tier, "model": "tiny-base", "base_digest": "d",
        "method": "supervised", "training_file": file["id"], "seed": 1, "request": {}, "request_sha256": made, "hyperparameters": {},
        "created_at": now,
    }  # fmt: skip
    with platform.engine.begin() as conn:
        conn.execute(sa.insert(files).values(**file))
        conn.execute(sa.insert(jobs).values(**job))
    return MeteredJob(platform=platform, tenant=tenant, id=f"ftjob-{made}", tier=tier)
