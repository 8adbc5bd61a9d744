"""Evaluations in the queue: before new trainings of their tier, one of a job at a time, never in the way of their own job."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from control_plane.attempts import service as attempts
from control_plane.attempts.claims import Claim, Ending
from control_plane.evaluations import service as evaluations
from control_plane.jobs import responses
from control_plane.jobs import service as jobs
from control_plane.jobs.job_documents import EvaluationProgress
from control_plane.platform.context import Actor, Platform
from control_plane.platform.protocols import WorkloadPhase, WorkloadStatus
from control_plane.queue import cycle, launches, snapshot
from control_plane.queue.status import view
from control_plane.queue.tables import reservations
from control_plane.tenants import suspension
from control_plane.tenants.tables import tenants
from core.workload import Kind
from ft_client.cli.job_commands import queue_lines, running_line
from tests.support.jobs.queued_jobs import Queued, queued
from tests.support.jobs.registered_adapter import add_adapter


@pytest.fixture
def queue(new_platform: Callable[..., Platform], write_chat_rows: Callable[..., Path]) -> Queued:
    """A machine with one slot, as the demo's."""
    return queued(new_platform(local_gpus="1"), write_chat_rows)


APART = """
pools:
  - {name: training, gpu_type: local, takes: [lora, large, full], nodes: [{name: a, gpus: 1}]}
  - {name: judging, gpu_type: local, takes: [evaluation], nodes: [{name: b, gpus: 1}]}
"""


def test_evaluations_run_in_the_pool_that_takes_them_and_trainings_do_not(
    new_platform: Callable[..., Platform], write_chat_rows: Callable[..., Path], tmp_path: Path
) -> None:
    (tmp_path / "pools.yaml").write_text(APART)
    queue = queued(new_platform(pools=str(tmp_path / "pools.yaml")), write_chat_rows)
    tenant = queue.tenant()
    first = trained(queue, tenant)
    others = [queue.job(tenant) for _ in range(2)]
    queue.round()
    r = reservations.c
    with queue.platform.engine.connect() as conn:
        found = {row.kind: (row.job_id, row.pool) for row in conn.execute(sa.select(r).where(r.released_at.is_(None)))}
    assert found[Kind.EVALUATE] == (first, "judging")
    assert found[Kind.TRAIN][0] in others and found[Kind.TRAIN][1] == "training", "beside the evaluation"
    end(queue, claim(queue, tenant, first))
    queue.round()
    assert [kind for _, kind, _ in held(queue)] == [Kind.TRAIN], "the pool of evaluations stays free"


def held(queue: Queued) -> list[tuple[str, str, int]]:
    r = reservations.c
    query = sa.select(r.job_id, r.kind, r.attempt).where(r.released_at.is_(None)).order_by(r.job_id)
    with queue.platform.engine.connect() as conn:
        return [(row.job_id, row.kind, row.attempt) for row in conn.execute(query)]


def claim(queue: Queued, tenant: str, job: str) -> Claim:
    claimed = attempts.claim(queue.platform, tenant, job)
    attempts.mark_started(queue.platform, claimed, started_at=queue.now[0].timestamp())
    return claimed


def end(queue: Queued, held: Claim) -> None:
    """The attempt succeeds after a minute."""
    status = WorkloadStatus(
        name=held.workload, phase=WorkloadPhase.EXITED, exit_code=0, started_at=queue.now[0].timestamp(),
        ended_at=(queue.now[0] + timedelta(minutes=1)).timestamp(),
    )  # fmt: skip
    queue.now[0] += timedelta(minutes=1)
    ending = Ending(outcome="succeeded", failure=None, last_step=9, trained_tokens=1, status=status)
    attempts.finish(queue.platform, held, ending)


def trained(queue: Queued, tenant: str) -> str:
    job = queue.job(tenant)
    queue.round()
    end(queue, claim(queue, tenant, job))
    return job


def test_a_trained_job_is_evaluated_before_the_next_training_of_its_tier(queue: Queued) -> None:
    tenant = queue.tenant()
    job = trained(queue, tenant)
    waiting = [queue.job(tenant, hours=0.1) for _ in range(3)]
    queue.round(hours=100)  # they are overdue by now
    assert held(queue) == [(job, Kind.EVALUATE, 2)]
    end(queue, claim(queue, tenant, job))
    queue.round()
    ((next_, kind, _),) = held(queue)
    assert (next_ in waiting, kind) == (True, Kind.TRAIN)
    (due,) = launches.due_runs(queue.platform, ("evaluate",))
    assert (due.job_id, due.attempt) == (job, 0), "its result waits for a run that concludes the job"


def test_a_training_of_a_higher_tier_goes_before_an_evaluation_of_a_lower_one(queue: Queued) -> None:
    job = trained(queue, queue.tenant("free"))
    premium = queue.job(queue.tenant("premium"))
    queue.round()
    assert held(queue) == [(premium, Kind.TRAIN, 1)]
    end(queue, claim(queue, str(queue.row(premium).tenant_id), premium))
    queue.round()
    assert held(queue) == [(premium, Kind.EVALUATE, 2)]
    assert queue.row(job).state == "evaluating"


def test_a_queue_of_trainings_does_not_keep_a_lower_tiers_evaluation_from_a_gpu_for_ever(queue: Queued) -> None:
    job = trained(queue, queue.tenant("free"))
    premium = queue.tenant("premium")
    for _ in range(3):
        other = trained(queue, premium)
        queue.round()
        assert held(queue) == [(other, Kind.EVALUATE, 2)]
        end(queue, claim(queue, premium, other))
    queue.round()
    assert held(queue) == [(job, Kind.EVALUATE, 2)]


def test_an_evaluation_is_not_stopped_for_a_premium_job(queue: Queued) -> None:
    job = trained(queue, queue.tenant("free"))
    queue.round()
    queue.set(job, evaluation_s=1e6)
    claim(queue, str(queue.row(job).tenant_id), job)
    queue.job(queue.tenant("premium"))
    queue.round(hours=1)
    assert held(queue) == [(job, Kind.EVALUATE, 2)]
    with queue.platform.engine.connect() as conn:
        assert conn.execute(sa.select(reservations.c.stop_asked_at).where(reservations.c.released_at.is_(None))).scalar_one() is None


def test_a_trained_job_is_evaluated_at_the_hard_cap_and_nothing_more_is_trained(queue: Queued) -> None:
    tenant = queue.tenant()
    job, waiting = trained(queue, tenant), queue.job(tenant)
    with queue.platform.engine.begin() as conn:
        conn.execute(sa.update(tenants).where(tenants.c.id == tenant).values(hard_gpu_hours=0.001))
    queue.round(minutes=2)
    assert held(queue) == [(job, Kind.EVALUATE, 2)]
    end(queue, claim(queue, tenant, job))
    queue.round()
    assert held(queue) == []
    assert queue.row(waiting).reason == "WaitingForQuota"


def test_ordered_evaluations_of_one_adapter_hold_one_gpu_after_the_other(
    new_platform: Callable[..., Platform], write_chat_rows: Callable[..., Path]
) -> None:
    queue = queued(new_platform(local_gpus="4"), write_chat_rows)
    tenant = queue.tenant()
    digest = queue.platform.models.get("tiny-base").digest
    names = [f"ft:tiny-base:{tenant}:x:{n:08d}" for n in range(2)]
    first, second = [add_adapter(queue.platform, tenant, name=n, stage="production", loaded=False, base_digest=digest) for n in names]
    orders = []
    for number in range(2):
        queue.now[0] += timedelta(seconds=1)
        orders.append(evaluations.request(queue.platform, tenant, first, rules={"max_items": number + 1}))
    other = evaluations.request(queue.platform, tenant, second)
    queue.round()
    running = {row.id for row in [*orders, other] if evaluations.find(queue.platform, row.id).state == "running"}
    assert running == {orders[0].id, other.id}
    end(queue, claim(queue, tenant, orders[0].job_id))
    queue.round()
    assert evaluations.find(queue.platform, orders[1].id).state == "running"


def test_what_the_platform_orders_waits_for_trainings_that_are_due_and_is_no_use_of_its_tenants(queue: Queued) -> None:
    tenant, digest = queue.tenant(), queue.platform.models.get("tiny-base").digest
    adapter = add_adapter(queue.platform, tenant, name="ft:x", stage="production", loaded=False, base_digest=digest)
    order = evaluations.request(queue.platform, tenant, adapter, kind=evaluations.BASE_UPDATE)
    trainer = queue.tenant()
    training = queue.job(trainer)
    queue.set(training, due_at=queue.now[0])
    queue.round(hours=1)
    assert held(queue) == [(training, Kind.TRAIN, 1)]
    end(queue, claim(queue, trainer, training))
    queue.round()
    end(queue, claim(queue, trainer, training))
    queue.round()
    assert held(queue) == [(order.job_id, Kind.EVALUATE, 1)]
    queue.round(hours=1)
    assert snapshot.queue_snapshot(queue.platform).used == {}, "no owner waits"
    queue.job(trainer)
    assert snapshot.queue_snapshot(queue.platform).used.keys() == {trainer}


def test_a_job_that_waits_for_its_evaluation_shows_why_until_it_is_granted_a_gpu(queue: Queued) -> None:
    tenant = queue.tenant()
    job = trained(queue, tenant)
    busy = queue.job(queue.tenant("premium"))
    queue.round()
    assert held(queue) == [(busy, Kind.TRAIN, 1)]

    def shown() -> tuple[str | None, str | None]:
        answer = responses.job(jobs.get(queue.platform, tenant, job))
        assert answer.state == "evaluating"
        return answer.reason, answer.reason_detail

    reason, detail = shown()
    assert reason == "WaitingForQuota"
    assert detail is not None and detail.startswith("needs 1 GPU of pool")
    mine = view.of_tenant(queue.platform.in_scope_of(tenant, Actor(kind="key", id="k")), tenant)
    assert [(w.id, w.reason, w.reason_detail) for w in mine.waiting_evaluations] == [(job, reason, detail)]
    assert (mine.waiting, mine.running) == ([], [])
    said = queue_lines(mine.model_dump(), now=queue.now[0].timestamp())
    assert f"  Evaluating: waits for GPUs, before new trainings of its tier · {detail}" in said
    assert "No job of yours is waiting for GPUs." not in said
    suspension.suspend(queue.platform, tenant, reason="unpaid")
    end(queue, claim(queue, str(queue.row(busy).tenant_id), busy))
    queue.round()
    end(queue, claim(queue, str(queue.row(busy).tenant_id), busy))
    queue.round()
    assert held(queue) == []
    reason, detail = shown()
    assert reason == "TenantSuspended"
    assert detail is not None and "unpaid" in detail
    suspension.resume(queue.platform, tenant)
    queue.round()
    assert held(queue) == [(job, Kind.EVALUATE, 2)]
    assert shown() == (None, None)


def test_the_queue_and_the_job_show_the_same_progress_of_an_evaluation(queue: Queued) -> None:
    tenant = queue.tenant()
    job = trained(queue, tenant)
    queue.set(job, step=1000)
    queue.round()
    progress = EvaluationProgress(phase="answering", subject="base", suite="tickets", done=12, total=60, eta_s=30.0)
    queue.set(job, evaluation=asdict(progress))
    found = view.of_tenant(queue.platform.in_scope_of(tenant, Actor(kind="key", id="k")), tenant)
    (placed,), answer = found.running, responses.job(jobs.get(queue.platform, tenant, job))
    assert found.waiting_evaluations == []
    assert (placed.kind, placed.state, placed.step, placed.total_steps) == ("evaluate", answer.state, None, None)
    assert placed.evaluation == answer.evaluation
    assert placed.estimated_end == int(queue.now[0].timestamp()) + 30
    line = running_line(placed.model_dump(), now=queue.now[0].timestamp())
    assert line.startswith("Evaluating on 1 GPU of pool local for ")
    assert line.endswith(" · base tickets, 12 of 60 requests, 30 s left")


def test_a_waiting_evaluation_has_no_place_in_the_queue_of_jobs(queue: Queued) -> None:
    busy, job = queue.job(queue.tenant("premium")), None
    queue.round()
    assert held(queue) == [(busy, Kind.TRAIN, 1)]
    tenant = queue.tenant()
    job = queue.job(tenant)
    queue.set(job, state="evaluating")
    waiting = queue.job(tenant)
    assert [d.job_id for d in cycle.run_cycle(queue.platform)] == [waiting]
    assert (queue.row(waiting).queue_position, queue.row(job).queue_position) == (1, None)
