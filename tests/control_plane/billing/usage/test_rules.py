"""Usage by bucket: intervals split by time, and sums that are kept to the micro-dollar."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from control_plane.billing.metering.rules import milliseconds
from control_plane.billing.rules import Entry
from control_plane.billing.usage import rules as usage
from control_plane.billing.usage.rules import Width
from core.errors import InvalidRequest

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""The machine may be busy with something else."""

AT = datetime(2026, 1, 30, 23, 59, 58, tzinfo=UTC)
WIDTHS = st.sampled_from(usage.WIDTHS)


def entry(
    start: datetime, ms: int, amount: int, *, kind: str = "usage", list_micros: int | None = None, job: str = "j", gpus: int = 1
) -> Entry:
    begins = milliseconds(start)
    detail = {"started_ms": begins, "ended_ms": begins + ms, "gpu_ms": ms * gpus}
    return Entry(
        id="e", kind=kind, amount_micros=amount, list_micros=amount if list_micros is None else list_micros, job_id=job, attempt=1,
        occurred_at=start + timedelta(milliseconds=ms), gpu_type="local", pricing="on_demand", gpu_seconds=ms * gpus / 1000, detail=detail,
    )  # fmt: skip


@PATIENT
@given(st.integers(-(10**15), 10**15), st.lists(st.integers(0, 10**10), min_size=1, max_size=40))
def test_parts_add_up_to_the_whole_and_none_is_off_by_a_micro(amount: int, weights: list[int]) -> None:
    parts = usage.apportion(amount, weights)
    assert sum(parts) == amount
    whole = sum(weights)
    if whole:
        assert all(abs(part - Fraction(amount * weight, whole)) < 1 for part, weight in zip(parts, weights, strict=True))


@PATIENT
@given(
    st.integers(0, 40 * 86400),
    st.integers(0, 40 * 86400_000),
    st.integers(-(10**9), 10**9),
    st.integers(0, 10**9),
    WIDTHS,
)
def test_an_entry_is_the_sum_of_its_buckets_whatever_their_width(after_s: int, ms: int, amount: int, on_demand: int, width: Width) -> None:
    one = entry(AT + timedelta(seconds=after_s), ms, amount, list_micros=on_demand, gpus=3)
    parts = usage.split(one, width)
    assert sum(p.amount_micros for p in parts) == amount
    assert sum(p.list_micros for p in parts) == on_demand
    assert sum(p.gpu_ms for p in parts) == ms * 3
    assert all(usage.floor(p.begins, width) == p.begins for p in parts)


def test_an_attempt_over_the_edge_of_a_month_is_in_both_of_them() -> None:
    one = entry(datetime(2026, 1, 31, 23, tzinfo=UTC), 3 * 3_600_000, 1_000_000)
    january, february = usage.split(one, "month")
    assert (january.begins.month, january.amount_micros, january.gpu_ms) == (1, 333_333, 3_600_000)
    assert (february.begins.month, february.amount_micros, february.gpu_ms) == (2, 666_667, 7_200_000)


def test_buckets_are_those_of_the_calendar_and_empty_ones_are_there() -> None:
    found = list(usage.buckets(AT, datetime(2026, 3, 1, tzinfo=UTC), "month"))
    assert [b.begins.month for b in found] == [1, 2]
    assert found[1].ends == datetime(2026, 3, 1, tzinfo=UTC)
    hours = usage.grouped([], start=AT, end=AT + timedelta(hours=2), width="hour", by=())
    assert [len(h.results) for h in hours] == [0, 0, 0]


@pytest.mark.parametrize(("year", "month", "days"), [(2026, 2, 28), (2028, 2, 29), (2026, 4, 30), (2026, 12, 31)])
def test_a_month_has_its_own_number_of_days(year: int, month: int, days: int) -> None:
    begins = datetime(year, month, 1, tzinfo=UTC)
    after = datetime(year + month // 12, month % 12 + 1, 1, tzinfo=UTC)
    assert after - begins == timedelta(days=days)
    (only,) = usage.buckets(begins + timedelta(days=days - 1, hours=23), after, "month")
    assert (only.begins, only.ends) == (begins, after)
    one = entry(begins, days * 86_400_000 + 1000, 1_000_000)
    assert [(p.begins, p.gpu_ms) for p in usage.split(one, "month")] == [(begins, days * 86_400_000), (after, 1000)]
    assert len(usage.split(one, "day")) == days + 1


def test_groups_are_summed_apart_and_refunds_have_their_own_columns() -> None:
    entries = [
        entry(AT, 1000, 60, list_micros=100, job="a"),
        entry(AT, 1000, -60, list_micros=-100, kind="refund", job="a"),
        entry(AT, 1000, 30, list_micros=50, job="b"),
    ]
    models = {"a": "m1", "b": "m2"}
    lines = [usage.Line((models[e.job_id or ""],), e.kind, part) for e in entries for part in usage.split(e, "day")]
    (only,) = usage.grouped(lines, start=AT, end=AT + timedelta(seconds=1), width="day", by=("model",))
    (first, a), (second, b) = only.results
    assert (first, second) == ({"model": "m1"}, {"model": "m2"})
    assert (a.amount_micros, a.usage_micros, a.refund_micros, a.gpu_ms, a.refunded_gpu_ms, a.spot_savings_micros) == (
        0,
        60,
        -60,
        1000,
        1000,
        0,
    )
    assert (b.amount_micros, b.spot_savings_micros) == (30, 20)


def test_more_results_than_the_most_are_refused() -> None:
    lines = [usage.Line((job,), "usage", part) for job in "abc" for part in usage.split(entry(AT, 1000, 60, job=job), "day")]
    range_: dict[str, Any] = {"start": AT, "end": AT + timedelta(seconds=1), "width": "day", "by": ("job_id",)}
    assert len(usage.grouped(lines, **range_, most=3)[0].results) == 3
    with pytest.raises(InvalidRequest, match="more than 2 results"):
        usage.grouped(lines, **range_, most=2)


@pytest.mark.parametrize("width", usage.WIDTHS)
def test_what_happened_at_one_moment_is_in_the_bucket_of_that_moment(width: Width) -> None:
    one = Entry(id="s", kind="storage", amount_micros=7, list_micros=7, occurred_at=AT, detail={})
    (part,) = usage.split(one, width)
    assert (part.begins, part.amount_micros) == (usage.floor(AT, width), 7)
