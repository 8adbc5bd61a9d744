"""``ft admin plan`` without a running stack."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

POOLS = "pools: [{name: all, gpu_type: h100-80gb, nodes: [{count: 5, gpus: 8}]}]"
MIX = {"jobs_a_day": 50, "tiers": {"premium": 50, "standard": 50}, "kinds": [{"name": "a", "share": 100, "gpu_hours": 3, "gpus": [1, 2]}]}
Ft = Callable[..., Any]


@pytest.fixture
def pools(tmp_path: Path) -> str:
    (tmp_path / "pools.yaml").write_text(POOLS)
    return str(tmp_path / "pools.yaml")


def test_a_file_and_options_describe_the_same_mix(offline: Ft, pools: str, tmp_path: Path) -> None:
    (tmp_path / "mix.json").write_text(json.dumps(MIX))
    more = ("--pools", pools, "--days", "1", "--json")
    by_file = offline("admin", "plan", str(tmp_path / "mix.json"), *more).json
    kind = "name=a,share=100,gpu_hours=3,gpus=1/2,tiers=premium:50/standard:50"
    by_options = offline("admin", "plan", "--kind", kind, "--jobs-a-day", "50", *more).json
    assert by_file["gpu_hours_a_day"] == by_options["gpu_hours_a_day"] == 150.0
    assert by_file["average_gpus"] == pytest.approx(6.25)
    assert by_file["pools"] == by_options["pools"]
    assert by_file["scenarios"][0]["num_gpus"] == 40


def test_the_table_names_pools_tiers_and_money(offline: Ft, pools: str, tmp_path: Path) -> None:
    (tmp_path / "mix.yaml").write_text(json.dumps(MIX))
    done = offline("admin", "plan", str(tmp_path / "mix.yaml"), "--pools", pools, "--days", "1", "--gpus", "all=8", "--gpu-cost", "1.5")
    assert done.code == 0
    for said in ("50 jobs a day, 3.00 GPU-hours each", "40 GPUs (all 40)", "8 GPUs (all 8)", "cost 43,", "premium", "100.0 % in 5 min"):
        assert said in done.out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--kind", "share"], "write FIELD=VALUE"),
        (["--kind", "share=x"], "is not a number"),
        (["--kind", "share=100,gpu_hours=1,gpus=x"], "valid integer"),
        (["--kind", "share=100,colour=red,gpu_hours=1,gpus=1"], "colour is unknown"),
        (["--gpus", "all"], "write POOL=N"),
        (["--gpus", "other=3", "--kind", "share=100,gpu_hours=1,gpus=1"], "pool 'other' is unknown"),
        (["--arrivals", "never"], "arrivals"),
        (["no-such-file.yaml"], "no-such-file.yaml cannot be read"),
        (["--kind", "share=100,gpu_hours=1,gpus=1,class=full,tiers=free:100"], "which only tier premium may train"),
    ],
)  # fmt: skip
def test_a_mistake_ends_with_what_to_write(offline: Ft, pools: str, args: list[str], says: str) -> None:
    done = offline("admin", "plan", *args, "--pools", pools, "--days", "1")
    assert done.code == 1
    assert says in done.err
    assert done.out == ""
