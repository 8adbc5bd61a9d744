"""The workload of an evaluation, described by value, and the result that it leaves in the object store."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import sqlalchemy as sa

from control_plane.attempts import service as attempts
from control_plane.attempts import start
from control_plane.attempts.claims import Claim
from control_plane.attempts.inputs import listed_files, stored_base_models
from control_plane.attempts.tables import agents
from control_plane.attempts.tables import attempts as attempts_table
from control_plane.jobs.job_documents import EvaluationProgress
from control_plane.jobs.tables import Job, jobs
from control_plane.platform.context import Platform
from control_plane.queue.tables import reservations
from core import layout
from core.base_models import file_sha256
from core.errors import IntegrityError, NotAdmitted
from core.workload import Input, InputFile, Kind, Output, Workload
from engine.evals import (
    DATA_NAME,
    HOLDOUT_NAME,
    KNOWN_NAME,
    QUESTION_DIR,
    RESULT_NAME,
    SCORED_NAME,
    STAGED_PATHS,
    SUITES_DIR,
    TASKS_NAME,
    EvalRun,
    plain_suites,
    suite_data_files,
)

GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL: every answer is already in the journal."""
TASKS_PREFIX = "eval_tasks"
"""Prefix of an operator's suites and their data, by digest."""
STAGED = (*STAGED_PATHS, "task_dirs", "known")
"""Fields of the run file that the agent fills in from the inputs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredWeights:
    """An adapter or whole model in the object store."""

    prefix: str
    manifest_sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What an evaluation asks, of whom."""

    job: Job
    run: EvalRun
    """With this machine's copies of base, pack and items, from which known answers were found."""
    base_model: str
    base_digest: str
    adapter: StoredWeights
    previous: StoredWeights | None


def describe(platform: Platform, held: Claim, asked: Question) -> Workload:
    """Return the workload of an attempt; ``IntegrityError`` if the base model has changed."""
    run = {name: value for name, value in asdict(asked.run).items() if name not in STAGED}
    result = Output(
        path=f"evals/{held.evaluation_id or 'own'}/{RESULT_NAME}", key=f"{attempts.output_prefix(held)}/{RESULT_NAME}"
    )  # fmt: skip
    return Workload(
        name=held.workload,
        kind=Kind.EVALUATE,
        tenant=held.tenant,
        job=held.job_id,
        attempt=held.attempt,
        module="engine.evals.run.runner",
        run=run,
        inputs=tuple(_inputs(platform, held, asked)),
        outputs=(result,),
        report_to=platform.settings.internal_url,
        placement=held.placement,
        image=str((asked.job.spec or {}).get("image", "")),
        grace_s=GRACE_S,
        heartbeat_timeout_s=platform.settings.heartbeat_timeout_s,
        env=start.watched_as(held),
        labels={"tier": held.tier, "pool": held.pool},
    )


def _inputs(platform: Platform, held: Claim, asked: Question) -> Iterator[Input]:
    objects, run = platform.objects, asked.run
    yield Input(name="base_model_dir", files=stored_base_models.publish(platform, asked.base_model, asked.base_digest))
    for name, weights in (("adapter_dir", asked.adapter), ("previous_adapter_dir", asked.previous)):
        if weights is not None:
            files = listed_files.of_weights(objects, weights.prefix, manifest_sha256=weights.manifest_sha256)
            yield Input(name=name, files=files)
    yield Input(name="validation_pack_dir", files=tuple(_validation_files(platform, asked.job)))
    own = f"{layout.eval_prefix(held.tenant, held.job_id)}/inputs"
    items = run.holdout.read_bytes() if run.holdout else b""
    question = {HOLDOUT_NAME: items, KNOWN_NAME: json.dumps(run.known).encode()}
    suites = sorted(run.scored_suites.glob("*.jsonl")) if run.scored_suites else ()
    question |= {f"{SCORED_NAME}/{path.name}": path.read_bytes() for path in suites}
    yield Input(name=QUESTION_DIR, files=tuple(listed_files.put(objects, own, name, data) for name, data in question.items()))
    if run.capability:
        yield Input(name=SUITES_DIR, files=tuple(_suites(platform, run)))


def _validation_files(platform: Platform, job: Job) -> Iterator[InputFile]:
    """Yield the files of the packs with held-out rows, except their training shards."""
    for fingerprint, directory in job.validation_packs:
        for file in listed_files.of_pack(platform.objects, layout.pack_prefix(job.tenant_id, fingerprint)):
            if not file.path.startswith("shard-"):
                yield replace(file, path=str(PurePosixPath(directory) / file.path))


def _suites(platform: Platform, run: EvalRun) -> Iterator[InputFile]:
    """Publish the operator's definitions of capability suites, and the data of those that are asked."""
    for number, directory in enumerate(run.task_dirs):
        for path in sorted(p for p in directory.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
            yield _published(platform, path, f"{TASKS_NAME}/{number:03d}/{path.relative_to(directory)}")
    for path in sorted(suite_data_files(run.capability, run.task_dirs, run.data_dir)):
        assert run.data_dir is not None
        yield _published(platform, path, f"{DATA_NAME}/{path.relative_to(run.data_dir)}")


def _published(platform: Platform, path: Path, name: str) -> InputFile:
    sha256 = file_sha256(path)
    key = f"{TASKS_PREFIX}/{sha256}"
    if not platform.objects.exists(key):
        platform.objects.put_file(key, path)
    return InputFile(path=name, key=key, sha256=sha256)


def show_plan(platform: Platform, held: Claim, run: EvalRun, *, num_subjects: int) -> None:
    """Show how much a job's own evaluation asks before its process says so; only that knows the requests of capability suites."""
    suites = plain_suites(run)[0]
    total = None if run.capability else num_subjects * sum(len(suite.requests) for suite in suites)
    if held.evaluation_id is None:
        with platform.engine.begin() as conn:
            planned = asdict(EvaluationProgress(total=total))
            conn.execute(sa.update(jobs).where(jobs.c.id == held.job_id).values(evaluation=planned))


def result(platform: Platform, tenant: str, job_id: str, evaluation_id: str | None) -> Mapping[str, Any]:
    """Return what the attempt of this evaluation left that has succeeded; ``NotAdmitted`` if there is none yet."""
    r, a = reservations.c, attempts_table.c
    query = (
        sa.select(r.attempt, agents.c.exit)
        .join(attempts_table, (a.job_id == r.job_id) & (a.attempt == r.attempt))
        .join(agents, (agents.c.job_id == r.job_id) & (agents.c.attempt == r.attempt))
        .where(r.job_id == job_id, r.kind == Kind.EVALUATE, r.evaluation_id.is_not_distinct_from(evaluation_id))
        .where(a.outcome == "succeeded")
        .order_by(r.attempt.desc())
        .limit(1)
    )
    with platform.engine.connect() as conn:
        row = conn.execute(query).one_or_none()
    if row is None:
        raise NotAdmitted(f"job {job_id} holds no reservation for this evaluation, and has no result of it; the scheduler starts it")
    key = f"{layout.attempt_prefix(tenant, job_id, row.attempt)}/outputs/{RESULT_NAME}"
    data = platform.objects.get_bytes(key)
    if hashlib.sha256(data).hexdigest() != row.exit["evidence"]["sha256"]:
        raise IntegrityError(f"object {key} is not the result that was stored; restore it from a backup")
    found: Mapping[str, Any] = json.loads(data)
    return found
