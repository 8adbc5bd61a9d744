"""Lanes: files in their order, a few at once, and no tenant that takes all of it."""

from __future__ import annotations

import threading

import pytest

from control_plane.worker.validation_worker import Lane
from ft_assets.errors import Unavailable

SOON_S = 20


class Desk:
    """Work that goes on until the test lets it go."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._changed = threading.Condition()
        self._released: set[str] = set()

    def __call__(self, file_id: str) -> None:
        with self._changed:
            self.begun.append(file_id)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: file_id in self._released, SOON_S)

    def release(self, *file_ids: str) -> None:
        with self._changed:
            self._released.update(file_ids)
            self._changed.notify_all()

    def wait_for(self, *file_ids: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: set(file_ids) <= set(self.begun), SOON_S)


def test_a_file_that_hangs_stops_no_other_tenant() -> None:
    desk = Desk()
    lane = Lane("t", desk)
    lane.start()
    hung = [lane.put(f"hung-{i}", "mallory") for i in range(5)]
    desk.wait_for("hung-0")
    for i in range(3):
        done = lane.put(f"good-{i}", "alice")
        desk.release(f"good-{i}")
        assert done.wait(SOON_S)
    assert desk.begun == ["hung-0", "good-0", "good-1", "good-2"]
    desk.release(*(f"hung-{i}" for i in range(5)))
    assert all(event.wait(SOON_S) for event in hung)
    assert desk.begun[-4:] == [f"hung-{i}" for i in range(1, 5)], "in their order"
    lane.stop()


def test_no_more_are_under_work_than_there_are_threads() -> None:
    desk = Desk()
    lane = Lane("t", desk, at_once=2)
    lane.start()
    events = [lane.put(f"f{i}", f"tenant-{i}") for i in range(4)]
    desk.wait_for("f0", "f1")
    desk.release("f1")
    desk.wait_for("f2")
    assert sorted(desk.begun) == ["f0", "f1", "f2"]
    desk.release("f0", "f2", "f3")
    assert all(event.wait(SOON_S) for event in events)
    lane.stop()


def test_a_file_that_is_there_already_is_not_done_twice() -> None:
    desk = Desk()
    lane = Lane("t", desk, at_once=1)
    lane.start()
    first = lane.put("a", "t")
    desk.wait_for("a")
    waiting = lane.put("b", "t")
    assert lane.put("a", "t") is first
    assert lane.put("b", "t") is waiting
    desk.release("a", "b")
    assert first.wait(SOON_S) and waiting.wait(SOON_S)
    assert desk.begun == ["a", "b"]
    lane.stop()


def test_a_lane_survives_what_its_work_raises(caplog: pytest.LogCaptureFixture) -> None:
    raised: list[Exception] = [Unavailable("the store is away"), ValueError("a fault of ours")]
    lane = Lane("t", lambda _: (_ for _ in ()).throw(raised.pop(0)) if raised else None, at_once=1)
    lane.start()
    assert all(lane.put(name, "t").wait(SOON_S) for name in ("a", "b", "c"))
    assert raised == []
    assert ["the store is away" in caplog.text, "a fault of ours" in caplog.text] == [True, True]
    lane.stop()


def test_tenants_take_turns() -> None:
    desk = Desk()
    lane = Lane("t", desk, at_once=1)
    events = [lane.put(f"a{i}", "alice") for i in range(3)] + [lane.put("b0", "bob"), lane.put("c0", "carol"), lane.put("b1", "bob")]
    desk.release("a0", "a1", "a2", "b0", "b1", "c0")
    lane.start()
    assert all(event.wait(SOON_S) for event in events)
    assert desk.begun == ["a0", "b0", "c0", "a1", "b1", "a2"]
    lane.stop()
