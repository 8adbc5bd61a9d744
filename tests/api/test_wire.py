"""What clients ask for beside single jobs: filters, limits of models, previews, and models named by any spelling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import openai
import pytest
import sqlalchemy as sa

from control_plane.service.platform import Platform
from control_plane.tables import jobs
from control_plane.tenants import Tenant
from tests.api.test_jobs import move
from tests.registered_adapter import add_adapter


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
