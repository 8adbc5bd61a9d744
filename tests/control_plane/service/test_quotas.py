"""GPU-hours in the database: holds, what counts as used, and what becomes of jobs at their tenant's cap."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from control_plane.jobs import JobState
from control_plane.protocols import WorkloadPhase, WorkloadStatus
from control_plane.service import attempts, capping, files, jobs, queue_reading, quotas, scheduling, tenant_changes, tenants
from control_plane.service.attempts import Ending
from control_plane.service.platform import Actor, Platform
from control_plane.service.preparation import mark_packed
from control_plane.service.submission import JobRequest
from control_plane.tables import audit_log, job_events, outbox, quota_holds, reservations
from control_plane.tables import files as files_table
from control_plane.tables import tenants as tenants_table
from ft_assets.errors import Fault, QuotaExceeded
from ft_assets.training.failures import FailureClass, Retry
from tests.database_roles import as_owner
from tests.followed_jobs import Job, until
from tests.ledger import enter
from tests.scripted_training import Scenario
from tests.training_specs import SPEC

MID_MONTH = datetime(2026, 5, 15, 12, tzinfo=UTC)
PAUSED = FailureClass(code="paused", fault=Fault.USER, retry=Retry.NEVER, message="paused", remedy="resume")
LOST = FailureClass(code="node_lost", fault=Fault.PLATFORM, retry=Retry.RESUME, message="lost", remedy="")


@dataclass
class Account:
    """A tenant on a platform whose time is told."""

    platform: Platform
    now: list[datetime]
    tenant: str
    file: str

    def limit(self, **limits: float | None) -> None:
        with self.platform.engine.begin() as conn:
            conn.execute(sa.update(tenants_table).where(tenants_table.c.id == self.tenant).values(**limits))

    def wait(self, **span: float) -> None:
        self.now[0] += timedelta(**span)

    def submit(self, **fields: Any) -> str:
        request = JobRequest.from_body({"model": "tiny-base", "training_file": self.file, **fields})
        return str(jobs.submit(self.platform, self.tenant, request).job["id"])

    def pack(self, job_id: str, *, hours: float) -> Any:
        mark_packed(self.platform, self.tenant, job_id, spec=SPEC, total_steps=10, expected_s=hours * 3600)
        return self.row(job_id)

    def run(self, job_id: str) -> attempts.Claim:
        scheduling.place(self.platform)
        held = attempts.claim(self.platform, self.tenant, job_id)
        attempts.mark_started(self.platform, held, from_step=0, started_at=self.now[0].timestamp())
        return held

    def running(self, *, hours: float, **fields: Any) -> attempts.Claim:
        job_id = self.submit(**fields)
        self.pack(job_id, hours=hours)
        return self.run(job_id)

    def end(self, held: attempts.Claim, failure: FailureClass | None) -> JobState:
        with self.platform.engine.connect() as conn:
            query = sa.text("SELECT started_at FROM attempts WHERE job_id = :job AND attempt = :attempt")
            started = conn.execute(query, {"job": held.job_id, "attempt": held.attempt}).scalar_one()
        status = WorkloadStatus(
            name="w", phase=WorkloadPhase.EXITED, exit_code=0, started_at=started.timestamp(), ended_at=self.now[0].timestamp()
        )
        code = failure.code if failure else "succeeded"
        ending = Ending(outcome=code, failure=failure, last_step=5, trained_tokens=1, status=status)
        return attempts.finish(self.platform, held, ending)

    def row(self, job_id: str) -> Any:
        return jobs.get(self.platform, self.tenant, job_id).row

    def hours(self) -> tuple[float, float, float]:
        """Settled, running and held."""
        with self.platform.engine.connect() as conn:
            at = quotas.standing(conn, self.tenant, self.now[0])
        return tuple(round(s / 3600, 3) for s in (at.settled_s, at.running_s, at.held_s))  # type: ignore[return-value]

    def events(self, job_id: str, code: str) -> list[Any]:
        query = sa.select(job_events).where(job_events.c.job_id == job_id, job_events.c.code == code).order_by(job_events.c.seq)
        with self.platform.engine.connect() as conn:
            return list(conn.execute(query))

    def told(self) -> list[tuple[str, str | None, int | None]]:
        """What the outbox says of quotas: type, limit, percent."""
        query = sa.select(outbox).where(outbox.c.tenant_id == self.tenant, outbox.c.type.like("quota.%")).order_by(outbox.c.created_at)
        with self.platform.engine.connect() as conn:
            return sorted((r.type, r.data.get("limit"), r.data.get("percent")) for r in conn.execute(query))


@pytest.fixture
def account(new_platform: Callable[..., Platform], write_chat_rows: Callable[..., Path]) -> Account:
    now = [MID_MONTH]
    platform = replace(new_platform(local_gpus="8"), clock=lambda: now[0])
    owner, _ = tenants.create(platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard", max_jobs_in_flight=100)
    with write_chat_rows().open("rb") as rows:
        file = files.create(platform, owner.id, rows, filename="rows.jsonl", purpose="fine-tune")
    return Account(platform, now, owner.id, str(file["id"]))


def test_an_admitted_job_holds_its_expected_time_until_it_ends(account: Account) -> None:
    first, second = account.submit(), account.submit()
    one = account.hours()[2] / 2
    assert one > 0
    jobs.cancel(account.platform, account.tenant, first)
    assert account.hours() == (0, 0, pytest.approx(one, abs=0.001))
    jobs.cancel(account.platform, account.tenant, second)
    assert account.hours() == (0, 0, 0)


def test_fifty_submissions_at_once_against_gpu_hours_for_five_are_five(account: Account) -> None:
    one = quotas.of_job(account.platform, account.tenant, account.submit()).gpu_seconds / 3600
    account.limit(hard_gpu_hours=one * 5.5)

    def submit(seed: int) -> bool:
        try:
            account.submit(seed=seed)
        except QuotaExceeded:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        admitted = list(pool.map(submit, range(49)))
    assert sum(admitted) == 4, "beside the one before"
    assert account.hours()[2] == pytest.approx(one * 5, abs=0.001)


def test_what_was_counted_replaces_the_first_estimate(account: Account) -> None:
    job = account.submit()
    assert not quotas.of_job(account.platform, account.tenant, job).counted
    account.pack(job, hours=3)
    assert account.hours() == (0, 0, 3)
    assert quotas.of_job(account.platform, account.tenant, job).counted


def test_tokens_that_the_report_has_counted_for_this_model_are_no_first_estimate(account: Account) -> None:
    model = account.platform.models.get("tiny-base")
    first = quotas.of_job(account.platform, account.tenant, account.submit())
    report = {
        "stats": {"tokens": {"total": 10**12, "max": 100}},
        "model": {"tokenizer_digest": model.tokenizer_digest, "template_digest": model.template_digest},
    }
    with account.platform.engine.begin() as conn:
        conn.execute(sa.update(files_table).where(files_table.c.id == account.file).values(report=report))
    counted = quotas.of_job(account.platform, account.tenant, account.submit(hyperparameters={"n_epochs": 2}))
    assert (first.counted, counted.counted) == (False, True)
    assert counted.gpu_seconds > 10 * first.gpu_seconds


def test_a_job_whose_count_does_not_fit_fails_before_it_takes_a_gpu(account: Account) -> None:
    account.limit(hard_gpu_hours=4)
    account.pack(account.submit(), hours=3)
    second = account.submit()
    row = account.pack(second, hours=2)
    assert (row["state"], row["error"]["code"]) == ("failed", "exceeded_quota")
    assert "the data is counted now" in row["error"]["message"]
    assert account.hours() == (0, 0, 3), "it holds nothing any more"
    scheduling.place(account.platform)
    with account.platform.engine.connect() as conn:
        assert second not in conn.execute(sa.select(reservations.c.job_id)).scalars().all()


def test_a_cap_that_was_lowered_meanwhile_takes_nothing_from_a_job_that_needs_less_than_it_holds(account: Account) -> None:
    job = account.submit()
    account.pack(job, hours=3)
    second = account.submit()
    account.limit(hard_gpu_hours=1)
    assert account.pack(second, hours=0.001)["state"] == "queued"


def test_used_is_what_ran_this_month_and_was_not_refunded_and_a_hold_gets_less_by_it(account: Account) -> None:
    held = account.running(hours=4)
    assert account.hours() == (0, 0, 4)
    account.wait(hours=1)
    assert account.hours() == (0, 1, 3)
    assert account.end(held, LOST) is JobState.QUEUED
    assert account.hours() == (0, 0, 4), "a loss of the platform does not count"
    again = account.run(held.job_id)
    account.wait(hours=6)
    assert account.hours() == (0, 6, 0), "it took longer than expected"
    account.end(again, None)
    assert account.hours() == (6, 0, 0)


def test_an_attempt_counts_in_the_months_in_which_it_ran(account: Account) -> None:
    account.now[0] = datetime(2026, 5, 31, 22, tzinfo=UTC)
    held = account.running(hours=10)
    account.wait(hours=3)
    assert account.hours() == (0, 1, 7), "since the month began; what is held is of the whole job"
    with account.platform.engine.begin() as conn:
        enter(conn, account.tenant, "old", amount_micros=1, gpu_seconds=7200.0)  # today's, by the wall clock
    assert account.hours()[0] == 0
    account.end(held, None)
    assert account.hours() == (1, 0, 0), "the two hours of May are not used again in June"


def _ended_without_a_bill(account: Account, held: attempts.Claim, *, is_final: bool = False) -> None:
    """What a loop leaves that dies between the end of an attempt and its entry in the ledger."""
    of_job, at = {"job": held.job_id, "attempt": held.attempt}, account.now[0]
    with account.platform.engine.begin() as conn:
        conn.execute(sa.text("UPDATE attempts SET ended_at = :at WHERE job_id = :job AND attempt = :attempt"), {**of_job, "at": at})
        conn.execute(sa.text("UPDATE reservations SET released_at = :at WHERE job_id = :job AND attempt = :attempt"), {**of_job, "at": at})
        if is_final:
            conn.execute(sa.text("UPDATE jobs SET state = 'succeeded', finished_at = :at WHERE id = :job"), {**of_job, "at": at})


def test_an_attempt_that_has_ended_counts_until_it_is_in_the_ledger(account: Account) -> None:
    held = account.running(hours=4)
    account.wait(hours=1)
    assert account.end(held, LOST) is JobState.QUEUED
    again = account.run(held.job_id)
    account.wait(hours=2)
    _ended_without_a_bill(account, again)
    account.wait(minutes=59)
    assert account.hours()[:2] == (0, 2), "that the first attempt is in the ledger says nothing of the second"


def test_a_job_that_has_ended_counts_until_it_is_in_the_ledger(account: Account) -> None:
    held = account.running(hours=4)
    account.wait(hours=1)
    _ended_without_a_bill(account, held, is_final=True)
    account.wait(minutes=59)
    assert account.hours()[:2] == (0, 1)
    account.wait(minutes=2)
    assert account.hours()[:2] == (0, 0), "after an hour the ledger alone counts"


def test_what_ended_before_the_month_began_is_nothing_and_not_less(account: Account) -> None:
    account.now[0] = datetime(2026, 5, 31, 23, 50, tzinfo=UTC)
    held = account.running(hours=1)
    account.wait(minutes=5)
    _ended_without_a_bill(account, held)
    account.wait(minutes=6)
    with account.platform.engine.connect() as conn:
        assert quotas.standing(conn, account.tenant, account.now[0]).running_s == 0.0


def test_a_standing_without_a_job_is_that_of_the_others(account: Account) -> None:
    mine, other = account.running(hours=2), account.running(hours=2, suffix="other")
    account.wait(hours=1)
    account.end(mine, None)
    account.wait(hours=1)
    account.end(other, None)
    with account.platform.engine.connect() as conn:
        at = quotas.standing(conn, account.tenant, account.now[0], without=mine.job_id)
    assert (at.settled_s, at.running_s, at.held_s) == (7200.0, 0.0, 0.0)
    assert account.hours()[0] == 3


def test_hours_are_told_to_a_millionth() -> None:
    assert [quotas.in_hours(s) for s in (0.0, 1.0, 3600.0)] == [0.0, 0.000278, 1.0]


def test_entries_of_before_count_by_their_seconds_or_as_a_whole(account: Account) -> None:
    account.now[0] = datetime(2026, 6, 2, tzinfo=UTC)
    june, ended = datetime(2026, 6, 1, tzinfo=UTC).timestamp(), datetime(2026, 6, 1, 1, tzinfo=UTC)
    first_format = {"started_at": june - 3600, "ended_at": june + 3600}
    with account.platform.engine.begin() as conn:
        enter(conn, account.tenant, "first", amount_micros=1, gpu_seconds=7200.0, occurred_at=ended, detail=first_format)
    assert account.hours()[0] == 1
    with account.platform.engine.begin() as conn:
        enter(conn, account.tenant, "timeless", amount_micros=1, gpu_seconds=7200.0, occurred_at=ended)
    assert account.hours()[0] == 3


def test_a_job_that_the_cap_pauses_at_the_end_of_a_month_leaves_the_next_one_its_hours(account: Account) -> None:
    account.limit(hard_gpu_hours=10)
    account.now[0] = datetime(2026, 5, 31, 13, 59, 50, tzinfo=UTC)
    held = account.running(hours=10)
    account.wait(hours=10, seconds=5)
    assert capping.enforce(account.platform).paused == [held.job_id]
    account.wait(seconds=15)
    account.end(held, PAUSED)
    assert account.hours()[0] == pytest.approx(0.003, abs=0.001)
    assert capping.enforce(account.platform).resumed == [held.job_id]


def test_a_job_in_overage_says_so_with_the_numbers(account: Account) -> None:
    account.limit(soft_gpu_hours=0)
    job = account.submit()
    (event,) = account.events(job, "quota_overage")
    assert "exceed the soft limit of 0 a month" in event.message
    shown = quotas.of_job(account.platform, account.tenant, job).to_dict()
    assert shown["goes_into_overage"]
    assert shown["overage_gpu_hours"] == shown["job_gpu_hours"] > 0
    assert (shown["month"], shown["left_gpu_hours"], shown["fits"]) == ("2026-05", 1000.0, True)
    assert "paused at their next checkpoint" in shown["on_hard_cap"]


def test_each_share_of_each_limit_is_told_once_a_month_and_a_new_limit_anew(account: Account) -> None:
    account.limit(soft_gpu_hours=10, hard_gpu_hours=100)
    held = account.running(hours=20)
    account.wait(hours=7)
    assert capping.enforce(account.platform).told == 0
    account.wait(hours=1)
    assert capping.enforce(account.platform).told == 1
    assert capping.enforce(account.platform).told == 0
    account.wait(hours=2)
    assert capping.enforce(account.platform).told == 1
    assert account.told() == [("quota.threshold_reached", "soft", 80), ("quota.threshold_reached", "soft", 100)]
    at_80, at_100 = account.events(held.job_id, "quota_threshold_reached")
    assert (at_80.data["percent"], at_100.data["percent"]) == (80, 100)
    billed = "% of the soft limit of 10 is reached. What exceeds it is billed as overage."
    assert (at_80.message, at_100.message) == (
        f"8 GPU-hours are used this month: 80 {billed}",
        f"10 GPU-hours are used this month: 100 {billed}",
    )
    account.limit(soft_gpu_hours=12)
    assert capping.enforce(account.platform).told == 1, "80 % of another limit"


def test_at_the_hard_cap_running_jobs_are_paused_queued_ones_wait_and_all_go_on_when_it_is_raised(account: Account) -> None:
    account.limit(hard_gpu_hours=10)
    held = account.running(hours=6)
    by_tenant = account.submit(suffix="by-tenant")
    jobs.pause(account.platform, account.tenant, account.pack(by_tenant, hours=0.1)["id"])
    account.wait(hours=10)
    waiting = _submitted_before_the_cap(account)
    done = capping.enforce(account.platform)
    assert done.paused == [held.job_id]
    row = account.row(held.job_id)
    assert (row["state"], row["reason"], row["stop_requested"]) == ("pausing", "hard_cap_reached", "pause")
    assert ("quota.hard_cap_reached", "hard", 100) in account.told()
    assert [e.level for e in account.events(held.job_id, "hard_cap_reached")] == ["warn"]
    assert account.end(held, PAUSED) is JobState.PAUSED
    row = account.row(held.job_id)
    assert (row["state"], row["reason"]) == ("paused", "hard_cap_reached")
    assert "from 2026-06-01 00:00 UTC" in row["reason_detail"]

    scheduling.place(account.platform)
    queued = account.row(waiting)
    assert (queued["state"], queued["reason"]) == ("queued", "WaitingForQuota")
    assert "10 of the 10 GPU-hours" in queued["reason_detail"]
    assert capping.enforce(account.platform) == capping.Round(told=0, paused=[], resumed=[])

    account.limit(hard_gpu_hours=100)
    assert capping.enforce(account.platform).resumed == [held.job_id]
    scheduling.place(account.platform)
    assert {account.row(j)["state"] for j in (held.job_id, waiting)} == {"provisioning"}
    assert account.row(by_tenant)["state"] == "paused", "the tenant's own pause is the tenant's to end"


def test_what_far_tenants_have_used_is_not_summed_up_each_second_and_no_cap_is_passed(account: Account) -> None:
    seen: list[str] = []
    sa.event.listen(account.platform.engine, "before_cursor_execute", lambda *given: seen.append(given[2]))

    def sums() -> int:
        seen.clear()
        queue_reading.queue_snapshot(account.platform)
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
    assert queue_reading.queue_snapshot(account.platform).capped
    account.limit(hard_gpu_hours=2)
    assert not queue_reading.queue_snapshot(account.platform).capped, "another cap counts at once"


def test_a_wait_at_the_tenants_own_cap_and_a_cancelled_job_miss_no_promise(account: Account) -> None:
    account.limit(hard_gpu_hours=10)
    held = account.running(hours=6)
    cancelled = account.submit(suffix="cancelled")
    account.wait(hours=10)
    waiting = _submitted_before_the_cap(account)
    for _ in range(3):
        account.wait(minutes=40)
        scheduling.place(account.platform)
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


def test_the_next_month_lets_capped_jobs_go_on_by_themselves(account: Account) -> None:
    account.limit(hard_gpu_hours=10)
    held = account.running(hours=6)
    account.wait(hours=11)
    capping.enforce(account.platform)
    account.end(held, PAUSED)
    account.now[0] = datetime(2026, 6, 1, 0, 0, 5, tzinfo=UTC)
    assert capping.enforce(account.platform).resumed == [held.job_id]
    assert account.row(held.job_id)["state"] == "queued"
    assert account.hours()[2] > 0, "the rest of it is held again"


def test_a_cap_that_was_reached_last_month_keeps_nobody_waiting(account: Account) -> None:
    account.limit(hard_gpu_hours=1)
    account.now[0] = datetime(2026, 5, 31, 22, tzinfo=UTC)
    account.running(hours=0.5)
    account.pack(account.submit(suffix="waiting"), hours=0.1)
    account.wait(hours=1, minutes=59, seconds=59)
    assert queue_reading.queue_snapshot(account.platform).capped
    account.wait(seconds=2)
    assert not queue_reading.queue_snapshot(account.platform).capped


def test_a_suspended_tenants_capped_and_queued_jobs_wait_until_it_is_let_in_again(account: Account) -> None:
    account.limit(hard_gpu_hours=10)
    held = account.running(hours=6)
    account.wait(hours=11)
    capping.enforce(account.platform)
    account.end(held, PAUSED)
    account.limit(hard_gpu_hours=100)
    queued = account.submit(suffix="queued")
    account.pack(queued, hours=1)
    tenant_changes.suspend(account.platform, account.tenant, reason="invoice 7 is unpaid")
    assert capping.enforce(account.platform).resumed == []
    assert not capping._resume(account.platform, account.tenant, held.job_id, account.now[0]), "also where the round had begun before"
    scheduling.place(account.platform)
    assert account.row(held.job_id)["state"] == "paused"
    row = account.row(queued)
    assert (row["state"], row["reason"]) == ("queued", "TenantSuspended") and "invoice 7 is unpaid" in row["reason_detail"]
    tenant_changes.resume(account.platform, account.tenant)
    assert capping.enforce(account.platform).resumed == [held.job_id]
    scheduling.place(account.platform)
    assert account.row(queued)["state"] == "provisioning"


def test_a_capped_job_that_its_tenant_pauses_stays_paused_until_the_tenant_resumes_it(account: Account) -> None:
    account.limit(hard_gpu_hours=10)
    held = account.running(hours=6)
    account.wait(hours=11)
    capping.enforce(account.platform)
    account.end(held, PAUSED)
    with pytest.raises(QuotaExceeded, match="GPU-hours"):
        jobs.resume(account.platform, account.tenant, held.job_id)
    key = Actor(kind="key", id="key_1")
    jobs.pause(account.platform.in_scope_of(account.tenant, key), account.tenant, held.job_id)
    with account.platform.engine.connect() as conn:
        (line,) = conn.execute(sa.select(audit_log).where(audit_log.c.object_id == held.job_id, audit_log.c.actor_id == "key_1")).all()
    assert line.changes == {"reason": ["hard_cap_reached", None]}
    account.limit(hard_gpu_hours=100)
    assert capping.enforce(account.platform).resumed == []
    jobs.resume(account.platform, account.tenant, held.job_id)
    assert account.row(held.job_id)["state"] == "queued"
    assert account.hours()[2] > 0


@pytest.fixture
def other(account: Account, write_chat_rows: Callable[..., Path]) -> Account:
    """Another tenant of the same platform, behind the first one in the order of ids."""
    owner, _ = tenants.create(account.platform, f"u-{uuid.uuid4().hex[:8]}", tier="standard", max_jobs_in_flight=100)
    with write_chat_rows().open("rb") as rows:
        file = files.create(account.platform, owner.id, rows, filename="rows.jsonl", purpose="fine-tune")
    return Account(account.platform, account.now, owner.id, str(file["id"]))


def test_a_tenant_with_room_lets_no_other_tenants_jobs_go_on(account: Account, other: Account) -> None:
    held = []
    for one in (account, other):
        one.limit(hard_gpu_hours=10)
        held.append(one.running(hours=6))
    account.wait(hours=11)
    assert sorted(capping.enforce(account.platform).paused) == sorted(h.job_id for h in held)
    for one, claim in zip((account, other), held, strict=True):
        one.end(claim, PAUSED)
    assert account.tenant < other.tenant
    other.limit(hard_gpu_hours=100)
    assert capping.enforce(account.platform).resumed == [held[1].job_id]
    assert account.row(held[0].job_id)["state"] == "paused"


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
    assert capping.enforce(account.platform).paused == [held[1].job_id]
    with as_owner(account.platform).begin() as conn:
        conn.execute(sa.text("DROP TRIGGER refuse ON jobs"))
    assert capping.enforce(account.platform).paused == [held[0].job_id]


def _num_blocked(platform: Platform) -> int:
    """Connections that wait for a lock. Each look is a transaction of its own: within one, PostgreSQL answers the same again."""
    with platform.engine.connect() as conn:
        waiting = sa.text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()")
        return int(conn.execute(waiting).scalar_one())


@contextmanager
def _rounds_that_wait_for(job_id: str, account: Account, *, count: int) -> Iterator[tuple[sa.Connection, list[Future[capping.Round]]]]:
    """A transaction that has the job's row, and so many rounds that have begun and wait for it."""
    with ThreadPoolExecutor(count) as pool, account.platform.engine.begin() as conn:
        conn.execute(sa.text("SELECT 1 FROM jobs WHERE id = :job FOR UPDATE"), {"job": job_id})
        rounds = [pool.submit(capping.enforce, account.platform) for _ in range(count)]
        until(lambda: _num_blocked(account.platform) == count)
        yield conn, rounds


def test_a_job_that_was_cancelled_meanwhile_keeps_no_other_from_going_on(account: Account) -> None:
    account.limit(hard_gpu_hours=10)
    first, second = account.running(hours=4), account.running(hours=4, suffix="second")
    account.wait(hours=11)
    capping.enforce(account.platform)
    for claim in (first, second):
        account.end(claim, PAUSED)
    account.limit(hard_gpu_hours=100)
    with _rounds_that_wait_for(first.job_id, account, count=1) as (conn, (enforced,)):
        conn.execute(sa.text("UPDATE jobs SET state = 'cancelled' WHERE id = :job"), {"job": first.job_id})
        conn.commit()
        enforced.result()
    assert [account.row(claim.job_id)["state"] for claim in (first, second)] == ["cancelled", "queued"]


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
    assert capping.enforce(account.platform).paused == [mine.job_id]
    assert other.row(theirs.job_id)["state"] == "provisioning"
    after = other.submit()
    other.pack(after, hours=0.5)
    scheduling.place(account.platform)
    assert other.row(after)["state"] == "provisioning"


def test_a_real_workload_is_stopped_at_a_checkpoint_by_the_cap_and_goes_on_from_it(new_job: Callable[..., Job]) -> None:
    job = new_job()
    held, thread, endings = job.following(Scenario(steps=6, hold_at=4))
    until(lambda: jobs.get(job.platform, job.tenant, job.id).row["step"] == 4)
    with job.platform.engine.begin() as conn:
        conn.execute(sa.update(tenants_table).values(hard_gpu_hours=0.000001))
    assert capping.enforce(job.platform).paused == [job.id]
    thread.join(30)
    assert attempts.finish(job.platform, held, endings[0]) is JobState.PAUSED
    step = job.steps()[0]
    assert step in (4, 5), "a checkpoint was made where it stood"
    assert capping.enforce(job.platform).resumed == []
    with job.platform.engine.begin() as conn:
        conn.execute(sa.update(tenants_table).values(hard_gpu_hours=10.0))
    assert capping.enforce(job.platform).resumed == [job.id]
    assert job.train(Scenario(steps=6))[1] is JobState.EVALUATING
    assert job.from_steps() == [0, step]
    with job.platform.engine.connect() as conn:
        assert conn.execute(sa.select(quota_holds.c.released_at)).scalar_one() is not None, "it is trained"
