"""A few random kills through the platform's own parts; ``python -m benchmarks.training.kills`` makes a hundred."""

from __future__ import annotations

import pytest

from benchmarks.training.kills import run


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_job_ends_with_the_bytes_of_one_that_was_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    result = run(3, seed=4, epochs=8)
    assert result["breaches"] == []
    assert result["count"] >= 3
