"""Turns a request into a frozen training spec, with a source for every value that it left out.

Two steps, because the pack is cut to the sequence length and the batch depends on the number of rows::

    plan(request, model)          ->  Plan (recipe, max_seq_len, precision)    before packing
    resolve(plan, pack, fit ...)  ->  TrainingSpec                             after packing

Every value may be ``"auto"`` or absent: the recipe decides. Requests that cannot be trained are refused here, before any GPU is used. The
number of GPUs, the strategy and the micro-batch come from the memory estimate, through the arguments of :func:`resolve`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from core.base_models import MAX_RANK
from core.errors import InvalidRequest
from engine.training import methods, schedules
from engine.training.model_shapes.attention_kernels import AttentionNeeds, Device, Kernel, choose, objection
from engine.training.recipes import AdapterKind, Default, Recipe, select_recipe
from engine.training.requested_hyperparameters import (
    HYPERPARAMETER_LIMITS,
    SPLITS_WEIGHTS,
    Combination,
    bad_setting,
    check_combination,
    check_placement,
    checked_hardware,
    checked_hyperparameters,
)
from engine.training.spec import (
    CheckpointPolicy,
    EarlyStopping,
    LoraSettings,
    Optimization,
    Quantization,
    Source,
    Strategy,
    TrainingSpec,
    WarmStart,
)

Precision = Literal["fp32", "bf16", "fp16"]
CPU, PLAIN = Device(), AttentionNeeds(head_dim=128)
LEAST_TOKENS = 2
"""Of any example: one and the end of its turn or text. So many examples make enough windows whatever they hold."""
OF_EVERY_RECIPE: Mapping[str, Default] = {
    "min_lr_ratio": Default(value=0.0, source="the schedules of transformers end at 0"),
    "schedule_decay_ratio": Default(value=0.2, source="Haegele et al. 2024, section 3: a fall over 20 % of the steps matches cosine"),
    "schedule_decay_shape": Default(value="1-sqrt", source="Haegele et al. 2024, section 3: ends lower than a linear fall"),
    "schedule_cycles": Default(value=2, source="the fewest that restart"),
    "schedule_power": Default(value=1.0, source="transformers and BERT: a power of 1 is linear"),
    "layer_lr_decay": Default(value=1.0, source="one rate for all blocks, as every recipe's source trains"),
    "adam_beta1": Default(value=0.9, source="AdamW paper; PyTorch's default"),
    "adam_epsilon": Default(value=1e-8, source="AdamW paper; PyTorch's default"),
    "neftune_noise_alpha": Default(value=0.0, source="off: the NEFTune paper's gain (5, 10 or 15) is in longer answers, not in knowledge"),
    "use_rslora": Default(value=False, source="the recipes' alpha is for alpha / rank"),
    "use_dora": Default(value=False, source="vLLM serves no DoRA adapters"),
    "loraplus_lr_ratio": Default(value=1.0, source="off: the LoRA+ paper's ratio (2 to 16) needs a rate of its own"),
    "train_experts": Default(value=True, source="adapter full trains every parameter; without experts it needs a fraction of the memory"),
    "train_router": Default(value=False, source="Unsloth's guide to Qwen3: fine-tuning the router of a mixture is off by default"),
}
"""Defaults of what no recipe sets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Properties of a base model from the catalogue."""

    id: str
    num_parameters: int
    context_length: int
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PackFacts:
    """Result of packing; the pack's ``manifest.json`` has all of it. Of a mixture: its first pack, and counts of what an epoch reads."""

    fingerprint: str
    dataset_id: str
    num_examples: int
    num_windows: int
    """Rows of the pack: windows, pairs or judged answers."""
    num_tokens: int
    max_seq_len: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything decided before packing."""

    recipe: Recipe
    model: ModelFacts
    method: str
    adapter: AdapterKind
    requested: Mapping[str, Any]
    """Validated hyperparameters that the request set, without ``auto`` ones."""
    max_seq_len: int
    precision: Precision
    num_gpus: int | None = None
    """As requested, or by its recipe; None: the memory estimate decides."""
    strategy: Strategy | None = None
    """As requested; None: the memory estimate decides."""
    context_parallel: int | None = None
    """As requested: ranks that share each window; None: the memory estimate decides."""
    method_settings: Mapping[str, float | int | str] = field(default_factory=dict)
    device: Device = CPU
    """The GPU of the job's pool."""
    needs: AttentionNeeds = PLAIN
    """What the model computes in its attention."""

    def value(self, name: str) -> Any:
        """As requested, else the recipe's value for this method, or that of every recipe."""
        if name in self.requested:
            return self.requested[name]
        return OF_EVERY_RECIPE[name].value if name in OF_EVERY_RECIPE else self.recipe.value(name, method=self.method)

    @property
    def attention(self) -> Kernel:
        """The kernel for what the request, else the recipe, says, on the GPU of the pool; ``auto`` prefers flash attention."""
        packed = methods.method_named(self.method).pack == "windows"
        return choose(str(self.value("attention")), self.needs, self.device, precision=self.precision, packed=packed).kernel

    @property
    def schedule(self) -> schedules.ScheduleName | schedules.Points:
        return cast(schedules.ScheduleName | schedules.Points, HYPERPARAMETER_LIMITS["schedule"].plain(self.value("schedule")))

    @property
    def optimizer(self) -> str:
        return str(self.value("optimizer"))

    @property
    def lora(self) -> LoraSettings | None:
        """None for full parameters."""
        if self.adapter == "full":
            return None
        rank = int(self.value("rank"))
        return LoraSettings(
            rank=rank,
            alpha=float(self.requested.get("alpha", rank * float(self.recipe.value("alpha_over_rank", method=self.method)))),
            dropout=float(self.value("dropout")),
            target_modules=self.value("target_modules"),
            use_rslora=self.value("use_rslora"),
            use_dora=self.value("use_dora"),
            init_lora_weights=self.requested.get("init_lora_weights"),
        )

    @property
    def quantization(self) -> Quantization | None:
        if self.adapter != "qlora":
            return None
        return Quantization(kind=self.value("quantization"), double=bool(self.value("double_quantization")))

    @property
    def gradient_checkpointing(self) -> bool:
        """As requested, else by the recipe's threshold; the memory estimate may still enable it if the request left it open."""
        return bool(self.requested.get("gradient_checkpointing", self.max_seq_len > self.value("gradient_checkpointing_above")))


def plan(
    requested: Mapping[str, Any],
    model: ModelFacts,
    *,
    method: str = "sft",
    adapter: AdapterKind = "lora",
    recipe: str | None = None,
    known: Mapping[str, Recipe] | None = None,
    hardware: Mapping[str, Any] | None = None,
    device: Device = CPU,
    needs: AttentionNeeds = PLAIN,
    max_rank: int = MAX_RANK,
) -> Plan:
    """Validates `requested` and fixes what packing needs. Raises ``InvalidRequest`` (``invalid_hyperparameter``) naming the value.

    `known`: recipes to choose from, by default those that ship. `device`: the GPU of the job's pool. `needs`: what the model computes in
    its attention. `max_rank`: highest rank that the servers load.
    """
    chosen = select_recipe(model.id, adapter=adapter, num_parameters=model.num_parameters, name=recipe, known=known)
    values, gpus = checked_hyperparameters(requested, method=method), checked_hardware(hardware)
    if (default := chosen.value("num_gpus", method=method)) != "auto":
        gpus.setdefault("num_gpus", int(default))
    precision = _precision(values, chosen, adapter=adapter, method=method, has_bf16=device.has_bf16)
    if "init_lora_weights" in values and adapter != "full":  # PEFT's guide to PiSSA: both would work on the base's own singular values
        values = {"dropout": 0.0, "weight_decay": 0.0} | values
    found = Plan(
        recipe=chosen,
        model=model,
        method=method,
        adapter=adapter,
        requested=values,
        max_seq_len=_max_seq_len(values, chosen, model, method=method),
        precision=precision,
        num_gpus=gpus.get("num_gpus"),
        strategy=gpus.get("strategy"),
        context_parallel=gpus.get("context_parallel"),
        method_settings=_method_settings(values, chosen, method),
        device=device,
        needs=needs,
    )
    check_combination(_combination(found, gpus, max_rank))
    if (attention := values.get("attention", "sdpa")) != "sdpa":
        packed = methods.method_named(method).pack == "windows"
        if against := objection(attention, needs, device, precision=precision, packed=packed):
            raise bad_setting("attention", f"{attention} {against}; use sdpa, or leave attention out")
    return found


def _combination(found: Plan, hardware: Mapping[str, Any], max_rank: int) -> Combination:
    lora = {} if found.lora is None else {"rank": found.lora.rank, "alpha": found.lora.alpha}
    return Combination(
        method=found.method,
        adapter=found.adapter,
        precision=found.precision,
        requested=found.requested,
        hardware=hardware,
        settings={
            "optimizer": found.optimizer,
            "schedule": found.schedule,
            **{name: found.value(name) for name in ("warmup_ratio", "schedule_decay_ratio")},
            **lora,
        },
        max_rank=max_rank,
    )


def global_batch_size(plan: Plan, *, num_rows: int | None = None, num_epochs: float = 1.0, world_size: int = 1) -> int:
    """Returns the rows per optimizer step over all ranks: exactly as requested, or the recipe's.

    The recipe's value is lowered if it makes too few steps of `num_rows`, and always divides over ranks and micro-batches.
    """
    asked = plan.requested.get("batch_size")
    if asked is not None:
        if asked % world_size:
            raise bad_setting("batch_size", f"batch_size {asked} is not divisible by {world_size} ranks; use a multiple of {world_size}")
        return int(asked)
    wanted = int(plan.value("batch_size"))
    if num_rows is not None:
        wanted = min(wanted, max(int(num_rows * num_epochs) // int(plan.value("min_steps")), 1))
    unit = world_size * int(plan.requested.get("per_device_batch_size", 1))
    return max(wanted // unit, 1) * unit


def num_epochs(plan: Plan, num_examples: int) -> float:
    """As requested, else the recipe's; 1 for a large dataset."""
    large = num_examples > int(plan.value("large_dataset_rows"))
    default = float(plan.value("n_epochs"))
    return float(plan.requested.get("n_epochs", min(default, float(plan.value("large_dataset_epochs"))) if large else default))


def packs_windows(plan: Plan) -> bool:
    """Returns whether examples share windows."""
    return methods.method_named(plan.method).pack == "windows" and bool(plan.requested.get("packing", True))


def min_windows(plan: Plan, *, num_examples: int, data_ranks: int = 1) -> int:
    """Returns the fewest windows with which the smallest batch makes the recipe's ``min_steps`` in an epoch, or in the part of one that the
    plan trains; 0 if any number does.

    Independent of the number of whole epochs, so that trials with more of them share the pack: the default batch is then larger
    (:func:`global_batch_size`), for as many tokens per step as with fewer long windows. A requested batch stays.
    """
    if "max_steps" in plan.requested or not packs_windows(plan):
        return 0
    smallest = int(plan.requested.get("batch_size", data_ranks * int(plan.requested.get("per_device_batch_size", 1))))
    wanted = math.ceil(int(plan.value("min_steps")) * smallest / min(1.0, num_epochs(plan, num_examples)) - 1e-9)
    return 0 if num_examples * LEAST_TOKENS >= plan.max_seq_len * wanted else wanted


def resolve(
    plan: Plan,
    pack: PackFacts,
    *,
    seed: int,
    lock_sha256: str,
    commit: str,
    image: str = "local",
    world_size: int = 1,
    strategy: Strategy | None = None,
    context_parallel: int = 1,
    per_device_batch_size: int | None = None,
    gradient_checkpointing: bool | None = None,
    reference: str | None = None,
    warm_start: WarmStart | None = None,
    sources: tuple[Source, ...] = (),
) -> TrainingSpec:
    """Returns the frozen spec. Pure: the same arguments give the same digest.

    `per_device_batch_size` is how many rows fit on a GPU (None: the recipe's value); the global batch stays exact whatever fits. The spec's
    `max_seq_len` is the pack's, whose rows may be shorter than the plan allows.
    """
    if pack.max_seq_len > plan.max_seq_len:
        raise ValueError(f"pack {pack.fingerprint} has windows of {pack.max_seq_len} tokens, the plan allows {plan.max_seq_len}")
    plan = replace(plan, max_seq_len=pack.max_seq_len)
    data_ranks = world_size // context_parallel
    optimization = _optimization(plan, pack, world_size=data_ranks, fits=per_device_batch_size)
    steps = optimization.total_steps(num_rows=pack.num_windows, world_size=data_ranks)
    asked = plan.requested.get("gradient_checkpointing")
    return TrainingSpec(
        method=plan.method,
        method_settings=plan.method_settings,
        adapter=plan.adapter,
        base_model=plan.model.id,
        base_digest=plan.model.digest,
        pack_fingerprint=pack.fingerprint,
        dataset_id=pack.dataset_id,
        reference=reference,
        warm_start=warm_start,
        max_seq_len=plan.max_seq_len,
        optimization=optimization,
        lora=plan.lora,
        quantization=plan.quantization,
        checkpoint=CheckpointPolicy(every_steps=int(plan.requested.get("checkpoint_every_steps", default_cadence(steps)))),
        train_experts=plan.value("train_experts"),
        train_router=plan.value("train_router"),
        precision=plan.precision,
        attention=plan.attention,
        gradient_checkpointing=plan.gradient_checkpointing
        if asked is not None or gradient_checkpointing is None
        else gradient_checkpointing,
        strategy=_strategy(plan, strategy, world_size),
        world_size=world_size,
        context_parallel=context_parallel,
        seed=seed,
        recipe=plan.recipe.label,
        lock_sha256=lock_sha256,
        commit=commit,
        image=image,
        sources=sources,
    )


def default_cadence(steps: int) -> int:
    """Returns the steps between checkpoints: about ten in a short run, at most 500, at least 10."""
    return min(max(steps // 10, 10), 500)


def _precision(values: Mapping[str, Any], recipe: Recipe, *, adapter: AdapterKind, method: str, has_bf16: bool) -> Precision:
    """As requested, else the recipe's; without bfloat16, fp16 with loss scaling, and fp32 for full parameters."""
    asked = values.get("precision")
    if asked == "bf16" and not has_bf16:
        raise bad_setting("precision", "bf16 is not supported by these GPUs (older than Ampere); use fp16, or leave precision out")
    default = recipe.value("precision", method=method)
    if default == "bf16" and not has_bf16:
        default = "fp32" if adapter == "full" else "fp16"
    return cast(Precision, asked or default)


def _max_seq_len(values: Mapping[str, Any], recipe: Recipe, model: ModelFacts, *, method: str) -> int:
    asked = int(values.get("max_seq_len", min(int(recipe.value("max_seq_len", method=method)), model.context_length)))
    if asked > model.context_length:
        raise bad_setting(
            "max_seq_len",
            f"max_seq_len {asked} exceeds the {model.context_length} that {model.id} can take; "
            "lower max_seq_len, or choose a base model whose config.json has or scales more positions",
        )
    return asked


def _method_settings(values: Mapping[str, Any], recipe: Recipe, method: str) -> dict[str, float | int | str]:
    """Returns all settings of the method in canonical order and form."""
    own = methods.method_named(method).settings
    found = {name: own[name].limit.plain(values.get(name, recipe.setting(method, name).value)) for name in sorted(own)}
    for name, setting in own.items():
        other, words = setting.only_with or ("", ())
        if other and found[name] != setting.default and found[other] not in words:
            raise bad_setting(
                name, f"{name} {found[name]} has no effect with {other} {found[other]}; use {' or '.join(words)}, or leave {name} out"
            )
    return found


def _optimization(plan: Plan, pack: PackFacts, *, world_size: int, fits: int | None) -> Optimization:
    epochs = num_epochs(plan, pack.num_examples)
    batch = global_batch_size(plan, num_rows=pack.num_windows, num_epochs=epochs, world_size=world_size)
    per_device = _per_device_batch_size(plan, batch // world_size, fits)
    rate = float(plan.recipe.learning_rate(plan.method).value) * float(plan.requested.get("learning_rate_multiplier", 1))
    return Optimization(
        learning_rate=float(plan.requested.get("learning_rate", rate)),
        num_epochs=epochs,
        per_device_batch_size=per_device,
        accumulation_steps=batch // world_size // per_device,
        schedule=plan.schedule,
        warmup_ratio=0.0 if isinstance(plan.schedule, tuple) else float(plan.value("warmup_ratio")),
        weight_decay=float(plan.value("weight_decay")),
        max_grad_norm=float(plan.value("max_grad_norm")),
        min_lr_ratio=float(plan.value("min_lr_ratio")),
        adam_betas=(float(plan.value("adam_beta1")), float(plan.value("adam_beta2"))),
        adam_epsilon=float(plan.value("adam_epsilon")),
        optimizer=plan.optimizer,
        loraplus_lr_ratio=float(plan.value("loraplus_lr_ratio")),
        layer_lr_decay=float(plan.value("layer_lr_decay")),
        neftune_noise_alpha=float(plan.value("neftune_noise_alpha")),
        max_steps=plan.requested.get("max_steps"),
        **_schedule_options(plan),
        early_stopping=_early_stopping(plan.requested),
    )


def _schedule_options(plan: Plan) -> dict[str, Any]:
    """Returns the options that the schedule reads, as requested or by default."""
    own = {name for name, readers in schedules.OPTIONS.items() if name.startswith("schedule_") and plan.schedule in readers}
    return {name: plan.value(name) for name in sorted(own) if name in plan.requested or name in OF_EVERY_RECIPE}


def _early_stopping(requested: Mapping[str, Any]) -> EarlyStopping | None:
    if (patience := requested.get("early_stopping_patience")) is None:
        return None
    return EarlyStopping(patience=patience, min_delta=float(requested.get("early_stopping_min_delta", 0.0)))


def _per_device_batch_size(plan: Plan, batch: int, fits: int | None) -> int:
    """Returns the rows of a micro-batch: the largest divisor of a rank's `batch` that fits, so that all micro-batches of a step are
    equal."""
    asked = plan.requested.get("per_device_batch_size")
    limit = int(asked or fits or plan.value("per_device_batch_size"))
    if fits is not None and limit > fits:
        raise bad_setting(
            "per_device_batch_size",
            f"per_device_batch_size {limit} does not fit: the memory estimate allows {fits}; lower it, or leave it out",
        )
    if asked and batch % asked:
        raise bad_setting(
            "per_device_batch_size", f"per_device_batch_size {asked} does not divide the {batch} rows of a rank's step; use a divisor of it"
        )
    return max(n for n in range(1, min(limit, batch) + 1) if batch % n == 0)


def _strategy(plan: Plan, fitted: Strategy | None, world_size: int) -> Strategy:
    """As requested, else as fitted; 4-bit weights cannot be sharded, so strategies that would shard them shard only gradients and
    states."""
    chosen = plan.strategy or fitted or ("single" if world_size == 1 else "ddp")
    if (chosen == "single") != (world_size == 1):
        raise InvalidRequest(
            f"strategy {chosen} is not valid for {world_size} GPU(s); leave hardware.strategy out, or change hardware.num_gpus",
            code="invalid_hardware",
            param="hardware.strategy",
        )
    if plan.adapter == "qlora" and chosen in SPLITS_WEIGHTS:
        chosen = "zero2"
    check_placement(strategy=chosen, optimizer=plan.optimizer, precision=plan.precision, requested=plan.requested)
    return chosen
