"""Tells how far a validation or a packing is: large files take minutes, and whoever waits is told where they are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """One sighting of a pass over a file; a later one of the same stage is never smaller."""

    stage: str
    """What is done now, as a word: ``reading``, ``duplicates``, ``writing``, ``tokenizing`` and the like."""
    rows: int
    """Rows this stage has behind it."""
    bytes: int
    """Bytes this stage has behind it, of `total_bytes`."""
    total_bytes: int
    """Bytes of the whole stage; 0 where that is not known."""
