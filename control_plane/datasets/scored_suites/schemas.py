"""Bodies of ``/v1/scored_suites``."""

from __future__ import annotations

from typing import Literal

from control_plane.http.schemas import ApiModel, EpochSeconds, JsonObject


class ScoredSuite(ApiModel):
    """A version of one of your scored suites."""

    id: str
    """Id of the version, starting with `scored-`."""
    object: Literal["scored_suite"] = "scored_suite"
    """Object type, always `scored_suite`."""
    name: str
    """Name to list in `eval_config.suites` of a job."""
    version: int
    """Version, from 1; `NAME@VERSION` in `eval_config.suites` names it."""
    metric: str
    """How answers are scored: a metric of holdout answers, or `reward` for a grader."""
    grader: JsonObject | None
    """Grader of the answers; null if a metric scores them."""
    max_drop: float
    """Most that an adapter's score may fall below its base model's."""
    min_score: float | None
    """Least score that an adapter needs; null if it needs none."""
    num_items: int
    """Items in the suite."""
    sha256: str
    """SHA-256 digest of the items."""
    created_at: EpochSeconds
    """When the version was added, as Unix time in seconds."""
