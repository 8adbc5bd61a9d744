"""The registry's record of one adapter: complete lineage, or no record."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from datetime import datetime
from typing import Final

from core.errors import LineageIncomplete
from engine.adapters.stages import Stage

LORA_ADAPTER: Final = "lora_adapter"
FULL_MODEL: Final = "full_model"
LORA_ONLY = frozenset({"rank", "alpha", "modules"})
"""Fields without a value for a full model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterRecord:
    """A row of the table ``adapters``. Fields without a default are required: its lineage must be complete, and never changes."""

    id: str
    tenant_id: str
    name: str
    """``ft:<base>:<tenant>:<suffix>:<opaque>``: the value of ``model`` in requests; never reused."""
    type: str
    """``lora_adapter`` or ``full_model``."""
    base_model: str
    base_digest: str
    job_id: str
    dataset_id: str
    pack_fingerprint: str
    spec_sha256: str
    lock_sha256: str
    commit: str
    metrics: Mapping[str, float]
    eval_report_key: str
    eval_passed: bool
    rank: int | None
    alpha: float | None
    modules: tuple[str, ...]
    object_prefix: str
    manifest_sha256: str
    stage: Stage
    created_at: datetime
    promoted_at: datetime | None = None
    """When it last became a production adapter; None if never."""
    deprecated_at: datetime | None = None
    archived_at: datetime | None = None
    """When its files were deleted."""
    parent_adapter_id: str | None = None
    """The adapter that its training started from; None without a warm start."""
    parent_checkpoint_id: str | None = None
    """The same for a start from a checkpoint."""
    approval: str = "none"
    """``none`` if no approval is required; else ``pending``, ``approved`` or ``rejected``."""
    approved_by: str | None = None
    """Id of the key that approved or rejected it."""
    approved_at: datetime | None = None
    approval_note: str | None = None
    released_by: str | None = None
    """Id of the key or member, or ``operator:<id>``, who released it although it did not pass its gate."""
    released_at: datetime | None = None
    release_reason: str | None = None
    dataset_ids: tuple[str, ...] = ()
    """Dataset versions of a mixture, `dataset_id` first; empty if it was trained on that one alone."""

    @property
    def is_cleared(self) -> bool:
        """Returns whether it passed its gate, or was released."""
        return self.eval_passed or self.released_at is not None

    @property
    def served_base(self) -> str:
        """Returns the base model of the servers that answer with it; a whole model has a server of its own, whose base it is."""
        return self.name if self.type == FULL_MODEL else self.base_model


def check_complete(record: AdapterRecord) -> AdapterRecord:
    """Returns `record` if every link of its lineage exists; raises ``LineageIncomplete`` naming the gaps."""
    optional = LORA_ONLY if record.type == FULL_MODEL else frozenset()
    required = [f.name for f in fields(record) if f.default is MISSING and f.name not in optional]
    gaps = [name for name in required if getattr(record, name) in (None, "", (), {})]
    if gaps:
        raise LineageIncomplete(
            f"adapter {record.id or '(no id)'} of job {record.job_id or '(no job)'} cannot be registered without: {', '.join(gaps)}; "
            "run the step that makes what is missing again"
        )
    return record


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterName:
    base: str
    tenant: str
    suffix: str
    opaque: str

    def __str__(self) -> str:
        return f"ft:{self.base}:{self.tenant}:{self.suffix}:{self.opaque}"

    @property
    def logical(self) -> str:
        """Returns the name without its version, which stands for the newest production adapter of this lineage."""
        return f"ft:{self.base}:{self.tenant}:{self.suffix}"


def make_adapter_name(base: str, tenant: str, suffix: str | None, opaque: str) -> AdapterName:
    """Returns the name of a new adapter; the user's suffix is reduced to characters that are safe in a name."""
    safe = re.sub(r"[^a-z0-9_-]+", "-", (suffix or "").lower()).strip("-")[:64]
    return AdapterName(base=base, tenant=tenant, suffix=safe, opaque=opaque)


def parse_adapter_name(name: str) -> AdapterName:
    """Inverse of ``str(AdapterName)``; ``ValueError`` for anything else."""
    head, *rest = name.rsplit(":", 3)
    if not head.startswith("ft:") or len(rest) != 3:
        raise ValueError(f"{name!r} is not of the form ft:<base>:<tenant>:<suffix>:<opaque>")
    return AdapterName(base=head.removeprefix("ft:"), tenant=rest[0], suffix=rest[1], opaque=rest[2])
