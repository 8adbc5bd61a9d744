"""The page Plan: the form keeps what was sent, mistakes are named, and results are those of the planning service."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from control_plane.api.app import create_app
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
        yield client


def words(page: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", page).split())


def test_the_form_starts_with_the_planned_mix_and_the_pools(operator: httpx.Client) -> None:
    page = operator.get(PLAN).text
    for said in ('value="small adapters"', 'value="1, 2, 4"', 'value="768"', 'name="pool.small" value="28"', 'name="pool.spot" value="2"'):
        assert said in page
    assert "GPUs at peak" not in page


def test_a_plan_shows_what_the_service_computes(operator: httpx.Client, platform: Platform) -> None:
    page = operator.get(PLAN, params=SENT | {"pool.small": "40"}).text
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
        ({"jobs_a_day": "9000"}, "simulate fewer days"),
        ({"pool.small": "0"}, "a pool has 1 to"),
        ({"days": "900"}, "simulate 1 to 60"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_above_the_form_that_keeps_it(operator: httpx.Client, change: dict[str, Any], says: str) -> None:
    answer = operator.get(PLAN, params=SENT | change)
    assert answer.status_code == 200
    assert "This mix cannot be planned" in answer.text
    assert says in answer.text
    assert 'value="by model"' in answer.text
    assert "GPUs at peak" not in answer.text
