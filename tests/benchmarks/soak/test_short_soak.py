"""The short form of the soak: some 10 minutes of faults, about 15 with what comes before and after."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from benchmarks.soak.__main__ import soak

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2700)]

MINUTES, FAULTS, LEAST = 10.0, 40, 10
"""Faults come one at a time and wait for the recovery of the one before: 15 to 40 fit on two cores, and not every target is struck."""


def test_nothing_breaks_under_ten_minutes_of_faults() -> None:
    with tempfile.TemporaryDirectory(prefix="ft-soak-", ignore_cleanup_errors=True) as parent:
        result = soak(Path(parent) / "home", minutes=MINUTES, num_faults=FAULTS, seed=7, num_specs=2)
    assert result["breaches"] == []
    assert len(result["cases"]) >= LEAST
    assert result["work"]["adapters_compared"] >= 2, "no job ended but the twins"
