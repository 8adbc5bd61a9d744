"""From an accepted job to a packed one: pin the dataset, freeze the spec, put the job in the queue."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping
from sqlalchemy.exc import SQLAlchemyError

from control_plane.adapters import promotions
from control_plane.adapters import service as adapters
from control_plane.capacity.pools import job_class
from control_plane.datasets.service import check_enough_to_train, check_reviewed
from control_plane.datasets.tables import datasets
from control_plane.datasets.tables import files as files_table
from control_plane.datasets.uploads import uploaded_files
from control_plane.datasets.validation_outcome import PLATFORM_FAILURES
from control_plane.jobs import reuse
from control_plane.jobs.tables import jobs
from control_plane.jobs.transitions import locked, record, transition
from control_plane.platform import job_events
from control_plane.platform.context import Platform
from control_plane.platform.job_states import FINAL, HOLDING_GPUS, JobState
from control_plane.quotas import service as quotas
from control_plane.sandbox.sandbox_parent import CRASHED
from control_plane.serving.rollout import FAILED
from ft_assets.adapters.stages import Stage
from ft_assets.datasets.pass_progress import Progress
from ft_assets.errors import Conflict, FtError, InvalidDataset, NotFound, QuotaExceeded, Unavailable
from ft_assets.training.cost_model import Cost
from ft_assets.training.spec import TrainingSpec

ANNOUNCE_EVERY_S = 5.0
"""Seconds between two events about one stage of a dataset: what a person waits for a sign of life, and a row each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PinnedDataset:
    """The immutable dataset versions that a job trains and validates on."""

    dataset_id: str
    content_sha256: str
    row_count: int
    uri: str
    report: Mapping[str, Any]
    validation_id: str | None
    """Dataset version of the tenant's own validation file; None: split off automatically."""


def job_row(conn: Connection, tenant: str, job_id: str) -> sa.Row[Any]:
    """The job of this tenant; another tenant's is ``NotFound``."""
    row = conn.execute(sa.select(jobs).where(jobs.c.id == job_id, jobs.c.tenant_id == tenant)).first()
    if row is None:
        raise NotFound(f"no fine-tuning job {job_id!r}", code="fine_tune_not_found", param="fine_tuning_job_id")
    return row


def pin_dataset(platform: Platform, tenant: str, job_id: str, *, progress: Callable[[Progress], None] | None = None) -> PinnedDataset:
    """Resolve the job's files to dataset versions, validating a file that nobody validated yet; a second call changes nothing."""
    with platform.engine.connect() as conn:
        job = job_row(conn, tenant, job_id)
    training = _version(platform, tenant, job.training_file, param="training_file", progress=progress)
    validation = None
    if job.validation_file:
        validation = _version(platform, tenant, job.validation_file, param="validation_file", progress=progress)
    with platform.engine.begin() as conn:
        conn.execute(sa.update(jobs).where(jobs.c.id == job_id).values(dataset_id=training.id, heartbeat_at=platform.clock()))
    return PinnedDataset(
        dataset_id=training.id,
        content_sha256=training.content_sha256,
        row_count=training.row_count,
        uri=training.uri,
        report=training.report,
        validation_id=validation.id if validation else None,
    )


def announcer(platform: Platform, job_id: str, *, say: Callable[[str], None] | None = None) -> Callable[[Progress], None]:
    """A sink for progress that tells the job's tenant (an event) and `say` at most every five seconds, and at each new stage."""
    told: dict[str, Any] = {"at": -math.inf, "stage": None}

    def tell(progress: Progress) -> None:
        if time.monotonic() - told["at"] < ANNOUNCE_EVERY_S and progress.stage == told["stage"]:
            return
        told.update(at=time.monotonic(), stage=progress.stage)
        event = job_events.progress_event(asdict(progress))
        if say is not None:
            say(event.message)
        with contextlib.suppress(SQLAlchemyError), platform.engine.begin() as conn:  # news are not worth a failed step
            record(conn, job_id, event, now=platform.clock())

    return tell


def _version(platform: Platform, tenant: str, file_id: str, *, param: str, progress: Callable[[Progress], None] | None) -> sa.Row[Any]:
    found = uploaded_files.validate(platform, file_id, progress=progress)
    if found["status_code"] in PLATFORM_FAILURES:  # an earlier attempt died: this run is the next one
        uploaded_files.validate_again(platform, tenant, file_id)
        uploaded_files.validate(platform, file_id, progress=progress)
    with platform.engine.connect() as conn:
        file = conn.execute(sa.select(files_table).where(files_table.c.id == file_id, files_table.c.tenant_id == tenant)).one()
        if file.status_code in PLATFORM_FAILURES:
            raise Unavailable(f"{file.filename} ({file_id}) could not be validated: {file.status_details}", code=CRASHED)
        if file.dataset_id is None:
            raise InvalidDataset(
                f"{file.filename} ({file_id}) cannot be trained on: {file.status_details}. "
                f"All problems: GET /v1/datasets/{file_id}/report or `ft check FILE`",
                code="invalid_validation_file" if param == "validation_file" else "invalid_training_file",
                param=param,
            )
        version = conn.execute(sa.select(datasets).where(datasets.c.tenant_id == tenant, datasets.c.id == file.dataset_id)).one()
    check_reviewed(version.review, version.id, param=param)
    if param == "training_file":
        check_enough_to_train(version.row_count, training_file=file_id)
    return version


def mark_packed(
    platform: Platform,
    tenant: str,
    job_id: str,
    *,
    spec: TrainingSpec,
    total_steps: int,
    expected_s: float,
    modelled: Cost | None = None,
) -> None:
    """Freeze the spec and queue the job, or end it with the adapter of an earlier job that trained this very spec.

    A job that has left ``validating`` keeps the spec it was frozen with. What it is expected to take is counted by now and is held
    instead of the first estimate; where the hard cap has no room for that, the job fails before it takes a GPU. `modelled` is its time by
    the cost model alone; of a job without one nothing is learned.
    """
    found = _finished(platform, tenant, job_id, spec)
    with platform.engine.begin() as conn:
        owner = quotas.lock(conn, tenant)
        job = locked(conn, job_id, tenant_id=tenant)
        waits = job["state"] == JobState.VALIDATING
        if waits and found is not None:
            _end_reusing(conn, job_id, found, spec, platform.clock())
        elif waits and not _admitted(conn, owner, job_id, expected_s * spec.world_size, platform.clock()):
            return
        elif waits:
            transition(
                conn,
                job_id,
                JobState.QUEUED,
                message=f"Packed: {total_steps} optimizer steps. The job waits for GPUs.",
                now=platform.clock(),
                spec=spec.to_dict(),
                spec_sha256=spec.sha256,
                pack_fingerprint=spec.pack_fingerprint,
                num_gpus=spec.world_size,
                job_class=job_class(spec.adapter, platform.models.get_pinned(job["model"], job["base_digest"]).num_parameters),
                expected_s=expected_s,
                modelled_s=modelled.total_s if modelled else None,
                setup_s=modelled.setup_s if modelled else None,
                total_steps=total_steps,
            )
    if found is not None and found.promoted is not None and (found.unserved or not waits):
        promotions.undo_promotion(platform, found.before, found.promoted)  # cancelled meanwhile, or no server takes it


def _admitted(conn: Connection, owner: RowMapping, job_id: str, gpu_seconds: float, now: datetime) -> bool:
    """Whether what was counted fits the tenant's hard cap; if not the job has failed."""
    refusal = quotas.hold_counted(conn, owner, job_id, gpu_seconds, now)
    if refusal is None:
        return True
    error = QuotaExceeded(f"the data is counted now, and {refusal.detail}")
    transition(conn, job_id, JobState.FAILED, message=error.message, data={"fault": str(error.fault)}, now=now, error=error.to_dict())
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Finished:
    """The job that has done another one's work, and what became of its adapter."""

    job: RowMapping
    before: Mapping[str, Any]
    """The adapter as it was found."""
    promoted: Mapping[str, Any] | None
    """The adapter, where it was promoted for this."""
    unserved: str | None
    """Why no server takes it, where it has to be served."""


def _finished(platform: Platform, tenant: str, job_id: str, spec: TrainingSpec) -> _Finished | None:
    """The job that has done this one's work, its adapter served if this one asks for that; None if it has to be trained."""
    with platform.engine.connect() as conn:
        job = conn.execute(sa.select(jobs).where(jobs.c.id == job_id, jobs.c.tenant_id == tenant)).mappings().one()
        done = reuse.finished_spec(conn, job, spec) if job["state"] == JobState.VALIDATING else None
    if done is None:
        return None
    before = now = adapters.get_adapter(platform, tenant, done["adapter_id"])
    promoted = None
    if (job["request"] or {}).get("auto_promote", True) and spec.adapter != "full":
        if before["stage"] != Stage.PRODUCTION or before["observed"] == FAILED:
            try:
                now = promotions.promote(platform, tenant, before["id"])
            except Conflict:
                return None  # it can no longer be served
            promoted = None if before["stage"] == Stage.PRODUCTION else now
        if now["observed"] == FAILED:
            return _Finished(job=done, before=before, promoted=promoted, unserved=now["detail"] or "no reason was given")
    return _Finished(job=done, before=before, promoted=promoted, unserved=None)


def _end_reusing(conn: Connection, job_id: str, found: _Finished, spec: TrainingSpec, now: datetime) -> None:
    done = found.job
    frozen = {
        "spec": spec.to_dict(), "spec_sha256": spec.sha256, "pack_fingerprint": spec.pack_fingerprint, "num_gpus": spec.world_size,
        "trained_tokens": 0, "adapter_id": done["adapter_id"], "reused_job_id": done["reused_job_id"] or done["id"],
    }  # fmt: skip
    if found.unserved:
        message = f"Job {done['id']} has trained this very spec, but no server takes its adapter {done['adapter_id']}: {found.unserved}"
        error = {"code": "not_servable", "message": message, "param": None}
        transition(conn, job_id, JobState.FAILED, message=message, now=now, error=error, **frozen)
        return
    transition(
        conn,
        job_id,
        JobState.SUCCEEDED,
        code="job_reused",
        message=f"Job {done['id']} has trained this very spec: its adapter {done['fine_tuned_model']} is the result. Nothing was trained "
        "or billed; submit with force to train all the same.",
        data={"job_id": done["id"], "spec_sha256": spec.sha256},
        now=now,
        fine_tuned_model=done["fine_tuned_model"],
        **frozen,
    )


def fail(platform: Platform, tenant: str, job_id: str, error: FtError) -> None:
    """End the job with `error` unless it has ended already; its workload, if it has one, is told to stop."""
    with platform.engine.begin() as conn:
        fail_in(conn, locked(conn, job_id, tenant_id=tenant), error, now=platform.clock())


def fail_in(conn: Connection, job: RowMapping, error: FtError, *, now: datetime) -> None:
    """:func:`fail` of a `job` whose row is locked."""
    state = JobState(job["state"])
    if state in FINAL:
        return
    stop: dict[str, Any] = {"stop_requested": "cancel"} if state in HOLDING_GPUS else {}
    data, told = {"fault": str(error.fault)}, error.to_dict()
    transition(conn, job["id"], JobState.FAILED, message=error.message, data=data, now=now, error=told, **stop)


Turn = tuple[int, ...]
"""The attempt of a job, and how often each stage's run was given up: a step that began with other numbers was replaced."""
TURN = (jobs.c.attempt, jobs.c.prepare_runs, jobs.c.train_runs, jobs.c.evaluate_runs)


def turn_of(platform: Platform, job_id: str) -> Turn:
    """Whose turn it is: what a step that begins now beats for; empty where there is no such job."""
    with platform.engine.connect() as conn:
        return tuple(conn.execute(sa.select(*TURN).where(jobs.c.id == job_id)).first() or ())


def beat(platform: Platform, job_id: str, turn: Turn) -> None:
    """Record that a step works on the job: a job without a beat for a while is picked up again. A step whose turn is over beats for nobody,
    or the death of the one that replaced it would not be seen."""
    still = [column == number for column, number in zip(TURN, turn, strict=False)]
    with platform.engine.begin() as conn:
        conn.execute(sa.update(jobs).where(jobs.c.id == job_id, *still).values(heartbeat_at=platform.clock()))
