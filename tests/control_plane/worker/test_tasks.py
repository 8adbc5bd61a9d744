"""Tasks of lost workers run again, and no process takes from another what that one has rescued."""

from __future__ import annotations

import asyncio
import io
import threading
import time

import pytest
import sqlalchemy as sa

from control_plane.datasets.uploads import uploaded_files
from control_plane.platform.context import Platform
from control_plane.platform.task_queue import defer
from control_plane.tenants import service as tenants
from control_plane.worker import process, tasks
from control_plane.worker.periodic_work import CLEANUP
from tests.support.platform.background_worker import work_off

LOST = sa.text("INSERT INTO tasks.procrastinate_jobs (queue_name, task_name, status, lock) VALUES ('quick', 'fan_out', 'doing', 'x')")
LIVE = sa.text("INSERT INTO tasks.procrastinate_workers DEFAULT VALUES RETURNING id")
RETRIED = sa.text("UPDATE tasks.procrastinate_jobs SET status = 'todo'")
TAKEN = sa.text("UPDATE tasks.procrastinate_jobs SET status = 'doing', worker_id = :worker")
FOUND = sa.text("SELECT status, worker_id FROM tasks.procrastinate_jobs")


def rescue(platform: Platform) -> None:
    async def look() -> None:
        app = tasks.make_app(process.connector(platform), platform, periodic=False)
        async with app.open_async():
            await tasks.rescue(app.job_manager)

    asyncio.run(look())


def found(platform: Platform) -> tuple[str, int | None]:
    with platform.engine.connect() as conn:
        status, worker = conn.execute(FOUND).one()
        return status, worker


def test_the_task_of_a_lost_worker_waits_again(fresh_platform: Platform) -> None:
    with fresh_platform.engine.begin() as conn:
        conn.execute(LOST)
    rescue(fresh_platform)
    assert found(fresh_platform)[0] == "todo"


@pytest.mark.parametrize("taken", [False, True])
def test_a_lost_task_that_another_process_rescues_meanwhile_is_left_to_it(fresh_platform: Platform, taken: bool) -> None:
    with fresh_platform.engine.begin() as conn:
        conn.execute(LOST)
        live = conn.execute(LIVE).scalar_one()
    failed: list[BaseException] = []

    def look() -> None:
        try:
            rescue(fresh_platform)
        except Exception as error:
            failed.append(error)

    with fresh_platform.engine.begin() as conn:
        conn.execute(RETRIED)
        if taken:
            conn.execute(TAKEN, {"worker": live})
        other = threading.Thread(target=look)
        other.start()
        time.sleep(1)
    other.join(30)
    assert (failed, found(fresh_platform)) == ([], ("doing", live) if taken else ("todo", None))


def test_a_file_whose_task_is_lost_gets_another_of_its_own_tenant(fresh_platform: Platform) -> None:
    platform, (acme, other) = fresh_platform, (tenants.create(fresh_platform, name)[0].id for name in ("acme", "other"))
    stored = uploaded_files.store(platform, acme, io.BytesIO(b'{"text": "a"}\n'), filename="rows.jsonl")
    with platform.engine.begin() as conn:
        file = uploaded_files.insert(conn, acme, stored, at_once=False, now=platform.clock(), column_map=None, policies=None, model=None)
        conn.execute(sa.text("DELETE FROM tasks.procrastinate_jobs"))
        defer(conn, "validate", queue="validation", file_id=file.id, tenant=other)
    work_off(platform)
    assert uploaded_files.find(platform, file.id).status == "uploaded", "the task was of another tenant"
    assert "lost tasks of files added: 1" in CLEANUP.run(platform)
    assert "lost tasks of files added: 0" in CLEANUP.run(platform)
    work_off(platform)
    assert uploaded_files.find(platform, file.id).status != "uploaded"
