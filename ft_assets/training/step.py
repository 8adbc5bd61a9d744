"""The work of the ``checkpoint`` asset: one attempt of training, followed to its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from control_plane.attempts import checkpoint_transfer, follow, health
from control_plane.attempts import service as attempts
from control_plane.attempts.claims import Claim, Ending
from control_plane.billing import ledger
from control_plane.jobs import results
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.platform.protocols import Launcher


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """An ended attempt, and the state of its job afterwards."""

    held: Claim
    ending: Ending
    state: JobState

    @property
    def succeeded(self) -> bool:
        return self.state is JobState.EVALUATING

    @property
    def failure(self) -> str:
        why = self.ending.failure.message if self.ending.failure else f"the job is {self.state}"
        return f"attempt {self.held.attempt}: {why}; the job is now {self.state}"


def train(platform: Platform, launcher: Launcher, tenant: str, job_id: str, *, say: Callable[[str], None]) -> Trained:
    """Starts the attempt that holds the job's reservation, or adopts its running workload, and follows it to its end."""
    held = follow.take(platform, launcher, tenant, job_id)
    ending = follow.follow(platform, launcher, held, say=say)
    return Trained(held=held, ending=ending, state=attempts.finish(platform, held, ending))


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The committed weights of a job, and the metrics of its training."""

    manifest_sha256: str
    uri: str
    measurements: Sequence[Mapping[str, Any]]
    """One entry per logged optimizer step."""
    cost_micros: int

    def last(self, name: str) -> float:
        """Returns the last measurement of `name`; 0 if there is none."""
        return next((m[name] for m in reversed(self.measurements) if m.get(name)), 0.0)


def checkpoint_of(platform: Platform, held: Claim) -> Checkpoint:
    health.flush(platform)
    return Checkpoint(
        manifest_sha256=attempts.committed(platform, held.job_id)[0].manifest_sha256,
        uri=platform.objects.uri(checkpoint_transfer.final_prefix(held.tenant, held.job_id, held.attempt)),
        measurements=results.metric_lines(platform, held.job_id),
        cost_micros=ledger.cost_of_job(platform, held.job_id),
    )
