"""Estimates of a job before it is submitted, computed with the functions that plan, pack, bill and schedule it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import sqlalchemy as sa
from numpy.typing import NDArray

from control_plane.adapters.tables import is_in_production
from control_plane.billing import prices as price_lists
from control_plane.billing.prices import PriceList
from control_plane.datasets.previews import rows_file
from control_plane.datasets.service import check_distinct, check_enough_to_train, check_format, check_tools
from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import schemas, warm_starts
from control_plane.jobs.estimates import expected_time, job_plan
from control_plane.jobs.estimates.expected_time import TrainingFile
from control_plane.jobs.estimates.job_plan import Placed
from control_plane.jobs.submission import JobRequest
from control_plane.platform.context import Platform
from control_plane.queue.snapshot import queue_snapshot
from control_plane.quotas import service as quotas
from control_plane.quotas.schemas import JobQuota
from control_plane.tenants.rules import tier_named
from control_plane.tenants.service import get as get_tenant
from core.base_models import BaseModel
from core.errors import Conflict, InvalidDataset
from engine import scheduler
from engine.adapters import DORA_DETAIL, FULL_MODEL, LORA_ADAPTER, OWN_SERVER
from engine.data import (
    UNCUT,
    ChatTokenizer,
    EncodingTally,
    Example,
    Policies,
    TokenizedExample,
    check_repeats,
    encode_or_drop,
    mixture_params,
    mixture_repeats,
    parse_canonical,
)
from engine.scheduler import Pool, Pricing, job_class
from engine.training import Method, Plan, TrainingSpec, describe_schedule, method_named, packs_windows

SAMPLE_ROWS = 2000
"""Rows tokenized for an estimate: their mean is within about 2 % for chat data, whose lengths spread by half their mean."""
SAMPLE_GROUPS = 20
"""Parts of the dataset, evenly spread, that the sample comes from."""
Z95 = 1.96
ROW_COUNTS = {
    "pairs": "a pair counts the tokens of both answers, each with its prompt",
    "judged": "a row counts its prompt and its answer, not the passes over other prompts' answers that estimate the distance",
}
"""By kind of pack, what of a row is counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """Of the training part, once through."""

    per_epoch: int
    error: int
    """Half width of the 95 % interval; 0 if the tokens were counted."""
    counted: bool
    how: str


def estimate(platform: Platform, tenant: str, request: JobRequest) -> schemas.Estimate:
    """Return tokens, steps, GPU-hours, price, start and finish of a job with this request, and the basis of each.

    If no estimate is possible, the error code is the reason: ``file_not_validated``, ``invalid_training_file``, ``model_not_found``,
    ``estimate_needs_tokenizer`` or a code of the submission.
    """
    request, _ = warm_starts.on_base(platform, tenant, request)
    model = platform.models.check_submittable(request.model, today=platform.clock().date())
    tier = tier_named(request.tier or get_tenant(platform, tenant).tier).name
    placed = job_plan.placed(platform, request, model, tier=tier)
    method, max_seq_len = method_named(request.method), placed.plan.max_seq_len
    inputs = method.every_token or placed.plan.requested.get("train_on_inputs") is True
    named = zip(request.trained_on, mixture_params(request.training_files), strict=True)
    files = [_training_file(platform, tenant, request, file_id, model, param=param) for file_id, param in named]
    check_distinct(request.trained_on, [file.dataset_id for file in files])
    nums = [file.num_training(file.row_count, request) for file in files]
    each = [
        _tokens(platform, tenant, file, model, method, max_seq_len, share=num / file.row_count, inputs=inputs)
        for file, num in zip(files, nums, strict=True)
    ]
    file, (tokens, num_examples, mixed) = files[0], _mixed(request, files, each, nums)
    spec, rows, expected = expected_time.training(
        platform, placed, model, dataset_id=file.dataset_id, num_examples=num_examples, tokens=tokens.per_epoch, seed=request.seed or 0
    )
    seconds, epochs, total_steps = expected.expected_s, spec.optimization.num_epochs, spec.total_steps(num_rows=rows)
    evaluation_s = expected_time.evaluation_s(model, placed.evaluation_replicas)
    gpu_seconds = seconds * spec.world_size + evaluation_s * placed.evaluation_gpus
    spot = _may_use_spot(platform, tenant, request, model)
    pool = job_plan.likely_pool(platform, request, model, tier=tier, num_gpus=spec.world_size, expected_s=seconds, spot=spot)
    judging = job_plan.evaluation_pool(platform, model, adapter=spec.adapter, tier=tier, num_gpus=placed.evaluation_gpus)
    held = ((pool, seconds * spec.world_size), (judging, evaluation_s * placed.evaluation_gpus))
    prices, now = price_lists.load(platform.settings.prices_file).at(platform.clock()), platform.clock().timestamp()
    this = scheduler.Waiting(
        job_id=expected_time.THIS, tenant=tenant, tier=tier, num_gpus=spec.world_size, queued_at=now, expected_s=seconds,
        job_class=job_class(spec.adapter, model.num_parameters), spot=spot,
    )  # fmt: skip
    queue = queue_snapshot(platform)
    start = scheduler.projected_start(replace(queue, waiting=[*queue.waiting, this]), this.job_id, now=now)
    return schemas.Estimate(
        model=model.id,
        training_file=file.id,
        training_files=mixed,
        dataset_id=file.dataset_id,
        num_examples=num_examples,
        max_seq_len=max_seq_len,
        n_epochs=epochs,
        tokens=schemas.EstimatedTokens.of(tokens, total=round(tokens.per_epoch * epochs)),
        total_steps=total_steps,
        num_gpus=spec.world_size,
        gpu_type=pool.gpu_type,
        tier=tier,
        gpu_hours=round(gpu_seconds / 3600, 6),
        price_micros=_price_micros(prices, held, tier=tier),
        seconds_to_start=None if start is None else round(start - now, 1),
        seconds_to_finish=None if start is None else round(start - now + seconds + evaluation_s, 1),
        estimated_start=None if start is None else int(start),
        estimated_finish=None if start is None else int(start + seconds + evaluation_s),
        starts_within_s=tier_named(tier).starts_within_s,
        quota=JobQuota(**quotas.of_estimate(platform, tenant, gpu_seconds, counted=tokens.counted).to_dict()),
        recipe=spec.recipe,
        result=_result(spec, starts_servers=platform.servers is not None),
        memory=placed.fit.to_dict(),
        assumptions=_assumptions(placed, tokens, spec, total_steps, expected, evaluation_s, pool, judging, prices, tier, start),
    )


def _price_micros(prices: PriceList, held: Sequence[tuple[Pool, float]], *, tier: str) -> int:
    """Return the price of GPU-seconds held in each pool, in micro-dollars."""
    seconds = defaultdict[tuple[str, Pricing], float](float)
    for pool, gpu_seconds in held:
        seconds[pool.gpu_type, pool.pricing] += gpu_seconds
    return sum(
        prices.gpu_micros(gpu_type, tier=tier, pricing=pricing, gpu_ms=round(total * 1000))
        for (gpu_type, pricing), total in seconds.items()
    )


def _may_use_spot(platform: Platform, tenant: str, request: JobRequest, model: BaseModel) -> bool:
    """Whether the job would be one that may use spot GPUs (``control_plane.queue.snapshot.MAY_USE_SPOT``)."""
    if not request.spot or not request.auto_promote:
        return request.spot
    with platform.engine.connect() as conn:
        return not conn.execute(sa.select(is_in_production(tenant, model.id, request.suffix))).scalar_one()


def _result(spec: TrainingSpec, *, starts_servers: bool) -> schemas.EstimatedResult:
    if spec.lora is None:
        serving: Literal["own_server", "none"] = "own_server" if starts_servers else "none"
        detail = "vLLM serves it alone, on GPUs of its own, once it is promoted" if starts_servers else OWN_SERVER.detail
        return schemas.EstimatedResult(type=FULL_MODEL, rank=None, serving=serving, detail=detail)
    if spec.lora.use_dora:
        return schemas.EstimatedResult(type=LORA_ADAPTER, rank=spec.lora.saved_rank, serving="none", detail=DORA_DETAIL)
    detail = "vLLM serves it beside other adapters of its base"
    if spec.lora.init_lora_weights:
        detail += f": PiSSA's rank {spec.lora.rank} ends as an ordinary adapter of rank {spec.lora.saved_rank} on the unchanged base"
    return schemas.EstimatedResult(type=LORA_ADAPTER, rank=spec.lora.saved_rank, serving="shared_server", detail=detail)


def _mixed(
    request: JobRequest, files: Sequence[TrainingFile], tokens: Sequence[Tokens], num_examples: Sequence[int]
) -> tuple[Tokens, int, list[schemas.EstimatedFile] | None]:
    """Return tokens and examples of an epoch, and how much of each file of a mixture it reads."""
    wanted = request.training_files
    if not wanted:
        return tokens[0], num_examples[0], None
    times = mixture_repeats(wanted, [one.per_epoch for one in tokens])
    check_repeats(wanted, times)
    read = [
        schemas.EstimatedFile(file=file.id, dataset_id=file.dataset_id, repeats=round(n, 4), tokens=round(one.per_epoch * n))
        for file, one, n in zip(files, tokens, times, strict=True)
    ]
    together = Tokens(
        per_epoch=sum(one.tokens for one in read),
        error=round(math.hypot(*(one.error * n for one, n in zip(tokens, times, strict=True)))),
        counted=all(one.counted for one in tokens),
        how="; ".join(f"of {file.id}, {one.how}" for file, one in zip(files, tokens, strict=True)),
    )
    return together, sum(max(1, round(num * n)) for num, n in zip(num_examples, times, strict=True)), read


def _training_file(platform: Platform, tenant: str, request: JobRequest, file_id: str, model: BaseModel, *, param: str) -> TrainingFile:
    """Return a validated training file; refused with the reason if it is not."""
    uploaded_files.get(platform, tenant, file_id)  # refuses an unknown file
    file = expected_time.training_file(platform, tenant, file_id)
    if file is None or file.status == "uploaded":
        raise Conflict(
            f"file {file_id} is not validated yet; retry when it is (GET /v1/files/{file_id}/events shows when)",
            code="file_not_validated",
            param=param,
        )
    if file.status == "error":
        raise InvalidDataset(f"{param} {file_id} cannot be trained on: {file.status_details}", param=param)
    check_enough_to_train(file.row_count, training_file=file_id, param=param)
    check_format(file.format, request.method, file_id, param=param)
    check_tools(file.stats, file.policies, model, file_id, param=param)
    return file


def _tokens(
    platform: Platform, tenant: str, file: TrainingFile, model: BaseModel, method: Method, max_seq_len: int, *, share: float, inputs: bool
) -> Tokens:
    """Use the report's count if it is for this model and nothing is truncated; else sample rows. `inputs`: prompts are trained too."""
    counted = file.counted_tokens(model, method, max_seq_len, share=share)
    if counted is not None:
        return Tokens(per_epoch=counted, error=0, counted=True, how=f"counted at validation with {model.id}")
    if model.directory is None:
        raise Conflict(
            f"{model.id} has no tokenizer on this machine and the report of {file.id} counts no tokens of it; the job itself is not "
            "affected",
            code="estimate_needs_tokenizer",
            param="model",
        )
    rows = rows_file(platform, tenant, file.dataset_id)
    tokenizer, policies = ChatTokenizer.load(model.directory), Policies.from_request(file.policies)
    lengths, num_rows, cut_off = _sample(rows, tokenizer, method, max_seq_len, policies, inputs=inputs)
    if cut_off and not lengths.any():
        message = (
            f"max_seq_len {max_seq_len} cuts off the whole answer of {cut_off} of {len(lengths)} rows of {file.id}, and trains no other"
        )
        raise InvalidDataset(f"{message}; raise max_seq_len, or shorten the prompts", code="answer_cut_off")
    whole = len(lengths) == num_rows
    spread = 0.0 if whole else float(lengths.std(ddof=1)) / math.sqrt(len(lengths))
    total = float(lengths.mean()) * num_rows * share
    how = f"all {num_rows} rows tokenized with {model.id}" if whole else f"{len(lengths)} of {num_rows} rows tokenized with {model.id}"
    how += f", of which max_seq_len {max_seq_len} cuts off {cut_off} whole answers (answer_cut_off)" if cut_off else ""
    return Tokens(per_epoch=round(total), error=round(Z95 * spread * num_rows * share), counted=whole, how=how)


def _sample(
    path: Path, tokenizer: ChatTokenizer, method: Method, max_seq_len: int, policies: Policies, *, inputs: bool
) -> tuple[NDArray[np.int64], int, int]:
    """Tokenize rows from evenly spread parts of the dataset as they would be packed.

    Also returns how many rows the dataset has, and of how many tokenized ones the whole answer is cut off.
    """
    with pq.ParquetFile(path) as file:
        groups = np.unique(np.linspace(0, file.num_row_groups - 1, min(SAMPLE_GROUPS, file.num_row_groups)).round().astype(int))
        per_group = math.ceil(SAMPLE_ROWS / len(groups))
        chosen: list[Example] = []
        for group in groups.tolist():
            table = file.read_row_group(group, columns=["row", "example"])
            places = np.unique(np.linspace(0, len(table) - 1, min(per_group, len(table))).round().astype(int))
            chosen += [parse_canonical(r["example"], row=r["row"]) for r in table.take(pa.array(places)).to_pylist()]
        num_rows = file.metadata.num_rows
    lengths, cut_off = _packed_lengths(chosen, tokenizer, method, max_seq_len, policies, inputs=inputs)
    return lengths, num_rows, cut_off


def _packed_lengths(
    examples: list[Example], tokenizer: ChatTokenizer, method: Method, max_seq_len: int, policies: Policies, *, inputs: bool
) -> tuple[NDArray[np.int64], int]:
    """Return the tokens of each example in a pack, for a pair of both sides; and of how many examples the whole answer is cut off.

    Counts after truncation, 0 for a dropped example; refuses what packing would refuse.
    """
    escape = policies.control_tokens == "escape"
    lengths, cut_off = np.zeros(len(examples), np.int64), 0
    fitting: list[int] = []
    for place, example in enumerate(examples):
        problem = None if escape else tokenizer.control_token_problem(example)
        if problem is None:
            fitting.append(place)
        elif policies.control_tokens == "reject":
            raise InvalidDataset(f"row {example.row}: {problem.path} {problem.message}; {problem.fix}", code=problem.code)
    limit = UNCUT if expected_time.splits_long_rows(method, policies) else max_seq_len
    taken = [examples[i] for i in fitting]
    places = {example.row: place for place, example in zip(fitting, taken, strict=True)}

    def encode(batch: Sequence[Example]) -> list[tuple[TokenizedExample, ...]]:
        return _sides(batch, tokenizer, method, limit, escape, inputs=inputs)

    encoded = zip(taken, encode(taken), strict=True) if policies.bad_rows == "fail" else encode_or_drop(encode, taken, EncodingTally())
    for example, sides in encoded:
        place = places[example.row]
        cut = any(side.truncated for side in sides)
        if cut and policies.over_long == "reject":
            raise InvalidDataset(
                f"row {examples[place].row} is over {max_seq_len} tokens; shorten it, or upload the file with the policy over_long 'drop'",
                code="example_too_long",
            )
        cut_off += any(side.is_cut_off for side in sides)
        if all(side.num_trained_tokens for side in sides) and not (cut and policies.over_long == "drop"):
            lengths[place] = sum(len(side.input_ids) for side in sides)
    return lengths, cut_off


def _sides(
    examples: Sequence[Example], tokenizer: ChatTokenizer, method: Method, max_seq_len: int, escape: bool, *, inputs: bool
) -> list[tuple[TokenizedExample, ...]]:
    """Build each example as its method's pack holds it."""
    if method.pack == "pairs":
        return [*tokenizer.encode_preference_batch(examples, max_seq_len=max_seq_len, escape_control_tokens=escape)]
    if method.pack == "judged":
        return [(t,) for t in tokenizer.encode_judged_batch(examples, max_seq_len=max_seq_len, escape_control_tokens=escape)]
    encoded = tokenizer.encode_batch(examples, max_seq_len=max_seq_len, train_on_inputs=inputs, escape_control_tokens=escape)
    return [(tokens,) for tokens in encoded]


def _hourly(prices: PriceList, pool: Pool) -> str:
    hourly = prices.gpu(pool.gpu_type).per_hour(pool.pricing) / price_lists.MICROS
    return f"{hourly:g} USD per GPU-hour of {pool.gpu_type} ({pool.pricing.replace('_', ' ')})"


def _windows(plan: Plan, spec: TrainingSpec) -> str:
    if not packs_windows(plan):
        return "an example is a window of its own"
    if spec.max_seq_len == plan.max_seq_len:
        return f"windows are filled to {expected_time.FILL:.1%}"
    return f"windows have {spec.max_seq_len:,} tokens instead of {plan.max_seq_len:,}, which would make too few steps"


def _few_steps(plan: Plan, spec: TrainingSpec, total_steps: int) -> Iterator[str]:
    least, batch = int(plan.value("min_steps")), spec.rows_per_step
    if total_steps < least and spec.optimization.max_steps is None:
        lower = ", or lower batch_size" if batch > 1 else ""
        yield f"{total_steps} steps of {batch} are fewer than {least}, and barely change a model: add rows, raise n_epochs{lower}"


def _assumptions(
    placed: Placed,
    tokens: Tokens,
    spec: TrainingSpec,
    total_steps: int,
    expected: expected_time.Expectation,
    evaluation_s: float,
    pool: Pool,
    judging: Pool,
    prices: PriceList,
    tier: str,
    start: float | None,
) -> list[str]:
    method, num = method_named(placed.plan.method), placed.evaluation_gpus
    evaluation = f"{evaluation_s:.0f} s of evaluation on {'one GPU' if num == 1 else f'{num} GPUs'}"
    alike = (pool.gpu_type, pool.pricing) == (judging.gpu_type, judging.pricing)
    queue = "the start assumes that the jobs ahead end as expected; later submissions and failures are not included"
    promise = tier_named(tier).starts_within_s
    return [
        f"tokens: {tokens.how}" + (f"; 95 % of such samples are within {tokens.error:,}" if tokens.error else ""),
        ROW_COUNTS.get(method.pack) or _windows(placed.plan, spec),
        *_few_steps(placed.plan, spec, total_steps),
        f"learning rate: {describe_schedule(spec.optimization, total_steps=total_steps)}",
        f"speed: {expected.tokens_per_s:,.0f} tokens a second on {spec.world_size} x {pool.gpu_type} ({spec.method} {spec.adapter}, "
        f"{spec.precision}) after {expected.modelled.setup_s:.0f} s of set-up, by the cost model",
        expected.in_words(),
        f"price: {_hourly(prices, pool)}, at {prices.tiers[tier].gpu_percent} % in tier {tier}, for the training"
        + (f" and {evaluation}" if alike else f"; {_hourly(prices, judging)} for {evaluation}"),
        queue if start is not None else "no start can be estimated: too few GPUs, the hard cap is reached, or the queue is too long",
        f"tier {tier} promises no start: how long a job waits has no bound"
        if promise is None
        else f"tier {tier} promises a start within {promise / 60:g} minutes of the submission",
        "times exclude packing (before the queue) and evaluation (after training)",
    ]
