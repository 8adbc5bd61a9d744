"""One validation as a process of its own: it is told everything in a file and answers in files, and holds no secret.

``python -m control_plane.service.validate_file DIRECTORY`` reads ``order.json`` there and leaves ``result.json``; meanwhile
``progress.json`` says how far it is. It ends with its parent: the pipe on standard input closes when the parent is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from ft_assets.datasets.ingest import Policies, validate_file
from ft_assets.datasets.progress import Progress

ORDER, RESULT, PROGRESS = "order.json", "result.json", "progress.json"
OOM_SCORE = "1000"
"""Of this process (``/proc/self/oom_score_adj``): short of memory, the kernel ends it before anything else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What is validated, and how."""

    path: Path
    filename: str
    output: Path
    """Where the good rows go."""
    column_map: Mapping[str, str] = field(default_factory=dict)
    policies: Policies = field(default_factory=Policies)
    model_dir: Path | None = None
    """Of the base model whose tokenizer counts; None: no tokens are counted."""
    max_seq_len: int | None = None
    suites: Path | None = None
    """Directory of the index of evaluation suites; None: no search for contamination."""

    classifier: str = "builtin"
    """That of the toxicity check; see ``ft_assets.datasets.checks.toxicity``."""

    def to_dict(self) -> dict[str, Any]:
        paths = {name: None if (path := getattr(self, name)) is None else str(path) for name in ("path", "output", "model_dir", "suites")}
        return {
            **paths,
            "filename": self.filename,
            "column_map": dict(self.column_map),
            "policies": asdict(self.policies),
            "max_seq_len": self.max_seq_len,
            "classifier": self.classifier,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        paths = {name: None if data[name] is None else Path(data[name]) for name in ("path", "output", "model_dir", "suites")}
        return cls(**{**data, **paths, "policies": Policies(**data["policies"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Validated:
    report: dict[str, Any]
    content_sha256: str
    num_rows: int
    """Rows kept."""


def carry_out(order: Order, *, progress: Callable[[Progress], None] | None = None, workers: int | None = None) -> Validated:
    """Validate in this process; None `workers`: as many as there are cores."""
    result = validate_file(
        order.path,
        filename=order.filename,
        column_map=order.column_map or None,
        policies=order.policies,
        output=order.output,
        model_dir=order.model_dir,
        max_seq_len=order.max_seq_len,
        suites=order.suites,
        classifier=order.classifier,
        progress=progress,
        workers=workers,
    )
    return Validated(report=result.report.to_dict(), content_sha256=result.content_sha256, num_rows=result.num_rows)


def write_whole(path: Path, value: Mapping[str, Any]) -> None:
    """Write JSON beside and rename: who reads sees all of it, or what was there before."""
    beside = path.with_name(f".{path.name}")
    beside.write_text(json.dumps(value))
    beside.replace(path)


def main() -> None:
    """Carry out the order in the directory that is the only argument."""
    directory = Path(sys.argv[1])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _offer_to_oom_killer()
    order = Order.from_dict(json.loads((directory / ORDER).read_text()))
    done = carry_out(order, progress=lambda p: write_whole(directory / PROGRESS, asdict(p)))
    write_whole(directory / RESULT, asdict(done))


def _end_with_parent() -> None:
    """Wait for the end of standard input, then end this process and its workers: it leads a group of its own."""
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def _offer_to_oom_killer() -> None:
    with contextlib.suppress(OSError):  # no Linux, or not allowed: then the kernel chooses as it likes
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)


if __name__ == "__main__":
    main()
