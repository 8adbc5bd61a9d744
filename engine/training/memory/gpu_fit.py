"""Finds the smallest number of GPUs for a job, the sharding strategy and the largest batch; or explains why nothing fits.

1. GPU counts from small to large: a second GPU halves the time but not the cost, so more are used only for memory or on request.
2. For a count, as few ranks as possible that share a window, which exchange tokens in every layer.
3. The strategy with the least exchange: one process or copies, then shards of the parameters.
4. No gradient checkpointing, then with it.
5. The largest micro-batch that divides the batch of the step.

Ranks that share a model agree on a stop between micro-batches, and none of them can save it alone: a sharded micro-batch must be short.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from core.errors import InvalidRequest
from engine.training.memory.cases import REPLICATED, Case
from engine.training.memory.estimates import MemoryEstimate, estimate
from engine.training.memory.gpus import GIB, Gpu
from engine.training.spec import Strategy

GANG_SIZES = (1, 2, 4, 8, 16, 32)
LENGTHS = (131_072, 65_536, 32_768, 16_384, 8192, 4096, 2048, 1024, 512)
"""Sequence lengths that a refusal proposes, longest first."""
HEADROOM = 0.05
"""Share of a GPU that an estimate leaves free for what it does not foresee, such as the lengths of one batch."""
CPU_EXCESS = 1.25
"""A CPU job is refused only if its estimate is this many times the memory: machines have swap, and other jobs end."""
MICRO_BATCH_S = 10.0
"""Seconds of a sharded micro-batch, of the 25 within which a stop has its checkpoint; the rest is for writing it."""
SPLITS_WINDOWS: frozenset[Strategy] = frozenset(("ddp", "fsdp2"))
"""Strategies with which ranks may share windows; they add up the gradients of all ranks. ZeRO does too, but was not tried with it."""
LARGE = 13_000_000_000
"""Parameters above which a node's RAM could not hold the whole model once per rank while loading: 8 x 52 GB in float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    num_gpus: int
    strategy: Strategy
    context_parallel: int
    per_device_batch_size: int
    gradient_checkpointing: bool
    estimate: MemoryEstimate
    gpu: Gpu
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """The memory part of a job's estimate."""
        return {
            "per_gpu_bytes": self.estimate.total_bytes,
            "parts": {name: value for name, value in self.estimate.parts.items() if value},
            "gpu_type": self.gpu.name,
            "gpu_bytes": self.gpu.memory_bytes or None,
            "num_gpus": self.num_gpus,
            "strategy": self.strategy,
            "context_parallel": self.context_parallel,
            "per_device_batch_size": self.per_device_batch_size,
            "gradient_checkpointing": self.gradient_checkpointing,
            "notes": list(self.notes),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where a job may be placed, and which parts of its case the request has fixed."""

    gpu: Gpu
    max_gpus: int
    global_batch: int
    """Rows of a step, over all GPUs."""
    num_gpus: int | None = None
    """As requested; None: as few as possible."""
    strategy: Strategy | None = None
    context_sizes: tuple[int, ...] = (1,)
    """Numbers of ranks that may share a window of this model; one if it was requested."""
    fixed_batch: bool = False
    fixed_checkpointing: bool = False
    memory_bytes: int = 0
    """RAM of the machine on which a CPU job runs; 0: unknown."""
    micro_batch_s: Callable[[Case], float] = lambda _: 0.0
    """Seconds of a micro-batch, by the cost model of this GPU."""

    @property
    def limit(self) -> int:
        return self.memory_bytes or self.gpu.memory_bytes

    def fit(self, case: Case) -> Fit:
        """Places `case`, which has the smallest micro-batch; raises ``InvalidRequest`` (``memory_exceeded``) with the estimate, the limit
        and changes that would make it fit. On a CPU it is one process with the micro-batch of `case`."""
        return self.on_cpu(replace(case, on_cpu=True)) if self.gpu.is_cpu else self.on_gpus(case)

    def on_cpu(self, case: Case) -> Fit:
        world = self.num_gpus or self.context_sizes[0]
        strategy: Strategy = self.strategy or ("single" if world == 1 else "ddp")
        placed = replace(case, world_size=world, strategy=strategy, context_parallel=self.context_sizes[0])
        found = estimate(placed)
        if self.limit and found.total_bytes * world > CPU_EXCESS * self.limit:
            raise self._refusal(placed, found)
        return self._fit(placed, found)

    def on_gpus(self, case: Case) -> Fit:
        closest: tuple[Case, MemoryEstimate] | None = None
        too_long: Case | None = None
        for placed in self._placements(case):
            found = estimate(placed)
            if self._fits(placed, found):
                return self._widened(placed)
            if self._has_room(found):
                too_long = too_long or placed
            if closest is None or found.total_bytes < closest[1].total_bytes:
                closest = placed, found
        if too_long is not None:
            raise self._refusal_of_long_micro_batches(too_long)
        if closest is None:
            raise InvalidRequest(
                f"batch_size {self.global_batch} is not divisible by num_gpus {self.num_gpus}{self._shared()}; use a multiple of it",
                code="invalid_hyperparameter",
                param="hyperparameters.batch_size",
            )
        raise self._refusal(*closest)

    def _placements(self, case: Case) -> Iterator[Case]:
        """Returns all candidates, best first, with the smallest micro-batch."""
        counts = [self.num_gpus] if self.num_gpus else [n for n in GANG_SIZES if n <= self.max_gpus]
        checkpointing = [case.gradient_checkpointing]
        if not self.fixed_checkpointing and not case.gradient_checkpointing:
            checkpointing.append(True)
        for count in counts:
            for shared in self._divided(case, count):
                for again in checkpointing:
                    yield replace(shared, gradient_checkpointing=again)

    def _divided(self, case: Case, count: int) -> Iterator[Case]:
        """Returns the ways to divide `case` over `count` GPUs, by ranks that share a window and by strategy."""
        for size in self.context_sizes:
            if count % size or self.global_batch % (count // size * case.per_device_batch_size):
                continue
            for strategy in [self.strategy] if self.strategy else strategies(case, count):
                if size == 1 or strategy in SPLITS_WINDOWS:
                    yield replace(case, world_size=count, context_parallel=size, strategy=strategy)

    def _shared(self) -> str:
        return f" over context_parallel {self.context_sizes[0]}" if self.context_sizes[0] > 1 else ""

    def _widened(self, case: Case) -> Fit:
        """Returns the candidate with the largest micro-batch that divides a rank's share of the batch."""
        share = self.global_batch // case.data_ranks
        least = case.per_device_batch_size
        sizes = [least] if self.fixed_batch else [n for n in range(share, least - 1, -1) if share % n == 0]
        for size in sizes:
            placed = replace(case, per_device_batch_size=size)
            found = estimate(placed)
            if self._fits(placed, found):
                return self._fit(placed, found)
        raise AssertionError("a placement that fits with the smallest micro-batch was not found again")

    def _fits(self, case: Case, found: MemoryEstimate) -> bool:
        return self._has_room(found) and (case.strategy in REPLICATED or self.micro_batch_s(case) <= MICRO_BATCH_S)

    def _has_room(self, found: MemoryEstimate) -> bool:
        return found.total_bytes <= (1 - HEADROOM) * self.limit

    def _fit(self, case: Case, found: MemoryEstimate) -> Fit:
        return Fit(
            num_gpus=case.world_size,
            strategy=case.strategy,
            context_parallel=case.context_parallel,
            per_device_batch_size=case.per_device_batch_size,
            gradient_checkpointing=case.gradient_checkpointing,
            estimate=found,
            gpu=self.gpu,
            notes=tuple(_notes(case)),
        )

    def _refusal(self, case: Case, found: MemoryEstimate) -> InvalidRequest:
        largest = max(found.parts, key=lambda name: found.parts[name])
        limit = self.limit if case.on_cpu else (1 - HEADROOM) * self.limit
        where = "this machine" if case.on_cpu else f"each GPU of {case.world_size} x {self.gpu.name}"
        if case.context_parallel > 1:
            where += f", of which {case.context_parallel} share a window"
        cures = self._cures(case)
        message = (
            f"{case.method} with adapter {case.adapter} at max_seq_len {case.max_seq_len} needs about {found.total_bytes / GIB:.1f} GiB on "
            f"{where} ({found.parts[largest] / GIB:.1f} GiB of {largest}), but only {limit / GIB:.1f} GiB is usable; "
            + (", or ".join(cures) if cures else "use a smaller base model")
        )
        return InvalidRequest(message, code="memory_exceeded", param="hyperparameters")

    def _refusal_of_long_micro_batches(self, case: Case) -> InvalidRequest:
        return InvalidRequest(
            f"a micro-batch of {case.tokens} tokens takes about {self.micro_batch_s(case):.0f} s on {case.world_size} x {self.gpu.name} "
            f"with strategy {case.strategy}, whose ranks answer a stop only between micro-batches: at most {MICRO_BATCH_S:.0f} s leave the "
            "time to write a checkpoint; " + (", or ".join(self._cures(case)) or "use a smaller base model"),
            code="micro_batch_too_long",
            param="hyperparameters",
        )

    def _cures(self, case: Case) -> list[str]:
        """Returns single changes after which the job fits, each verified."""
        smaller = replace(case, gradient_checkpointing=True, per_device_batch_size=1)
        cures = []
        if smaller != case and self._fits_anywhere(smaller):
            cures.append("leave per_device_batch_size and gradient_checkpointing to the platform")
        lengths = (n for n in LENGTHS if n < case.max_seq_len)
        if length := next((n for n in lengths if self._fits_anywhere(replace(smaller, max_seq_len=n))), None):
            cures.append(f"lower max_seq_len to {length}")
        smaller_adapters: tuple[Literal["lora", "qlora"], ...] = (
            () if case.adapter == "qlora" else ("lora", "qlora") if case.full else ("qlora",)
        )
        if adapter := next((a for a in smaller_adapters if self._fits_anywhere(replace(smaller, adapter=a))), None):
            cures.append(f"use adapter {adapter}")
        if not case.on_cpu and (count := self._enough_gpus(smaller)):
            held = f" (this pool allows at most {self.max_gpus} per job)" if count > self.max_gpus else ""
            cures.append(f"use {count} GPUs{held}")
        return cures

    def _fits_anywhere(self, case: Case) -> bool:
        if case.on_cpu:
            return estimate(case).total_bytes <= self.limit
        return any(self._fits(placed, estimate(placed)) for placed in self._placements(case))

    def _enough_gpus(self, case: Case) -> int | None:
        """Returns a larger number of GPUs that holds the job when the parameters are sharded."""
        wider = (placed for n in GANG_SIZES if n > case.world_size for placed in replace(self, strategy=None)._divided(case, n))
        return next((placed.world_size for placed in wider if self._fits(placed, estimate(placed))), None)


def strategies(case: Case, num_gpus: int) -> tuple[Strategy, ...]:
    """Returns strategies for `num_gpus`, cheapest exchange first.

    1. One GPU: no sharding.
    2. The states of an 8-bit optimizer cannot be sharded: copies only.
    3. 4-bit weights cannot be sharded: copies, or shards of the adapter's state.
    4. Loss scaling, which fp16 needs, is not implemented for shards: copies only.
    5. DoRA and PiSSA read whole weights: copies only.
    """
    if num_gpus == 1:
        return ("single",)
    if case.optimizer == "adamw_8bit" or case.precision == "fp16" or case.keeps_whole:
        return ("ddp",)
    return ("ddp", "zero2" if case.adapter == "qlora" else "fsdp2")


def _notes(case: Case) -> Iterator[str]:
    if case.shape.assumed:
        yield "the model's shape is unknown; the estimate uses a similar model of at least its size"
    if case.strategy not in ("fsdp2", "zero3"):
        return
    if case.shape.num_experts:
        each = case.shape.num_parameters * (4 if case.full else case.compute_bytes) / GIB
        yield (
            "host memory: if the checkpoint stores experts one by one (Qwen 3 MoE, Mixtral) or in MXFP4, "
            f"each of the {case.world_size} ranks reads the whole model into its node's memory at once, about {each:.0f} GiB per rank"
        )
    elif case.shape.num_parameters > LARGE:
        yield "zero_init: ranks must build the model empty and load their shards only; whole copies would not fit into a node's memory"
