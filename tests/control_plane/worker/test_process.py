"""The worker: tenants take turns, nothing long delays what is short, and a killed worker loses nothing."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import sqlalchemy as sa
from procrastinate.jobs import Job
from procrastinate.manager import JobManager

from control_plane.datasets.tables import datasets
from control_plane.datasets.uploads import uploaded_files
from control_plane.platform.context import Platform
from control_plane.platform.task_queue import defer
from control_plane.tenants import service as tenants
from control_plane.worker import process
from control_plane.worker.periodic_work import QUICK
from control_plane.worker.tasks import make_app
from core.errors import Unavailable
from resources.object_store import LocalObjectStore
from tests.support.platform.background_worker import working
from tests.support.servers.webhook_receiver import until

ROOT = Path(__file__).resolve().parents[3]
HEAVY = ("torch", "transformers", "dagster", "trl", "mlflow", "peft")


class Held(LocalObjectStore):
    """A store that does not answer for ``hung`` files, and is away for ``away`` ones, until the test lets it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.begun: list[str] = []
        self.released = threading.Event()

    def get_file(self, key: str, path: Path) -> None:
        self.begun.append(key.rsplit("/", 1)[-1])
        if "hung" in key:
            assert self.released.wait(60)
        if "away" in key and not self.released.is_set():
            raise Unavailable("the store is away")
        super().get_file(key, path)


@pytest.fixture
def store(fresh_platform: Platform) -> Held:
    return Held(fresh_platform.settings.home / "objects")


@pytest.fixture
def held(fresh_platform: Platform, store: Held) -> Platform:
    return replace(fresh_platform, objects=store)


def new_tenant(platform: Platform) -> str:
    return tenants.create(platform, f"t-{uuid.uuid4().hex[:8]}", tier="standard")[0].id


def add_file(platform: Platform, tenant: str, path: Path, name: str, *, claimed_bytes: int | None = None) -> str:
    """A file that the worker is to validate, whatever its size; the id."""
    with path.open("rb") as stream:
        stored = uploaded_files.store(platform, tenant, stream, filename=name)
    stored = stored if claimed_bytes is None else replace(stored, num_bytes=claimed_bytes)
    with platform.engine.begin() as conn:
        given: dict[str, Any] = {"column_map": None, "policies": None, "model": None}
        return str(uploaded_files.insert(conn, tenant, stored, at_once=False, now=platform.clock(), **given).id)


def num_tasks(platform: Platform) -> int:
    with platform.engine.connect() as conn:
        return int(conn.execute(sa.text("SELECT count(*) FROM tasks.procrastinate_jobs WHERE task_name = 'validate'")).scalar_one())


def is_processed(platform: Platform, file_id: str) -> bool:
    return bool(uploaded_files.find(platform, file_id).status == "processed")


@pytest.mark.slow
def test_files_of_a_tenant_that_hang_stop_no_other_tenant(held: Platform, store: Held, write_chat_rows: Callable[..., Path]) -> None:
    rows, mallory, alice = write_chat_rows(), new_tenant(held), new_tenant(held)
    hung = [add_file(held, mallory, rows, f"hung-{n}.jsonl") for n in range(4)]
    good = [add_file(held, alice, rows, f"good-{n}.jsonl") for n in range(2)]
    with working(held):
        until(lambda: all(is_processed(held, file_id) for file_id in good))
        assert [name for name in store.begun if "hung" in name] == ["hung-0.jsonl"], "one file of a tenant at a time"
        store.released.set()
        until(lambda: all(is_processed(held, file_id) for file_id in hung))
    assert [name for name in store.begun if "hung" in name] == [f"hung-{n}.jsonl" for n in range(4)], "in their order"


def test_a_large_file_delays_no_small_one_of_its_tenant(held: Platform, store: Held, write_chat_rows: Callable[..., Path]) -> None:
    rows, tenant = write_chat_rows(), new_tenant(held)
    large = [add_file(held, tenant, rows, f"hung-{n}.jsonl", claimed_bytes=40 << 20) for n in range(2)]
    small = add_file(held, tenant, rows, "small.jsonl")
    with working(held):
        until(lambda: is_processed(held, small))
        assert not is_processed(held, large[0])
        store.released.set()
        until(lambda: all(is_processed(held, file_id) for file_id in large))


@pytest.mark.slow
def test_what_cannot_be_read_now_is_tried_again_and_delays_no_other_file(
    held: Platform, store: Held, write_chat_rows: Callable[..., Path]
) -> None:
    rows, tenant = write_chat_rows(), new_tenant(held)
    away = add_file(held, tenant, rows, "away.jsonl")
    other = add_file(held, tenant, rows, "other.jsonl")
    with working(held):
        until(lambda: is_processed(held, other))
        assert uploaded_files.find(held, away).status == "uploaded"
        store.released.set()
        until(lambda: is_processed(held, away))


@contextmanager
def ended_by_itself(platform: Platform) -> Iterator[Future[None]]:
    """A worker that is to end without being told to; the result that it ends with."""
    loop, ending = asyncio.new_event_loop(), asyncio.Event()
    with ThreadPoolExecutor(1) as threads:
        result = threads.submit(loop.run_until_complete, process.run(platform, ending, periodic=False))
        try:
            until(lambda: num_sessions(platform, "query LIKE 'LISTEN%'") == 1)
            yield result
        finally:
            loop.call_soon_threadsafe(ending.set)
            wait([result], 30)
            if left := asyncio.all_tasks(loop):  # of a worker that did not wait for its last task
                loop.run_until_complete(asyncio.wait(left, timeout=30))
            loop.close()


def num_sessions(platform: Platform, which: str, *, end: bool = False) -> int:
    """How many of the worker's own connections are `which`; with `end` they are lost."""
    call = "pg_terminate_backend(pid)" if end else "pid"
    query = f"SELECT count({call}) FROM pg_stat_activity WHERE application_name = 'ft-worker' AND datname = current_database() AND {which}"
    with platform.engine.connect() as conn:
        return int(conn.execute(sa.text(query)).scalar_one())


def lose_connection(platform: Platform, begin: Callable[[], object], *, locked: str, statement: str) -> None:
    """Lose the worker's connection in the middle of a statement on rows that are locked until then."""
    which = f"query LIKE '%{statement}%' AND wait_event_type = 'Lock'"
    with platform.engine.begin() as conn:
        conn.execute(sa.text(f"SELECT FROM tasks.{locked} FOR UPDATE"))
        begin()
        until(lambda: num_sessions(platform, which))
        num_sessions(platform, which, end=True)


@pytest.mark.slow
def test_a_worker_without_heartbeats_ends_with_an_error(fresh_platform: Platform) -> None:
    with ended_by_itself(fresh_platform) as result:
        lose_connection(fresh_platform, lambda: None, locked="procrastinate_workers", statement="heartbeat")
        assert isinstance(result.exception(20), Unavailable)


def test_a_task_whose_end_cannot_be_recorded_is_run_again(held: Platform, store: Held, write_chat_rows: Callable[..., Path]) -> None:
    file_id = add_file(held, new_tenant(held), write_chat_rows(), "hung.jsonl")
    with ended_by_itself(held) as result:
        until(lambda: store.begun)
        lose_connection(held, store.released.set, locked="procrastinate_jobs WHERE task_name = 'validate'", statement="finish_job")
        assert isinstance(result.exception(20), Unavailable)
    with working(held):
        until(lambda: num_tasks(held) == 0)
    assert is_processed(held, file_id)


def test_a_worker_that_cannot_fetch_tasks_ends_although_one_of_its_tasks_hangs(
    held: Platform, store: Held, write_chat_rows: Callable[..., Path]
) -> None:
    rows, tenant = write_chat_rows(), new_tenant(held)
    hung = add_file(held, tenant, rows, "hung.jsonl")
    with ended_by_itself(held) as result:
        until(lambda: store.begun)
        with held.engine.begin() as conn:  # as another worker does for which this one was silent too long
            conn.execute(sa.text("DELETE FROM tasks.procrastinate_workers"))
        try:
            add_file(held, tenant, rows, "next.jsonl")
            assert isinstance(result.exception(20), Unavailable)
        finally:
            store.released.set()
        until(lambda: is_processed(held, hung))


def test_a_task_that_is_added_while_the_worker_looks_for_one_is_found_at_once(
    fresh_platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "POLL_S", 60.0)  # or the next poll would find it
    done, looking = threading.Event(), threading.Event()

    class SlowAnswers(JobManager):
        async def fetch_job(self, queues: Iterable[str] | None, worker_id: int) -> Job | None:
            job = await super().fetch_job(queues, worker_id)
            looking.set()
            await asyncio.sleep(1)
            return job

    async def work() -> None:
        app = make_app(process.connector(fresh_platform), fresh_platform, periodic=False)
        app.job_manager = SlowAnswers(app.connector)
        app.task(name="note")(done.set)
        async with app.open_async():
            worker = process.make_worker(app)
            running = asyncio.create_task(worker.run())
            await asyncio.to_thread(add)
            await asyncio.to_thread(done.wait, 5)
            worker.stop()
            await running

    def add() -> None:
        assert looking.wait(30)
        until(lambda: num_sessions(fresh_platform, "query LIKE 'LISTEN%'"))
        with fresh_platform.engine.begin() as conn:
            defer(conn, "note", queue=QUICK)

    asyncio.run(work())
    assert done.is_set()


def test_the_process_imports_nothing_that_is_slow_to_import() -> None:
    code = f"import json, sys, control_plane.worker.__main__; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True, timeout=120)
    assert json.loads(done.stdout) == []


@contextmanager
def processes(platform: Platform, number: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "FT_HOME": str(platform.settings.home), "FT_INFERENCE_URLS": ","}
    env |= {"FT_DATABASE_URL": platform.settings.database_url, "FT_MLFLOW_URI": "off"}
    started = [subprocess.Popen([sys.executable, "-m", "control_plane.worker"], env=env, cwd=ROOT) for _ in range(number)]
    query = sa.text("SELECT count(*) FROM tasks.procrastinate_workers")

    def are_up() -> bool:
        with platform.engine.connect() as conn:
            return bool(conn.execute(query).scalar_one() == number)

    try:
        until(are_up, within_s=120)
        yield started
    finally:
        for each in started:
            each.terminate()
            each.wait(30)


def validator_of(process: subprocess.Popen[bytes]) -> psutil.Process | None:
    return next(iter(psutil.Process(process.pid).children()), None) if process.poll() is None else None


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["kill", "terminate"])
def test_a_validation_whose_worker_ends_is_done_by_another_and_leaves_no_process(
    fresh_platform: Platform, write_chat_rows: Callable[..., Path], ends: str
) -> None:
    tenant = new_tenant(fresh_platform)
    with processes(fresh_platform, 2) as workers:
        file_id = add_file(fresh_platform, tenant, write_chat_rows(600_000), "big.jsonl")
        until(lambda: any(validator_of(worker) for worker in workers))
        (at_work,) = (worker for worker in workers if validator_of(worker))
        child = validator_of(at_work)
        at_work.kill() if ends == "kill" else at_work.terminate()
        at_work.wait(30)
        psutil.wait_procs([child], timeout=30)
        assert child is not None and (not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
        until(lambda: any(validator_of(worker) for worker in workers), within_s=300)
        until(lambda: is_processed(fresh_platform, file_id), within_s=300)
    with fresh_platform.engine.connect() as conn:
        assert conn.execute(sa.select(sa.func.count()).where(datasets.c.tenant_id == tenant)).scalar_one() == 1
    assert num_tasks(fresh_platform) == 0
