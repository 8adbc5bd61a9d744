"""Progress of a validation or a packing: large files take minutes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class PassProgress:
    """One progress report of a pass over a file; a later one of the same stage is never smaller."""

    stage: str
    """Current step: ``reading``, ``duplicates``, ``writing``, ``tokenizing`` and the like."""
    rows: int
    """Rows done in this stage."""
    bytes: int
    """Bytes done in this stage, of `total_bytes`."""
    total_bytes: int
    """Bytes of the whole stage; 0 if unknown."""
