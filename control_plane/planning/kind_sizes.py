"""The size of each kind of job: GPU-hours, GPUs and class, given or by the estimates' cost model, and what it stores."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from control_plane.jobs.estimates import expected_time, job_plan
from control_plane.jobs.estimates.expected_time import BYTES_PER_ROW, BYTES_PER_TOKEN, THIS
from control_plane.jobs.submission import JobRequest
from control_plane.planning.job_mix import JobKind, JobMix
from control_plane.planning.sized_kind import SizedKind
from control_plane.tenants.rules import TIERS
from core.base_models import BaseModel
from core.errors import InvalidRequest
from engine.scheduler import JobClass, Pool, job_class
from engine.training import WELL_KNOWN_SHAPES, CheckpointPolicy, ModelShape, select_recipe, well_known_shape

GIB = 1 << 30
DATASET_GIB = 0.1
"""A hundred thousand rows of 1 KiB, between the 1k and 1M examples that a job is planned for."""
PACKED_BYTES_PER_TOKEN = 1.44
"""Bytes of a pack per token: Parquet with zstd, measured on chat data in English."""
CHECKPOINT_BYTES, MODEL_BYTES = 12, 4
"""Bytes per trained parameter, in float32: in a checkpoint with Adam's two moments, and in the finished model."""
TYPICAL: Mapping[JobClass, str] = {"lora": "llama-3.1-8b", "large": "llama-3.1-70b", "full": "llama-3.1-8b"}
"""Base model by whose size a kind without a model stores checkpoints and its result."""


def sized(mix: JobMix, pools: Sequence[Pool]) -> list[SizedKind]:
    """Return the kinds of `mix`; ``InvalidRequest`` if a model is unknown, or a job fits no pool. `pools`: where models are placed."""
    return [_sized(mix, kind, pools) for kind in mix.kinds]


def _sized(mix: JobMix, kind: JobKind, pools: Sequence[Pool]) -> SizedKind:
    if kind.model is None:
        found: JobClass = kind.job_class or "lora"
        shape = well_known_shape(TYPICAL[found])
        assert shape is not None and kind.gpus is not None and kind.gpu_hours is not None
        trained = _trained_parameters(TYPICAL[found], shape, adapter="full" if found == "full" else "lora")
        dataset = DATASET_GIB if kind.dataset_gib is None else kind.dataset_gib
        gpus, gpu_hours, packed = kind.gpus, kind.gpu_hours, dataset / BYTES_PER_TOKEN * PACKED_BYTES_PER_TOKEN
    else:
        shape, model = _base_model(kind)
        found = job_class(kind.adapter, model.num_parameters)
        gpus, gpu_hours = _modelled(kind, model, pools, tier=max(_tiers(mix, kind, found).items(), key=lambda one: one[1])[0])
        trained = _trained_parameters(model.id, shape, adapter=kind.adapter)
        tokens = kind.tokens or 0
        dataset = tokens * BYTES_PER_TOKEN / GIB if kind.dataset_gib is None else kind.dataset_gib
        packed = tokens * PACKED_BYTES_PER_TOKEN / GIB
    return SizedKind(
        name=kind.name, share=kind.share / 100, job_class=found, gpus=gpus, gpu_hours=gpu_hours, tiers=_tiers(mix, kind, found),
        checkpoints_gib=CheckpointPolicy().keep_last * trained * CHECKPOINT_BYTES / GIB,
        kept_gib=dataset + packed + trained * MODEL_BYTES / GIB,
    )  # fmt: skip


def assumed_models(mix: JobMix) -> Mapping[JobClass, str]:
    """Return the model by whose size kinds without a model store what they do, by class."""
    without = {kind.job_class or "lora" for kind in mix.kinds if kind.model is None}
    return {job_class: name for job_class, name in TYPICAL.items() if job_class in without}


def _tiers(mix: JobMix, kind: JobKind, of_class: JobClass) -> Mapping[str, float]:
    """Return the shares of tiers, 0 to 1, premium first."""
    allowed = [name for name, tier in TIERS.items() if of_class == "lora" or tier.may_train_full]
    given = kind.tiers if kind.tiers is not None else {name: share for name, share in mix.tiers.items() if name in allowed}
    total = sum(given.values())
    refused = next((name for name, share in given.items() if share and name not in allowed), None)
    if refused or not total:
        raise InvalidRequest(
            f"mix: kind {kind.name!r} is of class {of_class}, which only tier {' and '.join(allowed)} may train; "
            f"{f'take {refused} out of its tiers' if refused else 'give it such a tier'}",
            code="invalid_mix",
            param="mix",
        )
    return {name: given[name] / total for name in reversed([*TIERS]) if given.get(name)}


def _base_model(kind: JobKind) -> tuple[ModelShape, BaseModel]:
    name = kind.model or ""
    shape = well_known_shape(name)
    if shape is None:
        known = ", ".join(WELL_KNOWN_SHAPES)
        raise InvalidRequest(
            f"mix: kind {kind.name!r}: model {name[:60]!r} is unknown; use one of {known}", code="invalid_mix", param="mix"
        )
    return shape, BaseModel(
        id=name, repo=name, revision="", digest="", tokenizer_digest="", template_digest="", license="",
        context_length=shape.context_length, num_parameters=shape.num_parameters, deprecated_since=None, directory=None,
    )  # fmt: skip


def _modelled(kind: JobKind, model: BaseModel, pools: Sequence[Pool], *, tier: str) -> tuple[tuple[int, ...], float]:
    """Return the GPUs and GPU-hours of a job with the recipe's defaults, as an estimate plans them before any job has finished."""
    tokens = kind.tokens or 0
    request = JobRequest(
        model=model.id, training_file=THIS, adapter=kind.adapter,
        hyperparameters={} if kind.epochs is None else {"n_epochs": kind.epochs if kind.epochs % 1 else int(kind.epochs)},
        hardware=None if kind.gpus is None else {"num_gpus": kind.gpus[0]},
    )  # fmt: skip
    try:
        placed = job_plan.placed_in(pools, request, model, tier=tier)
        rows = max(1, math.ceil(tokens * BYTES_PER_TOKEN / BYTES_PER_ROW))
        spec, num_rows = expected_time.resolved(placed, dataset_id=THIS, num_examples=rows, tokens=tokens, seed=0)
    except InvalidRequest as error:
        raise InvalidRequest(f"mix: kind {kind.name!r}: {error.message}", code=error.code, param="mix") from error
    _, cost, _ = expected_time.modelled(pools, model, spec, num_rows=num_rows, tokens_per_epoch=tokens)
    gpu_s = cost.total_s * spec.world_size + expected_time.evaluation_s(model, placed.evaluation_replicas) * placed.evaluation_gpus
    return (spec.world_size,), gpu_s / 3600


def _trained_parameters(model: str, shape: ModelShape, *, adapter: str) -> int:
    if adapter == "full":
        return shape.num_parameters
    recipe = select_recipe(model, adapter="qlora" if adapter == "qlora" else "lora", num_parameters=shape.num_parameters)
    return shape.lora_parameters(int(recipe.value("rank")))
