"""Every launch passes this queue (UI, GraphQL, backfill, sensor, queue listener, re-execution): it refuses a training run without a
reservation, and a second run for what one run already serves, whoever launches it.

A run with a reservation, of a training or an evaluation, starts at once. The queue limits preparations, in total and per tenant
(:mod:`control_plane.queue.launches`): each takes a slot, a tag that only this module sets. A run that brings a slot tag it does not need is
refused.

A tag could be forged, so the reservation is looked up in the control plane's database by partition key. `dagster asset materialize` passes
no queue; the ``checkpoint`` asset checks the same reservation again.
"""

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from dagster import DagsterRun, QueuedRunCoordinator, SubmitRunContext

from control_plane.capacity import configured_pools
from control_plane.evaluations.tables import evaluations
from control_plane.jobs.tables import jobs
from control_plane.platform.job_states import JobState
from control_plane.platform.settings import load
from control_plane.queue import launches
from control_plane.queue.launches import bind, evaluation_due, order_due, order_key, training_key
from control_plane.queue.tables import reservations
from core.workload import Kind
from resources.dagster.private_api import PARENT_RUN_ID_TAG, RunQueueConfig
from resources.dagster.run_tags import ASKED_BY_TAG, ATTEMPT_TAG, PREPARE_SLOT, REFUSED_KEY_TAG, RUN_KEY_TAG
from resources.database.engine import control_plane_url, shared_logins

GATED_JOBS = frozenset({"train"})
GATED_ASSETS = frozenset({"checkpoint"})
KEYED_JOBS = frozenset({"prepare", "train", "evaluate"})
"""Runs of these jobs have the platform's own keys; each key has one run."""
ORDERED_JOB = "reevaluate"
"""Its runs have such keys too, of the evaluation that was ordered instead of the job."""
SLOTS = {PREPARE_SLOT: frozenset({"prepare", "dataset", "tokenized_pack"})}
"""By tag: the jobs and the assets whose runs take such a slot."""
UNLIMITED = -1
NEXT_STEP = "Submit it through the API, `ft submit` or the `submit` job; the scheduler starts it when it fits"


class AdmissionRunCoordinator(QueuedRunCoordinator):
    """Dagster's queue, with the platform's admission in front."""

    def submit_run(self, context: SubmitRunContext) -> DagsterRun:
        run = context.dagster_run
        refusal, run_key = self.judge(run)
        if refusal is None:
            tags = slots_of(run) | ({RUN_KEY_TAG: run_key} if run_key else {})  # the sensor `failures` finds it by its key
            if not run_key and RUN_KEY_TAG in run.tags:  # a key that serves nothing: the parent's, or forged
                tags |= {RUN_KEY_TAG: "", REFUSED_KEY_TAG: run.tags[RUN_KEY_TAG]}
            if any(run.tags.get(name) != value for name, value in tags.items()):
                self._instance.add_run_tags(run.run_id, tags)
            return super().submit_run(context)
        if RUN_KEY_TAG in run.tags:  # so that a search for this key finds the run that serves it
            self._instance.add_run_tags(run.run_id, {RUN_KEY_TAG: "", REFUSED_KEY_TAG: run.tags[RUN_KEY_TAG]})
        self._instance.report_run_canceled(run, message=refusal)
        refused = self._instance.get_run_by_id(run.run_id)
        assert refused is not None
        return refused

    def get_run_queue_config(self) -> RunQueueConfig:
        """Limits on slots only, from the settings of the calling daemon."""
        settings = load()
        num_gpus = sum(pool.total_gpus for pool in configured_pools.configured(settings, datetime.now(UTC)))
        limit = launches.prepare_limit(num_gpus, override=settings.prepare_runs)
        each = {"value": {"applyLimitPerUniqueValue": True}, "limit": launches.per_tenant(limit)}
        slots = [{"key": PREPARE_SLOT, "limit": limit}, {"key": PREPARE_SLOT, **each}]
        return super().get_run_queue_config()._replace(max_concurrent_runs=UNLIMITED, tag_concurrency_limits=slots)

    def judge(self, run: DagsterRun) -> tuple[str | None, str]:
        """Return why `run` may not start, None if it may; and its permanent key, empty if it serves nothing that is due.

        A run of a stage that is due serves it, even if it was started by hand and names no key. If nothing is due, an operator may repeat a
        preparation or an evaluation; a re-execution has its parent's key among its tags, which is ignored. A run of an ordered evaluation
        serves it only with its key. A run with the tag of a slot that it does not take is refused: it would hold up others, and Dagster
        never removes a run's tags.
        """
        if forged := sorted((SLOTS.keys() & run.tags.keys()) - slots_of(run).keys()):
            return f"refused: the platform sets the tag {forged[0]}, which this run may not use; launch it without the tag", ""
        selected = {key.path[-1] for key in run.asset_selection or ()}
        gated = run.job_name in GATED_JOBS or bool(selected & GATED_ASSETS)
        ordered = run.job_name == ORDERED_JOB and not gated
        keyed = run.job_name in KEYED_JOBS or ordered
        if not gated and not keyed:
            return None, ""
        key = run.tags.get("dagster/partition", "")
        tenant, _, job_id = key.partition(":")
        named = "" if PARENT_RUN_ID_TAG in run.tags or not keyed else run.tags.get(RUN_KEY_TAG, "")
        if ordered and not named:
            return None, ""
        if named and not ordered and not named.startswith(f"{job_id}#"):
            return f"refused: {named} is the key of another job's run, and this one is of job {key or '(no partition)'}", ""
        with shared_logins(control_plane_url(load())).platform.begin() as conn:
            if gated:
                held = _held(conn, tenant, job_id)
                if held is None:
                    return f"refused: job {key or '(no partition)'} holds no reservation, so it may not train. {NEXT_STEP}", ""
                if run.tags.get(ATTEMPT_TAG, str(held.attempt)) != str(held.attempt):
                    reported = f"refused: it is for attempt {run.tags[ATTEMPT_TAG]} of job {key}"
                    return f"{reported}, whose reservation is given back; attempt {held.attempt} holds one now. {NEXT_STEP}", ""
                due = training_key(job_id, held.attempt, held.train_runs)
            elif ordered:
                due = _ordered(conn, tenant, job_id, named.partition("#")[0])
            else:
                job = _job(conn, tenant, job_id)
                if job is None:
                    return (
                        f"refused: there is no job {key or '(no partition)'}; submit one through the API, `ft submit` or the `submit` job",
                        "",
                    )
                due = f"{job_id}#{run.job_name}{job[f'{run.job_name}_runs']}" if job[f"{run.job_name}_due"] else ""
            if named and named != due:
                return f"refused: job {key} needs no run {named} any more{f'; it needs {due} now' if due else ''}", ""
            if not due:
                return None, ""
            other = bind(conn, due, job_id, run.run_id, by=run.tags.get(ASKED_BY_TAG, "by hand"))
        if other is None:
            return None, due
        return f"refused: run {other} already serves {due}; if it failed, a new one is launched automatically", ""


def slots_of(run: DagsterRun) -> dict[str, str]:
    """Return the tags of the slots that `run` takes; none for a training run, which holds a reservation or is refused."""
    made = {run.job_name, *(key.path[-1] for key in run.asset_selection or ())}
    if made & (GATED_JOBS | GATED_ASSETS):
        return {}
    tenant = run.tags.get("dagster/partition", "").partition(":")[0]
    return {tag: tenant for tag, names in SLOTS.items() if made & names}


def _held(conn: sa.Connection, tenant: str, job_id: str) -> Any:
    """Return attempt and number of runs of the job's reservation for training; None if it holds none."""
    query = (
        sa.select(reservations.c.attempt, jobs.c.train_runs)
        .select_from(reservations.join(jobs, jobs.c.id == reservations.c.job_id))
        .where(jobs.c.id == job_id, jobs.c.tenant_id == tenant, reservations.c.released_at.is_(None))
        .where(reservations.c.kind == Kind.TRAIN)
    )
    return conn.execute(query).first()


def _ordered(conn: sa.Connection, tenant: str, job_id: str, evaluation_id: str) -> str:
    """Return the key of the run that an ordered evaluation of the job's adapter needs now; empty if it needs none."""
    this = (evaluations.c.id == evaluation_id) & (evaluations.c.job_id == job_id) & (evaluations.c.tenant_id == tenant)
    runs = conn.scalar(sa.select(evaluations.c.runs).where(this, order_due()))
    return "" if runs is None else order_key(evaluation_id, runs)


def _job(conn: sa.Connection, tenant: str, job_id: str) -> Any:
    """Return by stage whether the job needs a run, and how often its runs were replaced; None if the tenant has no such job."""
    prepares = (jobs.c.state == JobState.VALIDATING).label("prepare_due")
    query = sa.select(prepares, evaluation_due().label("evaluate_due"), jobs.c.prepare_runs, jobs.c.evaluate_runs)
    return conn.execute(query.where(jobs.c.id == job_id, jobs.c.tenant_id == tenant)).mappings().first()
