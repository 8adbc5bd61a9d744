"""Watching an attempt on a real database: verdicts as events and rows, one an episode, whoever follows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from agent.uploads.checkpoint_uploads import upload_failed
from control_plane.attempts import health
from control_plane.attempts import service as attempts
from control_plane.attempts.service import Claim, Ending
from control_plane.attempts.tables import health_verdicts
from control_plane.jobs import service as jobs
from control_plane.jobs.tables import job_events
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.jobs.transitions import record
from control_plane.platform.context import Platform
from control_plane.platform.job_events import metrics_event
from control_plane.platform.protocols import RunLog, TrackedRun, WorkloadPhase, WorkloadStatus
from control_plane.queue import cycle
from core.errors import Fault
from engine.training.failures import FailureClass, Retry
from tests.support.jobs.claimed_job import ending, failure, held_by, report, resume_from
from tests.support.jobs.started_job import start_job
from tests.support.jobs.training_specs import SPEC

POOLS = """\
pools:
  - name: local
    gpu_type: {gpu_type}
    nodes: [{{name: local, gpus: 1}}]
"""


@pytest.fixture
def held(fresh_platform: Platform, write_chat_rows: Callable[..., Any]) -> Claim:
    """A started attempt of a new job."""
    return start_job(fresh_platform, write_chat_rows)


def steps(first: int, last: int, *, pace: float = 1000.0, loss: float = 1.0) -> list[dict[str, Any]]:
    shared = {"total_steps": 1000, "loss": loss, "tokens_per_s": pace, "step_s": 1.0, "data_s": 0.0}
    return [{"step": s, "time": 1000.0 + s, **shared} for s in range(first, last + 1)]


def tell(watch: health.Watch, *lines: dict[str, Any]) -> None:
    """Have the agent report lines, and the watch look."""
    report(watch.platform, watch.held, *lines)
    watch.look()


def events(platform: Platform, job_id: str) -> list[Any]:
    query = sa.select(job_events).where(job_events.c.job_id == job_id).order_by(job_events.c.seq)
    with platform.engine.connect() as conn:
        return [e for e in conn.execute(query).all() if not e.code.startswith("job_") and e.type == "message"]


def succeed(platform: Platform, claim: Claim, *, tokens_per_s: float) -> None:
    done = {"state": "succeeded", "tokens_per_s": tokens_per_s, "base_digest": SPEC.base_digest, "finished_at": platform.clock()}
    with platform.engine.begin() as conn:
        conn.execute(sa.update(jobs_table).where(jobs_table.c.id == claim.job_id).values(**done))
    cycle.release(platform, claim.job_id, claim.attempt)


def test_a_verdict_is_one_event_an_episode_and_says_when_it_is_over(fresh_platform: Platform, held: Claim) -> None:
    watch = health.begin(fresh_platform, held)
    for silence in (12.0, 31.0, 32.0, 33.0):
        watch.record_silence(silence_s=silence, running=True)
    (verdict,) = health.open_verdicts(fresh_platform)
    assert (verdict.code, verdict.audience, verdict.tenant_id, verdict.attempt) == ("heartbeat_missed", "operator", held.tenant, 1)
    watch.record_silence(silence_s=20.0, running=True)
    assert len(health.open_verdicts(fresh_platform)) == 1, "between the limits it holds"
    watch.record_silence(silence_s=0.5, running=True)
    assert health.open_verdicts(fresh_platform) == []
    raised, over = events(fresh_platform, held.job_id)
    assert (raised.code, raised.level, raised.data["audience"], raised.data["limit"]) == ("heartbeat_missed", "warn", "operator", 30.0)
    assert (over.code, over.level, over.data["verdict"]) == ("health_recovered", "info", "heartbeat_missed")
    watch.record_silence(silence_s=40.0, running=True)
    assert [e.code for e in events(fresh_platform, held.job_id)] == ["heartbeat_missed", "health_recovered", "heartbeat_missed"]


def test_a_new_follower_takes_over_what_was_raised_and_what_was_measured(fresh_platform: Platform, held: Claim) -> None:
    first = health.begin(fresh_platform, held)
    for lines in (steps(1, 40), steps(41, 70, pace=300.0)):
        tell(first, *lines)
    assert [e.code for e in events(fresh_platform, held.job_id)] == ["throughput_low"]
    second = health.begin(fresh_platform, held)
    assert len(second.signs.steps) == 70
    tell(second, *steps(71, 72, pace=300.0))
    assert [e.code for e in events(fresh_platform, held.job_id)] == ["throughput_low"]
    tell(second, *steps(73, 100, pace=900.0))
    assert [e.code for e in events(fresh_platform, held.job_id)] == ["throughput_low", "health_recovered"]


def test_a_new_follower_leaves_slow_gpus_to_those_who_measure_their_clocks(fresh_platform: Platform, held: Claim) -> None:
    assert health.judge_clocks(fresh_platform, {held.workload: {"gpu0": 900.0, "gpu1": 1800.0}}) == 1
    watch = health.begin(fresh_platform, held)
    tell(watch, *steps(1, 2))
    assert [v.code for v in health.open_verdicts(fresh_platform)] == ["gpu_slow"]
    assert health.judge_clocks(fresh_platform, {held.workload: {"gpu0": 1800.0, "gpu1": 1800.0}}) == 0
    assert [e.code for e in events(fresh_platform, held.job_id)] == ["gpu_slow", "health_recovered"]


def test_a_resumed_attempt_is_judged_by_its_own_steps(fresh_platform: Platform, held: Claim) -> None:
    report(fresh_platform, held, *steps(1, 40))
    attempts.finish(fresh_platform, held, ending(failure("node_lost", Fault.PLATFORM, Retry.RESUME), step=40))
    second = held_by(fresh_platform, held.tenant, held.job_id)
    attempts.mark_started(fresh_platform, second, started_at=2000.0)
    watch = health.begin(fresh_platform, second)
    resume_from(fresh_platform, second, 40)
    for first in range(41, 71):
        tell(watch, *steps(first, first, pace=400.0))
    assert watch.signs.expected is not None and watch.signs.expected.tokens_per_s == 400.0
    assert "throughput_low" not in {event.code for event in events(fresh_platform, held.job_id)}


def test_the_pace_of_jobs_alike_is_expected_of_the_next_one(
    fresh_platform: Platform, write_chat_rows: Callable[..., Any]
) -> None:  # fmt: skip
    for pace in (900.0, 1000.0, 5000.0):
        succeed(fresh_platform, start_job(fresh_platform, write_chat_rows), tokens_per_s=pace)
    claim = start_job(fresh_platform, write_chat_rows)
    watch = health.begin(fresh_platform, claim)
    assert watch.signs.expected is not None and watch.signs.expected.tokens_per_s == 1000.0
    tell(watch, *steps(1, 20, pace=400.0))
    (event,) = events(fresh_platform, claim.job_id)
    assert "40% of the 1,000 expected (the median of 3 earlier jobs like it on pool local)" in event.message
    rows = SPEC.optimization.per_device_batch_size
    for max_seq_len, per_device, alike in (
        (SPEC.max_seq_len // 2, rows, True), (2 * SPEC.max_seq_len, rows, True), (SPEC.max_seq_len // 2, 2 * rows, True),
        (2 * SPEC.max_seq_len + 2, rows, False), (SPEC.max_seq_len // 2 - 2, rows, False), (SPEC.max_seq_len, 3 * rows, False),
    ):  # fmt: skip
        optimization = replace(SPEC.optimization, per_device_batch_size=per_device)
        other = replace(claim, frozen_spec=replace(SPEC, max_seq_len=max_seq_len, optimization=optimization))
        assert (health.begin(fresh_platform, other).signs.expected is not None) == alike, (max_seq_len, per_device)


@pytest.mark.parametrize(("gpu_type", "slow"), [("h100-80gb", True), ("local", False)])
def test_first_job_that_is_slow_from_its_first_step_is_reported(
    fresh_platform: Platform, held: Claim, tmp_path: Path, gpu_type: str, slow: bool
) -> None:
    (tmp_path / "pools.yaml").write_text(POOLS.format(gpu_type=gpu_type))
    platform = replace(fresh_platform, settings=replace(fresh_platform.settings, pools_file=tmp_path / "pools.yaml"))
    with platform.engine.begin() as conn:
        by_the_model = {"modelled_s": 515.0, "setup_s": 15.0, "expected_s": 1030.0, "total_steps": 1000}  # a second for each step
        conn.execute(sa.update(jobs_table).where(jobs_table.c.id == held.job_id).values(by_the_model))
    watch = health.begin(platform, held)
    tell(watch, *({**step, "step_s": 2.5} for step in steps(1, 14, pace=400.0)))
    found = events(platform, held.job_id)
    assert [e.code for e in found] == (["throughput_low"] if slow else [])
    assert not slow or "40% of the 1,000 expected (the cost model, corrected by earlier jobs on such GPUs)" in found[0].message


def test_run_that_beats_the_cost_model_is_held_against_its_own_steps(fresh_platform: Platform, held: Claim, tmp_path: Path) -> None:
    (tmp_path / "pools.yaml").write_text(POOLS.format(gpu_type="h100-80gb"))
    platform = replace(fresh_platform, settings=replace(fresh_platform.settings, pools_file=tmp_path / "pools.yaml"))
    with platform.engine.begin() as conn:
        by_the_model = {"modelled_s": 5015.0, "setup_s": 15.0, "expected_s": 5015.0, "total_steps": 1000}
        conn.execute(sa.update(jobs_table).where(jobs_table.c.id == held.job_id).values(by_the_model))
    watch = health.begin(platform, held)
    tell(watch, *steps(1, 40), *({**step, "step_s": 2.5} for step in steps(41, 70, pace=400.0)))
    assert [e.code for e in events(platform, held.job_id)] == ["throughput_low"]


def test_divergence_is_told_from_the_exit_evidence_and_the_end_closes_what_is_raised(fresh_platform: Platform, held: Claim) -> None:
    watch = health.begin(fresh_platform, held)
    watch.record_silence(silence_s=60.0, running=True)
    failed = FailureClass(code="diverged", fault=Fault.USER, retry=Retry.NEVER, message="not finite", remedy="lower learning_rate")
    status = WorkloadStatus(name="w", phase=WorkloadPhase.EXITED, exit_code=76)
    watch.judge_end(Ending(outcome="diverged", failure=failed, last_step=7, trained_tokens=0, status=status))
    assert [(e.code, e.level) for e in events(fresh_platform, held.job_id)] == [("heartbeat_missed", "warn"), ("loss_not_finite", "error")]
    with fresh_platform.engine.connect() as conn:
        assert conn.execute(sa.select(sa.func.count()).where(health_verdicts.c.cleared_at.is_(None))).scalar_one() == 0


def test_the_validation_of_earlier_attempts_counts(fresh_platform: Platform, held: Claim) -> None:
    for step, loss in ((10, 1.0), (20, 0.5), (30, 0.9)):
        validation = {"step": step, "eval_loss": loss, "perplexity": 2.0, "time": 1.0}
        report(fresh_platform, held, *steps(step, step), validation)
    watch = health.begin(fresh_platform, held)
    tell(watch, {"step": 40, "eval_loss": 0.95, "perplexity": 2.0, "time": 1.0})
    (event,) = events(fresh_platform, held.job_id)
    assert (event.code, event.data["audience"]) == ("overfitting", "tenant")
    assert "best 0.5000 at step 20" in event.message


def test_an_attempt_that_was_replaced_has_no_say(fresh_platform: Platform, held: Claim) -> None:
    watch = health.begin(fresh_platform, replace(held, attempt=0))
    watch.record_silence(silence_s=60.0, running=True)
    assert events(fresh_platform, held.job_id) == []


@dataclass(kw_only=True)
class MemoryTracker:
    """Keeps runs in memory."""

    broken: str | None = None
    runs: list[TrackedRun] = field(default_factory=list)
    lines: list[Any] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    tables: dict[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    outcome: str | None = None
    flushed: bool = False

    def begin(self, run: TrackedRun) -> RunLog:
        self.runs.append(run)
        return self

    def log(self, metrics: Sequence[Any]) -> None:
        self.lines += metrics

    def attach(self, *given: Any) -> None:
        """Of a run, or of one that has ended: that run, its files, and its tables if it has any."""
        _, files, tables = given if len(given) == 3 else (None, *given, {})
        self.files |= files
        self.tables |= tables

    def problem(self) -> str | None:
        return self.broken

    def end(self, *, outcome: str) -> None:
        self.outcome = outcome

    def flush(self, *, timeout_s: float) -> None:
        self.flushed = True


def test_the_tracker_is_given_the_run_every_line_and_files(fresh_platform: Platform, held: Claim) -> None:
    tracker = MemoryTracker()
    fresh_platform.objects.put_bytes(f"{attempts.final_prefix(held)}/adapter_config.json", b"{}")
    watch = health.begin(replace(fresh_platform, tracker=tracker), held)
    tell(watch, {**steps(1, 1)[0], "rewards/margins": 0.25}, {"step": 1, "eval_loss": 0.5, "perplexity": 1.6, "time": 1.0})
    status = WorkloadStatus(name="w", phase=WorkloadPhase.EXITED, exit_code=0)
    ending = Ending(outcome="succeeded", failure=None, last_step=1, trained_tokens=0, status=status)
    watch.judge_end(ending)
    watch.end_tracking(ending)
    (run,) = tracker.runs
    assert (run.tenant, run.name) == (held.tenant, held.workload)
    assert run.tags["dataset"] == "ds_0" and run.tags["spec_sha256"] == SPEC.sha256 and run.tags["pack"] == "pk_0"
    assert (run.params["optimization.learning_rate"], run.params["lora.rank"]) == ("0.001", "8")
    assert [line.get("train_loss") for line in tracker.lines] == [1.0, None]
    assert set(tracker.files) == {"spec.json", "step_metrics.csv", "model/adapter_config.json"}
    assert json.loads(tracker.files["spec.json"])["lora"]["rank"] == 8
    assert tracker.lines[1] == {"step": 1, "valid_loss": 0.5, "valid_perplexity": 1.6, "time": 1.0}
    assert (tracker.outcome, tracker.flushed) == ("succeeded", False), "who follows a job waits for no tracker"
    health.flush(watch.platform)
    assert tracker.flushed


def test_a_tracker_that_fails_is_told_of_once(fresh_platform: Platform, held: Claim, caplog: pytest.LogCaptureFixture) -> None:
    refused = "OperationalError: postgresql://mlflow:hunter2@db/mlflow refused"
    watch = health.begin(replace(fresh_platform, tracker=MemoryTracker(broken=refused)), held)
    for _ in range(3):
        watch.record_silence(silence_s=0.0, running=True)
    (event,) = events(fresh_platform, held.job_id)
    assert (event.code, event.level) == ("tracking_failed", "warn")
    assert "refused" not in event.message, "what the tracker said is logged"
    assert "db/mlflow refused" in caplog.text and "hunter2" not in caplog.text
    assert "tracking_failed" not in shown(fresh_platform, held)


def shown(platform: Platform, held: Claim) -> list[str]:
    """Codes of the events that the tenant is shown, which are the same in the list and in the stream."""
    listed = [e.code for e in jobs.list_events(platform, held.tenant, held.job_id, limit=100).items]
    streamed = [e.code for e in jobs.events_since(platform, held.tenant, held.job_id, 0)[0]]
    assert listed[::-1] == streamed
    return streamed


def test_what_concerns_operators_alone_is_not_shown_to_the_tenant(fresh_platform: Platform, held: Claim) -> None:
    watch = health.begin(fresh_platform, held)
    watch.record_silence(silence_s=60.0, running=True)
    watch.record_silence(silence_s=0.0, running=True)
    tell(watch, *steps(1, 40))
    tell(watch, *steps(41, 60, loss=5.0))
    failed = upload_failed("the checkpoint of step 7", 7, OSError("s3://key:hunter2@store refused"))
    report(fresh_platform, held, notices=(failed,))
    assert [e.code for e in events(fresh_platform, held.job_id)][:2] == ["heartbeat_missed", "health_recovered"]
    told = shown(fresh_platform, held)
    assert told[-2:] == ["loss_exploding", "checkpoint_upload_failed"]
    assert not {"heartbeat_missed", "health_recovered"} & set(told)
    newest = jobs.list_events(fresh_platform, held.tenant, held.job_id, limit=1).items[0]
    assert "hunter2" not in newest.message and "refused" not in newest.message


def test_an_end_that_comes_late_leaves_the_verdicts_of_the_next_attempt(fresh_platform: Platform, held: Claim) -> None:
    late = health.begin(fresh_platform, held)
    values = {"id": "verdict-2", "job_id": held.job_id, "attempt": 2, "code": "data_starved", "audience": "operator", "level": "warn"}
    with fresh_platform.engine.begin() as conn:
        conn.execute(sa.insert(health_verdicts).values(**values, message="m", data={}, raised_at=fresh_platform.clock()))
    status = WorkloadStatus(name="w", phase=WorkloadPhase.EXITED, exit_code=0)
    late.judge_end(Ending(outcome="succeeded", failure=None, last_step=1, trained_tokens=0, status=status))
    assert [v.code for v in health.open_verdicts(fresh_platform)] == ["data_starved"]


def test_a_plateau_is_told_once_an_attempt(fresh_platform: Platform, held: Claim) -> None:
    watch = health.begin(fresh_platform, held)
    tell(watch, *steps(1, 450))
    tell(watch, *steps(451, 600, loss=0.5))
    tell(watch, *steps(601, 780))
    codes = ["loss_plateau", "health_recovered"]
    assert [e.code for e in events(fresh_platform, held.job_id)] == codes
    tell(health.begin(fresh_platform, held), *steps(601, 785))
    assert [e.code for e in events(fresh_platform, held.job_id)] == codes


def test_an_error_of_the_watch_does_not_reach_the_follower(fresh_platform: Platform, held: Claim) -> None:
    watch = health.begin(fresh_platform, held)
    with fresh_platform.engine.begin() as conn:
        record(conn, held.job_id, metrics_event({"train_loss": 1.0}), now=fresh_platform.clock())  # of no step
    watch.look()
    watch.record_silence(silence_s=60.0, running=True)
    assert [e.code for e in events(fresh_platform, held.job_id)] == ["heartbeat_missed"]


def test_the_message_of_a_step_says_what_the_method_is_about() -> None:
    assert metrics_event({"step": 3, "total_steps": 9, "train_loss": 0.5, "rewards/margins": 1.25}).message == (
        "Step 3/9: training loss=0.5000, reward margin=1.2500"
    )
    assert (
        metrics_event({"step": 3, "valid_loss": 0.5, "valid_perplexity": 1.6}).message
        == "Step 3: validation loss=0.5000, perplexity=1.6000"
    )
