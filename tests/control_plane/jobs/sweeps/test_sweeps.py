"""Sweeps on a real database: checked whole, admitted as jobs, never losing a trial."""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.datasets.scored_suites import service as scored_suites
from control_plane.datasets.scored_suites.service import Scoring
from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.duplicate_requests import TWIN_WINDOW, Attempt
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.sweeps import service as sweeps
from control_plane.jobs.sweeps.rules import SweepStatus
from control_plane.jobs.sweeps.schemas import Sweep
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.jobs.tables import sweep_trials
from control_plane.jobs.tables import sweeps as sweeps_table
from control_plane.jobs.transitions import transition
from control_plane.platform.context import Actor, Logins, Platform
from control_plane.platform.job_states import FINAL, JobState
from control_plane.quotas import service as quotas
from control_plane.tenants import service as tenants
from control_plane.tenants import suspension
from control_plane.tenants.rules import Tenant
from control_plane.tenants.tables import idempotency_keys
from control_plane.tenants.tables import tenants as tenants_table
from core.errors import Conflict, Forbidden, InvalidRequest, NotFound, QuotaExceeded
from core.telemetry import provenance
from resources.database.engine import make_engine
from tests.support.jobs.finished_job import COMMIT, finish

Create = Callable[..., Sweep]
RATES = [1e-4, 2e-4, 3e-4, 4e-4, 5e-4, 6e-4, 7e-4, 8e-4]
ROOM = 5
"""Jobs in flight of a standard tenant."""


@pytest.fixture
def create(platform: Platform, tenant: Tenant, training_file: str) -> Create:
    def make(
        attempt: Attempt | None = None, body: dict[str, Any] | None = None, on: Platform = platform, **sweep: Any
    ) -> Sweep:  # fmt: skip
        given = {"model": "tiny-base", "training_file": training_file, "sweep": {"parameters": {"learning_rate": RATES}, **sweep}}
        return sweeps.create(on, tenant.id, given | (body or {}), attempt)

    return make


def sent(key: str | None = None, **how: Any) -> Attempt:
    return Attempt(received_at=datetime.now(UTC), key=key, **how)


def jobs_of(platform: Platform, tenant: Tenant) -> list[Any]:
    with platform.engine.connect() as conn:
        return list(conn.execute(sa.select(jobs_table).where(jobs_table.c.tenant_id == tenant.id).order_by(jobs_table.c.created_at)).all())


def fail(platform: Platform, job_id: str) -> None:
    with platform.engine.begin() as conn:
        transition(conn, job_id, JobState.FAILED, message="")


def test_trials_are_ordinary_jobs_that_differ_in_their_parameters_alone(platform: Platform, tenant: Tenant, create: Create) -> None:
    view = create(
        parameters={"learning_rate": [1e-4, 2e-4], "rank": [8, 16]}, seed=9, body={"suffix": "s", "hyperparameters": {"n_epochs": 2}}
    )
    made = jobs_of(platform, tenant)
    assert view.status == SweepStatus.RUNNING
    assert [t.job_id for t in view.trials] == [j.id for j in made]
    assert [j.hyperparameters for j in made][:2] == [
        {"n_epochs": 2, "learning_rate": 1e-4, "rank": 8},
        {"n_epochs": 2, "learning_rate": 1e-4, "rank": 16},
    ]
    assert {(j.seed, j.suffix, j.state, j.request["auto_promote"]) for j in made} == {(9, "s", "validating", False)}
    assert jobs.get(platform, tenant.id, made[0].id).sweep_id == view.id


@pytest.mark.parametrize(
    ("asked", "rules"),
    [
        (None, {"mode": "experiment"}),
        ({"max_items": 9}, {"mode": "experiment", "max_items": 9}),
        ({"mode": "monitor"}, {"mode": "monitor"}),
    ],
)
def test_trials_are_experiments_unless_the_request_names_a_mode(
    platform: Platform, tenant: Tenant, create: Create, asked: dict[str, Any] | None, rules: dict[str, Any]
) -> None:
    create(parameters={"rank": [8]}, body={"eval_config": asked})
    assert [job.request["eval_config"] for job in jobs_of(platform, tenant)] == [rules]


def test_all_trials_are_judged_by_one_version_of_a_scored_suite(platform: Platform, tenant: Tenant, create: Create) -> None:
    def add(answer: str) -> int:
        rows, scoring = io.BytesIO(json.dumps({"prompt": "May I?", "completion": answer}).encode()), Scoring(metric="exact_match")
        return scored_suites.add(platform, tenant.id, rows, name="refunds", filename="refunds.jsonl", scoring=scoring).version

    assert add("yes") == 1
    create(body={"eval_config": {"suites": ["refunds"]}})
    assert add("no") == 2
    fail(platform, jobs_of(platform, tenant)[0].id)
    assert len(sweeps.advance(platform)) == 1
    assert [job.request["eval_config"]["suites"] for job in jobs_of(platform, tenant)] == [["refunds@1"]] * (ROOM + 1)


def test_trial_that_did_not_pass_its_gate_can_be_the_best(platform: Platform, tenant: Tenant, create: Create) -> None:
    sweep = create(parameters={"rank": [8, 16]})
    first, second = (str(trial.job_id) for trial in sweep.trials)
    finish(platform, tenant.id, first, eval_loss=0.5, stage="draft")
    adapter_id = finish(platform, tenant.id, second, eval_loss=0.25, stage="quarantined")
    found = sweeps.get(platform, tenant.id, sweep.id)
    assert found.best is not None
    assert (found.best.job_id, found.best.status, found.best.value) == (second, "succeeded", 0.25)
    assert (found.best.adapter_id, found.best.fine_tuned_model) == (adapter_id, None)


def test_every_job_of_a_sweep_names_the_key_that_submitted_the_sweep(platform: Platform, tenant: Tenant, create: Create) -> None:
    create(on=platform.in_scope_of(tenant.id, Actor(kind="key", id="key_ci")))
    assert [job.api_key_id for job in jobs_of(platform, tenant)] == ["key_ci"] * ROOM
    fail(platform, jobs_of(platform, tenant)[0].id)
    sweeps.advance(platform)
    assert [job.api_key_id for job in jobs_of(platform, tenant)] == ["key_ci"] * (ROOM + 1), "the worker submitted the last one"


def test_parameters_join_those_of_the_method_where_the_body_has_them_there(platform: Platform, tenant: Tenant, create: Create) -> None:
    method = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2}}}
    create(parameters={"rank": [8]}, body={"method": method})
    assert jobs_of(platform, tenant)[0].hyperparameters == {"n_epochs": 2, "rank": 8}


@pytest.mark.parametrize(
    ("parameters", "param"),
    [({"rank": [8, 7]}, "sweep.parameters.rank"), ({"no_such": [1]}, "sweep.parameters.no_such"), ({"n_epochs": [1, "many"]}, None)],
)
def test_one_bad_value_refuses_the_whole_before_anything_is_made(
    platform: Platform, tenant: Tenant, create: Create, parameters: dict[str, Any], param: str | None
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        create(parameters=parameters)
    assert refused.value.param == (param or f"sweep.parameters.{next(iter(parameters))}")
    assert jobs_of(platform, tenant) == []
    assert sweeps.list_sweeps(platform, tenant.id).items == []


def test_a_body_that_no_job_could_have_is_refused_as_a_job_would_be(platform: Platform, tenant: Tenant, create: Create) -> None:
    with pytest.raises(NotFound, match="file-none"):
        create(body={"training_file": "file-none"})
    with pytest.raises(InvalidRequest, match="tier"):
        create(body={"tier": "premium"})
    assert sweeps.list_sweeps(platform, tenant.id).items == []


def test_what_exceeds_the_jobs_in_flight_waits_and_none_is_lost(platform: Platform, tenant: Tenant, create: Create) -> None:
    sweep_id = create().id
    assert len(jobs_of(platform, tenant)) == ROOM
    assert sweeps.advance(platform) == []
    request = JobRequest.from_body({"model": "tiny-base", "training_file": jobs_of(platform, tenant)[0].training_file})
    with pytest.raises(QuotaExceeded):
        jobs.submit(platform, tenant.id, request)
    first = jobs_of(platform, tenant)[0].id
    fail(platform, first)
    (sixth,) = sweeps.advance(platform)
    assert sweeps.get(platform, tenant.id, sweep_id).trials[ROOM].job_id == sixth
    for job in jobs_of(platform, tenant)[1:]:
        fail(platform, job.id)
    assert len(sweeps.advance(platform)) == 2
    assert sweeps.advance(platform) == []
    asked = sorted(j.hyperparameters["learning_rate"] for j in jobs_of(platform, tenant))
    assert asked == RATES
    with platform.engine.connect() as conn:
        assert conn.execute(sa.select(sweeps_table.c.submitted_at).where(sweeps_table.c.id == sweep_id)).scalar_one() is not None


def test_the_trials_of_a_suspended_tenant_wait_and_none_is_refused(platform: Platform, tenant: Tenant, create: Create) -> None:
    sweep_id = create().id
    for job in jobs_of(platform, tenant):
        fail(platform, job.id)
    suspension.suspend(platform, tenant.id, reason="unpaid")
    assert sweeps.advance(platform) == []
    assert sweeps._submit_waiting(platform, tenant.id, sweep_id) == ([], False), "also where the tick had begun before"
    request = JobRequest.from_body({"model": "tiny-base", "training_file": jobs_of(platform, tenant)[0].training_file})
    with pytest.raises(Forbidden, match="unpaid"):
        jobs.submit(platform, tenant.id, request)
    assert [t.error for t in sweeps.get(platform, tenant.id, sweep_id).trials] == [None] * len(RATES)
    suspension.resume(platform, tenant.id)
    assert len(sweeps.advance(platform)) == len(RATES) - ROOM


def test_ticks_at_the_same_time_submit_each_trial_once(platform: Platform, tenant: Tenant, create: Create) -> None:
    create()
    for job in jobs_of(platform, tenant):
        fail(platform, job.id)
    with ThreadPoolExecutor(6) as pool:
        made = [job for found in pool.map(lambda _: sweeps.advance(platform), range(6)) for job in found]
    assert len(set(made)) == len(made) == len(RATES) - ROOM
    assert sorted(j.hyperparameters["learning_rate"] for j in jobs_of(platform, tenant)) == RATES


def test_a_tick_that_died_after_a_submission_finds_its_job_again(platform: Platform, tenant: Tenant, create: Create) -> None:
    sweep_id = create(parameters={"rank": [8, 16]}).id
    before = [j.id for j in jobs_of(platform, tenant)]
    forget_jobs(platform, sweep_id)
    with platform.engine.begin() as conn:
        conn.execute(sa.update(sweeps_table).where(sweeps_table.c.id == sweep_id).values(submitted_at=None))
    assert sweeps.advance(platform) == before
    assert [j.id for j in jobs_of(platform, tenant)] == before


def test_a_trial_whose_file_went_away_is_refused_with_the_reason_and_the_others_stay(
    platform: Platform, tenant: Tenant, create: Create, training_file: str
) -> None:
    sweep_id = create().id
    for job in jobs_of(platform, tenant):
        fail(platform, job.id)
    uploaded_files.delete(platform, tenant.id, training_file)
    assert sweeps.advance(platform) == []
    view = sweeps.get(platform, tenant.id, sweep_id)
    assert [t.error.code for t in view.trials[ROOM:]] == ["file_not_found"] * 3
    assert view.status == SweepStatus.FAILED


def test_the_best_is_the_succeeded_trial_with_the_lowest_validation_loss(platform: Platform, tenant: Tenant, create: Create) -> None:
    sweep_id = create(parameters={"rank": [8, 16, 32]}).id
    first, second, third = (j.id for j in jobs_of(platform, tenant))
    assert sweeps.get(platform, tenant.id, sweep_id).best is None
    finish(platform, tenant.id, first, eval_loss=0.7)
    finish(platform, tenant.id, second, eval_loss=0.6)
    fail(platform, third)
    view = sweeps.get(platform, tenant.id, sweep_id)
    (listed,) = sweeps.list_sweeps(platform, tenant.id).items
    assert (listed.status, listed.best) == (SweepStatus.SUCCEEDED, None), "a list measures nothing"
    assert view.best is not None
    assert (view.status, view.best.job_id, view.best.value) == (SweepStatus.SUCCEEDED, second, 0.6)
    found = sweeps.compare(platform, tenant.id, sweep_id)
    assert found.differing["rank"] == [8, 16, 32]
    assert [c.eval_loss for c in found.jobs] == [0.7, 0.6, None]


def test_the_best_may_be_chosen_by_a_score_of_the_eval_report(platform: Platform, tenant: Tenant, create: Create) -> None:
    sweep_id = create(parameters={"rank": [8, 16]}, metric="holdout/exact_match", goal="maximize").id
    for job, score in zip(jobs_of(platform, tenant), (0.9, 0.4), strict=True):
        finish(platform, tenant.id, job.id, scores={"holdout/exact_match": score})
    best = sweeps.get(platform, tenant.id, sweep_id).best
    assert best is not None
    assert best.parameters == {"rank": 8}


def test_a_cancelled_sweep_ends_its_jobs_and_submits_none_of_the_rest(platform: Platform, tenant: Tenant, create: Create) -> None:
    sweep_id = create().id
    done = jobs_of(platform, tenant)[0].id
    finish(platform, tenant.id, done)
    view = sweeps.cancel(platform, tenant.id, sweep_id)
    assert view.status == SweepStatus.CANCELLED
    assert sweeps.advance(platform) == []
    states = [j.state for j in jobs_of(platform, tenant)]
    assert states == ["succeeded"] + ["cancelled"] * (ROOM - 1)
    assert sweeps.cancel(platform, tenant.id, sweep_id).status == SweepStatus.CANCELLED


def test_a_sweep_that_has_ended_cannot_be_cancelled(platform: Platform, tenant: Tenant, create: Create) -> None:
    sweep_id = create(parameters={"rank": [8]}).id
    fail(platform, jobs_of(platform, tenant)[0].id)
    with pytest.raises(Conflict, match="is already failed"):
        sweeps.cancel(platform, tenant.id, sweep_id)


def test_cancelling_while_ticks_run_leaves_no_job_alive(platform: Platform, tenant: Tenant, create: Create) -> None:
    sweep_id = create().id
    for job in jobs_of(platform, tenant):
        fail(platform, job.id)
    with ThreadPoolExecutor(4) as pool:
        ticks = [pool.submit(sweeps.advance, platform) for _ in range(3)]
        sweeps.cancel(platform, tenant.id, sweep_id)
        for tick in ticks:
            tick.result()
    sweeps.advance(platform)
    assert all(JobState(j.state) in FINAL for j in jobs_of(platform, tenant))


def test_the_same_key_is_the_same_sweep(platform: Platform, tenant: Tenant, create: Create) -> None:
    first = create(sent("k"), parameters={"rank": [8]})
    assert create(sent("k"), parameters={"rank": [8]}).id == first.id
    with pytest.raises(Conflict, match="another body"):
        create(sent("k"), parameters={"rank": [16]})
    assert len(jobs_of(platform, tenant)) == 1


def test_the_same_body_within_a_minute_or_a_retry_is_the_same_sweep(platform: Platform, tenant: Tenant, create: Create) -> None:
    first = create(sent(), parameters={"rank": [8]}).id
    assert create(sent(), parameters={"rank": [8]}).id == first
    with platform.engine.begin() as conn:
        earlier = sweeps_table.c.created_at - 2 * TWIN_WINDOW
        conn.execute(sa.update(sweeps_table).where(sweeps_table.c.id == first).values(created_at=earlier))
    assert create(sent(retried_for=3 * TWIN_WINDOW), parameters={"rank": [8]}).id == first
    meant = create(sent(twin_meant=True), parameters={"rank": [8]}).id
    sweeps.cancel(platform, tenant.id, meant)
    later = create(sent(), parameters={"rank": [8]}).id
    assert len({first, meant, later}) == 3 and len(jobs_of(platform, tenant)) == 3


def test_sweeps_are_listed_newest_first_and_to_their_own_tenant_alone(platform: Platform, tenant: Tenant, create: Create) -> None:
    made = [create(parameters={"rank": [r]}).id for r in (8, 16)]
    assert [v.id for v in sweeps.list_sweeps(platform, tenant.id).items] == made[::-1]
    other, _ = tenants.create(platform, f"o-{uuid.uuid4().hex[:8]}")
    assert sweeps.list_sweeps(platform, other.id).items == []
    for use in (sweeps.get, sweeps.cancel, sweeps.compare):
        with pytest.raises(NotFound, match="no sweep"):
            use(platform, other.id, made[0])


def test_a_sweep_over_a_large_grid_is_admitted_at_once(platform: Platform, create: Create, write_chat_rows: Callable[..., Path]) -> None:
    view = create(parameters={"learning_rate": RATES, "rank": [8, 16, 32, 64], "n_epochs": [1, 2, 3]})
    assert len(view.trials) == 96
    assert sum(t.job_id is not None for t in view.trials) == ROOM


def test_sweeps_that_wait_are_few(platform: Platform, tenant: Tenant, create: Create) -> None:
    for _ in range(sweeps.MAX_OPEN):
        create()
    with pytest.raises(QuotaExceeded, match=r"sweep limit reached \(10 open, limit 10\)"):
        create()


@pytest.mark.parametrize(
    "body",
    [
        {"method": {"type": "supervised", "supervised": "fast"}},
        {"method": {"type": "supervised", "supervised": {"hyperparameters": 3}}},
        {"hyperparameters": [1]},
        {"sweep": [1]},
        {"sweep": None},
        {"sweep": {"parameters": {"rank": [8]}, "metric": "a/\0"}},
        {"sweep": {"parameters": {"learning_rate": [float("nan")]}}},
        {"sweep": {"strategy": "random", "max_jobs": 2, "parameters": {"learning_rate": {"min": float("nan"), "max": 1}}}},
    ],
)
def test_a_body_of_odd_shapes_is_refused_and_breaks_nothing(create: Create, body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        create(body=body)


def forget_jobs(platform: Platform, sweep_id: str) -> None:
    """As it would be, had the process been killed before it wrote the jobs to their trials."""
    with platform.engine.begin() as conn:
        conn.execute(sa.update(sweep_trials).where(sweep_trials.c.sweep_id == sweep_id).values(job_id=None))


def test_jobs_that_were_not_written_to_their_trials_yet_are_cancelled_with_the_sweep(
    platform: Platform, tenant: Tenant, create: Create
) -> None:
    sweep_id = create().id
    forget_jobs(platform, sweep_id)
    view = sweeps.cancel(platform, tenant.id, sweep_id)
    assert sum(t.job_id is not None for t in view.trials) == ROOM
    assert {j.state for j in jobs_of(platform, tenant)} == {"cancelled"}


def test_a_job_that_appears_after_the_sweep_was_cancelled_is_cancelled_by_the_next_round(
    platform: Platform, tenant: Tenant, create: Create
) -> None:
    sweep_id = create(parameters={"rank": [8]}).id
    forget_jobs(platform, sweep_id)
    with platform.engine.begin() as conn:
        conn.execute(sa.update(sweeps_table).where(sweeps_table.c.id == sweep_id).values(cancelled_at=platform.clock()))
    sweeps.advance(platform)
    assert [j.state for j in jobs_of(platform, tenant)] == ["cancelled"]


def test_one_connection_is_enough_for_a_sweep(platform: Platform, tenant: Tenant, training_file: str) -> None:
    engine = make_engine(platform.engine.url.render_as_string(hide_password=False), pool_size=1, max_overflow=0)
    narrow = replace(platform, logins=Logins(platform=engine, operator=engine, tenant=engine))
    body = {"model": "tiny-base", "training_file": training_file, "sweep": {"parameters": {"rank": [8, 16]}}}
    view = sweeps.create(narrow, tenant.id, body)
    assert [t.job_id is not None for t in view.trials] == [True, True]
    assert sweeps.cancel(narrow, tenant.id, view.id).status == SweepStatus.CANCELLED
    assert {j.state for j in jobs_of(platform, tenant)} == {"cancelled"}
    engine.dispose()


def test_a_sweep_that_is_stored_is_the_answer_whatever_breaks_then(platform: Platform, tenant: Tenant, create: Create) -> None:
    def clock() -> datetime:
        if sweeps.list_sweeps(platform, tenant.id).items:
            raise RuntimeError("the clock stands still")
        return platform.clock()

    view = create(on=replace(platform, clock=clock))
    assert view.status == SweepStatus.RUNNING
    assert jobs_of(platform, tenant) == []
    assert len(sweeps.advance(platform)) == ROOM


def test_what_breaks_in_one_sweep_stops_no_other(
    platform: Platform, tenant: Tenant, create: Create, caplog: pytest.LogCaptureFixture
) -> None:
    broken, whole = (create(parameters={"rank": [r]}).id for r in (8, 16))
    with platform.engine.begin() as conn:
        conn.execute(sa.update(sweep_trials).values(job_id=None))
        conn.execute(sa.delete(idempotency_keys))
        conn.execute(sa.update(sweeps_table).where(sweeps_table.c.id.in_((broken, whole))).values(submitted_at=None))
        conn.execute(sa.update(sweeps_table).where(sweeps_table.c.id == broken).values(settings={}))
    (made,) = sweeps.advance(platform)
    assert sweeps.get(platform, tenant.id, whole).trials[0].job_id == made
    assert f"the trials of {broken} wait" in caplog.text
    with platform.engine.begin() as conn:
        conn.execute(sa.update(sweeps_table).where(sweeps_table.c.id == broken).values(submitted_at=platform.clock()))


def test_sweeps_of_a_tenant_without_room_cost_a_round_nothing(platform: Platform, create: Create) -> None:
    def statements() -> int:
        seen: list[str] = []
        listen = lambda *given: seen.append(given[2])  # noqa: E731
        sa.event.listen(platform.engine, "before_cursor_execute", listen)
        assert sweeps.advance(platform) == []
        sa.event.remove(platform.engine, "before_cursor_execute", listen)
        return len(seen)

    create()
    one = statements()
    for _ in range(3):
        create()
    assert statements() == one < 6


def test_a_sweep_that_waits_for_gpu_hours_says_so_and_is_tried_again_when_there_are_more(
    platform: Platform, tenant: Tenant, create: Create
) -> None:
    one = quotas.of_job(platform, tenant.id, create(parameters={"learning_rate": RATES[:1]}).trials[0].job_id).gpu_seconds / 3600

    def cap(hours: float) -> None:
        with platform.engine.begin() as conn:
            conn.execute(sa.update(tenants_table).where(tenants_table.c.id == tenant.id).values(hard_gpu_hours=hours))

    def tried() -> bool:
        seen: list[str] = []
        listen = lambda *given: seen.append(given[2])  # noqa: E731
        sa.event.listen(platform.engine, "before_cursor_execute", listen)
        sweeps.advance(platform)
        sa.event.remove(platform.engine, "before_cursor_execute", listen)
        return any("UPDATE sweep" in statement for statement in seen)

    cap(1000)
    sweep_id = create(parameters={"learning_rate": RATES[:8]}).id
    assert "jobs are in flight" in sweeps.get(platform, tenant.id, sweep_id).waiting_reason
    cap(one * 5.5)
    for job in jobs_of(platform, tenant)[:2]:
        fail(platform, job.id)
    cap(one * 3.5)
    assert tried()
    assert "GPU-hours" in sweeps.get(platform, tenant.id, sweep_id).waiting_reason
    assert not tried(), "nothing has changed"
    cap(one * 4.5)
    assert tried()
    assert len([t for t in sweeps.get(platform, tenant.id, sweep_id).trials if t.job_id]) == 5
    later = replace(platform, clock=lambda: platform.clock() + timedelta(minutes=6))
    assert not tried()
    assert sweeps.advance(later) == []
    sweeps.cancel(platform, tenant.id, sweep_id)
    assert sweeps.get(platform, tenant.id, sweep_id).waiting_reason is None


@pytest.mark.parametrize("num", [0, 1])
def test_a_sweep_with_few_jobs_by_now_can_be_compared(platform: Platform, tenant: Tenant, create: Create, num: int) -> None:
    create(parameters={"learning_rate": RATES[: ROOM - num]})
    sweep_id = create(parameters={"learning_rate": RATES[:2]}).id
    assert len(sweeps.compare(platform, tenant.id, sweep_id).jobs) == num


def test_a_key_has_all_the_characters_that_a_jobs_key_has(platform: Platform, tenant: Tenant, create: Create) -> None:
    first = create(sent("k" * 255), parameters={"rank": [8]})
    assert create(sent("k" * 255), parameters={"rank": [8]}).id == first.id
    with pytest.raises(InvalidRequest, match="1 to 255"):
        create(sent(""), parameters={"rank": [8]})


def test_a_trial_that_a_job_of_its_tenant_has_answered_since_is_reused(
    platform: Platform, tenant: Tenant, create: Create, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FT_COMMIT", COMMIT)
    provenance.commit.cache_clear()
    view = create()
    for job in jobs_of(platform, tenant):
        fail(platform, job.id)
    body = sweeps.trial_body({"model": view.model, "training_file": view.training_file}, view.seed, {"learning_rate": RATES[ROOM]})
    own = str(jobs.submit(platform, tenant.id, JobRequest.from_body(body)).job.id)
    finish(platform, tenant.id, own)
    sweeps.advance(platform)
    trial = sweeps.get(platform, tenant.id, view.id).trials[ROOM]
    assert (trial.job_id, trial.reused, trial.cost_micros) == (own, True, 0)
    provenance.commit.cache_clear()
