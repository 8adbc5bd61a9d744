"""A job that made room is billed as if nothing had happened: what a stop costs is given back, what was kept is paid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from control_plane.billing import prices
from control_plane.billing.metering.rules import SEEN, Interval, Work, bill, goes_on_after_stop, kept_ms, milliseconds, priced
from core.errors import Fault

PATIENT = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""The machine may be busy with something else."""
AT = datetime(2026, 3, 10, 12, tzinfo=UTC)
T0 = milliseconds(AT)
BOOK = prices.load()
HOUR = 3_600_000


def attempt(
    ms: int, *, work: Work | None, outcome: str = "preempted", fault: Fault | None = Fault.PLATFORM, number: int = 1, **how: Any
) -> Interval:
    values: dict[str, Any] = {"tier": "standard", "gpu_type": "h100-80gb", "num_gpus": 1, "pricing": "on_demand", **how}
    return Interval(
        job_id="j", attempt=number, started_at=AT, ended_at=AT + timedelta(milliseconds=ms), outcome=outcome, fault=fault, source=SEEN,
        work=work, **values,
    )  # fmt: skip


def owed(interval: Interval) -> int:
    return sum(entry.amount_micros for entry in bill(interval, BOOK))


def test_what_was_kept_is_billed_to_the_notice_and_the_stop_is_given_back() -> None:
    work = Work(after_stop=False, began_ms=T0 + HOUR, kept_until_ms=T0 + 4 * HOUR, stop_requested_ms=T0 + 3 * HOUR)
    usage, refund = bill(attempt(5 * HOUR, work=work, num_gpus=2), BOOK)
    assert (usage.amount_micros, refund.amount_micros) == (40_000_000, -16_000_000), "the first loading is paid, as ever"
    assert (refund.id, refund.kind, refund.gpu_seconds) == ("j/a1/refund/part", "refund", 4 * 3600)
    assert (refund.detail["gpu_ms"], refund.detail["kept_gpu_ms"]) == (4 * HOUR, 6 * HOUR)


def test_what_came_after_the_checkpoint_is_done_again_and_given_back() -> None:
    work = Work(after_stop=False, began_ms=T0, kept_until_ms=T0 + HOUR, stop_requested_ms=T0 + 3 * HOUR)
    assert owed(attempt(4 * HOUR, work=work)) == 4_000_000
    assert owed(attempt(4 * HOUR, work=replace(work, stop_requested_ms=None))) == 4_000_000, "also where nobody is known to have asked"


def test_a_part_of_an_attempt_is_given_back_at_the_price_at_which_it_was_billed() -> None:
    """The prices double while it runs."""
    (first,) = BOOK.lists
    dear = {name: replace(gpu, on_demand=2 * gpu.on_demand) for name, gpu in first.gpus.items()}
    book = prices.PriceBook(lists=(first, replace(first, valid_from=AT.date() + timedelta(days=1), gpus=dear)))
    work = Work(after_stop=False, began_ms=T0, kept_until_ms=T0 + 3 * HOUR, stop_requested_ms=None)
    usage, refund = bill(attempt(24 * HOUR, work=work), book)
    assert (usage.amount_micros, refund.amount_micros) == (96_000_000, -84_000_000), "3 of 24 hours are paid"


def test_loading_after_a_stop_is_given_back_however_the_attempt_ends() -> None:
    work = Work(after_stop=True, began_ms=T0 + HOUR, kept_until_ms=T0 + 3 * HOUR, stop_requested_ms=None)
    assert owed(attempt(4 * HOUR, work=work)) == 8_000_000, "between two stops"
    ends: list[tuple[str, Fault | None]] = [("succeeded", None), ("cancelled", Fault.USER), ("oom", Fault.AMBIGUOUS)]
    for outcome, fault in ends:
        assert owed(attempt(4 * HOUR, work=work, outcome=outcome, fault=fault)) == 12_000_000, outcome
    assert owed(attempt(4 * HOUR, work=replace(work, began_ms=None), outcome="cancelled", fault=Fault.USER)) == 0, "it was all loading"


@pytest.mark.parametrize("outcome", ["preempted", "node_lost", "internal"])
def test_nothing_kept_and_whatever_else_the_platform_spoilt_is_given_back_whole(outcome: str) -> None:
    kept = None if outcome == "preempted" else T0 + HOUR
    interval = attempt(4 * HOUR, work=Work(after_stop=True, began_ms=T0, kept_until_ms=kept), outcome=outcome)
    usage, refund = bill(interval, BOOK)
    assert (kept_ms(interval), refund.id, usage.amount_micros + refund.amount_micros) == (None, "j/a1/refund", 0)


def test_a_report_without_a_word_of_the_work_is_billed_as_before() -> None:
    assert [e.id for e in bill(attempt(HOUR, work=None), BOOK)] == ["j/a1/usage", "j/a1/refund"]
    assert [e.id for e in bill(attempt(HOUR, work=None, outcome="succeeded", fault=None), BOOK)] == ["j/a1/usage"]


def test_the_newest_attempt_that_is_paid_says_whether_a_stop_was_last() -> None:
    kept = {"outcome": "preempted", "fault": "platform", "work": {"after_stop": False, "kept_until_ms": 5}}
    bare = {"outcome": "preempted", "fault": "platform", "work": {"after_stop": False, "kept_until_ms": None}}
    lost = {"outcome": "node_lost", "fault": "platform"}
    paused = {"outcome": "paused", "fault": "user"}
    assert goes_on_after_stop([kept, paused]) and goes_on_after_stop([lost, bare, kept])
    assert not goes_on_after_stop([paused, kept]) and not goes_on_after_stop([lost, bare]) and not goes_on_after_stop([])


@dataclass(frozen=True)
class Stop:
    after_ms: int
    """From the start of the attempt to the notice."""
    answers: bool
    """It ends its step and saves; else it is killed where it is."""
    loading_ms: int
    """Of the attempt that is stopped."""
    leaving_ms: int
    """The save, or the grace."""


STOPS = st.lists(st.builds(Stop, st.integers(0, 30_000), st.booleans(), st.integers(0, 9_000), st.integers(0, 5_000)), max_size=8)
STEPS = st.lists(st.integers(1, 4_000), min_size=1, max_size=20)


def run(stop: Stop, steps: Sequence[int], done: int, *, every: int, after_stop: bool) -> tuple[int, int, Work, int] | None:
    """Milliseconds that the attempt took, the step that is kept, what is known of it, and the work kept before the notice.

    None: the job was over before the notice.
    """
    now, at, kept_at, kept, paid = stop.loading_ms, done, None, done, 0
    while at < len(steps) and now + steps[at] <= stop.after_ms:
        now, at = now + steps[at], at + 1
        if at % every == 0:
            kept, kept_at = at, now
    if at == len(steps):
        return None
    loaded = stop.after_ms >= stop.loading_ms
    if loaded and stop.answers:  # the step that it is in
        now, at = now + steps[at], at + 1
        kept, kept_at = at, now
    ended = max(now, stop.after_ms) + stop.leaving_ms
    clock = stop.loading_ms
    for step in steps[done:kept]:
        clock += step
        paid += step if clock <= stop.after_ms else 0
    began = T0 + stop.loading_ms if at > done else None
    work = Work(
        after_stop=after_stop, began_ms=began, kept_until_ms=None if kept_at is None else T0 + kept_at, stop_requested_ms=T0 + stop.after_ms
    )
    return ended, kept, work, paid


@PATIENT
@given(steps=STEPS, stops=STOPS, every=st.integers(1, 8), loading=st.integers(0, 9_000), tier=st.sampled_from(["standard", "premium"]))
@pytest.mark.parametrize(("pricing", "num_gpus"), [("on_demand", 1), ("spot", 8), ("reserved", 3)])
def test_however_often_it_is_stopped_it_costs_no_more_than_undisturbed_and_no_less_than_what_was_kept(
    steps: list[int], stops: list[Stop], every: int, loading: int, tier: str, pricing: str, num_gpus: int
) -> None:
    how: dict[str, Any] = {"tier": tier, "pricing": pricing, "num_gpus": num_gpus}
    ran: list[Interval] = []
    done, worked = 0, 0

    def after_stop() -> bool:
        ends = [{"outcome": i.outcome, "fault": i.fault, "work": i.work and asdict(i.work)} for i in reversed(ran)]
        return done > 0 and goes_on_after_stop(ends)

    for stop in stops:
        found = run(replace(stop, loading_ms=stop.loading_ms if done else loading), steps, done, every=every, after_stop=after_stop())
        if found is None or found[1] == len(steps):
            break
        took, done, work, paid = found
        worked += paid
        ran.append(attempt(took, work=work, number=len(ran) + 1, **how))
    rest = sum(steps[done:])
    last = Work(after_stop=after_stop(), began_ms=T0 + loading)
    ran.append(attempt(loading + rest, work=last, outcome="succeeded", fault=None, number=len(ran) + 1, **how))
    billed = sum(map(owed, ran))
    undisturbed = priced(attempt(loading + sum(steps), work=None, outcome="succeeded", fault=None, **how), BOOK)[1]
    kept = priced(attempt(worked + rest, work=None, outcome="succeeded", fault=None, **how), BOOK)[1]
    assert kept - len(ran) <= billed <= undisturbed, "each entry is rounded by less than a micro-dollar"
    for entries in (bill(i, BOOK) for i in ran):
        assert len({e.id for e in entries}) == len(entries) and sum(e.amount_micros for e in entries) >= 0
        assert all(e.gpu_seconds >= 0 and (e.kind == "usage" or e.amount_micros <= 0) for e in entries)
