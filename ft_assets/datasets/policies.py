"""What a validation demands and allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ft_assets.datasets.containers import MAX_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class Policies:
    min_examples: int = 100
    """Good examples that training needs at least."""
    max_examples: int | None = None
    """Of the tenant's tier; None: no limit."""
    bad_rows: Literal["reject", "drop"] = "reject"
    """reject: one bad row refuses the file. drop: bad rows are reported and left out."""
    over_long: Literal["reject", "truncate"] = "truncate"
    """Of examples over `max_seq_len`, when it and the tokenizer are known; they are counted either way."""
    deduplicate: bool = True
    """Keep only the first of rows whose normalised text is equal."""
    max_bytes: int = MAX_BYTES
    """Of the decompressed file."""

    def shaping(self) -> dict[str, Any]:
        """The settings that decide which rows a dataset holds: part of its id."""
        return {"bad_rows": self.bad_rows, "over_long": self.over_long, "deduplicate": self.deduplicate}
