"""What every worker of a validation is told: plain values, for they travel to other processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ft_assets.datasets.policies import Policies
from ft_assets.datasets.schema import Format


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockOptions:
    scratch: Path
    """Directory of the parts that pass 2 reads; made and removed by the caller."""
    policies: Policies
    format: Format | None = None
    """Of the rows before these; None: the first row that can be recognised decides."""
    extra_fields: tuple[str, ...] = ()
    """Top-level fields that rows of this file have and nothing reads: the fast path lets them pass and counts them."""
    column_map: Mapping[str, str] | None = None
    columns_known: bool = False
    """The reader has mapped the columns and decoded the cells already (CSV, Parquet, JSON arrays)."""
    model_dir: Path | None = None
    """Of the base model: its tokenizer finds control tokens and counts tokens; None: content is only looked at for suspects."""
    max_seq_len: int | None = None
    suites: Path | None = None
    """Directory of a saved ``SuiteIndex``; None: nothing to be contaminated with."""
    classifier: str = "builtin"
    """Of toxicity, as ``load_classifier`` reads it; used only where the policy asks for it."""
    keep: bool = True
    """Write the examples to `scratch`; False where only the report is wanted and nothing later needs the text."""
