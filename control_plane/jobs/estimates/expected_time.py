"""How long a job is expected to hold its GPUs: by its token count if known, else by a first estimate.

A submission does not wait for a tokenizer, so the first estimate uses the size of the uploaded file: four bytes per token and one KiB per
row, markup included, which overestimates. Preparation counts the tokens and replaces the estimate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any

import sqlalchemy as sa

from control_plane.attempts.tables import attempts
from control_plane.capacity import configured_pools
from control_plane.datasets.tables import datasets, files
from control_plane.jobs.estimates import job_plan
from control_plane.jobs.estimates.job_plan import Placed
from control_plane.jobs.estimates.rules import Correction, Finished, Kind, correction
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.platform.records import many, one_or_none
from control_plane.queue.tables import reservations
from core.base_models import BaseModel
from core.workload import Kind as Workload
from engine.data import MixedFile, Policies, automatic_fraction, check_repeats, mixture_repeats, window_for
from engine.scheduler import Pool, job_class, pools_taking
from engine.training import (
    SETUP_S,
    Case,
    Cost,
    Method,
    PackFacts,
    Quantization,
    TrainingSpec,
    method_named,
    min_windows,
    packs_windows,
    resolve,
    training_cost,
)

FILL = 0.999
"""Filled share of a window: what best-fit packing reaches on all but the smallest datasets (B16)."""
BYTES_PER_TOKEN = 4.0
"""Bytes per token of an uploaded file: English text has four to five in the vocabularies of Llama and Qwen; other scripts have fewer."""
BYTES_PER_ROW = 1024
"""Bytes per row of chat data: ten million rows in 10 GiB."""
THIS = "this-estimate"


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    gpu_seconds: float
    counted: bool
    """Whether it was counted at validation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingFile:
    """An uploaded file, and the dataset version made of it; `dataset_id`, `format` and `row_count` are empty while it is validated."""

    id: str
    bytes: int | None
    status: str
    status_details: str | None
    policies: Mapping[str, Any]
    dataset_id: str
    format: str
    row_count: int
    stats: Mapping[str, Any] | None
    """Counts of its validation report."""
    counted_for: Mapping[str, Any] | None
    """Digests of the tokenizer and the chat template that the report counted tokens with."""
    splits: Mapping[str, Any] | None

    def num_training(self, num_rows: int, request: JobRequest) -> int:
        """Return how many of the rows are trained on: all of them, or those that the validation split leaves."""
        if request.validation_file is not None:
            return num_rows
        return int((self.splits or {}).get("train") or round(num_rows * (1.0 - automatic_fraction(num_rows))))

    def counted_tokens(self, model: BaseModel, method: Method, max_seq_len: int, *, share: float) -> int | None:
        """Tokens of the training part per epoch, if the report counted them for this model and no row is truncated."""
        counted, of = (self.stats or {}).get("tokens"), self.counted_for or {}
        digests = (of.get("tokenizer_digest"), of.get("template_digest"))
        uncut = counted and (counted["max"] <= max_seq_len or splits_long_rows(method, Policies.from_request(self.policies)))
        if counted and uncut and method.pack == "windows" and digests == (model.tokenizer_digest, model.template_digest):
            return round(float(counted["total"]) * share)
        return None


def training_file(platform: Platform, tenant: str, file_id: str) -> TrainingFile | None:
    """Return what an estimate reads of a file; None if the tenant has no such file."""
    version = (datasets.c.id == files.c.dataset_id) & (datasets.c.tenant_id == files.c.tenant_id)
    query = sa.select(
        files.c.id, files.c.bytes, files.c.status, files.c.status_details, files.c.policies,
        sa.func.coalesce(datasets.c.id, "").label("dataset_id"), sa.func.coalesce(datasets.c.format, "").label("format"),
        sa.func.coalesce(datasets.c.row_count, 0).label("row_count"), datasets.c.report["stats"]["splits"].label("splits"),
        sa.func.coalesce(files.c.report["stats"], datasets.c.report["stats"]).label("stats"),
        sa.func.coalesce(files.c.report["model"], datasets.c.report["model"]).label("counted_for"),
    ).select_from(files.outerjoin(datasets, version))  # fmt: skip
    with platform.engine.connect() as conn:
        return one_or_none(conn, query.where(files.c.id == file_id, files.c.tenant_id == tenant), TrainingFile)


def of_request(platform: Platform, tenant: str, request: JobRequest, model: BaseModel, placed: Placed) -> Expected:
    """Return what a job of this request is expected to take, without reading its data."""
    found = [training_file(platform, tenant, file_id) for file_id in request.trained_on]
    files = [file for file in found if file is not None]
    if len(files) < len(found):  # submission reports the missing file
        return Expected(gpu_seconds=0.0, counted=False)
    sizes = [_size(file, request, model, placed) for file in files]
    size = mixed(request.training_files, sizes)
    spec, _, expected = training(
        platform, placed, model, dataset_id=THIS, num_examples=size.num_examples, tokens=size.tokens, seed=request.seed or 0
    )
    gpu_seconds = expected.expected_s * spec.world_size + evaluation_s(model, placed.evaluation_replicas) * placed.evaluation_gpus
    return Expected(gpu_seconds=gpu_seconds, counted=size.counted)


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """What an epoch reads."""

    num_examples: int
    tokens: int
    counted: bool
    """Whether the tokens were counted at validation."""


def mixed(files: Sequence[MixedFile], sizes: Sequence[Size]) -> Size:
    """Return what an epoch reads of all `sizes`: of the one there is, or of each of a mixture's `files` so much as it is to read."""
    if not files:
        return sizes[0]
    counted, times = all(size.counted for size in sizes), mixture_repeats(files, [size.tokens for size in sizes])
    if counted:
        check_repeats(files, times)
    return Size(
        num_examples=sum(max(1, round(size.num_examples * n)) for size, n in zip(sizes, times, strict=True)),
        tokens=sum(round(size.tokens * n) for size, n in zip(sizes, times, strict=True)),
        counted=counted,
    )


def _size(file: TrainingFile, request: JobRequest, model: BaseModel, placed: Placed) -> Size:
    """By its report, else by its bytes."""
    rows = file.row_count or max(1, round((file.bytes or 0) / BYTES_PER_ROW))
    num_examples = file.num_training(rows, request)
    method, max_seq_len = method_named(request.method), placed.plan.max_seq_len
    known = file.counted_tokens(model, method, max_seq_len, share=num_examples / rows) if file.row_count else None
    tokens = known if known is not None else math.ceil((file.bytes or 0) / BYTES_PER_TOKEN)
    return Size(num_examples=num_examples, tokens=tokens, counted=known is not None)


EVALUATED_7B_S = 1800.0
"""Seconds in which a 7B model on one GPU answers the held-out rows, the built-in suites and a few capability suites."""


def evaluation_s(model: BaseModel, replicas: int) -> float:
    """Return how long the evaluation that follows a training holds its GPUs: mostly reading and generating, which grow with the weights.

    Each of `replicas` answers an equal part. Several GPUs of one replica make it no faster: each computes its own layers while the others
    wait.
    """
    return SETUP_S + EVALUATED_7B_S * model.num_parameters / 7e9 / replicas


def splits_long_rows(method: Method, policies: Policies) -> bool:
    """Whether rows that are too long are packed in pieces instead of being truncated."""
    return method.every_token and policies.over_long == "truncate"


def training(
    platform: Platform, placed: Placed, model: BaseModel, *, dataset_id: str, num_examples: int, tokens: int, seed: int
) -> tuple[TrainingSpec, int, Expectation]:
    """Return the spec of a pack with this many examples and `tokens` per epoch, the pack's rows, and how long it trains."""
    spec, num_rows = resolved(placed, dataset_id=dataset_id, num_examples=num_examples, tokens=tokens, seed=seed)
    return spec, num_rows, expect(platform, model, spec, num_rows=num_rows, tokens_per_epoch=tokens)


def resolved(placed: Placed, *, dataset_id: str, num_examples: int, tokens: int, seed: int) -> tuple[TrainingSpec, int]:
    """Return the spec of a pack with this many examples of one length and `tokens` per epoch, and the pack's rows.

    Examples over ``max_seq_len`` are split where every token is learned. Shortened windows hold whole examples of that one length: few fit
    into each, so that the last one that does not fit leaves a gap.
    """
    plan = placed.plan
    longest, num_rows = plan.max_seq_len, num_examples  # a row for each example, pair or judged answer
    if packs_windows(plan):
        pieces = max(num_examples, math.ceil(tokens / longest)) if method_named(plan.method).every_token else num_examples
        needed = min_windows(plan, num_examples=num_examples, data_ranks=placed.data_ranks)
        length = min(max(1, round(tokens / pieces)), longest)
        window = window_for([length], [pieces], longest=longest, min_windows=needed)
        num_rows = min(pieces, max(1, math.ceil(tokens / (longest * FILL))))
        if window < longest:
            longest, num_rows = max(window, length), math.ceil(pieces / max(1, window // length))
    facts = PackFacts(
        fingerprint=THIS, dataset_id=dataset_id, num_examples=num_examples, num_windows=num_rows, num_tokens=tokens,
        max_seq_len=longest,
    )  # fmt: skip
    return resolve(plan, facts, seed=seed, lock_sha256="", commit="", **placed.placement), num_rows


NEWEST = 100
"""Finished jobs read, on the same type of GPU, per model and over all models: ten half-lives; older ones weigh less than a thousandth."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """A training's modeled and expected time."""

    modelled: Cost
    correction: Correction
    trained_tokens: float
    """Tokens over all epochs and ranks."""

    @property
    def expected_s(self) -> float:
        """Seconds that the training holds its GPUs."""
        return self.correction.of(self.modelled.total_s)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over all ranks, by the cost model."""
        return self.trained_tokens / self.modelled.steps_s

    def in_words(self) -> str:
        """Return what the estimate is based on, and how certain it is."""
        seen = self.correction
        low, high = (self.modelled.total_s * ratio for ratio in (seen.low, seen.high))
        band = f"eight of ten jobs are expected within {low:.0f} to {high:.0f} s of training"
        if not seen.num_jobs:
            return f"history: no finished job on these GPUs yet, the time comes from the cost model alone; {band}"
        many = "1 finished job" if seen.num_jobs == 1 else f"{seen.num_jobs} finished jobs"
        alike = f"{seen.num_alike} of them with this model, method, adapter and number of GPUs"
        return f"history: the cost model's time is multiplied by {seen.ratio:.2f}, learned from {many} on these GPUs, {alike}; {band}"


def expect(platform: Platform, model: BaseModel, spec: TrainingSpec, *, num_rows: int, tokens_per_epoch: int) -> Expectation:
    """Return how long `spec` holds its GPUs on a pack of `num_rows`: by the cost model, corrected by history."""
    kind, cost_of, tokens = modelled(
        configured_pools.planned(platform.whole), model, spec, num_rows=num_rows, tokens_per_epoch=tokens_per_epoch
    )
    return Expectation(modelled=cost_of, correction=learned(platform, kind), trained_tokens=tokens)


def modelled(
    available: Sequence[Pool], model: BaseModel, spec: TrainingSpec, *, num_rows: int, tokens_per_epoch: int
) -> tuple[Kind, Cost, float]:
    """Return what `spec` costs by the cost model alone in the pools `available`: its kind, its seconds, and the tokens of all epochs.

    Steps are always whole: the last one is filled with rows of the next epoch.
    """
    kind_of_job = job_class(spec.adapter, model.num_parameters)
    gpu_type = (pools_taking(available, kind_of_job) or available)[0].gpu_type
    case = Case(
        shape=job_plan.shape_of(model), adapter=spec.adapter, method=spec.method, precision=spec.precision, max_seq_len=spec.max_seq_len,
        per_device_batch_size=spec.optimization.per_device_batch_size, rank=spec.lora.saved_rank if spec.lora else 0,
        use_dora=spec.lora is not None and spec.lora.use_dora, dropout=spec.lora.dropout if spec.lora else 0.0,
        quantization=spec.quantization or Quantization(), attention=spec.attention, gradient_checkpointing=spec.gradient_checkpointing,
        strategy=spec.strategy, world_size=spec.world_size, context_parallel=spec.context_parallel,
        train_experts=spec.train_experts, train_router=spec.train_router,
    )  # fmt: skip
    rows = spec.total_steps(num_rows=num_rows) * spec.rows_per_step
    tokens = tokens_per_epoch * rows / num_rows
    kind = Kind(gpu_type=gpu_type, model=model.id, way=f"{spec.method}/{spec.adapter}", num_gpus=spec.world_size)
    return kind, training_cost(case, gpu_type, rows=rows, tokens=tokens, accumulation_steps=spec.optimization.accumulation_steps), tokens


def learned(platform: Platform, kind: Kind) -> Correction:
    """Return the correction for jobs of this `kind`.

    Uses jobs of all tenants: a ratio of two durations reveals nothing about their data.
    """
    whole = platform.whole
    pools = [pool.name for pool in configured_pools.planned(whole) if pool.gpu_type == kind.gpu_type]
    with whole.engine.connect() as conn:
        given = {"pools": pools, "model": kind.model}
        read = (job for of_model in (True, False) for job in many(conn, _newest(of_model), _Trained, given))
        trained = {job.id: job for job in read}
    newest_first = sorted(trained.values(), key=lambda job: (job.finished_at, job.id), reverse=True)
    return correction(kind, [job.finished(kind.gpu_type) for job in newest_first])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Trained:
    """A job that was trained to its end, with the sums over its attempts."""

    id: str
    model: str
    method: str
    adapter: str
    num_gpus: int
    modelled_s: float
    finished_at: datetime
    wall_s: float
    setup_s: float
    lost_s: float
    num_attempts: int

    def finished(self, gpu_type: str) -> Finished:
        """Later attempts repeat the set-up, as long as the first one's, and some work; neither counts as training time."""
        again_s = self.lost_s + (self.num_attempts - 1) * max(0.0, self.setup_s)
        kind = Kind(gpu_type=gpu_type, model=self.model, way=f"{self.method}/{self.adapter}", num_gpus=self.num_gpus)
        return Finished(kind=kind, modelled_s=self.modelled_s, took_s=max(0.0, self.wall_s - again_s))


@cache
def _newest(of_model: bool) -> sa.Select[Any]:
    """Return what reads the newest jobs trained to their end in one of ``pools`` (pool of the last attempt), `of_model`: on base ``model``.

    Built once: building it takes longer than executing it.
    """
    pool = (
        sa.select(reservations.c.pool)
        .where(reservations.c.job_id == jobs.c.id, reservations.c.kind == Workload.TRAIN)
        .order_by(reservations.c.attempt.desc())
        .limit(1)
        .scalar_subquery()
    )
    chosen = (
        sa.select(
            jobs.c.id, jobs.c.model, jobs.c.method, jobs.c.spec["adapter"].astext.label("adapter"), jobs.c.num_gpus, jobs.c.modelled_s,
            jobs.c.first_step_at, jobs.c.finished_at,
        )
        .where(jobs.c.state == JobState.SUCCEEDED, jobs.c.modelled_s > 0, jobs.c.reused_job_id.is_(None))
        .where(pool.in_(sa.bindparam("pools", expanding=True)), jobs.c.model == sa.bindparam("model") if of_model else sa.true())
        .order_by(jobs.c.finished_at.desc(), jobs.c.id.desc())
        .limit(NEWEST)
        .subquery()
    )  # fmt: skip
    same = (reservations.c.job_id == attempts.c.job_id) & (reservations.c.attempt == attempts.c.attempt)
    evaluates = sa.exists().where(same, reservations.c.kind != Workload.TRAIN)
    wall_s = sa.func.sum(_seconds(attempts.c.ended_at - attempts.c.started_at))
    setup_s = _seconds(chosen.c.first_step_at - sa.func.min(attempts.c.started_at))
    return (
        sa.select(
            chosen.c.id, chosen.c.model, chosen.c.method, chosen.c.adapter, chosen.c.num_gpus, chosen.c.modelled_s,
            chosen.c.finished_at, wall_s.label("wall_s"), sa.func.coalesce(setup_s, 0.0).label("setup_s"),
            (sa.func.coalesce(sa.func.sum(attempts.c.lost_s), 0.0) / chosen.c.num_gpus).label("lost_s"),
            sa.func.count(attempts.c.attempt).label("num_attempts"),
        )
        .join(attempts, attempts.c.job_id == chosen.c.id)
        .where(attempts.c.started_at.is_not(None), attempts.c.ended_at.is_not(None), ~evaluates)
        .group_by(*chosen.c)
    )  # fmt: skip


def _seconds(interval: sa.ColumnElement[Any]) -> sa.ColumnElement[float]:
    return sa.cast(sa.func.extract("epoch", interval), sa.Float)
