"""Evaluates a trained adapter and stores report and verdict, on the base that it was trained on or on any other.

The evaluation is a workload with a reservation of its own: this step starts it or adopts it and waits until its attempt has ended. Then,
without a GPU, judge and classifier review the stored answers, and the report is made. A step that dies is replaced, and nothing is lost:
answers of bases and of accepted adapters are kept by digest, and verdicts beside the report, so nothing is asked twice.
"""

from __future__ import annotations

import functools
import itertools
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa

from control_plane.attempts import evaluation_endings, health, start
from control_plane.attempts import service as attempts
from control_plane.attempts.claims import STOP_GRACE_S, Claim
from control_plane.attempts.tables import Checkpoint, checkpoints
from control_plane.datasets.scored_suites import service as scored_suites
from control_plane.datasets.scored_suites.service import Asked
from control_plane.datasets.tables import datasets
from control_plane.evaluations import answer_cache
from control_plane.evaluations import evaluation_workload as workloads
from control_plane.evaluations.evaluation_workload import StoredWeights
from control_plane.evaluations.kept_verdicts import KeptVerdicts
from control_plane.evaluations.reports import Evaluated, load_evaluated, report_key, result_key, verdicts_prefix
from control_plane.evaluations.review_progress import ReviewProgress
from control_plane.evaluations.schema_checks import with_schema_verdicts
from control_plane.jobs.results import metric_lines
from control_plane.jobs.tables import Job
from control_plane.jobs.transitions import job_row
from control_plane.platform.context import Platform
from control_plane.platform.protocols import Launcher, TrackedRun
from control_plane.platform.records import columns, one_or_none
from control_plane.platform.settings import Settings
from control_plane.platform.transfer import download
from core.errors import Conflict, FtError, InvalidRequest, NotAdmitted, Unavailable
from core.retries import RetryPolicy, with_retries
from core.telemetry import correlation
from core.workload import Kind, Workload
from engine.adapters import ADAPTER_CONFIG, PACKAGE_MANIFEST, manifest_files
from engine.data import CallForm
from engine.evals import (
    BUILTIN_CLASSIFIER,
    METRICS,
    AnswerReader,
    Decoding,
    EvalConfig,
    EvalRun,
    Item,
    JudgeSettings,
    LastRun,
    Review,
    Verdicts,
    advise,
    build_report,
    classifier_id,
    holdout_items,
    is_literal,
    judge,
    parse_eval_config,
    sample_rows,
    short_config,
    write_items,
)
from engine.training import manifest_digest, method_named, verify_checkpoint
from ft_assets.datasets.pack_cache import fetch_pack
from ft_assets.datasets.step import validation_rows

T = TypeVar("T")
GENERATED_BY = "generated_by"
"""Metadata key of the model that wrote the job's training data."""
REVIEW_RETRIES = RetryPolicy(give_up_s=900.0)
"""A classifier may be away for a quarter of an hour, without holding a GPU, before the evaluation ends with its error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """What is evaluated, on which base, by which rules."""

    tenant: str
    job: Job
    """The job that trained it: provides its held-out rows, its pack and its method."""
    adapter: StoredWeights
    """The adapter or whole model."""
    base_model: str
    base_dir: Path
    base_digest: str
    """Digest of the bytes in `base_dir`, verified by the caller: need not be those that the job was trained on."""
    eval_config: EvalConfig
    key: str
    """Object key of the report; samples and raw answers are stored beside it."""
    compare: bool = True
    """Whether to compare with the last accepted adapter of the same lineage."""

    @property
    def subject_digest(self) -> str:
        return answer_cache.subject_digest(self.base_digest, self.adapter.manifest_sha256)


def evaluate(platform: Platform, launcher: Launcher, tenant: str, job_id: str, *, retries: RetryPolicy = REVIEW_RETRIES) -> Evaluated:
    """Compares the job's adapter with its base and the last accepted one; stores and returns the report. May be run again."""
    with platform.engine.connect() as conn:
        job = job_row(conn, tenant, job_id)

    def judged() -> Judged:
        row = _final(platform, job_id)
        weights = StoredWeights(prefix=row.object_prefix, manifest_sha256=row.manifest_sha256)
        _, base_dir = platform.models.get_local(job.model, job.base_digest, fresh=True)
        return Judged(
            tenant=tenant,
            job=job,
            adapter=weights,
            base_model=job.model,
            base_dir=base_dir,
            base_digest=job.base_digest,
            eval_config=_own_rules(platform, job, weights),
            key=report_key(tenant, job_id),
        )

    return run_evaluation(platform, launcher, tenant, job_id, judged, retries=retries)


def _own_rules(platform: Platform, job: Job, weights: StoredWeights) -> EvalConfig:
    """Returns the questions of a job's own evaluation; a whole model is evaluated only this once, and so completely."""
    rules = parse_eval_config(job.request.get("eval_config"))
    manifest = platform.objects.get_bytes(f"{weights.prefix}/{PACKAGE_MANIFEST}")
    is_adapter = ADAPTER_CONFIG in manifest_files(manifest, sha256=weights.manifest_sha256)
    return short_config(rules) if is_adapter else rules


def run_evaluation(
    platform: Platform,
    launcher: Launcher,
    tenant: str,
    job_id: str,
    subject: Callable[[], Judged],
    *,
    evaluation_id: str | None = None,
    retries: RetryPolicy = REVIEW_RETRIES,
) -> Evaluated:
    """Has the evaluation's workload generate answers, has them reviewed, scores and stores.

    `subject` describes what is judged; if it refuses, the attempt ends. A repeated call for the same evaluation adopts its workload, or
    makes the same report of its result again. `retries` bounds the wait for a classifier that is away. ``NotAdmitted`` without a
    reservation and without a result.
    """
    held = _held(platform, tenant, job_id, evaluation_id)
    judged, items, suites = _unless_refused(platform, launcher, held, lambda: _with_items(platform, subject()))
    requested = judged.eval_config
    if held is not None:
        _answer(platform, launcher, held, judged, items, suites)
    answered = workloads.result(platform, tenant, job_id, evaluation_id)
    progress = ReviewProgress(platform=platform, tenant=tenant, job_id=job_id, evaluation_id=evaluation_id)
    own = {suite.id: suite.items for suite in suites}
    reader = AnswerReader.of_model(judged.base_dir, mode=requested.reasoning, items=[*items, *itertools.chain(*own.values())])
    result = _reviewed(platform, judged, items, answered, reader=reader, progress=progress, retries=retries)
    result = with_schema_verdicts(platform, judged.tenant, result, items, reader=reader)
    result = scored_suites.with_scores(result, suites, reader=reader)
    answer_cache.remember(platform, judged.tenant, result)
    metric = requested.task_metric if requested.task_metric in METRICS else None
    built = build_report(
        result,
        items,
        method=method_named(judged.job.method),
        base_model=judged.base_model,
        base_digest=judged.base_digest,
        adapter_manifest_sha256=judged.adapter.manifest_sha256,
        previous_manifest_sha256=answer_cache.manifest_of(result),
        metric=metric,
        num_gpus=int(result.get("num_gpus") or 0),
        own=own,
        reader=reader,
    )
    verdict = judge(built, requested, safety_policy=platform.settings.safety_policy)
    lines = metric_lines(platform, judged.job.id)
    evaluated = Evaluated(
        report=built,
        verdict=verdict,
        advice=tuple(advise(lines, report=built, verdict=verdict, run=_last_run(platform, judged.job))),
        key=judged.key,
    )
    rows = sample_rows(result, items, metric=metric, own=own, reader=reader)
    platform.objects.put_bytes(evaluated.samples_key, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    platform.objects.put_bytes(result_key(judged.key), json.dumps(result).encode())
    platform.objects.put_bytes(evaluated.key, json.dumps(evaluated.to_dict()).encode())
    return evaluated


def _held(platform: Platform, tenant: str, job_id: str, evaluation_id: str | None) -> Claim | None:
    """Returns the reservation of this evaluation; None if it holds none, because it has ended."""
    try:
        held = attempts.claim(platform, tenant, job_id, Kind.EVALUATE)
    except NotAdmitted:
        return None
    return held if held.evaluation_id == evaluation_id else None


def _unless_refused(platform: Platform, launcher: Launcher, held: Claim | None, make: Callable[[], T]) -> T:
    """Returns what `make` returns; if it finds that the evaluation cannot be carried out, the attempt ends with the error.

    A workload that an earlier step started is stopped first: the reservation's GPU is granted to another job at once.
    """
    try:
        return make()
    except FtError as error:
        if held is not None and not isinstance(error, Unavailable | NotAdmitted):
            status = launcher.stop(held.workload, grace_s=STOP_GRACE_S)
            attempts.finish(platform, held, evaluation_endings.refused(status, error))
        raise


def _with_items(platform: Platform, judged: Judged) -> tuple[Judged, list[Item], Sequence[Asked]]:
    """Returns it with the job's held-out items and the tenant's scored suites; without items that expect calls that cannot be read."""
    rows = validation_rows(platform, judged.tenant, judged.job)

    @functools.cache
    def readable() -> bool:
        return CallForm.of_model(judged.base_dir) is not None

    asked = scored_suites.asked(platform, judged.tenant, judged.eval_config)
    readable_suites = [replace(s, entries=[e for e in s.entries if not e.item.calls or readable()]) for s in asked]
    return judged, holdout_items(rows, limit=judged.eval_config.max_items, calls=readable), readable_suites


def _answer(platform: Platform, launcher: Launcher, held: Claim, judged: Judged, items: list[Item], suites: Sequence[Asked]) -> None:
    """Starts the workload or adopts it, and waits until its attempt has ended."""
    correlation.bind(attempt=held.attempt)

    def describe(platform: Platform, held: Claim) -> Workload:
        with tempfile.TemporaryDirectory() as scratch:
            asked = _question(platform, judged, Path(scratch), items, suites)
            workloads.show_plan(platform, held, asked.run, num_subjects=2 if asked.previous is None else 3)
            return workloads.describe(platform, held, asked)

    unbegun = _unless_refused(platform, launcher, held, lambda: start.start_or_adopt(platform, launcher, held, describe))
    if unbegun is not None:
        attempts.finish(platform, held, unbegun)
    ended = start.wait_for_end(platform, held)
    if ended.outcome == "cancelled":
        raise Conflict(f"evaluation {held.workload} was stopped: its result is no longer needed", code="evaluation_stopped")
    if ended.stopped:
        message = f"attempt {held.attempt} of the evaluation ended as {ended.outcome}; another one continues it"
        raise Conflict(message, code="attempt_stopped")
    if ended.outcome != "succeeded":
        raise FtError(f"attempt {held.attempt} of the evaluation ended as {ended.outcome}; its log says why", code="evaluation_failed")


def _reviewed(
    platform: Platform,
    judged: Judged,
    items: Sequence[Item],
    result: Mapping[str, Any],
    *,
    reader: AnswerReader,
    progress: ReviewProgress,
    retries: RetryPolicy,
) -> Mapping[str, Any]:
    """Returns the result with the verdicts of judge and classifier, as they are configured now.

    Retries while the classifier or the object store is away. If no classifier decides in time, the evaluation ends with its error: an
    answer never counts unclassified.
    """
    store = KeptVerdicts(objects=platform.objects, prefix=verdicts_prefix(judged.key))
    known: dict[str, Mapping[str, Any]] = {}

    def keep(verdicts: Verdicts) -> None:
        progress.must_be_wanted()
        store.keep(verdicts)
        known.update(verdicts)

    def review() -> Mapping[str, Any]:
        known.update(store.read())
        reviewers = Review(
            classifier=platform.settings.safety_classifier or BUILTIN_CLASSIFIER,
            judge=_judge(platform.settings, judged.eval_config, reader.items(items), _compared(platform, judged)),
            reader=reader,
            decoding=Decoding.limited(judged.eval_config.max_new_tokens),
            known=known,
            keep=keep,
            begin=progress.show,
        )
        return reviewers.complete(result, items)

    try:
        found = with_retries(review, retries)
    except (InvalidRequest, Unavailable) as error:
        if error.code != "object_store_unavailable":
            progress.fail(error)
        raise
    progress.end(found["judge"])
    return found


def _question(platform: Platform, judged: Judged, scratch: Path, items: list[Item], suites: Sequence[Asked]) -> workloads.Question:
    """Returns what is asked, with every answer that is known already; the files in `scratch` are this machine's."""
    write_items(items, scratch / "holdout.jsonl")
    for one in suites:
        write_items(one.items, scratch / "suites" / f"{one.suite.reference}.jsonl")
    requested = judged.eval_config
    previous = answer_cache.previous(platform, judged.tenant, judged.job, judged.base_digest) if judged.compare else None
    run = EvalRun(
        base_model_dir=judged.base_dir,
        adapter_dir=None,
        digests={"base": judged.base_digest, "adapter": judged.subject_digest} | ({"previous": previous.digest} if previous else {}),
        holdout=scratch / "holdout.jsonl",
        scored_suites=scratch / "suites" if suites else None,
        validation_pack_dir=_validation_packs(platform, judged, scratch / "packs"),
        max_new_tokens=requested.max_new_tokens,
        max_items=requested.max_items,
        # The reservation's, whatever an ordered evaluation asks:
        replicas=parse_eval_config(judged.job.request.get("eval_config")).replicas,
        vllm_python=platform.settings.eval_vllm_python,
        out_dir=scratch,
    )
    run = answer_cache.with_known(platform, _with_suites(run, platform.settings, requested))
    return workloads.Question(
        job=judged.job,
        run=run,
        base_model=judged.base_model,
        base_digest=judged.base_digest,
        adapter=judged.adapter,
        previous=StoredWeights(prefix=previous.prefix, manifest_sha256=previous.manifest_sha256) if previous else None,
    )


def _validation_packs(platform: Platform, judged: Judged, place: Path) -> Path:
    """Returns the directory of the job's pack on this machine, or `place`, with that of each pack of a mixture in it."""
    place.mkdir()
    for fingerprint, directory in judged.job.validation_packs:
        pack = fetch_pack(platform, judged.tenant, fingerprint)
        if not directory:
            return pack
        (place / directory).symlink_to(pack.absolute(), target_is_directory=True)
    return place


def _compared(platform: Platform, judged: Judged) -> tuple[str | None, ...]:
    """Returns names that indicate the families of the models that a judge compares: the base's, here and at its origin, and the data's
    author's."""
    return judged.base_model, platform.models.card(judged.base_model).repo, (judged.job.metadata or {}).get(GENERATED_BY)


def _with_suites(run: EvalRun, settings: Settings, requested: EvalConfig) -> EvalRun:
    """Returns `run` with the suites besides the job's own items, by the operator's settings and the job's wishes.

    1. Capability suites that the job names, else the operator's.
    2. The safety set, unless the operator disabled it or the job skips it.
    """
    return replace(
        run,
        capability=tuple(requested.chosen_suites(settings.eval_suites)),
        capability_limit=requested.capability_limit,
        task_dirs=settings.eval_task_dirs,
        data_dir=settings.eval_data_dir,
        safety=bool(settings.safety_classifier) and "safety" not in requested.skip,
        classifier=classifier_id(settings.safety_classifier or BUILTIN_CLASSIFIER),
    )


def _judge(settings: Settings, requested: EvalConfig, items: Sequence[Item], compared: Sequence[str | None]) -> JudgeSettings | None:
    """Returns the judge, if the operator has configured one and the job wants one; by default only if answers are free text, which no
    metric understands."""
    free_text = bool(items) and not is_literal(items)
    wanted = free_text if requested.judge is None else requested.judge
    if not settings.judge_url or "judge" in requested.skip or not wanted:
        return None
    return JudgeSettings(
        url=settings.judge_url,
        model=settings.judge_model,
        family=settings.judge_family,
        others=tuple(name for name in compared if name),
        max_items=requested.judge_max_items,
    )


def fetch_final(platform: Platform, job_id: str) -> Path:
    """Returns the job's finished adapter on this machine, verified against its manifest."""
    row = _final(platform, job_id)
    target = platform.settings.job_dir(job_id) / "final"
    if not (target / "manifest.json").exists() or manifest_digest(target) != row.manifest_sha256:
        shutil.rmtree(target, ignore_errors=True)
        download(platform.objects, row.object_prefix, target, last="manifest.json")
    verify_checkpoint(target)
    return target


def _final(platform: Platform, job_id: str) -> Checkpoint:
    with platform.engine.connect() as conn:
        query = sa.select(*columns(checkpoints, Checkpoint)).where(checkpoints.c.job_id == job_id, checkpoints.c.final)
        row = one_or_none(conn, query, Checkpoint)
    if row is None:
        raise Conflict(f"job {job_id} has no finished adapter to evaluate; wait until its training has succeeded")
    return row


def _last_run(platform: Platform, job: Job) -> LastRun:
    """Returns the job's training inputs, on which advice is based."""
    with platform.engine.connect() as conn:
        mine = (datasets.c.tenant_id == job.tenant_id) & (datasets.c.id == job.dataset_id)
        rows = conn.execute(sa.select(datasets.c.row_count).where(mine)).scalar_one_or_none()
    share = job.hyperparameters.get("safety_share")
    safety_share = float(share) if isinstance(share, int | float) else None
    return LastRun.of_spec(job.spec, num_examples=rows, safety_share=safety_share, max_rank=platform.settings.max_lora_rank)


def track(platform: Platform, tenant: str, job_id: str) -> None:
    """Shows the job's evaluation in the tracked run of the attempt that trained its adapter."""
    with platform.engine.connect() as conn:
        attempt = job_row(conn, tenant, job_id).attempt
    run = TrackedRun(tenant=tenant, job_id=job_id, attempt=attempt)
    evaluated = load_evaluated(platform, tenant, job_id)
    health.attach(platform, run, evaluated.files, evaluated.tables)
