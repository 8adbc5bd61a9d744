"""What clients ask for beside single jobs: filters, limits of models, previews, and models named by any spelling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import openai
import pytest
import sqlalchemy as sa

from control_plane.jobs.tables import jobs
from control_plane.platform.context import Platform
from control_plane.tenants.rules import Tenant
from ft_client import FtClient
from tests.control_plane.jobs.test_jobs import move
from tests.support.jobs.registered_adapter import add_adapter


def get(client: openai.OpenAI, path: str, **query: Any) -> dict[str, Any]:
    found = client.get(path, cast_to=object, options={"params": query})
    assert isinstance(found, dict)
    return found


def post(client: openai.OpenAI, path: str, body: Any = None) -> dict[str, Any]:
    found = client.post(path, cast_to=object, body=body)
    assert isinstance(found, dict)
    return found


def test_jobs_are_narrowed_by_what_they_are(client: openai.OpenAI, platform: Platform, training_file: str) -> None:
    made = [client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file, seed=i).id for i in range(3)]
    move(platform, made[1], "queued")
    move(platform, made[2], "queued", "provisioning", "running")
    with platform.engine.begin() as conn:
        conn.execute(sa.update(jobs).where(jobs.c.id == made[2]).values(fine_tuned_model="ft:it"))

    def found(**query: Any) -> list[str]:
        return [job["id"] for job in get(client, "/fine_tuning/jobs", **query)["data"]]

    assert found(status="queued") == found(state="queued") == [made[1]]
    assert found(status="validating_files") == [made[0]]
    assert found(state="provisioning") == []
    assert found(model="ft:it") == found(status="running", model="tiny-base") == [made[2]]
    assert found(method="lora") == found(method="supervised") == made[::-1]
    assert found(method="dpo") == []
    now = int(platform.clock().timestamp())
    assert found(created_after=now - 600, created_before=now + 600) == made[::-1]
    assert found(created_after=now + 600) == found(created_before=now - 600) == []
    assert found(status="running", metadata="null") == [made[2]]


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ({"status": "done"}, "invalid_filter"), ({"state": "validating_files"}, "invalid_filter"), ({"method": "rlhf"}, "invalid_filter"),
        ({"created_after": -1}, "invalid_filter"), ({"created_before": 10**15}, "invalid_filter"),
        ({"created_before": "now"}, "invalid_type"),
        ({"metadata": "team"}, "invalid_request"), ({"limit": 101}, "invalid_limit"), ({"limit": 0}, "invalid_limit"),
    ],
)  # fmt: skip
def test_a_filter_that_nothing_could_fit_is_refused(client: openai.OpenAI, query: dict[str, Any], code: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        get(client, "/fine_tuning/jobs", **query)
    assert (refused.value.code, refused.value.param) == (code, next(iter(query)))


def test_an_integration_is_refused_and_none_are_fine(client: openai.OpenAI, training_file: str) -> None:
    wandb: Any = [{"type": "wandb", "wandb": {"project": "mine"}}]
    with pytest.raises(openai.BadRequestError) as refused:
        client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file, integrations=wandb)
    assert (refused.value.code, refused.value.param) == ("unsupported_integration", "integrations")
    assert client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file, integrations=None).integrations is None


def test_limits_of_models_are_those_that_submission_keeps(client: openai.OpenAI, training_file: str) -> None:
    listed = {limits["model"]: limits for limits in get(client, "/fine_tuning/model_limits")["data"]}
    assert set(listed) == {"tiny-base", "old-base"}
    assert (listed["old-base"]["accepts_jobs"], listed["old-base"]["unavailable"]) == (False, "deprecated since 2024-01-01")
    limits = get(client, "/fine_tuning/model_limits", model="tiny-base")["data"][0]
    assert limits == listed["tiny-base"]
    assert (limits["context_length"], limits["accepts_jobs"]) == (512, True)
    assert {m["name"] for m in limits["methods"]} >= {"sft", "dpo", "orpo", "kto", "simpo", "cpt"}
    assert "beta" in next(m for m in limits["methods"] if m["name"] == "dpo")["hyperparameters"]
    adapters = {adapter["name"]: adapter for adapter in limits["adapters"]}
    assert set(adapters) == {"lora", "qlora", "full"}
    assert (adapters["lora"]["tiers"], adapters["full"]["tiers"]) == (["free", "standard", "premium"], ["premium"])
    rank = limits["hyperparameters"]["rank"]
    assert adapters["lora"]["ranks"] == rank["allowed"]
    asked: Any = {"rank": adapters["lora"]["ranks"][-1]}
    assert client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file, hyperparameters=asked).hyperparameters.rank == 128
    with pytest.raises(openai.BadRequestError, match=rank["text"]):
        client.fine_tuning.jobs.create(model="tiny-base", training_file=training_file, hyperparameters=asked | {"rank": 129})
    with pytest.raises(openai.NotFoundError):
        get(client, "/fine_tuning/model_limits", model="gpt-5")


def test_a_model_is_moved_by_any_of_its_names(client: openai.OpenAI, platform: Platform, tenant: Tenant) -> None:
    name = f"ft:tiny-base:{tenant.id}:a/b:c"
    id_ = add_adapter(platform, tenant.id, name=name, stage="production", loaded=True)
    assert client.models.retrieve(name).id == client.models.retrieve(id_).id == name
    for prefix in ("adapters", "models"):
        for spelling in (id_, name, quote(name, safe="")):
            assert post(client, f"/{prefix}/{spelling}/deprecate")["stage"] == "deprecated"
    with pytest.raises(openai.ConflictError) as refused:
        post(client, f"/models/{quote(name, safe='')}/rollback")
    assert "only a production adapter" in refused.value.message
    for action in ("models/{}/promote", "models/{}/deploy", "adapters/{}/promote"):
        with pytest.raises(openai.APIStatusError) as failed:
            post(client, "/" + action.format(name))
        assert failed.value.code == "object_not_found", "the route found the adapter, whose files are not stored"


def test_an_adapter_deployed_to_staging_is_not_served(client: openai.OpenAI, ft: FtClient, platform: Platform, tenant: Tenant) -> None:
    name = f"ft:tiny-base:{tenant.id}:s:1"
    add_adapter(platform, tenant.id, name=name, stage="draft", loaded=False)
    for _ in range(2):
        assert post(client, f"/models/{name}/deploy", {"stage": "staging"})["stage"] == "staging"
    held = ft.models.deploy(name, stage="staging")
    assert (held["stage"], held["desired"], held["promoted_at"]) == ("staging", "unloaded", None)
    with pytest.raises(openai.APIStatusError) as failed:
        post(client, f"/models/{name}/deploy", {"stage": "production"})
    assert failed.value.code == "object_not_found", "promotion looks for the files, which are not stored"


@pytest.mark.parametrize(
    ("stage", "body", "code", "message"),
    [
        ("draft", {"stage": "canary"}, "invalid_stage", "staging, production"),
        ("draft", {"stage": "staging", "replicas": 2}, "invalid_type", "Extra inputs"),
        ("draft", {"stage": True}, "invalid_type", "stage True"),
        ("production", {"stage": "staging"}, "invalid_state", "roll it back or deprecate it"),
        ("quarantined", {"stage": "staging"}, "invalid_state", "legal next stages: archived"),
        ("deprecated", {"stage": "staging"}, "invalid_state", "legal next stages: archived, production"),
    ],
)
def test_a_deployment_that_cannot_be_made_is_refused_and_changes_nothing(
    client: openai.OpenAI, platform: Platform, tenant: Tenant, stage: str, body: dict[str, Any], code: str, message: str
) -> None:
    id_ = add_adapter(platform, tenant.id, name=f"ft:tiny-base:{tenant.id}:x:1", stage=stage, loaded=stage == "production")
    with pytest.raises(openai.APIStatusError, match=message) as refused:
        post(client, f"/models/{id_}/deploy", body)
    assert refused.value.code == code
    assert get(client, f"/adapters/{id_}")["stage"] == stage


def test_models_are_narrowed_by_type_and_base_model(client: openai.OpenAI, ft: FtClient, platform: Platform, tenant: Tenant) -> None:
    made = [f"ft:tiny-base:{tenant.id}:n:{k}" for k in range(2)]
    for name in made:
        add_adapter(platform, tenant.id, name=name, stage="production", loaded=True)
    client.put("/model_routes/narrowed", cast_to=object, body={"targets": [{"model": made[0], "weight": 1}]})

    def found(**query: Any) -> list[str]:
        return [model["id"] for model in get(client, "/models", **query)["data"]]

    assert found(type="base_model") == platform.models.ids()
    assert found(type="lora_adapter") == found(type="lora_adapter", base_model="tiny-base") == made[::-1]
    assert found(type="model_route") == ["narrowed"]
    assert found(type="full_model") == []
    assert set(found(base_model="tiny-base")) == {"tiny-base", "narrowed", *made}
    assert [m["id"] for m in ft.models.list(type="model_route", base_model="tiny-base")] == ["narrowed"]
    for query in ({"type": "adapter"}, {"base_model": "gpt-5"}):
        with pytest.raises(openai.BadRequestError) as refused:
            found(**query)
        assert refused.value.code == "invalid_filter"
    with pytest.raises(openai.BadRequestError, match="base_model, lora_adapter, full_model, model_route"):
        found(type="adapter")


MODULES = ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    "body",
    [
        {"base_model": "tiny-base", "lora_rank": 32, "lora_alpha": 64, "lora_target_modules": MODULES},
        {
            "model": "tiny-base",
            "base_model": "tiny-base",
            "hyperparameters": {"lora_rank": 32, "lora_alpha": 64, "target_modules": MODULES},
        },
        {
            "model": "tiny-base",
            "method": {"type": "sft", "sft": {"hyperparameters": {"rank": 32, "lora_alpha": 64}}},
            "lora_rank": 32,
            "lora_target_modules": MODULES,
        },
        {
            "model": "tiny-base",
            "base_model": None,
            "hyperparameters": {},
            "lora_rank": 32,
            "lora_alpha": 64,
            "lora_target_modules": MODULES,
        },
    ],
)
def test_a_job_may_use_the_names_of_other_services(client: openai.OpenAI, training_file: str, body: dict[str, Any]) -> None:
    made = post(client, "/fine_tuning/jobs", {"training_file": training_file, **body})
    assert made["model"] == "tiny-base"
    wanted = {"rank": 32, "alpha": 64, "target_modules": MODULES}
    assert {name: made["hyperparameters"][name] for name in wanted} == wanted
    assert not [name for name in made["hyperparameters"] if name.startswith("lora_")]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "tiny-base", "base_model": "gpt-5"}, "base_model"),
        ({"model": "tiny-base", "lora_rank": 8, "hyperparameters": {"rank": 16}}, "lora_rank"),
        ({"model": "tiny-base", "hyperparameters": {"lora_alpha": 8, "alpha": 16}}, "lora_alpha"),
        (
            {
                "model": "tiny-base",
                "lora_target_modules": MODULES,
                "method": {"type": "dpo", "dpo": {"hyperparameters": {"target_modules": ["k_proj"]}}},
            },
            "lora_target_modules",
        ),
    ],
)
def test_a_name_and_its_alias_that_differ_are_refused(client: openai.OpenAI, training_file: str, body: dict[str, Any], param: str) -> None:
    for path in ("/fine_tuning/jobs", "/fine_tuning/estimate"):
        with pytest.raises(openai.BadRequestError, match="keep ") as refused:
            post(client, path, {"training_file": training_file, **body})
        assert (refused.value.code, refused.value.param) == ("conflicting_parameters", param)


def test_an_unknown_tier_is_refused_with_those_that_exist(client: openai.OpenAI, training_file: str) -> None:
    for path in ("/fine_tuning/jobs", "/fine_tuning/estimate"):
        with pytest.raises(openai.BadRequestError, match="the tiers are free, standard, premium") as refused:
            post(client, path, {"training_file": training_file, "model": "tiny-base", "tier": "gold"})
        assert (refused.value.code, refused.value.param) == ("invalid_tier", "tier")


def test_a_preview_names_what_it_cannot_show(client: openai.OpenAI, training_file: str) -> None:
    asked = {"model": "tiny-base", "training_file": training_file}
    for change, code in (
        ({"num_examples": 0}, "invalid_limit"), ({"max_seq_len": 513}, "invalid_limit"), ({"model": "gpt-5"}, "model_not_found"),
        ({"training_file": "file-none"}, "file_not_found"), ({"more": 1}, "invalid_type"), ({"num_examples": "5"}, "invalid_type"),
    ):  # fmt: skip
        with pytest.raises(openai.APIStatusError) as refused:
            post(client, "/fine_tuning/preview", asked | change)
        assert refused.value.code == code


def test_an_estimate_is_the_same_under_each_of_its_names(client: openai.OpenAI, write_chat_rows: Callable[..., Path]) -> None:
    for path in ("/fine_tuning/estimate", "/fine_tuning/jobs/estimate", "/fine-tunes/estimate-price", "/jobs/estimate"):
        with pytest.raises(openai.NotFoundError) as refused:
            post(client, path, {"model": "tiny-base", "training_file": "file-none"})
        assert refused.value.code == "file_not_found"


def test_a_mixture_is_submitted_with_openais_client(
    client: openai.OpenAI, training_file: str, write_chat_rows: Callable[..., Path]
) -> None:
    with write_chat_rows(60, name="more.jsonl", salt=" Tell me.").open("rb") as stream:
        other = client.files.create(file=stream, purpose="fine-tune").id
    mixed = [{"file": training_file, "weight": 3}, {"file": other, "tokens": 1000}]

    def create(files: Any, **fields: Any) -> Any:
        given: dict[str, Any] = {"model": "tiny-base", "training_file": None} | fields
        return client.fine_tuning.jobs.create(**given, extra_body={"training_files": files})

    made = create(mixed).model_dump()
    pending = {"dataset_id": None, "rows_per_epoch": None}
    assert made["training_file"] == training_file
    assert made["training_files"] == [
        {"file": training_file, "weight": 3.0, "tokens": None, **pending}, {"file": other, "weight": None, "tokens": 1000, **pending},
    ]  # fmt: skip
    assert client.fine_tuning.jobs.create(model="tiny-base", training_file=other).model_dump()["training_files"] is None
    for files, fields, code, param in (
        (mixed, {"training_file": other}, "conflicting_parameters", "training_files"),
        (mixed[:1] * 2, {}, "invalid_training_files", "training_files[1].file"),
        ([{"file": other, "weight": -1}], {}, "invalid_training_files", "training_files[0].weight"),
        ([{"file": other, "weight": "2"}], {}, "invalid_type", "training_files.0.weight"),
        ([{"file": other, "share": 2}], {}, "invalid_training_files", "training_files[0].share"),
        ([{"file": other, "note": None}], {}, "invalid_training_files", "training_files[0].note"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            create(files, **fields)
        assert (refused.value.code, refused.value.param) == (code, param)
