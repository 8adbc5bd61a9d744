"""Estimates of a trace's jobs as the platform makes them: by the cost model, wrong by as much as it was found to be, and by history.

1. A job trains one of :data:`MODELS` base models on its GPUs. Each of these kinds takes as many times as long as the cost model says as one
   of the published throughputs that chose nothing of the model, drawn by the seed (`benchmarks.estimates`: 0.86 to 1.73).
2. Runs of one kind differ by :data:`RUNS` besides.
3. With history, `control_plane.jobs.estimates.rules` corrects the time by the jobs that ended before a job comes, as the platform does:
   the newest of all, and the newest of its base model.
4. A job that runs is expected to end by the pace of its steps, and one that comes back to need its share of them, as in the platform.

True durations stay those of the trace, so that its tables can be read beside those with exact estimates.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Sequence
from functools import cache

from benchmarks.estimates import published
from control_plane.jobs.estimates.rules import Finished, Kind, correction, remaining_s
from engine.scheduler.simulation.simulated_job import SimulatedJob

MODELS = 6
"""Base models that the jobs of a class are spread over, by their tenants: as many as the shipped recipes know sizes."""
RUNS = 0.2
"""Standard deviation of the logarithm: runs of one model differ by 10 to 30 % (`control_plane.jobs.estimates.rules.PRIOR_JOBS`)."""
STEP_S = 10.0
"""Of an optimizer step."""
NEWEST = 100
"""Finished jobs that are looked at (`control_plane.jobs.estimates.expected_time`)."""


class ModelEstimates:
    """Of one simulation."""

    def __init__(self, jobs: Sequence[SimulatedJob], *, seed: int, history: bool) -> None:
        rng = random.Random(f"estimates-{seed}")
        ratios = _ratios()
        self.history = history
        self.kinds = {job.job_id: _kind(job) for job in jobs}
        bias = {kind: rng.choice(ratios) for kind in sorted(set(self.kinds.values()), key=repr)}
        self.modelled_s = {job.job_id: job.duration_s / (bias[self.kinds[job.job_id]] * rng.lognormvariate(0.0, RUNS)) for job in jobs}
        self.finished: list[Finished] = []

    def expected_s(self, job: SimulatedJob) -> float:
        """Of a job that comes now."""
        modelled, kind = self.modelled_s[job.job_id], self.kinds[job.job_id]
        if not self.history:
            return modelled
        newest = self.finished[::-1]
        of_all = newest[:NEWEST]
        of_model = [one for one in newest[NEWEST:] if one.kind.model == kind.model]
        seen = sum(one.kind.model == kind.model for one in of_all)
        return correction(kind, [*of_all, *of_model[: NEWEST - seen]]).of(modelled)

    def left_s(self, job: SimulatedJob, estimate_s: float, *, done_s: float) -> float:
        """Of a job that comes back: its share of the steps."""
        return estimate_s * max(0.0, 1.0 - done_s / job.duration_s)

    def remaining_s(self, job: SimulatedJob, estimate_s: float, *, ran_s: float, load_s: float, done_s: float) -> float:
        """Until an attempt ends that has run for `ran_s`, `load_s` of it before its first step, and took over `done_s`."""
        steps = math.ceil(job.duration_s / STEP_S)
        begun = int(done_s / STEP_S)
        return remaining_s(
            expected_s=estimate_s + load_s, ran_s=ran_s, setup_s=load_s, from_step=begun,
            step=min(steps, begun + int(max(0.0, ran_s - load_s) / STEP_S)), total_steps=steps,
        )  # fmt: skip

    def ended(self, job: SimulatedJob) -> None:
        self.finished.append(Finished(kind=self.kinds[job.job_id], modelled_s=self.modelled_s[job.job_id], took_s=job.duration_s))


@cache
def _ratios() -> list[float]:
    return published.held_out(published.read())


def _kind(job: SimulatedJob) -> Kind:
    model = zlib.crc32((job.tenant if job.tenant != "tenant" else job.job_id).encode()) % MODELS
    return Kind(gpu_type="h100-80gb", model=f"{job.job_class}-{model}", way=f"sft/{job.job_class}", num_gpus=job.num_gpus)
