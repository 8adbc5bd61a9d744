"""Folding reports into intervals, and intervals into entries: in any order, however often, to the same bill."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from inspect import getsource
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from control_plane.billing import prices
from control_plane.billing.metering.rules import INFERRED, SEEN, Interval, MeterEvent, bill, fold, goes_on_after_stop
from core.errors import Fault
from engine.training import failures
from engine.training.failures import FailureClass, Outcome
from tests.support.jobs.failure_classes import CLASSES

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""The machine may be busy with something else."""

AT = datetime(2026, 3, 1, 12, tzinfo=UTC)
START: dict[str, Any] = {"tier": "standard", "gpu_type": "h100-80gb", "num_gpus": 4, "pricing": "on_demand", "model": "m"}
BOOK = prices.load()


def report(kind: str, s: float, *, source: str = "", received: float = 0.0, **data: Any) -> MeterEvent:
    own: dict[str, Any] = START if kind == "started" else {"outcome": "succeeded", "fault": None, "source": SEEN}
    return MeterEvent(
        tenant_id="t",
        id=f"ftjob-1/a2/{kind}{source}", job_id="ftjob-1", attempt=2, kind=kind, at=AT + timedelta(seconds=s),  # type: ignore[arg-type]
        received_at=AT + timedelta(seconds=received), data={**own, **data},
    )  # fmt: skip


REPORTS = st.builds(
    report,
    st.sampled_from(["started", "ended"]),
    st.integers(0, 5000),
    source=st.sampled_from(["", "/node", "/cloud"]),
    received=st.integers(0, 3),
)


@PATIENT
@given(st.lists(REPORTS, max_size=8), st.data())
def test_the_order_and_the_number_of_reports_change_nothing(events: list[MeterEvent], data: st.DataObject) -> None:
    repeated = data.draw(st.lists(st.sampled_from(events), max_size=10)) if events else []
    shuffled = data.draw(st.permutations([*events, *repeated]))
    assert fold(shuffled) == fold(events)


@PATIENT
@given(st.lists(REPORTS, max_size=6), st.lists(REPORTS, max_size=6))
def test_reports_may_be_merged_in_any_way(some: list[MeterEvent], others: list[MeterEvent]) -> None:
    assert fold([*some, *others]) == fold([*others, *some]) == fold([*some, *others, *some])


def test_without_a_start_or_an_end_there_is_no_interval() -> None:
    assert fold([]) is None
    assert fold([report("started", 0)]) is None
    assert fold([report("ended", 9)]) is None


def test_of_two_reports_with_one_id_the_first_counts() -> None:
    found = fold([report("started", 0), report("ended", 900, received=5), report("ended", 4000, received=9)])
    assert found is not None
    assert found.ended_at == AT + timedelta(seconds=900)


def test_an_end_that_was_seen_counts_before_one_that_was_inferred_and_the_earliest_start_counts() -> None:
    early = report("ended", 100, source="/cloud")
    inferred = replace(early, data={**early.data, "source": INFERRED})
    starts = [report("started", 30), report("started", 20, source="/node")]
    found = fold([*starts, inferred, report("ended", 900), report("ended", 950, source="/node")])
    assert found is not None
    assert (found.started_at, found.ended_at, found.source) == (AT + timedelta(seconds=20), AT + timedelta(seconds=900), SEEN)


def end(outcome: str, *, kept: int | None = None, fault: str | None = "platform") -> dict[str, Any]:
    return {"outcome": outcome, "fault": fault, "work": {"kept_until_ms": kept}}


@pytest.mark.parametrize(
    ("newest_first", "goes_on"),
    [
        ([], False),
        ([end("preempted", kept=5)], True),
        ([end("preempted")], False),
        ([{"outcome": "preempted", "fault": "platform"}], False),
        ([end("node_lost", kept=5)], False),
        ([end("node_lost"), end("preempted", kept=5)], True),
        ([end("paused", fault=None), end("preempted", kept=5)], False),
    ],
)
def test_the_newest_attempt_of_which_anything_is_paid_says_whether_a_job_goes_on_after_a_stop_that_made_room(
    newest_first: list[dict[str, Any]], goes_on: bool
) -> None:
    assert goes_on_after_stop(newest_first) is goes_on


def interval(**changed: Any) -> Interval:
    values: dict[str, Any] = {
        "job_id": "ftjob-1", "attempt": 2, "started_at": AT, "ended_at": AT + timedelta(minutes=15), "outcome": "succeeded", "fault": None,
        "source": SEEN, **{k: START[k] for k in ("tier", "gpu_type", "num_gpus", "pricing")},
    }  # fmt: skip
    return Interval(**values | changed)


def test_a_quarter_of_an_hour_on_four_gpus_is_one_gpu_hour_and_its_entry_says_why() -> None:
    (usage,) = bill(interval(), BOOK)
    assert (usage.id, usage.gpu_seconds, usage.amount_micros, usage.list_micros) == ("ftjob-1/a2/usage", 3600, 4_000_000, 4_000_000)
    assert usage.detail["gpu_ms"] == 3_600_000
    assert (usage.detail["micros_per_gpu_hour"], usage.detail["tier_percent"], usage.detail["prices_of"]) == (4_000_000, 100, "2026-01-01")


def test_spot_time_costs_its_own_price_and_the_list_price_stands_beside_it() -> None:
    (usage,) = bill(interval(pricing="spot"), BOOK)
    assert (usage.amount_micros, usage.list_micros, usage.pricing) == (2_000_000, 4_000_000, "spot")


def test_a_clock_that_ran_backwards_bills_nothing() -> None:
    found = fold([report("started", 50), report("ended", 10)])
    assert found is not None
    assert bill(found, BOOK)[0].amount_micros == 0


def test_a_type_of_gpu_without_a_price_is_named() -> None:
    with pytest.raises(ValueError, match="no price for GPUs of type 'tpu-v9'"):
        bill(interval(gpu_type="tpu-v9"), BOOK)


@PATIENT
@given(st.integers(0, 10**9), st.sampled_from([None, *Fault]), st.sampled_from(["free", "standard", "premium"]))
def test_what_the_platform_spoilt_costs_nothing_and_everything_else_its_price(ms: int, fault: Fault | None, tier: str) -> None:
    entries = bill(interval(ended_at=AT + timedelta(milliseconds=ms), fault=fault, tier=tier), BOOK)
    owed = sum(entry.amount_micros for entry in entries)
    assert owed == (0 if fault is Fault.PLATFORM else entries[0].amount_micros)
    assert entries == bill(interval(ended_at=AT + timedelta(milliseconds=ms), fault=fault, tier=tier), BOOK)


EXPECTED = {Fault.PLATFORM: ["usage", "refund"], Fault.USER: ["usage"], Fault.AMBIGUOUS: ["usage"]}


@pytest.mark.parametrize("made", CLASSES, ids=lambda c: c.code)
def test_each_failure_class_gives_its_entries(made: FailureClass) -> None:
    entries = bill(interval(outcome=made.code, fault=made.fault), BOOK)
    assert [entry.kind for entry in entries] == EXPECTED[made.fault]
    assert sum(entry.amount_micros for entry in entries) == (0 if made.fault is Fault.PLATFORM else 4_000_000)
    assert all(entry.detail["outcome"] == made.code for entry in entries)


def test_the_table_of_failure_classes_is_whole() -> None:
    """Every word that the classification can say is in the table: outcomes of the process, and those that its code names itself."""
    written = re.findall(
        r'code="([a-z_]+)"|_resumed\(e, "([a-z_]+)"|code, remedy = "([a-z_]+)"|else "(paused)"|"(cancelled)" if', getsource(failures)
    )
    words = {word for groups in written for word in groups if word} | {o.value for o in Outcome if o is not Outcome.SUCCEEDED}
    assert {"node_lost", "stalled", "dead_letter", "base_model_unavailable", "paused", "cancelled"} <= words, "the search finds them"
    assert {made.code for made in CLASSES} == words
