"""Combinations of settings that cannot work, each refused with the reason and the next step.

Each rule looks at what was asked for and at what it would be combined with; the first that objects is what the tenant reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ft_assets.errors import InvalidRequest
from ft_assets.training import methods
from ft_assets.training.requested_hyperparameters import PACK_SETTINGS, refusal

OF_LORA = ("rank", "alpha", "dropout", "target_modules")
OF_QUANTIZATION = ("quantization", "double_quantization")
REPLICATES = frozenset(("single", "ddp"))
"""Strategies under which each rank holds everything; the others share out optimizer states at least."""
SPLITS_WEIGHTS = frozenset(("zero3", "fsdp2"))
"""Strategies under which each rank holds a part of the weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    method: str
    adapter: Literal["lora", "qlora", "full"]
    precision: str
    requested: Mapping[str, Any]
    hardware: Mapping[str, Any]


def check(asked: Combination) -> None:
    """Raise the first objection: ``InvalidRequest`` with the field that should change."""
    for rule in RULES:
        for objection in rule(asked):
            raise objection


def check_placement(*, strategy: str, optimizer: str, precision: str) -> None:
    """The same for a strategy that nobody asked for: what the memory estimate chose has to go with the rest."""
    for objection in _sharing(strategy, optimizer, precision):
        raise objection


def _sharing(strategy: str, optimizer: str, precision: str) -> Iterator[InvalidRequest]:
    """What works only where ranks hold everything. Adafactor: its rows and columns are sums over the whole of a matrix; 8-bit AdamW: its
    blocks cross the cuts; fp16: losses are scaled by what all gradients are, on each rank alone."""
    if strategy in REPLICATES or strategy == "None":
        return
    if optimizer != "adamw_torch":
        yield refusal(
            "optimizer",
            f"{optimizer} needs whole matrices on each GPU, and strategy {strategy} shares them out; use adamw_torch, whose states "
            "are shared out too, or ddp",
        )
    if precision == "fp16":
        yield refusal("precision", f"fp16 is scaled on each GPU alone, and strategy {strategy} shares gradients out; use bf16, or ddp")


def _adapter_settings(c: Combination) -> Iterator[InvalidRequest]:
    for name in OF_LORA:
        if name in c.requested and c.adapter == "full":
            yield refusal(name, f"{name} belongs to an adapter, and adapter full trains every parameter; leave it out, or use lora")
    for name in OF_QUANTIZATION:
        if name in c.requested and c.adapter != "qlora":
            yield refusal(name, f"{name} is for a base held in 4 bits, and the adapter is {c.adapter}; use qlora, or leave it out")


def _precision(c: Combination) -> Iterator[InvalidRequest]:
    if c.precision == "fp16" and c.adapter == "full":
        yield refusal(
            "precision",
            "fp16 with adapter full loses updates: small ones vanish beside 16-bit weights, and float32 master copies are not kept; "
            "use bf16 or fp32, or an adapter (lora, qlora), whose weights stay in float32",
        )
    if c.precision == "fp32" and c.requested.get("attention") == "flash_attention_2":
        yield refusal("attention", "flash_attention_2 has kernels for bf16 and fp16 only, and precision is fp32; use sdpa, or bf16")
    if c.requested.get("attention") == "flex_attention" and methods.get(c.method).pack != "windows":
        yield refusal("attention", f"flex_attention is for packed windows, and method {c.method} has none; use sdpa, or leave it out")


def _strategy(c: Combination) -> Iterator[InvalidRequest]:
    strategy, num_gpus = c.hardware.get("strategy"), c.hardware.get("num_gpus")
    if strategy in SPLITS_WEIGHTS and c.adapter == "qlora":
        yield _hardware(
            f"strategy {strategy} splits weights over the ranks, which 4-bit weights do not survive; use zero2 (which splits gradients "
            "and optimizer states), leave strategy out, or use lora"
        )
    if strategy == "single" and (num_gpus or 1) > 1:
        yield _hardware(f"strategy single runs on one GPU, and hardware.num_gpus is {num_gpus}; leave one of them out")
    if strategy not in (None, "single") and num_gpus == 1:
        yield _hardware(f"strategy {strategy} shares work between GPUs, and hardware.num_gpus is 1; ask for 2 or more, or leave it out")
    yield from _sharing(str(strategy), str(c.requested.get("optimizer", "adamw_torch")), c.precision)


def _pack(c: Combination) -> Iterator[InvalidRequest]:
    of = methods.get(c.method)
    for name in PACK_SETTINGS:
        if name in c.requested and of.pack != "windows":
            yield refusal(name, f"{name} is about packed conversations, and method {c.method} trains on {of.pack}; leave it out")
    if of.every_token and c.requested.get("train_on_inputs") is False:
        yield refusal("train_on_inputs", f"method {c.method} trains on every token; leave train_on_inputs out, or use method sft")


def _batch(c: Combination) -> Iterator[InvalidRequest]:
    batch, per_device = c.requested.get("batch_size"), c.requested.get("per_device_batch_size")
    rows, num_gpus = per_device or 1, c.hardware.get("num_gpus") or 1
    if batch and batch % (num_gpus * rows):
        parts = [f"{num_gpus} ranks"] * (num_gpus > 1) + [f"micro-batches of {rows}"] * (rows > 1)
        yield refusal("batch_size", f"batch_size {batch} does not divide by {' x '.join(parts)}; use a multiple of {num_gpus * rows}")


def _stopping(c: Combination) -> Iterator[InvalidRequest]:
    if "early_stopping_min_delta" in c.requested and "early_stopping_patience" not in c.requested:
        yield refusal("early_stopping_min_delta", "early_stopping_min_delta says what counts as better; give early_stopping_patience too")


def _hardware(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="invalid_hardware", param="hardware.strategy")


RULES: tuple[Callable[[Combination], Iterator[InvalidRequest]], ...] = (
    _adapter_settings,
    _precision,
    _strategy,
    _pack,
    _batch,
    _stopping,
)
