"""Warm starts: resolves the earlier model or checkpoint, checks that a job can start from it, and finds its stored files.

An adapter job starts from a LoRA adapter or a checkpoint of one, a full-parameter job from a finished whole model of the same base.
A reference is a model's id or name (``adp-...``, ``ft:...``), a job (``ftjob-...``: its adapter), a checkpoint (``ftckpt_...``) or
OpenAI's name of one (``ftjob-...:step-120``). OpenAI's clients pass it as ``model``; ``warm_start`` with a base model means the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from control_plane.adapters import promotions
from control_plane.adapters import service as registry
from control_plane.adapters.tables import Adapter, adapters
from control_plane.attempts.tables import checkpoints
from control_plane.jobs.job_documents import WarmStartSource
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from core.errors import Conflict, InvalidRequest, NotFound
from core.typed_json import from_json
from engine.adapters import ADAPTER_WEIGHTS, FULL_MODEL, MODEL_CONFIG, PACKAGE_MANIFEST, Stage
from engine.training import LoraSettings, WarmStart

REFERENCES = ("ft:", "adp-", "ftjob-", "ftckpt_")
"""Prefixes of references; base model ids never start with them."""
OF_STEP = re.compile(r"(?P<job>ftjob-[A-Za-z0-9]+):step-(?P<step>[0-9]{1,9})")


def spec_of(source: WarmStartSource | None) -> WarmStart | None:
    """Return the part of a job's source that its frozen spec records."""
    return None if source is None else WarmStart(adapter=source.adapter, manifest_sha256=source.manifest_sha256)


def on_base(platform: Platform, tenant: str, request: JobRequest) -> tuple[JobRequest, WarmStartSource | None]:
    """Return `request` for its base model with the fixed settings of the warm start, and the source; unchanged without a warm start.

    Refuses, with the reason, a source that is not the tenant's, has lost its files, is of another kind than the job (adapter or whole
    model) or of another base, or has another rank, alpha or modules than requested.
    """
    as_model = request.model.startswith(REFERENCES) and request.model not in platform.models.ids()
    if as_model and request.warm_start not in (None, request.model):
        raise InvalidRequest(
            f"model {request.model[:80]!r} and warm_start {str(request.warm_start)[:80]!r} name two starts; give one of them, or a base "
            "model and warm_start",
            code="warm_start_mismatch",
            param="warm_start",
        )
    reference = request.model if as_model else request.warm_start
    if reference is None:
        return request, None
    param = "model" if as_model else "warm_start"
    source = find(platform, tenant, reference, param=param)
    model = source.base_model if as_model else request.model
    if request.adapter == "full" and not source.whole:
        raise _mismatch(f"a full-parameter job cannot start from the LoRA adapter {source.adapter}; use method lora or qlora", param)
    if request.adapter != "full" and source.whole:
        raise _mismatch(
            f"{source.adapter} is a whole model, and only full-parameter jobs start from one; set adapter to full, or name a LoRA adapter",
            param,
        )
    if source.base_model != model:
        raise _mismatch(f"{source.adapter} was trained on {source.base_model}, not on {model}; use model {source.base_model}", param)
    if source.base_digest != (digest := platform.models.get(model).digest):
        raise _mismatch(
            f"{source.adapter} was trained on {model} with digest {source.base_digest[:12]}, and its files are {digest[:12]} now; train "
            "from the base model",
            param,
        )
    kept = request.hyperparameters if source.whole else _kept(request.hyperparameters, source)
    return replace(request, model=model, warm_start=reference, hyperparameters=kept), source


def _kept(requested: Mapping[str, Any], source: WarmStartSource) -> Mapping[str, Any]:
    """Fill the source's fixed values into `requested`; a differing value is refused."""
    if requested.get("init_lora_weights") not in (None, "auto"):
        raise _mismatch(
            f"init_lora_weights begins with the base's singular values, and {source.adapter} with its own matrices; leave one of them out",
            "hyperparameters.init_lora_weights",
        )
    for name, value in {"use_rslora": False, "use_dora": False, **source.lora}.items():
        if requested.get(name) not in (None, "auto") and not _same(requested[name], value):
            raise _mismatch(
                f"{name} {str(requested[name])[:80]} differs from the {value} of {source.adapter}; leave it out, or "
                "train from the base model",
                f"hyperparameters.{name}",
            )
    return {**requested, **source.lora}


def _same(a: Any, b: Any) -> bool:
    return bool(sorted(a) == sorted(b)) if isinstance(a, list) and isinstance(b, list) else bool(a == b)


def find(platform: Platform, tenant: str, reference: str, *, param: str) -> WarmStartSource:
    """Return the adapter or checkpoint that `reference` names; ``NotFound`` unless it is the tenant's and its files exist."""
    if (step := OF_STEP.fullmatch(reference)) is not None:
        this = (checkpoints.c.job_id == step["job"]) & (checkpoints.c.step == int(step["step"]))
        source = _checkpoint(platform, tenant, this, reference, param)
    elif reference.startswith("ftckpt_"):
        source = _checkpoint(platform, tenant, checkpoints.c.id == reference, reference, param)
    else:
        source = _adapter(platform, tenant, reference, param)
    needed = (PACKAGE_MANIFEST, MODEL_CONFIG if source.whole else ADAPTER_WEIGHTS)
    if not all(platform.objects.exists(f"{source.object_prefix}/{name}") for name in needed):
        raise _not_found(
            f"the weights of {source.adapter} are not kept, or in shards of its ranks; choose a later checkpoint or a finished model", param
        )
    return source


def _adapter(platform: Platform, tenant: str, reference: str, param: str) -> WarmStartSource:
    if reference.startswith("ftjob-"):
        reference = _adapter_of_job(platform, tenant, reference, param)
    try:
        found = registry.get_adapter(platform, tenant, reference)
    except NotFound:
        found = _newest(platform, tenant, reference, param)
    if found.stage == Stage.ARCHIVED:
        raise _mismatch(f"{found.id} is archived and its files are deleted; choose another one", param)
    with platform.engine.connect() as conn:
        spec = conn.execute(sa.select(jobs.c.spec).where(jobs.c.id == found.job_id)).scalar_one()
    return WarmStartSource(
        adapter=found.name,
        manifest_sha256=found.manifest_sha256,
        base_model=found.base_model,
        base_digest=found.base_digest,
        object_prefix=found.object_prefix,
        lora={} if found.type == FULL_MODEL else _lora({**((spec or {}).get("lora") or {}), "rank": found.rank, "alpha": found.alpha}),
        adapter_id=found.id,
    )


def _newest(platform: Platform, tenant: str, reference: str, param: str) -> Adapter:
    """Return the newest production adapter of a lineage named without its last part."""
    if reference.startswith("ft:"):
        try:
            resolved = promotions.resolve_model(platform, tenant, reference)
        except (NotFound, Conflict):
            resolved = None
        if resolved is not None and resolved.adapter is not None:
            return resolved.adapter
    raise _not_found(f"no adapter {reference[:160]!r} to start from; list yours with GET /v1/adapters", param)


def _adapter_of_job(platform: Platform, tenant: str, job_id: str, param: str) -> str:
    query = sa.select(jobs.c.state, jobs.c.adapter_id).where(jobs.c.id == job_id, jobs.c.tenant_id == tenant)
    with platform.engine.connect() as conn:
        row = conn.execute(query).one_or_none()
    if row is None:
        raise _not_found(f"no fine-tuning job {job_id[:80]!r} to start from; list yours with GET /v1/fine_tuning/jobs", param)
    if row.adapter_id is None:
        raise _mismatch(f"job {job_id} is {row.state} and has no adapter; wait until it has one, or name one of its checkpoints", param)
    return str(row.adapter_id)


def _checkpoint(platform: Platform, tenant: str, this: sa.ColumnElement[bool], reference: str, param: str) -> WarmStartSource:
    query = (
        sa.select(checkpoints, jobs.c.model, jobs.c.base_digest, jobs.c.spec)
        .join(jobs, jobs.c.id == checkpoints.c.job_id)
        .where(this, jobs.c.tenant_id == tenant, checkpoints.c.retired_at.is_(None))
    )
    with platform.engine.connect() as conn:
        row = conn.execute(query).one_or_none()
    if row is None:
        raise _not_found(f"no checkpoint {reference[:80]!r} to start from; list them with GET /v1/fine_tuning/jobs/JOB/checkpoints", param)
    lora = (row.spec or {}).get("lora")
    name = f"{row.job_id}:step-{row.step}"
    if not lora:
        raise _mismatch(f"{name} is of a full-parameter job, of which only the finished model can be started from: {row.job_id}", param)
    trained = from_json(LoraSettings, lora, ignore_unknown=True)
    return WarmStartSource(
        adapter=name,
        manifest_sha256=row.manifest_sha256,
        base_model=row.model,
        base_digest=row.base_digest,
        object_prefix=row.object_prefix,
        lora=_lora({**lora, "rank": trained.saved_rank, "alpha": trained.saved_alpha}),
        checkpoint_id=row.id,
    )


def _lora(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings that a job from this adapter or checkpoint must have. PiSSA ends as plain LoRA of twice the rank."""
    modules = settings.get("target_modules", "all-linear")
    modules = modules if isinstance(modules, str) else list(modules)
    kinds = {name: settings[name] for name in ("use_rslora", "use_dora") if settings.get(name)}
    return {"rank": settings["rank"], "alpha": settings["alpha"], "target_modules": modules, **kinds}


def stored_prefix(platform: Platform, tenant: str, start: WarmStart) -> str:
    """Return the object prefix of the files that `start` names; ``NotFound`` if they were deleted."""
    of_adapter = sa.select(adapters.c.object_prefix).where(
        adapters.c.tenant_id == tenant,
        adapters.c.manifest_sha256 == start.manifest_sha256,
        adapters.c.stage != Stage.ARCHIVED.value,
    )
    of_checkpoint = (
        sa.select(checkpoints.c.object_prefix)
        .join(jobs, jobs.c.id == checkpoints.c.job_id)
        .where(jobs.c.tenant_id == tenant, checkpoints.c.manifest_sha256 == start.manifest_sha256, checkpoints.c.removed_at.is_(None))
    )
    with platform.engine.connect() as conn:
        found = conn.execute(of_adapter.union_all(of_checkpoint).limit(1)).scalar()
    if found is None:
        raise NotFound(f"{start.adapter}, from which this job starts, does not exist any more", code="warm_start_not_found")
    return str(found)


def _mismatch(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(message, code="warm_start_mismatch", param=param)


def _not_found(message: str, param: str) -> NotFound:
    return NotFound(message, code="model_not_found" if param == "model" else "warm_start_not_found", param=param)
