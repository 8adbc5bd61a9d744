"""What ``python -m ft_assets.evals.runner RUN.json`` is given and what it leaves: ``eval-result.json``.

The result holds one section per subject (``base``, ``adapter``, ``previous``), each with its raw answers: scores are
computed from them afterwards (:mod:`ft_assets.evals.report`), so a new metric needs no new generation, and a base
section can be kept and passed again as ``base_scores``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from ft_assets.errors import InvalidRequest
from ft_assets.evals import suites

RESULT_NAME = "eval-result.json"
EXIT_OK, EXIT_BAD_INPUT, EXIT_INTERNAL, EXIT_STOPPED = 0, 64, 70, 75
"""As sysexits.h: usage, software, temporary failure (SIGTERM: the same run may be started again)."""
ADAPTER_NOT_APPLIED = "adapter_not_applied"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalRun:
    base_model_dir: Path
    adapter_dir: Path | None
    """The adapter to judge; None scores the base alone."""
    previous_adapter_dir: Path | None = None
    """The last accepted adapter of the same lineage, for comparison."""
    holdout: Path | None = None
    """JSONL of items (see :mod:`suites`)."""
    golden: bool = True
    validation_pack_dir: Path | None = None
    """Pack directory whose ``val-*.parquet`` windows give the perplexity."""
    max_new_tokens: int = 256
    max_items: int = 200
    batch_size: int = 32
    """Prompts generated together; affects speed only."""
    base_scores: Mapping[str, Any] | None = None
    """Base section of an earlier result; used if its suite digest is this run's, else the base answers again."""
    out_dir: Path

    @property
    def decoding(self) -> suites.Decoding:
        return suites.Decoding(max_new_tokens=self.max_new_tokens, golden_max_new_tokens=min(64, self.max_new_tokens))

    def holdout_items(self) -> list[suites.Item]:
        return suites.read_items(self.holdout)[: self.max_items] if self.holdout else []

    def suite_digest(self) -> str:
        """Key of this run's base answers: known before anything is generated."""
        return suites.suite_digest(
            self.holdout_items(),
            with_golden=self.golden,
            decoding=self.decoding,
            validation_sha256=self._validation_sha256(),
            max_items=self.max_items,
        )

    def _validation_sha256(self) -> str | None:
        if self.validation_pack_dir is None:
            return None
        whole = hashlib.sha256()
        for shard in sorted(self.validation_pack_dir.glob("val-*.parquet")):
            whole.update(hashlib.sha256(shard.read_bytes()).digest())
        return whole.hexdigest()

    def write(self, path: Path) -> None:
        body = {f.name: getattr(self, f.name) for f in fields(self)}
        write_json(path, {k: str(v) if isinstance(v, Path) else v for k, v in body.items()})

    @classmethod
    def read(cls, path: Path) -> Self:
        """Parse a run file; an unknown, missing or impossible field is refused by name."""
        body = json.loads(path.read_text(encoding="utf-8"))
        known = {f.name for f in fields(cls)}
        missing = {"base_model_dir", "adapter_dir", "out_dir"} - set(body)
        if set(body) - known or missing:
            raise InvalidRequest(
                f"run file {path}: unknown fields {sorted(set(body) - known)}, missing fields {sorted(missing)}", code="bad_run_file"
            )
        for key in ("max_new_tokens", "max_items", "batch_size"):
            if not isinstance(body.get(key, 1), int) or body.get(key, 1) < 1:
                raise InvalidRequest(f"run file {path}: {key} {body[key]!r} is not a whole number of at least 1", code="bad_run_file")
        paths = ("base_model_dir", "adapter_dir", "previous_adapter_dir", "holdout", "validation_pack_dir", "out_dir")
        run = cls(**{**body, **{key: Path(body[key]) for key in paths if body.get(key)}})
        for key in paths[:-1]:
            place = getattr(run, key)
            if place is not None and not place.exists():
                raise InvalidRequest(f"run file {path}: {key} {place} does not exist", code="bad_run_file")
        return run


def write_json(path: Path, value: Any) -> None:
    """Write beside and rename: a reader sees the old file or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
    beside.replace(path)


def read_result(out_dir: Path) -> dict[str, Any]:
    """The result that a finished run left in `out_dir`."""
    data: dict[str, Any] = json.loads((out_dir / RESULT_NAME).read_text(encoding="utf-8"))
    return data
