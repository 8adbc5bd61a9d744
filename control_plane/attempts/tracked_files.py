"""Files that a tracked run shows beside its numbers. None of them has a row of the tenant's data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from control_plane.attempts.claims import Claim
from control_plane.jobs import results
from control_plane.platform.context import Platform
from ft_assets.training.loss_curve_svg import loss_curve_svg
from ft_assets.training.spec import TrainingSpec

SPEC = "spec.json"
RESULT = ("adapter_config.json", "config.json", "manifest.json")
"""Of an adapter or a whole model, in the directory of the finished training."""


def of_spec(spec: TrainingSpec) -> dict[str, bytes]:
    """The resolved spec: every setting of the training, defaults included."""
    return {SPEC: as_json(spec.to_dict())}


def of_attempt(platform: Platform, held: Claim, result: Path) -> dict[str, bytes]:
    """The job's loss curve and measurements so far, and what describes the finished model in `result`, where there is one."""
    found = {}
    if curve := loss_curve_svg(results.metric_lines(platform, held.job_id)):
        found["loss_curve.svg"] = curve.encode()
    with results.table(platform, held.job_id) as table:
        found[results.FILENAME] = table.read()
    return found | {f"model/{name}": (result / name).read_bytes() for name in RESULT if (result / name).is_file()}


def as_json(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, indent=2, sort_keys=True).encode()
