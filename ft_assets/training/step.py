"""The work of the ``checkpoint`` asset: one attempt of training, followed to its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from control_plane.attempts import service as attempts
from control_plane.attempts import start
from control_plane.attempts.claims import Claim
from control_plane.jobs import results
from control_plane.jobs.transitions import job_row
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.platform.protocols import Launcher
from core.errors import Conflict
from core.telemetry import correlation


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """An ended attempt, and the state of its job afterwards."""

    held: Claim
    outcome: str
    last_step: int
    trained_tokens: int
    state: JobState

    @property
    def succeeded(self) -> bool:
        return self.state is JobState.EVALUATING

    @property
    def failure(self) -> str:
        return f"attempt {self.held.attempt} ended as {self.outcome}; the job is now {self.state}, and its events say why"


def train(platform: Platform, launcher: Launcher, tenant: str, job_id: str, *, say: Callable[[str], None]) -> Trained:
    """Starts the workload of the attempt that holds the job's reservation, or adopts it, and waits until the attempt has ended.

    Raises ``Conflict`` (``attempt_stopped``) if it was paused, preempted or cancelled. The workload's agent
    and the worker do the rest: nothing is lost when this step dies.
    """
    held = start.take(platform, launcher, tenant, job_id)
    correlation.bind(attempt=held.attempt)
    unbegun = start.start_or_adopt(platform, launcher, held)
    if unbegun is not None:
        say(f"not started: {unbegun.outcome}")
        attempts.finish(platform, held, unbegun)
    return _wait(platform, held)


def _wait(platform: Platform, held: Claim) -> Trained:
    ended = start.wait_for_end(platform, held)
    with platform.engine.connect() as conn:
        job = job_row(conn, held.tenant, held.job_id)
    trained = Trained(
        held=held, outcome=ended.outcome, last_step=ended.last_step, trained_tokens=job.trained_tokens or 0, state=job.state
    )  # fmt: skip
    if ended.stopped:
        raise Conflict(trained.failure, code="attempt_stopped")
    return trained


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The committed weights of a job, and the metrics of its training."""

    manifest_sha256: str
    uri: str
    measurements: Sequence[Mapping[str, Any]]
    """One entry per logged optimizer step."""

    def last(self, name: str) -> float:
        """Returns the last measurement of `name`; 0 if there is none."""
        return next((m[name] for m in reversed(self.measurements) if m.get(name)), 0.0)


def checkpoint_of(platform: Platform, held: Claim) -> Checkpoint:
    return Checkpoint(
        manifest_sha256=attempts.committed(platform, held.job_id)[0].manifest_sha256,
        uri=platform.objects.uri(attempts.final_prefix(held)),
        measurements=results.metric_lines(platform, held.job_id),
    )
