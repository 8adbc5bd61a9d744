"""Calling again what may work later."""

from __future__ import annotations

import pytest

from core.errors import Unavailable
from core.retries import RetryPolicy, with_retries

QUICK = RetryPolicy(first_s=0.01, most_s=0.01, give_up_s=0.1)


def test_a_call_that_works_again_in_time_is_answered() -> None:
    failures = iter([Unavailable("away"), OSError("cut off")])

    def call() -> str:
        if (error := next(failures, None)) is not None:
            raise error
        return "answer"

    assert with_retries(call, QUICK) == "answer"
    assert next(failures, None) is None


@pytest.mark.parametrize("last", [Unavailable("still away", code="object_store_unavailable"), OSError("still away")])
def test_the_last_failure_is_raised_as_unavailable_and_is_not_its_own_cause(last: Exception) -> None:
    def call() -> None:
        raise last

    with pytest.raises(Unavailable, match="still away") as raised:
        with_retries(call, QUICK)
    assert raised.value.__cause__ is (None if isinstance(last, Unavailable) else last)


def test_the_limit_counts_from_the_first_failure() -> None:
    began = iter([True])

    def call() -> str:
        if next(began, False):
            raise OSError("cut off once, after a long time")
        return "answer"

    assert with_retries(call, RetryPolicy(first_s=0.01, give_up_s=60.0)) == "answer"


def test_other_errors_are_raised_at_once() -> None:
    def call() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        with_retries(call, QUICK)
