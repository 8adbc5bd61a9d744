"""GPU-hours in the database: holds, and what counts as used."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest
import sqlalchemy as sa

from control_plane.attempts import service as attempts
from control_plane.datasets.tables import files as files_table
from control_plane.evaluations import service as evaluations
from control_plane.jobs import service as jobs
from control_plane.platform.job_states import JobState
from control_plane.queue import cycle
from control_plane.queue.tables import reservations
from control_plane.quotas import enforcement
from control_plane.quotas import service as quotas
from core.errors import QuotaExceeded
from tests.support.jobs.registered_adapter import add_adapter
from tests.support.platform.ledger_entries import enter
from tests.support.platform.tenant_accounts import LOST, PAUSED, Account

EVALUATION_H = 0.008
"""That a trained job still holds: the set-up of its evaluation, in which so small a model answers at once."""


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
    assert (row.state, row.error["code"]) == ("failed", "exceeded_quota")
    assert "the data is counted now" in row.error["message"]
    assert account.hours() == (0, 0, 3), "it holds nothing any more"
    cycle.run_cycle(account.platform)
    with account.platform.engine.connect() as conn:
        assert second not in conn.execute(sa.select(reservations.c.job_id)).scalars().all()


def test_a_cap_that_was_lowered_meanwhile_takes_nothing_from_a_job_that_needs_less_than_it_holds(account: Account) -> None:
    job = account.submit()
    account.pack(job, hours=3)
    second = account.submit()
    account.limit(hard_gpu_hours=1)
    assert account.pack(second, hours=0.001).state == "queued"


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
    assert account.hours() == (6, 0, EVALUATION_H)


def test_an_attempt_counts_in_the_months_in_which_it_ran(account: Account) -> None:
    account.now[0] = datetime(2026, 5, 31, 22, tzinfo=UTC)
    held = account.running(hours=10)
    account.wait(hours=3)
    assert account.hours() == (0, 1, 7), "since the month began; what is held is of the whole job"
    with account.platform.engine.begin() as conn:
        enter(conn, account.tenant, "old", amount_micros=1, gpu_seconds=7200.0)  # today's, by the wall clock
    assert account.hours()[0] == 0
    account.end(held, None)
    assert account.hours() == (1, 0, EVALUATION_H), "the two hours of May are not used again in June"


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


@pytest.mark.parametrize(("kind", "hours"), [(evaluations.MANUAL, 2), (evaluations.BASE_UPDATE, 0)])
def test_an_evaluation_of_a_finished_job_counts_while_it_runs_unless_the_platform_pays(account: Account, kind: str, hours: float) -> None:
    digest = account.platform.models.get("tiny-base").digest
    adapter = add_adapter(account.platform, account.tenant, name="ft:x", stage="production", loaded=False, base_digest=digest)
    account.wait(hours=30)
    order = evaluations.request(account.platform, account.tenant, adapter, kind=kind)
    held = account.run(order.job_id)
    account.wait(hours=2)
    assert account.hours() == (0, hours, 0)
    _ended_without_a_bill(account, held)
    account.wait(minutes=59)
    assert account.hours() == (0, hours, 0)


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
    assert (at.settled_s, at.running_s, round(at.held_s)) == (7200.0, 0.0, 30)
    assert account.hours()[0] == 3


def test_hours_are_told_to_a_millionth() -> None:
    assert [quotas.in_hours(s) for s in (0.0, 1.0, 3600.0)] == [0.0, 0.000278, 1.0]


def test_an_entry_counts_by_its_time_within_the_month_or_as_a_whole(account: Account) -> None:
    account.now[0] = datetime(2026, 6, 2, tzinfo=UTC)
    june, ended = int(datetime(2026, 6, 1, tzinfo=UTC).timestamp() * 1000), datetime(2026, 6, 1, 1, tzinfo=UTC)
    times = {"started_ms": june - 3_600_000, "ended_ms": june + 3_600_000}
    with account.platform.engine.begin() as conn:
        enter(conn, account.tenant, "first", amount_micros=1, gpu_seconds=7200.0, occurred_at=ended, detail=times)
    assert account.hours()[0] == 1
    with account.platform.engine.begin() as conn:
        enter(conn, account.tenant, "timeless", amount_micros=1, gpu_seconds=7200.0, occurred_at=ended)
    assert account.hours()[0] == 3


def test_a_job_that_the_cap_pauses_at_the_end_of_a_month_leaves_the_next_one_its_hours(account: Account) -> None:
    account.limit(hard_gpu_hours=10)
    account.now[0] = datetime(2026, 5, 31, 13, 59, 50, tzinfo=UTC)
    held = account.running(hours=10)
    account.wait(hours=10, seconds=5)
    assert enforcement.enforce(account.platform).paused == [held.job_id]
    account.wait(seconds=15)
    account.end(held, PAUSED)
    assert account.hours()[0] == pytest.approx(0.003, abs=0.001)
    assert enforcement.enforce(account.platform).resumed == [held.job_id]


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
    assert enforcement.enforce(account.platform).notices == 0
    account.wait(hours=1)
    assert enforcement.enforce(account.platform).notices == 1
    assert enforcement.enforce(account.platform).notices == 0
    account.wait(hours=2)
    assert enforcement.enforce(account.platform).notices == 1
    assert account.told() == [("quota.threshold_reached", "soft", 80), ("quota.threshold_reached", "soft", 100)]
    at_80, at_100 = account.events(held.job_id, "quota_threshold_reached")
    assert (at_80.data["percent"], at_100.data["percent"]) == (80, 100)
    billed = "% of the soft limit of 10 is reached. What exceeds it is billed as overage."
    assert (at_80.message, at_100.message) == (
        f"8 GPU-hours are used this month: 80 {billed}",
        f"10 GPU-hours are used this month: 100 {billed}",
    )
    account.limit(soft_gpu_hours=12)
    assert enforcement.enforce(account.platform).notices == 1, "80 % of another limit"
