"""The loop dies at any statement, is down for a day, or runs twice: the books are right each time, and every job ends."""

from __future__ import annotations

import os
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.jobs.tables import jobs as jobs_table
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.queue import cycle
from control_plane.queue.tables import reservations
from resources.database.engine import make_engine
from tests.faults.loop_world import POOLS, World, breaches, build

DIED, DONE, BROKE = 9, 0, 1


KINDS = (
    "", "INSERT INTO reservations", "INSERT INTO attempts", "COMMIT", "UPDATE jobs SET", "", "INSERT INTO job_events", "RETURNED",
    "UPDATE reservations SET", "INSERT INTO outbox", "UPDATE scheduler_state", "", "UPDATE attempts SET", "INSERT INTO checkpoints",
    "UPDATE quota_holds", "INSERT INTO meter_events",
)  # fmt: skip
"""Beginnings of statements to die at; empty: any. ``RETURNED`` is after the commit, when the connection goes back to its pool."""


@pytest.fixture
def new_world(new_platform: Callable[..., Platform], write_chat_rows: Callable[..., Path], tmp_path: Path) -> Callable[[], World]:
    pools = tmp_path / "pools.yaml"
    pools.write_text(POOLS)

    def make() -> World:
        made = build(new_platform(pools=str(pools)), tmp_path, write_chat_rows())
        return made.over(made.platform.engine)

    return make


@pytest.fixture
def world(new_world: Callable[[], World]) -> World:
    return new_world()


def live_and_die(world: World, kind: str, at: int) -> tuple[int, str]:
    """Live in a child process that is gone at its `at`-th statement of `kind`; returns how it ended, and what it was about to do."""
    reader, writer = os.pipe()
    url = world.platform.engine.url.render_as_string(hide_password=False)
    child = os.fork()
    if child == 0:
        _child(world, url, kind, at, writer)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


def _child(world: World, url: str, kind: str, at: int, writer: int) -> None:
    left = [at]

    def count(doing: str) -> None:
        left[0] -= doing.startswith(kind)
        if left[0] == 0:
            os.write(writer, doing.encode()[:200])
            os._exit(DIED)  # as kill -9: no rollback, no close

    try:
        engine = make_engine(url, pool_size=2)
        sa.event.listen(engine, "before_cursor_execute", lambda *given: count(" ".join(given[2].split())))
        sa.event.listen(engine, "commit", lambda _: count("COMMIT"))
        sa.event.listen(engine, "checkin", lambda *_: count("RETURNED"))
        world.over(engine).run()
        os._exit(DONE)
    except BaseException:
        os.write(writer, traceback.format_exc().encode()[-3000:])
        os._exit(BROKE)


def die_many_times(world: World, points: range) -> Counter[str]:
    """Live through one death for each of `points`, or until every job has ended; returns what was being done at each."""
    at_death: Counter[str] = Counter()
    for number in points:
        kind = KINDS[number % len(KINDS)]
        how, said = live_and_die(world, kind, 1 + number * 37 % (3 if kind else 101))
        assert how != BROKE, said
        assert breaches(world.platform) == [], f"after it died at: {said}"
        if how == DONE:
            break
        at_death[" ".join(said.split()[:3])] += 1
    return at_death


def assert_all_ended(world: World) -> None:
    assert breaches(world.platform) == []
    with world.platform.engine.connect() as conn:
        states = Counter(conn.execute(sa.select(jobs_table.c.state)).scalars())
        still = conn.execute(sa.select(sa.func.count()).where(reservations.c.released_at.is_(None))).scalar_one()
    assert still == 0
    assert states == {"succeeded": len(world.planned) - 1, "cancelled": 1}


def counted(world: World) -> dict[str, Any]:
    with world.platform.engine.connect() as conn:
        return dict(conn.execute(sa.text("SELECT * FROM scheduler_state")).mappings().one())


@pytest.mark.slow
def test_an_undisturbed_world_ends_and_every_kind_of_decision_was_made(world: World) -> None:
    world.run()
    assert_all_ended(world)
    seen = counted(world)
    assert seen["preemptions"] > 0 and seen["starts"] > len(world.planned), seen
    with world.platform.engine.connect() as conn:
        codes = set(conn.execute(sa.text("SELECT DISTINCT code FROM job_events")).scalars())
    assert {"preemption_requested", "job_preempted", "job_paused", "job_resumed", "job_cancelled"} <= codes


def test_a_loop_that_dies_at_any_statement_leaves_books_that_the_next_one_goes_on_with(world: World) -> None:
    at_death = die_many_times(world, range(len(KINDS)))
    assert len(at_death) >= 10, at_death
    world.run()
    assert_all_ended(world)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_hundred_deaths_of_the_loop_lose_nothing(new_world: Callable[[], World]) -> None:
    at_death: Counter[str] = Counter()
    while at_death.total() < 200:
        world = new_world()
        at_death += die_many_times(world, range(at_death.total(), 200))
        world.run()
        assert_all_ended(world)
    assert {kind for kind in KINDS if kind} <= {" ".join(doing.split()[: len(kind.split())]) for doing in at_death for kind in KINDS}


@pytest.mark.slow
def test_after_a_day_of_being_down_the_loop_goes_on(world: World) -> None:
    for _ in range(6):
        world.live()
        world.set_tick(world.tick + 1)
    world.set_tick(world.tick + 6 * 24)
    world.live()
    assert breaches(world.platform) == []
    world.run()
    assert_all_ended(world)


@pytest.mark.slow
def test_two_loops_at_once_give_no_gpu_twice(world: World) -> None:
    other = world.over(make_engine(world.platform.engine.url.render_as_string(hide_password=False), pool_size=8))
    for _ in range(12):
        with ThreadPoolExecutor(3) as pool:
            rounds = [pool.submit(cycle.run_cycle, w.platform) for w in (world, other, other)]
            world.live()
            for one in rounds:
                one.result()
        assert breaches(world.platform) == []
        world.set_tick(world.tick + 1)
    other.platform.engine.dispose()
    world.run()
    assert_all_ended(world)


def test_a_job_that_somebody_holds_is_left_to_the_next_round(world: World) -> None:
    """A round waits for nobody's row: it places the others, and tells the one that is held nothing."""
    world.set_tick(1)
    held, free = world.planned[0].job_id, world.planned[3].job_id
    for one in (world.planned[0], world.planned[3]):
        world.pack(one)
    with world.platform.engine.begin() as conn:
        conn.execute(sa.select(jobs_table.c.id).where(jobs_table.c.id == held).with_for_update())
        cycle.run_cycle(world.platform)
        assert (world.state(held), world.state(free)) == (JobState.QUEUED, JobState.PROVISIONING)
    cycle.run_cycle(world.platform)
    assert world.state(held) == JobState.PROVISIONING
