"""What an attempt costs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.billing import Entry, entries, price_micros
from ft_assets.errors import Fault


def bill(**changed: Any) -> list[Entry]:
    values: dict[str, Any] = {
        "job_id": "ftjob-1", "attempt": 2, "tier": "standard", "gpu_type": "h100-80gb", "num_gpus": 4,
        "started_at": 1000.0, "ended_at": 1900.0, "fault": None, "outcome": "succeeded",
    }  # fmt: skip
    return entries(**(values | changed))


def test_a_quarter_of_an_hour_on_four_gpus_is_one_gpu_hour() -> None:
    (usage,) = bill()
    assert usage.gpu_seconds == 3600
    assert usage.amount_micros == 4_000_000


@pytest.mark.parametrize(
    ("fault", "owed"),
    [
        pytest.param(None, 4_000_000, id="success is paid"),
        pytest.param(Fault.USER, 4_000_000, id="a user's fault is paid"),
        pytest.param(Fault.AMBIGUOUS, 4_000_000, id="an ambiguous one is paid until an operator decides"),
        pytest.param(Fault.PLATFORM, 0, id="a platform's fault is given back"),
    ],
)
def test_who_pays(fault: Fault | None, owed: int) -> None:
    assert sum(e.amount_micros for e in bill(fault=fault)) == owed


def test_entries_of_an_attempt_have_ids_that_a_second_report_repeats() -> None:
    assert [e.id for e in bill(fault=Fault.PLATFORM)] == ["ftjob-1/a2/usage", "ftjob-1/a2/refund"]
    assert bill(fault=Fault.PLATFORM) == bill(fault=Fault.PLATFORM)


@given(st.floats(0, 1e7), st.sampled_from(["free", "standard", "premium"]))
def test_prices_are_whole_micros_and_never_negative(gpu_seconds: float, tier: str) -> None:
    price = price_micros("h100-80gb", tier, gpu_seconds)
    assert isinstance(price, int)
    assert price >= 0


def test_a_clock_that_ran_backwards_bills_nothing() -> None:
    assert bill(ended_at=900.0)[0].amount_micros == 0
