"""Every launch crosses this queue (UI, GraphQL, backfill, sensor, nudge, re-execution): a training run without a reservation is
refused, and so is a second run for what one run serves already, whoever asks for it.

A tag could be forged, so the reservation is looked up in the control plane's database by partition key.
`dagster asset materialize` crosses no queue; the ``checkpoint`` asset checks the same reservation again.
"""

from typing import Any

import sqlalchemy as sa
from dagster import DagsterRun
from dagster._core.run_coordinator import SubmitRunContext
from dagster._core.run_coordinator.queued_run_coordinator import QueuedRunCoordinator
from dagster._serdes import ConfigurableClassData

from control_plane.service.due_runs import training_key
from control_plane.service.run_launches import bind
from control_plane.settings import load
from control_plane.tables import jobs, reservations
from resources.database.engine import control_plane_url, shared_engine

GATED_JOBS = frozenset({"train"})
GATED_ASSETS = frozenset({"checkpoint"})
KEYED_JOBS = frozenset({"prepare", "train", "evaluate"})
"""Runs of these have keys that are the platform's own; each key has one run."""
RUN_KEY_TAG, ATTEMPT_TAG, ASKED_BY_TAG = "ft/run_key", "ft/attempt", "ft/asked_by"
NEXT_STEP = "Submit it through the API, `ft submit` or the `submit` job; the scheduler starts it when it fits"


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
        """Why `run` may not start; None when it may, and then it has its key for ever."""
        selected = {key.path[-1] for key in run.asset_selection or ()}
        gated = run.job_name in GATED_JOBS or bool(selected & GATED_ASSETS)
        key = run.tags.get("dagster/partition", "")
        tenant, _, job_id = key.partition(":")
        run_key = run.tags.get(RUN_KEY_TAG, "") if run.job_name in KEYED_JOBS else ""
        if not gated and not run_key:
            return None
        with shared_engine(control_plane_url(load())).begin() as conn:
            if gated:
                held = _held(conn, tenant, job_id)
                if held is None:
                    return f"refused: job {key or '(no partition)'} holds no reservation, so it may not train. {NEXT_STEP}"
                if run.tags.get(ATTEMPT_TAG, str(held.attempt)) != str(held.attempt):
                    told = f"refused: it is for attempt {run.tags[ATTEMPT_TAG]} of job {key}"
                    return f"{told}, whose reservation is given back; attempt {held.attempt} holds one now. {NEXT_STEP}"
                run_key = run_key or training_key(job_id, held.attempt, held.train_runs)
            elif not _is_of(conn, tenant, job_id):
                return f"refused: there is no job {key or '(no partition)'}; submit one through the API, `ft submit` or the `submit` job"
            other = bind(conn, run_key, job_id, run.run_id, by=run.tags.get(ASKED_BY_TAG, "by hand"))
        return None if other is None else f"refused: run {other} serves {run_key} already; if it failed, another one is asked for by itself"


def _held(conn: sa.Connection, tenant: str, job_id: str) -> Any:
    """Attempt and number of runs of the job's reservation; None when it holds none."""
    query = (
        sa.select(reservations.c.attempt, jobs.c.train_runs)
        .select_from(reservations.join(jobs, jobs.c.id == reservations.c.job_id))
        .where(jobs.c.id == job_id, jobs.c.tenant_id == tenant, reservations.c.released_at.is_(None))
    )
    return conn.execute(query).first()


def _is_of(conn: sa.Connection, tenant: str, job_id: str) -> bool:
    return conn.execute(sa.select(sa.literal(1)).where(jobs.c.id == job_id, jobs.c.tenant_id == tenant)).first() is not None
