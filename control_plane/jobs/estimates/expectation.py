"""How long a job is expected to hold its GPUs: counted where its tokens are, else a first estimate.

The first estimate is made from the size of the uploaded file, for a submission waits for no tokenizer: four bytes a token and a KiB a
row, markup included, which is more than the data has. Preparation counts, and what it has counted replaces the estimate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from control_plane.datasets.tables import datasets, files
from control_plane.jobs.estimates import job_history
from control_plane.jobs.estimates.job_plan import Placed
from control_plane.jobs.submission import JobRequest
from control_plane.platform.context import Platform
from ft_assets.base_models import BaseModel
from ft_assets.datasets.policies import Policies
from ft_assets.datasets.split import automatic_fraction
from ft_assets.training import hyperparameters, methods
from ft_assets.training.methods import Method
from ft_assets.training.spec import TrainingSpec

FILL = 0.999
"""Share of a window that is filled: what best-fit packing reaches on all but the smallest datasets (B16)."""
BYTES_PER_TOKEN = 4.0
"""Of an uploaded file: English text has four to five in the vocabularies of Llama and Qwen; other scripts have fewer."""
BYTES_PER_ROW = 1024
"""A row of chat data, of ten million in 10 GiB."""
THIS = "this-estimate"


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    gpu_seconds: float
    counted: bool
    """From tokens that were counted at validation."""


def of_request(platform: Platform, tenant: str, request: JobRequest, model: BaseModel, placed: Placed) -> Expected:
    """What a job of this request is expected to take, from what is known without reading its data."""
    query = (
        sa.select(
            files.c.bytes,
            files.c.policies,
            datasets.c.row_count,
            sa.func.coalesce(files.c.report["stats"], datasets.c.report["stats"]).label("stats"),
            sa.func.coalesce(files.c.report["model"], datasets.c.report["model"]).label("model"),
            datasets.c.report["stats"]["splits"].label("splits"),
        )
        .select_from(files.outerjoin(datasets, (datasets.c.id == files.c.dataset_id) & (datasets.c.tenant_id == files.c.tenant_id)))
        .where(files.c.id == request.training_file, files.c.tenant_id == tenant)
    )
    with platform.engine.connect() as conn:
        row = conn.execute(query).mappings().one_or_none()
    if row is None:  # the submission says so
        return Expected(gpu_seconds=0.0, counted=False)
    method = methods.get(request.method)
    rows = row["row_count"] or max(1, round((row["bytes"] or 0) / BYTES_PER_ROW))
    num_examples = num_training(rows, row["splits"], own_validation=request.validation_file is not None)
    report = {"stats": row["stats"], "model": row["model"]}
    known = None
    if row["row_count"]:
        policies = Policies.from_request(row["policies"])
        known = counted_tokens(report, model, method, policies, placed.plan.max_seq_len, share=num_examples / rows)
    tokens = known if known is not None else math.ceil((row["bytes"] or 0) / BYTES_PER_TOKEN)
    spec = resolved(placed, method, dataset_id=THIS, num_examples=num_examples, tokens=tokens, seed=request.seed or 0)
    pack_rows = num_rows(method, num_examples=num_examples, tokens=tokens, max_seq_len=placed.plan.max_seq_len)
    expected_s = job_history.expect(platform, model, spec, num_rows=pack_rows, tokens_per_epoch=tokens).expected_s
    return Expected(gpu_seconds=expected_s * spec.world_size, counted=known is not None)


def num_training(num_rows: int, splits: Mapping[str, Any] | None, *, own_validation: bool) -> int:
    """Examples that are trained on: all of them, or those that the split leaves."""
    if own_validation:
        return num_rows
    return int((splits or {}).get("train") or round(num_rows * (1.0 - automatic_fraction(num_rows))))


def counted_tokens(
    report: Mapping[str, Any], model: BaseModel, method: Method, policies: Policies, max_seq_len: int, *, share: float
) -> int | None:
    """Tokens of the training part, once through, if the report counted those of this model and nothing of them is cut."""
    counted, of = (report.get("stats") or {}).get("tokens"), report.get("model") or {}
    digests = (of.get("tokenizer_digest"), of.get("template_digest"))
    uncut = counted and (counted["max"] <= max_seq_len or splits_long_rows(method, policies))
    if counted and uncut and method.pack == "windows" and digests == (model.tokenizer_digest, model.template_digest):
        return round(float(counted["total"]) * share)
    return None


def splits_long_rows(method: Method, policies: Policies) -> bool:
    """Whether a row that is too long is packed in pieces, all of it."""
    return method.every_token and policies.over_long == "truncate"


def resolved(placed: Placed, method: Method, *, dataset_id: str, num_examples: int, tokens: int, seed: int) -> TrainingSpec:
    """The spec of a pack with that many examples and tokens."""
    max_seq_len = placed.plan.max_seq_len
    return hyperparameters.resolve(
        placed.plan,
        hyperparameters.PackFacts(
            fingerprint=THIS,
            dataset_id=dataset_id,
            num_examples=num_examples,
            num_windows=num_rows(method, num_examples=num_examples, tokens=tokens, max_seq_len=max_seq_len),
            num_tokens=tokens,
            max_seq_len=max_seq_len,
        ),
        seed=seed,
        lock_sha256="",
        commit="",
        **placed.placement,
    )


def num_rows(method: Method, *, num_examples: int, tokens: int, max_seq_len: int) -> int:
    """Rows of the pack: windows, pairs or judged answers."""
    return max(1, math.ceil(tokens / (max_seq_len * FILL))) if method.pack == "windows" else num_examples
