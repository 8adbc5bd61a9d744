"""Following real processes on a real database and a real store: what is committed, resumed, skipped and given up."""

from __future__ import annotations

import hashlib
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import sqlalchemy as sa

from control_plane.events import Event
from control_plane.jobs import JobState
from control_plane.protocols import Workload, WorkloadPhase, WorkloadStatus
from control_plane.service import attempts, files, jobs, retention, scheduling, tenants, training, uploads
from control_plane.service.attempts import Claim, Ending
from control_plane.service.platform import Platform
from control_plane.service.preparation import mark_packed
from control_plane.service.restoring import restore
from control_plane.service.submission import JobRequest
from control_plane.service.transfer import Patience, upload
from control_plane.tables import attempts as attempts_table
from control_plane.tables import checkpoints as checkpoints_table
from control_plane.tables import job_events
from control_plane.tables import jobs as jobs_table
from ft_assets import layout
from ft_assets.datasets.packs.manifest import PackManifest
from ft_assets.errors import Fault, NotAdmitted, Unavailable
from ft_assets.training.checkpoints import MANIFEST, RESUMABLE, commit, committed, read_manifest
from ft_assets.training.spec import CheckpointPolicy, EarlyStopping
from resources.launcher import LocalLauncher
from resources.object_store import LocalObjectStore
from tests.scripted_training import Scenario
from tests.small_disk import small_disk
from tests.training_specs import SPEC

SHORT = Patience(first_s=0.05, most_s=0.1, give_up_s=1.0)


class Scripted:
    """The local launcher, but that every workload runs the scripted training without torchrun."""

    def __init__(self, root: Path) -> None:
        self.real = LocalLauncher(root)
        self.names: list[str] = []

    def start_or_adopt(self, workload: Workload) -> WorkloadStatus:
        self.names.append(workload.name)
        return self.real.start_or_adopt(replace(workload, module="tests.scripted_training", torchrun=False))

    def status(self, name: str) -> WorkloadStatus:
        return self.real.status(name)

    def stop(self, name: str, *, grace_s: float) -> WorkloadStatus:
        return self.real.stop(name, grace_s=grace_s)

    def read_log(self, name: str, *, offset: int = 0) -> bytes:
        return self.real.read_log(name, offset=offset)


@dataclass
class Job:
    platform: Platform
    tenant: str
    id: str
    launcher: Scripted
    said: list[str] = field(default_factory=list)

    @property
    def work_dir(self) -> Path:
        return training.job_dir(self.platform, self.id)

    def claim(self) -> Claim:
        scheduling.place(self.platform)
        return attempts.claim(self.platform, self.tenant, self.id)

    def follow(self, held: Claim, **options: Any) -> Ending:
        return training.follow(
            self.platform, self.launcher, held, say=self.said.append, **{"patience": SHORT, "final_patience": SHORT, **options}
        )

    def train(self, scenario: Scenario, **options: Any) -> tuple[Ending, JobState]:
        scenario.write(self.work_dir)
        held = self.claim()
        ending = self.follow(held, **options)
        return ending, attempts.finish(self.platform, held, ending)

    def following(self, scenario: Scenario) -> tuple[Claim, threading.Thread, list[Ending]]:
        """Follow in a thread, as a step does, while the test does something to it."""
        scenario.write(self.work_dir)
        held, endings = self.claim(), list[Ending]()
        thread = threading.Thread(target=lambda: endings.append(self.follow(held)), daemon=True)
        thread.start()
        return held, thread, endings

    def on_another_machine(self, root: Path) -> Job:
        """The same job where nothing of it is on the disk."""
        settings = replace(self.platform.settings, home=root)
        return Job(replace(self.platform, settings=settings), self.tenant, self.id, Scripted(root / "launcher"))

    def steps(self) -> list[int]:
        return [row.step for row in attempts.committed(self.platform, self.id)]

    def events(self, *codes: str) -> list[Any]:
        query = sa.select(job_events).where(job_events.c.job_id == self.id, job_events.c.code.in_(codes)).order_by(job_events.c.seq)
        with self.platform.engine.connect() as conn:
            return list(conn.execute(query).all())

    def from_steps(self) -> list[int | None]:
        query = sa.select(attempts_table.c.from_step).where(attempts_table.c.job_id == self.id).order_by(attempts_table.c.attempt)
        with self.platform.engine.connect() as conn:
            return list(conn.execute(query).scalars())

    def stored(self) -> set[str]:
        """Steps of which any object is in the store."""
        prefix = f"{layout.job_prefix(self.tenant, self.id)}/checkpoints"
        return {info.key.split("/")[-2] for info in self.platform.objects.list(prefix)}

    def weights(self) -> bytes:
        row = next(r for r in attempts.committed(self.platform, self.id) if r.final)
        return self.platform.objects.get_bytes(f"{row.object_prefix}/adapter_model.safetensors")


def until(condition: Callable[[], Any], *, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def _store_pack(platform: Platform, tenant: str, fingerprint: str) -> None:
    """A pack of no rows: the scripted training reads none."""
    fields: dict[str, Any] = dict.fromkeys(("num_examples", "num_windows", "num_tokens", "num_trained_tokens", "truncated"), 0)
    fields |= {"shards": [], "settings": {}, "dropped": {}, "dropped_rows": {}, "lengths": {}, "rows": {}}
    fields |= {"tokenizer_digest": "0", "template_digest": "0", "dataset_id": SPEC.dataset_id}
    directory = platform.settings.home / "pack"
    directory.mkdir()
    PackManifest(fingerprint=fingerprint, max_seq_len=128, fill=1.0, validation=None, **fields).write(directory)
    upload(platform.objects, directory, layout.pack_prefix(tenant, fingerprint))


@pytest.fixture
def new_job(new_platform: Callable[..., Platform], write_chat_rows: Callable[..., Path]) -> Iterator[Callable[..., Job]]:
    """Makes a packed job on a platform of its own; `objects` replaces its store."""
    made: list[Job] = []

    def make(objects: Any = None, **changes: Any) -> Job:
        platform = new_platform()
        if objects is not None:
            platform = replace(platform, objects=objects)
        owner, _ = tenants.create(platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard")
        with write_chat_rows().open("rb") as rows:
            file = files.create(platform, owner.id, rows, filename="rows.jsonl", purpose="fine-tune")
        job = jobs.submit(platform, owner.id, JobRequest.from_body({"model": "tiny-base", "training_file": file["id"]})).job
        spec = replace(SPEC, base_digest=platform.models.get("tiny-base").digest, **changes)
        _store_pack(platform, owner.id, spec.pack_fingerprint)
        mark_packed(platform, owner.id, job["id"], spec=spec, total_steps=6, expected_s=60.0)
        made.append(Job(platform, owner.id, job["id"], Scripted(platform.settings.work_dir / "launcher")))
        return made[-1]

    yield make
    for job in made:
        for name in job.launcher.names:
            job.launcher.stop(name, grace_s=0.1)


def plain_weights(steps: int) -> bytes:
    """What the scripted training ends with when nothing interrupts it."""
    state = ""
    for step in range(1, steps + 1):
        state = hashlib.sha256(f"{state}{step}".encode()).hexdigest()
    return (state * (Scenario.size // 64 + 1)).encode()


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


def test_the_store_keeps_the_newest_three_and_the_api_lists_no_other(new_job: Callable[..., Job]) -> None:
    job = new_job()
    job.train(Scenario(steps=10, every=1, step_s=0.6))
    kept = job.steps()
    assert kept[0] == 10 and len(kept) <= 4
    assert [c["step"] for c in jobs.list_checkpoints(job.platform, job.tenant, job.id).items] == kept
    rows = attempts.committed(job.platform, job.id)
    for row in rows:
        stored = {i.key.rsplit("/", 1)[1] for i in job.platform.objects.list(row.object_prefix)}
        assert MANIFEST in stored and len(stored) > 2
    with job.platform.engine.connect() as conn:
        gone = conn.execute(
            sa.select(checkpoints_table).where(checkpoints_table.c.job_id == job.id, checkpoints_table.c.retired_at.is_not(None))
        ).all()
    assert gone and all(r.removed_at is not None for r in gone)
    assert not {f"step-{r.step:08d}" for r in gone} & job.stored()


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


@pytest.mark.parametrize("damage", ["a bit flipped", "manifest flipped", "removed"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(new_job: Callable[..., Job], tmp_path: Path, damage: str) -> None:
    job = new_job()
    job.train(Scenario(steps=8, step_s=0.6, end_at={"step": 5, "outcome": "kill"}))
    assert job.steps() == [4, 2]
    key = f"{attempts.committed(job.platform, job.id)[0].object_prefix}/{MANIFEST if 'manifest' in damage else 'optimizer.pt'}"
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
    assert event.data == {"step": 4, "used": 2} and "Training goes on from step 2" in event.message
    assert job.weights() == plain_weights(8)


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
    job = new_job()
    held, thread, endings = job.following(Scenario(steps=9, every=100, hold_at=3))
    until(lambda: jobs.get(job.platform, job.tenant, job.id).row["step"] == 3)
    jobs.pause(job.platform, job.tenant, job.id)
    thread.join(20)
    assert attempts.finish(job.platform, held, endings[0]) is JobState.PAUSED
    (step,) = job.steps()
    jobs.resume(job.platform, job.tenant, job.id)
    job.on_another_machine(tmp_path / "other").train(Scenario(steps=9))
    assert job.from_steps() == [0, step]
    assert job.weights() == plain_weights(9)


def test_a_store_that_is_full_delays_no_step_and_is_told_of_once(new_job: Callable[..., Job], tmp_path: Path) -> None:
    with small_disk(tmp_path / "store", "200k") as disk:
        job = new_job(LocalObjectStore(disk.root / "objects"))
        disk.fill()
        held, thread, endings = job.following(Scenario(steps=12, every=2, hold_at=8, step_s=0.3))
        until(lambda: jobs.get(job.platform, job.tenant, job.id).row["step"] == 8)
        assert job.steps() == []
        assert len(job.events("checkpoint_upload_failed")) == 1
        disk.free()
        until(lambda: job.steps() == [8])
        assert len(job.events("checkpoint_upload_recovered")) == 1
        (job.work_dir / "go").touch()
        thread.join(20)
        assert attempts.finish(job.platform, held, endings[0]) is JobState.EVALUATING
        assert job.weights() == plain_weights(12)
        assert len(job.events("checkpoint_upload_failed")) == 1


def test_a_finished_model_waits_on_its_machine_for_a_store_that_is_away(new_job: Callable[..., Job], tmp_path: Path) -> None:
    with small_disk(tmp_path / "store", "200k") as disk:
        job = new_job(LocalObjectStore(disk.root / "objects"))
        disk.fill()
        Scenario(steps=4).write(job.work_dir)
        held = job.claim()
        with pytest.raises(Unavailable, match="is on this machine and could not be stored yet"):
            job.follow(held)
        assert len(job.events("checkpoint_upload_abandoned")) == 1
        assert jobs.get(job.platform, job.tenant, job.id).row["state"] == JobState.RUNNING
        disk.free()
        ending = job.follow(held)
        assert attempts.finish(job.platform, held, ending) is JobState.EVALUATING
        assert job.weights() == plain_weights(4)
        assert job.launcher.real.status(held.workload).phase is WorkloadPhase.EXITED
        assert len(job.events("metrics")) == 4


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
        thread.join(20)
        assert attempts.finish(job.platform, held, endings[0]) is JobState.EVALUATING
        assert job.from_steps() == [0, 4]
        assert job.weights() == plain_weights(8)


class Slow(LocalObjectStore):
    """A store over a slow line; it remembers what was begun."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.begun: list[str] = []
        self.line = threading.Event()

    def put_stream(self, key: str, stream: BinaryIO) -> int:
        if "/checkpoints/" in key:
            self.begun.append(key.split("/")[-2])
            self.line.wait(30)
        return super().put_stream(key, stream)


def test_a_slow_store_delays_no_step_and_only_the_newest_waits(new_job: Callable[..., Job], tmp_path: Path) -> None:
    store = Slow(tmp_path / "objects")
    job = new_job(store)
    held, thread, endings = job.following(Scenario(steps=12, every=1, hold_at=11, step_s=0.15))
    until(lambda: jobs.get(job.platform, job.tenant, job.id).row["step"] == 11)
    first = store.begun[0]
    assert set(store.begun) == {first} and job.steps() == []
    time.sleep(2 * training.POLL_S)
    store.line.set()
    until(lambda: 11 in job.steps())
    assert sorted({*store.begun}) == sorted({first, "step-00000011"}), "what was made meanwhile is skipped"
    (job.work_dir / "go").touch()
    thread.join(20)
    assert attempts.finish(job.platform, held, endings[0]) is JobState.EVALUATING


def test_what_an_early_stop_goes_back_to_is_stored_kept_and_brought_to_another_machine(new_job: Callable[..., Job], tmp_path: Path) -> None:
    job = new_job(optimization=replace(SPEC.optimization, early_stopping=EarlyStopping(patience=1)))
    job.train(Scenario(steps=9, every=1, best_step=1, step_s=0.6, end_at={"step": 6, "outcome": "kill"}))
    assert job.steps() == [6, 5, 4, 1]
    elsewhere = job.on_another_machine(tmp_path / "other")
    elsewhere.train(Scenario(steps=9, every=100))
    assert [p.name for p in committed(elsewhere.work_dir / "checkpoints")] == ["step-00000001", "step-00000006"]
    assert job.weights() == plain_weights(9)


def test_a_stale_attempt_commits_nothing_and_deletes_nothing(new_job: Callable[..., Job]) -> None:
    job = new_job()
    job.train(Scenario(steps=9, every=1, step_s=0.6, end_at={"step": 4, "outcome": "kill"}))
    held = job.claim()
    stale = replace(held, attempt=1)
    before = {
        info.key: job.platform.objects.get_bytes(info.key) for info in job.platform.objects.list(layout.job_prefix(job.tenant, job.id))
    }
    stale_dir = job.work_dir / "checkpoints"
    rows = attempts.committed(job.platform, job.id)

    uploader = uploads.Uploader(job.platform, stale, job.work_dir, patience=SHORT)
    newest = sorted(stale_dir.iterdir())[-1]
    commit(newest.with_name("step-00000009"), _copy_of(newest), spec=held.spec, step=9, attempt=1, created_at=0.0)
    uploader.offer(newest.with_name("step-00000009"))
    uploader.drain()
    uploader.close()
    assert not uploads.commit_final(job.platform, stale, newest, step=9, patience=SHORT)
    assert (
        retention.retire_checkpoints(job.platform, replace(stale, spec=replace(stale.spec, checkpoint=CheckpointPolicy(keep_last=1)))) == []
    )
    assert not attempts.tell(job.platform, stale, Event(code="checkpoint_skipped", message="x"))
    with pytest.raises(NotAdmitted, match="was released"):
        restore(
            replace(job.platform, settings=replace(job.platform.settings, home=job.platform.settings.home / "x")), stale, job.work_dir / "x"
        )

    after = {
        info.key: job.platform.objects.get_bytes(info.key) for info in job.platform.objects.list(layout.job_prefix(job.tenant, job.id))
    }
    assert after == before and attempts.committed(job.platform, job.id) == rows


def _copy_of(source: Path) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        for path in source.iterdir():
            if path.name != MANIFEST:
                shutil.copy(path, directory)

    return write


def test_a_full_disk_frees_what_ended_jobs_left_on_the_machine(new_job: Callable[..., Job]) -> None:
    job = new_job()
    other = job.work_dir.parent / "ftjob-unknown" / "checkpoints" / "step-00000001"
    other.mkdir(parents=True)
    ending, state = job.train(Scenario(steps=9, every=1, step_s=0.1, end_at={"step": 5, "outcome": "disk_full", "attempt": 1}))
    assert (ending.outcome, state) == ("disk_full", JobState.QUEUED)
    assert ending.failure is not None and ending.failure.fault is Fault.PLATFORM
    assert job.events("disk_space_freed")[0].data["freed_bytes"] > 1000
    assert [p.name for p in sorted((job.work_dir / "checkpoints").iterdir())] == ["step-00000004", "step-00000005"]
    assert other.exists(), "of a job that is not known to have ended nothing is taken"
    assert job.train(Scenario(steps=9))[1] is JobState.EVALUATING
    assert retention.free_machine(job.platform, "another") == 0
    transition_to_end(job)
    assert retention.free_machine(job.platform, "another") > 0
    assert (job.work_dir / "final").exists()


def transition_to_end(job: Job) -> None:
    jobs.cancel(job.platform, job.tenant, job.id)


def test_checkpoints_of_an_ended_job_go_after_a_week_and_with_them_what_was_never_committed(new_job: Callable[..., Job]) -> None:
    job = new_job()
    job.train(Scenario(steps=6, step_s=0.3))
    prefix = layout.job_prefix(job.tenant, job.id)
    job.platform.objects.put_bytes(f"{prefix}/checkpoints/a9/step-00000001/optimizer.pt", b"left by a crash")
    transition_to_end(job)
    assert retention.retire_ended(job.platform) == 0
    later = replace(job.platform, clock=lambda: datetime.now(UTC) + timedelta(days=8))
    assert retention.retire_ended(later) == 1
    assert retention.retire_ended(later) == 0
    assert [r.final for r in attempts.committed(job.platform, job.id)] == [True]
    assert list(job.platform.objects.list(f"{prefix}/checkpoints")) == []
    assert job.weights() == plain_weights(6)


def test_a_full_disk_spares_what_an_early_stop_goes_back_to(new_job: Callable[..., Job]) -> None:
    job = new_job(
        optimization=replace(SPEC.optimization, early_stopping=EarlyStopping(patience=5)), checkpoint=CheckpointPolicy(keep_last=9)
    )
    job.train(Scenario(steps=9, every=1, best_step=2, step_s=0.1, end_at={"step": 5, "outcome": "disk_full", "attempt": 1}))
    assert [p.name for p in committed(job.work_dir / "checkpoints")] == ["step-00000002", "step-00000004", "step-00000005"]


def test_a_smaller_micro_batch_that_starts_anew_is_not_crowded_out_by_what_the_old_one_left(new_job: Callable[..., Job]) -> None:
    job = new_job(method="kto")
    ending, state = job.train(Scenario(steps=9, step_s=0.3, end_at={"step": 8, "outcome": "oom", "attempt": 1}))
    assert (ending.outcome, state, job.steps()[0]) == ("oom", JobState.QUEUED, 8)
    job.train(Scenario(steps=9, step_s=0.3, end_at={"step": 5, "outcome": "kill", "attempt": 2}))
    assert job.from_steps() == [0, 0]
    assert job.steps() == [4, 2]
    assert [p.name for p in committed(job.work_dir / "checkpoints")] == ["step-00000002", "step-00000004"]
    assert "another training" in job.events("checkpoint_skipped")[0].message
    assert job.train(Scenario(steps=9))[1] is JobState.EVALUATING
    assert job.from_steps() == [0, 0, 4]


def test_no_step_is_announced_that_the_strategy_cannot_go_on_from(new_job: Callable[..., Job]) -> None:
    job = new_job(adapter="full", lora=None, strategy="zero2")
    held = job.claim()

    def fill(directory: Path) -> None:
        for name in RESUMABLE:
            (directory / name.replace("*", "")).write_text(name)

    commit(job.work_dir / "checkpoints" / "step-00000004", fill, spec=held.spec, step=4, attempt=1, created_at=0.0)
    assert restore(job.platform, held, job.work_dir) == 0
    assert "zero/*model_states.pt is not part of the manifest" in job.events("checkpoint_skipped")[0].message


def test_a_workload_that_beats_and_gets_nowhere_is_ended_and_resumed(new_job: Callable[..., Job]) -> None:
    job = new_job()
    ending, state = job.train(Scenario(steps=9, hold_at=3, still_s=700.0))
    assert (ending.outcome, state) == ("stalled", JobState.QUEUED)
    assert ending.failure is not None and "no progress for 70" in ending.failure.message
    assert job.train(Scenario(steps=9))[1] is JobState.EVALUATING
    assert job.weights() == plain_weights(9)
