"""What is run: models of real shapes with random weights, and the spec of each case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.training.memory import Case, estimate
from engine.training.model_shapes import WELL_KNOWN_SHAPES, ModelShape
from engine.training.spec import Attention, CheckpointPolicy, LoraSettings, Optimization, Quantization, Strategy, TrainingSpec

NEVER = 1_000_000_000
MANY_STEPS = 100_000
"""Steps of a run that is stopped before: long enough for the training process to compile the model's blocks."""
TINY = ModelShape(
    num_layers=2, hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate=176, vocab=512, tied_embeddings=True,
    context_length=512,
)  # fmt: skip
SHAPES: Mapping[str, ModelShape] = {**{n: WELL_KNOWN_SHAPES[n] for n in ("llama-3.2-1b", "llama-3.1-8b", "qwen2.5-32b")}, "tiny": TINY}
WARM_UP = 3
"""First steps, which are not measured: kernels are chosen and memory is found in them."""
FINGERPRINT = "pk_benchmark"


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    metric: Literal["tokens_per_s", "mfu", "items_per_s"]
    at_least: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One case. ``speed`` is killed after its steps; ``checkpoints`` runs to its end; ``resume`` is interrupted and started again;
    ``evaluation`` does not train, and ``losses`` computes the output layer alone."""

    name: str
    model: str
    adapter: Literal["lora", "qlora", "full"]
    kind: Literal["speed", "checkpoints", "resume", "evaluation", "losses"] = "speed"
    batch: int = 1
    accumulation: int = 1
    packed: bool = True
    attention: Attention = "flash_attention_2"
    compiled: bool = True
    """Whether the run is long enough to compile its blocks, as far as the product compiles with this attention."""
    checkpointing: bool = False
    optimizer: str = "adamw_torch"
    max_seq_len: int = 4096
    precision: Literal["fp32", "bf16"] = "bf16"
    ranks: int = 1
    """GPUs, all of which share each window."""
    steps: int = 10
    """Measured ones; of ``checkpoints`` and ``resume`` all there are."""
    budget_s: float = 120.0
    num_items: int = 1000
    """Of ``evaluation``."""
    goal: Goal | None = None
    needs: tuple[str, ...] = field(default=())
    """Packages that must be importable."""

    @property
    def shape(self) -> ModelShape:
        return SHAPES[self.model]

    @property
    def strategy(self) -> Strategy:
        return "single" if self.ranks == 1 else "ddp"

    def spec(self) -> TrainingSpec:
        """Steps, data and order depend on the case alone."""
        speed = self.kind == "speed"
        return TrainingSpec(
            method="sft",
            method_settings={},
            adapter=self.adapter,
            base_model=self.model,
            base_digest="0" * 64,
            pack_fingerprint=FINGERPRINT,
            dataset_id="ds_benchmark",
            reference=None,
            warm_start=None,
            max_seq_len=self.max_seq_len,
            optimization=Optimization(
                learning_rate=1e-5,
                num_epochs=1e6,
                per_device_batch_size=self.batch,
                accumulation_steps=self.accumulation,
                schedule="constant",
                optimizer=self.optimizer,
                max_steps=self.steps if self.kind == "checkpoints" else MANY_STEPS if self.compiled else WARM_UP + self.steps + 1,
            ),
            lora=None if self.adapter == "full" else LoraSettings(rank=16, alpha=32, dropout=0.05),
            quantization=Quantization() if self.adapter == "qlora" else None,
            checkpoint=CheckpointPolicy(
                every_steps=NEVER if speed else max(self.steps // (2 if self.kind == "checkpoints" else 3), 1), every_s=NEVER, keep_last=2
            ),
            precision=self.precision,
            attention=self.attention,
            gradient_checkpointing=self.checkpointing,
            strategy=self.strategy,
            world_size=self.ranks,
            context_parallel=self.ranks,
            seed=7,
            recipe="benchmark@1",
            lock_sha256="0" * 64,
            commit="0" * 40,
            image="local",
        )

    def estimated_bytes(self, *, on_cpu: bool, overheads: bool) -> int:
        case = Case(
            shape=self.shape,
            adapter=self.adapter,
            precision=self.precision,
            max_seq_len=self.max_seq_len,
            per_device_batch_size=self.batch,
            rank=16,
            dropout=0.05,
            optimizer=self.optimizer,
            attention=self.attention,
            gradient_checkpointing=self.checkpointing,
            strategy=self.strategy,
            world_size=self.ranks,
            context_parallel=self.ranks,
            on_cpu=on_cpu,
        )
        return estimate(case, overheads=overheads).total_bytes


SMALL, MIDDLE, LARGE = "llama-3.2-1b", "llama-3.1-8b", "qwen2.5-32b"
LORA_GOAL, FULL_GOAL, SMALLER_ADAM_GOAL = (
    Goal(metric="tokens_per_s", at_least=14_000), Goal(metric="mfu", at_least=0.45), Goal(metric="mfu", at_least=0.5)
)  # fmt: skip
FIVE_MINUTES = Goal(metric="items_per_s", at_least=1000 / 300)
SDPA: dict[str, Any] = {"attention": "sdpa"}
BNB = ("bitsandbytes",)

ON_GPU: tuple[Trial, ...] = (
    Trial(name="lora-8b", model=MIDDLE, adapter="lora", batch=2, accumulation=2, budget_s=150, goal=LORA_GOAL),
    Trial(name="evaluation-8b", model=MIDDLE, adapter="lora", kind="evaluation", batch=128, budget_s=300, goal=FIVE_MINUTES),
    Trial(name="evaluation-8b-32", model=MIDDLE, adapter="lora", kind="evaluation", batch=32, num_items=128, budget_s=150),
    Trial(
        name="full-8b-adam8bit", model=MIDDLE, adapter="full", batch=2, accumulation=16, steps=2, budget_s=170, goal=SMALLER_ADAM_GOAL,
        optimizer="adamw_8bit", needs=BNB,
    ),
    Trial(name="full-8b", model=MIDDLE, adapter="full", accumulation=8, checkpointing=True, steps=5, budget_s=150, goal=FULL_GOAL),
    Trial(name="qlora-8b", model=MIDDLE, adapter="qlora", batch=2, accumulation=2, budget_s=120, needs=BNB),
    Trial(name="lora-8b-recomputed", model=MIDDLE, adapter="lora", batch=4, checkpointing=True, steps=6, budget_s=120),
    Trial(name="lora-8b-32k", model=MIDDLE, adapter="lora", checkpointing=True, max_seq_len=32_768, steps=4, budget_s=150),
    *(
        Trial(
            name=f"lora-8b-128k-{n}", model=MIDDLE, adapter="lora", checkpointing=True, max_seq_len=131_072, steps=2, budget_s=300, ranks=n,
        )
        for n in (2, 8)
    ),
    Trial(name="checkpoints-lora-8b", model=MIDDLE, adapter="lora", kind="checkpoints", batch=2, steps=8, budget_s=120),
    Trial(name="lora-8b-sdpa", model=MIDDLE, adapter="lora", batch=2, accumulation=2, steps=6, budget_s=120, **SDPA),
    Trial(
        name="lora-8b-flex", model=MIDDLE, adapter="lora", batch=2, accumulation=2, steps=6, budget_s=120, attention="flex_attention",
    ),
    Trial(name="lora-8b-not-compiled", model=MIDDLE, adapter="lora", batch=2, accumulation=2, steps=6, budget_s=120, compiled=False),
    Trial(name="losses-8b", model=MIDDLE, adapter="lora", kind="losses", budget_s=60),
    Trial(name="lora-1b", model=SMALL, adapter="lora", batch=2, accumulation=4, budget_s=90),
    Trial(name="lora-1b-sdpa", model=SMALL, adapter="lora", batch=2, accumulation=4, budget_s=90, **SDPA),
    Trial(name="lora-1b-sdpa-padded", model=SMALL, adapter="lora", batch=8, accumulation=4, packed=False, budget_s=90, **SDPA),
    Trial(name="full-1b", model=SMALL, adapter="full", batch=2, accumulation=4, budget_s=90),
    Trial(name="full-1b-not-compiled", model=SMALL, adapter="full", batch=2, accumulation=4, budget_s=90, compiled=False),
    Trial(name="resume-lora-1b", model=SMALL, adapter="lora", kind="resume", accumulation=2, steps=15, budget_s=300),
    Trial(name="resume-full-1b", model=SMALL, adapter="full", kind="resume", accumulation=2, steps=15, budget_s=300),
    Trial(name="resume-lora-1b-sdpa", model=SMALL, adapter="lora", kind="resume", accumulation=2, steps=15, budget_s=180, **SDPA),
    Trial(name="checkpoints-full-1b", model=SMALL, adapter="full", kind="checkpoints", batch=2, accumulation=2, steps=8, budget_s=150),
    Trial(name="qlora-32b", model=LARGE, adapter="qlora", accumulation=2, checkpointing=True, steps=6, budget_s=420, needs=BNB),
)  # fmt: skip
"""Ordered by model, so that each is written once, and those with goals first: the total time may cut off the last ones."""

_T: dict[str, Any] = {"model": "tiny", "max_seq_len": 256, "steps": 3, "budget_s": 90, **SDPA}
ON_CPU: tuple[Trial, ...] = (
    Trial(name="lora", adapter="lora", batch=2, accumulation=2, goal=Goal(metric="tokens_per_s", at_least=1.0), **_T),
    Trial(name="lora-padded", adapter="lora", batch=4, accumulation=2, packed=False, **_T),
    Trial(name="full-recomputed", adapter="full", batch=2, checkpointing=True, **_T),
    Trial(name="qlora", adapter="qlora", batch=2, needs=BNB, **_T),
    Trial(name="checkpoints-full", adapter="full", kind="checkpoints", **_T),
    Trial(name="evaluation", adapter="lora", kind="evaluation", num_items=8, **_T),
    Trial(name="losses", adapter="lora", kind="losses", **_T),
    Trial(name="shared-windows", adapter="lora", ranks=2, **_T),
    Trial(name="resume-lora", adapter="lora", kind="resume", batch=2, accumulation=2, **{**_T, "steps": 12}),
)
"""The same ways through the program with a model of 0.1M parameters: numbers without a meaning, seconds each."""
