"""A queue of several tenants' jobs, of any width and length, for tests that train nothing."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa

from control_plane.datasets.uploads import uploaded_files as files
from control_plane.jobs import service as jobs
from control_plane.jobs.queue_entry import mark_packed
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.platform.context import Platform
from control_plane.queue import cycle
from control_plane.tenants import service as tenants
from control_plane.tenants.tables import tenants as tenants_table
from tests.support.jobs.training_specs import SPEC

NOON = datetime(2026, 5, 15, 12, tzinfo=UTC)


@dataclass
class Queued:
    """A platform whose time is told, with tenants whose jobs come to the queue at once."""

    platform: Platform
    write_rows: Callable[..., Any]
    now: list[datetime] = field(default_factory=lambda: [NOON])
    files: dict[str, str] = field(default_factory=dict)
    seeds: int = 0

    def tenant(self, tier: str = "standard", name: str | None = None) -> str:
        """A tenant with a file to train on, and no cap that would keep its jobs from the queue."""
        made, _ = tenants.create(self.platform, name or f"{tier}-{uuid.uuid4().hex[:6]}", tier=tier, max_jobs_in_flight=100)
        with self.platform.engine.begin() as conn:
            conn.execute(sa.update(tenants_table).where(tenants_table.c.id == made.id).values(hard_gpu_hours=1e6))
        with self.write_rows().open("rb") as rows:
            self.files[made.id] = str(files.create(self.platform, made.id, rows, filename="rows.jsonl", purpose="fine-tune").id)
        return made.id

    def key(self, tenant: str) -> str:
        return tenants.create_key(self.platform, tenant, name="t", scopes=["admin"]).secret

    def job(self, tenant: str, *, gpus: int = 1, hours: float = 1.0, **fields: Any) -> str:
        """A job that is in the queue, and would hold its GPUs for this long."""
        self.seeds += 1
        request = {"model": "tiny-base", "training_file": self.files[tenant], "seed": self.seeds, **fields}
        job = str(jobs.submit(self.platform, tenant, JobRequest.from_body(request)).job.id)
        mark_packed(self.platform, tenant, job, spec=SPEC, total_steps=1000, expected_s=hours * 3600)
        self.set(job, num_gpus=gpus, expected_s=hours * 3600)
        return job

    def set(self, job: str, **values: Any) -> None:
        with self.platform.engine.begin() as conn:
            conn.execute(sa.update(jobs_table).where(jobs_table.c.id == job).values(**values))

    def row(self, job: str) -> sa.Row[Any]:
        with self.platform.engine.connect() as conn:
            return conn.execute(sa.select(jobs_table).where(jobs_table.c.id == job)).one()

    def round(self, **later: float) -> None:
        """One look at the queue, this much later."""
        self.now[0] += timedelta(**later)
        cycle.run_cycle(self.platform)


def queued(platform: Platform, write_rows: Callable[..., Any]) -> Queued:
    """Of a platform that nobody else uses."""
    made = Queued(platform=platform, write_rows=write_rows)
    made.platform = replace(platform, clock=lambda: made.now[0])
    return made
