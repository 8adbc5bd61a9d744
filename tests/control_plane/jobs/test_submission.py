"""Reading a submission, and finding again the job that a repeated one made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import duplicate_requests
from control_plane.jobs import service as jobs
from control_plane.jobs.duplicate_requests import Attempt
from control_plane.jobs.submission import JobRequest, adapter_of, canonical_body
from control_plane.jobs.transitions import transition
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from core.errors import InvalidDataset, InvalidRequest
from tests.support.platform.database_roles import as_owner

RETRIED_ONCE = duplicate_requests.retried_for("1", None)
BODY: dict[str, Any] = {"model": "tiny-base", "training_file": "file-1"}


def read(**fields: Any) -> JobRequest:
    return JobRequest.from_body(BODY | fields)


def test_defaults_are_those_of_the_contract() -> None:
    request = read()
    assert (request.method, request.adapter, request.auto_promote, request.spot) == ("sft", "lora", True, False)
    assert (request.seed, request.tier, request.recipe, request.hyperparameters) == (None, None, None, {})


@pytest.mark.parametrize(
    "fields",
    [
        {"hyperparameters": {"n_epochs": 3}},
        {"method": {"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 3}}}},
        {"method": {"type": "lora", "lora": {"hyperparameters": {"n_epochs": 3}}}},
        {"method": "lora", "hyperparameters": {"n_epochs": 3}},
    ],
)
def test_hyperparameters_are_found_wherever_a_client_puts_them(fields: dict[str, Any]) -> None:
    assert read(**fields).hyperparameters == {"n_epochs": 3}


def test_hyperparameters_in_two_places_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="both"):
        read(hyperparameters={"n_epochs": 1}, method={"type": "sft", "sft": {"hyperparameters": {"n_epochs": 2}}})


def test_the_same_request_is_the_same_whatever_its_key_and_its_nulls() -> None:
    assert read(seed=None, idempotency_key="a").sha256 == read(idempotency_key="b").sha256 == read().sha256
    assert read(seed=1).sha256 != read().sha256


@pytest.mark.parametrize("method", ["reinforcement", "ppo", "", "LORA", "dpo "])
def test_a_method_that_is_not_offered_is_refused_with_those_that_are(method: str) -> None:
    with pytest.raises(InvalidRequest, match="supervised, lora, qlora, full, cpt, dpo, kto, orpo, sft, simpo") as refused:
        read(method=method)
    assert refused.value.code == "unsupported_method"


@pytest.mark.parametrize(
    ("fields", "method", "adapter"),
    [
        ({}, "sft", "lora"),
        ({"method": "supervised"}, "sft", "lora"),
        ({"method": "sft"}, "sft", "lora"),
        ({"method": "lora"}, "sft", "lora"),
        ({"method": "qlora"}, "sft", "qlora"),
        ({"method": "full"}, "sft", "full"),
        *(({"method": name}, name, "lora") for name in ("cpt", "dpo", "kto", "orpo", "simpo")),
        *(({"method": {"type": name}}, name, "lora") for name in ("cpt", "dpo", "kto", "orpo", "simpo", "sft")),
        ({"method": {"type": "supervised", "supervised": {}}}, "sft", "lora"),
        ({"method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2}}}, "adapter": "full"}, "dpo", "full"),
        ({"method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": "auto", "adapter": "qlora"}}}}, "dpo", "qlora"),
        ({"method": "qlora", "adapter": "qlora"}, "sft", "qlora"),
        ({"method": "cpt", "hyperparameters": {"adapter": "full"}}, "cpt", "full"),
        ({"method": "full", "hyperparameters": {"adapter": "auto"}}, "sft", "full"),
    ],
)  # fmt: skip
def test_method_and_adapter_are_read_from_wherever_a_client_puts_them(fields: dict[str, Any], method: str, adapter: str) -> None:
    request = read(**fields)
    assert (request.method, request.adapter) == (method, adapter)
    assert "adapter" not in request.hyperparameters
    assert adapter_of(request.body) == adapter


@pytest.mark.parametrize(
    ("fields", "code", "says"),
    [
        ({"adapter": "dora"}, "unsupported_adapter", "use one of: lora, qlora, full"),
        ({"hyperparameters": {"adapter": 3}}, "unsupported_adapter", "use one of: lora"),
        ({"method": "qlora", "adapter": "full"}, "unsupported_adapter", r"qlora \(method\) and full \(adapter\)"),
        ({"method": "dpo", "adapter": "lora", "hyperparameters": {"adapter": "full"}}, "unsupported_adapter", "keep only one"),
        ({"hyperparameters": {"beta": 0.1}}, "invalid_hyperparameter", "a setting of dpo, kto, orpo, simpo, but the method is sft"),
        ({"method": "orpo", "hyperparameters": {"loss_type": "ipo"}}, "invalid_hyperparameter", "a setting of dpo"),
        ({"method": "dpo", "hyperparameters": {"beta": -1}}, "invalid_hyperparameter", "above 0"),
        ({"hyperparameters": {"modules_to_save": ["lm_head"]}}, "invalid_hyperparameter", "cannot be served"),
        ({"hardware": {"num_gpus": 6}}, "invalid_hardware", "one of 1, 2, 4, 8, 16, 32"),
        ({"hardware": {"gpus": 8}}, "unknown_parameter", "known are num_gpus, strategy"),
        ({"hardware": {"num_gpu": 8}}, "unknown_parameter", "did you mean num_gpus"),
        ({"method": {"type": "dpo", "supervised": {}}}, "unknown_parameter", "takes only"),
        ({"method": "supervized"}, "unsupported_method", "did you mean supervised"),
        ({"validation_fil": "file-2"}, "unknown_parameter", "did you mean validation_file"),
        ({"zzz": 1}, "unknown_parameter", "known are model, training_file"),
        ({"learning_rate": 1e-4}, "unknown_parameter", r'it is a hyperparameter: write \{"hyperparameters": \{"learning_rate": ...\}\}'),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_at_submission(fields: dict[str, Any], code: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        read(**fields)
    assert refused.value.code == code


def test_hardware_is_recorded_and_no_integrations_are_fine() -> None:
    request = read(integrations=[], hardware={"num_gpus": 2})
    assert request.hardware == {"num_gpus": 2}
    assert request.body["integrations"] == []


@pytest.mark.parametrize("integrations", [["wandb"], [None], [{}], [{"type": "mlflow"}]])
def test_an_integration_that_does_not_exist_is_refused_instead_of_ignored(integrations: list[Any]) -> None:
    with pytest.raises(InvalidRequest, match="the only one is wandb") as refused:
        read(integrations=integrations)
    assert (refused.value.code, refused.value.param) == ("unsupported_integration", "integrations")


def test_a_run_at_weights_and_biases_is_recorded_as_requested() -> None:
    wandb = {"type": "wandb", "wandb": {"project": "bots", "name": "a/b: c", "entity": None, "tags": ["x"]}}
    assert read(integrations=[wandb]).body["integrations"] == [wandb]


@pytest.mark.parametrize(
    ("wandb", "param"),
    [
        (None, "integrations"), ({}, "integrations.wandb.project"), ({"project": "p", "api_key": "k"}, "integrations"),
        ({"project": ""}, "integrations.wandb.project"), ({"project": " "}, "integrations.wandb.project"),
        ({"project": "a/b"}, "integrations.wandb.project"), ({"project": "p" * 129}, "integrations.wandb.project"),
        ({"project": "p", "entity": "a?b"}, "integrations.wandb.entity"), ({"project": "p", "name": 7}, "integrations.wandb.name"),
        ({"project": "p", "tags": "x"}, "integrations.wandb.tags"), ({"project": "p", "tags": [""]}, "integrations.wandb.tags"),
        ({"project": "p", "tags": ["t" * 65]}, "integrations.wandb.tags"),
        ({"project": "p", "tags": ["t"] * 51}, "integrations.wandb.tags"),
    ],
)  # fmt: skip
def test_a_run_that_weights_and_biases_would_not_take_is_refused(wandb: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(integrations=[{"type": "wandb", "wandb": wandb}])
    assert (refused.value.code, refused.value.param) == ("invalid_integration", param)


def test_a_job_has_one_run_at_weights_and_biases() -> None:
    wandb = {"type": "wandb", "wandb": {"project": "p"}}
    with pytest.raises(InvalidRequest, match="one run") as refused:
        read(integrations=[wandb, wandb])
    assert refused.value.code == "invalid_integration"


@pytest.mark.parametrize("config", [{"min_gain": 1}, {"max_items": 0}, {"skip": ["adapter_applied"]}])
def test_a_bad_eval_config_is_refused_at_submission(config: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(eval_config=config)
    assert refused.value.code == "invalid_eval_config"


@pytest.mark.parametrize(
    ("field", "value"),
    [("seed", True), ("seed", 1.5), ("seed", "1"), ("spot", 1), ("metadata", []), ("method", 3), ("model", {}), ("hyperparameters", [])],
)
def test_a_value_of_another_type_is_refused_by_its_field(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(**{field: value})
    assert (refused.value.code, refused.value.param) == ("invalid_type", field)


def submit(platform: Platform, tenant: Tenant, training_file: str, **attempt: Any) -> jobs.Submitted:
    attempt.setdefault("received_at", platform.clock())
    request = JobRequest.from_body({"model": "tiny-base", "training_file": training_file})
    return jobs.submit(platform, tenant.id, request, Attempt(**attempt))


def test_a_retry_that_overtakes_its_original_leaves_one_job(platform: Platform, tenant: Tenant, training_file: str) -> None:
    original_received_at = platform.clock()
    retry = submit(platform, tenant, training_file, retried_for=RETRIED_ONCE)
    original = submit(platform, tenant, training_file, received_at=original_received_at)
    assert (retry.created, original.created) == (True, False)
    assert original.job.id == retry.job.id
    later = submit(platform, tenant, training_file, twin_meant=True)
    assert later.created, "a submission that began after the retry, and is meant, is another one"


def test_a_retry_finds_the_job_that_its_call_can_have_made(platform: Platform, tenant: Tenant, training_file: str) -> None:
    first = submit(platform, tenant, training_file)
    after = [platform.clock() + timedelta(minutes=m) for m in (11, 13)]
    within, beyond = (submit(platform, tenant, training_file, retried_for=RETRIED_ONCE, received_at=at) for at in after)
    assert (within.created, beyond.created) == (False, True)
    assert within.job.id == first.job.id


def test_a_retry_is_not_answered_with_a_job_that_is_dead(platform: Platform, tenant: Tenant, training_file: str) -> None:
    first = submit(platform, tenant, training_file)
    jobs.cancel(platform, tenant.id, first.job.id)
    second = submit(platform, tenant, training_file, retried_for=RETRIED_ONCE)
    assert second.created
    with platform.engine.begin() as conn:
        transition(conn, second.job.id, JobState.FAILED, message="")
    third = submit(platform, tenant, training_file, retried_for=RETRIED_ONCE)
    assert third.created
    assert submit(platform, tenant, training_file, retried_for=RETRIED_ONCE).job.id == third.job.id


def test_a_retry_that_means_a_twin_gets_it(platform: Platform, tenant: Tenant, training_file: str) -> None:
    first = submit(platform, tenant, training_file, twin_meant=True)
    second = submit(platform, tenant, training_file, twin_meant=True, retried_for=RETRIED_ONCE)
    assert second.created
    assert second.job.id != first.job.id


@pytest.mark.parametrize(
    ("retries", "timeout", "seconds"),
    [
        (None, None, None), ("0", "600", None), ("x", "600", None), ("-1", "600", None), ("nan", "600", None),
        ("1", None, 720), ("1", "600", 720), ("1", "20.5", 140.5), ("2", "20", 280), ("1", "-5", 120), ("1", "inf", 720),
        ("99", "600", 3600),
    ],
)  # fmt: skip
def test_how_long_ago_a_call_began_follows_from_the_headers(retries: str | None, timeout: str | None, seconds: float | None) -> None:
    found = duplicate_requests.retried_for(retries, timeout)
    assert (found and found.total_seconds()) == seconds


def test_an_equal_body_within_a_minute_is_the_same_job_until_that_has_ended(platform: Platform, tenant: Tenant, training_file: str) -> None:
    first = submit(platform, tenant, training_file)
    soon = submit(platform, tenant, training_file, received_at=platform.clock() + timedelta(seconds=59))
    assert (soon.created, soon.job.id) == (False, first.job.id)
    later = submit(platform, tenant, training_file, received_at=platform.clock() + timedelta(seconds=61))
    assert later.created
    for made in (first, later):
        jobs.cancel(platform, tenant.id, made.job.id)
    assert submit(platform, tenant, training_file).created


def test_who_means_two_equal_jobs_names_them_or_says_so(platform: Platform, tenant: Tenant, training_file: str) -> None:
    first = submit(platform, tenant, training_file, key="a")
    assert not submit(platform, tenant, training_file).created, "a client that forgot its key"
    assert submit(platform, tenant, training_file, key="b").created
    assert submit(platform, tenant, training_file, twin_meant=True).created
    assert submit(platform, tenant, training_file, key="a").job.id == first.job.id


def test_a_key_is_known_for_thirty_days_and_then_forgotten(fresh_platform: Platform, write_chat_rows: Callable[..., Path]) -> None:
    tenant, _ = tenants.create(fresh_platform, "old-key")
    with write_chat_rows().open("rb") as stream:
        file = uploaded_files.create(fresh_platform, tenant.id, stream, filename="a.jsonl", purpose="fine-tune")
    first = submit(fresh_platform, tenant, file.id, key="k")

    def after(days: float) -> Platform:
        return replace(fresh_platform, clock=lambda: first.job.created_at + timedelta(days=days))

    assert duplicate_requests.purge(after(29.9)) == 0
    assert submit(after(29.9), tenant, file.id, key="k").job.id == first.job.id
    again = submit(after(30.1), tenant, file.id, key="k")
    assert again.created, "it is unknown from then on, also where it was not purged yet"
    assert submit(after(30.2), tenant, file.id, key="k").job.id == again.job.id
    assert duplicate_requests.purge(after(61)) == 1
    assert submit(after(61), tenant, file.id, key="k").created


def test_two_tenants_may_use_the_same_key(
    platform: Platform, tenant: Tenant, training_file: str, write_chat_rows: Callable[..., Path]
) -> None:
    other, _ = tenants.create(platform, "same-key")
    with write_chat_rows().open("rb") as stream:
        file = uploaded_files.create(platform, other.id, stream, filename="a.jsonl", purpose="fine-tune")
    mine = submit(platform, tenant, training_file, key="k")
    theirs = submit(platform, other, file.id, key="k")
    assert mine.created
    assert theirs.created


@pytest.mark.parametrize("key", ["", "k" * 256])
def test_a_key_of_no_or_too_many_characters_is_refused(platform: Platform, key: str) -> None:
    with pytest.raises(InvalidRequest, match="1 to 255"):
        Attempt(received_at=platform.clock(), key=key)


def test_a_job_may_name_a_file_that_is_not_validated_yet(platform: Platform, tenant: Tenant, write_chat_rows: Callable[..., Path]) -> None:
    file = large_upload(platform, tenant, write_chat_rows(3))
    submitted = submit(platform, tenant, file)
    assert (submitted.job.state, submitted.job.dataset_id) == ("validating", None)
    uploaded_files.validate(platform, file)
    with pytest.raises(InvalidDataset, match="3 good examples"):
        submit(platform, tenant, file, twin_meant=True)


def large_upload(platform: Platform, tenant: Tenant, path: Path) -> str:
    """A file as it is between its upload and its validation."""
    import sqlalchemy as sa

    from control_plane.datasets.tables import files as table

    with path.open("rb") as stream:
        file_id = str(uploaded_files.create(platform, tenant.id, stream, filename=path.name, purpose="fine-tune").id)
    with as_owner(platform).begin() as conn:
        conn.execute(sa.text("SET LOCAL session_replication_role = replica"))  # a file keeps its dataset: nothing else can undo that
        fresh = {"status": "uploaded", "dataset_id": None, "report": sa.null(), "status_details": None}
        conn.execute(sa.update(table).where(table.c.id == file_id).values(**fresh))
    return file_id


def asked(training_file: str, **fields: Any) -> JobRequest:
    return JobRequest.from_body({"model": "tiny-base", "training_file": training_file, **fields})


@pytest.mark.parametrize(
    ("fields", "code", "says"),
    [
        ({"method": "full"}, "tier_not_allowed", "use method lora, or tier premium"),
        ({"adapter": "full"}, "tier_not_allowed", "full-parameter training is not part of tier standard"),
        ({"hardware": {"num_gpus": 8}}, "invalid_hardware", "exceeds the 1 that pool local gives"),
        ({"method": "qlora", "hardware": {"strategy": "zero3"}}, "invalid_hardware", "use zero2"),
        ({"hyperparameters": {"max_seq_len": 4096}}, "invalid_hyperparameter", "exceeds the 512"),
        ({"hyperparameters": {"rank": 12}}, "invalid_hyperparameter", "the inference servers load no other ranks"),
        ({"recipe": "any-qlora"}, "invalid_recipe", "the job asks for lora"),
        ({"method": "dpo"}, "preference_rows", "rows of prompt, chosen and rejected"),
    ],
)  # fmt: skip
def test_a_job_that_cannot_run_is_refused_before_it_is_one(
    platform: Platform, tenant: Tenant, training_file: str, fields: dict[str, Any], code: str, says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        jobs.submit(platform, tenant.id, asked(training_file, **fields))
    assert refused.value.code == code
    assert jobs.list_jobs(platform, tenant.id).items == []


def test_a_premium_tenant_may_train_every_parameter(platform: Platform, training_file: str, tenant: Tenant) -> None:
    import sqlalchemy as sa

    from control_plane.tenants.tables import tenants

    with platform.engine.begin() as conn:
        conn.execute(sa.update(tenants).where(tenants.c.id == tenant.id).values(tier="premium"))
    made = jobs.submit(platform, tenant.id, asked(training_file, method="full"))
    assert (made.job.method, adapter_of(made.job.request)) == ("sft", "full")


def test_what_a_stored_job_is_planned_as_is_what_was_submitted(platform: Platform, tenant: Tenant, training_file: str) -> None:
    from control_plane.jobs.estimates import job_plan

    request = asked(training_file, method="qlora", hyperparameters={"rank": 8, "batch_size": 6}, recipe="any-qlora@3")
    made = jobs.submit(platform, tenant.id, request).job
    stored = jobs.get(platform, tenant.id, made.id).job
    model = platform.models.get("tiny-base")
    assert job_plan.of_job(platform, stored, model) == job_plan.placed(platform, request, model, tier=tenant.tier)
    assert job_plan.of_job(platform, stored, model).plan.value("rank") == 8
    assert job_plan.of_job(platform, stored, model).placement["world_size"] == 1


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"model": "m", "hyperparameters": {}, "lora_rank": 8}, {"model": "m", "hyperparameters": {"rank": 8}}),
        ({"model": "m", "base_model": None}, {"model": "m"}),
        ({"model": None, "base_model": "m"}, {"model": "m"}),
        ({"base_model": "m", "model": None}, {"model": "m"}),
        ({"model": "m", "hyperparameters": {"rank": 8, "lora_rank": None}}, {"model": "m", "hyperparameters": {"rank": 8}}),
    ],
)
def test_an_alias_without_a_value_is_absent_and_one_with_a_value_is_not_lost(body: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert canonical_body(body) == wanted
