"""Routes and their shares, and what a change of a model's stage would do, as the pages say it."""

from __future__ import annotations

import html
import re
from collections.abc import Callable

import pytest

from control_plane.adapters import promotions
from control_plane.adapters import service as adapters
from control_plane.platform.context import Platform
from control_plane.serving import model_routes
from control_plane.tenants import service as tenants
from control_plane.tenants.rules import Tenant
from tests.control_plane.console.conftest import Visitor
from tests.support.jobs.registered_adapter import add_adapter

ROUTES = "/console/models/routes"


@pytest.fixture
def model(platform: Platform, tenant: Tenant) -> Callable[..., str]:
    """Registers a model of the tenant; returns its id."""

    def add(version: str, stage: str = "production") -> str:
        return add_adapter(
            platform, tenant.id, name=f"ft:tiny-base:{tenant.id}:bot:{version}", stage=stage, loaded=stage == "production"
        )  # fmt: skip

    return add


def save(visitor: Visitor, name: str, **targets: str) -> int:
    """Send the form of a route, whose last row is empty as on the page; returns the status."""
    fields = {"model": [*targets, ""], "weight": [*targets.values(), ""]}
    return visitor.http.post(ROUTES, data={"csrf_token": visitor.token(), "name": name, **fields}).status_code


def test_a_route_is_created_its_shares_are_changed_and_it_is_deleted(
    platform: Platform, tenant: Tenant, visitor: Visitor, other: Visitor, model: Callable[..., str]
) -> None:
    one, two = model("a"), model("b")
    assert "No route yet" in visitor.get(ROUTES).text
    assert save(visitor, "answers", **{one: "95", two: "5"}) == 303
    page = visitor.get(f"{ROUTES}/answers").text
    assert [f"{share} %" in page for share in (95, 5)] == [True, True]
    assert other.get(f"{ROUTES}/answers").status_code == 404
    assert save(visitor, "answers", **{one: "1" * 5000}) == 400
    assert save(visitor, "answers", **{one: "0", two: "1", "tiny-base": "3"}) == 303
    assert [target.share for target in model_routes.get(platform, tenant.id, "answers").targets] == [0.0, 0.25, 0.75]
    assert other.post(f"{ROUTES}/answers/delete").status_code == 404
    visitor.post(f"{ROUTES}/answers/delete")
    assert model_routes.list_routes(platform, tenant.id) == []


@pytest.mark.parametrize(("name", "weight", "stage", "status", "said"), [
    ("answers", "much", "production", 400, "not a whole number"),
    ("answers", "-1", "production", 400, "not a whole number"),
    ("answers", "0", "production", 400, "give at least one of them a weight"),
    ("Not a name", "1", "production", 400, "cannot be a route"),
    ("answers", "1", "draft", 409, "promote it first"),
])  # fmt: skip
def test_a_route_that_cannot_be_is_refused_with_the_reason(
    visitor: Visitor, model: Callable[..., str], name: str, weight: str, stage: str, status: int, said: str
) -> None:
    fields = {"name": name, "model": model("a", stage), "weight": weight}
    answer = visitor.post(ROUTES, **fields)
    assert (answer.status_code, said in html.unescape(answer.text)) == (status, True), answer.text


def test_a_viewer_sees_shares_and_changes_none(
    platform: Platform, tenant: Tenant, visit: Callable[[str], Visitor], model: Callable[..., str]
) -> None:
    model_routes.put(platform, tenant.id, "answers", [(model("a"), 1)])
    reader = visit(tenants.create_key(platform, tenant.id, name="r", scopes=["read"]).secret)
    page = reader.get(f"{ROUTES}/answers").text
    assert ("100 %" in page, "Set shares" in page, "Delete this route?" in page) == (True, False, False)
    assert reader.post(f"{ROUTES}/answers/delete").status_code == 403


def consequences(page: str, change: str) -> str:
    """The text that the question before a change shows, in one line."""
    found = re.findall(rf'action="[^"]*/{change}".*?<template data-consequences>(.*?)</template>', page, re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", found[0])).split())


def test_the_question_before_a_deprecation_says_who_answers_then(
    platform: Platform, tenant: Tenant, visitor: Visitor, model: Callable[..., str]
) -> None:
    one, two = model("a"), model("b")
    model_routes.put(platform, tenant.id, "answers", [(one, 1), (two, 3)])
    model_routes.put(platform, tenant.id, "only", [(two, 1)])
    page = visitor.get(f"/console/models/{two}").text
    text = consequences(page, "deprecate")
    assert f"ft:tiny-base:{tenant.id}:bot : b → a ." in text
    assert "Stops answering to its full name at once" in text
    assert "answers : a 25 % → 100 % , b 75 % → 0 %" in text
    assert "only : b 100 % → 0 % . No target is left: its requests fail." in text
    assert "Its files until" in text
    assert "b → a" in consequences(page, "rollback")
    promotions.deprecate(platform, tenant.id, two)
    after = visitor.get(f"/console/models/{two}").text
    assert "Its files are deleted" in after
    assert "a → b" in consequences(after, "promote")


def test_a_draft_answers_nothing_until_it_is_promoted(tenant: Tenant, visitor: Visitor, model: Callable[..., str]) -> None:
    page = visitor.get(f"/console/models/{model('a', 'draft')}").text
    assert f"ft:tiny-base:{tenant.id}:bot : no model → a ." in consequences(page, "promote")
    assert "no request changes" in consequences(page, "deprecate")


def test_the_only_version_has_nothing_to_roll_back_to(
    platform: Platform, tenant: Tenant, visitor: Visitor, model: Callable[..., str]
) -> None:
    only = model("a")
    page = visitor.get(f"/console/models/{only}").text
    assert "there is nothing to roll back to" in page
    assert f"/console/models/{only}/rollback" not in page
    assert adapters.get_adapter(platform, tenant.id, only).stage == "production"
