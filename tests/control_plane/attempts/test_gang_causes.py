"""Which node's report explains the end of a gang."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import pytest

from agent.messages import Exit
from control_plane.attempts.watch import Node, Running, cause

NOW = datetime(2026, 11, 26, tzinfo=UTC)


def said(outcome: str | None = None, **fields: Any) -> Exit:
    evidence = None if outcome is None else {"outcome": outcome, "step": 5, "total_steps": 9, "message": outcome}
    return Exit(**{"exit_code": 1, "evidence": evidence, "stop_reason": None, **fields})


def running(*reports: Exit | None) -> Running:
    facts = {"tenant_id": "t", "job_id": "j", "attempt": 1, "workload": "j-a1", "started_at": NOW, "heartbeat_at": NOW, "silence_s": 0.0}
    nodes = [Node(**facts, node=n, facts=None, exit=None if r is None else asdict(r)) for n, r in enumerate(reports)]
    return Running(nodes=tuple(nodes))


KILLED, COLLAPSED = said(), said(follows=True)
STOPPED = said("preempted")
STOPPED_FOR_A_PEER = said("preempted", follows=True)
DISK = said(error={"code": "disk_full", "message": "the disk of the node is full", "param": None}, exit_code=None)
CASES: list[tuple[str, Sequence[Exit | None], Exit | None]] = [
    ("alone, it speaks for itself", [said("oom")], said("oom")),
    ("alone, it said nothing", [None], None),
    ("the leader succeeded, whatever the others say", [said("succeeded"), KILLED], said("succeeded")),
    ("success of another node is none of the leader", [KILLED, said("succeeded")], KILLED),
    ("what a node explains comes before its peers' collapse", [COLLAPSED, said("oom")], said("oom")),
    ("what a node explains comes before a lost one", [said("diverged"), None], said("diverged")),
    ("of two that explain it, the leader", [said("diverged"), said("oom")], said("diverged")),
    ("an agent without space explains it", [COLLAPSED, DISK], DISK),
    ("a node was lost, and the other was stopped for it", [STOPPED_FOR_A_PEER, None], None),
    ("a node was lost, and the launcher stopped the other", [STOPPED, None], None),
    ("a node was lost, and to the leader it looks like an internal error", [said("internal"), None], None),
    ("an internal error, and the others collapse", [COLLAPSED, said("internal")], said("internal")),
    ("an internal error of the leader, and the others collapse", [said("internal"), KILLED], said("internal")),
    ("a rank was killed, and the leader was stopped for it", [STOPPED_FOR_A_PEER, KILLED], KILLED),
    ("a rank was killed, and the others collapse", [COLLAPSED, KILLED], KILLED),
    ("all collapse", [COLLAPSED, COLLAPSED], COLLAPSED),
    ("the node was drained", [STOPPED, STOPPED], STOPPED),
    ("a stop that the leader heard of", [said("preempted", stop_reason="pause"), STOPPED], said("preempted", stop_reason="pause")),
    ("a stop that only the other heard of", [STOPPED, said("preempted", stop_reason="pause")], said("preempted", stop_reason="pause")),
    ("a stop before the other had started", [STOPPED, said(stop_reason="cancel", exit_code=None)], said("preempted", stop_reason="cancel")),
    (
        "the other node stalled",
        [STOPPED_FOR_A_PEER, said(stop_reason="stalled", stall="no heartbeat")],
        said("preempted", stop_reason="stalled", stall="no heartbeat", follows=True),
    ),
]


@pytest.mark.parametrize(("reports", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_the_first_cause_is_the_end_of_the_gang(reports: Sequence[Exit | None], expected: Exit | None) -> None:
    assert cause(running(*reports)) == expected


def test_a_gang_is_silent_for_as_long_as_its_most_silent_node_that_has_not_ended() -> None:
    nodes = [
        Node(tenant_id="t", job_id="j", attempt=1, workload="w", started_at=NOW, node=n, heartbeat_at=NOW, silence_s=s, facts=None, exit=e)
        for n, (s, e) in enumerate([(3.0, None), (40.0, None), (90.0, asdict(KILLED))])
    ]
    assert Running(nodes=tuple(nodes)).silence_s == 40.0
    assert Running(nodes=tuple(nodes[2:])).silence_s == 0.0
