"""A job's curve, thinned where it is read: evenly spread, to the newest step, with every validation."""

from __future__ import annotations

import itertools

import pytest

from control_plane.jobs import results
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.transitions import record_many
from control_plane.platform.context import Platform
from control_plane.platform.job_events import Event, metrics_event
from control_plane.tenants.rules import Tenant


@pytest.fixture
def job(platform: Platform, tenant: Tenant, training_file: str) -> str:
    """A job with 1,000 steps and a validation every 130, beside another whose steps were reported in turn with them."""
    both = [
        str(
            jobs.submit(
                platform, tenant.id, JobRequest.from_body({"model": "tiny-base", "training_file": training_file, "seed": seed})
            ).job.id
        )
        for seed in (1, 2)
    ]
    events: list[tuple[str, Event]] = []
    for step in range(1, 1001):
        events += [(one, metrics_event({"step": step, "train_loss": 1.0 / step})) for one in both]
        if step % 130 == 0:
            events.append((both[0], metrics_event({"step": step, "valid_loss": 2.0 / step})))
    with platform.engine.begin() as conn:
        record_many(conn, events, now=platform.clock())
    return both[0]


def test_a_long_curve_is_thinned_evenly(platform: Platform, job: str) -> None:
    lines = results.metric_lines(platform, job, most=100)
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps[0] <= 20 and steps[-1] == 1000
    assert 90 <= len(steps) <= 101
    assert max(b - a for a, b in itertools.pairwise(steps)) <= 20
    assert [line["step"] for line in lines if "eval_loss" in line] == [130, 260, 390, 520, 650, 780, 910]
    assert all(line["loss"] == 1.0 / line["step"] for line in lines if "loss" in line), "of this job, not of the other"


def test_a_curve_of_fewer_steps_is_whole(platform: Platform, job: str) -> None:
    assert results.metric_lines(platform, job, most=100_000) == results.metric_lines(platform, job)


def test_a_job_without_steps_has_no_curve(platform: Platform, tenant: Tenant, training_file: str, job: str) -> None:
    request = JobRequest.from_body({"model": "tiny-base", "training_file": training_file, "seed": 3})
    assert results.metric_lines(platform, jobs.submit(platform, tenant.id, request).job.id, most=100) == []
