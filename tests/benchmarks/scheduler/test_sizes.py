"""The benchmark of the planned sizes replays them, and ten times as much is ten times the pools."""

from __future__ import annotations

from benchmarks.scheduler import sizes


def test_a_day_of_the_planned_mix_lands_where_the_pools_say() -> None:
    pools = sizes.shipped()
    outcome, policy = sizes.replay(sizes.mix(3, days=0.5), pools)
    waits, where = sizes.by_class([outcome]), sizes.landed([outcome], pools)
    assert sum(of["jobs"] for of in waits.values()) == len(outcome.records) > 100
    assert set(where.get("full", {"fabric": 1.0})) == {"fabric"} and "small" not in where["large"]
    assert all(abs(sum(found.values()) - 1) < 0.01 for found in where.values())
    assert outcome.broken == [] and len(policy.took) > 0


def test_ten_times_the_pools_have_ten_times_the_nodes_and_no_name_twice() -> None:
    once, often = sizes.shipped(), sizes.times(sizes.shipped(), 10)
    assert [p.num_gpus for p in often] == [10 * p.num_gpus for p in once]
    assert [p.widest("standard") for p in often] == [8, 8, 0]
    names = [n.name for p in often for n in p.nodes]
    assert len(set(names)) == len(names) == 10 * sum(len(p.nodes) for p in once)
    assert sum(p.num_gpus for p in sizes.with_fabrics(7)) == sum(p.num_gpus for p in sizes.one_pool(325)) == 325
