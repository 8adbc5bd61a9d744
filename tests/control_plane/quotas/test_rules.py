"""Admission, as a table of cases."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.quotas.rules import Ask, Standing, Usage, admit, at_cap, left_s, may_go_on, month_of, overage_s, promised_start, reached
from control_plane.tenants.rules import Tenant
from core.errors import InvalidRequest
from tests.support.platform.plain_tenant import a_tenant

HOUR = 3600.0


def tenant(tier: str, limit: int = 5) -> Tenant:
    return a_tenant(tier, max_jobs_in_flight=limit)


@pytest.mark.parametrize(
    ("tier", "in_flight", "ask", "code"),
    [
        ("standard", 0, Ask(tier="standard"), None),
        ("standard", 4, Ask(tier="standard"), None),
        ("standard", 5, Ask(tier="standard"), "exceeded_quota"),
        ("standard", 6, Ask(tier="standard"), "exceeded_quota"),
        ("standard", 0, Ask(tier="free"), None),
        ("standard", 0, Ask(tier="premium"), "tier_not_allowed"),
        ("premium", 0, Ask(tier="premium", full_parameters=True), None),
        ("premium", 0, Ask(tier="standard", full_parameters=True), "tier_not_allowed"),
        ("premium", 5, Ask(tier="premium", full_parameters=True), "exceeded_quota"),
        ("standard", 5, Ask(tier="premium"), "tier_not_allowed"),
        ("standard", 0, Ask(tier="standard", num_parameters=70_600_000_000), "tier_not_allowed"),
        ("standard", 0, Ask(tier="standard", num_parameters=32_800_000_000), None),
        ("premium", 0, Ask(tier="premium", num_parameters=70_600_000_000), None),
        ("premium", 0, Ask(tier="free", num_parameters=70_600_000_000), "tier_not_allowed"),
    ],
)
def test_a_job_is_admitted_or_refused_by_the_first_rule_that_it_breaks(tier: str, in_flight: int, ask: Ask, code: str | None) -> None:
    refusal = admit(tenant(tier), Usage(jobs_in_flight=in_flight), ask)
    assert (refusal.code if refusal else None) == code


def test_a_refusal_names_the_value_the_limit_and_the_next_step() -> None:
    refusal = admit(tenant("standard", 2), Usage(jobs_in_flight=2), Ask(tier="standard"))
    assert refusal is not None
    assert "2 jobs are in flight" in refusal.detail
    assert "limit of tenant acme is 2" in refusal.detail
    assert "cancel one" in refusal.detail


def test_a_limit_of_none_admits_nothing() -> None:
    assert admit(tenant("free", 0), Usage(jobs_in_flight=0), Ask(tier="free")) is not None


def test_an_unknown_tier_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidRequest, match="free, standard, premium"):
        admit(tenant("standard"), Usage(jobs_in_flight=0), Ask(tier="gold"))


def at(*, settled: float = 0.0, running: float = 0.0, held: float = 0.0) -> Standing:
    """A standing, in hours."""
    return Standing(settled_s=settled * HOUR, running_s=running * HOUR, held_s=held * HOUR)


@pytest.mark.parametrize(("hard", "committed", "left"), [(10.0, 4.0, 6.0), (10.0, 9.9999, 0.0001), (10.0, 10.0, 0.0), (10.0, 11.0, 0.0)])
def test_what_the_hard_cap_leaves_is_never_below_nothing(hard: float, committed: float, left: float) -> None:
    found = left_s(a_tenant(hard_gpu_hours=hard), at(settled=committed))
    assert found == pytest.approx(left * HOUR)
    assert left_s(a_tenant(hard_gpu_hours=None), at(settled=committed)) is None


@pytest.mark.parametrize(
    ("hard", "standing", "asked", "fits"),
    [
        (10.0, at(), 10.0, True),
        (10.0, at(), 10.1, False),
        (10.0, at(settled=4.0, running=1.0, held=4.0), 1.0, True),
        (10.0, at(settled=4.0, running=1.0, held=4.0), 1.1, False),
        (10.0, at(settled=11.0), 0.0, False),
        (0.0, at(), 0.1, False),
        (None, at(settled=1e6, held=1e6), 1e6, True),
    ],
)
def test_a_job_fits_while_what_is_used_and_held_and_its_own_time_stay_within_the_hard_cap(
    hard: float | None, standing: Standing, asked: float, fits: bool
) -> None:
    owner = a_tenant("standard", hard_gpu_hours=hard)
    refusal = admit(owner, Usage(jobs_in_flight=0, standing=standing), Ask(tier="standard", gpu_seconds=asked * HOUR))
    assert (refusal is None) == fits
    if refusal is not None:
        assert refusal.code == "exceeded_quota"


def test_a_refusal_for_gpu_hours_names_what_is_asked_used_held_and_the_cap_and_what_to_do() -> None:
    owner = a_tenant("free", hard_gpu_hours=10.0)
    refusal = admit(owner, Usage(jobs_in_flight=0, standing=at(settled=6.0, held=3.0)), Ask(tier="free", gpu_seconds=2 * HOUR))
    assert refusal is not None
    for said in ("take 2 GPU-hours", "of the 10 that", "6 are used", "3 held", "higher cap", "next month"):
        assert said in refusal.detail
    never = admit(owner, Usage(jobs_in_flight=0), Ask(tier="free", gpu_seconds=12 * HOUR))
    assert never is not None
    assert "fewer epochs" in never.detail
    assert "next month" not in never.detail, "waiting is no help for a job that is larger than the cap"


@pytest.mark.parametrize(
    ("soft", "standing", "asked", "over"),
    [
        (5.0, at(), 4.0, 0.0),
        (5.0, at(settled=3.0, held=1.0), 3.0, 2.0),
        (5.0, at(settled=7.0), 3.0, 3.0),
        (None, at(settled=7.0), 3.0, 0.0),
    ],
)
def test_overage_is_what_exceeds_the_soft_limit_if_all_that_is_held_is_used(
    soft: float | None, standing: Standing, asked: float, over: float
) -> None:
    assert overage_s(a_tenant(soft_gpu_hours=soft), standing, asked * HOUR) == pytest.approx(over * HOUR)


def test_the_cap_is_reached_by_what_is_used_and_not_by_what_is_held() -> None:
    owner = a_tenant(hard_gpu_hours=10.0)
    assert not at_cap(owner, at(settled=4.0, running=5.0, held=9.0))
    assert at_cap(owner, at(settled=4.0, running=6.0))
    assert not at_cap(a_tenant(hard_gpu_hours=None), at(settled=1e6))


def test_shares_of_both_limits_are_told_as_they_are_reached() -> None:
    owner = a_tenant(soft_gpu_hours=5.0, hard_gpu_hours=10.0)
    assert list(reached(owner, at(settled=3.9, held=6.0))) == []
    assert [(t.limit, t.percent) for t in reached(owner, at(settled=4.0))] == [("soft", 80)]
    assert [(t.limit, t.percent) for t in reached(owner, at(settled=8.0))] == [("soft", 80), ("soft", 100), ("hard", 80)]
    assert [(t.limit, t.percent) for t in reached(a_tenant("premium"), at(settled=5000.0))] == [("soft", 80), ("soft", 100)]


def test_a_capped_job_goes_on_when_its_rest_fits_and_one_larger_than_the_cap_when_nothing_else_is_used() -> None:
    owner = a_tenant(hard_gpu_hours=10.0)
    assert may_go_on(owner, at(settled=7.0), 3 * HOUR) is None
    assert may_go_on(owner, at(settled=7.0), 4 * HOUR) is not None
    assert may_go_on(owner, at(), 12 * HOUR) is None
    assert may_go_on(owner, at(held=1.0), 12 * HOUR) is not None
    assert may_go_on(a_tenant(hard_gpu_hours=0.0), at(), HOUR) is not None


def test_a_month_is_that_of_utc_whatever_the_zone() -> None:
    new_year_in_tokyo = datetime(2027, 1, 1, 3, tzinfo=timezone(timedelta(hours=9)))
    month = month_of(new_year_in_tokyo)
    assert month.name == "2026-12"
    assert (month.begins, month.ends) == (datetime(2026, 12, 1, tzinfo=UTC), datetime(2027, 1, 1, tzinfo=UTC))


@pytest.mark.parametrize(("year", "number", "days"), [(2026, 2, 28), (2028, 2, 29), (2026, 4, 30), (2026, 12, 31)])
def test_a_month_ends_where_the_next_begins_however_many_days_it_has(year: int, number: int, days: int) -> None:
    begins = datetime(year, number, 1, tzinfo=UTC)
    ends = begins + timedelta(days=days)
    for within in (begins, ends - timedelta(microseconds=1)):
        month = month_of(within)
        assert (month.begins, month.ends) == (begins, ends)
    assert month_of(ends).begins == ends


@pytest.mark.parametrize(("tier", "within"), [("premium", 300), ("standard", 3600), ("free", None)])
def test_a_start_is_promised_by_tier_and_free_promises_none(tier: str, within: int | None) -> None:
    created = datetime(2026, 1, 1, tzinfo=UTC)
    assert promised_start(tier, created) == (None if within is None else created + timedelta(seconds=within))


@given(st.lists(st.floats(0.01, 5.0), max_size=30), st.floats(0.0, 20.0), st.floats(0.0, 10.0))
def test_whatever_is_admitted_one_after_the_other_stays_within_the_cap(asked: list[float], cap: float, used: float) -> None:
    owner, held = a_tenant(hard_gpu_hours=cap, max_jobs_in_flight=100), 0.0
    for number, hours in enumerate(asked):
        usage = Usage(jobs_in_flight=number, standing=at(settled=used, held=held))
        if admit(owner, usage, Ask(tier="standard", gpu_seconds=hours * HOUR)) is None:
            held += hours
    assert held == 0 or used + held <= cap + 1e-6
