"""Hyperparameters that a request may set, with their limits; refusals name value, limit and next step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from core.base_models import ENGINE_RANKS, MAX_RANK
from core.errors import InvalidRequest, did_you_mean
from engine.training import methods, schedules
from engine.training.methods import Limit
from engine.training.model_shapes import context_split

PISSA = ("pissa", "pissa_niter_4", "pissa_niter_8", "pissa_niter_16", "pissa_niter_32")
"""Initializations of an adapter by the largest singular values of each weight: exactly, or by so many subspace iterations."""
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj")
"""Linear layers of a block that the servers can adapt; the last two are those of Phi-4. Which of them a model has: ``adapter_modules``."""
GPU_COUNTS = (1, 2, 4, 8, 16, 32)

HYPERPARAMETER_LIMITS: Mapping[str, Limit] = {
    "n_epochs": Limit(kind="float", low=0, high=100, above_low=True),
    "batch_size": Limit(kind="int", low=1, high=4096, because="rows (packed windows, pairs, answers) in an optimizer step"),
    "learning_rate_multiplier": Limit(kind="float", low=0, high=100, above_low=True, because="it multiplies the recipe's rate"),
    "learning_rate": Limit(kind="float", low=0, high=1, above_low=True),
    "rank": Limit(kind="int", allowed=ENGINE_RANKS, because="the inference servers load no other ranks"),
    "alpha": Limit(kind="float", low=0, high=4096, above_low=True),
    "dropout": Limit(kind="float", low=0, high=0.9),
    "target_modules": Limit(kind="modules", words=MODULES, because="the inference servers adapt only these layers, not lm_head"),
    "use_rslora": Limit(kind="flag"),
    "use_dora": Limit(kind="flag"),
    "init_lora_weights": Limit(kind="word", words=PISSA, because="other initializations change nothing, or cannot be served"),
    "loraplus_lr_ratio": Limit(
        kind="float", low=1, high=1000, because="the rate of the B matrices as a multiple of that of the A matrices"
    ),
    "max_seq_len": Limit(kind="int", low=64),
    "max_steps": Limit(kind="int", low=1, high=10_000_000),
    "schedule": Limit(kind="schedule", words=schedules.NAMES, aliases=schedules.ALIASES),
    "schedule_decay_ratio": Limit(kind="float", low=0, high=1, above_low=True, because="the share of the steps over which wsd falls"),
    "schedule_decay_shape": Limit(kind="word", words=schedules.DECAY_SHAPES),
    "schedule_cycles": Limit(kind="int", low=2, high=100, because="once is schedule cosine"),
    "schedule_power": Limit(kind="float", low=0, high=10, above_low=True),
    "schedule_timescale": Limit(kind="int", low=1, high=10_000_000, because="steps after which inverse_sqrt begins to fall"),
    "warmup_ratio": Limit(kind="float", low=0, high=0.5),
    "min_lr_ratio": Limit(kind="float", low=0, high=1, because="the rate at the end as a share of learning_rate"),
    "layer_lr_decay": Limit(kind="float", low=0.5, high=1, because="it multiplies the rate once per block, from the last one down"),
    "weight_decay": Limit(kind="float", low=0, high=1),
    "max_grad_norm": Limit(kind="float", low=0, high=1000, above_low=True),
    "adam_beta1": Limit(kind="float", low=0, high=0.999),
    "adam_beta2": Limit(kind="float", low=0.5, high=0.9999),
    "adam_epsilon": Limit(kind="float", low=0, high=0.001, above_low=True),
    "neftune_noise_alpha": Limit(kind="float", low=0, high=100),
    "optimizer": Limit(kind="word", words=("adamw_torch", "adamw_8bit", "adafactor")),
    "per_device_batch_size": Limit(kind="int", low=1, high=1024, because="rows in a micro-batch of one GPU; batch_size does not change"),
    "gradient_checkpointing": Limit(kind="flag"),
    "early_stopping_patience": Limit(kind="int", low=1, high=1000, because="validations in a row without improvement"),
    "early_stopping_min_delta": Limit(kind="float", low=0, high=100),
    "checkpoint_every_steps": Limit(kind="int", low=1, high=500, because="a kill must not cost more than 500 steps"),
    "precision": Limit(kind="word", words=("fp32", "bf16", "fp16")),
    "attention": Limit(kind="word", words=("sdpa", "flash_attention_2", "flex_attention")),
    "quantization": Limit(kind="word", words=("nf4", "fp4")),
    "double_quantization": Limit(kind="flag"),
    "train_experts": Limit(kind="flag"),
    "train_router": Limit(kind="flag"),
    "train_on_inputs": Limit(kind="flag"),
    "packing": Limit(kind="flag"),
    "safety_share": Limit(kind="float", low=0, high=0.5, because="a few percent of safety examples preserve the base model's refusals"),
}
"""Settings of every method; each method adds its own."""
HARDWARE_LIMITS: Mapping[str, Limit] = {
    "num_gpus": Limit(kind="int", allowed=GPU_COUNTS, because="whole nodes, or parts of one that divide it"),
    "strategy": Limit(kind="word", words=("single", "ddp", "fsdp2", "zero1", "zero2", "zero3")),
    "context_parallel": Limit(kind="int", allowed=context_split.CONTEXT_SIZES, because="GPUs of one node that share each window"),
}

PACK_SETTINGS = ("train_on_inputs", "packing", "safety_share")
"""Hyperparameters that determine the pack's content, by their names in ``PackSettings``."""
UNSERVABLE: Mapping[str, str] = {
    "modules_to_save": "modules that are trained whole cannot be served beside other adapters; use adapter full for a separate model",
    "bias": "trained biases cannot be served with an adapter; leave it out",
    "lora_bias": "biases on an adapter cannot be served; leave it out",
    "trainable_token_indices": "an adapter with rows of the embedding cannot be served beside others; use adapter full, which trains all",
    **dict.fromkeys(
        ("added_tokens", "add_tokens", "new_special_tokens", "resize_vocab"),
        "an adapter with new rows of the embedding cannot be served beside others, and a job keeps its base's tokenizer; write markers as "
        "text that the tokenizer has, or have an operator make a base model with the tokens (`ft admin models extend ID --base BASE "
        "--token TOKEN --path DIR`) and train that with adapter full",
    ),
}
"""Well-known options of the library that are not offered, with the reason."""


def checked_hyperparameters(requested: Mapping[str, Any], *, method: str = "sft") -> dict[str, Any]:
    """Returns `requested` without its ``auto`` entries, each value validated, including the settings of `method`."""
    own = {name: setting.limit for name, setting in methods.method_named(method).settings.items()}
    values: dict[str, Any] = {}
    for name, value in requested.items():
        limit = own.get(name) or HYPERPARAMETER_LIMITS.get(name)
        if limit is None:
            raise bad_setting(name, _unknown(name, method, own))
        if value is None or value == "auto":
            continue
        if (wrong := _wrong(limit, value)) is not None:
            raise bad_setting(name, f"{name} {wrong}; change it, or leave it out for the recipe's default{limit.suggestion(value)}")
        values[name] = limit.plain(value)
    if "learning_rate" in values and "learning_rate_multiplier" in values:
        raise bad_setting("learning_rate", "learning_rate and learning_rate_multiplier were both given; keep one of them")
    return values


def checked_hardware(asked: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the requested GPUs and strategy, validated; leaves ``auto`` and absent ones to the memory estimate."""
    values: dict[str, Any] = {}
    for name, value in (asked or {}).items():
        limit = HARDWARE_LIMITS.get(name)
        param = f"hardware.{name[:80]}"
        if limit is None:
            known = ", ".join(HARDWARE_LIMITS)
            hint = did_you_mean(name, HARDWARE_LIMITS)
            raise InvalidRequest(f"hardware {name[:80]!r} does not exist; known are {known}{hint}", code="unknown_parameter", param=param)
        if value is None or value == "auto":
            continue
        if (wrong := _wrong(limit, value)) is not None:
            raise _hardware_refusal(f"hardware.{name} {wrong}; change it, or leave it out{limit.suggestion(value)}", param=param)
        values[name] = limit.plain(value)
    return values


def _wrong(limit: Limit, value: Any) -> str | None:
    """Returns what is wrong with `value`; None if `limit` accepts it."""
    because = f" ({limit.because})" if limit.because else ""
    return None if limit.accepts(value) else f"{repr(value)[:80]} is not {limit.text}{because}"


def bad_setting(name: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_hyperparameter", param=f"hyperparameters.{name[:80]}")


def _unknown(name: str, method: str, own: Mapping[str, Limit]) -> str:
    if name in UNSERVABLE:
        return f"{name} is not offered: {UNSERVABLE[name]}"
    others = [m.name for m in methods.registered_methods().values() if name in m.settings]
    if others:
        return f"{name} is a setting of {', '.join(others)}, but the method is {method}; leave it out, or choose one of those methods"
    guess = did_you_mean(name, [*own, *HYPERPARAMETER_LIMITS])
    return f"hyperparameter {name[:80]!r} does not exist; GET /v1/fine_tuning/model_limits lists all{guess}"


EXPERT_SETTINGS = ("train_experts", "train_router")
LORA_SETTINGS = ("rank", "alpha", "dropout", "target_modules", "use_rslora", "use_dora", "init_lora_weights", "loraplus_lr_ratio")
ADAM_SETTINGS = ("adam_beta1", "adam_beta2", "adam_epsilon")
WHOLE_WEIGHTS = ("use_dora", "init_lora_weights")
"""Kinds of adapters that read whole weights of the base: norms of their rows, or their singular values."""
QUANTIZATION_SETTINGS = ("quantization", "double_quantization")
REPLICATES = frozenset(("single", "ddp"))
"""Strategies under which each rank holds everything; the others shard at least the optimizer states."""
SPLITS_WEIGHTS = frozenset(("zero3", "fsdp2"))
"""Strategies under which each rank holds only a part of the weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    method: str
    adapter: Literal["lora", "qlora", "full"]
    precision: str
    requested: Mapping[str, Any]
    hardware: Mapping[str, Any]
    settings: Mapping[str, Any]
    """Rank, alpha, optimizer, schedule and its shares, as requested or by default; neither rank nor alpha for ``full``."""
    max_rank: int = MAX_RANK
    """Highest rank that the servers load."""

    @property
    def pissa(self) -> bool:
        return "init_lora_weights" in self.requested


def check_combination(c: Combination) -> None:
    """Raises ``InvalidRequest`` for the first conflict, naming the field to change."""
    for rule in RULES:
        for objection in rule(c):
            raise objection


def check_placement(*, strategy: str, optimizer: str, precision: str, requested: Mapping[str, Any]) -> None:
    """The same check for a strategy that the memory estimate chose."""
    for objection in _sharding_rules(strategy, optimizer, precision, requested):
        raise objection


def _sharding_rules(strategy: str, optimizer: str, precision: str, requested: Mapping[str, Any]) -> Iterator[InvalidRequest]:
    """Settings that require every rank to hold everything. Adafactor: its rows and columns are sums over a whole matrix; 8-bit AdamW:
    its blocks cross the cuts; fp16: losses are scaled by all gradients, on each rank alone; DoRA and PiSSA: they read whole weights."""
    if strategy in REPLICATES or strategy == "None":
        return
    if optimizer != "adamw_torch":
        yield bad_setting(
            "optimizer",
            f"{optimizer} needs whole matrices on each GPU, but strategy {strategy} shards them; use adamw_torch, whose states "
            "can be sharded, or ddp",
        )
    if precision == "fp16":
        yield bad_setting(
            "precision", f"fp16 loss scaling does not support sharded gradients, which strategy {strategy} uses; use bf16, or ddp"
        )
    for name in WHOLE_WEIGHTS:
        if requested.get(name):
            yield bad_setting(
                name,
                f"{name} reads whole weights of the base on each GPU, but strategy {strategy} shards training; use ddp, or leave it out",
            )


def _adapter_rules(c: Combination) -> Iterator[InvalidRequest]:
    for name in LORA_SETTINGS:
        if name in c.requested and c.adapter == "full":
            yield bad_setting(name, f"{name} applies only to adapters, but adapter full trains every parameter; leave it out, or use lora")
    for name in EXPERT_SETTINGS:
        if c.requested.get(name) and c.adapter != "full":
            yield bad_setting(
                name, f"{name} applies to adapter full: adapters leave experts and routers as they are; leave it out, or use full"
            )
    if c.requested.get("train_router") and methods.method_named(c.method).pack != "windows":
        yield bad_setting(
            "train_router", f"method {c.method} computes no load-balancing loss for a trained router; leave it out, or use sft"
        )
    for name in QUANTIZATION_SETTINGS:
        if name in c.requested and c.adapter != "qlora":
            yield bad_setting(name, f"{name} applies to a base in 4 bits, and the adapter is {c.adapter}; use qlora, or leave it out")


def _rank_rules(c: Combination) -> Iterator[InvalidRequest]:
    """The finished adapter is one that the servers load. PiSSA's has twice the rank that is trained, and alpha grows with it."""
    if c.adapter == "full":
        return
    rank, servable = int(c.settings["rank"]), [r for r in ENGINE_RANKS if r <= c.max_rank]
    shown = ", ".join(map(str, servable))
    if not c.pissa and rank not in servable:
        yield bad_setting("rank", f"rank {rank} exceeds the {c.max_rank} that this deployment's servers load; use one of {shown}")
    if c.pissa and 2 * rank not in servable:
        fitting = ", ".join(str(r // 2) for r in servable if r % 2 == 0 and r // 2 in ENGINE_RANKS) or "none"
        yield bad_setting(
            "rank", f"rank {rank} with PiSSA ends as an adapter of rank {2 * rank}, and the servers load {shown}; use one of {fitting}"
        )
    if c.pissa and 2 * float(c.settings["alpha"]) > HYPERPARAMETER_LIMITS["alpha"].high:
        yield bad_setting(
            "alpha",
            f"alpha {c.settings['alpha']:g} doubles with PiSSA, beyond {HYPERPARAMETER_LIMITS['alpha'].high:g}; use at most half of that",
        )


def _pissa_rules(c: Combination) -> Iterator[InvalidRequest]:
    """PiSSA's matrices begin as a part of the base's weights: what works on them works on that part."""
    if not c.pissa:
        return
    for name, does in (("dropout", "would drop parts of"), ("weight_decay", "would shrink")):
        if c.requested.get(name):
            yield bad_setting(name, f"{name} {does} the base's largest singular values, which PiSSA trains; leave it out, or set it to 0")
    if c.requested.get("use_dora"):
        yield bad_setting(
            "use_dora", "use_dora and init_lora_weights cannot be combined: DoRA's adapters are no plain LoRA; leave one of them out"
        )
    if c.settings["optimizer"] == "adafactor":
        yield bad_setting(
            "optimizer",
            "adafactor scales updates by means over a whole matrix, half of which PiSSA keeps as it began; use adamw_torch or adamw_8bit",
        )


def _rate_rules(c: Combination) -> Iterator[InvalidRequest]:
    schedule = schedules.name_of(c.settings["schedule"])
    for name, readers in schedules.OPTIONS.items():
        if c.requested.get(name) and schedule not in readers:
            offered = " or ".join(readers) if len(readers) < len(schedules.NAMES) else "one that has a name"
            yield bad_setting(name, f"{name} has no effect with schedule {schedule}; use {offered}, or leave {name} out")
    warmup, decay = float(c.settings["warmup_ratio"]), float(c.settings["schedule_decay_ratio"])
    if schedule == "wsd" and warmup + decay > 1:
        yield bad_setting(
            "schedule_decay_ratio", f"schedule_decay_ratio {decay:g} and warmup_ratio {warmup:g} are more than the run; lower one of them"
        )
    for name in ADAM_SETTINGS:
        if name in c.requested and c.settings["optimizer"] == "adafactor":
            yield bad_setting(name, f"{name} has no effect with optimizer adafactor; leave it out, or use adamw_torch")
    if c.requested.get("neftune_noise_alpha") and methods.method_named(c.method).pack != "windows":
        yield bad_setting(
            "neftune_noise_alpha",
            f"method {c.method} compares probabilities of answers, which noise would change at random; leave it out, or use sft",
        )


def _precision_rules(c: Combination) -> Iterator[InvalidRequest]:
    if c.precision == "fp16" and c.adapter == "full":
        yield bad_setting(
            "precision",
            "fp16 with adapter full loses small updates, because 16-bit weights have no float32 master copies; "
            "use bf16 or fp32, or an adapter (lora, qlora), whose weights stay in float32",
        )


def _strategy_rules(c: Combination) -> Iterator[InvalidRequest]:
    strategy, num_gpus = c.hardware.get("strategy"), c.hardware.get("num_gpus")
    if strategy in SPLITS_WEIGHTS and c.adapter == "qlora":
        yield _hardware_refusal(
            f"strategy {strategy} shards weights, but 4-bit weights cannot be sharded; use zero2 (which shards gradients "
            "and optimizer states), leave strategy out, or use lora"
        )
    if strategy == "single" and (num_gpus or 1) > 1:
        yield _hardware_refusal(f"strategy single uses one GPU, but hardware.num_gpus is {num_gpus}; leave one of them out")
    if strategy not in (None, "single") and num_gpus == 1:
        yield _hardware_refusal(f"strategy {strategy} needs several GPUs, but hardware.num_gpus is 1; request 2 or more, or leave it out")
    yield from _sharding_rules(str(strategy), str(c.settings["optimizer"]), c.precision, c.requested)


def _context_rules(c: Combination) -> Iterator[InvalidRequest]:
    size, num_gpus, strategy = c.hardware.get("context_parallel", 1), c.hardware.get("num_gpus"), c.hardware.get("strategy")
    param = "hardware.context_parallel"
    if size == 1:
        return
    if num_gpus and num_gpus % size:
        yield _hardware_refusal(f"context_parallel {size} does not divide num_gpus {num_gpus}; use a multiple of {size} GPUs", param=param)
    if strategy not in (None, "ddp", "fsdp2"):
        yield _hardware_refusal(f"context_parallel {size} works with ddp and fsdp2, not {strategy}; leave strategy out", param=param)
    noise, router = bool(c.requested.get("neftune_noise_alpha")), bool(c.requested.get("train_router"))
    for objection in splitting_objections(method=c.method, train_router=router, noise=noise):
        yield _hardware_refusal(f"context_parallel {size} {objection}; leave context_parallel out", param=param)


def splitting_objections(*, method: str, train_router: bool, noise: bool) -> Iterator[str]:
    """Yields why a training cannot split its windows over ranks, whatever the model."""
    if methods.method_named(method).pack != "windows":
        yield f"splits packed windows, and method {method} trains on {methods.method_named(method).pack}"
    if train_router:
        yield "would balance the experts over parts of a window; a trained router needs it whole"
    if noise:
        yield "would draw the noise of neftune_noise_alpha for parts of an example; its strength follows from the whole one"


def _pack_rules(c: Combination) -> Iterator[InvalidRequest]:
    of = methods.method_named(c.method)
    for name in PACK_SETTINGS:
        if name in c.requested and of.pack != "windows":
            yield bad_setting(name, f"{name} applies only to packed conversations, but method {c.method} trains on {of.pack}; leave it out")
    if of.every_token and c.requested.get("train_on_inputs") is False:
        yield bad_setting("train_on_inputs", f"method {c.method} trains on every token; leave train_on_inputs out, or use method sft")


def _batch_rules(c: Combination) -> Iterator[InvalidRequest]:
    batch, per_device = c.requested.get("batch_size"), c.requested.get("per_device_batch_size")
    rows, shared = per_device or 1, c.hardware.get("context_parallel", 1)
    num_gpus = max(1, (c.hardware.get("num_gpus") or shared) // shared)
    if batch and batch % (num_gpus * rows):
        parts = [f"{num_gpus} ranks"] * (num_gpus > 1) + [f"micro-batches of {rows}"] * (rows > 1)
        yield bad_setting("batch_size", f"batch_size {batch} does not divide by {' x '.join(parts)}; use a multiple of {num_gpus * rows}")


def _stopping_rules(c: Combination) -> Iterator[InvalidRequest]:
    if "early_stopping_min_delta" in c.requested and "early_stopping_patience" not in c.requested:
        yield bad_setting("early_stopping_min_delta", "early_stopping_min_delta requires early_stopping_patience; set that too")


def _hardware_refusal(message: str, *, param: str = "hardware.strategy") -> InvalidRequest:
    return InvalidRequest(message, code="invalid_hardware", param=param)


RULES: tuple[Callable[[Combination], Iterator[InvalidRequest]], ...] = (
    _adapter_rules,
    _rank_rules,
    _pissa_rules,
    _rate_rules,
    _precision_rules,
    _strategy_rules,
    _context_rules,
    _pack_rules,
    _batch_rules,
    _stopping_rules,
)
