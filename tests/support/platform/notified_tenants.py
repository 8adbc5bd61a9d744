"""A platform whose time is the test's, with tenants that are told of events: for tests of webhooks and their deliveries."""

from __future__ import annotations

import uuid
from dataclasses import replace
from datetime import timedelta

import sqlalchemy as sa

from control_plane.notifications import webhook_endpoints as webhooks
from control_plane.notifications.outbox import publish
from control_plane.notifications.tables import deliveries, outbox, webhook_endpoints
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from tests.support.platform.background_worker import pass_time, work_off
from tests.support.platform.fleet_in_memory import Clock

SUCCEEDED, RUNNING, QUEUED = "fine_tuning.job.succeeded", "fine_tuning.job.running", "fine_tuning.job.queued"


def forget_all(platform: Platform) -> None:
    """What earlier tests left to be sent."""
    with platform.engine.begin() as conn:
        for table in (deliveries, outbox, webhook_endpoints):
            conn.execute(sa.delete(table))
        conn.execute(sa.text("DELETE FROM tasks.procrastinate_jobs"))


class World:
    """A platform whose time is the test's, with a tenant."""

    def __init__(self, platform: Platform) -> None:
        self.clock = Clock()
        self.platform = replace(platform, clock=self.clock)
        self.tenant = self.new_tenant()

    def new_tenant(self) -> str:
        name = f"t-{uuid.uuid4().hex[:8]}"
        tenants.create(self.platform, name)
        return name

    def endpoint(self, url: str, *types: str, tenant: str | None = None) -> str:
        made = webhooks.create(self.platform, tenant or self.tenant, name="hook", url=url, event_types=types or ("*",))
        return made.endpoint.id

    def tell(self, kind: str = SUCCEEDED, subject: str = "ftjob-1", *, tenant: str | None = None) -> str:
        with self.platform.engine.begin() as conn:
            return publish(conn, tenant or self.tenant, kind, subject, now=self.clock())

    def send(self) -> None:
        """All that is due now."""
        work_off(self.platform)

    def of(self, endpoint: str) -> list[sa.RowMapping]:
        with self.platform.engine.connect() as conn:
            query = sa.select(deliveries).where(deliveries.c.target == endpoint).order_by(deliveries.c.event_seq)
            return list(conn.execute(query).mappings())

    def states(self, endpoint: str) -> list[str]:
        return [row["state"] for row in self.of(endpoint)]

    def later(self, seconds: float) -> None:
        self.clock.now += timedelta(seconds=seconds)
        pass_time(self.platform, seconds)
