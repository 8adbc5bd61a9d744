"""The resolved training spec: frozen, hashed, and the only input of the training process.

A spec holds digests and numbers, no paths: the same spec means the same training on any machine. The paths of one attempt on one machine
are in the :class:`RunFile` around it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self

from core.typed_json import from_json
from engine.training.model_shapes.attention_kernels import Kernel
from engine.training.schedules import DecayShape, Points, ScheduleName


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSettings:
    rank: int
    alpha: float
    dropout: float = 0.05
    target_modules: str | tuple[str, ...] = "all-linear"
    use_rslora: bool = False
    """Scales the product of the matrices by alpha / sqrt(rank) instead of alpha / rank (rsLoRA, Kalajdzievski 2023)."""
    use_dora: bool = False
    """Trains the length of each row of a weight beside its direction (DoRA, Liu et al. 2024)."""
    init_lora_weights: str | None = None
    """``pissa`` or ``pissa_niter_N`` (PiSSA, Meng et al. 2024); None: A is random and B is 0."""

    @property
    def saved_rank(self) -> int:
        """Rank of the finished adapter. PiSSA's holds what was trained and what it began with."""
        return 2 * self.rank if self.init_lora_weights else self.rank

    @property
    def saved_alpha(self) -> float:
        """Alpha that gives the finished adapter's rank the trained scale."""
        if not self.init_lora_weights:
            return self.alpha
        return self.alpha * (math.sqrt(2) if self.use_rslora else 2)

    @property
    def reads_weights(self) -> bool:
        """Whether it reads whole weights of the base, so that every GPU must hold them: DoRA norms, PiSSA singular values."""
        return self.use_dora or self.init_lora_weights is not None

    @property
    def scale(self) -> float:
        """Factor of the product of the two matrices."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """How QLoRA holds the frozen base (Dettmers et al. 2023)."""

    kind: Literal["nf4", "fp4"] = "nf4"
    double: bool = True
    """Quantizes the quantization constants too: saves 0.37 bits per parameter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyStopping:
    patience: int
    """Consecutive validations without improvement after which training ends."""
    min_delta: float = 0.0
    """Least decrease of the validation loss that counts as an improvement."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStart:
    """An earlier adapter of the same base, or for full parameters a whole model, that provides the initial weights; optimizer and schedule
    start anew."""

    adapter: str
    """Name of the adapter or model, for people."""
    manifest_sha256: str
    """Digest of its manifest, so the spec covers its bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One dataset of a mixture."""

    dataset_id: str
    pack_fingerprint: str
    rows_per_epoch: int
    """Rows of its pack that an epoch reads. More than the pack has: some are read again. Fewer: the next epoch goes on with the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimization:
    learning_rate: float
    num_epochs: float
    per_device_batch_size: int
    """Rows of the pack (windows, pairs) per micro-batch of one process."""
    accumulation_steps: int
    """Micro-batches per optimizer step."""
    schedule: ScheduleName | Points = "cosine"
    """Course of the rate (``schedules.py``); its options below are None unless it reads them."""
    warmup_ratio: float = 0.03
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    min_lr_ratio: float = 0.0
    """Rate at the end of the schedule, as a share of `learning_rate`."""
    schedule_decay_ratio: float | None = None
    """Share of the steps over which `wsd` falls."""
    schedule_decay_shape: DecayShape | None = None
    schedule_cycles: int | None = None
    """Times that `cosine_with_restarts` falls."""
    schedule_power: float | None = None
    schedule_timescale: int | None = None
    """Steps after which `inverse_sqrt`, counted from the start of a warm-up as long, begins to fall; None: the warm-up's own."""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    adam_epsilon: float = 1e-8
    optimizer: str = "adamw_torch"
    loraplus_lr_ratio: float = 1.0
    """Rate of an adapter's B matrices, as a multiple of `learning_rate` (LoRA+, Hayou et al. 2024)."""
    layer_lr_decay: float = 1.0
    """Factor of a block's rate from the last block, which has `learning_rate`, to each one before it; the embedding comes before the
    first."""
    neftune_noise_alpha: float = 0.0
    """Scale of the noise on embeddings (NEFTune, Jain et al. 2023); 0: none."""
    max_steps: int | None = None
    """Maximum optimizer steps; None: `num_epochs` decides."""
    early_stopping: EarlyStopping | None = None

    def global_batch_size(self, world_size: int) -> int:
        """Returns the rows per optimizer step, over all micro-batches of `world_size` ranks with rows of their own."""
        return self.per_device_batch_size * self.accumulation_steps * world_size

    def total_steps(self, *, num_rows: int, world_size: int) -> int:
        """Optimizer steps of a run. Every step has a whole global batch: rows continue across the end of an epoch, and the last step is
        filled up with the first rows of the next one."""
        steps = max(1, math.ceil(self.num_epochs * num_rows / self.global_batch_size(world_size) - 1e-9))
        return steps if self.max_steps is None else min(steps, self.max_steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPolicy:
    every_steps: int = 500
    """Steps between checkpoints; the earlier of this and `every_s` applies."""
    every_s: float = 600.0
    """Seconds between checkpoints: bounds the work lost to a kill."""
    keep_last: int = 3
    """At least 2: a crash may have torn the newest."""


Attention = Kernel
"""Kernel that was planned; the training process takes another if this one cannot compute the model's attention on its machine."""
Strategy = Literal["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"]
"""How ranks share a model: single process, copies, FSDP2's sharded parameters, or DeepSpeed's stages 1 to 3."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSpec:
    method: str
    """Name of a registered method (``engine.training.methods``)."""
    method_settings: Mapping[str, float | int | str]
    """Its own hyperparameters, complete and resolved: ``{"beta": 0.1, ...}``."""
    adapter: Literal["lora", "qlora", "full"]
    base_model: str
    base_digest: str
    pack_fingerprint: str
    dataset_id: str
    reference: str | None
    """Key of the reference log-probabilities; None if the method needs none."""
    warm_start: WarmStart | None
    max_seq_len: int
    optimization: Optimization
    lora: LoraSettings | None
    """None for full parameters."""
    quantization: Quantization | None
    """Set for ``qlora`` only."""
    checkpoint: CheckpointPolicy
    train_experts: bool = True
    """For ``full``: whether the experts of a mixture are trained. Adapters leave experts and routers as they are."""
    train_router: bool = False
    """For ``full``: whether routers are trained, with the model's own load-balancing loss."""
    precision: Literal["fp32", "bf16", "fp16"]
    attention: Attention
    gradient_checkpointing: bool
    strategy: Strategy
    world_size: int
    """Ranks, one per GPU."""
    context_parallel: int = 1
    """Adjacent ranks that share each window, all of one node; `world_size` is a multiple."""
    seed: int
    recipe: str
    """``<name>@<version>`` of the recipe that provided the defaults."""
    lock_sha256: str
    """Digest of the lock files, which pin every dependency of the training process, CUDA's packages included."""
    commit: str
    """Commit of the platform's code."""
    image: str
    """Container image by digest, or ``local`` for a subprocess of this checkout."""
    sources: tuple[Source, ...] = ()
    """Datasets of a mixture, `dataset_id` and `pack_fingerprint` being the first one's; empty if there is only one dataset."""

    @property
    def packs(self) -> tuple[tuple[str, str], ...]:
        """The fingerprint of each pack, and its directory within that of the run's data: itself, or one per pack of a mixture."""
        return tuple((s.pack_fingerprint, s.pack_fingerprint) for s in self.sources) or ((self.pack_fingerprint, ""),)

    @property
    def rows_per_step(self) -> int:
        """Rows of the pack in an optimizer step, over all ranks and micro-batches."""
        return self.optimization.global_batch_size(self.data_ranks)

    @property
    def data_ranks(self) -> int:
        """Ranks, or groups of ranks that share windows, with rows of their own."""
        return self.world_size // self.context_parallel

    def total_steps(self, *, num_rows: int) -> int:
        """Returns the optimizer steps of a run over a pack of so many rows."""
        return self.optimization.total_steps(num_rows=num_rows, world_size=self.data_ranks)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(canonical_json(self.to_dict()).encode()).hexdigest()

    @property
    def resume_sha256(self) -> str:
        """Digest that is equal for specs that can resume from each other's checkpoints: covers everything that changes the rows and
        updates of a step, but not how the global batch is divided into micro-batches and ranks, nor the strategy. The load-balancing loss
        of a trained router is computed for each micro-batch, so the division counts then."""
        body = self.to_dict()
        body["optimization"]["global_batch_size"] = self.rows_per_step
        for name in () if self.train_router else ("per_device_batch_size", "accumulation_steps"):
            del body["optimization"][name]
        divided = ("world_size", "context_parallel")
        for name in ("strategy", "gradient_checkpointing", *(() if self.train_router else divided)):
            body.pop(name, None)
        return hashlib.sha256(canonical_json(body).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return what is stored and hashed: all fields but those of `LATER_FIELDS` that have their default."""
        body = asdict(self)
        for kind, names in LATER_FIELDS.items():
            part = body[PARTS[kind]] if kind in PARTS else body
            for name in names if part else ():
                if part[name] == _default(kind, name):
                    del part[name]
        return body

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Inverse of :meth:`to_dict`; raises ``ValueError`` naming unknown or missing fields."""
        known = {f.name for f in fields(cls)}
        unknown, missing = set(data) - known, known - set(data) - set(LATER_FIELDS[cls])
        if unknown or missing:
            raise ValueError(f"training spec fields differ: unknown {sorted(unknown)}, missing {sorted(missing)}")
        return from_json(cls, data)


LATER_FIELDS: Mapping[type, tuple[str, ...]] = {
    TrainingSpec: ("context_parallel",),
    LoraSettings: ("use_rslora", "use_dora", "init_lora_weights"),
    Optimization: (
        "min_lr_ratio", "adam_epsilon", "loraplus_lr_ratio", "layer_lr_decay", "neftune_noise_alpha", "schedule_decay_ratio",
        "schedule_decay_shape", "schedule_cycles", "schedule_power", "schedule_timescale",
    ),
}  # fmt: skip
"""Fields that came after release 0.1. Specs leave them out at their defaults, which is how that release trains: its specs keep their
digests, and its jobs resume from their checkpoints. A new field belongs here."""
PARTS = {LoraSettings: "lora", Optimization: "optimization"}


def _default(kind: type, name: str) -> Any:
    return next(f.default for f in fields(kind) if f.name == name)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFile:
    """Input of ``python -m engine.training.runtime RUN.json``: the spec and the paths on this machine."""

    spec: TrainingSpec
    attempt: int = 1
    base_model_dir: Path
    pack_dir: Path
    """Directory with ``manifest.json`` and ``shard-*.parquet`` of the pack; of a mixture, with a directory per pack, by fingerprint."""
    work_dir: Path
    """Checkpoints, metrics, heartbeat and exit evidence of the job, shared by its attempts on this machine."""
    reference_dir: Path | None = None
    """Reference log-probabilities of the pack, if the method needs them."""
    warm_start_dir: Path | None = None
    """Adapter or whole model named by ``spec.warm_start``."""

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2, default=str))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Parses a run file; `spec` with paths beside it can also be written by hand."""
        body = json.loads(path.read_text())
        given = {name: value for name, value in body.items() if value != ""}
        return from_json(cls, given | {"spec": TrainingSpec.from_dict(body["spec"])}, ignore_unknown=True)


def canonical_json(value: Any) -> str:
    """Returns the canonical JSON that is hashed: sorted keys, no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
