"""Validates one file: a self-contained order, and its result.

``python -m control_plane.sandbox.task_validate DIRECTORY`` does so in a child process without secrets
(:mod:`control_plane.sandbox.sandbox_parent`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from control_plane.sandbox.sandbox_child import main
from core.typed_json import from_json
from engine.data import PARALLEL_FROM_BYTES, IngestResult, PassProgress, Policies, validate_file


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """The file to validate, and how."""

    path: Path
    filename: str
    output: Path
    """File for the valid rows."""
    called: str = ""
    """How commands that the report proposes name the file: its id at the Hub; empty: by `filename`."""
    column_map: Mapping[str, str] = field(default_factory=dict)
    policies: Policies = field(default_factory=Policies)
    model_dir: Path | None = None
    """Of the base model whose tokenizer counts; None: no tokens are counted."""
    max_seq_len: int | None = None
    suites: Path | None = None
    """Directory of the index of contamination lists; None: no search for contamination."""

    max_workers: int = 1
    """Worker processes of a file that is large enough for some."""
    classifier: str = "builtin"
    """That of the toxicity check; see ``engine.data.checks.toxicity``."""

    def to_dict(self) -> Mapping[str, Any]:
        return {**asdict(self), "policies": self.policies.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return from_json(cls, {**data, "policies": Policies(**data["policies"])})


def carry_out(order: Order, *, progress: Callable[[PassProgress], None] | None = None) -> IngestResult:
    """Validate in this process; a large file is validated by worker processes."""
    parallel = order.path.stat().st_size >= PARALLEL_FROM_BYTES
    return validate_file(
        order.path,
        filename=order.filename,
        called=order.called,
        column_map=order.column_map or None,
        policies=order.policies,
        output=order.output,
        model_dir=order.model_dir,
        max_seq_len=order.max_seq_len,
        suites=order.suites,
        classifier=order.classifier,
        progress=progress,
        workers=min(os.cpu_count() or 1, order.max_workers) if parallel else 1,
    )


def _work(order: Mapping[str, Any], _: str, progress: Callable[[PassProgress], None]) -> Mapping[str, Any]:
    return asdict(carry_out(Order.from_dict(order), progress=progress))


class Unused:
    """Hides modules that pyarrow (at its first column) and numba (before its first kernel) import only because they are there: half of
    the CPU time of a small file."""

    NAMES = ("pandas", "scipy")

    @classmethod
    def find_spec(cls, name: str, *_: object) -> None:
        """Of ``importlib.abc.MetaPathFinder``: other modules are left to the next finder."""
        if name in cls.NAMES:
            raise ModuleNotFoundError(f"{name} is not used in a validation", name=name)


if __name__ == "__main__":
    sys.meta_path.insert(0, Unused)
    main(_work)
