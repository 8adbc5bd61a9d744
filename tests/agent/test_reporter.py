"""What an agent reports arrives once and in order, whatever is told while a report is under way or fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from agent.api_client import ApiClient
from agent.messages import Facts, Heartbeat, HeartbeatAnswer, Notice
from agent.reporter import MAX_LINES, Reporter, State
from control_plane.attempts import agents
from control_plane.attempts.claims import Claim
from control_plane.jobs.service import list_events
from control_plane.platform.context import Platform
from core.errors import Unavailable

CODE = next(iter(agents.NOTICES))


def notice(text: str) -> Notice:
    return Notice(code=CODE, level="info", message=text)


class Line(ApiClient):
    """The calls of an agent, each with something that happens before or after it was answered."""

    def __init__(self, api: ApiClient) -> None:
        self._api, self.sent = api, list[Heartbeat]()
        self.during: Callable[[], None] = lambda: None
        self.loses_answers = False

    def heartbeat(self, beat: Heartbeat) -> HeartbeatAnswer:
        self.sent.append(beat)
        answer = self._api.heartbeat(beat)
        self.during()
        if self.loses_answers:
            raise Unavailable("the answer was lost", code="control_plane_unreachable")
        return answer


@pytest.fixture
def line(api: ApiClient) -> Line:
    return Line(api)


@pytest.fixture
def reporter(line: Line) -> Reporter:
    state = State(phase="train", facts=Facts())
    return Reporter(api=line, log_upload=None, state=lambda: state, unsent=lambda _: (), hangs=lambda: None)


def arrived(platform: Platform, held: Claim) -> list[str]:
    """The messages of the notices in the job's events, oldest first."""
    events = list_events(platform, held.tenant, held.job_id, limit=100).items
    return [event.message for event in reversed(events) if event.code == CODE]


def test_notice_queued_during_a_heartbeat_arrives_once(platform: Platform, held: Claim, line: Line, reporter: Reporter) -> None:
    reporter.tell(notice("before"))
    line.during = lambda: reporter.tell(notice(f"during {len(line.sent)}"))
    reporter.flush()
    assert [n.message for n in line.sent[0].notices] == ["before"]
    reporter.flush()
    line.during = lambda: None
    for _ in range(2):
        reporter.flush()
    assert [(beat.first_notice, [n.message for n in beat.notices]) for beat in line.sent[1:]] == [
        (1, ["during 1"]), (2, ["during 2"]), (3, []),
    ]  # fmt: skip
    assert arrived(platform, held) == ["before", "during 1", "during 2"]


def test_notices_of_a_heartbeat_whose_answer_was_lost_are_sent_again_and_recorded_once(
    platform: Platform, held: Claim, line: Line, reporter: Reporter
) -> None:
    line.loses_answers = True
    line.during = lambda: reporter.tell(notice("during"))
    reporter.tell(notice("before"))
    with pytest.raises(Unavailable):
        reporter.flush()
    line.loses_answers, line.during = False, lambda: None
    for _ in range(2):
        reporter.flush()
    assert [(beat.first_notice, len(beat.notices)) for beat in line.sent] == [(0, 1), (0, 2), (2, 0)]
    assert arrived(platform, held) == ["before", "during"]


def test_lines_beyond_one_heartbeat_follow_at_once_and_none_is_sent_twice(line: Line) -> None:
    lines: list[dict[str, Any]] = [{"step": n, "total_steps": 1000, "loss": 1.0, "time": 1.0} for n in range(1, MAX_LINES + 8)]
    state = State(phase="train", facts=Facts())
    made = Reporter(
        api=line,
        log_upload=None,
        state=lambda: state,
        unsent=lambda known: [m for m in lines if m["step"] > known.step],
        hangs=lambda: None,
    )
    made.flush()
    assert [step for beat in line.sent for step in (m["step"] for m in beat.metrics)] == [m["step"] for m in lines]
    assert [len(beat.metrics) for beat in line.sent] == [MAX_LINES, 7]
    assert made.accepted.step == MAX_LINES + 7


def test_validation_that_is_written_after_its_step_was_accepted_is_sent_as_well(line: Line) -> None:
    lines: list[dict[str, Any]] = [{"step": n, "total_steps": 8, "loss": 1.0, "time": 1.0} for n in (1, 2)]
    state = State(phase="train", facts=Facts())
    made = Reporter(
        api=line,
        log_upload=None,
        state=lambda: state,
        unsent=lambda known: [m for m in lines if m["step"] > (known.step if "loss" in m else known.validation)],
        hangs=lambda: None,
    )
    made.flush()
    lines.append({"step": 2, "total_steps": 8, "eval_loss": 0.5, "time": 2.0})
    for _ in range(2):
        made.flush()
    assert [[("eval_loss" in m, m["step"]) for m in beat.metrics] for beat in line.sent] == [[(False, 1), (False, 2)], [(True, 2)], []]
