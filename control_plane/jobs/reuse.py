"""Work that is done already: a job that would train what an earlier one has trained is answered with that one.

Equal means equal: data, base, hyperparameters, seed, locked dependencies, image and commit of the code, and what is asked of
the evaluation and of the name. Code with changes that no commit holds (``-dirty``) is equal to nothing. ``force`` trains anyway.

1. At submission (:func:`finished_request`): the same request, its seed given. The finished job itself is the answer.
2. Prepared (:func:`finished_spec`): the frozen spec has the same digest. The new job ends with the earlier one's adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, RowMapping

from control_plane.adapters.tables import adapters
from control_plane.datasets.tables import files
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import jobs
from control_plane.jobs.warm_starts import Source
from control_plane.platform.job_states import JobState
from ft_assets.adapters.stages import Stage
from ft_assets.base_models import BaseModel
from ft_assets.evals import config as eval_config
from ft_assets.telemetry import provenance
from ft_assets.training.spec import TrainingSpec

DIRTY = "-dirty"
USABLE = (Stage.DRAFT.value, Stage.STAGING.value, Stage.PRODUCTION.value)
"""Stages of an adapter that passed its gates and that nobody has withdrawn for good."""
COMPARED_OTHERWISE = frozenset({
    # by what they were resolved to
    "model", "training_file", "validation_file", "method", "adapter", "hyperparameters", "seed", "warm_start",
    # how and when it was trained, not what
    "force", "tier", "spot", "idempotency_key",
})  # fmt: skip
MAX_CANDIDATES = 100


def finished_request(
    conn: Connection, tenant: str, request: JobRequest, *, model: BaseModel, dataset_id: str | None, warm_start: Source | None
) -> RowMapping | None:
    """The newest succeeded job of the same request whose adapter is there (and served, where the request asks for that).

    Only for a request that gives its seed: without one, another job is asked for each time.
    """
    if request.force or request.seed is None or dataset_id is None:
        return None
    served = request.auto_promote and request.adapter != "full"
    stages = (Stage.PRODUCTION.value,) if served else USABLE
    query = _with_adapter(tenant, stages).where(
        jobs.c.model == model.id,
        jobs.c.base_digest == model.digest,
        jobs.c.dataset_id == dataset_id,
        jobs.c.method == request.method,
        jobs.c.seed == request.seed,
    )
    wanted = (_pinned(conn, tenant, request.training_file), _pinned(conn, tenant, request.validation_file))
    for row in conn.execute(query.limit(MAX_CANDIDATES)).mappings():
        had = (_pinned(conn, tenant, row["training_file"]), _pinned(conn, tenant, row["validation_file"]))
        if had == wanted and _same_training(row, request, warm_start) and _rest(row["request"]) == _rest(request.body):
            return row
    return None


def finished_spec(conn: Connection, job: RowMapping, spec: TrainingSpec) -> RowMapping | None:
    """The newest succeeded job that trained this very spec, was judged by the same rules and made a name of the same suffix."""
    if (job["request"] or {}).get("force") or spec.commit.endswith(DIRTY):
        return None
    query = _with_adapter(job["tenant_id"], USABLE).where(
        jobs.c.spec_sha256 == spec.sha256, jobs.c.suffix.is_not_distinct_from(job["suffix"]), jobs.c.id != job["id"]
    )
    judged = _judged(job["request"])
    return next((row for row in conn.execute(query.limit(MAX_CANDIDATES)).mappings() if _judged(row["request"]) == judged), None)


def _with_adapter(tenant: str, stages: tuple[str, ...]) -> sa.Select[Any]:
    return (
        sa.select(jobs, adapters.c.stage.label("adapter_stage"))
        .join(adapters, adapters.c.id == jobs.c.adapter_id)
        .where(
            jobs.c.tenant_id == tenant,
            jobs.c.state == JobState.SUCCEEDED.value,
            adapters.c.stage.in_(stages),
            adapters.c.eval_passed,
        )
        .order_by(jobs.c.created_at.desc(), jobs.c.id)
    )


def _pinned(conn: Connection, tenant: str, file_id: str | None) -> tuple[str, Mapping[str, Any]] | None:
    """Dataset version of a file and what its upload asked of the packing: the same data may come under another file id."""
    if file_id is None:
        return None
    row = conn.execute(sa.select(files.c.dataset_id, files.c.policies).where(files.c.id == file_id, files.c.tenant_id == tenant)).one()
    return (row.dataset_id, row.policies)


def _same_training(row: RowMapping, request: JobRequest, warm_start: Source | None) -> bool:
    spec = row["spec"] or {}
    now = {"lock_sha256": provenance.lock_sha256(), "commit": provenance.commit(), "image": provenance.image()}
    start = (row["warm_start"] or {}).get("manifest_sha256")
    return (
        not now["commit"].endswith(DIRTY)
        and all(spec.get(name) == value for name, value in now.items())
        and spec.get("adapter") == request.adapter
        and start == (None if warm_start is None else warm_start.manifest_sha256)
        and _given(row["hyperparameters"]) == _given(request.hyperparameters)
    )


def _given(hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in hyperparameters.items() if v not in (None, "auto")}


def _rest(body: Mapping[str, Any]) -> dict[str, Any]:
    """What is compared as it was sent: suffix, metadata, eval_config, recipe, ..."""
    return {"auto_promote": True} | {k: v for k, v in body.items() if k not in COMPARED_OTHERWISE and v is not None}


def _judged(body: Mapping[str, Any] | None) -> eval_config.EvalConfig:
    return eval_config.parse((body or {}).get("eval_config"))
