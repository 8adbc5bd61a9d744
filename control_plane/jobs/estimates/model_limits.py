"""What each base model allows, computed with the functions that enforce it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from control_plane.billing import prices as price_lists
from control_plane.capacity import configured_pools
from control_plane.http import metadata
from control_plane.jobs.estimates import job_plan
from control_plane.jobs.estimates.schemas import AdapterLimits, DefaultFit, MethodLimits, ModelLimits, ValueLimit
from control_plane.jobs.recipes import operator_recipes
from control_plane.jobs.schemas import JobError
from control_plane.jobs.submission import MAX_SEED, MAX_SUFFIX, JobRequest
from control_plane.platform.context import Platform
from control_plane.quotas.rules import Ask, Usage, admit
from control_plane.tenants.rules import TIERS, Tenant
from core.base_models import ENGINE_RANKS, BaseModel
from core.errors import FtError
from engine.scheduler import RESERVED_FOR, job_class, widest_of
from engine.training import ADAPTER_KINDS, HARDWARE_LIMITS, HYPERPARAMETER_LIMITS, Limit, Recipe, registered_methods


def model_limits(platform: Platform, *, model: str | None = None) -> list[ModelLimits]:
    """Return the limits of every base model, or of one; ``NotFound`` if it does not exist."""
    names = platform.models.ids() if model is None else [platform.models.get(model).id]
    known = operator_recipes.known(platform)
    return [_of(platform, name, known) for name in names]


def _of(platform: Platform, name: str, known: Mapping[str, Recipe]) -> ModelLimits:
    """Return one model's limits; if its files are missing, `unavailable` says so and its size is left out."""
    ranks = _ranks(platform)
    widest = max(pool.max_gpus_per_job for pool in configured_pools.planned(platform))
    limits = ModelLimits(
        model=name,
        accepts_jobs=False,
        unavailable=None,
        context_length=None,
        num_parameters=None,
        methods=[
            MethodLimits(name=m.name, rows=sorted(m.rows), hyperparameters={n: _shown(s.limit) for n, s in m.settings.items()})
            for m in registered_methods().values()
        ],
        adapters=[],
        hyperparameters={name: _shown(limit) for name, limit in HYPERPARAMETER_LIMITS.items()}
        | {"rank": _shown(replace(HYPERPARAMETER_LIMITS["rank"], allowed=ranks))},
        num_gpus=[count for count in HARDWARE_LIMITS["num_gpus"].allowed if count <= widest],
        strategies=list(HARDWARE_LIMITS["strategy"].words),
        max_suffix_length=MAX_SUFFIX,
        max_seed=MAX_SEED,
        max_metadata_pairs=metadata.MAX_PAIRS,
    )
    try:
        base = platform.models.card(name)
        limits.adapters = [_adapter(platform, base, kind, known) for kind in ADAPTER_KINDS]
    except FtError as e:
        limits.unavailable = e.message
        return limits
    limits.context_length, limits.num_parameters = base.context_length, base.num_parameters
    limits.accepts_jobs = base.deprecated_since is None or base.deprecated_since > platform.clock().date()
    limits.unavailable = None if limits.accepts_jobs else f"deprecated since {base.deprecated_since}"
    return limits


def hourly_micros(platform: Platform, model: ModelLimits, adapter: AdapterLimits, *, tier: str) -> int | None:
    """Return the price of an hour of a job with the defaults; None if a job of `tier` would be refused."""
    if adapter.defaults.num_gpus is None or tier not in adapter.tiers or model.num_parameters is None:
        return None
    pool = job_plan.pool_for(configured_pools.planned(platform), tier, job_class(adapter.name, model.num_parameters))
    prices = price_lists.load(platform.settings.prices_file).at(platform.clock())
    return prices.gpu_micros(pool.gpu_type, tier=tier, pricing=pool.pricing, gpu_ms=price_lists.MS_PER_HOUR * adapter.defaults.num_gpus)


def _shown(limit: Limit) -> ValueLimit:
    """A limit as it is enforced: in words, and as numbers if it has any."""
    numeric = limit.kind in ("int", "float")
    return ValueLimit(
        type=limit.kind,
        minimum=limit.low if numeric and limit.low > float("-inf") else None,
        exclusive_minimum=limit.above_low,
        maximum=limit.high if numeric and limit.high < float("inf") else None,
        allowed=list(limit.allowed or limit.words) or None,
        text=limit.text,
        because=limit.because or None,
    )


def _adapter(platform: Platform, base: BaseModel, kind: str, known: Mapping[str, Recipe]) -> AdapterLimits:
    """Return one kind of adapter on this model with a recipe's defaults: the GPUs it needs, or why it does not fit.

    Its tiers are those that may train it and have a pool for it; the defaults are those of the last tier, which gets most.
    """
    requested = JobRequest.from_body({"model": base.id, "training_file": "-", "adapter": kind})
    pools = configured_pools.planned(platform)
    tiers = [
        tier
        for tier in TIERS
        if _admitted(tier, full=kind == "full", num_parameters=base.num_parameters)
        and widest_of(pools, tier, job_class(kind, base.num_parameters))
    ]
    try:
        placed = job_plan.placed(platform, requested, base, tier=tiers[-1] if tiers else RESERVED_FOR, known=known)
    except FtError as e:
        refused = JobError.model_validate(e.to_dict())
        defaults = DefaultFit(num_gpus=None, strategy=None, per_device_batch_size=None, max_seq_len=None, refused=refused)
    else:
        defaults = DefaultFit.of(placed.plan, placed.fit, refused=None)
    return AdapterLimits(name=kind, ranks=[] if kind == "full" else list(_ranks(platform)), tiers=tiers, defaults=defaults)


def _ranks(platform: Platform) -> tuple[int, ...]:
    """Ranks that this deployment's servers load."""
    return tuple(rank for rank in ENGINE_RANKS if rank <= platform.settings.max_lora_rank)


def _admitted(tier: str, *, full: bool, num_parameters: int) -> bool:
    """Whether a tenant of this tier with no use so far may train it."""
    tenant = Tenant(
        id="", name="", tier=tier, max_jobs_in_flight=1, soft_gpu_hours=None, hard_gpu_hours=None, requests_per_minute=1
    )  # fmt: skip
    return admit(tenant, Usage(jobs_in_flight=0), Ask(tier=tier, full_parameters=full, num_parameters=num_parameters)) is None
