"""Operators add recipes of their own: versions that never change, chosen before those that ship."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from control_plane.jobs import service as jobs
from control_plane.jobs.estimates import job_plan
from control_plane.jobs.recipes import operator_recipes
from control_plane.jobs.submission import JobRequest
from control_plane.platform.context import Platform
from control_plane.tenants import operators
from control_plane.tenants.rules import Tenant
from core.errors import Conflict, InvalidRequest, NotFound
from engine.training import recipes as shipped
from ft_client import FtClient
from tests.support.platform.database_roles import as_operator

SOURCE = "measured on our own tickets"


def recipe(version: int = 1, *, rank: Any = 8, **fields: Any) -> dict[str, Any]:
    body = {"name": "our-tiny", "version": version, "extends": "any-lora", "adapter": "lora", "summary": "Ours.", "base_models": ["tiny*"]}
    return body | {"defaults": {"rank": {"value": rank, "source": SOURCE}}} | fields


@pytest.fixture
def operated(fresh_platform: Platform) -> Platform:
    return as_operator(fresh_platform)


def add(platform: Platform, *bodies: Any) -> list[str]:
    return [each.recipe.label for each in operator_recipes.add(platform, [*bodies], origin="ours.yaml", by="t") if each.is_new]


def chosen(platform: Platform, name: str | None = None) -> shipped.Recipe:
    return shipped.select_recipe("tiny-base", adapter="lora", name=name, known=operator_recipes.known(platform))


def test_the_newest_version_of_an_operators_recipe_is_chosen_before_those_that_ship(operated: Platform) -> None:
    assert chosen(operated).name == "any-lora"
    assert add(operated, recipe(), recipe(2, rank=16)) == ["our-tiny@1", "our-tiny@2"]
    found = chosen(operated)
    assert (found.label, found.value("rank"), found.value("n_epochs")) == (
        "our-tiny@2",
        16,
        shipped.recipe_named("any-lora").value("n_epochs"),
    )
    assert chosen(operated, "our-tiny@1").value("rank") == 8
    assert shipped.select_recipe("other", adapter="lora", known=operator_recipes.known(operated)).name == "any-lora"


def test_a_version_never_changes(operated: Platform) -> None:
    assert add(operated, recipe()) == ["our-tiny@1"]
    assert add(operated, recipe()) == [], "the same once more"
    with pytest.raises(Conflict, match=r"our-tiny@1 exists with other content.*raise its version"):
        add(operated, recipe(3), recipe(rank=32))
    assert [each.recipe.label for each in operator_recipes.list_versions(operated)] == ["our-tiny@1"], "all or none"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"defaults": {"rank": {"value": 8}}}, r"ours.yaml: \[0\].defaults.rank: source is missing"),
        ({"defaults": {"rank": {"value": 8, "source": "x"}}}, r"\[0\].defaults.rank.source is 'x'"),
        ({"defaults": {"rnak": {"value": 8, "source": SOURCE}}}, "unknown \\['rnak'\\]"),
        ({"defaults": {"rank": {"value": -1, "source": SOURCE}}}, "rank -1 is not one of"),
        ({"methods": {"dpo": {"beta": {"value": -1, "source": SOURCE}}}}, "beta -1 is not"),
        ({"extends": "nobody"}, "our-tiny extends 'nobody', which does not exist; there are any-lora"),
        ({"name": "any-lora"}, "any-lora is a recipe of the platform; choose another name, and extend it"),
        ({"name": "Our Tiny"}, r"\[0\].name is 'Our Tiny'"),
        ({"colour": "red"}, r"\[0\]: colour is unknown; it has name, version"),
    ],
)
def test_a_mistake_is_refused_with_its_place(operated: Platform, wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        add(operated, recipe() | wrong)
    assert refused.value.code == "invalid_recipe"
    assert operator_recipes.list_versions(operated) == []


def test_a_job_keeps_the_recipe_that_it_was_submitted_with(platform: Platform, tenant: Tenant, training_file: str) -> None:
    operated = as_operator(platform)

    def submit(**fields: Any) -> Any:
        body = {"model": "tiny-base", "training_file": training_file} | fields
        return jobs.submit(operated, tenant.id, JobRequest.from_body(body)).job

    def rank(job: Any) -> int | None:
        return job_plan.of_job(operated, job, operated.models.get_pinned(job.model, job.base_digest)).plan.value("rank")

    before = submit(seed=1)
    add(operated, recipe())
    first = submit(seed=2)
    add(operated, recipe(2, rank=32))
    second = submit(seed=3)
    operator_recipes.retire(operated, "our-tiny")
    assert [job.recipe for job in (before, first, second)] == ["any-lora@3", "our-tiny@1", "our-tiny@2"]
    assert [rank(job) for job in (before, first, second)] == [16, 8, 32]
    with pytest.raises(InvalidRequest, match="recipe 'our-tiny@2' does not exist"):
        submit(seed=4, recipe="our-tiny@2")


def test_a_retired_recipe_is_used_again_once_it_is_added_again(operated: Platform) -> None:
    add(operated, recipe())
    (gone,) = operator_recipes.retire(operated, "our-tiny")
    assert gone.retired_at is not None and chosen(operated).name == "any-lora"
    assert add(operated, recipe()) == ["our-tiny@1"]
    assert chosen(operated).label == "our-tiny@1"
    with pytest.raises(NotFound, match=r"added no recipe 'any-lora' \(it ships with the platform"):
        operator_recipes.retire(operated, "any-lora")


def test_recipes_are_added_through_the_api_and_listed_for_tenants(api_url: str, api_key: str, platform: Platform) -> None:
    name = "of-the-api"
    secret = operators.create(as_operator(platform), "ops").secret
    with FtClient(base_url=api_url, api_key=secret) as ops, FtClient(base_url=api_url, api_key=api_key) as client:
        (added,) = ops.admin.recipes.add([recipe(name=name, base_models=["none-*"])])["data"]
        assert (added["id"], added["added_by"][:4], added["retired_at"]) == (f"{name}@1", "opk_", None)
        shown = client.recipes.retrieve(name)
        assert shown["defaults"]["rank"] == {"value": 8, "source": SOURCE} and shown["defaults"]["dropout"]["source"]
        assert f"{name}@1" in [each["id"] for each in client.recipes.list().all()]
        (retired,) = ops.admin.recipes.retire(name)["data"]
        assert retired["retired_at"] and retired in ops.admin.recipes.list().all()
        assert f"{name}@1" not in [each["id"] for each in client.recipes.list().all()]
    refused = httpx.post(f"{api_url}/v1/admin/recipes", json={"recipes": [recipe()]}, headers={"authorization": f"Bearer {api_key}"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "operator_key_required")
