"""Pools: what they hold, and the file that an operator describes them in."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from control_plane.capacity import configured_pools
from engine.scheduler import pools
from engine.scheduler.pools import Pool, equal_nodes

TYPES = ("h100-80gb", "h200-141gb", "local")
SHIPPED = Path(__file__).parents[3] / "deploy" / "pools.yaml"
SMALL = {"name": "small", "gpu_type": "h100-80gb", "takes": ["lora"], "nodes": [{"count": 2, "gpus": 8}]}
WIDE = {
    "name": "wide", "gpu_type": "h100-80gb", "takes": ["full", "large"], "reserved_gpus": 16,
    "nodes": [{"count": 4, "gpus": 8, "fabric": "ib", "nodes_per_fabric": 2}, {"name": "spare", "gpus": 4, "fabric": "ib-1"}],
}  # fmt: skip


def read(*entries: dict[str, Any]) -> tuple[Pool, ...]:
    return configured_pools.parse({"pools": list(entries)}, gpu_types=TYPES)


def test_a_file_says_nodes_by_count_and_by_name() -> None:
    small, wide = read(SMALL, WIDE)
    assert [n.name for n in small.nodes] == ["small-0", "small-1"] and small.num_gpus == 16
    assert [(n.name, n.fabric) for n in wide.nodes] == [
        ("wide-0", "ib-0"), ("wide-1", "ib-0"), ("wide-2", "ib-1"), ("wide-3", "ib-1"), ("spare", "ib-1"),
    ]  # fmt: skip
    assert (wide.num_gpus, wide.max_gpus_per_job, wide.packing, wide.pricing) == (36, 16, "dense", "on_demand")
    (narrow,) = read(SMALL | {"cpu_per_gpu": 6, "memory_gib_per_gpu": 40})
    assert [(p.cpu_per_gpu, p.memory_gib_per_gpu) for p in (small, narrow)] == [(12, 112), (6, 40)]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gpu_type": "h1000"}, r"pools\[0\].gpu_type is 'h1000'; use one of h100-80gb, h200-141gb, local"),
        ({"takes": ["lora", "qlora"]}, r"takes\[1\] is 'qlora': input should be 'lora', 'large', 'full' or 'evaluation'"),
        ({"packing": "loose"}, "packing is 'loose': input should be 'dense' or 'whole_node'"),
        ({"pricing": "cheap"}, "pricing is 'cheap': input should be 'on_demand', 'spot' or 'reserved'"),
        ({"reserved_gpus": 17}, r"pools\[0\].reserved_gpus is 17, and its nodes have 16 GPUs"),
        ({"max_gpus_per_job": 32}, "max_gpus_per_job is 32, and the widest gang that its nodes hold .* has 16 GPUs"),
        ({"cpu_per_gpu": 0}, "cpu_per_gpu is 0: input should be greater than or equal to 1"),
        ({"name": "Small Pool"}, "name is 'Small Pool': use lower-case letters"),
        ({"nodes": []}, "nodes is \\[\\]: list should have at least 1 item"),
        ({"nodes": [{"gpus": 8}]}, r"nodes\[0\]: it has neither name nor count"),
        ({"nodes": [{"gpus": 8, "name": "a", "count": 2}]}, "both name and count"),
        ({"nodes": [{"gpus": 80, "count": 2}]}, "gpus is 80: input should be less than or equal to 16"),
        ({"nodes": [{"gpus": 8, "count": 2, "nodes_per_fabric": 2}]}, "nodes_per_fabric is 2 without a fabric"),
        ({"nodes": [{"gpus": 8, "name": "a"}, {"gpus": 8, "name": "a"}]}, "node a appears 2 times"),
        ({"colour": "red"}, "colour is unknown; it has name, gpu_type"),
        ({"pricing": "spot"}, "class lora is taken by spot pool small alone"),
    ],
)
def test_what_is_wrong_in_a_file_is_told_with_its_place(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read(SMALL | change)


def test_evaluations_have_a_class_of_their_own_once_a_pool_names_it() -> None:
    judging = {"name": "judging", "gpu_type": "h200-141gb", "takes": ["evaluation"], "nodes": [{"count": 1, "gpus": 2}]}
    small, wide, own = read(SMALL, WIDE, judging)
    assert [pools.evaluation_class(given, "lora") for given in ((small, wide), (small, wide, own))] == ["lora", "evaluation"]
    assert pools.pools_taking((small, wide, own), "evaluation") == [own]
    assert not any(pool.accepts("evaluation") for pool in (small, wide)) and not own.accepts("lora")
    everything = {key: value for key, value in SMALL.items() if key != "takes"}
    with pytest.raises(ValueError, match=r"small \(h100-80gb\) and judging \(h200-141gb\) both take class evaluation"):
        read(everything, judging)
    assert len(read(everything, {**judging, "gpu_type": "h100-80gb"})) == 2
    with pytest.raises(ValueError, match="class evaluation is taken by spot pool judging alone"):
        read(SMALL, {**judging, "pricing": "spot"})
    assert len(read({**everything, "name": "all", "nodes": [{"count": 1, "gpus": 1}]}, {**SMALL, "pricing": "spot"})) == 2


def test_pools_of_one_class_have_gpus_of_one_type() -> None:
    other = deepcopy(SMALL) | {"name": "other", "gpu_type": "h200-141gb"}
    with pytest.raises(ValueError, match=r"small \(h100-80gb\) and other \(h200-141gb\) both take class lora"):
        read(SMALL, other)
    assert len(read(SMALL, other | {"takes": ["large"]})) == 2
    with pytest.raises(ValueError, match="pool small appears 2 times"):
        read(SMALL, SMALL)


def test_a_file_that_cannot_be_read_names_itself(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="FT_POOLS names that file"):
        configured_pools.load(tmp_path / "none.yaml", gpu_types=TYPES)
    (tmp_path / "list.yaml").write_text("- a\n")
    with pytest.raises(ValueError, match=r"list.yaml is \['a'\]: input should be a dictionary"):
        configured_pools.load(tmp_path / "list.yaml", gpu_types=TYPES)


def test_the_shipped_file_has_the_planned_gpus_in_three_pools() -> None:
    found = {p.name: p for p in configured_pools.load(SHIPPED, gpu_types=TYPES)}
    assert [p.num_gpus for p in found.values()] == [53, 48, 224] and sum(p.num_gpus for p in found.values()) == 325
    every = list(found.values())
    assert pools.widest_of(every, "premium", "full") == 32
    assert pools.widest_of(every, "premium", "large") == 32 and found["large"].max_gpus_per_job == 8
    assert pools.widest_of(every, "free", "lora") == 8
    assert pools.widest_of(every, "standard", "full") == 0
    fabrics = {n.fabric for n in found["fabric"].nodes}
    assert len(fabrics) == 7 and pools.largest_gang(found["fabric"].nodes) == 32
    text = yaml.safe_load(SHIPPED.read_text())
    assert text["pools"][0]["nodes"][1]["gpus"] + text["pools"][0]["nodes"][2]["gpus"] == 325 % 8


def test_a_drained_node_gives_nothing_now_but_narrows_nothing_for_ever() -> None:
    pool = Pool(name="p", nodes=equal_nodes(16), gpu_type="h100-80gb", max_gpus_per_job=16, reserved_gpus=4)
    half = replace(pool, nodes=(replace(pool.nodes[0], ready=False), pool.nodes[1]))
    assert (half.num_gpus, half.total_gpus) == (8, 16)
    assert (half.widest("premium"), half.widest("standard")) == (16, 12)


def test_on_nodes_of_its_own_a_gang_of_a_lower_tier_is_as_wide_as_the_nodes_that_hold_no_reserved_gpu() -> None:
    of = Pool(name="p", nodes=equal_nodes(16), gpu_type="h100-80gb", max_gpus_per_job=16, reserved_gpus=4, packing="whole_node")
    assert (of.widest("premium"), of.widest("standard")) == (16, 8)
    assert replace(of, nodes=equal_nodes(8), max_gpus_per_job=8).widest("standard") == 0
    assert replace(of, nodes=equal_nodes(20), reserved_gpus=0).widest("standard") == 16


def test_a_gang_is_as_wide_as_a_node_or_the_equal_nodes_of_a_fabric() -> None:
    assert pools.largest_gang(equal_nodes(20)) == 16  # two of 8, and one of 4 that makes no part of them
    assert pools.largest_gang(equal_nodes(32, fabric="f", fabrics_of=1)) == 8
    assert pools.largest_gang(()) == 0


def test_spot_goes_first_only_for_long_jobs_that_ask_and_are_not_premium() -> None:
    spot = Pool(name="cheap", nodes=equal_nodes(64), gpu_type="h100-80gb", max_gpus_per_job=64, pricing="spot")
    owned = Pool(name="owned", nodes=equal_nodes(8, prefix="o"), gpu_type="h100-80gb", max_gpus_per_job=8, pricing="reserved")
    dear = Pool(name="dear", nodes=equal_nodes(16, prefix="d"), gpu_type="h100-80gb", max_gpus_per_job=16)
    every = [owned, spot, dear]
    assert pools.may_use_spot(spot=True, tier="standard", expected_s=4 * 3600)
    assert not pools.may_use_spot(spot=True, tier="standard", expected_s=4 * 3600 - 1)
    assert not pools.may_use_spot(spot=True, tier="premium", expected_s=1e6)
    assert not pools.may_use_spot(spot=False, tier="free", expected_s=1e6)

    def names(**asked: Any) -> list[str]:
        return [p.name for p in pools.pools_in_order(every, tier="standard", kind="lora", **asked)]

    assert names(num_gpus=8) == ["owned", "dear"]
    assert names(num_gpus=8, spot=True) == ["cheap", "owned", "dear"]
    assert names(num_gpus=16, spot=True) == ["cheap", "dear"]
    assert pools.widest_of(every, "standard", "lora") == 16  # spot can be taken away, so it widens nothing
