"""Following real processes on a real database and a real store: what is committed, resumed, skipped and given up."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import sqlalchemy as sa

from agent.api_client import ApiClient, Fenced
from agent.messages import HEARTBEAT_S, Commit, Heartbeat, Restored, WriteGrant, WriteRequest
from agent.objects import Objects
from agent.restore import restore
from control_plane.attempts import agents
from control_plane.attempts import service as attempts
from control_plane.attempts.claims import STOP_GRACE_S
from control_plane.attempts.tables import agent_tokens
from control_plane.attempts.tables import agents as agents_table
from control_plane.billing import ledger
from control_plane.jobs import service as jobs
from control_plane.jobs.tables import jobs as jobs_table
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.platform.protocols import WorkloadPhase, WorkloadStatus
from control_plane.platform.secrets import sha256_of
from control_plane.platform.settings import load
from control_plane.worker.attempt_watch import LOOK_S
from core import layout
from core.errors import Fault
from engine.training.checkpoints import CHECKPOINT_MANIFEST, RESUMABLE, committed_checkpoints, read_manifest
from engine.training.failures import HEARTBEAT_LIMIT_S
from engine.training.spec import EarlyStopping
from resources.object_store import LocalObjectStore
from resources.tracking.mlflow_tracker import MlflowTracker
from tests.support.jobs.followed_jobs import Job, Scripted, plain_weights, until
from tests.support.jobs.sealed_checkpoints import commit
from tests.support.jobs.training_specs import SPEC
from tests.support.processes.scripted_training import Scenario
from tests.support.processes.small_disk import small_disk

BUSY_MACHINE_S = 3.0
"""Spent by a follower between two looks: it writes to the database and reads files."""


def test_a_whole_run_commits_its_checkpoints_and_the_finished_model(new_job: Callable[..., Job]) -> None:
    job = new_job()
    ending, state = job.train(Scenario(steps=6))
    assert (ending.outcome, ending.last_step, ending.trained_tokens, state) == ("succeeded", 6, 60, JobState.EVALUATING)
    assert job.steps()[0] == 6
    assert job.weights() == plain_weights(6)
    assert not job.events("checkpoint_upload_failed", "checkpoint_skipped")
    assert len(job.events("metrics")) == 6
    assert job.platform.objects.exists(f"{layout.attempt_prefix(job.tenant, job.id, 1)}/train.log")
    assert not (job.work_dir / "uploads").exists()


def test_kill_9_goes_on_from_the_store_on_another_machine(new_job: Callable[..., Job], tmp_path: Path) -> None:
    job = new_job()
    ending, state = job.train(Scenario(steps=8, end_at={"step": 5, "outcome": "kill"}))
    assert (ending.outcome, state) == ("node_lost", JobState.QUEUED)
    assert job.steps()[0] == 4
    elsewhere = job.on_another_machine(tmp_path / "other")
    ending, state = elsewhere.train(Scenario(steps=8))
    assert (ending.outcome, state) == ("succeeded", JobState.EVALUATING)
    assert job.from_steps() == [0, 4]
    assert job.weights() == plain_weights(8)


@pytest.mark.parametrize("damage", ["a bit flipped", *(pytest.param(d, marks=pytest.mark.slow) for d in ("manifest flipped", "removed"))])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(new_job: Callable[..., Job], tmp_path: Path, damage: str) -> None:
    job = new_job()
    job.train(Scenario(steps=8, each_stored=True, end_at={"step": 5, "outcome": "kill"}))
    assert job.steps() == [4, 2]
    key = f"{attempts.committed(job.platform, job.id)[0].object_prefix}/{CHECKPOINT_MANIFEST if 'manifest' in damage else 'optimizer.pt'}"
    data = bytearray(job.platform.objects.get_bytes(key))
    data[len(data) // 2] ^= 1
    if damage == "removed":
        job.platform.objects.delete(key)
    else:
        job.platform.objects.put_bytes(key, bytes(data))
    elsewhere = job.on_another_machine(tmp_path / "other")
    ending, _ = elsewhere.train(Scenario(steps=8))
    assert ending.outcome == "succeeded"
    assert job.from_steps() == [0, 2]
    (event,) = job.events("checkpoint_skipped")
    assert event.data == {"step": 4, "used": 2} and "Training continues from step 2" in event.message
    assert job.weights() == plain_weights(8)


@pytest.mark.slow
def test_damage_on_this_machine_is_mended_from_the_store(new_job: Callable[..., Job]) -> None:
    job = new_job()
    job.train(Scenario(steps=8, end_at={"step": 5, "outcome": "kill"}))
    (job.work_dir / "checkpoints" / "step-00000004" / "optimizer.pt").write_bytes(b"torn")
    job.train(Scenario(steps=8))
    assert job.from_steps() == [0, 4]
    assert "optimizer.pt" in job.events("checkpoint_skipped")[0].message
    assert job.weights() == plain_weights(8)


def test_out_of_memory_goes_on_from_the_checkpoint_with_half_the_batch(new_job: Callable[..., Job]) -> None:
    job = new_job()
    ending, state = job.train(Scenario(steps=6, end_at={"step": 5, "outcome": "oom"}))
    assert (ending.outcome, state) == ("oom", JobState.QUEUED)
    ending, state = job.train(Scenario(steps=6))
    assert (ending.outcome, state) == ("succeeded", JobState.EVALUATING)
    assert job.from_steps() == [0, 4]
    final = read_manifest(job.work_dir / "final")
    with job.platform.engine.connect() as conn:
        spec = conn.execute(sa.select(jobs_table.c.spec).where(jobs_table.c.id == job.id)).scalar_one()
    assert (spec["optimization"]["per_device_batch_size"], spec["optimization"]["accumulation_steps"]) == (2, 4)
    assert final.attempt == 2
    assert job.weights() == plain_weights(6)


def test_a_pause_ends_when_the_checkpoint_that_it_made_is_stored(new_job: Callable[..., Job], tmp_path: Path) -> None:
    store = Slow(tmp_path / "objects")
    job = new_job(store)
    held, thread, endings = job.following(Scenario(steps=9, every=100, hold_at=3))
    until(lambda: jobs.get(job.platform, job.tenant, job.id).job.step == 3)
    jobs.pause(job.platform, job.tenant, job.id)
    until(lambda: store.begun)
    time.sleep(1.0)
    store.line.set()
    thread.join(120)
    assert attempts.finish(job.platform, held, endings[0]) is JobState.PAUSED
    (step,) = job.steps()
    jobs.resume(job.platform, job.tenant, job.id)
    job.on_another_machine(tmp_path / "other").train(Scenario(steps=9))
    assert job.from_steps() == [0, step]
    assert job.weights() == plain_weights(9)


@pytest.mark.slow
def test_a_store_that_is_full_delays_no_step_and_is_told_of_once(new_job: Callable[..., Job], tmp_path: Path) -> None:
    with small_disk(tmp_path / "store", "200k") as disk:
        job = new_job(LocalObjectStore(disk.root / "objects"))
        disk.fill()
        held, thread, endings = job.following(Scenario(steps=12, every=2, hold_at=8, step_s=0.3))
        until(lambda: jobs.get(job.platform, job.tenant, job.id).job.step == 8)
        assert job.steps() == []
        assert len(job.events("checkpoint_upload_failed")) == 1
        disk.free()
        until(lambda: 8 in job.steps())
        assert len(job.events("checkpoint_upload_recovered")) == 1
        (job.work_dir / "go").touch()
        thread.join(120)
        assert attempts.finish(job.platform, held, endings[0]) is JobState.EVALUATING
        assert job.weights() == plain_weights(12)
        assert len(job.events("checkpoint_upload_failed")) == 1


@pytest.mark.slow
def test_a_finished_model_that_no_store_takes_is_made_again_from_the_checkpoint_on_its_machine(
    new_job: Callable[..., Job], tmp_path: Path
) -> None:
    with small_disk(tmp_path / "store", "200k") as disk:
        job = new_job(LocalObjectStore(disk.root / "objects"))
        disk.fill()
        ending, state = job.train(Scenario(steps=4))
        assert (ending.outcome, state) == ("internal", JobState.QUEUED)
        assert ending.failure is not None and ending.failure.fault is Fault.PLATFORM
        assert len(job.events("checkpoint_upload_abandoned")) == 1
        disk.free()
        assert job.train(Scenario(steps=4))[1] is JobState.EVALUATING
        assert job.from_steps() == [0, 4]
        assert job.weights() == plain_weights(4)
        assert len(job.events("metrics")) == 4


@pytest.mark.slow
def test_a_checkpoint_that_was_never_uploaded_is_used_on_its_machine_and_uploaded_by_the_next_attempt(
    new_job: Callable[..., Job], tmp_path: Path
) -> None:
    with small_disk(tmp_path / "store", "200k") as disk:
        job = new_job(LocalObjectStore(disk.root / "objects"))
        disk.fill()
        _, state = job.train(Scenario(steps=8, end_at={"step": 5, "outcome": "kill"}))
        assert (job.steps(), state) == ([], JobState.QUEUED)
        disk.free()
        held, thread, endings = job.following(Scenario(steps=8, every=100, hold_at=6))
        until(lambda: job.steps() == [4])
        (job.work_dir / "go").touch()
        thread.join(120)
        assert attempts.finish(job.platform, held, endings[0]) is JobState.EVALUATING
        assert job.from_steps() == [0, 4]
        assert job.weights() == plain_weights(8)


class Slow(LocalObjectStore):
    """A store over a slow line; it remembers what was begun."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.begun: list[str] = []
        self.line = threading.Event()

    def begin_upload(self, key: str, part_sha256: Sequence[str], upload_id: str | None = None) -> WriteGrant:
        if "/checkpoints/" in key:
            self.begun.append(key.split("/")[-2])
            self.line.wait(20)
        return super().begin_upload(key, part_sha256, upload_id)


@pytest.mark.slow
def test_a_slow_store_delays_no_step_and_only_the_newest_waits(new_job: Callable[..., Job], tmp_path: Path) -> None:
    store = Slow(tmp_path / "objects")
    job = new_job(store)
    held, thread, endings = job.following(Scenario(steps=12, every=1, hold_at=11, step_s=0.15))
    until(lambda: jobs.get(job.platform, job.tenant, job.id).job.step == 11)
    first = store.begun[0]
    assert set(store.begun) == {first} and job.steps() == []
    time.sleep(1.0)
    store.line.set()
    until(lambda: 11 in job.steps())
    assert sorted({*store.begun}) == sorted({first, "step-00000011"}), "what was made meanwhile is skipped"
    (job.work_dir / "go").touch()
    thread.join(120)
    assert attempts.finish(job.platform, held, endings[0]) is JobState.EVALUATING


@pytest.mark.slow
def test_what_an_early_stop_goes_back_to_is_stored_kept_and_brought_to_another_machine(new_job: Callable[..., Job], tmp_path: Path) -> None:
    job = new_job(optimization=replace(SPEC.optimization, early_stopping=EarlyStopping(patience=1)))
    job.train(Scenario(steps=9, every=1, best_step=1, each_stored=True, end_at={"step": 6, "outcome": "kill"}))
    assert job.steps() == [6, 5, 4, 1]
    elsewhere = job.on_another_machine(tmp_path / "other")
    elsewhere.train(Scenario(steps=9, every=100))
    assert [p.name for p in committed_checkpoints(elsewhere.work_dir / "checkpoints")] == ["step-00000001", "step-00000006"]
    assert job.weights() == plain_weights(9)


@pytest.mark.slow
def test_the_best_checkpoint_is_stored_though_others_followed_it_between_two_looks(new_job: Callable[..., Job]) -> None:
    job = new_job(optimization=replace(SPEC.optimization, early_stopping=EarlyStopping(patience=9)))
    job.train(Scenario(steps=9, every=1, best_step=1, step_s=0.0, end_at={"step": 6, "outcome": "kill"}))
    assert {1, 6} <= {*job.steps()}
    assert not (job.work_dir / "uploads").exists()


def test_a_stale_attempt_commits_nothing_and_deletes_nothing(new_job: Callable[..., Job]) -> None:
    job = new_job()
    job.train(Scenario(steps=9, every=1, each_stored=True, end_at={"step": 4, "outcome": "kill"}))
    token = "of the first attempt"
    with job.platform.engine.begin() as conn:
        conn.execute(sa.insert(agent_tokens).values(sha256=sha256_of(token), job_id=job.id, attempt=1))
    held = job.claim()
    agents.introduce(job.platform, held, may_read=[])
    before = {
        info.key: job.platform.objects.get_bytes(info.key) for info in job.platform.objects.list(layout.job_prefix(job.tenant, job.id))
    }
    rows, events = attempts.committed(job.platform, job.id), len(job.events("metrics", "checkpoint", "checkpoint_skipped"))

    stale = ApiClient(job.platform.settings.internal_url, token)
    key = f"{rows[0].object_prefix}/optimizer.pt"
    line = {"step": 9, "total_steps": 9, "loss": 1.0, "time": time.time()}
    calls: list[Callable[[], object]] = [
        lambda: stale.heartbeat(Heartbeat(phase="train", metrics=(line,))),
        lambda: stale.restored(Restored(step=0)),
        lambda: stale.commit(Commit(step=9, manifest_sha256=rows[0].manifest_sha256)),
        lambda: stale.commit(Commit(step=9, manifest_sha256=rows[0].manifest_sha256, final=True)),
        lambda: stale.read_urls((key,)),
        lambda: stale.write_urls(WriteRequest(key=key, part_sha256=("00",))),
        lambda: stale.store_log(0, b"x"),
    ]
    with contextlib.closing(stale):
        for call in calls:
            with pytest.raises(Fenced):
                call()

    after = {
        info.key: job.platform.objects.get_bytes(info.key) for info in job.platform.objects.list(layout.job_prefix(job.tenant, job.id))
    }
    assert after == before and attempts.committed(job.platform, job.id) == rows
    assert len(job.events("metrics", "checkpoint", "checkpoint_skipped")) == events


@pytest.mark.slow
def test_a_training_that_starts_anew_is_not_crowded_out_by_what_another_one_left(new_job: Callable[..., Job]) -> None:
    job = new_job()
    ending, state = job.train(Scenario(steps=9, each_stored=True, end_at={"step": 8, "outcome": "oom", "attempt": 1}))
    assert (ending.outcome, state, job.steps()[0]) == ("oom", JobState.QUEUED, 8)
    with job.platform.engine.begin() as conn:
        this_job = jobs_table.c.id == job.id
        spec = conn.execute(sa.select(jobs_table.c.spec).where(this_job)).scalar_one()
        conn.execute(sa.update(jobs_table).where(this_job).values(spec={**spec, "seed": spec["seed"] + 1}))
    job.train(Scenario(steps=9, each_stored=True, end_at={"step": 5, "outcome": "kill", "attempt": 2}))
    assert job.from_steps() == [0, 0]
    assert job.steps() == [4, 2]
    assert [p.name for p in committed_checkpoints(job.work_dir / "checkpoints")] == ["step-00000002", "step-00000004"]
    assert "a different training job" in job.events("checkpoint_skipped")[0].message
    assert job.train(Scenario(steps=9))[1] is JobState.EVALUATING
    assert job.from_steps() == [0, 0, 4]


def test_no_step_is_announced_that_the_strategy_cannot_go_on_from(new_job: Callable[..., Job]) -> None:
    job = new_job(adapter="full", lora=None, strategy="zero2")
    held = job.claim()

    def fill(directory: Path) -> None:
        for name in RESUMABLE:
            (directory / name.replace("*", "")).write_text(name)

    commit(job.work_dir / "checkpoints" / "step-00000004", fill, spec=held.spec, step=4, attempt=1, created_at=0.0)
    found = restore(Objects(ApiClient("http://127.0.0.1:9", "")), held.spec, (), job.work_dir / "checkpoints")
    assert found.step == 0 and "zero/*model_states.pt is not part of the manifest" in found.skipped[0].why


@pytest.mark.slow
def test_a_workload_that_beats_and_gets_nowhere_is_ended_and_resumed(new_job: Callable[..., Job]) -> None:
    job = new_job()
    ending, state = job.train(Scenario(steps=9, hold_at=3, still_s=700.0))
    assert (ending.outcome, state) == ("stalled", JobState.QUEUED)
    assert ending.failure is not None and "no progress for 70" in ending.failure.message
    assert job.train(Scenario(steps=9))[1] is JobState.EVALUATING
    assert job.weights() == plain_weights(9)


@pytest.mark.slow
def test_a_silent_workload_that_ignores_sigterm_is_killed_and_resumed(new_job: Callable[..., Job]) -> None:
    job = new_job()
    quick = replace(job.platform.settings, heartbeat_timeout_s=3.0, heartbeat_grace_s=1.0)
    job.platform = replace(job.platform, settings=quick)
    ending, state = job.train(Scenario(steps=9, hold_at=3, deaf=True))
    assert (ending.outcome, state) == ("stalled", JobState.QUEUED)
    assert ending.failure is not None and "no heartbeat for 3 s (at most 3)" in ending.failure.message
    last_beat = (job.work_dir / "heartbeat.json").stat().st_mtime
    assert ending.status.ended_at is not None
    assert 4.0 <= ending.status.ended_at - last_beat < STOP_GRACE_S, "the timeout and its own grace, which is shorter"
    assert job.train(Scenario(steps=9))[1] is JobState.EVALUATING
    assert job.weights() == plain_weights(9)


def test_a_silent_workload_has_ended_within_60_s_by_default() -> None:
    settings = load({})
    looks_s = LOOK_S + HEARTBEAT_S
    assert settings.heartbeat_timeout_s > HEARTBEAT_LIMIT_S, "operators are alerted before it is stopped"
    assert settings.heartbeat_timeout_s + settings.heartbeat_grace_s + looks_s < 60 - BUSY_MACHINE_S


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_an_attempt_in_mlflow_shows_its_spec_curve_table_and_model(new_job: Callable[..., Job], tmp_path: Path) -> None:
    job = new_job()
    job.platform = replace(job.platform, tracker=MlflowTracker(uri=f"sqlite:///{tmp_path}/mlflow.db", objects=job.platform.objects))
    assert job.train(Scenario(steps=4))[1] is JobState.EVALUATING
    assert job.platform.tracker is not None
    job.platform.tracker.flush(timeout_s=60.0)
    objects = job.platform.objects
    found = {info.key.partition("/artifacts/")[2]: info.key for info in objects.list(layout.mlflow_prefix(job.tenant))}
    assert set(found) == {"spec.json", "loss_curve.svg", "step_metrics.csv", "model/adapter_config.json", "model/manifest.json"}
    assert json.loads(objects.get_bytes(found["spec.json"]))["base_model"] == SPEC.base_model
    assert objects.get_bytes(found["loss_curve.svg"]).startswith(b"<svg")
    assert len(objects.get_bytes(found["step_metrics.csv"]).splitlines()) == 5


class LosesItsMachine(Scripted):
    """Nobody sees how a workload of this launcher ended: its last heartbeat came with its start, and it was seen to run after its end."""

    platform: Platform
    started_at = seen_at = 0.0
    looks = 0

    def get(self, name: str) -> WorkloadStatus:
        seen = super().get(name)
        if seen.phase is not WorkloadPhase.EXITED or seen.started_at is None:
            return seen
        self.looks += 1
        if self.looks <= 2:
            last = datetime.fromtimestamp(seen.started_at, tz=UTC)
            with self.platform.engine.begin() as conn:
                conn.execute(sa.update(agents_table).values(heartbeat_at=last, exit=sa.null()))
            self.started_at, self.seen_at = seen.started_at, time.time()
            return replace(seen, phase=WorkloadPhase.RUNNING)
        return replace(seen, phase=WorkloadPhase.LOST, exit_code=None, ended_at=None)


@pytest.mark.slow
def test_a_workload_that_was_lost_is_metered_until_it_was_last_seen(new_job: Callable[..., Job], tmp_path: Path) -> None:
    job = new_job()
    launcher = LosesItsMachine(job.platform.settings.work_dir / "launcher")
    launcher.platform = job.platform
    job.launcher = launcher
    ending, state = job.train(Scenario(steps=8, end_at={"step": 3, "outcome": "kill"}))
    assert (ending.outcome, ending.seen, state) == ("node_lost", False, JobState.QUEUED)
    with job.platform.engine.connect() as conn:
        usage, refund = ledger.of_job(conn, job.tenant, job.id)
    assert launcher.looks > 2
    assert usage.gpu_seconds == pytest.approx(launcher.seen_at - launcher.started_at, abs=0.1)
    assert (refund.amount_micros, usage.detail["end_known_from"]) == (-usage.amount_micros, "inferred")
