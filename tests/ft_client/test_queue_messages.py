"""What a user reads of a job that waits: one line, understood at once."""

from __future__ import annotations

from typing import Any

import pytest

from core.epoch_time import span_words
from engine.scheduler import Reason
from ft_client.queue_messages import ahead_words, waiting_line

NOW = 1_000_000.0


def line(length: int | None = 7, **fields: Any) -> str:
    job = {"position": 3, "num_gpus": 4, "reason": "WaitingForQuota", "reason_detail": "d", "estimated_start": NOW + 720, "ahead": None}
    return waiting_line({**job, **fields}, now=NOW, length=length, clock=lambda at: f"T+{at - NOW:.0f}")


def test_the_whole_line() -> None:
    reserved = {"start": NOW + 720, "pool": "large"}
    said = line(reservation=reserved, ahead={"jobs": {"standard": 2, "premium": 1}, "num_gpus": 24, "yours": 1})
    assert said == (
        "Position 3 of 7 · waits for 4 GPUs of pool large · starts by T+720 (in 12 min, reserved) · "
        "ahead: 1 premium, 2 standard jobs for 24 GPUs, 1 of them yours"
    )


def test_without_a_clock_only_spans_are_named() -> None:
    job = {"position": 1, "num_gpus": 1, "reason": "WaitingForQuota", "estimated_start": NOW + 5400}
    assert waiting_line(job, now=NOW) == "Position 1 · waits for 1 GPU · starts in about 1 h 30 min"


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_words_of_its_own(reason: Reason) -> None:
    said = line(reason=str(reason)).split(" · ")[1]
    assert said != str(reason)
    assert "GPU" in said or "tenant" in said


def test_what_a_tenants_own_cap_keeps_is_told_in_the_caps_words() -> None:
    said = line(reason_detail="the hard cap of 10 GPU-hours is reached", estimated_start=None)
    assert said == "Position 3 of 7 · the hard cap of 10 GPU-hours is reached · no start can be estimated"


def test_a_start_that_is_near_or_past_is_within_a_minute() -> None:
    assert "starts within a minute" in line(estimated_start=NOW - 50)
    assert "starts within a minute (reserved)" in line(reservation={"start": NOW + 10, "pool": "p"})


def test_a_reservation_that_could_not_be_kept_is_not_repeated() -> None:
    said = line(reservation={"start": NOW - 300, "pool": "p"}, estimated_start=NOW + 600)
    assert "starts about T+600 (in 10 min, its reservation is late: a running job takes longer)" in said


def test_a_job_that_can_never_start_names_no_start() -> None:
    assert line(reason="ExceedsMaxQuota", estimated_start=None, num_gpus=64) == (
        "Position 3 of 7 · can never start: no pool gives 64 GPUs to one job"
    )


def test_a_reason_that_is_not_known_here_is_said_as_it_is() -> None:
    assert "SomethingNew" in line(reason="SomethingNew")


@pytest.mark.parametrize(
    ("ahead", "words"),
    [
        (None, ""),
        ({"jobs": {}, "num_gpus": 0}, ""),
        ({"jobs": {"standard": 1}, "num_gpus": 1}, "ahead: 1 standard job for 1 GPU"),
        ({"jobs": {"free": 1, "premium": 2, "standard": 0}, "num_gpus": 0}, "ahead: 2 premium, 1 free jobs"),
    ],
)
def test_who_is_ahead_is_told_in_kind(ahead: Any, words: str) -> None:
    assert ahead_words(ahead) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-1, "0 s"),
        (12.4, "12 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (89, "1 min"),
        (720, "12 min"),
        (3600, "1 h"),
        (12_000, "3 h 20 min"),
        (86_400, "1 d"),
        (187_200, "2 d 4 h"),
    ],
)
def test_spans_are_read_at_once(seconds: float, words: str) -> None:
    assert span_words(seconds) == words
