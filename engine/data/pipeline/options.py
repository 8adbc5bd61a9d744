"""Options of a validation's workers: plain values, because they cross to other processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engine.data.policies import Policies
from engine.data.schema import Format


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockOptions:
    scratch: Path
    """Directory of the parts that pass 2 reads; made and removed by the caller."""
    policies: Policies
    format: Format | None = None
    """Format of the preceding rows; None: the first recognizable row decides."""
    extra_fields: tuple[str, ...] = ()
    """Unused top-level fields of this file's rows: the fast path accepts and counts them."""
    column_map: Mapping[str, str] | None = None
    columns_known: bool = False
    """The reader has already mapped the columns and decoded the cells (CSV, Parquet, JSON arrays)."""
    model_dir: Path | None = None
    """Files of the base model: its tokenizer finds control tokens and counts tokens; None: content is only checked for suspicious text."""
    max_seq_len: int | None = None
    suites: Path | None = None
    """Directory of a saved ``SuiteIndex``; None: contamination is not checked."""
    classifier: str = "builtin"
    """Toxicity classifier, as accepted by ``load_classifier``; used only if the policy requires it."""
    keep: bool = True
    """Writes the examples to `scratch`; False if only the report is needed."""
