"""One round bills what is late, samples storage, watches budgets and issues invoices; what fails keeps nothing else from going."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from control_plane.billing import budgets, ledger
from control_plane.billing.invoices import service as invoices
from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.sweeps import service as sweeps
from control_plane.platform.context import Platform
from control_plane.tenant_data import deletion, deletion_requests
from control_plane.tenants import service as tenants
from control_plane.tenants.tables import tenants as tenants_table
from control_plane.worker.periodic_work import FREQUENT, METERING, RETENTION, ROUNDS
from resources.tenant_records import DagsterRecords
from tests.support.jobs.metered_job import AT, at_time, metered_job
from tests.support.jobs.started_job import start_job


@pytest.fixture
def submitted(fresh_platform: Platform, write_chat_rows: Callable[..., Path]) -> tuple[Platform, str, str]:
    """A platform with one job that validates its files."""
    owner, _ = tenants.create(fresh_platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
    with write_chat_rows().open("rb") as rows:
        file = uploaded_files.create(fresh_platform, owner.id, rows, filename="rows.jsonl", purpose="fine-tune")
    request = JobRequest.from_body({"model": "tiny-base", "training_file": file.id})
    return fresh_platform, owner.id, jobs.submit(fresh_platform, owner.id, request).job.id


def test_a_round_does_all_that_is_due_and_a_second_one_nothing_more(fresh_platform: Platform) -> None:
    job = metered_job(fresh_platform)
    budgets.create(at_time(fresh_platform, AT), job.tenant, name="b", limit_micros=4_000_000, thresholds=[100])
    with fresh_platform.engine.begin() as conn:
        job.started(conn, 1, AT)
        job.ended(conn, 1, AT + timedelta(hours=1))
    told = METERING.run(at_time(fresh_platform, AT + timedelta(hours=2)))
    assert told == "attempts billed late: 1; tenants whose storage was sampled: 1; budget alerts: 1; invoices issued: 0"
    assert METERING.run(at_time(fresh_platform, AT + timedelta(hours=3))).count(": 0") == 4
    assert METERING.run(at_time(fresh_platform, AT + timedelta(days=30))).endswith("invoices issued: 1")
    assert len(invoices.list_issued(fresh_platform, job.tenant).items) == 1
    assert ledger.balance(fresh_platform, job.tenant) == 4_000_000


def test_every_round_runs_over_an_empty_platform(fresh_platform: Platform) -> None:
    assert {each.name: "failed" in each.run(fresh_platform) for each in ROUNDS} == dict.fromkeys(
        ("frequent", "hardware", "metering", "cleanup", "model-registry", "retention"), False
    )


def test_a_round_pauses_what_runs_beyond_the_hard_cap(fresh_platform: Platform, write_chat_rows: Callable[..., Path]) -> None:
    held = start_job(fresh_platform, write_chat_rows)
    with fresh_platform.engine.begin() as conn:
        conn.execute(sa.update(tenants_table).values(hard_gpu_hours=0.001))
    assert held.job_id in FREQUENT.run(fresh_platform)
    job = jobs.get(fresh_platform, held.tenant, held.job_id).job
    assert (job.state, job.reason, job.stop_requested) == ("pausing", "hard_cap_reached", "pause")


def test_a_trial_that_waited_is_submitted_when_there_is_room(submitted: tuple[Platform, str, str]) -> None:
    platform, tenant, job_id = submitted
    file = jobs.get(platform, tenant, job_id).job.training_file
    grid = {"parameters": {"n_epochs": [1, 2, 3, 4, 5]}}  # beside one job, in a tier of five
    sweep = sweeps.create(platform, tenant, {"model": "tiny-base", "training_file": file, "sweep": grid})
    assert "trials submitted: none" in FREQUENT.run(platform)
    jobs.cancel(platform, tenant, job_id)
    assert "trials submitted: ftjob-" in FREQUENT.run(platform)
    assert all(t.job_id is not None for t in sweeps.get(platform, tenant, sweep.id).trials)


def test_a_round_of_retention_deletes_what_was_asked_for_and_says_what_it_did(submitted: tuple[Platform, str, str]) -> None:
    platform, tenant, job_id = submitted
    asked = deletion_requests.request_tenant(platform, tenant, confirm=tenant, reason="contract ended", requested_by="operator")
    told = RETENTION.run(replace(platform, records=(DagsterRecords(settings=platform.settings),)))
    assert "failed" not in told
    assert "dagster records" in str(deletion.get(platform, tenant, asked.id).waiting_for), "no Dagster runs in this home"
    assert deletion.carry_out_all(platform) == []
    assert "second look" in str(deletion.get(platform, tenant, asked.id).waiting_for)
    later = platform.clock() + timedelta(minutes=10)
    assert deletion.carry_out_all(replace(platform, clock=lambda: later)) == [asked.id]
    assert jobs.get(platform, tenant, job_id).job.state == "cancelled"
    assert deletion.get(platform, tenant, asked.id).proof["num_objects"] > 0


def test_prices_that_cannot_be_read_keep_no_other_work_from_going(fresh_platform: Platform) -> None:
    broken = fresh_platform.settings.home / "prices.yaml"
    broken.parent.mkdir(exist_ok=True)
    broken.write_text("lists: 5")
    metered_job(fresh_platform)
    told = METERING.run(replace(fresh_platform, settings=replace(fresh_platform.settings, prices_file=broken)))
    assert "storage was sampled: failed, ValueError: " in told
    assert told.endswith("invoices issued: 0")


def test_one_attempt_that_cannot_be_billed_is_told_and_keeps_nothing_else_from_going(fresh_platform: Platform) -> None:
    odd, sound = metered_job(fresh_platform), metered_job(fresh_platform)
    with fresh_platform.engine.begin() as conn:
        for job in (replace(odd, tier="gold"), sound):
            job.started(conn, 1, AT)
            job.ended(conn, 1, AT + timedelta(hours=1))
    told = METERING.run(at_time(fresh_platform, AT + timedelta(hours=2)))
    assert "attempts billed late: failed, FtError: 1 of 2 attempts failed" in told
    assert told.endswith("invoices issued: 0")
    assert sound.owes() == 4_000_000
