"""``/v1/fine_tuning/jobs`` through OpenAI's client: shapes, pages, states."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import httpx
import openai
import pytest
import sqlalchemy as sa

from control_plane.attempts.tables import checkpoints
from control_plane.jobs import service as jobs_service
from control_plane.jobs.submission import JobRequest
from control_plane.jobs.tables import jobs
from control_plane.jobs.transitions import record, transition
from control_plane.platform.context import Platform
from control_plane.platform.job_events import metrics_event
from control_plane.platform.job_states import JobState
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from tests.support.platform.ledger_entries import enter

SUPERVISED = {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": "auto"}}}


def move(platform: Platform, job_id: str, *states: str, **columns: Any) -> None:
    for state in states:
        with platform.engine.begin() as conn:
            transition(conn, job_id, JobState(state), message=f"now {state}", **columns)


def test_a_job_is_created_as_openais_client_asks_for_it(client: openai.OpenAI, tenant: Tenant, training_file: str) -> None:
    job = client.fine_tuning.jobs.create(
        model="tiny-base",
        training_file=training_file,
        method=SUPERVISED,
        suffix="support-bot",
        seed=7,
        metadata={"team": "care"},
        extra_body={"tier": "free", "auto_promote": False},
    )
    assert job.object == "fine_tuning.job"
    assert job.id.startswith("ftjob-")
    assert (job.status, job.model, job.training_file, job.seed) == ("validating_files", "tiny-base", training_file, 7)
    assert (job.fine_tuned_model, job.finished_at, job.estimated_finish, job.error, job.trained_tokens) == (None,) * 5
    assert (job.result_files, job.validation_file, job.integrations) == ([], None, None)
    assert job.organization_id == tenant.id
    assert job.metadata == {"team": "care"}
    assert job.method.type == "supervised"
    assert job.hyperparameters.n_epochs == job.method.supervised.hyperparameters.n_epochs == 2
    assert job.hyperparameters.batch_size == "auto"
    assert (job.state, job.tier, job.auto_promote, job.suffix, job.cost_micros) == ("validating", "free", False, "support-bot", 0)
    assert job.dataset_id == client.files.retrieve(training_file).dataset_id
    assert len(job.base_digest) == 64
    assert client.fine_tuning.jobs.retrieve(job.id) == job.model_copy(update={"quota": None}), "told with the submission"


@pytest.fixture
def preference_file(client: openai.OpenAI) -> str:
    """Id of a validated file of preferences."""
    rows = [{"prompt": f"Question {i} about topic {i * 7919}?", "chosen": f"Yes, {i}.", "rejected": f"No idea {i}."} for i in range(120)]
    content = "\n".join(json.dumps(row) for row in rows).encode()
    return client.files.create(file=("pairs.jsonl", content), purpose="fine-tune").id


def test_dpo_is_asked_for_and_shown_as_openais_client_knows_it(client: openai.OpenAI, preference_file: str) -> None:
    method = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2, "n_epochs": 1, "batch_size": "auto"}}}
    job = client.fine_tuning.jobs.create(model="tiny-base", training_file=preference_file, method=method)
    assert job.method.type == "dpo"
    assert job.method.dpo.hyperparameters.beta == 0.2
    assert (job.method.dpo.hyperparameters.n_epochs, job.hyperparameters.n_epochs) == (1, 1)
    assert client.fine_tuning.jobs.retrieve(job.id).method == job.method


@pytest.mark.parametrize("method", ["orpo", "simpo", {"type": "orpo", "orpo": {"hyperparameters": {"beta": 0.3}}}])
def test_methods_beyond_openais_are_shown_under_their_names(client: openai.OpenAI, preference_file: str, method: Any) -> None:
    asked = {"method": method, "adapter": "qlora"}
    job = client.fine_tuning.jobs.create(model="tiny-base", training_file=preference_file, extra_body=asked)
    name = method if isinstance(method, str) else method["type"]
    assert (job.method.type, job.adapter) == (name, "qlora")
    assert getattr(job.method, name)["hyperparameters"]["n_epochs"] == "auto"


def test_every_recipe_says_where_its_defaults_come_from(client: openai.OpenAI) -> None:
    found = client.get("/recipes", cast_to=object, options={"params": {"method": "dpo"}})
    assert isinstance(found, dict)
    assert len(found["data"]) > 20
    assert all(d["source"] for recipe in found["data"] for d in recipe["defaults"].values())
    one = client.get("/recipes/any-full@3", cast_to=object, options={"params": {"method": "dpo"}})
    assert isinstance(one, dict)
    assert (one["id"], one["defaults"]["learning_rate"]["value"], one["defaults"]["beta"]["value"]) == ("any-full@3", 5e-7, 0.1)
    with pytest.raises(openai.BadRequestError, match="lists them"):
        client.get("/recipes/none", cast_to=object)
    for alias in ("supervised", "lora"):
        aliased = client.get("/recipes/any-full@3", cast_to=object, options={"params": {"method": alias}})
        assert aliased == client.get("/recipes/any-full@3", cast_to=object, options={"params": {"method": "sft"}})


@pytest.mark.parametrize(
    "method", ["lora", "sft", "supervised", {"type": "lora"}, {"type": "lora", "lora": {"hyperparameters": {"rank": 8}}}]
)
def test_a_method_may_be_a_word_or_an_object(client: openai.OpenAI, training_file: str, method: Any) -> None:
    job = client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file, extra_body={"method": method})
    assert job.method.type == "supervised"


def test_the_other_spellings_of_the_path_are_the_same_jobs(client: openai.OpenAI, api_url: str, api_key: str, training_file: str) -> None:
    job = client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file)
    for path in ("/v1/fine-tuning/jobs", "/v1/jobs"):
        answer = httpx.get(f"{api_url}{path}/{job.id}", headers={"authorization": f"Bearer {api_key}"})
        assert answer.json()["id"] == job.id


def test_jobs_are_listed_page_by_page_and_by_metadata(client: openai.OpenAI, training_file: str) -> None:
    made = [
        client.fine_tuning.jobs.create(
            model="tiny-base", training_file=training_file, seed=i, metadata={"n": str(i), "odd": str(i % 2)} if i else openai.omit
        ).id
        for i in range(5)
    ]
    assert [j.id for j in client.fine_tuning.jobs.list(limit=2)] == made[::-1]
    page = client.fine_tuning.jobs.list(limit=2)
    assert (len(page.data), page.has_more) == (2, True)
    assert [j.id for j in client.fine_tuning.jobs.list(metadata={"odd": "1"})] == [made[3], made[1]]
    assert [j.id for j in client.fine_tuning.jobs.list(metadata={"odd": "1", "n": "3"})] == [made[3]]
    assert [j.id for j in client.fine_tuning.jobs.list(extra_query={"metadata": "null"})] == [made[0]]
    with pytest.raises(openai.BadRequestError) as refused:
        client.fine_tuning.jobs.list(after="ftjob-unknown")
    assert refused.value.code == "invalid_after"


def test_a_cancelled_job_says_so_and_stays_cancelled(client: openai.OpenAI, training_file: str) -> None:
    job = client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file)
    cancelled = client.fine_tuning.jobs.cancel(job.id)
    assert cancelled.status == "cancelled"
    assert cancelled.finished_at is not None
    assert client.fine_tuning.jobs.cancel(job.id) == cancelled
    with pytest.raises(openai.ConflictError) as refused:
        client.fine_tuning.jobs.resume(job.id)
    assert refused.value.code == "invalid_state"
    assert refused.value.response.headers["x-should-retry"] == "false"


def test_a_running_job_is_told_to_stop_when_it_is_cancelled(client: openai.OpenAI, platform: Platform, training_file: str) -> None:
    job = client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file)
    move(platform, job.id, "queued", "provisioning", "running")
    assert client.fine_tuning.jobs.retrieve(job.id).status == "running"
    client.fine_tuning.jobs.cancel(job.id)
    with platform.engine.connect() as conn:
        assert conn.execute(sa.select(jobs.c.stop_requested).where(jobs.c.id == job.id)).scalar() == "cancel"


def test_a_queued_job_pauses_at_once_and_resumes_into_the_queue(client: openai.OpenAI, platform: Platform, training_file: str) -> None:
    job = client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file)
    with pytest.raises(openai.ConflictError, match="cannot become paused"):
        client.fine_tuning.jobs.pause(job.id)
    move(platform, job.id, "queued")
    assert client.fine_tuning.jobs.pause(job.id).status == "paused"
    assert client.fine_tuning.jobs.pause(job.id).status == "paused"
    assert client.fine_tuning.jobs.resume(job.id).status == "queued"


def test_a_running_job_pauses_when_its_workload_has_saved(client: openai.OpenAI, platform: Platform, training_file: str) -> None:
    job = client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file)
    move(platform, job.id, "queued", "provisioning", "running")
    assert client.fine_tuning.jobs.pause(job.id).status == "pausing"
    with pytest.raises(openai.ConflictError, match="still saving"):
        client.fine_tuning.jobs.resume(job.id)
    move(platform, job.id, "paused", stop_requested=None)
    assert client.fine_tuning.jobs.resume(job.id).status == "queued"


@pytest.mark.parametrize("states", ["", "queued", "queued provisioning", "queued provisioning running", "queued provisioning evaluating"])
def test_only_a_paused_job_can_be_resumed(client: openai.OpenAI, platform: Platform, training_file: str, states: str) -> None:
    """Queued, it would keep its GPUs without a claim to them, whatever moves the platform itself may make."""
    job = client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file)
    move(platform, job.id, *states.split())
    with pytest.raises(openai.ConflictError, match="only a paused job can be resumed") as refused:
        client.fine_tuning.jobs.resume(job.id)
    assert refused.value.code == "invalid_state"
    with platform.engine.connect() as conn:
        assert conn.execute(sa.select(jobs.c.state).where(jobs.c.id == job.id)).scalar() == ["validating", *states.split()][-1]


def test_a_job_names_the_key_that_submitted_it(client: openai.OpenAI, platform: Platform, tenant: Tenant, training_file: str) -> None:
    job = client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file)
    (used,) = (key.id for key in tenants.list_keys(platform, tenant.id).items if key.name == "test")
    assert job.api_key_id == used
    by_the_platform = jobs_service.submit(platform, tenant.id, JobRequest.from_body({"model": "tiny-base", "training_file": training_file}))
    assert by_the_platform.job.api_key_id is None


def test_a_waiting_job_says_why_where_and_until_when(client: openai.OpenAI, platform: Platform, training_file: str) -> None:
    job = client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file)
    move(platform, job.id, "queued", expected_s=100.0, evaluation_s=60.0)
    finish = platform.clock().replace(microsecond=0)
    with platform.engine.begin() as conn:
        why = {"reason": "WaitingForQuota", "reason_detail": "2 of 2 GPUs are held", "queue_position": 3}
        why |= {"estimated_finish_at": finish, "expected_start_at": finish - timedelta(seconds=100)}
        conn.execute(sa.update(jobs).where(jobs.c.id == job.id).values(**why))
    seen = client.fine_tuning.jobs.retrieve(job.id)
    assert (seen.reason, seen.reason_detail, seen.queue_position) == ("WaitingForQuota", "2 of 2 GPUs are held", 3)
    assert seen.estimated_finish == int(finish.timestamp()) + 60, "the evaluation follows the training"
    assert seen.estimated_start == seen.estimated_finish - 160
    move(platform, job.id, "provisioning")
    seen = client.fine_tuning.jobs.retrieve(job.id)
    assert (seen.reason, seen.queue_position, seen.estimated_start) == (None, None, None)


def test_a_failed_job_carries_its_error_and_its_cost(client: openai.OpenAI, platform: Platform, tenant: Tenant, training_file: str) -> None:
    job = client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file)
    move(platform, job.id, "queued", "provisioning", "running")
    move(platform, job.id, "failed", error={"code": "diverged", "message": "loss is NaN; lower the learning rate", "param": None})
    with platform.engine.begin() as conn:
        for kind, amount in (("usage", 1_500_000), ("refund", -500_000)):
            enter(conn, tenant.id, job.id, kind=kind, amount_micros=amount)
    seen = client.fine_tuning.jobs.retrieve(job.id)
    assert (seen.status, seen.error.code, seen.error.message) == ("failed", "diverged", "loss is NaN; lower the learning rate")
    assert seen.cost_micros == 1_000_000


def test_events_come_newest_first_and_page_by_page(client: openai.OpenAI, platform: Platform, training_file: str) -> None:
    job = client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file)
    move(platform, job.id, "queued", "provisioning", "running")
    with platform.engine.begin() as conn:
        record(conn, job.id, metrics_event({"step": 1, "total_steps": 9, "train_loss": 2.5}))
    events = list(client.fine_tuning.jobs.list_events(job.id, limit=2))
    assert [e.type for e in events] == ["metrics", "message", "message", "message", "message"]
    assert [e.code for e in events] == ["metrics", "job_running", "job_provisioning", "job_queued", "job_created"]
    assert events[0].data == {"step": 1, "total_steps": 9, "train_loss": 2.5}
    assert events[0].message == "Step 1/9: training loss=2.5000"
    assert {e.object for e in events} == {"fine_tuning.job.event"}


def test_checkpoints_have_openais_shape(client: openai.OpenAI, platform: Platform, training_file: str) -> None:
    job = client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file)
    with platform.engine.begin() as conn:
        for step in (10, 20):
            row = {
                "id": f"ftckpt_{job.id}_{step}",
                "job_id": job.id,
                "attempt": 1,
                "step": step,
                "object_prefix": "p",
                "manifest_sha256": "0",
            }
            conn.execute(sa.insert(checkpoints).values(**row, metrics={"train_loss": 1.0}, created_at=platform.clock()))
    found = list(client.fine_tuning.jobs.checkpoints.list(job.id, limit=1))
    assert [(c.step_number, c.metrics.step, c.metrics.train_loss) for c in found] == [(20, 20.0, 1.0), (10, 10.0, 1.0)]
    assert {(c.object, c.fine_tuning_job_id) for c in found} == {("fine_tuning.job.checkpoint", job.id)}


def test_metrics_are_in_the_order_of_the_steps(
    client: openai.OpenAI, platform: Platform, api_url: str, api_key: str, training_file: str
) -> None:
    job = client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file)
    with platform.engine.begin() as conn:
        for step in (1, 2, 3):
            record(conn, job.id, metrics_event({"step": step, "train_loss": 1.0 / step}))
    answer = httpx.get(f"{api_url}/v1/fine_tuning/jobs/{job.id}/metrics", headers={"authorization": f"Bearer {api_key}"})
    assert [m["step"] for m in answer.json()["data"]] == [1, 2, 3]


def test_the_log_of_an_attempt_is_read_where_it_was_stored(
    client: openai.OpenAI, platform: Platform, tenant: Tenant, api_url: str, api_key: str, training_file: str
) -> None:
    job = client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file)
    url, headers = f"{api_url}/v1/fine_tuning/jobs/{job.id}/logs", {"authorization": f"Bearer {api_key}"}
    assert httpx.get(url, headers=headers).json()["error"]["code"] == "log_not_found"
    with platform.engine.begin() as conn:
        conn.execute(sa.update(jobs).where(jobs.c.id == job.id).values(attempt=1))
    platform.objects.put_bytes(f"tenants/{tenant.id}/jobs/{job.id}/attempts/a1/train.log", b"step 1\nstep 2\n")
    assert httpx.get(url, headers=headers, params={"attempt": 1}).text == "step 1\nstep 2\n"
