"""Numbers that a plan takes from a simulation."""

from __future__ import annotations

import pytest

from control_plane.planning import waits
from engine.scheduler.simulation.outcome import Outcome, Span


def test_utilisation_is_that_of_the_counted_days() -> None:
    used = {0.0: 8, 50.0: 4, 150.0: 8, 250.0: 0}
    spans = [Span(start=start, used=num, ready=8, queued=0, unusable=0) for start, num in used.items()]
    outcome = Outcome(records=[], num_gpus=8, spans=spans)
    assert waits._utilisation(outcome, 100.0, 200.0) == pytest.approx((50 * 4 + 50 * 8) / (100 * 8))
