"""Plans as a whole: scenarios, waits on few and on many GPUs, storage, and refusals."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from control_plane.attempts.checkpoint_retention import KEPT_AFTER_END
from control_plane.planning import job_mix, kind_sizes, service
from control_plane.planning.waits import Limits
from control_plane.platform.settings import Settings
from core.errors import InvalidRequest

NOW = datetime(2026, 11, 1, tzinfo=UTC)
POOLS = "pools: [{name: all, gpu_type: h100-80gb, nodes: [{count: 2, gpus: 8}]}]"
KIND = {"name": "one", "share": 100, "gpu_hours": 2, "gpus": 1}
MIX = job_mix.parse({"jobs_a_day": 96, "arrivals": "even", "tiers": {"premium": 20, "standard": 80}, "kinds": [KIND]})


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "pools.yaml").write_text(POOLS)
    return replace(Settings(home=tmp_path), pools_file=tmp_path / "pools.yaml")


@pytest.mark.slow
def test_more_gpus_shorten_waits_and_cost_more(settings: Settings) -> None:
    found = service.plan(settings, MIX, at=NOW, layouts=[{"all": 8}, {"all": 32}], days=6.0)
    assert found.total.average == pytest.approx(8.0)
    given, few, many = found.scenarios
    assert [s.num_gpus for s in found.scenarios] == [16, 8, 32]
    late = {s.num_gpus: {w.tier: w for w in s.simulated.waits} for s in found.scenarios}
    assert late[32]["standard"].max_s == 0.0
    assert late[32]["standard"].within == 1.0
    assert late[8]["standard"].p95_s > late[16]["standard"].p95_s
    assert late[8]["standard"].within is not None
    assert late[8]["standard"].within < 1.0
    assert late[8]["premium"].p95_s < late[8]["standard"].p95_s
    assert few.simulated.utilisation > 0.85 > given.simulated.utilisation > many.simulated.utilisation
    assert given.money.price_micros == few.money.price_micros == many.money.price_micros
    assert few.money.margin_micros > given.money.margin_micros > many.money.margin_micros
    assert given.money.gpu_cost_micros == 16 * 24 * 30 * 2_000_000
    busy = given.simulated.busy
    assert len(busy) == 6 * 24 + 1
    assert sum(used for _, used, _ in busy) / len(busy) / 16 == pytest.approx(given.simulated.utilisation, abs=0.1)


def test_checkpoints_stay_for_days_and_the_rest_grows(settings: Settings) -> None:
    stored = service.plan(settings, MIX, at=NOW, days=1.0).storage
    (kind,) = kind_sizes.sized(MIX, ())
    assert stored.growth_gib_per_day == pytest.approx(96 * kind.kept_gib)
    assert stored.checkpoints_gib == pytest.approx(96 * (KEPT_AFTER_END.days + 2 / 24) * kind.checkpoints_gib)
    assert stored.after(30) == pytest.approx(stored.checkpoints_gib + 30 * stored.growth_gib_per_day)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"days": 0.0}, "simulate 1 to 60"),
        ({"layouts": [{"other": 8}]}, "pool 'other' is unknown; the pools are all"),
        ({"layouts": [{"all": 0}]}, "all=0: a pool has 1 to 80,000 GPUs"),
        ({"layouts": [{"all": 8}] * 6}, "a plan compares 5"),
        ({"gpu_usd_per_hour": -1.0}, "it can be 0 to 1,000"),
        ({"limits": Limits(jobs=480), "days": 2.1}, "more than the 480 of a simulation here; simulate at most 2 days"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused_with_its_limit(settings: Settings, given: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        service.plan(settings, MIX, at=NOW, **given)
    assert refused.value.code == "invalid_plan"
    assert says in refused.value.message


def test_an_embedded_installation_plans_on_itself_what_it_holds_and_else_on_the_planned_pools(tmp_path: Path) -> None:
    embedded = Settings(home=tmp_path)
    own = service.plan(embedded, replace(MIX, jobs_a_day=6), at=NOW, days=1.0)
    assert [(pool.name, pool.gpus) for pool in own.pools] == [("local", 1)]
    large = service.plan(embedded, job_mix.parse(job_mix.read(None), origin="planned"), at=NOW, limits=Limits(gpus=0))
    assert {pool.name: pool.gpus for pool in large.pools} == {"small": 53, "large": 48, "fabric": 224}
    assert (round(large.total.average), round(large.total.peak)) == (214, 329)
    said = [any(one.startswith("pools: the 325 GPUs of the planned installation") for one in found.assumptions) for found in (own, large)]
    assert said == [False, True]
    wide = job_mix.parse({"jobs_a_day": 1, "tiers": {"standard": 100}, "kinds": [KIND | {"gpus": 32}]})
    with pytest.raises(InvalidRequest, match="no pool gives 32 GPUs to a job of tier standard"):
        service.plan(embedded, wide, at=NOW)


def test_a_mix_that_submits_nothing_is_refused(settings: Settings) -> None:
    with pytest.raises(InvalidRequest, match="no job is submitted in 1 days"):
        service.plan(settings, replace(MIX, jobs_a_day=1e-6), at=NOW, days=1.0)


def test_pools_that_cannot_be_simulated_have_money_and_say_why_they_have_no_waits(settings: Settings) -> None:
    found = service.plan(settings, MIX, at=NOW, layouts=[{"all": 4}, {"all": 64}], days=1.0, limits=Limits(gpus=32))
    given, few, many = found.scenarios
    assert given.simulated is not None
    assert given.without_waits is None
    assert (few.simulated, many.simulated) == (None, None)
    assert few.without_waits == "the GPUs can do 50 % of the mix, so its queue grows without end"
    assert many.without_waits == "64 GPUs are more than the 32 of a simulation here"
    assert few.money.price_micros == pytest.approx(many.money.price_micros / 2, rel=1e-6)
    (over,) = service.plan(settings, MIX, at=NOW, days=1.0, limits=Limits(work=500)).scenarios
    assert over.simulated is None
    assert over.without_waits == "the simulation reached its limit of work before the end of a day"


def test_a_simulation_at_its_limit_of_work_counts_the_days_before_it(settings: Settings) -> None:
    wide = job_mix.parse({"jobs_a_day": 22, "arrivals": "even", "kinds": [KIND | {"gpus": 8, "gpu_hours": 16}]})
    (whole,) = service.plan(settings, wide, at=NOW, days=20.0).scenarios
    (part,) = service.plan(settings, wide, at=NOW, days=20.0, limits=Limits(work=12_000)).scenarios
    assert whole.simulated is not None
    assert part.simulated is not None
    assert (whole.simulated.complete, part.simulated.complete) == (True, False)
    assert whole.simulated.days == 20.0
    assert 1.0 <= part.simulated.days < 20.0
    assert part.simulated.not_started > 0
    assert min(wait.p50_s for wait in part.simulated.waits) >= 0.0
    assert len(part.simulated.busy) == int(part.simulated.days * 24) + 1


def test_days_that_were_not_given_are_as_many_as_can_be_simulated(settings: Settings) -> None:
    def planned(jobs: int) -> service.CapacityPlan:
        return service.plan(settings, MIX, at=NOW, limits=Limits(days=3.0, jobs=jobs))

    for jobs, days, says in (
        (5000, 3.0, "waits: 3 days simulated, with"),
        (440, 1.5, "waits: 1.5 days simulated, because 3 have too many"),
    ):
        found = planned(jobs)
        (scenario,) = found.scenarios
        assert scenario.simulated is not None
        assert scenario.simulated.days == pytest.approx(days)
        assert any(one.startswith(says) for one in found.assumptions)
    none = planned(383)
    assert none.scenarios[0].simulated is None
    assert none.scenarios[0].without_waits == "1 day and the 3 before it have 384 jobs, more than the 383 of a simulation here"
    assert "waits: not simulated, because a day of this mix has too many jobs" in none.assumptions


def test_the_models_by_which_kinds_without_one_are_stored_are_assumptions(settings: Settings) -> None:
    def assumed(**kind: Any) -> list[str]:
        mix = job_mix.parse({"jobs_a_day": 9, "tiers": {"premium": 100}, "kinds": [{"name": "one", "share": 100, **kind}]})
        found = service.plan(settings, mix, at=NOW, days=1.0).assumptions
        return [one for one in found if one.startswith("storage of kinds without a model")]

    assert assumed(gpu_hours=2, gpus=1) == ["storage of kinds without a model: lora jobs as llama-3.1-8b"]
    assert assumed(gpu_hours=2, gpus=1, **{"class": "large"}) == ["storage of kinds without a model: large jobs as llama-3.1-70b"]
    assert assumed(model="llama-3.1-8b", tokens=1_000_000) == []
