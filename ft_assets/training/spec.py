"""The resolved training spec: frozen, hashed, and all that the training process reads.

A spec holds digests and numbers, no paths: the same spec means the same training on any machine. The paths of one
attempt on one machine are in the :class:`RunFile` around it.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSettings:
    rank: int
    alpha: float
    dropout: float = 0.05
    target_modules: str | tuple[str, ...] = "all-linear"


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimization:
    learning_rate: float
    num_epochs: float
    windows_per_device: int
    """Packed windows in a micro-batch of one process."""
    accumulation_steps: int
    """Micro-batches per optimizer step."""
    schedule: Literal["linear", "cosine", "constant"] = "cosine"
    warmup_ratio: float = 0.03
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    adam_betas: tuple[float, float] = (0.9, 0.999)
    optimizer: str = "adamw_torch"
    max_steps: int | None = None
    """Optimizer steps at most; None: `num_epochs` decides."""

    def total_steps(self, *, num_windows: int, world_size: int) -> int:
        """Optimizer steps of a run: the last micro-batch and the last accumulation of an epoch may be partial."""
        batches = math.ceil(num_windows / (self.windows_per_device * world_size))
        per_epoch = max(math.ceil(batches / self.accumulation_steps), 1)
        steps = math.ceil(self.num_epochs * per_epoch)
        return steps if self.max_steps is None else min(steps, self.max_steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPolicy:
    every_steps: int = 500
    """Steps between checkpoints; whichever of this and `every_s` comes first."""
    every_s: float = 600.0
    """Seconds between checkpoints: bounds the work lost to a kill."""
    keep_last: int = 3
    """At least 2: the newest may be the one that a crash tore."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSpec:
    method: str
    """``sft`` today; a registered method module."""
    adapter: Literal["lora", "qlora", "full"]
    base_model: str
    base_digest: str
    pack_fingerprint: str
    dataset_id: str
    max_seq_len: int
    optimization: Optimization
    lora: LoraSettings | None
    checkpoint: CheckpointPolicy
    precision: Literal["fp32", "bf16", "fp16"]
    gradient_checkpointing: bool
    world_size: int
    seed: int
    recipe: str
    """``<name>@<version>`` of the recipe that gave the defaults."""
    lock_sha256: str
    """Digest of requirements.lock: every dependency of the training process."""
    commit: str
    """Commit of the platform's code."""
    image: str
    """Container image by digest, or ``local`` for a subprocess of this checkout."""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(canonical_json(asdict(self)).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Inverse of :meth:`to_dict`; unknown or missing fields are a ``ValueError`` that names them."""
        known = {f.name for f in fields(cls)}
        if set(data) != known:
            raise ValueError(f"training spec fields differ: unknown {sorted(set(data) - known)}, missing {sorted(known - set(data))}")
        lora = data["lora"]
        if lora is not None and not isinstance(lora["target_modules"], str):
            lora = {**lora, "target_modules": tuple(lora["target_modules"])}
        opt = {**data["optimization"], "adam_betas": tuple(data["optimization"]["adam_betas"])}
        return cls(
            **{
                **data,
                "lora": None if lora is None else LoraSettings(**lora),
                "optimization": Optimization(**opt),
                "checkpoint": CheckpointPolicy(**data["checkpoint"]),
            }
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFile:
    """What ``python -m ft_assets.training.runtime RUN.json`` is given: the spec and where things are on this machine."""

    spec: TrainingSpec
    attempt: int
    base_model_dir: Path
    pack_dir: Path
    """Directory with ``manifest.json`` and ``shard-*.parquet`` of the pack."""
    work_dir: Path
    """Checkpoints, metrics, heartbeat and exit evidence of the job; shared by its attempts on this machine."""

    def write(self, path: Path) -> None:
        body = {"spec": self.spec.to_dict(), "attempt": self.attempt}
        body |= {k: str(getattr(self, k)) for k in ("base_model_dir", "pack_dir", "work_dir")}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(body, indent=2))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Parse a run file; ``spec`` alone with paths beside it is the form people write by hand too."""
        body = json.loads(path.read_text())
        return cls(
            spec=TrainingSpec.from_dict(body["spec"]),
            attempt=int(body.get("attempt", 1)),
            base_model_dir=Path(body["base_model_dir"]),
            pack_dir=Path(body["pack_dir"]),
            work_dir=Path(body["work_dir"]),
        )


def canonical_json(value: Any) -> str:
    """One spelling per value: sorted keys, no spaces. What is hashed."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
