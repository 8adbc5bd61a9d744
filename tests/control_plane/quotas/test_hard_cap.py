"""What becomes of jobs at their tenant's hard cap, and when they go on."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
import sqlalchemy as sa
from starlette.types import ASGIApp

from control_plane.api.app import create_app
from control_plane.attempts import service as attempts
from control_plane.datasets.uploads import uploaded_files
from control_plane.jobs import service as jobs
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.platform.context import Actor
from control_plane.platform.job_states import JobState
from control_plane.queue import cycle, snapshot
from control_plane.quotas import enforcement
from control_plane.quotas.tables import quota_holds
from control_plane.tenants import service as tenants
from control_plane.tenants import suspension
from control_plane.tenants.tables import audit_log
from control_plane.tenants.tables import tenants as tenants_table
from core.errors import QuotaExceeded
from ft_client import FtClient
from tests.support.jobs.followed_jobs import Job, until
from tests.support.platform.database_roles import as_owner
from tests.support.platform.lock_waits import num_waiting
from tests.support.platform.tenant_accounts import PAUSED, Account
from tests.support.processes.scripted_training import Scenario


def test_at_the_hard_cap_running_jobs_are_paused_queued_ones_wait_and_all_go_on_when_it_is_raised(account: Account) -> None:
    account.limit(hard_gpu_hours=10)
    held = account.running(hours=6)
    by_tenant = account.submit(suffix="by-tenant")
    jobs.pause(account.platform, account.tenant, account.pack(by_tenant, hours=0.1).id)
    account.wait(hours=10)
    waiting = _submitted_before_the_cap(account)
    done = enforcement.enforce(account.platform)
    assert done.paused == [held.job_id]
    row = account.row(held.job_id)
    assert (row.state, row.reason, row.stop_requested) == ("pausing", "hard_cap_reached", "pause")
    assert ("quota.hard_cap_reached", "hard", 100) in account.told()
    assert [e.level for e in account.events(held.job_id, "hard_cap_reached")] == ["warn"]
    assert account.end(held, PAUSED) is JobState.PAUSED
    row = account.row(held.job_id)
    assert (row.state, row.reason) == ("paused", "hard_cap_reached")
    assert "from 2026-06-01 00:00 UTC" in row.reason_detail

    cycle.run_cycle(account.platform)
    queued = account.row(waiting)
    assert (queued.state, queued.reason) == ("queued", "WaitingForQuota")
    assert "10 of the 10 GPU-hours" in queued.reason_detail
    assert enforcement.enforce(account.platform) == enforcement.Round(notices=0, paused=[], resumed=[])

    account.limit(hard_gpu_hours=100)
    assert enforcement.enforce(account.platform).resumed == [held.job_id]
    cycle.run_cycle(account.platform)
    assert {account.row(j).state for j in (held.job_id, waiting)} == {"provisioning"}
    assert account.row(by_tenant).state == "paused", "the tenant's own pause is the tenant's to end"


def test_what_far_tenants_have_used_is_not_summed_up_each_second_and_no_cap_is_passed(account: Account) -> None:
    seen: list[str] = []
    sa.event.listen(account.platform.engine, "before_cursor_execute", lambda *given: seen.append(given[2]))

    def sums() -> int:
        seen.clear()
        snapshot.queue_snapshot(account.platform)
        return sum("settled_s" in statement or "ledger_entries" in statement for statement in seen)

    account.limit(hard_gpu_hours=1)
    account.running(hours=0.5)
    account.pack(account.submit(suffix="waiting"), hours=0.1)
    found = []
    for _ in range(5):
        account.wait(seconds=1)
        found.append(sums())
    assert found == [0] * 5, "it was when the first job was placed"
    account.wait(minutes=2)
    assert sums() == 1
    account.wait(minutes=58)
    assert snapshot.queue_snapshot(account.platform).capped
    account.limit(hard_gpu_hours=2)
    assert not snapshot.queue_snapshot(account.platform).capped, "another cap counts at once"


def test_a_wait_at_the_tenants_own_cap_and_a_cancelled_job_miss_no_promise(account: Account) -> None:
    account.limit(hard_gpu_hours=10)
    held = account.running(hours=6)
    cancelled = account.submit(suffix="cancelled")
    account.wait(hours=10)
    waiting = _submitted_before_the_cap(account)
    for _ in range(3):
        account.wait(minutes=40)
        cycle.run_cycle(account.platform)
    account.wait(minutes=59)
    jobs.cancel(account.platform, account.tenant, cancelled)
    assert not any(jobs.get(account.platform, account.tenant, j).sla_missed for j in (waiting, cancelled))
    account.limit(hard_gpu_hours=100)
    account.wait(minutes=2)
    assert jobs.get(account.platform, account.tenant, waiting).sla_missed, "an hour without the cap"
    assert held.attempt == 1


def _submitted_before_the_cap(account: Account) -> str:
    """A packed job; its hold was there before the cap came down to what is used."""
    account.limit(hard_gpu_hours=100)
    job = account.submit(suffix="waiting")
    account.pack(job, hours=1)
    account.limit(hard_gpu_hours=10)
    return job


def _paused_by_the_cap(account: Account) -> attempts.Claim:
    """The attempt of a job that ran an hour longer than its tenant's cap allows."""
    account.limit(hard_gpu_hours=10)
    held = account.running(hours=6)
    account.wait(hours=11)
    enforcement.enforce(account.platform)
    account.end(held, PAUSED)
    return held


def test_the_api_gives_the_hard_cap_as_the_reason_of_a_job_that_it_paused(account: Account, serve: Callable[[ASGIApp], str]) -> None:
    held = _paused_by_the_cap(account)
    key = tenants.create_key(account.platform, account.tenant, name="t", scopes=["read"]).secret
    with FtClient(base_url=serve(create_app(account.platform)), api_key=key) as ft:
        job = ft.jobs.retrieve(held.job_id)
    assert (job["state"], job["reason"]) == ("paused", "hard_cap_reached")
    assert "from 2026-06-01 00:00 UTC" in str(job["reason_detail"])


def test_the_next_month_lets_capped_jobs_go_on_by_themselves(account: Account) -> None:
    held = _paused_by_the_cap(account)
    account.now[0] = datetime(2026, 6, 1, 0, 0, 5, tzinfo=UTC)
    assert enforcement.enforce(account.platform).resumed == [held.job_id]
    assert account.row(held.job_id).state == "queued"
    assert account.hours()[2] > 0, "the rest of it is held again"


def test_a_small_job_does_not_take_the_room_that_the_oldest_capped_job_waits_for(account: Account) -> None:
    oldest = account.running(hours=30)
    account.wait(minutes=1)
    small = account.running(hours=12, suffix="small")
    account.wait(hours=10)
    account.limit(hard_gpu_hours=10)
    assert set(enforcement.enforce(account.platform).paused) == {oldest.job_id, small.job_id}
    for claim in (oldest, small):
        account.end(claim, PAUSED)
    account.limit(hard_gpu_hours=30)
    assert enforcement.enforce(account.platform).resumed == [], "10 hours are left: the oldest needs 20, the small one 2"
    account.limit(hard_gpu_hours=100)
    assert enforcement.enforce(account.platform).resumed == [oldest.job_id, small.job_id]


def test_a_cap_that_was_reached_last_month_keeps_nobody_waiting(account: Account) -> None:
    account.limit(hard_gpu_hours=1)
    account.now[0] = datetime(2026, 5, 31, 22, tzinfo=UTC)
    account.running(hours=0.5)
    account.pack(account.submit(suffix="waiting"), hours=0.1)
    account.wait(hours=1, minutes=59, seconds=59)
    assert snapshot.queue_snapshot(account.platform).capped
    account.wait(seconds=2)
    assert not snapshot.queue_snapshot(account.platform).capped


def test_a_suspended_tenants_capped_and_queued_jobs_wait_until_it_is_let_in_again(account: Account) -> None:
    held = _paused_by_the_cap(account)
    account.limit(hard_gpu_hours=100)
    queued = account.submit(suffix="queued")
    account.pack(queued, hours=1)
    suspension.suspend(account.platform, account.tenant, reason="invoice 7 is unpaid")
    assert enforcement.enforce(account.platform).resumed == []
    assert not enforcement._resume(account.platform, account.tenant, held.job_id, account.now[0]), "also where the round had begun before"
    cycle.run_cycle(account.platform)
    assert account.row(held.job_id).state == "paused"
    row = account.row(queued)
    assert (row.state, row.reason) == ("queued", "TenantSuspended") and "invoice 7 is unpaid" in row.reason_detail
    suspension.resume(account.platform, account.tenant)
    assert enforcement.enforce(account.platform).resumed == [held.job_id]
    cycle.run_cycle(account.platform)
    assert account.row(queued).state == "provisioning"


def test_a_capped_job_that_its_tenant_pauses_stays_paused_until_the_tenant_resumes_it(account: Account) -> None:
    held = _paused_by_the_cap(account)
    with pytest.raises(QuotaExceeded, match="GPU-hours"):
        jobs.resume(account.platform, account.tenant, held.job_id)
    key = Actor(kind="key", id="key_1")
    jobs.pause(account.platform.in_scope_of(account.tenant, key), account.tenant, held.job_id)
    with account.platform.engine.connect() as conn:
        (line,) = conn.execute(sa.select(audit_log).where(audit_log.c.object_id == held.job_id, audit_log.c.actor_id == "key_1")).all()
    assert line.changes == {"reason": ["hard_cap_reached", None]}
    account.limit(hard_gpu_hours=100)
    assert enforcement.enforce(account.platform).resumed == []
    jobs.resume(account.platform, account.tenant, held.job_id)
    assert account.row(held.job_id).state == "queued"
    assert account.hours()[2] > 0


@pytest.fixture
def other(account: Account, write_chat_rows: Callable[..., Path]) -> Account:
    """Another tenant of the same platform, behind the first one in the order of ids."""
    owner, _ = tenants.create(account.platform, f"u-{uuid.uuid4().hex[:8]}", tier="standard", max_jobs_in_flight=100)
    with write_chat_rows().open("rb") as rows:
        file = uploaded_files.create(account.platform, owner.id, rows, filename="rows.jsonl", purpose="fine-tune")
    return Account(account.platform, account.now, owner.id, str(file.id))


def test_a_tenant_with_room_lets_no_other_tenants_jobs_go_on(account: Account, other: Account) -> None:
    held = []
    for one in (account, other):
        one.limit(hard_gpu_hours=10)
        held.append(one.running(hours=6))
    account.wait(hours=11)
    assert sorted(enforcement.enforce(account.platform).paused) == sorted(h.job_id for h in held)
    for one, claim in zip((account, other), held, strict=True):
        one.end(claim, PAUSED)
    assert account.tenant < other.tenant
    other.limit(hard_gpu_hours=100)
    assert enforcement.enforce(account.platform).resumed == [held[1].job_id]
    assert account.row(held[0].job_id).state == "paused"


def test_a_tenant_whose_cap_cannot_be_enforced_holds_up_no_other(account: Account, other: Account) -> None:
    held = []
    for one in (account, other):
        one.limit(hard_gpu_hours=1)
        held.append(one.running(hours=1))
    account.wait(hours=2)
    with as_owner(account.platform).begin() as conn:
        conn.execute(sa.text("CREATE FUNCTION refuse() RETURNS trigger AS $$BEGIN RAISE EXCEPTION 'a full disk'; END$$ LANGUAGE plpgsql"))
        this = f"FOR EACH ROW WHEN (NEW.tenant_id = '{account.tenant}')"
        conn.execute(sa.text(f"CREATE TRIGGER refuse BEFORE UPDATE ON jobs {this} EXECUTE FUNCTION refuse()"))
    assert enforcement.enforce(account.platform).paused == [held[1].job_id]
    with as_owner(account.platform).begin() as conn:
        conn.execute(sa.text("DROP TRIGGER refuse ON jobs"))
    assert enforcement.enforce(account.platform).paused == [held[0].job_id]


@contextmanager
def _rounds_that_wait_for(job_id: str, account: Account, *, count: int) -> Iterator[tuple[sa.Connection, list[Future[enforcement.Round]]]]:
    """A transaction that has the job's row, and so many rounds that have begun and wait for it."""
    with ThreadPoolExecutor(count) as pool, account.platform.engine.begin() as conn:
        conn.execute(sa.text("SELECT 1 FROM jobs WHERE id = :job FOR UPDATE"), {"job": job_id})
        rounds = [pool.submit(enforcement.enforce, account.platform) for _ in range(count)]
        until(lambda: num_waiting(account.platform) == count)
        yield conn, rounds


def test_a_job_that_was_cancelled_meanwhile_keeps_no_other_from_going_on(account: Account) -> None:
    account.limit(hard_gpu_hours=10)
    first, second = account.running(hours=4), account.running(hours=4, suffix="second")
    account.wait(hours=11)
    enforcement.enforce(account.platform)
    for claim in (first, second):
        account.end(claim, PAUSED)
    account.limit(hard_gpu_hours=100)
    with _rounds_that_wait_for(first.job_id, account, count=1) as (conn, (enforced,)):
        conn.execute(sa.text("UPDATE jobs SET state = 'cancelled' WHERE id = :job"), {"job": first.job_id})
        conn.commit()
        enforced.result()
    assert [account.row(claim.job_id).state for claim in (first, second)] == ["cancelled", "queued"]


def test_of_two_loops_that_pause_a_job_at_once_one_has_paused_it(account: Account) -> None:
    account.limit(hard_gpu_hours=1)
    held = account.running(hours=1)
    account.wait(hours=2)
    with _rounds_that_wait_for(held.job_id, account, count=2) as (conn, rounds):
        conn.commit()
        assert [job for done in rounds for job in done.result().paused] == [held.job_id]


def test_one_tenants_cap_is_nobody_elses(account: Account, other: Account) -> None:
    account.limit(hard_gpu_hours=1)
    mine, theirs = account.running(hours=1), other.running(hours=1)
    account.wait(hours=2)
    assert enforcement.enforce(account.platform).paused == [mine.job_id]
    assert other.row(theirs.job_id).state == "provisioning"
    after = other.submit()
    other.pack(after, hours=0.5)
    cycle.run_cycle(account.platform)
    assert other.row(after).state == "provisioning"


def test_a_real_workload_is_stopped_at_a_checkpoint_by_the_cap_and_goes_on_from_it(new_job: Callable[..., Job]) -> None:
    job = new_job()
    held, thread, endings = job.following(Scenario(steps=6, hold_at=4))
    until(lambda: jobs.get(job.platform, job.tenant, job.id).job.step == 4)
    with job.platform.engine.begin() as conn:
        conn.execute(sa.update(tenants_table).values(hard_gpu_hours=0.000001))
    assert enforcement.enforce(job.platform).paused == [job.id]
    thread.join(30)
    assert attempts.finish(job.platform, held, endings[0]) is JobState.PAUSED
    step = job.steps()[0]
    assert step in (4, 5), "a checkpoint was made where it stood"
    assert enforcement.enforce(job.platform).resumed == []
    with job.platform.engine.begin() as conn:
        conn.execute(sa.update(tenants_table).values(hard_gpu_hours=10.0))
    assert enforcement.enforce(job.platform).resumed == [job.id]
    assert job.train(Scenario(steps=6))[1] is JobState.EVALUATING
    assert job.from_steps() == [0, step]
    with job.platform.engine.connect() as conn:
        held = conn.execute(sa.select(quota_holds.c.gpu_seconds, quota_holds.c.released_at)).one()
        evaluation_s = conn.execute(sa.select(jobs_table.c.evaluation_s)).scalar_one()
    assert held.released_at is None
    assert evaluation_s < held.gpu_seconds < evaluation_s + 60.0, "it is trained: what it ran, and its evaluation"
