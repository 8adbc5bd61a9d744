"""Price lists: what holds when, whole numbers with one rounding, and files that are refused with the place of the mistake."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from control_plane.billing import prices
from control_plane.billing.prices import BUILTIN, GIB, half_even
from control_plane.tenants.rules import TIERS
from engine.scheduler import pools
from engine.training.memory.gpus import GPUS

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""The machine may be busy with something else."""

BODY: dict[str, Any] = yaml.safe_load(BUILTIN.read_text())


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    body = copy.deepcopy(BODY)
    change(body["lists"][0])
    return body


def test_the_prices_that_ship_have_every_tier_an_origin_in_words_and_gpus_that_are_known() -> None:
    book = prices.load()
    assert book.lists
    for one in book.lists:
        assert set(one.tiers) == set(TIERS)
        origins = [one.storage.origin, *(t.origin for t in one.tiers.values()), *(g.origin for g in one.gpus.values())]
        assert all(len(origin.split()) > 5 for origin in origins)
        assert {"local", "h100-80gb"} <= set(one.gpus)
        assert {name for name in one.gpus if name != "local"} <= set(GPUS)


def test_a_price_change_touches_nothing_that_began_before() -> None:
    body = copy.deepcopy(BODY)
    later = copy.deepcopy(body["lists"][0]) | {"valid_from": date(2026, 7, 1)}
    later["gpus"]["local"]["on_demand_micros_per_hour"] = 7_000_000
    body["lists"].append(later)
    book = prices.parse(body)
    last_moment = datetime(2026, 6, 30, 23, 59, 59, 999999, tzinfo=UTC)
    assert book.at(last_moment).gpu("local").on_demand == 1_000_000
    assert book.at(datetime(2026, 7, 1, tzinfo=UTC)).gpu("local").on_demand == 7_000_000
    assert book.at(datetime(1970, 1, 1, tzinfo=UTC)) == book.lists[0], "the first list holds for everything before it"


@PATIENT
@given(st.integers(0, 10**18), st.integers(1, 10**12))
def test_the_one_rounding_goes_to_the_nearest_and_a_half_to_the_even(numerator: int, denominator: int) -> None:
    assert half_even(numerator, denominator) == round(Fraction(numerator, denominator))
    assert half_even(-numerator, denominator) == -half_even(numerator, denominator)


@pytest.mark.parametrize(
    ("numerator", "denominator", "whole"), [(1, 2, 0), (3, 2, 2), (5, 2, 2), (7, 2, 4), (-1, 2, 0), (-3, 2, -2), (15, 10, 2), (25, 10, 2)]
)
def test_an_exact_half_goes_to_the_even_neighbour(numerator: int, denominator: int, whole: int) -> None:
    assert half_even(numerator, denominator) == whole
    assert [half_even(numerator * 10**12 + more, denominator * 10**12) - whole for more in (-1, 1)] in ([0, 1], [-1, 0]), (
        "beside it, no rule is needed"
    )


@pytest.mark.parametrize(("gpu_ms", "micros"), [(1800, 0), (5400, 2), (9000, 2), (12_600, 4)])
def test_half_a_micro_dollar_of_gpu_time_goes_to_the_even_one(gpu_ms: int, micros: int) -> None:
    """A GPU at 1,000 micro-dollars an hour: one for each 3.6 s."""
    body = changed(
        lambda b: b["gpus"]["local"].update(on_demand_micros_per_hour=1000, spot_micros_per_hour=1000, reserved_micros_per_hour=1000)
    )
    held = prices.parse(body).lists[0]
    assert held.tiers["standard"].gpu_percent == 100
    assert held.gpu_micros("local", tier="standard", pricing="on_demand", gpu_ms=gpu_ms) == micros


@PATIENT
@given(st.integers(0, 10**13), st.integers(0, 10**13), st.sampled_from(["free", "standard", "premium"]))
def test_more_time_never_costs_less(a: int, b: int, tier: str) -> None:
    held = prices.load().lists[0]
    less, more = (held.gpu_micros("h100-80gb", tier=tier, pricing="spot", gpu_ms=ms) for ms in sorted((a, b)))
    assert 0 <= less <= more
    assert isinstance(more, int)


def test_an_hour_costs_what_the_list_says_in_each_tier_and_pricing() -> None:
    held = prices.load().lists[0]

    def hour(tier: str, pricing: pools.Pricing) -> int:
        return held.gpu_micros("h100-80gb", tier=tier, pricing=pricing, gpu_ms=3_600_000)

    assert [hour("standard", p) for p in pools.PRICINGS] == [4_000_000, 2_000_000, 2_800_000]
    assert [hour(tier, "on_demand") for tier in TIERS] == [0, 4_000_000, 6_000_000]


def test_storage_within_the_allowance_is_free_and_a_month_of_a_gib_beyond_it_costs_its_price() -> None:
    held = prices.load().lists[0]
    allowed = held.tiers["standard"].storage_allowance_bytes
    assert held.storage_micros_per_day(tier="standard", stored_bytes=allowed, days_in_month=30) == 0
    dear = replace(held, storage=replace(held.storage, micros_per_gib_month=30 * GIB))  # a micro-dollar for a byte and a day
    assert [dear.storage_micros_per_day(tier="standard", stored_bytes=allowed + n, days_in_month=30) for n in (-1, 0, 1)] == [0, 0, 1]
    day = held.storage_micros_per_day(tier="standard", stored_bytes=allowed + 1000 * GIB, days_in_month=30)
    assert day * 30 == pytest.approx(1000 * held.storage.micros_per_gib_month, abs=15)
    assert held.storage_micros_per_day(tier="free", stored_bytes=10**15, days_in_month=30) == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(lambda b: b.pop("storage"), r"lists\[0\]: storage is missing", id="a missing part"),
        pytest.param(
            lambda b: b.update(discount=1), "discount is unknown; it has valid_from, gpus, tiers, storage", id="a part that nobody reads"
        ),
        pytest.param(lambda b: b.update(valid_from="soon"), "valid_from is 'soon': input should be a valid date", id="no day"),
        pytest.param(lambda b: b["tiers"].pop("free"), "needs exactly free, standard, premium", id="a tier without a price"),
        pytest.param(lambda b: b["gpus"]["local"].update(origin=" "), r"gpus.local.origin", id="a price without an origin"),
        pytest.param(
            lambda b: b["gpus"]["local"].update(spot_micros_per_hour=0.5), "0.5: input should be a valid integer", id="a fraction"
        ),
        pytest.param(
            lambda b: b["gpus"]["local"].update(spot_micros_per_hour=-1),
            "-1: input should be greater than or equal to 0",
            id="below nothing",
        ),
        pytest.param(lambda b: b["gpus"]["local"].update(spot_micros_per_hour=9_000_000), "spot costs more than on demand", id="dear spot"),
        pytest.param(lambda b: b.update(gpus={}), "gpus: dictionary should have at least 1 item", id="no GPU"),
        pytest.param(lambda b: b.update(tiers=[]), r"tiers is \[\]: input should be a valid dictionary", id="a list for a mapping"),
    ],
)
def test_a_mistake_in_the_price_lists_is_named_with_its_place(change: Callable[[dict[str, Any]], object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        prices.parse(changed(change))


def test_lists_out_of_order_and_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lists are ordered by valid_from"):
        prices.parse({"lists": [BODY["lists"][0], BODY["lists"][0]]})
    with pytest.raises(ValueError, match="at least 1 item"):
        prices.parse({"lists": []})
    broken = tmp_path / "prices.yaml"
    broken.write_text("lists: [")
    with pytest.raises(ValueError, match="FT_PRICES names that file"):
        prices.load(broken)
    with pytest.raises(ValueError, match="cannot be read"):
        prices.load(tmp_path / "absent.yaml")


@pytest.mark.parametrize(("days", "micros"), [(28, 4), (29, 3), (30, 3), (31, 3)])
def test_a_day_costs_its_part_of_its_month(days: int, micros: int) -> None:
    """100 micro-dollars a GiB and month: 3.57, 3.45, 3.33 and 3.23 a day."""
    held = prices.parse(changed(lambda b: b["storage"].update(micros_per_gib_month=100))).lists[0]
    stored = held.tiers["standard"].storage_allowance_bytes + GIB
    assert held.storage_micros_per_day(tier="standard", stored_bytes=stored, days_in_month=days) == micros
