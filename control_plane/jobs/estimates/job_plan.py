"""Plan of a request: its recipe, resolved settings, number of GPUs and sharding strategy.

Submission, estimate and packing all use it, so that a request is refused at submission or not at all, and trains as estimated.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from control_plane.capacity import configured_pools
from control_plane.jobs.recipes import operator_recipes
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import Job
from control_plane.platform.context import Platform
from core.base_models import MAX_RANK, BaseModel
from core.errors import InvalidRequest
from engine.evals import parse_eval_config
from engine.scheduler import (
    JOB_CLASSES,
    LARGE_MODEL_PARAMETERS,
    RESERVED_FOR,
    Pool,
    evaluation_class,
    job_class,
    may_use_spot,
    most_capable,
    pools_in_order,
    pools_taking,
)
from engine.training import (
    CONTEXT_SIZES,
    EXPERT_SETTINGS,
    GIB,
    GPUS,
    Case,
    Fit,
    ModelFacts,
    ModelShape,
    Placement,
    Plan,
    Quantization,
    Recipe,
    bad_setting,
    check_placement,
    context_objection,
    forward_pass_gpus,
    global_batch_size,
    method_named,
    micro_batch_s,
    splitting_objections,
)
from engine.training import plan as plan_hyperparameters
from engine.training import shape_of as known_shape

CLASS_WORDS: Mapping[str, str] = {
    "lora": f"adapters on models below {LARGE_MODEL_PARAMETERS / 1e9:.0f}B parameters",
    "large": f"adapters on models of {LARGE_MODEL_PARAMETERS / 1e9:.0f}B parameters and more",
    "full": "training of all parameters (adapter full)",
    "evaluation": "evaluations, which follow every training",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A plan with its memory estimate."""

    plan: Plan
    fit: Fit
    evaluation_gpus: int = 1
    """GPUs that the evaluation after the training holds, all of one node."""
    evaluation_replicas: int = 1
    """Copies of the base that they hold, which answer at the same time."""

    @property
    def data_ranks(self) -> int:
        """Ranks that read windows of their own."""
        return self.fit.num_gpus // self.fit.context_parallel

    @property
    def placement(self) -> Mapping[str, Any]:
        """Arguments of ``hyperparameters.resolve``.

        On a CPU the recipe's micro-batch is kept, because larger ones are not faster.
        """
        return {
            "world_size": self.fit.num_gpus,
            "strategy": self.fit.strategy,
            "context_parallel": self.fit.context_parallel,
            "per_device_batch_size": None if self.fit.gpu.is_cpu else self.fit.per_device_batch_size,
            "gradient_checkpointing": self.fit.gradient_checkpointing,
        }


def placed(
    platform: Platform, request: JobRequest, model: BaseModel, *, tier: str, known: Mapping[str, Recipe] | None = None,
    chosen: str | None = None,
) -> Placed:  # fmt: skip
    """Plan `request` on `model` and fit it into memory; ``InvalidRequest`` states what does not fit and what would.

    `known`: the recipes that jobs may use, if the caller has read them. `chosen`: label of the recipe that was chosen when the job was
    submitted.

    Gives the same result before and after packing: the memory estimate uses the requested batch, or the recipe's, not the smaller one of a
    small dataset. What no pool could ever give to a job of `tier` is refused, regardless of what is in use or drained now.
    """
    recipes = operator_recipes.known(platform, of_job=chosen) if known is None else known
    pools, max_rank = configured_pools.planned(platform), platform.settings.max_lora_rank
    return placed_in(pools, request, model, tier=tier, known=recipes, chosen=chosen, max_rank=max_rank)


def placed_in(
    pools: Sequence[Pool], request: JobRequest, model: BaseModel, *, tier: str, known: Mapping[str, Recipe] | None = None,
    chosen: str | None = None, max_rank: int = MAX_RANK,
) -> Placed:  # fmt: skip
    """The same in any pools. `known`: the recipes to choose from, by default those that ship. `max_rank`: highest that servers load."""
    pool = pool_for(pools, tier, job_class(request.adapter, model.num_parameters))
    facts = ModelFacts(id=model.id, num_parameters=model.num_parameters, context_length=model.context_length, digest=model.digest)
    shape = shape_of(model)
    plan = plan_hyperparameters(
        request.hyperparameters,
        facts,
        method=request.method,
        adapter=request.adapter,
        recipe=chosen or request.recipe,
        known=known,
        hardware=request.hardware,
        device=GPUS[pool.gpu_type].device,
        needs=shape.attention_needs,
        max_rank=max_rank,
    )
    plan = unpacked_if_needed(plan, shape)
    check_frozen_parts(plan, shape)
    check_target_modules(plan, shape)
    fit = fit_on(pool, plan, shape, tier=tier)
    replicas = parse_eval_config(request.eval_config).replicas
    gpus = evaluation_gpus(pools, model, adapter=plan.adapter, rank=_rank(plan), tier=tier, replicas=replicas)
    return Placed(plan=plan, fit=fit, evaluation_gpus=gpus, evaluation_replicas=replicas)


def unpacked_if_needed(plan: Plan, shape: ModelShape) -> Plan:
    """Gives each example a window of its own if the model cannot keep examples apart; ``InvalidRequest`` if the request packs them."""
    longest, packs = shape.max_packed_len, method_named(plan.method).pack == "windows"
    if longest is None or not packs or (longest and plan.max_seq_len <= longest):
        return plan
    if plan.requested.get("packing"):
        how = f"or max_seq_len to at most {longest}" if longest else "or leave it out"
        raise bad_setting(
            "packing",
            f"{plan.model.id} cannot keep examples of a window apart at max_seq_len {plan.max_seq_len}; set packing to false, {how}",
        )
    return replace(plan, requested={**plan.requested, "packing": False})


def check_target_modules(plan: Plan, shape: ModelShape) -> None:
    """Raises ``InvalidRequest`` for a layer that the model lacks, or that adapters leave as it is, such as experts."""
    wanted = plan.requested.get("target_modules", ())
    if isinstance(wanted, str) or shape.assumed:
        return
    if absent := [name for name in wanted if name not in shape.adapter_modules]:
        raise bad_setting(
            "target_modules",
            f"adapters cannot train {absent[0]} in {plan.model.id}; choose from {', '.join(shape.adapter_modules)}, or all-linear",
        )


def check_frozen_parts(plan: Plan, shape: ModelShape) -> None:
    """Raises ``InvalidRequest`` for settings of experts without experts, and for ZeRO where a part of a whole model stays frozen."""
    if not shape.num_experts and (named := [name for name in EXPERT_SETTINGS if name in plan.requested]):
        raise bad_setting(named[0], f"{named[0]} has no effect: {plan.model.id} has no experts; leave it out")
    frozen = shape.other_parameters or (shape.num_experts and not (plan.value("train_experts") and plan.value("train_router")))
    if plan.adapter == "full" and frozen and str(plan.strategy).startswith("zero"):
        raise InvalidRequest(
            f"strategy {plan.strategy} saves only models whose parameters are all trained, and parts of {plan.model.id} stay frozen; use "
            "fsdp2, or leave strategy out",
            code="invalid_hardware",
            param="hardware.strategy",
        )


def of_job(platform: Platform, job: Job, model: BaseModel) -> Placed:
    """The same for a stored job, whose hyperparameters include those of a warm start."""
    request = JobRequest.from_body(job.request) if job.request else JobRequest(model=job.model, training_file=job.training_file)
    asked = replace(request, method=job.method, hyperparameters=job.hyperparameters)
    return placed(platform, asked, model, tier=job.tier, chosen=job.recipe)


def pool_for(pools: Sequence[Pool], tier: str, kind: str) -> Pool:
    """Return the pool whose limits apply to jobs of `tier` and class `kind`; pools of one class have one type of GPU."""
    found = most_capable(pools, tier, kind)
    if found is not None:
        return found
    if pools_taking(pools, kind):
        message = (
            f"every GPU that takes {CLASS_WORDS[kind]} is reserved for tier {RESERVED_FOR}; submit with tier "
            f"{RESERVED_FOR}, or ask your operator"
        )
    else:
        others = [CLASS_WORDS[k] for k in JOB_CLASSES if pools_taking(pools, k)]
        message = f"no pool of this platform takes {CLASS_WORDS[kind]}; they take {', '.join(others)}: choose one, or ask your operator"
    raise InvalidRequest(message, code="no_pool", param="model")


def evaluation_gpus(pools: Sequence[Pool], model: BaseModel, *, adapter: str, rank: int, tier: str, replicas: int) -> int:
    """Return how many GPUs of one node an evaluation holds: for each of `replicas` the fewest that the whole base in bf16 fits on.

    ``InvalidRequest`` if no node gives as many to a job: every adapter is evaluated before it can be served.
    """
    kind = evaluation_class(pools, job_class(adapter, model.num_parameters))
    gpu = GPUS[pool_for(pools, tier, kind).gpu_type]
    shape = shape_of(model)
    needed = 1 if gpu.is_cpu else forward_pass_gpus(shape, gpu.memory_bytes, rank=rank)
    able = pools_in_order(pools, tier=tier, kind=kind, num_gpus=1)
    most = max(min(pool.widest(tier), max(node.num_gpus for node in pool.nodes)) for pool in able)
    if needed is not None and needed * replicas <= most:
        return needed * replicas
    if needed is not None and needed <= most:
        raise InvalidRequest(
            f"eval_config.replicas {replicas} needs {needed * replicas} x {gpu.name} of one node ({needed} for each copy of {model.id}), "
            f"but a job of tier {tier} gets at most {most} on a node; set it to {most // needed} at most",
            code="invalid_eval_config",
            param="eval_config.replicas",
        )
    raise InvalidRequest(
        f"the evaluation after the training loads all of {model.id} in bf16 ({2 * shape.num_parameters / GIB:.0f} GiB) on GPUs of one node "
        f"and needs {needed or 'more than ' + str(shape.num_layers)} x {gpu.name}, but a job of tier {tier} gets at most {most} on a node; "
        "choose a smaller base model, or ask your operator for larger GPUs or nodes",
        code="memory_exceeded",
        param="model",
    )


def likely_pool(
    platform: Platform, request: JobRequest, model: BaseModel, *, tier: str, num_gpus: int, expected_s: float, spot: bool
) -> Pool:
    """Return the pool where a job most likely runs, whose price an estimate uses: the first in the policy's order that can hold it."""
    kind, all_pools = job_class(request.adapter, model.num_parameters), configured_pools.planned(platform)
    spot = may_use_spot(spot=spot, tier=tier, expected_s=expected_s)
    found = pools_in_order(all_pools, tier=tier, kind=kind, num_gpus=num_gpus, spot=spot)
    return found[0] if found else pool_for(all_pools, tier, kind)


def evaluation_pool(platform: Platform, model: BaseModel, *, adapter: str, tier: str, num_gpus: int) -> Pool:
    """Return the pool where the evaluation after a training most likely runs; never a spot pool."""
    all_pools = configured_pools.planned(platform)
    kind = evaluation_class(all_pools, job_class(adapter, model.num_parameters))
    found = pools_in_order(all_pools, tier=tier, kind=kind, num_gpus=num_gpus)
    return found[0] if found else pool_for(all_pools, tier, kind)


def _check_width(plan: Plan, pool: Pool, tier: str) -> None:
    widest = pool.widest(tier)
    for name, asked in (("num_gpus", plan.num_gpus), ("context_parallel", plan.context_parallel)):
        if asked is None or asked <= widest:
            continue
        kept = f" of tier {tier} ({pool.reserved_gpus} of its {pool.total_gpus} are kept for {RESERVED_FOR})"
        raise InvalidRequest(
            f"hardware.{name} {asked} exceeds the {widest} that pool {pool.name} gives to a job"
            f"{kept if widest < pool.max_gpus_per_job else ''}; ask for fewer, or leave it out",
            code="invalid_hardware",
            param=f"hardware.{name}",
        )


def shape_of(model: BaseModel) -> ModelShape:
    """Return the model's shape; ``InvalidRequest`` if its sizes are not known."""
    try:
        return known_shape(model.id, directory=model.directory, repo=model.repo, num_parameters=model.num_parameters)
    except ValueError as e:
        raise InvalidRequest(f"base model {model.id} cannot be trained here: {e}", code="unsupported_model", param="model") from e


def fit_on(pool: Pool, plan: Plan, shape: ModelShape, *, tier: str = RESERVED_FOR) -> Fit:
    """Fit the plan into a GPU of `pool`; requested GPUs, strategy and micro-batch are kept or refused.

    On a GPU activations are recomputed only if they would not fit: it costs a third of the speed (benchmarks/gpu_h200_202611.json).
    """
    _check_width(plan, pool, tier)
    asked = plan.requested.get("per_device_batch_size")
    on_cpu = GPUS[pool.gpu_type].is_cpu
    case = Case(
        shape=shape,
        method=plan.method,
        adapter=plan.adapter,
        precision=plan.precision,
        max_seq_len=plan.max_seq_len,
        rank=_rank(plan),
        dropout=plan.lora.dropout if plan.lora else 0.0,
        use_dora=plan.lora is not None and plan.lora.use_dora,
        keeps_whole=plan.lora is not None and plan.lora.reads_weights,
        optimizer=plan.optimizer,
        attention=plan.attention,
        quantization=plan.quantization or Quantization(),
        train_experts=plan.value("train_experts"),
        train_router=plan.value("train_router"),
        per_device_batch_size=int(asked or plan.value("per_device_batch_size")) if asked or on_cpu else 1,
        gradient_checkpointing=plan.gradient_checkpointing if on_cpu else bool(plan.requested.get("gradient_checkpointing")),
    )
    found = Placement(
        gpu=GPUS[pool.gpu_type],
        max_gpus=pool.widest(tier),
        global_batch=global_batch_size(plan),
        num_gpus=plan.num_gpus,
        strategy=plan.strategy,
        context_sizes=context_sizes(plan, shape, gpus_of_node=max(node.num_gpus for node in pool.nodes)),
        fixed_batch=bool(asked) or on_cpu,
        fixed_checkpointing="gradient_checkpointing" in plan.requested,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if on_cpu else 0,
        micro_batch_s=lambda tried: micro_batch_s(tried, pool.gpu_type, tokens=tried.tokens),
    ).fit(case)
    check_placement(strategy=found.strategy, optimizer=plan.optimizer, precision=plan.precision, requested=plan.requested)
    return found


def _rank(plan: Plan) -> int:
    """Return the rank of the finished adapter; 0 for full parameters."""
    return plan.lora.saved_rank if plan.lora else 0


def context_sizes(plan: Plan, shape: ModelShape, *, gpus_of_node: int) -> tuple[int, ...]:
    """Return the numbers of GPUs that may share a window: all that the model allows, or the requested one, ``InvalidRequest`` if it does
    not."""
    on_cpu = plan.device.capability is None
    against = {n: context_objection(shape, n, kernel=plan.attention, on_cpu=on_cpu) for n in CONTEXT_SIZES if n > 1}
    against |= {n: f"a node of the pool has {gpus_of_node} GPUs" for n in against if n > gpus_of_node}
    if (asked := plan.context_parallel) is not None:
        if why := against.get(asked):
            raise InvalidRequest(
                f"hardware.context_parallel {asked}: windows of {plan.model.id} cannot be split over {asked} GPUs: {why}; leave "
                "context_parallel out, or lower max_seq_len",
                code="invalid_hardware",
                param="hardware.context_parallel",
            )
        return (asked,)
    noise, router = plan.value("neftune_noise_alpha") > 0, bool(plan.value("train_router"))
    if on_cpu or any(splitting_objections(method=plan.method, train_router=router, noise=noise)):
        return (1,)
    return (1, *(n for n, why in against.items() if why is None))
