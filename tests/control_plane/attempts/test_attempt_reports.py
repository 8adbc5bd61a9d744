"""What an attempt reports as events and meter readings, and what a lost workload costs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from agent.messages import FENCED, HEARTBEAT_S, Commit, Exit, Facts, Heartbeat, Notice, Restored, Skipped
from control_plane.attempts import agents, endings
from control_plane.attempts import service as attempts
from control_plane.attempts.rules import HEARTBEAT_LIMIT_S
from control_plane.attempts.tables import agent_tokens
from control_plane.attempts.tables import agents as agents_table
from control_plane.attempts.tables import attempts as attempts_table
from control_plane.billing.metering import service as metering
from control_plane.billing.tables import meter_events
from control_plane.jobs import job_logs
from control_plane.jobs import service as jobs
from control_plane.jobs.tables import job_events
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.platform.context import Platform
from control_plane.platform.protocols import WorkloadPhase, WorkloadStatus
from control_plane.queue import cycle
from control_plane.queue.tables import reservations
from core.errors import Conflict, Fault, InvalidRequest
from engine.training.failures import Retry
from tests.support.jobs.claimed_job import ending, failure, held_by, ledger, report, resume_from


def exit_with(evidence: dict[str, Any]) -> Exit:
    """The end of a training with this evidence, in place of what is true."""
    true = {"outcome": "succeeded", "step": 10, "total_steps": 10, "message": "", "trained_tokens": 100}
    return Exit(exit_code=0, evidence={**true, **evidence}, stop_reason=None)


def test_a_loss_that_is_no_number_is_an_event_with_null(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    step = {"step": 1, "total_steps": 10, "loss": math.nan, "grad_norm": math.inf, "time": 1.0}
    report(platform, held, step, {"step": 1, "eval_loss": math.nan, "time": 1.0})
    with platform.engine.connect() as conn:
        data = conn.execute(sa.select(job_events.c.data).where(job_events.c.type == "metrics").order_by(job_events.c.seq)).scalars().all()
    assert data == [
        {"step": 1, "total_steps": 10, "train_loss": None, "grad_norm": None, "time": 1.0},
        {"step": 1, "valid_loss": None, "time": 1.0},
    ]


def test_nothing_is_reported_of_a_job_that_has_ended(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    jobs.cancel(platform, tenant, job_id)
    report(platform, held, {"step": 1, "total_steps": 10, "loss": 1.0, "time": 1.0})
    assert not attempts.record_checkpoint(platform, held, step=1, prefix="p", manifest_sha256="m", metrics={})
    with platform.engine.connect() as conn:
        codes = conn.execute(sa.select(job_events.c.code).order_by(job_events.c.seq)).scalars().all()
    assert codes[-1] == "job_cancelled"


def test_the_first_step_makes_the_job_running_and_metrics_become_events(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    steps = [{"step": n, "total_steps": 10, "loss": 2.0 / n, "tokens_per_s": 5.0, "time": 100.0 + n} for n in (1, 2, 3)]
    report(platform, held, *steps, {"step": 3, "eval_loss": 0.5, "time": 103.0})
    row = jobs.get(platform, tenant, job_id).job
    assert (row.state, row.step, row.loss) == ("running", 3, pytest.approx(2 / 3))
    assert row.first_step_at is not None
    assert row.estimated_finish_at is not None
    with platform.engine.connect() as conn:
        data = conn.execute(sa.select(job_events.c.data).where(job_events.c.type == "metrics").order_by(job_events.c.seq)).scalars().all()
    assert [d.get("train_loss", d.get("valid_loss")) for d in data] == [2.0, 1.0, pytest.approx(2 / 3), 0.5]


def test_history_tells_progress_from_standing_still(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    lost = failure("node_lost", Fault.PLATFORM, Retry.RESUME)
    first = held_by(platform, tenant, job_id)
    attempts.record_checkpoint(platform, first, step=5, prefix="p", manifest_sha256="m", metrics={})
    attempts.finish(platform, first, ending(lost, step=6))
    attempts.finish(platform, held_by(platform, tenant, job_id), replace(ending(lost), last_step=5))
    told = [(p.code, p.committed_step, p.last_step) for p in endings.history(platform, job_id)]
    assert told == [("node_lost", 5, 6), ("node_lost", 5, 5)]


def test_history_counts_what_was_given_up_and_not_the_rows_of_another_attempt(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    lost = failure("node_lost", Fault.PLATFORM, Retry.RESUME)
    for _ in range(2):  # the second goes on from an earlier step, and commits this one again
        held = held_by(platform, tenant, job_id)
        attempts.record_checkpoint(platform, held, step=5, prefix="p", manifest_sha256="m", metrics={})
        attempts.finish(platform, held, ending(lost, step=6))
    held = held_by(platform, tenant, job_id)
    resume_from(platform, held, 0)
    assert attempts.committed(platform, job_id) == []
    attempts.finish(platform, held, ending(failure("oom", Fault.AMBIGUOUS, Retry.HALVE_BATCH), step=1))
    attempts.finish(platform, held_by(platform, tenant, job_id), ending(lost, step=3))
    told = [(p.code, p.committed_step, p.last_step) for p in endings.history(platform, job_id)]
    assert told == [("node_lost", 5, 6), ("node_lost", 5, 6), ("oom", 5, 1), ("node_lost", 0, 3)]


def test_each_phase_before_the_first_step_is_an_event_once(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    for phase in ("fetch", "import", "import", "load", "import"):
        report(platform, held, phase=phase)
    report(platform, held, {"step": 1, "total_steps": 10, "loss": 1.0, "time": 1.0})
    report(platform, held, phase="self_test")
    assert [m for m in messages(platform, job_id) if m.startswith("Attempt 1: ")] == [
        "Attempt 1: fetching the base model and the training data.",
        "Attempt 1: importing the training libraries.",
        "Attempt 1: loading the base model.",
    ]


def messages(platform: Platform, job_id: str) -> list[str]:
    with platform.engine.connect() as conn:
        query = sa.select(job_events.c.message).where(job_events.c.job_id == job_id)
        return list(conn.execute(query.order_by(job_events.c.seq)).scalars())


def reports(platform: Platform, job_id: str) -> dict[str, Any]:
    with platform.engine.connect() as conn:
        return {row.kind: row for row in conn.execute(sa.select(meter_events).where(meter_events.c.job_id == job_id))}


def test_the_start_and_the_end_of_a_workload_are_reported_as_they_are_recorded(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    attempts.mark_started(platform, held, started_at=1000.0)
    assert reports(platform, job_id)["started"].at.timestamp() == 1000.0
    attempts.finish(platform, held, ending(failure("oom", Fault.AMBIGUOUS, Retry.NEVER)))
    found = reports(platform, job_id)
    assert found["started"].data == {
        "tier": "standard", "gpu_type": "local", "num_gpus": 1, "pricing": "on_demand", "model": "tiny-base",
    }  # fmt: skip
    assert (found["ended"].at.timestamp(), found["ended"].data["fault"]) == (1036.0, "ambiguous")
    assert [(e.amount_micros, e.detail["gpu_ms"]) for e in ledger(platform, job_id)] == [(10_000, 36_000)]


def test_the_launcher_reports_as_itself_and_its_start_counts_before_one_that_was_concluded(
    queued: Callable[..., tuple[Platform, str, str]],
) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    attempts.mark_started(platform, held, started_at=None)  # the launcher cannot tell yet
    attempts.finish(platform, held, ending(failure("oom", Fault.AMBIGUOUS, Retry.NEVER)))
    with platform.engine.connect() as conn:
        ids = set(conn.execute(sa.select(meter_events.c.id).where(meter_events.c.job_id == job_id)).scalars())
    assert ids == {f"{job_id}/a1/{kind}" for kind in ("started", "started/launcher", "ended/launcher")}
    assert [(e.amount_micros, e.detail["gpu_ms"]) for e in ledger(platform, job_id)] == [(10_000, 36_000)], "billed once"


def test_a_start_that_was_reported_twice_is_shown_once_as_running(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    attempts.mark_started(platform, held, started_at=None)
    with platform.engine.begin() as conn:
        job = jobs.get(platform, tenant, job_id).job
        endings.report_started(conn, platform, held, job, at=endings.moment(1000.0), now=platform.clock(), seen=True)
        (start,) = metering.running(conn, tenant, job_ids=[job_id])
    assert start.at == endings.moment(1000.0)


def test_a_lost_workload_is_billed_to_its_last_sign_of_life_and_given_back(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    attempts.mark_started(platform, held, started_at=1000.0)
    status = WorkloadStatus(name="w", phase=WorkloadPhase.LOST, started_at=1000.0, ended_at=1018.0)
    lost = replace(ending(failure("node_lost", Fault.PLATFORM, Retry.RESUME)), status=status, seen=False)
    attempts.finish(platform, held, lost)
    usage, refund = sorted(ledger(platform, job_id), key=lambda e: -e.amount_micros)
    assert (usage.gpu_seconds, usage.amount_micros, refund.amount_micros) == (18.0, 5_000, -5_000)
    assert usage.detail["end_known_from"] == "inferred"


def test_a_workload_whose_end_is_not_known_is_billed_to_its_last_sign_of_life(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    began = platform.clock().timestamp() - 500
    attempts.mark_started(platform, held, started_at=began)
    report(platform, held, {"step": 1, "total_steps": 9, "loss": 1.0, "time": began + 3})
    lost = WorkloadStatus(name="w", phase=WorkloadPhase.LOST, started_at=began)
    noticed = replace(platform, clock=lambda: platform.clock() + timedelta(hours=1))
    attempts.finish(noticed, held, replace(ending(failure("node_lost", Fault.PLATFORM, Retry.RESUME)), status=lost, seen=False))
    assert reports(platform, job_id)["ended"].at == reports_of_progress(platform, job_id)


def test_an_attempt_that_nobody_could_follow_is_closed_where_the_database_last_heard_of_it(
    queued: Callable[..., tuple[Platform, str, str]],
) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    began = platform.clock().timestamp() - 500
    attempts.mark_started(platform, held, started_at=began)
    now = {"step": 1, "total_steps": 9, "loss": 1.0, "time": began + 3}
    report(platform, held, now)
    record_silence = reports_of_progress(platform, job_id)
    cycle.release(platform, job_id, held.attempt)
    found = reports(platform, job_id)
    assert found["ended"].at == record_silence
    assert found["ended"].data == {"outcome": "internal", "fault": "platform", "source": "inferred"}
    assert sum(e.amount_micros for e in ledger(platform, job_id)) == 0
    assert len(ledger(platform, job_id)) == 2


def reports_of_progress(platform: Platform, job_id: str) -> Any:
    query = sa.select(sa.func.max(job_events.c.created_at)).where(job_events.c.job_id == job_id, job_events.c.type == "metrics")
    with platform.engine.connect() as conn:
        return conn.execute(query).scalar_one()


def test_a_workload_that_never_started_costs_nothing_and_is_not_reported(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    absent = WorkloadStatus(name="w", phase=WorkloadPhase.ABSENT)
    attempts.finish(platform, held, replace(ending(failure("base_model_changed", Fault.PLATFORM, Retry.NEVER)), status=absent))
    assert reports(platform, job_id) == {}
    assert ledger(platform, job_id) == []


def test_a_heartbeat_without_news_is_one_transaction_of_two_statements(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    report(platform, held, {"step": 1, "total_steps": 10, "loss": 1.0, "time": 1.0})
    token, seen = agents.introduce(platform, held, may_read=[]), list[str]()
    sa.event.listen(platform.engine, "begin", lambda _conn: seen.append("BEGIN"))
    sa.event.listen(platform.engine, "before_cursor_execute", lambda _conn, _cursor, text, *_: seen.append(text.split()[0]))
    agents.heartbeat(platform, token, Heartbeat(phase="train", number=10**6))
    assert [word for word in seen if word != "SET"] == ["BEGIN", "SELECT", "UPDATE"]


def test_a_heartbeat_that_waited_for_another_one_reports_nothing_twice(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    """The client gave up on the first and sent its lines again, while the first was still being stored."""
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    token = agents.introduce(platform, held, may_read=[])
    lines = [{"step": n, "total_steps": 10, "loss": 1.0, "time": 1.0} for n in (1, 2)]
    mine = (reservations.c.job_id == job_id) & reservations.c.released_at.is_(None)
    with ThreadPoolExecutor(1) as pool:
        with platform.engine.begin() as conn:
            conn.execute(sa.select(reservations.c.job_id).where(mine).with_for_update())
            second = pool.submit(agents.heartbeat, platform, token, Heartbeat(phase="train", metrics=lines, number=2))
            while not conn.execute(sa.text("SELECT count(*) FROM pg_locks WHERE NOT granted")).scalar_one():
                assert not second.done()
            conn.execute(sa.update(agents_table).where(agents_table.c.job_id == job_id).values(reported_step=2, beat=1))
        second.result(timeout=30)
    with platform.engine.connect() as conn:
        told = (
            conn.execute(sa.select(job_events.c.data).where(job_events.c.job_id == job_id, job_events.c.type == "metrics")).scalars().all()
        )
    assert told == []


def test_a_second_description_may_name_other_inputs(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    for prefixes in (["one/"], ["one/", "two/"]):
        agents.introduce(platform, held, may_read=prefixes)
    platform.objects.put_bytes("two/object", b"there")
    assert set(agents.read_urls(platform, held, ["two/object"]).urls) == {"two/object"}


def test_stored_digest_of_a_token_opens_nothing(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    token = agents.introduce(platform, held_by(platform, tenant, job_id), may_read=[])
    with platform.engine.connect() as conn:
        rows = [conn.execute(sa.select(table).where(table.c.job_id == job_id)).mappings().one() for table in (agents_table, agent_tokens)]
    assert token not in str([dict(row) for row in rows])
    with pytest.raises(Conflict) as refused:
        agents.check_token(platform, rows[1]["sha256"])
    assert refused.value.code == FENCED
    agents.check_token(platform, token)


def test_each_step_that_starts_an_attempt_gets_a_token_that_works(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    first, second = (agents.introduce(platform, held, may_read=[]) for _ in range(2))
    assert first != second
    for number, token in enumerate((first, second), 1):
        agents.heartbeat(platform, token, Heartbeat(phase="load", number=number))
        assert agents.held_by(platform, token) == held


STEP = {"step": 3, "total_steps": 10, "loss": 1.0, "time": 1.0}
IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "a negative step": {"metrics": ({**STEP, "step": -1},)},
    "a step beyond the job's": {"metrics": ({**STEP, "step": 11, "total_steps": 11},)},
    "more steps in total than the job has": {"metrics": ({**STEP, "total_steps": 10**9},)},
    "a step beyond all integers": {"metrics": ({**STEP, "step": 10**30, "total_steps": 10**30},)},
    "no step": {"metrics": ({"total_steps": 10, "loss": 1.0, "time": 1.0},)},
    "a step in words": {"metrics": ({**STEP, "step": "three"},)},
    "no total": {"metrics": ({"step": 3, "loss": 1.0, "time": 1.0},)},
    "a time in words": {"metrics": ({**STEP, "time": "now"},)},
    "a time beyond all dates": {"metrics": ({**STEP, "time": 1e300},)},
    "a loss in words": {"metrics": ({**STEP, "loss": "low"},)},
    "a validation of a step beyond the job's": {"metrics": ({"step": 11, "eval_loss": 1.0, "time": 1.0},)},
    "a last step beyond all integers": {"facts": Facts(last_step=2**31)},
    "a negative last step": {"facts": Facts(last_step=-1)},
    "a beginning beyond all dates": {"facts": Facts(began_at=1e300)},
    "work that is kept until tomorrow's tomorrow": {"facts": Facts(kept_until=time.time() + 2 * 86_400)},
    "a beginning that is no number": {"facts": Facts(began_at=math.nan)},
    "lost work that is infinite": {"facts": Facts(again_s=math.inf)},
    "a negative silence": {"facts": Facts(silence_s=-1.0)},
    "a number beyond all integers": {"number": 2**31},
    "a notice beyond all integers": {"first_notice": 2**31},
    "an end of more steps than the job has": {"exit": exit_with({"step": 11})},
    "an end of negative tokens": {"exit": exit_with({"trained_tokens": -5})},
    "an end that cannot be read": {"exit": exit_with({"surprise": 1})},
    "an end with another outcome": {"exit": exit_with({"outcome": "triumph"})},
    "an end for another reason": {"exit": Exit(exit_code=0, evidence=None, stop_reason="boredom")},
    "an end with half an error": {"exit": Exit(exit_code=0, evidence=None, stop_reason=None, error={"code": "x"})},
    "an error without words": {"exit": Exit(exit_code=0, evidence=None, stop_reason=None, error={"code": "x", "message": {}})},
    "an address with a line end": {"address": "10.0.0.1:29500\n"},
    "an address beyond all names": {"address": "a" * 301},
    "progress in words": {"evaluation": {"done": "most"}},
    "a phase that is a number": {"evaluation": {"phase": 3}},
    "an end that never comes": {"evaluation": {"eta_s": math.inf}},
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_a_report_that_cannot_be_is_refused_and_stored_nowhere(queued: Callable[..., tuple[Platform, str, str]], what: str) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    report(platform, held, STEP)
    token = agents.introduce(platform, held, may_read=[])
    with platform.engine.connect() as conn:
        before = conn.execute(sa.select(agents_table, jobs_table).join(jobs_table, jobs_table.c.id == agents_table.c.job_id)).all()
    with pytest.raises(InvalidRequest) as refused:
        agents.heartbeat(platform, token, Heartbeat(**{"phase": "train", "number": 10_000, **IMPOSSIBLE[what]}))
    assert refused.value.code == "report_invalid"
    with platform.engine.connect() as conn:
        assert conn.execute(sa.select(agents_table, jobs_table).join(jobs_table, jobs_table.c.id == agents_table.c.job_id)).all() == before


def test_text_that_no_store_accepts_is_kept_in_a_form_that_every_store_does(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    token = agents.introduce(platform, held_by(platform, tenant, job_id), may_read=[])
    notice = Notice(
        code="checkpoint_upload_failed", level="warn", message="no such file: a\0b", data={"half": "\ud800", "lost_s": math.inf}
    )
    line = {**STEP, "note": "a\0b"}
    ended = Exit(exit_code=1, evidence=None, stop_reason=None, error={"code": "bad_file", "message": "a\0b"})
    agents.heartbeat(platform, token, Heartbeat(phase="train", metrics=(line,), notices=(notice,), exit=ended))
    with platform.engine.connect() as conn:
        events = conn.execute(sa.select(job_events.c.message, job_events.c.data).where(job_events.c.job_id == job_id)).all()
        stored = conn.execute(sa.select(agents_table.c.exit).where(agents_table.c.job_id == job_id)).scalar_one()
    assert stored["error"] == {"code": "bad_file", "message": "a\\u0000b"}
    assert ("no such file: a\\u0000b", {"half": "\\ud800", "lost_s": None}) in [tuple(event) for event in events]
    assert [event.data["note"] for event in events if "note" in (event.data or {})] == ["a\\u0000b"]


@pytest.mark.parametrize("step", [-1, 11, 2**31])
def test_a_commit_or_a_beginning_of_a_step_that_the_job_does_not_have_is_refused(
    queued: Callable[..., tuple[Platform, str, str]], step: int
) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    agents.introduce(platform, held, may_read=[])
    for call in (
        lambda: agents.commit(platform, held, Commit(step=step, manifest_sha256="0" * 64)),
        lambda: agents.restored(platform, held, Restored(step=step)),
        lambda: agents.restored(platform, held, Restored(step=0, skipped=(Skipped(step=step, why="torn"),))),
    ):
        with pytest.raises(InvalidRequest) as refused:
            call()
        assert refused.value.code == "report_invalid"


@pytest.mark.parametrize("begins", [9, 10**11, 10**30])
def test_log_piece_beyond_the_stored_end_is_refused(queued: Callable[..., tuple[Platform, str, str]], begins: int) -> None:
    """It would count as the end of a log of that length, and every piece before it as dropped."""
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    agents.store_log(platform, held, 0, b"one\n")
    agents.store_log(platform, held, 4, b"two\n")
    with pytest.raises(InvalidRequest, match="8 bytes of the log are stored"):
        agents.store_log(platform, held, begins, b"x")
    agents.store_log(platform, held, 4, b"two\nthree\n")
    assert job_logs.read(platform, tenant, job_id, attempt=1).data == b"one\ntwo\nthree\n"


def test_agents_of_many_attempts_report_seldom_and_their_silence_is_noticed_all_the_same() -> None:
    every_s = agents.heartbeat_interval_s
    assert every_s(1) == every_s(20) == HEARTBEAT_S
    assert every_s(100) < every_s(200) < every_s(300)
    assert 300 / every_s(300) * agents.HEARTBEAT_CPU_S <= agents.HEARTBEAT_CORES + 1e-9
    assert 2 * every_s(10_000) <= HEARTBEAT_LIMIT_S, "one may be missed"


def test_the_interval_that_an_agent_is_told_is_stored_with_its_heartbeat(queued: Callable[..., tuple[Platform, str, str]]) -> None:
    platform, tenant, job_id = queued()
    held = held_by(platform, tenant, job_id)
    token = agents.introduce(platform, held, may_read=[])
    now = platform.clock()
    with platform.engine.begin() as conn:
        job = dict(conn.execute(sa.select(jobs_table).where(jobs_table.c.id == job_id)).mappings().one())
        others = [f"{job_id}-{n}" for n in range(99)]
        conn.execute(sa.insert(jobs_table), [{**job, "id": other} for other in others])
        row = {"attempt": 1, "pool": held.pool, "num_gpus": 1, "granted_at": now}
        conn.execute(sa.insert(reservations), [{**row, "job_id": other} for other in others])
        attempt = {"attempt": 1}
        conn.execute(sa.insert(attempts_table), [{**attempt, "job_id": other, "workload": f"{other}-a1"} for other in others])
        agent = {"attempt": 1, "may_read": [], "reported_step": 0, "reported_validation": 0, "beat": 0, "notices": 0}
        gangs = [{**agent, "job_id": other, "node": node} for other in others for node in range(2)]
        conn.execute(sa.insert(agents_table), gangs)
    answer = agents.heartbeat(platform, token, Heartbeat(phase="train"))
    assert answer.next_s >= agents.heartbeat_interval_s(199) > agents.heartbeat_interval_s(100) > HEARTBEAT_S
    with platform.engine.begin() as conn:
        stored = conn.execute(sa.select(agents_table.c.facts).where(agents_table.c.job_id == job_id)).scalar_one()
        conn.execute(sa.update(reservations).where(reservations.c.job_id.in_(others)).values(released_at=now))
    assert stored["next_s"] == answer.next_s
