"""JSON columns of ``jobs``, as records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStartSource:
    """The adapter, whole model or checkpoint that a job's initial weights come from."""

    adapter: str
    """Name for display."""
    manifest_sha256: str
    base_model: str
    base_digest: str
    object_prefix: str
    lora: Mapping[str, Any]
    """Hyperparameters that must not change: rank, alpha, and the modules if they were chosen. Empty for a whole model."""
    adapter_id: str | None = None
    checkpoint_id: str | None = None

    @property
    def whole(self) -> bool:
        """Whether it is a whole model instead of an adapter."""
        return not self.lora

    def to_row(self) -> Mapping[str, object]:
        return {k: v for k, v in asdict(self).items() if v is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationProgress:
    """Progress of an evaluation, before its process starts and while it runs."""

    phase: str = "setup"
    subject: str | None = None
    suite: str | None = None
    done: int = 0
    """Requests answered, of all subjects together."""
    total: int | None = None
    """Requests to be answered; None: not known yet."""
    eta_s: float | None = None
