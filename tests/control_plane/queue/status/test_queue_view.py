"""What a tenant is told of the queue, what of others it is not, and what operators see of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.attempts.tables import attempts
from control_plane.capacity import nodes
from control_plane.jobs import service as jobs
from control_plane.jobs.tables import job_events
from control_plane.jobs.transitions import fail
from control_plane.platform.context import Actor, Platform
from control_plane.queue.status import metrics, missed_starts, view
from control_plane.queue.tables import reservations
from control_plane.tenants import suspension
from core.errors import InvalidDataset
from tests.control_plane.queue.test_maintenance import evaluating
from tests.support.jobs.queued_jobs import Queued, queued


@pytest.fixture
def world(new_platform: Callable[..., Platform], write_chat_rows: Callable[..., Path]) -> Queued:
    return queued(new_platform(local_gpus="4"), write_chat_rows)


def seen_by(world: Queued, tenant: str) -> dict[str, Any]:
    scoped = world.platform.in_scope_of(tenant, Actor(kind="key", id="k"))
    return view.of_tenant(scoped, tenant).model_dump()


def whole(world: Queued) -> dict[str, Any]:
    return view.of_all(world.platform).model_dump()


def test_a_waiting_job_says_where_it_stands_why_and_when_it_starts(world: Queued) -> None:
    mine, other = world.tenant(name="mine-co"), world.tenant(name="other-co")
    running = world.job(other, gpus=4, hours=2)
    world.round()
    ahead = world.job(other, gpus=4, hours=0.5)
    waits = world.job(mine, gpus=4, hours=3)
    world.round(minutes=1)
    found = seen_by(world, mine)
    (job,) = found["waiting"]
    assert (job["id"], job["position"], found["length"], found["by_tier"]) == (waits, 2, 2, {"standard": 2})
    assert job["reason"] and job["reason_detail"]
    assert job["ahead"] == {"jobs": {"standard": 1}, "num_gpus": 4, "yours": 0}
    start = (job["estimated_start"] - world.now[0].timestamp()) / 3600
    assert start == pytest.approx(1.98 + 0.5, abs=0.1), "after the one that runs and the one before it"
    assert "Position 2 of 2" in job["summary"]
    assert "starts in" in job["summary"]
    assert "ahead: 1 standard job for 4 GPUs" in job["summary"]
    (head,) = seen_by(world, other)["waiting"]
    assert (head["id"], head["position"], head["ahead"]["jobs"]) == (ahead, 1, {})
    assert head["reservation"]["pool"] == "local"
    assert (head["reservation"]["start"] - world.now[0].timestamp()) / 3600 == pytest.approx(1.98, abs=0.1)
    (placed,) = seen_by(world, other)["running"]
    assert (placed["id"], placed["num_gpus"], placed["stopping"]) == (running, 4, False)
    (pool,) = found["pools"]
    assert (pool["num_gpus"], pool["used_gpus"], pool["free_gpus"]) == (4, 4, 0)


def test_jobs_of_its_own_that_are_ahead_are_told_apart(world: Queued) -> None:
    mine, other = world.tenant(), world.tenant()
    world.job(other, gpus=4)
    world.round()
    world.job(other, gpus=4, hours=0.2)
    world.job(mine, gpus=4, hours=1)
    last = world.job(mine, gpus=4, hours=9)
    world.round(minutes=1)
    job = seen_by(world, mine)["waiting"][-1]
    assert (job["id"], job["position"]) == (last, 3)
    assert job["ahead"] == {"jobs": {"standard": 2}, "num_gpus": 8, "yours": 1}
    assert "1 of them yours" in job["summary"]


def test_nothing_that_a_tenant_is_told_names_another(world: Queued) -> None:
    """Jobs, ids, tenants and nodes of others, in the queue, in the job, in its events; the other way round, too."""
    free, other, premium = (
        world.tenant("free", name="tenant-free"),
        world.tenant(name="tenant-other"),
        world.tenant("premium", name="tenant-prem"),
    )
    ids = {free: [world.job(free, gpus=2, hours=5)], other: [world.job(other, gpus=2, hours=9)], premium: []}
    world.round()
    for _ in range(2):
        ids[free].append(world.job(free, gpus=1))
        ids[other].append(world.job(other, gpus=4, hours=2))
        ids[premium].append(world.job(premium, gpus=4))
        for minutes in (1, 20):
            world.round(minutes=minutes)
    with world.platform.engine.connect() as conn:
        moved = conn.execute(sa.select(sa.func.count()).where(reservations.c.stop_asked_at.is_not(None))).scalar_one()
        states = {t: [world.row(j).state for j in of] for t, of in ids.items()}
    assert {"queued", "provisioning"} <= {s for of in states.values() for s in of}, (states, moved)
    for tenant in ids:
        told = json.dumps([seen_by(world, tenant), [asdict(jobs.get(world.platform, tenant, j).job) for j in ids[tenant]]], default=str)
        with world.platform.engine.connect() as conn:
            said = conn.execute(sa.select(job_events.c.message, job_events.c.data).where(job_events.c.job_id.in_(ids[tenant]))).all()
        shown = json.dumps([tuple(r) for r in said], default=str) + json.dumps(
            [jobs.list_events(world.platform, tenant, j).items for j in ids[tenant]], default=str
        )
        for stranger in set(ids) - {tenant}:
            for name in (stranger, *ids[stranger]):
                assert name not in told, (tenant, name)
                assert name not in shown, (tenant, name)


def test_a_job_that_no_round_has_seen_is_new(world: Queued) -> None:
    mine = world.tenant()
    world.job(mine)
    (job,) = seen_by(world, mine)["waiting"]
    assert (job["position"], job["reason"], job["reservation"]) == (None, None, None)
    assert job["summary"] == "New · to be placed by the next scheduling cycle"


def test_a_suspended_or_impossible_job_says_so_and_promises_nothing(world: Queued) -> None:
    mine = world.tenant()
    world.job(mine, gpus=64)
    world.round()
    (job,) = seen_by(world, mine)["waiting"]
    assert (job["reason"], job["estimated_start"]) == ("ExceedsMaxQuota", None)
    assert "can never start: no pool gives 64 GPUs" in job["summary"]


def test_operators_see_tenants_nodes_reservations_and_what_rounds_did(world: Queued) -> None:
    mine, other = world.tenant(), world.tenant("premium")
    runs = world.job(other, gpus=3, hours=2)
    world.round()
    waits = world.job(mine, gpus=4)
    world.round(minutes=1)
    found = whole(world)
    (job,), (placed,), (pool,) = found["waiting"], found["running"], found["pools"]
    assert (job["id"], job["tenant"]) == (waits, mine)
    assert job["reservation"]["placement"] == [("local", 4)]
    assert (placed["id"], placed["tenant"], placed["placement"]) == (runs, other, [("local", 3)])
    (node,) = pool["nodes"]
    assert (node["free_gpus"], node["jobs"], node["reserved_for"]) == (1, {runs: 3}, [waits])
    assert pool["unusable_gpus"] == 0, "the widest job that waits needs four, and only one is free"
    shares = {t["tenant"]: t for t in found["tenants"]}
    assert (shares[mine]["waiting"], shares[other]["num_gpus"]) == (1, 3)
    assert found["scheduler"]["rounds"] == 2
    assert (found["scheduler"]["starts"], found["scheduler"]["reservations"]) == (1, 1)
    assert found["overdue"] == []
    world.round(hours=1)
    assert [(o["job_id"], o["kind"]) for o in whole(world)["overdue"]] == [(runs, "start")], "its workload never began"


def test_an_evaluation_ends_when_evaluations_do_whatever_its_training_promised(world: Queued) -> None:
    tenant = world.tenant()
    job = world.job(tenant)
    world.set(job, evaluation_s=600.0)
    evaluating(world, job)
    world.set(job, estimated_finish_at=world.now[0] - timedelta(hours=1), evaluation_s=600.0)
    (found,) = seen_by(world, tenant)["running"]
    assert (found["id"], found["estimated_end"] - found["since"]) == (job, 600)


def test_a_long_queue_is_listed_up_to_a_limit_and_counted_in_full(world: Queued) -> None:
    mine = world.tenant()
    world.job(mine, gpus=4)
    world.round()
    for _ in range(4):
        world.job(mine, gpus=4)
    world.round(minutes=1)
    found = view.of_all(world.platform, limit=2)
    assert ([w.position for w in found.waiting], found.length) == ([1, 2], 4)


def test_tenants_and_reservations_are_counted_beyond_the_limit(world: Queued) -> None:
    """Whoever is told that nobody waits, or that nobody has reserved a node, because of how long the list is."""
    premium, mine = world.tenant("premium"), world.tenant()
    world.job(mine, gpus=4)
    world.round()
    for owner in (premium, mine, mine):
        world.job(owner, gpus=4)
    world.round(minutes=1)
    every, first = (view.of_all(world.platform, limit=n).model_dump() for n in (None, 1))
    assert len(every["waiting"]) == 3 and len(first["waiting"]) == 1
    assert first["tenants"] == every["tenants"]
    assert {t["tenant"]: t["waiting"] for t in first["tenants"]} == {premium: 1, mine: 2}
    last = every["waiting"][-1]["id"]
    world.set(last, promise={"start": 1.0, "pool": "local", "placement": [["local", 4]], "made_at": 1.0})
    for limit in (None, 1):
        (pool,) = view.of_all(world.platform, limit=limit).model_dump()["pools"]
        assert last in pool["nodes"][0]["reserved_for"], limit


def test_the_gauges_count_waits_broken_promises_and_gpus_that_lie_apart(world: Queued) -> None:
    free, premium = world.tenant("free"), world.tenant("premium")
    first = world.job(premium, gpus=3, hours=5)
    world.round(minutes=10)
    world.set(first, started_at=world.now[0])
    world.job(premium, gpus=4)
    world.job(free, gpus=1, hours=9)
    world.round(minutes=1)
    world.round(minutes=20)
    with world.platform.engine.begin() as conn:
        conn.execute(sa.update(attempts).where(attempts.c.job_id == first).values(lost_s=120.0))
        found = metrics.read(conn, world.platform, world.now[0])
    assert sum(n for (tier, _), n in found.waiting.items() if tier == "premium") == 1
    assert found.waiting_gpus["premium"] == 4
    assert found.oldest_wait_s["premium"] == pytest.approx(21 * 60)
    assert found.ages_s["premium", 0.5] == pytest.approx(21 * 60)
    assert found.promised_waiting == {"standard": 0, "premium": 1}, "five minutes are over"
    assert found.promised_late == {"standard": 0, "premium": 1}, "the first one started after ten"
    assert found.promised_starts == {"standard": 0, "premium": 1}
    assert (found.lost_gpu_s, found.round_age_s) == (120.0, 0.0)
    assert found.round.rounds == 3
    pool = found.pools["local"]
    assert (pool.gpus, pool.used, pool.free, pool.largest_free) == (4, 3, 1, 1)
    assert pool.unusable == 0, "they are too few, not apart"
    of = found.tenants
    assert (of[premium].used_gpus, of[premium].waiting_gpus, of[free].used_gpus, of[free].waiting_gpus) == (3, 4, 0, 1)
    assert of[premium].oldest_wait_s == pytest.approx(21 * 60)
    assert of[premium].waits_s == {0.5: found.waits_s["premium", 0.5], 0.95: found.waits_s["premium", 0.95]}
    assert of[free].waits_s == {}, "none of its jobs has started"


def test_the_gauges_count_nodes_by_state_and_gpus_held_on_drained_ones(world: Queued) -> None:
    def local() -> metrics.PoolGauges:
        with world.platform.engine.begin() as conn:
            return metrics.read(conn, world.platform, world.now[0]).pools["local"]

    nodes.drain(world.platform, "local", reason="fan", by="alice")
    assert (local().gpus, local().draining, local().nodes) == (0, 0, {"ready": 0, "draining": 0, "drained": 1})
    nodes.undrain(world.platform, "local")
    world.job(world.tenant(), gpus=3, hours=5)
    world.round()
    assert (local().gpus, local().draining, local().nodes) == (4, 0, {"ready": 1, "draining": 0, "drained": 0})
    nodes.drain(world.platform, "local", reason="fan", by="alice")
    assert (local().gpus, local().draining, local().nodes) == (0, 3, {"ready": 0, "draining": 1, "drained": 0})


def test_what_no_gpu_ends_is_no_broken_promise(world: Queued) -> None:
    """A suspended tenant's jobs, and those that no pool could hold: nobody is woken for them, and the clock begins when they may start."""
    premium = world.tenant("premium")
    world.job(premium, gpus=4, hours=9)
    world.round()
    kept, wide = world.job(premium), world.job(premium, gpus=64)
    suspension.suspend(world.platform, premium, reason="unpaid")
    world.round(minutes=1)
    world.round(minutes=20)
    assert {world.row(kept).reason, world.row(wide).reason} == {"TenantSuspended"}
    assert waits_too_long(world) == 0
    world.round(minutes=20)
    suspension.resume(world.platform, premium)
    world.round(seconds=10)
    assert (world.row(kept).reason, world.row(wide).reason) == ("WaitingForQuota", "ExceedsMaxQuota")
    assert waits_too_long(world) == 0, "it could start ten seconds ago"
    assert not jobs.get(world.platform, premium, kept).sla_missed
    world.round(minutes=6)
    assert waits_too_long(world) == 1, "five minutes are over; the wide one could never start"
    assert [jobs.get(world.platform, premium, j).sla_missed for j in (kept, wide)] == [True, False]


def test_a_job_that_failed_before_its_promised_start_has_missed_no_promise(world: Queued) -> None:
    standard = world.tenant("standard")
    in_time, late = world.job(standard), world.job(standard)
    promised = jobs.get(world.platform, standard, late).promised_start
    fail(world.platform, standard, in_time, InvalidDataset("no rows are left"))
    world.now[0] += timedelta(hours=2)
    assert promised is not None and promised < world.now[0]
    fail(world.platform, standard, late, InvalidDataset("no rows are left"))
    assert [jobs.get(world.platform, standard, j).sla_missed for j in (in_time, late)] == [False, True]


def waits_too_long(world: Queued) -> int:
    with world.platform.engine.connect() as conn:
        return metrics.read(conn, world.platform, world.now[0]).promised_waiting["premium"]


def test_the_gauges_are_read_on_the_connection_that_they_are_given(world: Queued) -> None:
    """A second one, taken while the first is held, waits for itself where the pool of connections is used up."""
    taken: list[object] = []
    with world.platform.whole.engine.connect() as conn:
        sa.event.listen(world.platform.whole.engine, "checkout", lambda *given: taken.append(given))
        metrics.read(conn, world.platform, world.now[0])
    assert taken == []


def test_late_starts_are_counted_from_the_index(world: Queued) -> None:
    """However many jobs there were: only those that were late are touched."""
    query = f"SELECT count(*) FROM jobs WHERE tier = 'premium' AND {missed_starts.DELAY} > interval '300 seconds'"
    with world.platform.engine.begin() as conn:
        conn.execute(sa.text("SET LOCAL enable_seqscan = off"))
        plan = "\n".join(conn.execute(sa.text(f"EXPLAIN {query}")).scalars())
    assert "ix_jobs_first_start" in plan
    assert "Index Cond" in plan and "interval" in plan.split("Index Cond")[1]
