"""The page Plan: the form keeps what was sent, mistakes are named, and results are those of the planning service."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from control_plane.api.app import create_app
from control_plane.console.pages.operators import plan_page
from control_plane.planning import job_mix, service
from control_plane.platform.context import Actor, Platform
from control_plane.tenants import operators
from tests.support.platform.operator_world import pools_file

PLAN = "/console/operator/plan"
SENT: dict[str, Any] = {
    "jobs_a_day": "100", "arrivals": "even", "tier.premium": "10", "tier.standard": "90", "tier.free": "0", "spot": "0", "days": "2",
    "kind.name": ["short", "by model", ""], "kind.share": ["80", "20", ""], "kind.gpu_hours": ["1", "", ""], "kind.gpus": ["1, 2", "", ""],
    "kind.class": ["lora", "", ""], "kind.model": ["", "llama-3.1-8b", ""], "kind.tokens": ["", "10000000", ""],
}  # fmt: skip


@pytest.fixture(scope="module")
def platform(new_platform: Callable[..., Platform], tmp_path_factory: pytest.TempPathFactory) -> Platform:
    return new_platform(pools=str(pools_file(tmp_path_factory.mktemp("pools"))))


@pytest.fixture(scope="module")
def operator(platform: Platform, serve: Callable[..., str]) -> Iterator[httpx.Client]:
    key = operators.create(platform.acting_as(Actor(kind="operator", id="cli:test")), "Planner").secret
    with httpx.Client(base_url=serve(create_app(platform)), timeout=120) as client:
        client.post("/console/sign-in", data={"key": key})
        token = re.search(r'name="csrf-token" content="([^"]+)"', client.get(PLAN).text)
        assert token is not None
        client.headers["x-csrf-token"] = token[1]
        yield client


def words(page: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


def test_the_form_starts_with_the_planned_mix_and_the_pools(operator: httpx.Client) -> None:
    page = operator.get(PLAN).text
    for said in ('value="small adapters"', 'value="1, 2, 4"', 'value="768"', 'name="pool.small" value="28"', 'name="pool.spot" value="2"'):
        assert said in page
    assert "GPUs at peak" not in page


def test_a_plan_shows_what_the_service_computes(operator: httpx.Client, platform: Platform) -> None:
    page = operator.post(PLAN, data=SENT | {"pool.small": "40"}).text
    kinds = [
        {"name": "short", "share": 80, "gpu_hours": 1, "gpus": [1, 2], "class": "lora"},
        {"name": "by model", "share": 20, "model": "llama-3.1-8b", "tokens": 10_000_000},
    ]
    mix = job_mix.parse({"jobs_a_day": 100, "arrivals": "even", "kinds": kinds, "tiers": {"premium": 10, "standard": 90}})
    found = service.plan(platform.settings, mix, at=platform.clock(), layouts=[{"small": 40}], days=2.0)
    said = words(page)
    assert f"GPU-hours a job {found.gpu_hours_a_job:.2f} " in said
    assert f"GPUs on average {round(found.total.average)} " in said
    assert "30 GPUs as configured" in said
    assert "42 GPUs as changed" in said
    for scenario in found.scenarios:
        assert f"Margin a month {'-' if scenario.money.margin_micros < 0 else ''}${abs(scenario.money.margin_micros) / 1e6:,.2f}" in said
    assert page.count('<svg class="chart"') >= 2
    assert 'value="1, 2"' in page


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"jobs_a_day": "many"}, "Jobs a day: &#39;many&#39; is not a number"),
        ({"kind.share": ["50", "20", ""]}, "add up to 70 %"),
        ({"kind.gpus": ["16", "", ""]}, "no pool gives 16 GPUs"),
        ({"kind.gpus": ["<b>", "", ""]}, "&lt;b&gt;"),
        ({"days": "59", "jobs_a_day": "200"}, "simulate at most 57 days"),
        ({"pool.small": "0"}, "a pool has 1 to"),
        ({"days": "900"}, "simulate 1 to 60"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_above_the_form_that_keeps_it(operator: httpx.Client, change: dict[str, Any], says: str) -> None:
    answer = operator.post(PLAN, data=SENT | change)
    assert answer.status_code == 200
    assert "No plan was made" in answer.text
    assert says in answer.text
    assert 'value="by model"' in answer.text
    assert "GPUs at peak" not in answer.text


def test_a_link_or_a_form_of_another_site_starts_no_plan(operator: httpx.Client) -> None:
    by_link = operator.get(PLAN, params=SENT)
    assert "GPUs at peak" not in by_link.text
    without_token = operator.post(PLAN, data=SENT, headers={"x-csrf-token": ""})
    assert without_token.status_code == 403
    assert "GPUs at peak" not in without_token.text


def test_a_server_computes_one_plan_at_a_time(operator: httpx.Client) -> None:
    with plan_page.one_plan:
        refused = operator.post(PLAN, data=SENT)
    assert refused.status_code == 503
    assert "one at a time; retry in a moment" in refused.text
    assert 'value="by model"' in refused.text
    assert operator.post(PLAN, data=SENT | {"days": "1"}).status_code == 200


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"jobs_a_day": "9000", "days": "", "kind.gpu_hours": ["0.01", "", ""], "pool.small": "4000"}, "Margin a month"),
        ({"pool.small": "5000"}, "GPUs are more than the 4,096 of a simulation here"),
        ({"kind.gpu_hours": ["90", "", ""]}, "The price is for what they can do."),
    ],
)
def test_a_plan_that_would_take_long_has_money_without_waits(operator: httpx.Client, change: dict[str, Any], says: str) -> None:
    said = words(operator.post(PLAN, data=SENT | {"days": "1"} | change).text)
    assert says in said
    assert "GPUs at peak" in said
    assert "Margin a month" in said
