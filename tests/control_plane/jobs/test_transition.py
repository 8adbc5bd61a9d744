"""The one function that changes a job's state."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.jobs import service as jobs
from control_plane.jobs.tables import job_events
from control_plane.jobs.transitions import locked, record, transition
from control_plane.platform.context import Platform
from control_plane.platform.job_events import Event
from control_plane.platform.job_states import JobState
from control_plane.tenants.rules import Tenant
from core.errors import Conflict, NotFound

S = JobState


def move(platform: Platform, job_id: str, *states: JobState, **columns: Any) -> Any:
    for state in states:
        with platform.engine.begin() as conn:
            transition(conn, job_id, state, message=f"now {state}", **columns)
            row = locked(conn, job_id)
    return row


def events(platform: Platform, job_id: str) -> list[tuple[str, str]]:
    with platform.engine.connect() as conn:
        query = sa.select(job_events.c.code, job_events.c.level).where(job_events.c.job_id == job_id).order_by(job_events.c.seq)
        return [(code, level) for code, level in conn.execute(query)]


def test_a_move_and_its_event_appear_together_or_not_at_all(platform: Platform, job_id: str) -> None:
    def queue_and_break() -> None:
        with platform.engine.begin() as conn:
            transition(conn, job_id, S.QUEUED, message="queued")
            raise RuntimeError("the caller breaks")

    with pytest.raises(RuntimeError):
        queue_and_break()
    assert events(platform, job_id) == [("job_created", "info")]
    move(platform, job_id, S.QUEUED)
    assert events(platform, job_id) == [("job_created", "info"), ("job_queued", "info")]


def test_a_move_reads_the_job_once(platform: Platform, job_id: str) -> None:
    ran: list[str] = []
    with platform.engine.begin() as conn:
        sa.event.listen(conn, "before_cursor_execute", lambda *given: ran.append(given[2]))
        transition(conn, job_id, S.QUEUED, message="queued")
    assert [one.startswith("SELECT") for one in ran].count(True) == 1, ran
    assert any(one.startswith("UPDATE jobs") for one in ran)


def test_an_illegal_move_changes_nothing(platform: Platform, tenant: Tenant, job_id: str) -> None:
    before = jobs.get(platform, tenant.id, job_id)
    with pytest.raises(Conflict, match="cannot become running"):
        move(platform, job_id, S.RUNNING, step=9)
    assert jobs.get(platform, tenant.id, job_id) == before
    assert len(events(platform, job_id)) == 1


def test_times_follow_from_the_states(platform: Platform, job_id: str) -> None:
    queued = move(platform, job_id, S.QUEUED)
    assert queued.queued_at is not None
    started = move(platform, job_id, S.PROVISIONING, S.RUNNING).started_at
    again = move(platform, job_id, S.PREEMPTED, S.QUEUED, S.PROVISIONING, S.RUNNING)
    assert again.started_at == started, "a job starts once, however often it is resumed"
    ended = move(platform, job_id, S.FAILED)
    assert ended.finished_at is not None
    assert events(platform, job_id)[-1] == ("job_failed", "error")


def test_leaving_the_queue_ends_the_waiting(platform: Platform, job_id: str) -> None:
    waiting = move(platform, job_id, S.QUEUED, reason="WaitingForQuota", reason_detail="full", queue_position=4)
    assert (waiting.reason, waiting.queue_position) == ("WaitingForQuota", 4)
    left = move(platform, job_id, S.PROVISIONING)
    assert (left.reason, left.reason_detail, left.queue_position) == (None, None, None)


def test_of_moves_at_once_one_wins(platform: Platform, job_id: str) -> None:
    move(platform, job_id, S.QUEUED)

    def provision(_: int) -> bool:
        try:
            move(platform, job_id, S.PROVISIONING)
        except Conflict:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(provision, range(8))) == 1
    assert [code for code, _ in events(platform, job_id)].count("job_provisioning") == 1


def test_a_reader_that_follows_the_numbers_misses_no_event(platform: Platform, tenant: Tenant, job_id: str) -> None:
    """Writers at once: an event that became visible late under a lower number would be skipped for ever."""
    done = threading.Event()
    seen: list[int] = []

    def follow() -> None:
        since = 0
        while True:
            last = done.is_set()
            rows, _ = jobs.events_since(platform, tenant.id, job_id, since)
            seen.extend(r.seq for r in rows)
            since = seen[-1] if seen else 0
            if last and not rows:
                return

    def write(n: int) -> None:
        with platform.engine.begin() as conn:
            record(conn, job_id, Event(code="metrics", message=str(n)))
            conn.execute(sa.text("SELECT pg_sleep(0.002)"))

    reader = threading.Thread(target=follow)
    reader.start()
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(write, range(60)))
    done.set()
    reader.join(timeout=30)
    assert len(seen) == 61
    assert seen == sorted(seen)


def test_a_job_that_does_not_exist_cannot_be_moved(platform: Platform) -> None:
    with pytest.raises(NotFound):
        move(platform, "ftjob-none", S.QUEUED)
