"""The table of states: what is legal, and what OpenAI's clients are told."""

from __future__ import annotations

import pytest

from control_plane.platform.job_states import FINAL, OPENAI_STATUS, TRANSITIONS, JobState, check_transition, openai_status
from core.errors import Conflict

OPENAI_WORDS = {"validating_files", "queued", "running", "succeeded", "failed", "cancelled", "pausing", "paused"}


def test_every_state_has_its_transitions_and_its_word() -> None:
    assert set(TRANSITIONS) == set(OPENAI_STATUS) == set(JobState)
    assert {openai_status(s) for s in JobState} <= OPENAI_WORDS


def test_a_final_state_is_never_left_but_that_of_a_dead_letter() -> None:
    assert {s for s in JobState if not TRANSITIONS[s]} == FINAL - {JobState.DEAD_LETTER}
    assert TRANSITIONS[JobState.DEAD_LETTER] == {JobState.QUEUED, JobState.FAILED}


def test_every_job_that_has_not_ended_can_be_cancelled() -> None:
    assert all(JobState.CANCELLED in TRANSITIONS[s] for s in JobState if s not in FINAL)


def test_every_state_is_reached_from_the_first_and_reaches_an_end() -> None:
    reached, frontier = {JobState.VALIDATING}, [JobState.VALIDATING]
    while frontier:
        new = TRANSITIONS[frontier.pop()] - reached
        reached |= new
        frontier += new
    assert reached == set(JobState)


@pytest.mark.parametrize("state", list(JobState))
def test_moving_to_the_present_state_is_refused(state: JobState) -> None:
    with pytest.raises(Conflict, match=f"job j is {state} and cannot become {state}"):
        check_transition("j", state, state)


def test_a_refused_move_names_what_would_be_legal() -> None:
    with pytest.raises(Conflict, match="cannot become running; legal next states: cancelled, queued"):
        check_transition("j", JobState.PAUSED, JobState.RUNNING)
    with pytest.raises(Conflict, match="none: it is final"):
        check_transition("j", JobState.FAILED, JobState.QUEUED)
