"""Turns of the embedded engine: tenants share it by tokens, whatever each of them queues."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from resources.inference.engine.fair_turns import MAX_KNOWN, PROMPT_TOKEN, FairTurns, QueueFull, Share

A, B, C = Share(tenant="a"), Share(tenant="b"), Share(tenant="c")


def turns(*, max_rows: int = 8, max_join_tokens: int = 10_000, max_waiting: int = 1000, each: int = 1000) -> FairTurns[str]:
    return FairTurns(max_rows=max_rows, max_join_tokens=max_join_tokens, max_waiting=max_waiting, max_waiting_each=each)


def fill(made: FairTurns[str], share: Share, count: int, *, num_tokens: int = 10) -> None:
    for number in range(count):
        made.add(f"{share.tenant}{number}", share, num_tokens=num_tokens)


def test_a_flooding_tenant_leaves_slots_to_one_that_has_none() -> None:
    made = turns(max_rows=8)
    fill(made, A, 150)
    assert made.take(Counter()) == [f"a{n}" for n in range(6)], "a quarter stays free"
    fill(made, B, 3)
    assert made.take(Counter(a=6)) == ["b0"], "its first request at once, further ones by turn"
    assert made.take(Counter(a=6, b=1)) == []
    fill(made, C, 1)
    assert made.take(Counter(a=6, b=1)) == ["c0"]
    assert made.take(Counter(a=5, b=1, c=1)) == [], "the last quarter is for tenants that have none"
    for _ in range(10):
        made.charge(A)
    assert made.take(Counter(a=3, b=1, c=1)) == ["b1"], "of those that wait, the one that received least"


def test_requests_of_one_tenant_join_in_their_order() -> None:
    made = turns(max_rows=4)
    fill(made, A, 5)
    assert [*made.take(Counter()), *made.take(Counter(a=1))] == ["a0", "a1", "a2", "a3", "a4"]
    assert len(made) == 0


@pytest.mark.parametrize(("weights", "expected"), [((1, 1), 0.5), ((1, 3), 0.25), ((4, 1), 0.8)])
def test_tenants_that_always_wait_receive_tokens_by_weight(weights: tuple[int, int], expected: float) -> None:
    rng = random.Random(1)
    made, shares = turns(max_rows=8), {"a": Share(tenant="a", weight=weights[0]), "b": Share(tenant="b", weight=weights[1])}
    lengths = {"a": (5, 10), "b": (50, 100)}  # long answers count for as many as they are
    running: list[tuple[str, int]] = []
    got = Counter[str]()
    for _ in range(20_000):
        for name, share in shares.items():
            if sum(item[0] == name for item in made) < 8:
                made.add(name, share, num_tokens=1)
        running = [(name, left - 1) for name, left in running if left > 1]
        for name, _left in running:
            made.charge(shares[name])
            got[name] += 1
        running += [(name, rng.randint(*lengths[name])) for name in made.take(Counter(name for name, _ in running))]
    assert got["a"] / got.total() == pytest.approx(expected, abs=0.1)


def test_a_tenant_that_was_away_is_level_with_the_others_when_it_comes_back() -> None:
    made = turns(max_rows=4)
    fill(made, A, 50)
    for _ in range(100):
        made.charge(A)
    made.take(Counter())
    fill(made, B, 50)
    assert made.received(B) == made.received(A) == 100 + 3 * 10 * PROMPT_TOKEN, "it did not save up turns"
    for _ in range(1000):
        made.charge(B)
    fill(made, C, 1)
    assert made.received(C) == made.received(A)


def test_a_tenant_with_work_beside_the_batch_is_present() -> None:
    made = turns()
    made.begin(A)
    made.charge(A, 1000)
    made.begin(B)
    assert made.received(B) == made.received(A) == 1000, "to come back by scoring a prompt saves up no turns either"
    made.charge(B, 500)
    made.begin(B)
    made.add("c", C, num_tokens=1)
    assert (made.received(B), made.received(C)) == (1500, 1000), "a present one keeps what it received"
    made.end(A)
    made.end(B)
    made.begin(Share(tenant="d"))
    made.drop(lambda _: True)
    made.charge(Share(tenant="d"), 7)
    made.begin(Share(tenant="e"))
    assert made.received(Share(tenant="d")) == 1007
    assert made.received(Share(tenant="e")) == 1007, "A and C are away; B, with one of two left, received more"


def test_a_tenant_owes_nothing_for_what_it_received_alone() -> None:
    made = turns()
    made.begin(A)
    made.charge(A, 10_000)
    made.end(A)
    made.begin(B)
    made.charge(B, 5)
    made.begin(A)
    assert (made.received(A), made.received(B)) == (5, 5)
    made.charge(A, 100)
    made.end(A)
    made.begin(A)
    assert made.received(A) == 105, "what it received beside others counts when it comes back to them"


def test_counters_of_tenants_that_are_away_are_dropped_beyond_a_number() -> None:
    made = turns()
    made.begin(A)
    made.charge(A, 1000)
    for number in range(MAX_KNOWN):
        gone = Share(tenant=f"gone-{number}")
        made.begin(gone)
        made.charge(gone, 10)
        made.end(gone)
    made.begin(B)
    assert made.received(Share(tenant="gone-0")) == 0.0
    assert (made.received(A), made.received(B)) == (1000, 1000)


def test_a_tenant_without_a_running_request_comes_before_one_that_received_less() -> None:
    made = turns(max_rows=8)
    fill(made, A, 1)
    fill(made, B, 1)
    made.charge(B, 100)
    assert made.received(A) < made.received(B)
    assert made.take(Counter(a=1)) == ["b0"]
    assert made.take(Counter(a=1, b=1)) == ["a0"]


def test_prompts_of_one_step_are_bounded_but_one_always_joins() -> None:
    made = turns(max_rows=16, max_join_tokens=100)
    fill(made, A, 5, num_tokens=50)
    assert len(made.take(Counter())) == 2
    made.add("long", B, num_tokens=5000)
    assert made.take(Counter(a=2)) == ["long"]
    made.add("quick", C, num_tokens=5)
    assert made.take(Counter(a=2, b=1)) == ["quick"], "it waits for no prompt of the others"
    assert len(made.take(Counter(a=2, b=1, c=1))) == 2


def test_only_tenants_without_a_request_join_while_prompts_are_computed() -> None:
    made = turns()
    fill(made, A, 2)
    assert made.take(Counter(a=1), newcomers_only=True) == []
    fill(made, B, 2)
    assert made.take(Counter(a=1), newcomers_only=True) == ["b0"], "one: with it, its tenant has a request"
    assert made.take(Counter(a=1, b=1)) == ["a0", "a1", "b1"]


def test_more_requests_than_the_queue_takes_are_refused() -> None:
    made = turns(max_waiting=5, each=3)
    fill(made, A, 3)
    with pytest.raises(QueueFull) as refused:
        made.add("x", A, num_tokens=1)
    assert refused.value.of_tenant
    fill(made, B, 2)
    with pytest.raises(QueueFull) as refused:
        made.add("x", C, num_tokens=1)
    assert not refused.value.of_tenant
    made.drop(lambda item: item == "a1")
    made.add("again", A, num_tokens=1)
    assert made.take(Counter()) == ["a0", "b0", "a2", "b1", "again"]


def test_a_tenant_whose_requests_run_keeps_its_turn_though_none_of_them_waits() -> None:
    """It was not away: it is not made level with tenants that received more."""
    made = turns(max_rows=8)
    fill(made, B, 8)
    fill(made, A, 1)
    assert "a0" in made.take(Counter(b=2))
    for _ in range(100):
        made.charge(B)
    before = made.received(A)
    assert before < made.received(B)
    fill(made, A, 1)
    assert made.received(A) == before


def test_many_tenants_are_forgotten_and_none_that_is_answered_or_waits() -> None:
    made = turns(max_rows=8, max_waiting=10 * MAX_KNOWN)
    for share in (A, B):
        made.charge(share, 50.0)
    fill(made, A, 1)
    made.take(Counter())
    fill(made, C, 1)
    for number in range(MAX_KNOWN + 1):
        made.add("x", Share(tenant=f"t{number}"), num_tokens=1)
    assert made.received(A) > 0.0, "its request runs"
    assert made.received(B) == 0.0, "it is away, and would be made level when it comes back"
    assert len(made) == MAX_KNOWN + 2
