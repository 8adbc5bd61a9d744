"""Numbers and names of GPUs: what a reservation holds, what this machine has, what others share."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from control_plane.capacity import gpu_devices
from core.errors import Unavailable


def test_a_node_gives_its_lowest_free_numbers_and_each_node_counts_its_own() -> None:
    held = {"a": {0, 2}}
    assert gpu_devices.assign([("a", 2), ("b", 2)], held) == [[1, 3], [0, 1]]
    assert held == {"a": {0, 1, 2, 3}, "b": {0, 1}}


@pytest.mark.parametrize(
    ("given", "names"),
    [("4,5", ("4", "5")), (" GPU-1 , MIG-2 ", ("GPU-1", "MIG-2")), ("", ()), ("-1", ()), ("3,-1,5", ("3",)), ("2,", ("2",))],
)
def test_the_operators_choice_of_gpus_is_kept(given: str, names: tuple[str, ...]) -> None:
    assert gpu_devices.visible({"CUDA_VISIBLE_DEVICES": given}) == names


def test_else_every_device_file_of_the_driver_is_a_gpu(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert gpu_devices.visible({}, dev=tmp_path) == ("0", "1", "2")
    assert gpu_devices.visible({}, dev=tmp_path / "none") == ()


def test_more_slots_than_gpus_share_them_in_turn_and_a_machine_without_has_none() -> None:
    assert gpu_devices.reserved((2, 3), ("6", "7")) == ["6", "7"]
    assert gpu_devices.reserved((4,), ("6", "7")) == ["6"]
    assert gpu_devices.reserved((5,), ("6", "7")) == ["7"]
    assert gpu_devices.reserved((1,), ()) == []


@pytest.mark.parametrize("numbers", [numbers for width in (1, 2, 3) for numbers in combinations(range(8), width)], ids=str)
def test_every_rank_of_a_job_has_a_gpu_of_its_own(numbers: tuple[int, ...]) -> None:
    names = ("a", "b", "c")
    assert len(set(gpu_devices.reserved(numbers, names))) == len(numbers)


def test_a_job_with_more_ranks_than_gpus_is_refused() -> None:
    with pytest.raises(Unavailable, match=r"a job of 4 ranks needs as many GPUs, and this machine has 2 \(0, 1\)"):
        gpu_devices.reserved((0, 1, 2, 3), ("0", "1"))
