"""Evaluates a trained adapter and stores report and verdict, on the base that it was trained on or on any other.

The work directory of an evaluation and the name of its process follow from what is judged. So a repeated call, after a step or a machine
has died, adopts the process that still runs, or starts one that continues from the journal; a process that no step waits for ends itself.
Answers of bases and of accepted adapters are kept by digest: no question is answered twice.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from control_plane.attempts import health
from control_plane.attempts.tables import checkpoints
from control_plane.datasets.tables import datasets
from control_plane.evaluations import answer_cache, follow_evaluation
from control_plane.evaluations.follow_evaluation import Watch
from control_plane.evaluations.reports import Evaluated, load_evaluated, report_key, result_key
from control_plane.jobs.results import metric_lines
from control_plane.jobs.tables import Job
from control_plane.jobs.transitions import job_row
from control_plane.platform.context import Platform
from control_plane.platform.protocols import Launcher, TrackedRun
from control_plane.platform.settings import Settings
from control_plane.platform.transfer import download
from ft_assets.adapters import whole_model
from ft_assets.datasets.pack_cache import fetch_pack
from ft_assets.datasets.step import validation_rows
from ft_assets.errors import Conflict
from ft_assets.evals import config
from ft_assets.evals.gate import gates
from ft_assets.evals.gate.advice import LastRun, advise
from ft_assets.evals.run.run_file import EvalRun
from ft_assets.evals.scoring import report
from ft_assets.evals.scoring.judge import JudgeSettings
from ft_assets.evals.suites import answer_metrics, suite_items
from ft_assets.evals.suites.safety import BUILTIN
from ft_assets.training import methods
from ft_assets.training.checkpoints import manifest_digest, verify

LEASE_NAME = "lease"
GENERATED_BY = "generated_by"
"""Metadata key of the model that wrote the job's training data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """What is evaluated, on which base, by which rules."""

    tenant: str
    job: Job
    """The job that trained it: provides its held-out rows, its pack and its method."""
    adapter_dir: Path
    """Files of the adapter or whole model on this machine, verified by the caller."""
    manifest_sha256: str
    base_model: str
    base_dir: Path
    base_digest: str
    """Digest of the bytes in `base_dir`, verified by the caller: need not be those that the job was trained on."""
    eval_config: config.EvalConfig
    key: str
    """Object key of the report; samples and raw answers are stored beside it."""
    compare: bool = True
    """Whether to compare with the last accepted adapter of the same lineage."""

    @property
    def subject_digest(self) -> str:
        return answer_cache.subject_digest(self.base_digest, self.manifest_sha256)

    @property
    def name(self) -> str:
        """Name of its directory and its processes: the same for the same question."""
        body = [self.subject_digest, asdict(self.eval_config), self.key]
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


def evaluate(platform: Platform, launcher: Launcher, tenant: str, job_id: str) -> Evaluated:
    """Compares the job's adapter with its base and the last accepted one; stores and returns the report. May be run again."""
    with platform.engine.connect() as conn:
        job = job_row(conn, tenant, job_id)
    directory = fetch_final(platform, job_id)
    _, base_dir = platform.models.get_local(job.model, job.base_digest, fresh=True)
    judged = Judged(
        tenant=tenant,
        job=job,
        adapter_dir=directory,
        manifest_sha256=manifest_digest(directory),
        base_model=job.model,
        base_dir=base_dir,
        base_digest=job.base_digest,
        eval_config=_own_rules(job, directory),
        key=report_key(tenant, job_id),
    )
    return run_evaluation(platform, launcher, judged, watch=follow_evaluation.JobWatch(platform, job_id))


def _own_rules(job: Job, directory: Path) -> config.EvalConfig:
    """Returns the questions of a job's own evaluation; a whole model is evaluated only this once, and so completely."""
    rules = config.parse(job.request.get("eval_config"))
    return rules if whole_model.is_whole(directory) else config.short(rules)


def run_evaluation(platform: Platform, launcher: Launcher, judged: Judged, *, watch: Watch) -> Evaluated:
    """Generates answers, scores, judges and stores; `watch` receives the progress and decides when to stop.

    A repeated call for the same `judged`, from any process of this machine, continues where the last one was. Once the result is stored,
    the work directory is removed; later calls return the stored result.
    """
    out_dir = platform.settings.job_dir(judged.job.id) / "evals" / judged.name
    requested = judged.eval_config
    items = suite_items.holdout_items(validation_rows(platform, judged.tenant, judged.job), limit=requested.max_items)
    run = _run(platform, judged, out_dir, items)
    result = _stored_result(platform, judged, run)
    if result is None:
        result = follow_evaluation.follow(launcher, run, name=f"{judged.job.id}-e-{judged.name}", watch=watch)
    answer_cache.remember(platform, judged.tenant, result)
    metric = requested.task_metric if requested.task_metric in answer_metrics.METRICS else None
    built = report.build(
        result,
        items,
        method=methods.get(judged.job.method),
        base_model=judged.base_model,
        base_digest=judged.base_digest,
        adapter_manifest_sha256=judged.manifest_sha256,
        previous_manifest_sha256=answer_cache.manifest_of(result),
        metric=metric,
        num_gpus=int(result.get("num_gpus") or 0),
    )
    verdict, lines = gates.judge(built, requested), metric_lines(platform, judged.job.id)
    evaluated = Evaluated(
        report=built,
        verdict=verdict,
        advice=tuple(advise(lines, report=built, verdict=verdict, run=_last_run(platform, judged.job))),
        key=judged.key,
    )
    rows = report.sample_rows(result, items, metric=metric)
    platform.objects.put_bytes(evaluated.samples_key, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    platform.objects.put_bytes(result_key(judged.key), json.dumps(result).encode())
    platform.objects.put_bytes(evaluated.key, json.dumps(evaluated.to_dict()).encode())
    shutil.rmtree(out_dir, ignore_errors=True)
    return evaluated


def _stored_result(platform: Platform, judged: Judged, run: EvalRun) -> Mapping[str, Any] | None:
    """Returns the stored result of the same question, computed here or on another machine; a failure is computed again."""
    key = result_key(judged.key)
    found = json.loads(platform.objects.get_bytes(key)) if platform.objects.exists(key) else {}
    return found if not found.get("error") and follow_evaluation.answers(found, run) else None


def _run(platform: Platform, judged: Judged, out_dir: Path, items: list[suite_items.Item]) -> EvalRun:
    """Returns the run file's content: the same for the same question, except for known answers."""
    out_dir.mkdir(parents=True, exist_ok=True)
    suite_items.write_items(items, out_dir / "holdout.jsonl")
    requested = judged.eval_config
    previous = answer_cache.previous(platform, judged.tenant, judged.job, judged.base_digest) if judged.compare else None
    run = EvalRun(
        base_model_dir=judged.base_dir,
        adapter_dir=judged.adapter_dir,
        previous_adapter_dir=previous.directory if previous else None,
        digests={"base": judged.base_digest, "adapter": judged.subject_digest} | ({"previous": previous.digest} if previous else {}),
        holdout=out_dir / "holdout.jsonl",
        validation_pack_dir=fetch_pack(platform, judged.tenant, judged.job.pack),
        max_new_tokens=requested.max_new_tokens,
        max_items=requested.max_items,
        lease=out_dir / LEASE_NAME,
        out_dir=out_dir,
    )
    return answer_cache.with_known(platform, _with_suites(run, platform.settings, requested, items, _compared(platform, judged)))


def _compared(platform: Platform, judged: Judged) -> tuple[str | None, ...]:
    """Returns names that indicate the families of the models that a judge compares: the base's, here and at its origin, and the data's
    author's."""
    return judged.base_model, platform.models.card(judged.base_model).repo, (judged.job.metadata or {}).get(GENERATED_BY)


def _with_suites(
    run: EvalRun, settings: Settings, requested: config.EvalConfig, items: Sequence[suite_items.Item], compared: Sequence[str | None]
) -> EvalRun:
    """Returns `run` with the suites besides the job's own items, by the operator's settings and the job's wishes.

    1. Capability suites that the job names, else the operator's.
    2. The safety set, unless the operator disabled it or the job skips it.
    3. A judge, if the operator has configured one and the job wants one; by default only if answers are free text, which no metric
       understands.
    """
    free_text = bool(items) and not suite_items.is_literal(items)
    judges = bool(settings.judge_url) and "judge" not in requested.skip and (free_text if requested.judge is None else requested.judge)
    return replace(
        run,
        capability=tuple(requested.chosen_suites(settings.eval_suites)),
        capability_limit=requested.capability_limit,
        task_dirs=settings.eval_task_dirs,
        data_dir=settings.eval_data_dir,
        safety=bool(settings.safety_classifier) and "safety" not in requested.skip,
        classifier=settings.safety_classifier or BUILTIN,
        judge=JudgeSettings(
            url=settings.judge_url,
            model=settings.judge_model,
            family=settings.judge_family,
            others=tuple(name for name in compared if name),
            max_items=requested.judge_max_items,
        )
        if judges
        else None,
    )


def fetch_final(platform: Platform, job_id: str) -> Path:
    """Returns the job's finished adapter on this machine, verified against its manifest."""
    with platform.engine.connect() as conn:
        row = conn.execute(sa.select(checkpoints).where(checkpoints.c.job_id == job_id, checkpoints.c.final)).first()
    if row is None:
        raise Conflict(f"job {job_id} has no finished adapter to evaluate; wait until its training has succeeded")
    target = platform.settings.job_dir(job_id) / "final"
    if not (target / "manifest.json").exists() or manifest_digest(target) != row.manifest_sha256:
        shutil.rmtree(target, ignore_errors=True)
        download(platform.objects, row.object_prefix, target, last="manifest.json")
    verify(target)
    return target


def _last_run(platform: Platform, job: Job) -> LastRun:
    """Returns the job's training inputs, on which advice is based."""
    with platform.engine.connect() as conn:
        mine = (datasets.c.tenant_id == job.tenant_id) & (datasets.c.id == job.dataset_id)
        rows = conn.execute(sa.select(datasets.c.row_count).where(mine)).scalar_one_or_none()
    share = job.hyperparameters.get("safety_share")
    return LastRun.of_spec(job.spec, num_examples=rows, safety_share=float(share) if isinstance(share, int | float) else None)


def track(platform: Platform, tenant: str, job_id: str) -> None:
    """Shows the job's evaluation in the tracked run of the attempt that trained its adapter."""
    with platform.engine.connect() as conn:
        attempt = job_row(conn, tenant, job_id).attempt
    run = TrackedRun(tenant=tenant, job_id=job_id, attempt=attempt)
    health.attach(platform, run, load_evaluated(platform, tenant, job_id).files)
