"""Filters of the job list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

import sqlalchemy as sa

from control_plane.jobs.submission import ALIASES
from control_plane.jobs.tables import jobs, trained_on_dataset
from control_plane.platform.job_states import OPENAI_STATUS, JobState
from core.errors import InvalidRequest
from engine.training import registered_methods

LATEST = 253_402_300_799
"""Last second of the year 9999."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFilter:
    """A filter; a job has to match every field that is set."""

    metadata: Mapping[str, str] = field(default_factory=dict)
    """Pairs that the job must have."""
    without_metadata: bool = False
    status: str | None = None
    """One of OpenAI's status words."""
    state: str | None = None
    """One of the platform's states."""
    model: str | None = None
    """The base model, or the fine-tuned model."""
    method: str | None = None
    dataset: str | None = None
    """Id of the dataset version that is trained on."""
    created_after: int | None = None
    """Unix seconds, inclusive."""
    created_before: int | None = None
    """Unix seconds, exclusive."""

    def clauses(self) -> list[sa.ColumnElement[bool]]:
        """Return the conditions on ``jobs``; ``InvalidRequest`` (``invalid_filter``) for a value that no job can have."""
        found: list[sa.ColumnElement[bool]] = []
        if self.metadata:
            found.append(jobs.c.metadata.contains(dict(self.metadata)))
        if self.without_metadata:
            found.append(jobs.c.metadata.is_(None))
        if self.status is not None:
            _one_of("status", self.status, sorted(set(OPENAI_STATUS.values())))
            found.append(jobs.c.state.in_([state.value for state, word in OPENAI_STATUS.items() if word == self.status]))
        if self.state is not None:
            found.append(jobs.c.state == _one_of("state", self.state, [s.value for s in JobState]))
        if self.model is not None:
            found.append(sa.or_(jobs.c.model == self.model, jobs.c.fine_tuned_model == self.model))
        if self.method is not None:
            _one_of("method", self.method, [*ALIASES, *registered_methods()])
            found.append(jobs.c.method == ALIASES.get(self.method, self.method))
        if self.dataset is not None:
            found.append(trained_on_dataset(self.dataset))
        if self.created_after is not None:
            found.append(jobs.c.created_at >= _time("created_after", self.created_after))
        if self.created_before is not None:
            found.append(jobs.c.created_at < _time("created_before", self.created_before))
        return found


def _one_of(name: str, value: str, known: list[str]) -> str:
    if value not in known:
        raise InvalidRequest(f"{name} {value[:80]!r} does not exist; use one of {', '.join(known)}", code="invalid_filter", param=name)
    return value


def _time(name: str, value: int) -> datetime:
    if not 0 <= value <= LATEST:
        raise InvalidRequest(f"{name} {value} is outside 0..{LATEST} (seconds since 1970)", code="invalid_filter", param=name)
    return datetime.fromtimestamp(value, UTC)
