"""Jobs that wait for their conclusion."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from control_plane.evaluations.reports import Evaluated
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.transitions import transition
from control_plane.models import catalogue
from control_plane.models.catalogue import Given, add_local
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.tenants.rules import Tenant
from core import layout
from engine.evals.gate.verdict import Finding, Verdict
from ft_assets.datasets import step as dataset_step
from tests.support.jobs.evaluated_jobs import LONGER, MODEL, REPORT, Evaluate, store_final
from tests.support.jobs.finished_job import prepare
from tests.support.models.tiny_model import build_tiny_model


@pytest.fixture
def operated(platform: Platform, tmp_path: Path) -> Platform:
    """A platform with an operator's catalogue of its own, which holds one model, and no inference server."""
    settings = replace(platform.settings, home=tmp_path / "home")
    add_local(settings, MODEL, build_tiny_model(tmp_path / "base"), Given(license="MIT"))
    return replace(platform, settings=settings, models=catalogue.catalogue_of(settings))


@pytest.fixture
def evaluated_job(operated: Platform, tenant: Tenant, training_file: str, tmp_path: Path) -> Evaluate:
    """Makes a job that was trained and evaluated, with that verdict, and is to be concluded; returns its id."""

    def make(*findings: Finding, eval_config: dict[str, Any] | None = None, whole: bool = False, broken: bool = False, **body: Any) -> str:
        request = {"model": MODEL, "training_file": training_file, **body, **({"eval_config": eval_config} if eval_config else {})}
        job_id = str(jobs.submit(operated, tenant.id, JobRequest.from_body(request)).job.id)
        dataset_step.pin_dataset(operated, tenant.id, job_id)
        spec = prepare(operated, tenant.id, job_id)
        with operated.engine.begin() as conn:
            for state in (JobState.PROVISIONING, JobState.RUNNING, JobState.EVALUATING):
                transition(conn, job_id, state, message="")
        store_final(operated, tenant.id, job_id, tmp_path / job_id, spec, whole=whole, broken=broken)
        blocks = any(f.blocking for f in findings)
        verdict = Verdict(outcome="quarantined" if blocks else "passed", findings=findings)
        found = Evaluated(
            report=REPORT,
            verdict=verdict,
            advice=(LONGER,),
            key=f"{layout.eval_prefix(tenant.id, job_id)}/report.json",
        )
        operated.objects.put_bytes(found.key, json.dumps(found.to_dict()).encode())
        return job_id

    return make
