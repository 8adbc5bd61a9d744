"""Demand and money of a mix: the planned numbers, and what small cases come to by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from control_plane.billing import prices
from control_plane.capacity import configured_pools
from control_plane.planning import job_mix, kind_sizes, rules
from control_plane.planning.job_mix import JobMix
from control_plane.planning.rules import Demand
from core.errors import InvalidRequest
from engine.scheduler.pools import Pool, equal_nodes

NOW = datetime(2026, 11, 1, tzinfo=UTC)
SHIPPED = Path(__file__).parents[3] / "deploy" / "pools.yaml"
ONE = {"name": "one", "share": 100, "gpu_hours": 2, "gpus": 1}


def mix_of(*kinds: dict[str, Any], **fields: Any) -> JobMix:
    return job_mix.parse({"jobs_a_day": 240, "arrivals": "even", "kinds": list(kinds), **fields})


def pool(num_gpus: int = 64, **fields: Any) -> Pool:
    given = {"name": "gpus", "nodes": equal_nodes(num_gpus), "gpu_type": "h100-80gb", "max_gpus_per_job": 32, **fields}
    return Pool(**given)


def demand_of(mix: JobMix, pools: list[Pool], name: str | None = None) -> Demand:
    found = rules.parts(mix, kind_sizes.sized(mix, pools), pools)
    return rules.demand(mix, [part for part in found if name is None or part.pool.name == name])


def test_the_planned_mix_needs_the_planned_gpus() -> None:
    mix, pools = job_mix.load(), list(configured_pools.load(SHIPPED, gpu_types=("h100-80gb",)))
    kinds = kind_sizes.sized(mix, pools)
    a_job = sum(kind.share * kind.gpu_hours for kind in kinds)
    assert a_job == pytest.approx(10.3, rel=0.01)
    assert mix.jobs_a_day * a_job == pytest.approx(5150, rel=0.01)
    total = demand_of(mix, pools)
    assert total.average == pytest.approx(215, rel=0.01)
    assert total.peak == pytest.approx(325, rel=0.02)
    by_pool = {p.name: demand_of(mix, pools, p.name).average for p in pools}
    assert by_pool == pytest.approx({"small": 23.96, "large": 30.0, "fabric": 160.0}, rel=0.001)


def test_even_arrivals_need_the_same_gpus_all_day() -> None:
    found = demand_of(mix_of(ONE), [pool()])
    assert found.average == pytest.approx(20.0)  # 240 jobs of two hours: 20 run at once
    assert {round(mean, 6) for mean, _ in found.by_slot} == {20.0}
    assert found.peak == pytest.approx(20.0 + math.sqrt(20.0))  # Poisson
    wide = demand_of(mix_of(ONE | {"gpus": 4}), [pool()])
    assert wide.average == pytest.approx(20.0)  # a quarter of the time on four
    assert wide.peak == pytest.approx(20.0 + 4 * math.sqrt(5.0))


def test_demand_follows_arrivals_by_about_the_length_of_jobs() -> None:
    at_nine = [0.0] * 24
    at_nine[9] = 1.0
    found = demand_of(mix_of(ONE, arrivals=at_nine), [pool()])
    assert found.average == pytest.approx(20.0)
    means = [mean for mean, _ in found.by_slot]
    assert 9 * 4 < means.index(max(means)) <= 11 * 4
    assert max(means) > 150.0  # most of the 240 jobs at once
    assert means[8 * 4] < 1.0


def test_a_job_counts_in_the_pool_that_is_tried_first() -> None:
    small, spot = pool(name="small", takes=frozenset({"lora"})), pool(name="spot", takes=frozenset({"lora"}), pricing="spot")
    long = ONE | {"gpu_hours": 8}
    mix = mix_of(long, spot=25, tiers={"premium": 20, "standard": 80})
    assert demand_of(mix, [small, spot], "spot").average == pytest.approx(80.0 * 0.8 * 0.25)  # never premium jobs
    short = mix_of(ONE, spot=25)
    assert demand_of(short, [small, spot], "spot").average == 0.0  # too short for spot to pay


def test_a_job_that_no_pool_holds_is_refused_with_what_the_pools_give() -> None:
    with pytest.raises(InvalidRequest, match=r"no pool gives 16 GPUs to a job of tier standard and class lora; the most is 8") as refused:
        demand_of(mix_of(ONE | {"gpus": 16}), [pool(max_gpus_per_job=8)])
    assert refused.value.code == "no_pool"
    with pytest.raises(InvalidRequest, match="tier standard and class lora; the most is 0"):
        demand_of(mix_of(ONE), [pool(reserved_gpus=64)])


def test_cost_price_and_margin_come_to_what_they_come_to_by_hand() -> None:
    mix, pools, book = mix_of(ONE, tiers={"premium": 25, "standard": 50, "free": 25}), [pool()], prices.load().at(NOW)
    found = rules.parts(mix, kind_sizes.sized(mix, pools), pools)
    made = rules.money(found, pools, book, gpu_cost={"gpus": 1_500_000}, stored_gib=1000.0)
    hours = 480 * 30  # GPU-hours of a month
    assert made.gpu_cost_micros == 64 * 24 * 30 * 1_500_000
    assert made.storage_cost_micros == 23_000_000
    assert dict(made.price_by_tier) == {"premium": hours * 6_000_000 // 4, "standard": hours * 4_000_000 // 2, "free": 0}
    assert made.margin_micros == made.price_micros - made.cost_micros
    assert made.margin == pytest.approx(made.margin_micros / made.price_micros)
    unpaid = rules.money([replace(part, tier="free") for part in found], pools, book, gpu_cost={"gpus": 1}, stored_gib=0.0)
    assert unpaid.margin is None


def test_the_default_cost_of_a_gpu_is_a_share_of_its_price() -> None:
    book = prices.load().at(NOW)
    assert rules.hourly_cost(pool(), book, None) == 2_000_000
    assert rules.hourly_cost(pool(), book, 1.25) == 1_250_000


def test_a_resized_pool_keeps_its_kind_of_nodes_and_its_reserved_share() -> None:
    fabric = pool(224, name="fabric", nodes=equal_nodes(224, fabric="ib", fabrics_of=4), reserved_gpus=112)
    assert rules.resized(fabric, 224) is fabric
    larger = rules.resized(fabric, 320)
    assert (larger.total_gpus, larger.reserved_gpus, larger.max_gpus_per_job) == (320, 160, 32)
    assert sorted({n.fabric for n in larger.nodes}) == sorted(f"fabric{i}" for i in range(10))
    tiny = rules.resized(fabric, 12)
    assert [n.num_gpus for n in tiny.nodes] == [8, 4]
    assert tiny.max_gpus_per_job == 8


def test_pools_serve_what_fits_wherever_jobs_may_run() -> None:
    """240 GPU-hours a day of full jobs and 240 of adapters; full ones only fit `wide`, adapters fit both."""
    wide, small = pool(8, name="wide"), pool(8, name="small", takes=frozenset({"lora"}))
    kinds = [ONE | {"share": 50}, ONE | {"share": 50, "name": "full", "class": "full"}]
    mix = mix_of(*kinds, tiers={"premium": 100})

    def served(*pools: Pool) -> float:
        return rules.served(rules.parts(mix, kind_sizes.sized(mix, pools), pools), pools)

    assert served(pool(24, name="wide"), small) == 1.0
    assert served(wide, small) == pytest.approx(16 / 20)
    assert served(wide, pool(64, name="small", takes=frozenset({"lora"}))) == pytest.approx((8 + 10) / 20)  # full jobs have 8 GPUs
    assert served(pool(16, name="wide")) == pytest.approx(16 / 20)


def test_jobs_of_many_days_need_the_same_gpus_all_day() -> None:
    long = demand_of(mix_of(ONE | {"gpu_hours": 100_000}, arrivals="working_hours"), [pool(200_000)])
    assert {mean for mean, _ in long.by_slot} == {long.average}
    almost = demand_of(mix_of(ONE | {"gpu_hours": 9.9 * 24}, arrivals="working_hours"), [pool()])
    assert [mean for mean, _ in almost.by_slot] == pytest.approx([almost.average] * rules.SLOTS, rel=0.02)


def test_a_resized_pool_of_which_a_part_is_outside_of_fabrics_keeps_that_part() -> None:
    alone, rail = equal_nodes(32, prefix="alone"), equal_nodes(64, prefix="rail", fabric="ib", fabrics_of=4)
    for order in ((*alone, *rail), (*rail, *alone)):
        larger = rules.resized(pool(96, nodes=order), 192)
        fabrics = [n.fabric for n in larger.nodes]
        assert fabrics.count("") == 8
        assert {name: fabrics.count(name) for name in fabrics if name} == {f"fabric{i}": 4 for i in range(4)}
        assert len({n.name for n in larger.nodes}) == 24
    one_fabric = rules.resized(pool(64, nodes=(*alone[:4], *equal_nodes(32, prefix="rail", fabric="ib"))), 128)
    assert [n.fabric for n in one_fabric.nodes].count("fabric") == 8
