"""A base over several GPUs, on two pretended ones whose tensors do not mix. It has not run on real ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.models.tiny_model import build_tiny_model


@pytest.mark.slow
def test_a_model_split_over_two_gpus_gives_the_answers_of_one_that_holds_it_whole(place: Path, tmp_path: Path) -> None:
    whole = build_tiny_model(tmp_path / "whole", seed=3)
    command = [sys.executable, "-m", "tests.engine.evals.run.split_answers", str(place / "base"), str(place / "adapter"), str(whole)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout)
    one, two = found["one"], found["two"]
    assert (one["devices"], two["devices"]) == (["pretended:0"], ["pretended:0", "pretended:1"])
    assert "one device" in found["mixed"], "or nothing would be shown here"
    assert one["answers"] == two["answers"]
    base, adapter, other = (two["answers"][name] for name in ("base", "adapter", "whole"))
    assert base != adapter != other != base and two["answers"]["again"] == base
    assert (one["num_gpus"], two["num_gpus"]) == (1, 2)
    assert two["environment"] == f"2 x {one['environment']}", "answers are not mixed with those of another split"
