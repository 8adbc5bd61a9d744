"""Starts the workload of an attempt, described by value: inputs as object keys with digests, and the checkpoints to resume from."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

import sqlalchemy as sa

from control_plane.attempts import agents, endings
from control_plane.attempts import service as attempts
from control_plane.attempts.claims import STOP_GRACE_S, Claim, Ending
from control_plane.attempts.inputs import listed_files, stored_base_models
from control_plane.attempts.tables import attempts as attempts_table
from control_plane.jobs import warm_starts
from control_plane.platform.context import Platform
from control_plane.platform.protocols import Launcher, ObjectStore, WorkloadPhase, WorkloadStatus
from core import layout
from core.base_models import CHANGED
from core.errors import IntegrityError, NotAdmitted
from core.telemetry import correlation, logs
from core.workload import Input, InputFile, Kind, StoredCheckpoint, Workload
from engine.adapters import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from engine.training import Evidence, StopReason, TrainingSpec, WarmStart, classify_failure

PACK, REFERENCE, WARM_START, BASE_MODEL = "pack_dir", "reference_dir", "warm_start_dir", "base_model_dir"


def take(platform: Platform, launcher: Launcher, tenant: str, job_id: str) -> Claim:
    """Claim the right to train a job. If its spec is unreadable, the job and its workload end here, because a retry cannot help."""
    try:
        return attempts.claim(platform, tenant, job_id, Kind.TRAIN)
    except NotAdmitted as error:
        if error.code == attempts.UNREADABLE:
            workload = attempts.workload_held(platform, job_id)
            if workload is not None:
                launcher.stop(workload, grace_s=STOP_GRACE_S)
            attempts.abandon(platform, tenant, job_id, error)
        raise


Describe = Callable[[Platform, Claim], Workload]


def start_or_adopt(platform: Platform, launcher: Launcher, held: Claim, description: Describe | None = None) -> Ending | None:
    """Start the attempt's workload unless it runs already; returns how the attempt ended if it was stopped before that.

    `description` describes a workload that is not a training.
    """
    status = launcher.get(held.workload)
    if status.phase is WorkloadPhase.ABSENT:
        if (unbegun := _unbegun(platform, held)) is not None:
            return unbegun
        try:
            workload = (description or describe)(platform, held)
        except IntegrityError as error:
            if error.code != CHANGED:
                raise
            return endings.changed_ending(held, error, last_step=0)
        token = agents.introduce(platform, held, may_read=_prefixes(workload))
        attempts.must_hold(platform, held)  # describing took a while
        status = launcher.start_or_adopt(workload, token=token)
    if status.started_at is not None:  # else the watcher sees when it starts
        attempts.mark_started(platform, held, started_at=status.started_at, nodes=status.nodes)
    return None


def describe(platform: Platform, held: Claim) -> Workload:
    """Return the workload of an attempt; ``IntegrityError`` if its base model has changed."""
    spec, stored = held.spec, attempts.committed(platform, held.job_id)
    return Workload(
        name=held.workload,
        kind=Kind.TRAIN,
        tenant=held.tenant,
        job=held.job_id,
        attempt=held.attempt,
        module="engine.training.runtime",
        processes=(spec.world_size,) if held.num_nodes == 1 else tuple(len(share.devices) for share in held.placement),
        run={"spec": spec.to_dict(), "attempt": held.attempt},
        inputs=tuple(_inputs(platform, held)),
        checkpoints=tuple(
            StoredCheckpoint(step=row.step, attempt=row.attempt, prefix=row.object_prefix, manifest_sha256=row.manifest_sha256)
            for row in stored
            if not row.final
        ),
        checkpoint_prefix=attempts.checkpoint_prefix(held),
        final_prefix=attempts.final_prefix(held),
        reference_prefix=agents.reference_prefix(held),
        report_to=platform.settings.internal_url,
        placement=held.placement,
        image=spec.image,
        grace_s=STOP_GRACE_S,
        heartbeat_timeout_s=platform.settings.heartbeat_timeout_s,
        env=watched_as(held),
        labels={"tier": held.tier, "pool": held.pool},
    )


def _inputs(platform: Platform, held: Claim) -> Iterator[Input]:
    spec, objects = held.spec, platform.objects
    yield Input(name=BASE_MODEL, files=stored_base_models.publish(platform, held.model, spec.base_digest))
    yield pack_input(objects, held.tenant, spec)
    if (reference := reference_input(objects, held)) is not None:
        yield reference
    if spec.warm_start is not None:
        yield warm_start_input(platform, held.tenant, spec.warm_start, whole=spec.adapter == "full")


def warm_start_input(platform: Platform, tenant: str, start: WarmStart, *, whole: bool = False) -> Input:
    """Return the adapter, checkpoint or `whole` model to start from, by the digests of the manifest that the spec names."""
    prefix = warm_starts.stored_prefix(platform, tenant, start)
    only = () if whole else (ADAPTER_CONFIG, ADAPTER_WEIGHTS)  # of a checkpoint, neither optimizer nor position
    return Input(name=WARM_START, files=listed_files.of_weights(platform.objects, prefix, manifest_sha256=start.manifest_sha256, only=only))


def reference_input(objects: ObjectStore, held: Claim) -> Input | None:
    """Return the reference log-probabilities that an earlier job has computed; None if the workload has to, or needs none."""
    prefix = agents.reference_prefix(held)
    if not prefix or not objects.exists(f"{prefix}/manifest.json"):
        return None
    return Input(name=REFERENCE, files=listed_files.of_pack(objects, prefix), optional=True)


def pack_input(objects: ObjectStore, tenant: str, spec: TrainingSpec) -> Input:
    """Return the pack, of a mixture one directory per pack; all training shards but the first of each arrive while the training runs."""
    now: list[InputFile] = []
    later: list[InputFile] = []
    for fingerprint, directory in spec.packs:
        files = listed_files.of_pack(objects, layout.pack_prefix(tenant, fingerprint))
        shards = [file for file in files if file.path.startswith("shard-")]
        for file in files:
            (later if file in shards[1:] else now).append(replace(file, path=str(PurePosixPath(directory, file.path))))
    return Input(name=PACK, files=tuple(now), later=tuple(later))


def _prefixes(workload: Workload) -> list[str]:
    """Return the prefixes of the workload's inputs."""
    return sorted({f"{file.key.rpartition('/')[0]}/" for each in workload.inputs for file in (*each.files, *each.later)})


def _unbegun(platform: Platform, held: Claim) -> Ending | None:
    """Return the ending of an attempt that was asked to stop before its workload started; None if it was not asked."""
    with platform.engine.connect() as conn:
        requested = attempts.requested_stop(conn, held)
    if requested is None:
        return None
    step = 0 if held.kind is not Kind.TRAIN else max((row.step for row in attempts.committed(platform, held.job_id)), default=0)
    failure = classify_failure(Evidence(phase=WorkloadPhase.ABSENT, stop_reason=StopReason(requested), committed_step=step, last_step=step))
    assert failure is not None
    status = WorkloadStatus(name=held.workload, phase=WorkloadPhase.ABSENT)
    return Ending(outcome=failure.code, failure=failure, last_step=step, trained_tokens=0, status=status)


def watched_as(held: Claim) -> dict[str, str]:
    """Environment that ties the workload's logs and spans to this attempt and its trace."""
    with correlation.scope(tenant=held.tenant, job=held.job_id, attempt=held.attempt):
        return logs.environment()


POLL_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How an attempt ended, as its row says."""

    outcome: str
    last_step: int

    @property
    def stopped(self) -> bool:
        """Whether it was stopped by its tenant, the scheduler or its node, which is not a failure."""
        return self.outcome in ("paused", "preempted", "cancelled")


def wait_for_end(platform: Platform, held: Claim) -> Ended:
    """Wait until the attempt's row has ended."""
    a = attempts_table.c
    ended = sa.select(a.outcome, a.last_step).where(attempts.of_attempt(held), a.ended_at.is_not(None))
    while True:
        with platform.engine.connect() as conn:
            row = conn.execute(ended).one_or_none()
        if row is not None:
            return Ended(outcome=row.outcome, last_step=row.last_step or 0)
        time.sleep(POLL_S)
