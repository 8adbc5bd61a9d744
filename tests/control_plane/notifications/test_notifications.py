"""Kinds of events, and when deliveries are tried again."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import typer

from control_plane.notifications.emails import LETTERS, SWEEP_ENDED, compose, is_mailed
from control_plane.notifications.rules import DELAYS_S, DISABLED_AFTER, LONGEST_RETRY_AFTER_S, next_attempt
from control_plane.platform.job_states import JobState
from core.event_types import EVENT_TYPES
from ft_client.cli.command_tree import build

NOW = datetime(2026, 11, 21, tzinfo=UTC)


def test_the_documented_events_are_those_that_there_are() -> None:
    documented = (Path(__file__).resolve().parents[3] / "docs/webhooks.md").read_text()
    rows = dict(re.findall(r"^\| `([a-z_.]+)` \| (.+?) \| (?:yes|no) \|$", documented, re.M))
    assert rows == dict(EVENT_TYPES)
    mailed = set(re.findall(r"^\| `([a-z_.]+)` \| .+ \| yes \|$", documented, re.M))
    assert mailed == set(LETTERS) <= set(EVENT_TYPES)


def test_every_state_that_a_type_names_is_one_of_a_job() -> None:
    of_jobs = {t.removeprefix("fine_tuning.job.") for t in EVENT_TYPES if t.startswith("fine_tuning.job.")}
    assert of_jobs < {s.value for s in JobState}
    assert {"succeeded", "failed", "cancelled"} < of_jobs


def test_attempts_follow_the_schedule_and_end() -> None:
    again = [next_attempt(n, now=NOW, retry_after_s=None, chance=0.0) for n in range(1, 11)]
    assert [(a - NOW).total_seconds() for a in again[:-1] if a] == list(DELAYS_S[1:])
    assert again[-1] is None and next_attempt(11, now=NOW, retry_after_s=5.0, chance=0.0) is None
    assert timedelta(seconds=sum(DELAYS_S)) < DISABLED_AFTER, "an endpoint is not disabled while an event could still arrive"


@pytest.mark.parametrize(
    ("asked", "waits_s"),
    [(1.0, 300.0), (3600.0, 3600.0), (1e9, LONGEST_RETRY_AFTER_S), (None, 300.0)],
    ids=["less", "more", "absurd", "no"],
)
def test_a_receiver_can_ask_for_more_time_within_bounds(asked: float | None, waits_s: float) -> None:
    assert next_attempt(2, now=NOW, retry_after_s=asked, chance=0.0) == NOW + timedelta(seconds=waits_s)
    assert next_attempt(2, now=NOW, retry_after_s=None, chance=1.0) == NOW + timedelta(seconds=330)


@pytest.mark.parametrize("kind", LETTERS)
def test_an_email_says_what_happened_and_what_to_do(kind: str) -> None:
    mail = compose(kind, EVENT_TYPES[kind], {"id": "obj-1", "state": "x"}, tenant="acme", url="https://ft.example.com")
    assert mail.subject.startswith("[acme] ") and "\n" not in mail.subject and "{" not in mail.subject + mail.text
    assert "https://ft.example.com/v1/" in mail.text and "  state: x\n" in mail.text


def test_every_command_that_an_email_names_is_there() -> None:
    known = typer.main.get_command(build())
    texts = [letter.next_step for letter in (*LETTERS.values(), SWEEP_ENDED)] + [
        compose("invoice.issued", "x", {"id": "i"}, tenant="t", url="u").text
    ]
    named = [words.split() for text in texts for words in re.findall(r"`ft ([a-z][a-z -]*[a-z])", text)]
    assert len(named) > 10
    for words in named:
        group: Any = known
        for word in words:
            if not hasattr(group, "commands") or word.startswith("-"):
                break
            assert word in group.commands, f"ft {' '.join(words)}"
            group = group.commands[word]


def test_a_job_that_failed_its_gate_is_mailed_once() -> None:
    assert is_mailed("fine_tuning.job.failed", {"id": "j", "error_code": "oom"})
    assert not is_mailed("fine_tuning.job.failed", {"id": "j", "error_code": "gate_failed"})
    assert is_mailed("adapter.quarantined", {"id": "a"}) and not is_mailed("fine_tuning.job.queued", {"id": "j"})
