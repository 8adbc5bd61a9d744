"""The order in which jobs are offered GPUs, and when they are due."""

from __future__ import annotations

import dataclasses

import pytest

from engine.scheduler import Evaluation, Rules, Snapshot, Wait, Waiting
from engine.scheduler.order import factors, order
from tests.engine.scheduler.queue_cases import HOUR, NOW, decide, pool, running, waiting


def due(job: Waiting, *, ago: float) -> Waiting:
    return dataclasses.replace(job, due_at=NOW - ago)


def evaluation(job_id: str, *, free: bool = False) -> Waiting:
    return dataclasses.replace(waiting(job_id), evaluation=Evaluation(id=f"ev-{job_id}", free=free))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(waiting("b", tier="premium"), waiting("a", tier="standard"), id="premium before standard"),
        pytest.param(waiting("b", tier="standard"), waiting("a", tier="free"), id="standard before free"),
        pytest.param(waiting("b", expected=60), waiting("a", expected=600), id="the shorter first"),
        pytest.param(waiting("b", expected=600), waiting("a", expected=400, gpus=4), id="a wide job counts as longer"),
        pytest.param(waiting("b", expected=600, waited=48 * HOUR), waiting("a", expected=300), id="waiting makes a job shorter"),
        pytest.param(due(waiting("b", expected=9e9), ago=1), waiting("a", expected=1), id="one that is due before a shorter one"),
        pytest.param(due(waiting("b", expected=9e9), ago=0), waiting("a", expected=1), id="one that is due at this moment"),
        pytest.param(
            waiting("b", waited=2, expected=0), waiting("a", waited=1, expected=0), id="of equal lengths the earlier queued first"
        ),
        pytest.param(
            due(waiting("b", waited=2), ago=1), due(waiting("a", waited=1), ago=1), id="of two as long overdue the earlier queued"
        ),
        pytest.param(due(waiting("b"), ago=9), due(waiting("a"), ago=8), id="the longest overdue first"),
        pytest.param(waiting("b", tier="standard"), due(waiting("a", tier="free"), ago=9e5), id="being due does not change the tier"),
        pytest.param(evaluation("b"), due(waiting("a"), ago=9), id="an evaluation before a job that is due"),
        pytest.param(due(waiting("b"), ago=0), evaluation("a", free=True), id="a job that is due before an evaluation for the platform"),
        pytest.param(
            evaluation("b", free=True), waiting("a", expected=1), id="an evaluation for the platform before a job that is not due"
        ),
        pytest.param(waiting("a"), waiting("b"), id="equal jobs by id"),
    ],
)
def test_the_order_is(first: Waiting, second: Waiting) -> None:
    assert [j.job_id for j in order([second, first], now=NOW)] == [first.job_id, second.job_id]


def test_a_job_that_ran_in_between_is_due_by_what_it_waited_in_all_stays() -> None:
    job = Waiting(
        job_id="a", tenant="t", tier="standard", num_gpus=1, queued_at=NOW - 10 * HOUR, expected_s=9e9, due_at=NOW - 8 * HOUR,
        waiting_since=NOW - HOUR, waited_s=0.5 * HOUR,
    )  # fmt: skip
    short = waiting("b")
    assert [j.job_id for j in order([job, short], now=NOW)] == ["b", "a"]
    assert [j.job_id for j in order([dataclasses.replace(job, waited_s=HOUR), short], now=NOW)] == ["a", "b"]


def test_jobs_of_a_tenant_that_used_more_than_its_share_count_as_longer() -> None:
    mine, theirs = waiting("a", expected=600), dataclasses.replace(waiting("b", expected=700), tenant="u")
    used = {"t": 3e6, "u": 1e6}
    fair = factors(Snapshot(pools=[], waiting=[mine, theirs], running=[], used=used))
    assert fair == {"t": 1.5, "u": 1.0}
    assert [j.job_id for j in order([mine, theirs], now=NOW, fair=fair)] == ["b", "a"]
    gone = factors(Snapshot(pools=[], waiting=[mine, theirs], running=[], used={**used, "gone": 0.0}))
    assert gone == fair, "a tenant that neither waits nor used anything has no share"
    new = dataclasses.replace(waiting("c", expected=650), tenant="new")
    with_new = factors(Snapshot(pools=[], waiting=[mine, theirs, new], running=[], used=used))
    assert with_new == {"t": 2.25, "u": 1.0, "new": 1.0}, "a tenant that waits has a share though it used nothing"
    assert [j.job_id for j in order([mine, theirs, new], now=NOW, fair=with_new)] == ["c", "b", "a"]
    assert factors(Snapshot(pools=[], waiting=[mine], running=[], used={"t": 100.0})) == {}, "too little use to say anything"
    assert factors(Snapshot(pools=[], waiting=[mine], running=[], used={"t": 24 * HOUR})) == {"t": 1.0}, "a day of one GPU is enough"
    assert max(factors(Snapshot(pools=[], waiting=[], running=[], used={"t": 1e9, **{str(i): 1.0 for i in range(9)}})).values()) == 4.0


def test_a_job_is_due_when_it_would_start_first_come_first_served_but_not_before_its_tier_promises() -> None:
    held = [running("r", 4, ends_in=3 * HOUR, node="node-0")]
    first = dataclasses.replace(waiting("first", gpus=4, expected=2 * HOUR, waited=60), due_at=NOW + HOUR)
    decisions = decide([first, waiting("new", gpus=4, expected=60)], held, pool(4), rules=Rules(slicing=False))
    new = decisions["new"]
    assert isinstance(new, Wait)
    assert new.due_at == NOW + 5 * HOUR, "after the running one and the one before it"
    alone = decide([waiting("soon", gpus=4)], [running("r", 4, ends_in=60.0, node="node-0")], pool(4))["soon"]
    assert isinstance(alone, Wait)
    assert alone.due_at == NOW + HOUR, "a standard job is promised a start within the hour"


def test_patience_grows_with_the_load_for_those_who_wait_already_and_never_shrinks() -> None:
    held = [running("r", 4, ends_in=3 * HOUR, node="node-0")]
    old = dataclasses.replace(waiting("old", gpus=4, expected=9 * HOUR, waited=HOUR), due_at=NOW + HOUR)
    patient = dataclasses.replace(waiting("patient", gpus=4, waited=HOUR), due_at=NOW + 90 * HOUR)
    decisions = decide([old, patient, waiting("new", gpus=4)], held, pool(4), rules=Rules(slicing=False))
    dues = {j: d.due_at for j, d in decisions.items() if isinstance(d, Wait)}
    assert dues["new"] == NOW + 12 * HOUR + 600
    assert dues["old"] == NOW + 11 * HOUR + 600, "it waited an hour of the same patience"
    assert dues["patient"] == NOW + 90 * HOUR
