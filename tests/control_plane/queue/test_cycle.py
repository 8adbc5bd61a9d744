"""A round on a real database: what starts, what is asked to stop, what waiting jobs are told, and what is written of it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.attempts import service as attempts
from control_plane.capacity.configured_pools import pools
from control_plane.jobs import service as jobs
from control_plane.jobs.tables import job_events
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.jobs.transitions import Move, transition_many
from control_plane.notifications.tables import outbox
from control_plane.platform.bulk_updates import update_each
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.queue import cycle
from control_plane.queue import snapshot as queue_reading
from control_plane.queue.reservations import OverdueRelease, ask_to_stop, lock_to_stop, overdue_releases
from control_plane.queue.snapshot import placement_of, promise_of
from control_plane.queue.tables import reservations, scheduler_state
from control_plane.tenants.tables import tenants
from core.errors import Conflict, NotFound
from engine import scheduler
from engine.scheduler import Preempt
from tests.faults.loop_world import POOLS, Planned, World, build
from tests.support.jobs.claimed_job import lose, report

SHAPES = (("standard", 2, 0, 12), ("standard", 2, 0, 12), ("free", 1, 0, 12), ("free", 4, 0, 6), ("premium", 4, 0, 6))


@pytest.fixture
def new_world(new_platform: Callable[..., Platform], write_chat_rows: Callable[..., Path], tmp_path: Path) -> Callable[..., World]:
    def make(shapes: Sequence[tuple[str, int, int, int]]) -> World:
        file = tmp_path / "pools.yaml"
        file.write_text(POOLS)
        made = build(new_platform(pools=str(file)), tmp_path, write_chat_rows(), shapes=shapes)
        return made.over(made.platform.engine)

    return make


@pytest.fixture
def world(new_world: Callable[..., World]) -> World:
    return new_world(SHAPES)


def row(world: World, job_id: str) -> Any:
    with world.platform.engine.connect() as conn:
        return conn.execute(sa.select(jobs_table).where(jobs_table.c.id == job_id)).one()


def events(world: World, job_id: str) -> list[Any]:
    with world.platform.engine.connect() as conn:
        return list(conn.execute(sa.select(job_events).where(job_events.c.job_id == job_id).order_by(job_events.c.seq)).all())


def state(world: World) -> Any:
    with world.platform.engine.connect() as conn:
        return conn.execute(sa.select(scheduler_state)).one()


def queued(world: World, *numbers: int) -> list[Planned]:
    chosen = [world.planned[n] for n in numbers]
    for one in chosen:
        world.pack(one)
    return chosen


def running(world: World, one: Planned, *, step: int) -> attempts.Claim:
    held = attempts.claim(world.platform, one.tenant, one.job_id)
    attempts.mark_started(world.platform, held, started_at=world.now().timestamp())
    line = {"step": step, "total_steps": 10, "loss": 1.0, "learning_rate": 1e-3, "time": world.now().timestamp()}
    report(world.platform, held, line)
    return held


def test_a_job_that_starts_holds_nodes_and_its_event_says_why_now(world: World) -> None:
    (job,) = queued(world, 0)
    cycle.run_cycle(world.platform)
    with world.platform.engine.connect() as conn:
        held = conn.execute(sa.select(reservations).where(reservations.c.job_id == job.job_id)).one()
    assert (held.attempt, held.pool, held.num_gpus, sum(n for _, n in held.placement)) == (1, "small", 2, 2)
    told = events(world, job.job_id)[-1]
    assert told.code == "job_provisioning" and told.data["attempt"] == 1
    assert told.message == "Attempt 1 holds 2 GPUs of pool small after 0 s in the queue: it is the first job in the queue that they fit."


def test_a_round_over_a_queue_that_did_not_change_writes_no_job(world: World) -> None:
    queued(world, 0, 1, 2)
    cycle.run_cycle(world.platform)
    before = row(world, world.planned[2].job_id)
    assert before.reason and before.queue_position == 1 and before.due_at is not None
    wrote: list[str] = []
    sa.event.listen(world.platform.engine, "before_cursor_execute", lambda *given: wrote.append(given[2]))
    rounds = state(world).rounds
    cycle.run_cycle(world.platform)
    changed = [w for w in wrote if w.startswith(("UPDATE", "INSERT", "DELETE"))]
    assert len(changed) == 1 and "scheduler_state" in changed[0], changed
    assert state(world).rounds == rounds + 1


def test_the_number_of_statements_does_not_grow_with_the_queue(world: World) -> None:
    seen: list[str] = []
    sa.event.listen(world.platform.engine, "before_cursor_execute", lambda *given: seen.append(given[2]))
    queued(world, 0)
    seen.clear()
    cycle.run_cycle(world.platform)
    few = len(seen)
    queued(world, 1, 2, 3)
    seen.clear()
    cycle.run_cycle(world.platform)
    assert len(seen) <= few + 3, seen


def test_what_the_policy_is_given_is_what_the_database_knows(world: World) -> None:
    job, other = queued(world, 0, 1)
    cycle.run_cycle(world.platform)
    held = running(world, job, step=5)
    world.set_tick(6)
    attempts.record_checkpoint(world.platform, held, step=5, prefix="p", manifest_sha256="0", metrics={})
    queued(world, 3)
    with world.platform.engine.connect() as conn:
        snapshot, _ = queue_reading.read(conn, pools(world.platform), world.now())
    mine = next(r for r in snapshot.running if r.job_id == job.job_id)
    now = world.now().timestamp()
    assert (mine.tenant, mine.tier, mine.num_gpus, mine.job_class) == (job.tenant, "standard", 2, "lora")
    assert mine.saved_at == now and mine.started_at == now - 3600 and mine.expected_s == 7200.0
    assert 3000 < mine.expected_end - now < 4200, "half of the steps took an hour"
    assert not mine.stopping and sum(n for _, n in mine.placement) == 2
    assert snapshot.used[job.tenant] == pytest.approx(2 * 2 * 3600, rel=0.1), "two jobs of two GPUs, the beginning a little faded"
    assert [w.job_id for w in snapshot.waiting] == [world.planned[3].job_id] and snapshot.waiting[0].num_gpus == 4
    assert other.job_id in {r.job_id for r in snapshot.running}


def test_a_job_that_comes_back_has_only_the_rest_to_do(world: World) -> None:
    (job,) = queued(world, 0)
    with world.platform.engine.begin() as conn:
        conn.execute(sa.update(jobs_table).where(jobs_table.c.id == job.job_id).values(setup_s=200.0))
    cycle.run_cycle(world.platform)
    held = running(world, job, step=5)
    attempts.record_checkpoint(world.platform, held, step=5, prefix="p", manifest_sha256="0", metrics={})
    jobs.pause(world.platform, job.tenant, job.job_id)
    world._finish(held, world._why_it_ends(job.job_id), 5, world.now())
    jobs.resume(world.platform, job.tenant, job.job_id)
    with world.platform.engine.connect() as conn:
        (waiting,) = queue_reading.read(conn, pools(world.platform), world.now())[0].waiting
    assert waiting.expected_s == pytest.approx(200 + (7200 - 200) / 2), "set up as the cost model says"


def test_a_job_that_makes_room_is_asked_once_and_told_why(world: World) -> None:
    (job,) = queued(world, 0)
    cycle.run_cycle(world.platform)
    running(world, job, step=1)
    stop = Preempt(job_id=job.job_id, for_job="ftjob-of-somebody", lost_s=1.0, detail="a premium job needs the GPUs; nothing is lost")
    before = state(world).preemptions
    for _ in range(2):
        with world.platform.engine.begin() as conn:
            asked = ask_to_stop(conn, [stop], lock_to_stop(conn, [job.job_id]), world.now())
    assert asked == [] and row(world, job.job_id).stop_requested == "preempt"
    with world.platform.engine.connect() as conn:
        held = conn.execute(sa.select(reservations).where(reservations.c.job_id == job.job_id)).one()
        snapshot, _ = queue_reading.read(conn, pools(world.platform), world.now())
    assert (held.preempted_for, held.stop_asked_at) == ("ftjob-of-somebody", world.now())
    told = [e for e in events(world, job.job_id) if e.code == "preemption_requested"]
    assert [e.message for e in told] == ["A premium job needs the GPUs; nothing is lost."] and "ftjob" not in str(told[0].data)
    assert snapshot.running[0].stopping and snapshot.running[0].stopping_for == "ftjob-of-somebody"
    assert state(world).preemptions == before, "the round counts, not the request"


def test_a_job_whose_pause_was_asked_for_is_not_asked_to_make_room(world: World) -> None:
    (job,) = queued(world, 0)
    cycle.run_cycle(world.platform)
    jobs.pause(world.platform, job.tenant, job.job_id)
    with world.platform.engine.begin() as conn:
        assert lock_to_stop(conn, [job.job_id]) == {}
    assert row(world, job.job_id).stop_requested == "pause"


def late_releases(world: World) -> list[OverdueRelease]:
    with world.platform.engine.connect() as conn:
        return overdue_releases(conn, world.now())


@pytest.mark.parametrize("table", [reservations, jobs_table])
def test_of_those_who_make_room_for_one_job_all_are_asked_or_none(world: World, table: sa.Table) -> None:
    victims = queued(world, 0, 1)
    cycle.run_cycle(world.platform)
    world.set_tick(1)
    for one in victims:
        running(world, one, step=1)
    world.set_tick(2)
    (waiting,) = queued(world, 4)
    held = sa.select(table).where((table.c.id if table is jobs_table else table.c.job_id) == victims[1].job_id).with_for_update()
    before = state(world)
    with world.platform.engine.begin() as conn:
        conn.execute(held)
        decided = cycle.run_cycle(world.platform)
    assert [d for d in decided if isinstance(d, Preempt)] == []
    assert [row(world, v.job_id).stop_requested for v in victims] == [None, None]
    left = row(world, waiting.job_id)
    assert left.reason == "WaitingForQuota", "what it is told is made of no stops that were not asked for"
    assert left.promise["start"] > world.now().timestamp() + 3600, "it is promised what they give back at their ends"
    after = state(world)
    assert (after.promises, after.preemptions, after.queued) == (before.promises + 1, before.preemptions, 1)
    cycle.run_cycle(world.platform)
    assert [row(world, v.job_id).stop_requested for v in victims] == ["preempt", "preempt"]
    told = row(world, waiting.job_id)
    assert told.promise is not None and told.reason == "WaitingForPreemptedWorkloads"
    assert (state(world).promises, state(world).preemptions) == (before.promises + 1, before.preemptions + 2)


def test_what_starts_rests_on_no_stop_that_cannot_be_asked_for(new_world: Callable[..., World]) -> None:
    """Were the first stopped, the premium job would have its node, and the small one could start beside the second, for hours."""
    shapes = (("standard", 2, 0, 24), ("standard", 1, 0, 12), ("premium", 2, 0, 6), ("free", 1, 0, 12), ("standard", 1, 0, 1))
    world = new_world(shapes)
    victim, near_its_end = queued(world, 0, 1)
    cycle.run_cycle(world.platform)
    for one in (victim, near_its_end):
        held = attempts.claim(world.platform, one.tenant, one.job_id)
        attempts.mark_started(world.platform, held, started_at=world.now().timestamp())
    world.set_tick(10)
    premium, small = queued(world, 2, 3)
    held = sa.select(jobs_table).where(jobs_table.c.id == victim.job_id).with_for_update()
    for _ in range(2):
        with world.platform.engine.begin() as conn:
            conn.execute(held)
            cycle.run_cycle(world.platform)
        promise = row(world, premium.job_id).promise
        assert promise["start"] == world.now().timestamp() + 1200 and row(world, small.job_id).state == "queued"
    cycle.run_cycle(world.platform)
    assert (row(world, victim.job_id).stop_requested, row(world, small.job_id).state) == ("preempt", "provisioning")
    assert row(world, premium.job_id).promise["start"] < promise["start"]


@pytest.mark.parametrize("table", [reservations, jobs_table])
def test_a_row_that_its_follower_writes_just_now_is_waited_for(world: World, table: sa.Table) -> None:
    (job,) = queued(world, 0)
    cycle.run_cycle(world.platform)
    column, waits = table.c.id if table is jobs_table else table.c.job_id, sa.text("SHOW lock_timeout")
    with world.platform.engine.connect() as follower, world.platform.engine.begin() as conn:
        follower.execute(sa.select(column).where(column == job.job_id).with_for_update())
        done = threading.Timer(0.1, follower.commit)
        done.start()
        assert lock_to_stop(conn, [job.job_id]) == {job.job_id: 1}
        done.join()
        assert conn.execute(waits).scalar_one() == follower.execute(waits).scalar_one()
        with world.platform.engine.begin() as other:
            assert lock_to_stop(other, [job.job_id]) == {}, "it is waited for no longer than a moment"
            assert other.execute(waits).scalar_one() == follower.execute(waits).scalar_one()


def test_a_promise_that_could_not_be_written_is_not_counted(world: World) -> None:
    queued(world, 0, 1)
    cycle.run_cycle(world.platform)
    (waiting,) = queued(world, 2)
    with world.platform.engine.begin() as conn:
        conn.execute(sa.select(jobs_table.c.id).where(jobs_table.c.id == waiting.job_id).with_for_update())
        cycle.run_cycle(world.platform)
    assert (state(world).promises, row(world, waiting.job_id).promise) == (0, None)
    cycle.run_cycle(world.platform)
    assert state(world).promises == 1 and row(world, waiting.job_id).promise is not None


def test_a_job_that_saves_after_its_last_step_overruns_once_it_takes_too_long(world: World) -> None:
    (job,) = queued(world, 0)
    cycle.run_cycle(world.platform)
    world.set_tick(6)
    running(world, job, step=10)
    last_step = world.now().timestamp()
    for tick in (6, 7, 8):
        world.set_tick(tick)
        (mine,) = queue_reading.queue_snapshot(world.platform).running
        assert mine.expected_end == last_step + queue_reading.RELEASE_S, "it does not move with the clock"


def test_steps_of_a_lost_attempt_bring_the_end_of_the_next_one_no_nearer(world: World) -> None:
    (job,) = queued(world, 0)
    cycle.run_cycle(world.platform)
    lose(world.platform, running(world, job, step=8))
    cycle.run_cycle(world.platform)
    attempts.claim(world.platform, job.tenant, job.job_id)
    assert row(world, job.job_id).step == 8, "as far as the job came, until the next attempt reports"
    (mine,) = queue_reading.queue_snapshot(world.platform).running
    assert mine.expected_end == world.now().timestamp() + float(row(world, job.job_id).expected_s)


def test_a_job_that_was_paused_has_not_waited_yet_at_its_new_place(world: World) -> None:
    (job,) = queued(world, 0)
    world.set_tick(2)
    cycle.run_cycle(world.platform)
    held = running(world, job, step=5)
    assert row(world, job.job_id).waited_s == 1200.0
    jobs.pause(world.platform, job.tenant, job.job_id)
    world._finish(held, world._why_it_ends(job.job_id), 5, world.now())
    world.set_tick(3)
    jobs.resume(world.platform, job.tenant, job.job_id)
    back = row(world, job.job_id)
    assert (back.waited_s, back.due_at, back.waiting_since, back.queued_at) == (0.0, None, world.now(), world.now())


def test_as_long_as_a_job_was_barred_it_has_not_waited(world: World) -> None:
    (job,) = queued(world, 0)
    world.set_tick(4)
    with world.platform.engine.begin() as conn:
        conn.execute(sa.update(jobs_table).where(jobs_table.c.id == job.job_id).values(barred_until=world.now()))
    world.set_tick(5)
    (waiting,) = queue_reading.queue_snapshot(world.platform).waiting
    assert waiting.waited(world.now().timestamp()) == 600.0
    cycle.run_cycle(world.platform)
    assert row(world, job.job_id).waited_s == 600.0 and events(world, job.job_id)[-1].data["waited_s"] == 600.0


def test_a_job_that_had_started_once_does_not_wait_either_while_its_tenant_is_suspended(world: World) -> None:
    (job,) = queued(world, 0)
    with world.platform.engine.begin() as conn:
        conn.execute(sa.update(jobs_table).where(jobs_table.c.id == job.job_id).values(started_at=world.now()))
        conn.execute(sa.update(tenants).where(tenants.c.id == job.tenant).values(suspended_at=world.now(), suspended_reason="unpaid"))
    world.set_tick(4)
    cycle.run_cycle(world.platform)
    told = row(world, job.job_id)
    assert (told.reason, told.barred_until, told.capped_at) == ("TenantSuspended", world.now(), None), "its first start was before"
    with world.platform.engine.begin() as conn:
        conn.execute(sa.update(tenants).where(tenants.c.id == job.tenant).values(suspended_at=None, suspended_reason=None))
    world.set_tick(5)
    cycle.run_cycle(world.platform)
    assert row(world, job.job_id).waited_s == 600.0 and events(world, job.job_id)[-1].data["waited_s"] == 600.0


def test_a_release_that_no_machine_lets_in_is_told_to_operators_once_an_attempt(world: World) -> None:
    (job,) = queued(world, 0)
    cycle.run_cycle(world.platform)
    assert late_releases(world) == []
    world.set_tick(1)
    for _ in range(3):
        cycle.run_cycle(world.platform)
    (late,) = late_releases(world)
    assert (late.job_id, late.attempt, late.num_gpus, late.age_s) == (job.job_id, 1, 2, 600.0)
    told = [e for e in events(world, job.job_id) if e.code == "release_overdue"]
    assert len(told) == 1 and told[0].data["audience"] == "operator"
    assert jobs.events_since(world.platform, job.tenant, job.job_id, told[0].seq - 1)[0] == [], "no tenant can do anything about it"
    attempts.mark_started(world.platform, attempts.claim(world.platform, job.tenant, job.job_id), started_at=world.now().timestamp())
    assert late_releases(world) == []


def test_many_moves_have_the_consequences_of_one(world: World) -> None:
    first, second = queued(world, 0, 1)
    world.set_tick(2)
    moves = [
        Move(job_id=one.job_id, target=JobState.CANCELLED, message="Gone.", columns={"error": None, "step": n})
        for n, one in enumerate((first, second))
    ]
    with world.platform.engine.begin() as conn:
        transition_many(conn, moves, now=world.now())
    for n, one in enumerate((first, second)):
        after = row(world, one.job_id)
        assert (after.state, after.step, after.waited_s, after.finished_at) == ("cancelled", n, 1200.0, world.now())
        assert events(world, one.job_id)[-1].code == "job_cancelled"
    with world.platform.engine.connect() as conn:
        told = conn.execute(sa.select(outbox.c.subject).where(outbox.c.type == "fine_tuning.job.cancelled")).scalars().all()
        held = conn.execute(sa.text("SELECT count(*) FROM quota_holds WHERE released_at IS NULL AND job_id = :j"), {"j": first.job_id})
        assert set(told) == {first.job_id, second.job_id} and held.scalar_one() == 0


def test_of_many_moves_an_illegal_one_stops_all(world: World) -> None:
    first, second = queued(world, 0, 1)
    jobs.cancel(world.platform, second.tenant, second.job_id)

    def move(other: str) -> None:
        with world.platform.engine.begin() as conn:
            moves = [Move(job_id=j, target=JobState.PAUSED, message="") for j in (first.job_id, other)]
            transition_many(conn, moves, now=world.now())

    with pytest.raises(Conflict, match="cannot become paused"):
        move(second.job_id)
    with pytest.raises(NotFound, match="ftjob-none"):
        move("ftjob-none")
    assert row(world, first.job_id).state == "queued"


def test_the_database_refuses_a_second_reservation_of_a_job(world: World) -> None:
    (job,) = queued(world, 0)
    cycle.run_cycle(world.platform)
    again = {"job_id": job.job_id, "attempt": 2, "pool": "small", "num_gpus": 2, "placement": [], "granted_at": world.now()}
    with pytest.raises(sa.exc.IntegrityError, match="uq_reservations_held"), world.platform.engine.begin() as conn:
        conn.execute(sa.insert(reservations).values(**again))


def test_a_stored_promise_comes_back_as_it_was_made_and_its_earliest_start_is_kept(world: World) -> None:
    (job,) = queued(world, 0)
    now = world.now()
    made = scheduler.Reservation(start=now.timestamp() + 50.0, pool="small", placement=(("n-0", 2),), made_at=now.timestamp())
    wait = scheduler.Wait(
        job_id=job.job_id, position=1, reason=scheduler.Reason.WAITING_FOR_QUOTA, detail="full", expected_start=made.start, promise=made
    )

    def tell(promise: scheduler.Reservation | None, at: datetime) -> cycle.Explained:
        with world.platform.engine.begin() as conn:
            _, rows = queue_reading.read(conn, pools(world.platform), at)
            told = wait._replace(promise=promise)
            return cycle.explain(conn, rows, [told], left_s={job.job_id: 60.0}, capped=(), last=None, now=at)

    assert tell(made, now).promises == 1
    stored = row(world, job.job_id)
    assert promise_of(stored.promise) == made and placement_of(stored.promise["placement"]) == (("n-0", 2),)
    assert stored.estimated_finish_at == datetime.fromtimestamp(made.start + 60.0, tz=UTC)
    for slip in (300.0, 600.0):
        assert tell(replace(made, start=made.start + slip), now).promises == 0
    late = row(world, job.job_id)
    assert not cycle.missed(late, now + timedelta(seconds=55)), "five seconds late is a round's time"
    assert cycle.missed(late, now + timedelta(seconds=120)), "the first promise is the one to keep"
    assert tell(None, now).dropped == 1 and row(world, job.job_id).promise is None
    with world.platform.engine.connect() as conn:
        assert conn.execute(sa.text("SELECT count(*) FROM jobs WHERE promise IS NOT NULL")).scalar_one() == 0, "no JSON null"


def test_rows_with_other_columns_are_changed_by_another_statement(world: World) -> None:
    first, second = queued(world, 0, 1)
    with world.platform.engine.begin() as conn:
        changes = [{"id": first.job_id, "step": 3, "ahead": {"jobs": {"free": 1}}}, {"id": second.job_id, "due_at": world.now()}]
        assert update_each(conn, jobs_table, changes) == 2
        assert update_each(conn, jobs_table, []) == 0
    assert (row(world, first.job_id).step, row(world, first.job_id).ahead) == (3, {"jobs": {"free": 1}})
    assert row(world, second.job_id).due_at == world.now() and row(world, second.job_id).step is None
