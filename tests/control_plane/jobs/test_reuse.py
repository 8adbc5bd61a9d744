"""A job that would train what an earlier one has trained is answered with that one: at submission, or once its spec is frozen."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.adapters.service import get_adapter
from control_plane.adapters.tables import adapters
from control_plane.billing.tables import ledger_entries
from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import results
from control_plane.jobs import service as jobs
from control_plane.jobs.duplicate_requests import Attempt
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.platform.context import Platform
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from core.telemetry import provenance
from engine.evals.gate.verdict import Finding, Verdict
from engine.training.spec import Source
from tests.support.jobs.finished_job import COMMIT, finish, prepare, rewrite
from tests.support.platform.database_roles import as_owner

Submit = Callable[..., jobs.Submitted]


@pytest.fixture(autouse=True)
def installed_commit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This code as an image has it: at a commit, without changes."""
    monkeypatch.setenv("FT_COMMIT", COMMIT)
    provenance.commit.cache_clear()
    yield
    provenance.commit.cache_clear()


@pytest.fixture
def submit(platform: Platform, tenant: Tenant, training_file: str) -> Submit:
    def make(*, key: str | None = None, **fields: Any) -> jobs.Submitted:
        body = {"model": "tiny-base", "training_file": training_file, "seed": 3, **fields}
        attempt = Attempt(received_at=platform.clock(), key=key)
        return jobs.submit(platform, tenant.id, JobRequest.from_body({k: v for k, v in body.items() if v is not None}), attempt)

    return make


def row(platform: Platform, job_id: str) -> Any:
    with platform.engine.connect() as conn:
        return conn.execute(sa.select(jobs_table).where(jobs_table.c.id == job_id)).one()


def upload(platform: Platform, tenant: str, path: Path) -> str:
    with path.open("rb") as stream:
        return str(uploaded_files.create(platform, tenant, stream, filename=path.name, purpose="fine-tune").id)


def test_the_same_request_is_answered_with_the_job_that_has_done_it(platform: Platform, tenant: Tenant, submit: Submit) -> None:
    first = submit(hyperparameters={"n_epochs": 2}).job.id
    finish(platform, tenant.id, first)
    again = submit(hyperparameters={"n_epochs": 2, "rank": "auto"}, tier="free")
    assert (again.job.id, again.created, again.reused) == (first, False, True)
    assert again.job.fine_tuned_model


def test_the_same_data_under_another_file_id_is_the_same(
    platform: Platform, tenant: Tenant, submit: Submit, write_chat_rows: Callable[..., Path]
) -> None:
    first = submit().job.id
    finish(platform, tenant.id, first)
    assert submit(training_file=upload(platform, tenant.id, write_chat_rows())).job.id == first
    assert submit(training_file=upload(platform, tenant.id, write_chat_rows(salt=" Please."))).created


@pytest.mark.parametrize(("share", "other_share"), [({"weight": 2}, {"weight": 3}), ({"tokens": 500}, {"tokens": 501})])
def test_a_mixture_is_the_same_only_if_as_much_is_read_of_each_file(
    platform: Platform,
    tenant: Tenant,
    submit: Submit,
    training_file: str,
    write_chat_rows: Callable[..., Path],
    share: dict[str, int],
    other_share: dict[str, int],
) -> None:
    files = training_file, upload(platform, tenant.id, write_chat_rows(40, name="more.jsonl", salt=" Tell me."))
    ids = [uploaded_files.wait_until_validated(platform, file).dataset_id for file in files]

    def mixture(of: dict[str, int]) -> dict[str, Any]:
        return {"training_file": None, "training_files": [{"file": files[0], **share}, {"file": files[1], **of}]}

    first = submit(**mixture(share)).job.id
    read = tuple(Source(dataset_id=str(id_), pack_fingerprint=f"pk_{n}", rows_per_epoch=5) for n, id_ in enumerate(ids))
    finish(platform, tenant.id, first, sources=read)
    assert submit(**mixture(share)).job.id == first
    assert submit(**mixture(other_share)).created


@pytest.mark.parametrize(
    "fields",
    [
        {"force": True},
        {"seed": None},
        {"seed": 4},
        {"hyperparameters": {"n_epochs": 2}},
        {"suffix": "other"},
        {"metadata": {"a": "b"}},
        {"eval_config": {"max_items": 10}},
    ],
)
def test_a_request_that_differs_or_is_forced_is_a_job_of_its_own(
    platform: Platform, tenant: Tenant, submit: Submit, fields: dict[str, Any]
) -> None:
    finish(platform, tenant.id, submit().job.id)
    assert submit().reused, "what is varied here would be reused otherwise"
    made = submit(**fields)
    assert (made.created, made.reused) == (True, False)


def test_a_job_of_another_recipe_is_no_answer(platform: Platform, tenant: Tenant, submit: Submit) -> None:
    first = submit().job.id
    finish(platform, tenant.id, first)
    with platform.engine.begin() as conn:
        conn.execute(sa.update(jobs_table).where(jobs_table.c.id == first).values(recipe="superseded@1"))
    assert submit().created, "the defaults of the present recipe may be others"


def test_a_job_that_runs_or_failed_is_no_answer(platform: Platform, submit: Submit) -> None:
    first = submit().job.id
    assert submit(key="another").created
    assert row(platform, first).state == "validating"


@pytest.mark.parametrize(("stage", "auto_promote", "reused"), [
    ("production", True, True), ("draft", True, False), ("draft", False, True), ("deprecated", False, False), ("archived", False, False),
])  # fmt: skip
def test_only_an_adapter_that_is_there_and_served_if_asked_for_is_an_answer(
    platform: Platform, tenant: Tenant, submit: Submit, stage: str, auto_promote: bool, reused: bool
) -> None:
    finish(platform, tenant.id, submit(auto_promote=auto_promote).job.id, stage=stage)
    assert submit(auto_promote=auto_promote).reused is reused


@pytest.mark.parametrize("changes", [{"commit": "d" * 40}, {"lock_sha256": "e" * 64}, {"image": "sha256:f"}])
def test_other_code_or_dependencies_train_anew(platform: Platform, tenant: Tenant, submit: Submit, changes: dict[str, str]) -> None:
    finish(platform, tenant.id, submit().job.id, **changes)
    assert submit().created


def test_code_with_changes_that_no_commit_holds_is_equal_to_nothing(
    platform: Platform, tenant: Tenant, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FT_COMMIT", f"{COMMIT}-dirty")
    provenance.commit.cache_clear()
    finish(platform, tenant.id, submit().job.id, commit=f"{COMMIT}-dirty")
    second = submit().job.id
    prepare(platform, tenant.id, second, commit=f"{COMMIT}-dirty")
    assert row(platform, second).state == "queued"


def test_another_tenants_job_is_no_answer(platform: Platform, tenant: Tenant, submit: Submit, write_chat_rows: Callable[..., Path]) -> None:
    finish(platform, tenant.id, submit().job.id)
    other, _ = tenants.create(platform, f"o-{uuid.uuid4().hex[:8]}", tier="standard")
    file = upload(platform, other.id, write_chat_rows())
    made = jobs.submit(platform, other.id, JobRequest.from_body({"model": "tiny-base", "training_file": file, "seed": 3}))
    assert made.created
    prepare(platform, other.id, made.job.id)
    assert row(platform, made.job.id).state == "queued"


def test_a_reused_answer_is_kept_under_its_idempotency_key_and_takes_no_room(platform: Platform, tenant: Tenant, submit: Submit) -> None:
    first = submit().job.id
    finish(platform, tenant.id, first)
    for n in range(5):
        submit(seed=None, metadata={"n": str(n)})  # as many as fit
    assert submit(key="k").job.id == first
    with as_owner(platform).begin() as conn:
        rewrite(conn, adapters.c.job_id == first, stage="archived")
    assert submit(key="k").job.id == first


def test_a_prepared_job_with_the_spec_of_a_finished_one_ends_with_its_adapter(platform: Platform, tenant: Tenant, submit: Submit) -> None:
    first = submit(metadata={"n": "1"}).job.id
    adapter_id = finish(platform, tenant.id, first)
    second = submit(metadata={"n": "2"}).job.id
    prepare(platform, tenant.id, second)
    found = row(platform, second)
    assert (found.state, found.adapter_id, found.reused_job_id, found.trained_tokens) == ("succeeded", adapter_id, first, 0)
    assert found.fine_tuned_model == row(platform, first).fine_tuned_model
    assert found.spec_sha256 == row(platform, first).spec_sha256
    stored = results.store(platform, tenant.id, first)
    assert [v.result_files for v in jobs.list_jobs(platform, tenant.id).items] == [[stored], [stored]]
    assert jobs.measured_by(platform, tenant.id, second) == first
    told = jobs.list_events(platform, tenant.id, second).items[0]
    assert told.code == "job_reused"
    assert first in told.message
    with platform.engine.connect() as conn:
        assert conn.execute(sa.select(ledger_entries).where(ledger_entries.c.job_id == second)).all() == []
    third = submit(metadata={"n": "3"}).job.id
    prepare(platform, tenant.id, third)
    assert row(platform, third).reused_job_id == first, "the one that trained, not one that reused"


@pytest.mark.parametrize("auto_promote", [True, False])
def test_same_request_is_answered_with_the_job_that_failed_its_gate(
    platform: Platform, tenant: Tenant, submit: Submit, auto_promote: bool
) -> None:
    first = submit(auto_promote=auto_promote).job.id
    finish(platform, tenant.id, first, stage="quarantined", failed=True)
    again = submit(auto_promote=auto_promote)
    assert (again.job.id, again.created, again.reused, again.job.state) == (first, False, True, "failed")
    assert submit(auto_promote=auto_promote, force=True).created


def test_prepared_job_with_the_spec_of_one_that_failed_its_gate_fails_without_training(
    platform: Platform, tenant: Tenant, submit: Submit
) -> None:
    first = submit(metadata={"n": "1"}).job.id
    adapter_id = finish(platform, tenant.id, first, stage="quarantined", failed=True)
    second, forced = submit(metadata={"n": "2"}).job.id, submit(metadata={"n": "3"}, force=True).job.id
    for job in (second, forced):
        prepare(platform, tenant.id, job)
    found = row(platform, second)
    assert (found.state, found.error["code"], found.adapter_id, found.reused_job_id) == ("failed", "gate_failed", adapter_id, first)
    assert first in found.error["message"] and "force" in found.error["message"]
    assert row(platform, forced).state == "queued"


EXPERIMENT = {"eval_config": {"mode": "experiment"}}


@pytest.mark.parametrize("is_failed", [True, False])
def test_job_and_experiment_of_one_spec_that_failed_the_gate_end_each_in_its_own_way(
    platform: Platform, tenant: Tenant, submit: Submit, is_failed: bool
) -> None:
    first = submit(**({} if is_failed else EXPERIMENT)).job.id
    adapter_id = finish(platform, tenant.id, first, stage="quarantined", failed=is_failed)
    job, experiment = submit(metadata={"n": "2"}).job.id, submit(metadata={"n": "3"}, **EXPERIMENT).job.id
    for made in (job, experiment):
        prepare(platform, tenant.id, made)
    ended = [row(platform, made) for made in (job, experiment)]
    assert [(one.state, one.adapter_id, one.reused_job_id, one.fine_tuned_model) for one in ended] == [
        ("failed", adapter_id, first, None), ("succeeded", adapter_id, first, None),
    ]  # fmt: skip
    assert ended[0].error["code"] == "gate_failed" and ended[1].error is None


def test_experiment_of_a_spec_whose_model_changes_nothing_fails(platform: Platform, tenant: Tenant, submit: Submit) -> None:
    first = submit().job.id
    adapter_id = finish(platform, tenant.id, first, stage="quarantined", failed=True)
    report_key = get_adapter(platform, tenant.id, adapter_id).eval_report_key
    unapplied = Finding(rule="adapter_applied", code="adapter_not_applied", passed=False, blocking=True, detail="difference 0")
    verdict = Verdict(outcome="quarantined", findings=(unapplied,))
    experiment = submit(metadata={"n": "2"}, **EXPERIMENT).job.id
    platform.objects.put_bytes(report_key, json.dumps({"verdict": verdict.to_dict()}).encode())
    try:
        prepare(platform, tenant.id, experiment)
    finally:
        platform.objects.delete(report_key)
    ended = row(platform, experiment)
    assert (ended.state, ended.error["code"], ended.adapter_id, ended.reused_job_id) == ("failed", "gate_failed", adapter_id, first)


def test_job_takes_the_approved_model_of_an_equal_experiment(platform: Platform, tenant: Tenant, submit: Submit) -> None:
    first = submit(**EXPERIMENT).job.id
    finish(platform, tenant.id, first, stage="draft")
    assert row(platform, first).request["auto_promote"] is False
    second = submit(auto_promote=False).job.id
    prepare(platform, tenant.id, second)
    assert (row(platform, second).state, row(platform, second).fine_tuned_model) == ("succeeded", row(platform, first).fine_tuned_model)


def test_request_of_a_job_that_failed_otherwise_is_trained_again(platform: Platform, tenant: Tenant, submit: Submit) -> None:
    first = submit().job.id
    finish(platform, tenant.id, first, stage="quarantined", failed=True)
    with platform.engine.begin() as conn:
        conn.execute(sa.update(jobs_table).where(jobs_table.c.id == first).values(error={"code": "diverged", "message": "", "param": None}))
    assert submit().created


@pytest.mark.parametrize("fields", [{"force": True}, {"suffix": "mine"}, {"eval_config": {"max_items": 10}}])
def test_a_prepared_job_that_is_forced_named_otherwise_or_judged_otherwise_is_trained(
    platform: Platform, tenant: Tenant, submit: Submit, fields: dict[str, Any]
) -> None:
    finish(platform, tenant.id, submit().job.id)
    second = submit(**fields).job.id
    prepare(platform, tenant.id, second)
    assert row(platform, second).state == "queued"


def test_a_job_without_a_seed_of_its_own_is_reused_only_where_the_drawn_one_is_equal(
    platform: Platform, tenant: Tenant, submit: Submit
) -> None:
    finish(platform, tenant.id, submit().job.id)
    second = submit(seed=None).job.id
    prepare(platform, tenant.id, second)
    assert row(platform, second).state == "queued"
    third = submit(seed=None, metadata={"n": "3"}).job.id
    with platform.engine.begin() as conn:
        conn.execute(sa.update(jobs_table).where(jobs_table.c.id == third).values(seed=3))
    prepare(platform, tenant.id, third)
    assert row(platform, third).state == "succeeded"
