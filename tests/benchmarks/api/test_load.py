"""The load benchmark answers every request of a small deployment, and accounts for the CPU of all its processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.api import load


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_small_deployment_answers_every_request(tmp_path: Path) -> None:
    out = tmp_path / "load.json"
    load.main(
        ["--jobs", "200", "--curve", "", "--seconds", "5", "--events", "2", "--rates", "20", "--workers", "1", "--schedulers", "1",
         "--out", str(out)]
    )  # fmt: skip
    (size,) = json.loads(out.read_text())["sizes"]
    (rate,) = size["rates"]
    assert rate["failed"] == {} and sum(kind["num"] for kind in rate["calls"].values()) == 100
    used = rate["cpu"]
    assert used.keys() == {"api", "workers", "schedulers", "postgresql", "callers"}
    assert used["api"]["ms_per_request"] > 0 and used["postgresql"]["ms_per_request"] > 0
