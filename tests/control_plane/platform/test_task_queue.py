"""Tasks are added in the caller's transaction, tenants take turns, and what is added once waits once."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import ProgrammingError

from control_plane.platform.context import Actor, Platform
from control_plane.platform.task_queue import defer

QUEUED = "SELECT task_name, args, scheduled_at FROM tasks.procrastinate_jobs ORDER BY id"


@pytest.fixture
def worker(fresh_platform: Platform) -> Iterator[Connection]:
    """A connection that takes and ends tasks as the library's workers do."""
    with fresh_platform.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        conn.execute(sa.text("SET search_path = tasks"))
        yield conn


def take(worker: Connection, queue: str = "q") -> str | None:
    """The argument ``name`` of the task that is next."""
    found = worker.execute(
        sa.text("SELECT args ->> 'name' FROM procrastinate_fetch_job_v2(ARRAY[:queue]::varchar[], NULL)"), {"queue": queue}
    )
    return found.scalar_one()


def end(worker: Connection, name: str) -> None:
    of_name = "FROM procrastinate_jobs WHERE status = 'doing' AND args ->> 'name' = :name"
    query = f"SELECT procrastinate_finish_job_v1(id, 'succeeded', true) {of_name}"
    worker.execute(sa.text(query), {"name": name})


def test_a_task_is_there_if_and_only_if_its_transaction_commits(fresh_platform: Platform, worker: Connection) -> None:
    for ends in (Connection.rollback, Connection.commit):
        with fresh_platform.engine.connect() as conn:
            defer(conn, "validate", queue="q", name="a")
            assert take(worker) is None
            ends(conn)
    assert [take(worker), take(worker)] == ["a", None]


def test_a_tenants_call_adds_its_kinds_of_task_and_reads_none(fresh_platform: Platform, worker: Connection) -> None:
    scoped = fresh_platform.in_scope_of("acme", Actor(kind="key", id="key_1"))
    with scoped.engine.begin() as conn:
        defer(conn, "validate", queue="q", turn="q:acme", after=timedelta(minutes=2), tenant="acme", name="later")
        defer(conn, "validate", queue="q", tenant="acme", name="a")
    with pytest.raises(ProgrammingError, match="permission denied"), scoped.engine.begin() as conn:
        conn.execute(sa.text(QUEUED))
    mine = {"queue": "q", "tenant": "acme"}
    refused: list[tuple[str, dict[str, Any]]] = [
        ("retention", mine), ("validate", mine | {"tenant": "other"}), ("validate", {"queue": "q"}), ("fetch", mine | {"turn": "q:other"}),
        ("export", mine | {"once": "retention"}), ("validate", mine | {"after": timedelta(hours=1)}),
        ("deliver", {"queue": "webhooks", "turn": "we_other", "once": "we_other", "target": "we_other"}),
        ("fan_out", {"queue": "quick", "turn": "q:other"}), ("fan_out", {"queue": "quick", "turn": "fan_out", "odd": "1"}),
    ]  # fmt: skip
    for task, given in refused:
        with pytest.raises(ProgrammingError, match=f"may not add the task {task}"), scoped.engine.begin() as conn:
            defer(conn, task, **given)
    assert take(worker) == "a"


def test_turns_alternate_and_tasks_of_a_turn_run_one_at_a_time_in_order(fresh_platform: Platform, worker: Connection) -> None:
    with fresh_platform.engine.begin() as conn:
        for name in ("a0", "a1", "a2", "b0", "c0", "b1"):
            defer(conn, "validate", queue="q", turn=name[0], name=name)
    assert [take(worker) for _ in range(4)] == ["a0", "b0", "c0", None], "one of each at once"
    end(worker, "b0")
    assert [take(worker), take(worker)] == ["b1", None]
    for name in ("a0", "b1", "c0"):
        end(worker, name)
    with fresh_platform.engine.begin() as conn:
        defer(conn, "validate", queue="q", turn="d", name="d0")
    assert take(worker) == "a1", "who comes now is not put before those who wait"
    assert take(worker) == "d0", "and not behind all of them"
    end(worker, "a1")
    assert take(worker) == "a2"


def test_a_task_that_waits_for_its_time_puts_nobody_before_those_who_wait(fresh_platform: Platform, worker: Connection) -> None:
    with fresh_platform.engine.begin() as conn:
        defer(conn, "validate", queue="q", turn="later", after=timedelta(hours=1), name="later")
        for name in ("a0", "a1"):
            defer(conn, "validate", queue="q", turn="a", name=name)
    assert take(worker) == "a0"
    end(worker, "a0")
    with fresh_platform.engine.begin() as conn:
        defer(conn, "validate", queue="q", turn="b", name="b0")
    assert [take(worker), take(worker)] == ["a1", "b0"]


def test_those_workers_are_woken_that_can_take_the_next_task(fresh_platform: Platform, worker: Connection) -> None:
    url = fresh_platform.logins.platform.url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url, autocommit=True) as listening:

        def add(queue: str) -> None:
            with fresh_platform.engine.begin() as conn:
                defer(conn, "deliver", queue=queue, turn="x", once="x", name=queue)

        def woken() -> set[str]:
            return {heard.channel.partition("#")[2] for heard in listening.notifies(timeout=0.5)}

        for queue in ("q", "r"):
            listening.execute(f'LISTEN "procrastinate_queue_v1#{queue}"')
        add("r")
        assert take(worker, "r") == "r"
        add("q")
        woken()
        end(worker, "r")
        assert woken() == {"q"}, "the next task is in another queue"
        add("r")
        assert woken() == {"q"}, "the task that waits already is the one that is to run"


def test_a_long_backlog_of_one_turn_starves_nobody_and_is_not_starved(fresh_platform: Platform, worker: Connection) -> None:
    with fresh_platform.engine.begin() as conn:
        for n in range(20):
            defer(conn, "validate", queue="q", turn="big", name=f"big{n}")
    taken: list[str] = []
    for n in range(20):
        with fresh_platform.engine.begin() as conn:
            defer(conn, "validate", queue="q", turn=f"small{n}", name=f"small{n}")
        for _ in range(2):
            name = take(worker)
            assert name is not None
            end(worker, name)
            taken.append(name)
    assert [name for name in taken if name.startswith("big")] == [f"big{n}" for n in range(20)]


def test_what_waits_already_is_not_added_twice_but_runs_at_the_earlier_time(fresh_platform: Platform, worker: Connection) -> None:
    def add(after: timedelta | None) -> None:
        with fresh_platform.engine.begin() as conn:
            defer(conn, "deliver", queue="q", once="x", after=after, name="x")

    add(timedelta(hours=2))
    add(timedelta(hours=1))
    ((_, _, at),) = worker.execute(sa.text(QUEUED)).all()
    assert timedelta(minutes=59) < at - fresh_platform.clock() < timedelta(minutes=61)
    add(None)
    assert [take(worker), take(worker)] == ["x", None]
    add(None)
    assert take(worker) == "x", "what runs already may have missed the change"


def test_a_task_that_is_added_again_does_not_run_before_that_is_committed(fresh_platform: Platform, worker: Connection) -> None:
    with fresh_platform.engine.begin() as conn:
        defer(conn, "deliver", queue="q", once="x", name="x")
    with fresh_platform.engine.begin() as conn:
        defer(conn, "deliver", queue="q", once="x", name="x")
        assert take(worker) is None, "it would not see what this transaction writes"
    assert take(worker) == "x"
