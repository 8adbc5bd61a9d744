"""Every launch crosses this queue (UI, GraphQL, backfill, sensor, re-execution): a training run without a reservation is refused.

A tag could be forged, so the reservation is looked up in the control plane's database by partition key.
`dagster asset materialize` crosses no queue; the ``checkpoint`` asset checks the same reservation again.
"""

from typing import Any

import sqlalchemy as sa
from dagster import DagsterRun
from dagster._core.run_coordinator import SubmitRunContext
from dagster._core.run_coordinator.queued_run_coordinator import QueuedRunCoordinator
from dagster._serdes import ConfigurableClassData

from control_plane.settings import load
from control_plane.tables import jobs, reservations
from resources.database.engine import control_plane_url, shared_engine

GATED_JOBS = frozenset({"train"})
GATED_ASSETS = frozenset({"checkpoint"})


class AdmissionRunCoordinator(QueuedRunCoordinator):
    """Dagster's queue behind the platform's admission."""

    def __init__(self, inst_data: ConfigurableClassData | None = None, **config: Any) -> None:
        super().__init__(inst_data=inst_data, **config)

    @classmethod
    def from_config_value(cls, inst_data: ConfigurableClassData, config_value: Any) -> "AdmissionRunCoordinator":
        return cls(inst_data=inst_data, **config_value)

    def submit_run(self, context: SubmitRunContext) -> DagsterRun:
        run = context.dagster_run
        refusal = self.refusal(run)
        if refusal is None:
            return super().submit_run(context)
        self._instance.report_run_canceled(run, message=refusal)
        refused = self._instance.get_run_by_id(run.run_id)
        assert refused is not None
        return refused

    def refusal(self, run: DagsterRun) -> str | None:
        """Why `run` may not start; None when it may."""
        selected = {key.path[-1] for key in run.asset_selection or ()}
        if run.job_name not in GATED_JOBS and not selected & GATED_ASSETS:
            return None
        key = run.tags.get("dagster/partition", "")
        tenant, _, job_id = key.partition(":")
        if self._holds_reservation(tenant, job_id):
            return None
        return (
            f"refused: job {key or '(no partition)'} holds no reservation, so it may not train. Submit it through the API, "
            "`ft submit` or the `submit` job; the scheduler starts it when it fits"
        )

    def _holds_reservation(self, tenant: str, job_id: str) -> bool:
        query = (
            sa.select(sa.literal(1))
            .select_from(reservations.join(jobs, jobs.c.id == reservations.c.job_id))
            .where(jobs.c.id == job_id, jobs.c.tenant_id == tenant, reservations.c.released_at.is_(None))
        )
        with shared_engine(control_plane_url(load())).connect() as conn:
            return conn.execute(query).first() is not None
