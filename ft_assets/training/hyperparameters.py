"""From what a request asks for to a frozen training spec, with a source for every number that it left out.

Two steps, because the pack is cut to the sequence length and the batch depends on how many windows came out::

    plan(request, model)  ->  Plan (recipe, max_seq_len)   before packing
    resolve(plan, pack)   ->  TrainingSpec                 after it

Every value may be ``"auto"`` or absent: the recipe decides. What cannot be trained is refused here, before any GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from ft_assets.errors import InvalidRequest
from ft_assets.training.recipes import Recipe, select
from ft_assets.training.spec import CheckpointPolicy, LoraSettings, Optimization, TrainingSpec

ENGINE_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM 0.33 can be started with (its ``MaxLoRARanks``)."""
MAX_RANK = 128
"""Highest rank that our servers are started with (``--max-lora-rank``)."""
SERVABLE_RANKS = tuple(r for r in ENGINE_RANKS if r <= MAX_RANK)
"""Ranks that our servers load: an adapter of another rank would train and then be quarantined."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What the catalogue says of a base model."""

    id: str
    num_parameters: int
    context_length: int
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PackFacts:
    """What packing found; ``manifest.json`` of the pack has all of it."""

    fingerprint: str
    dataset_id: str
    num_examples: int
    num_windows: int
    num_tokens: int
    max_seq_len: int

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> PackFacts:
        return cls(**{name: manifest[name] for name in cls.__slots__})


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What is known before packing."""

    recipe: Recipe
    model: ModelFacts
    method: str
    adapter: Literal["lora", "qlora", "full"]
    requested: Mapping[str, Any]
    """Hyperparameters that the request set, validated; ``auto`` ones are absent."""
    max_seq_len: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Limit:
    """What one hyperparameter may be."""

    kind: Literal["int", "float", "word", "flag"]
    low: float = -math.inf
    high: float = math.inf
    above_low: bool = False
    """The lower limit itself is refused."""
    words: tuple[str, ...] = ()
    allowed: tuple[int, ...] = ()
    because: str = ""

    @property
    def text(self) -> str:
        if self.words:
            return "one of " + ", ".join(self.words)
        if self.kind == "flag":
            return "true or false"
        if self.allowed:
            return "one of " + ", ".join(map(str, self.allowed))
        kind = "a whole number" if self.kind == "int" else "a number"
        low = f"above {self.low:g}" if self.above_low else f"at least {self.low:g}"
        return f"{kind} {low}" + (f" and at most {self.high:g}" if self.high < math.inf else "")

    def accepts(self, value: object) -> bool:
        if self.kind == "word":
            return value in self.words
        if self.kind == "flag":
            return isinstance(value, bool)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        if isinstance(value, float) and not math.isfinite(value):  # asked of a huge int, isfinite overflows
            return False
        if self.kind == "int" and value != int(value):
            return False
        above = value > self.low if self.above_low else value >= self.low
        return above and value <= self.high and (not self.allowed or int(value) in self.allowed)


LIMITS: Mapping[str, _Limit] = {
    "n_epochs": _Limit(kind="float", low=0, high=100, above_low=True),
    "batch_size": _Limit(kind="int", low=1, high=4096, because="packed windows in an optimizer step"),
    "learning_rate_multiplier": _Limit(kind="float", low=0, high=100, above_low=True, because="it multiplies the recipe's rate"),
    "learning_rate": _Limit(kind="float", low=0, high=1, above_low=True),
    "rank": _Limit(kind="int", allowed=SERVABLE_RANKS, because=f"the inference servers load no other rank, and none above {MAX_RANK}"),
    "alpha": _Limit(kind="float", low=0, high=4096, above_low=True),
    "dropout": _Limit(kind="float", low=0, high=0.9),
    "max_seq_len": _Limit(kind="int", low=64),
    "max_steps": _Limit(kind="int", low=1, high=10_000_000),
    "schedule": _Limit(kind="word", words=("linear", "cosine", "constant")),
    "warmup_ratio": _Limit(kind="float", low=0, high=0.5),
    "weight_decay": _Limit(kind="float", low=0, high=1),
    "checkpoint_every_steps": _Limit(kind="int", low=1, high=500, because="a kill may cost 500 steps at most"),
    "precision": _Limit(kind="word", words=("fp32", "bf16", "fp16")),
    "train_on_inputs": _Limit(kind="flag"),
    "packing": _Limit(kind="flag"),
    "safety_share": _Limit(kind="float", low=0, high=0.5, because="a few percent of safety-preserving examples keep what the base refuses"),
}


PACK_SETTINGS = ("train_on_inputs", "packing", "safety_share")
"""Hyperparameters that decide what the pack holds, under the names of ``PackSettings``."""


def plan(
    requested: Mapping[str, Any],
    model: ModelFacts,
    *,
    method: str = "sft",
    adapter: Literal["lora", "qlora", "full"] = "lora",
    recipe: str | None = None,
) -> Plan:
    """Validate `requested` and fix what packing needs. ``InvalidRequest`` (``invalid_hyperparameter``) names the value."""
    chosen = select(model.id, adapter=adapter, name=recipe)
    values = checked(requested)
    default = min(int(chosen.value("max_seq_len")), model.context_length)
    max_seq_len = int(values.get("max_seq_len", default))
    if max_seq_len > model.context_length:
        raise _refusal(
            "max_seq_len",
            f"max_seq_len {max_seq_len} exceeds the {model.context_length} that {model.id} can take; "
            "lower max_seq_len or choose another base model",
        )
    return Plan(recipe=chosen, model=model, method=method, adapter=adapter, requested=values, max_seq_len=max_seq_len)


def checked(requested: Mapping[str, Any]) -> dict[str, Any]:
    """`requested` without its ``auto`` entries, each value within its limits."""
    values: dict[str, Any] = {}
    for name, value in requested.items():
        limit = LIMITS.get(name)
        if limit is None:
            raise _refusal(name, f"hyperparameter {name!r} does not exist; known are {', '.join(LIMITS)}")
        if value is None or value == "auto":
            continue
        if not limit.accepts(value):
            because = f" ({limit.because})" if limit.because else ""
            raise _refusal(
                name, f"{name} {repr(value)[:80]} is not {limit.text}{because}; change it, or leave it out for the recipe's default"
            )
        values[name] = int(value) if limit.kind == "int" else value
    if "learning_rate" in values and "learning_rate_multiplier" in values:
        raise _refusal("learning_rate", "learning_rate and learning_rate_multiplier were both given; keep one of them")
    return values


def resolve(
    plan: Plan, pack: PackFacts, *, seed: int, lock_sha256: str, commit: str, image: str = "local", world_size: int = 1
) -> TrainingSpec:
    """The frozen spec. Pure: the same arguments give the same digest."""
    if pack.max_seq_len > plan.max_seq_len:
        raise ValueError(f"pack {pack.fingerprint} has windows of {pack.max_seq_len} tokens, the plan allows {plan.max_seq_len}")
    asked, recipe = plan.requested, plan.recipe
    rate = float(asked.get("learning_rate", recipe.value("learning_rate") * asked.get("learning_rate_multiplier", 1)))
    epochs = float(asked.get("n_epochs", _default_epochs(recipe, pack)))
    batch = _batch_size(plan, pack, epochs=epochs, world_size=world_size)
    per_device = _windows_per_device(int(recipe.value("windows_per_device")), batch // world_size)
    optimization = Optimization(
        learning_rate=rate,
        num_epochs=epochs,
        windows_per_device=per_device,
        accumulation_steps=batch // world_size // per_device,
        schedule=cast(Literal["linear", "cosine", "constant"], asked.get("schedule", recipe.value("schedule"))),
        warmup_ratio=float(asked.get("warmup_ratio", recipe.value("warmup_ratio"))),
        weight_decay=float(asked.get("weight_decay", recipe.value("weight_decay"))),
        adam_betas=(0.9, float(recipe.value("adam_beta2"))),
        max_steps=asked.get("max_steps"),
    )
    steps = optimization.total_steps(num_windows=pack.num_windows, world_size=world_size)
    return TrainingSpec(
        method=plan.method,
        adapter=plan.adapter,
        base_model=plan.model.id,
        base_digest=plan.model.digest,
        pack_fingerprint=pack.fingerprint,
        dataset_id=pack.dataset_id,
        max_seq_len=plan.max_seq_len,
        optimization=optimization,
        lora=None if plan.adapter == "full" else _lora(plan),
        checkpoint=CheckpointPolicy(every_steps=int(asked.get("checkpoint_every_steps", default_cadence(steps)))),
        precision=cast(Literal["fp32", "bf16", "fp16"], asked.get("precision", recipe.value("precision"))),
        gradient_checkpointing=plan.max_seq_len > int(recipe.value("gradient_checkpointing_above")),
        world_size=world_size,
        seed=seed,
        recipe=recipe.label,
        lock_sha256=lock_sha256,
        commit=commit,
        image=image,
    )


def default_cadence(steps: int) -> int:
    """Steps between checkpoints: about ten in a short run, never more than 500 apart (C7), never closer than 10."""
    return min(max(steps // 10, 10), 500)


def openai_hyperparameters(spec: TrainingSpec, recipe: Recipe) -> dict[str, int | float]:
    """The three numbers that OpenAI's job object shows, as they were resolved."""
    opt = spec.optimization
    epochs = int(opt.num_epochs) if opt.num_epochs == int(opt.num_epochs) else opt.num_epochs
    return {
        "n_epochs": epochs,
        "batch_size": opt.windows_per_device * opt.accumulation_steps * spec.world_size,
        "learning_rate_multiplier": opt.learning_rate / float(recipe.value("learning_rate")),
    }


def _default_epochs(recipe: Recipe, pack: PackFacts) -> float:
    large = pack.num_examples > int(recipe.value("large_dataset_rows"))
    return float(recipe.value("large_dataset_epochs") if large else recipe.value("n_epochs"))


def _batch_size(plan: Plan, pack: PackFacts, *, epochs: float, world_size: int) -> int:
    """Windows per optimizer step over all ranks: asked for, or the recipe's unless that makes too few steps."""
    asked = plan.requested.get("batch_size")
    if asked is not None:
        if asked % world_size:
            raise _refusal("batch_size", f"batch_size {asked} does not divide by {world_size} ranks; use a multiple of {world_size}")
        return int(asked)
    enough_steps = int(pack.num_windows * epochs) // int(plan.recipe.value("min_steps"))
    wanted = min(int(plan.recipe.value("batch_size")), max(enough_steps, 1))
    return max(wanted // world_size, 1) * world_size


def _windows_per_device(limit: int, batch: int) -> int:
    """The largest divisor of `batch` that is at most `limit`: every micro-batch of a step is alike."""
    return max(n for n in range(1, min(limit, batch) + 1) if batch % n == 0)


def _lora(plan: Plan) -> LoraSettings:
    asked, recipe = plan.requested, plan.recipe
    large = "large_model_rank" in recipe.defaults and plan.model.num_parameters >= recipe.value("large_model_parameters")
    rank = int(asked.get("rank", recipe.value("large_model_rank" if large else "rank")))
    alpha = float(asked.get("alpha", rank * float(recipe.value("alpha_over_rank"))))
    return LoraSettings(rank=rank, alpha=alpha, dropout=float(asked.get("dropout", recipe.value("dropout"))))


def _refusal(name: str, message: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_hyperparameter", param=f"hyperparameters.{name}")
