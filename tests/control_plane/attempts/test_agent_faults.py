"""Deaths and outages around an agent: of itself, of the API that it reports to, of its reservation."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import sqlalchemy as sa
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from control_plane.api.app import create_app
from control_plane.attempts import start
from control_plane.attempts.tables import attempts as attempts_table
from control_plane.attempts.watch import Watcher
from control_plane.jobs import service as jobs
from control_plane.platform.job_states import JobState
from control_plane.platform.protocols import WorkloadPhase
from control_plane.queue import cycle
from control_plane.worker import attempt_watch
from core.errors import Unavailable
from core.layout import attempt_prefix, pack_prefix
from core.workload import VARIABLE
from resources.object_store.local import LocalObjectStore
from resources.tracking.mlflow_tracker import MlflowTracker
from tests.support.jobs.followed_jobs import Job, plain_weights, until
from tests.support.jobs.training_specs import SPEC
from tests.support.processes.scripted_training import Scenario
from tests.support.servers.served_app import served


def processes(workload: str) -> list[psutil.Process]:
    """The agent of a workload and what runs below it, the agent first."""
    found = []
    for process in psutil.process_iter(["environ", "cmdline"]):
        if workload in (process.info["environ"] or {}).get(VARIABLE, "") and process.status() != psutil.STATUS_ZOMBIE:
            found = [process, *process.children(recursive=True)]
    return found


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def at_step(job: Job, step: int) -> Callable[[], bool]:
    return lambda: (jobs.get(job.platform, job.tenant, job.id).job.step or 0) >= step


@pytest.mark.parametrize(
    ("signum", "outcome", "saved"), [(signal.SIGKILL, "node_lost", 2), pytest.param(signal.SIGTERM, "preempted", 4, marks=pytest.mark.slow)]
)
def test_an_agent_that_is_killed_takes_its_training_along_and_the_job_goes_on(
    new_job: Callable[..., Job], signum: signal.Signals, outcome: str, saved: int
) -> None:
    job = new_job()
    held, thread, endings = job.following(Scenario(steps=6, hold_at=3))
    until(lambda: at_step(job, 3)() and job.steps() == [2])
    agent, training = processes(held.workload)
    os.kill(agent.pid, signum)
    thread.join(60)
    assert endings[0].outcome == outcome
    assert gone(training) and gone(agent)
    assert job.steps()[0] == saved
    (job.work_dir / "go").touch()
    assert job.run() is JobState.EVALUATING
    assert job.from_steps() == [0, saved]
    assert job.weights() == plain_weights(6)


def test_a_training_that_dies_before_it_can_answer_its_node_was_taken_back(new_job: Callable[..., Job]) -> None:
    job = new_job()
    held, thread, endings = job.following(Scenario(steps=6, hold_at=3, deaf=True))
    until(lambda: at_step(job, 3)() and job.steps() == [2])
    agent, training = processes(held.workload)
    os.kill(agent.pid, signal.SIGTERM)
    until(lambda: "stopping: outside" in job.launcher.read_log(held.workload).decode())
    os.kill(training.pid, signal.SIGKILL)
    thread.join(60)
    assert endings[0].failure is not None
    assert (endings[0].outcome, endings[0].failure.message) == ("preempted", "the node took the workload back")
    assert endings[0].last_step == 3


@pytest.mark.slow
def test_an_agent_that_is_frozen_is_stopped_and_its_job_goes_on(new_job: Callable[..., Job]) -> None:
    job = new_job()
    quick = replace(job.platform.settings, heartbeat_timeout_s=3.0, heartbeat_grace_s=1.0)
    job.platform = replace(job.platform, settings=quick)
    held, thread, endings = job.following(Scenario(steps=6, hold_at=3))
    until(lambda: at_step(job, 3)() and job.steps() == [2])
    frozen = processes(held.workload)
    os.kill(frozen[0].pid, signal.SIGSTOP)
    thread.join(60)
    assert endings[0].outcome == "stalled"
    assert all(map(gone, frozen))
    (job.work_dir / "go").touch()
    assert job.run() is JobState.EVALUATING
    assert job.weights() == plain_weights(6)


class Away(LocalObjectStore):
    """A store that is away."""

    def exists(self, key: str) -> bool:
        raise Unavailable(f"the object store is away ({key})", code="object_store_unavailable")


@pytest.mark.slow
def test_an_agent_that_is_frozen_is_stopped_while_the_store_is_away(new_job: Callable[..., Job], tmp_path: Path) -> None:
    # Longer than a heartbeat is quiet before the API is asked.
    job = new_job(env={"heartbeat_timeout_s": "8", "heartbeat_grace_s": "1"})
    Scenario(steps=6, hold_at=3).write(job.work_dir)
    held, ending = job.claim(), threading.Event()
    with served(create_app(replace(job.platform, objects=Away(tmp_path / "away")))) as url:
        watched = replace(job.platform, settings=replace(job.platform.settings, internal_url=url))
        watching = threading.Thread(target=attempt_watch.watch, args=(watched, ending), daemon=True)
        start.start_or_adopt(job.platform, job.launcher, held)
        watching.start()
        until(at_step(job, 3))
        os.kill(processes(held.workload)[0].pid, signal.SIGSTOP)
        until(lambda: jobs.get(job.platform, job.tenant, job.id).job.state == JobState.QUEUED)
        ending.set()
        watching.join(30)
    query = sa.select(attempts_table.c.outcome).where(attempts_table.c.job_id == job.id)
    with job.platform.engine.connect() as conn:
        assert conn.execute(query).scalar_one() == "stalled"


def test_an_agent_whose_attempt_was_released_ends_and_commits_nothing_more(new_job: Callable[..., Job]) -> None:
    job = new_job()
    Scenario(steps=6, hold_at=3).write(job.work_dir)
    held = job.claim()
    start.start_or_adopt(job.platform, job.launcher, held)
    until(lambda: at_step(job, 3)() and job.steps() == [2])
    cycle.release(job.platform, job.id, held.attempt)
    until(lambda: job.launcher.get(held.workload).phase is WorkloadPhase.EXITED)
    assert processes(held.workload) == []
    assert job.steps() == [2] and len(job.events("metrics")) == 3


@pytest.mark.slow
def test_while_the_api_is_away_training_goes_on_and_nothing_is_lost(new_job: Callable[..., Job]) -> None:
    job = new_job()
    platform = job.platform
    with ExitStack() as servers:
        url = servers.enter_context(served(create_app(platform)))
        port = int(url.rpartition(":")[2])
        job.platform = replace(platform, settings=replace(platform.settings, internal_url=url, heartbeat_timeout_s=5.0))
        held = job.claim()
        Scenario(steps=24, step_s=0.3).write(job.work_dir)
        away = threading.Event()
        ended: list[str] = []
        thread = threading.Thread(target=lambda: ended.append(job.follow(held, answers=lambda: not away.is_set()).outcome), daemon=True)
        thread.start()
        until(at_step(job, 3))
        away.set()
        servers.close()
        heartbeat = job.work_dir / "heartbeat.json"
        until(lambda: json.loads(heartbeat.read_text())["step"] == 24)
        time.sleep(1.0)
        assert not ended, "its end cannot be reported yet"
        assert job.launcher.get(held.workload).phase is WorkloadPhase.RUNNING
        servers.enter_context(served(create_app(platform), port=port))
        away.clear()
        thread.join(60)
    assert ended == ["succeeded"]
    assert [event.data["step"] for event in job.events("metrics")] == list(range(1, 25))
    assert job.weights() == plain_weights(24)


class LosesAnswers:
    """The API, but that every third call of an agent takes effect and is answered with an error."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.num_calls = self.num_lost = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith("/internal/"):
            await self.app(scope, receive, send)
            return
        self.num_calls += 1
        if self.num_calls % 3:
            await self.app(scope, receive, send)
            return

        async def nowhere(_: Message) -> None:
            self.num_lost += 1

        await self.app(scope, receive, nowhere)
        await send({"type": "http.response.start", "status": 502, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def test_calls_whose_answers_are_lost_take_effect_once(new_job: Callable[..., Job]) -> None:
    job = new_job()
    app = LosesAnswers(create_app(job.platform))
    with served(app) as url:
        job.platform = replace(job.platform, settings=replace(job.platform.settings, internal_url=url))
        ending, state = job.train(Scenario(steps=8, step_s=0.2, says="hello"))
    assert (ending.outcome, state) == ("succeeded", JobState.EVALUATING)
    assert app.num_lost > 5
    assert [event.data["step"] for event in job.events("metrics")] == list(range(1, 9))
    log = job.platform.objects.get_bytes(f"{attempt_prefix(job.tenant, job.id, 1)}/train.log")
    assert log.decode().splitlines() == [f"step {step} hello" for step in range(1, 9)]
    assert job.weights() == plain_weights(8)


class Hangs(LocalObjectStore):
    """A store whose pack is read through a pipe that nothing writes to, as from a file server that is gone."""

    pipe: Path | None = None

    def read_url(self, key: str) -> str:
        return self.pipe.as_uri() if self.pipe is not None and "/packs/" in key else super().read_url(key)


@pytest.mark.slow
def test_a_node_on_which_no_input_arrives_is_given_up_and_the_job_goes_on(new_job: Callable[..., Job], tmp_path: Path) -> None:
    store = Hangs(tmp_path / "objects")
    job = new_job(store)
    store.pipe = tmp_path / "pipe"
    os.mkfifo(store.pipe)
    ending, state = job.train(Scenario(steps=6))
    assert (ending.outcome, state) == ("stalled", JobState.QUEUED)
    assert ending.failure is not None and "the inputs did not arrive: no byte for 1" in ending.failure.message
    store.pipe = None
    assert job.run() is JobState.EVALUATING
    assert job.weights() == plain_weights(6)


class TakesNoLog(LocalObjectStore):
    """A store that is away when the log of an attempt is completed, as if the worker had ended at that moment."""

    away = True

    def put_bytes(self, key: str, data: bytes) -> None:
        if self.away and key.endswith("/train.log"):
            raise Unavailable("the object store is away", code="object_store_unavailable")
        super().put_bytes(key, data)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MLflow's own
def test_what_a_worker_left_of_an_ended_attempt_is_completed_by_the_next_one(new_job: Callable[..., Job], tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    store = TakesNoLog(tmp_path / "objects")
    job = new_job(store)
    assert job.train(Scenario(steps=4, says="hello"))[1] is JobState.EVALUATING
    log = f"{attempt_prefix(job.tenant, job.id, 1)}/train.log"
    assert not store.exists(log)
    store.away = False
    tracker = MlflowTracker(uri=f"sqlite:///{tmp_path}/mlflow.db", objects=store)
    for _ in range(2):
        with contextlib.closing(
            Watcher(platform=replace(job.platform, tracker=tracker), launcher=job.launcher, answers=lambda: True)
        ) as watcher:
            assert watcher.look() == []
            watcher.settle()
    assert store.get_bytes(log).decode().splitlines() == [f"step {step} hello" for step in range(1, 5)]
    (run,) = MlflowClient(tracker.uri).search_runs(["1"])
    assert (run.info.status, run.data.metrics["train_loss"]) == ("FINISHED", 0.25)
    with job.platform.engine.connect() as conn:
        assert conn.execute(sa.select(attempts_table.c.completed_at).where(attempts_table.c.job_id == job.id)).scalar_one() is not None


class HeldBack(LocalObjectStore):
    """A store that answers for the pack's second shard only once it is let through."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.let_through = threading.Event()

    def read_url(self, key: str) -> str:
        if key.endswith("shard-00001.parquet"):
            self.let_through.wait(15)
        return super().read_url(key)


def test_a_shard_with_other_bytes_stops_a_training_that_keeps_its_steps(new_job: Callable[..., Job], tmp_path: Path) -> None:
    store = HeldBack(tmp_path / "objects")
    job = new_job(store)
    prefix = pack_prefix(job.tenant, SPEC.pack_fingerprint)
    wanted = [b"a shard", b"the next one"]
    shards = [
        {"name": f"shard-0000{n}.parquet", "sha256": hashlib.sha256(data).hexdigest(), "num_windows": 1} for n, data in enumerate(wanted)
    ]
    manifest = json.loads(store.get_bytes(f"{prefix}/manifest.json")) | {"shards": shards, "num_windows": 2}
    store.put_bytes(f"{prefix}/manifest.json", json.dumps(manifest).encode())
    store.put_bytes(f"{prefix}/shard-00000.parquet", b"a shard")
    store.put_bytes(f"{prefix}/shard-00001.parquet", b"another one")
    _, thread, endings = job.following(Scenario(steps=6, hold_at=3))
    until(lambda: at_step(job, 3)() and job.steps() == [2])
    store.let_through.set()
    thread.join(60)
    assert endings[0].failure is not None and "shard-00001.parquet" in endings[0].failure.message
    assert job.steps()[0] == 4, "it was asked to stop, not killed"
