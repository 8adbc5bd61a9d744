"""A base model is updated under an adapter in production: real training, real evaluations, two kinds of new bytes."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from starlette.types import ASGIApp

from control_plane.api.app import create_app
from control_plane.attempts import start
from control_plane.attempts.service import claim, finish
from control_plane.attempts.tables import attempts
from control_plane.attempts.watch import Watcher
from control_plane.datasets.uploads import uploaded_files
from control_plane.evaluations import service as evaluations
from control_plane.evaluations.tables import evaluations as table
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import job_events
from control_plane.jobs.transitions import transition
from control_plane.models import base_updates, catalogue
from control_plane.models.catalogue import Given, add_local
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.queue.tables import reservations
from control_plane.serving import accepted_bases
from control_plane.tenants.rules import Tenant
from core.errors import Conflict
from ft_assets.adapters import step as adapter_step
from ft_assets.datasets import step as dataset_step
from resources.launcher import LocalLauncher
from tests.control_plane.models.test_base_updates import variant
from tests.support.jobs.followed_evaluations import following
from tests.support.models.tiny_model import build_tiny_model
from tests.support.processes.workload_logs import log_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
HYPERPARAMETERS = {"n_epochs": 3, "learning_rate": 5e-3, "rank": 16, "max_seq_len": 128, "batch_size": 8}
EVAL = {"task_metric": "perplexity", "max_items": 20, "max_new_tokens": 8, "capability": [], "judge": False, "skip": ["golden", "safety"]}


@pytest.fixture
def operated(platform: Platform, serve: Callable[[ASGIApp], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Platform:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings = replace(platform.settings, home=tmp_path / "home")
    made = replace(platform, settings=settings, models=catalogue.catalogue_of(settings))
    return replace(made, settings=replace(settings, internal_url=serve(create_app(made))))


@pytest.fixture
def launcher(operated: Platform) -> Iterator[LocalLauncher]:
    made = LocalLauncher(operated.settings.work_dir / "launcher")
    yield made
    root = operated.settings.work_dir / "launcher"
    for workload in root.iterdir() if root.is_dir() else ():
        made.stop(workload.name, grace_s=1.0)


def rows(path: Path) -> Path:
    """Conversations of one form: what a model of 0.2M parameters learns of them, it learns in a minute."""
    lines = []
    for number in range(240):
        asked, answer = f"Order {number * 37 % 1000:03d}?", f"Order {number * 37 % 1000:03d} is on its way and arrives on day {number % 7}."
        lines.append(json.dumps({"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]}))
    path.write_text("\n".join(lines))
    return path


def train(platform: Platform, launcher: LocalLauncher, tenant: str, model: str, file_id: str) -> str:
    """A job from its submission to the end of its training; returns its id."""
    body = {"model": model, "training_file": file_id, "hyperparameters": HYPERPARAMETERS, "eval_config": EVAL, "seed": 1}
    job_id = str(jobs.submit(platform, tenant, JobRequest.from_body(body)).job.id)
    dataset_step.pin_dataset(platform, tenant, job_id)
    dataset_step.pack(platform, tenant, job_id)
    now = platform.clock()
    with platform.engine.begin() as conn:
        transition(conn, job_id, JobState.PROVISIONING, message="Granted.", now=now, attempt=1)
        conn.execute(sa.insert(reservations).values(job_id=job_id, attempt=1, pool="local", num_gpus=1, granted_at=now))
        conn.execute(sa.insert(attempts).values(job_id=job_id, attempt=1, workload=f"{job_id}-a1"))
    held = claim(platform, tenant, job_id)
    assert start.start_or_adopt(platform, launcher, held) is None
    with contextlib.closing(Watcher(platform=platform, launcher=launcher, answers=lambda: True)) as watcher:
        while not (ended := watcher.look()):
            time.sleep(0.5)
    (ending,) = ended
    assert ending.outcome == "succeeded", (ending, log_of(platform.settings.work_dir / "launcher", held.workload))
    assert finish(platform, held, ending) is JobState.EVALUATING
    return job_id


def test_an_update_goes_through_where_the_adapter_holds_and_stays_blocked_where_it_does_not(
    operated: Platform, launcher: LocalLauncher, tenant: Tenant, tmp_path: Path
) -> None:
    model = f"acme/{uuid.uuid4().hex[:8]}"
    old = build_tiny_model(tmp_path / "old")
    first = add_local(operated.settings, model, old, Given(license="MIT"))
    with rows(tmp_path / "rows.jsonl").open("rb") as stream:
        file = uploaded_files.create(operated, tenant.id, stream, filename="rows.jsonl", purpose="fine-tune")
    job_id = train(operated, launcher, tenant.id, model, file.id)
    with following(operated, launcher) as made:
        own = made.evaluate(tenant.id, job_id)
    assert own.verdict.passed, own.verdict
    adapter = adapter_step.conclude(operated, tenant.id, job_id)
    assert adapter.stage == "production"

    base_updates.stage_local(operated, model, build_tiny_model(tmp_path / "scrambled", seed=7))
    (failed,) = evaluate(operated, launcher, model)
    assert failed.state == "failed", failed
    assert failed.reasons
    with pytest.raises(Conflict, match=failed.name) as blocked:
        base_updates.apply(operated, model)
    assert blocked.value.code == "base_update_blocked"
    with operated.engine.connect() as conn:
        told = conn.execute(sa.select(job_events).where(job_events.c.job_id == job_id, job_events.c.code == "reevaluation_failed")).one()
    assert told.level == "warn"
    assert operated.models.get(model).digest == first.digest

    base_updates.abandon(operated, model)
    base_updates.stage_local(operated, model, variant(tmp_path / "new", old, scale=0.01))
    (passed,) = evaluate(operated, launcher, model)
    assert passed.state == "accepted", passed
    done = base_updates.apply(operated, model)
    assert (done.previous, done.blocking) == ((first.digest,), ())
    with operated.engine.connect() as conn:
        assert accepted_bases.accepted_digests(operated.models, conn, adapter) == {first.digest, done.digest}
        row = conn.execute(
            sa.select(table).where(table.c.adapter_id == adapter.id, table.c.outcome == "passed", table.c.kind != "gate")
        ).one()
    report = json.loads(operated.objects.get_bytes(row.report_key))["report"]
    assert (report["base_digest"], report["adapter_manifest_sha256"]) == (done.digest, adapter.manifest_sha256)
    assert row.report_key.startswith(f"{adapter.object_prefix}/evaluations/{row.id}/")


def evaluate(platform: Platform, launcher: LocalLauncher, model: str) -> tuple[base_updates.Affected, ...]:
    """Order what the update waits for and carry it out, as their runs would."""
    ordered = base_updates.evaluate(platform, model)
    for affected in ordered.adapters:
        order = evaluations.find(platform, str(affected.evaluation_id))
        with following(platform, launcher) as made:
            assert made.evaluate_order(order).state == "succeeded"
    return base_updates.status(platform, model).adapters
