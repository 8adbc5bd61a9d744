"""The worker process: takes tasks from the queue of the platform's database. Several may run, on one machine or on many.

A worker that is killed loses nothing: others find its tasks by its missing heartbeats (:func:`control_plane.worker.tasks.rescue`) and run
them again. What must not happen twice is guarded by the rows that the tasks write. Child processes end with their worker.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from procrastinate import App, PsycopgConnector

from control_plane.adapters.exporting.orders import EXPORTS, STARTS
from control_plane.datasets.validation_tasks import FETCHES, LONG, SHORT
from control_plane.notifications.outbox import FAILING, MAIL, WEBHOOKS
from control_plane.platform.context import Platform
from control_plane.platform.task_queue import SCHEMA
from control_plane.serving import rollout
from control_plane.tracking.wandb_runs import TRACKING
from control_plane.worker import attempt_watch, model_server_watch
from control_plane.worker.periodic_work import MAINTENANCE, QUICK
from control_plane.worker.queue_worker import QueueWorker
from control_plane.worker.tasks import HEARTBEAT_S, LOST_AFTER_S, logged, make_app, rescue
from core.errors import FtError, Unavailable
from resources.database.engine import CONNECTION
from resources.object_store.probe import probe

CONCURRENCY: Mapping[str, int] = {
    QUICK: 3, MAINTENANCE: 2, SHORT: 2, LONG: 2, FETCHES: 2, EXPORTS: 1, STARTS: 2, WEBHOOKS: 16, FAILING: 6, MAIL: 4, TRACKING: 4,
}  # fmt: skip
"""Tasks of each queue that run at once. Slots are apart so that long work delays no short work. Deliveries mostly wait for receivers, and
no tenant has 16 endpoints."""
POLL_S = 2.0
"""How late a task may run that was added for a later time; others are announced by the database."""
GRACE_S = 5.0
"""Time in which running tasks may end when the process is to end; what is left is run by another worker."""
RECONCILE_EVERY_S = 1.0
"""A restarted inference server gets its adapters back about that long after it answers."""
RECONCILE_UNASKED_S = 10.0
"""How long a server may keep an adapter that the database does not know, while none is served."""
BEAT_S = 1.0
RESCUE_EVERY_S = 10.0

log = logging.getLogger(__name__)


async def run(platform: Platform, ending: asyncio.Event, *, periodic: bool = True) -> None:
    """Work until `ending` is set, if `periodic` also on what is due at intervals; raises what ended the work otherwise."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(sum(CONCURRENCY.values()) + 4, thread_name_prefix="task"))
    app = make_app(connector(platform), platform, periodic=periodic)
    async with app.open_async():
        worker = make_worker(app)
        work = asyncio.create_task(worker.run())  # type: ignore[no-untyped-call]  # of the library
        stop_watching = threading.Event()
        for name, watch in (("watch", attempt_watch.watch), ("model-servers", model_server_watch.watch)):
            threading.Thread(target=watch, args=(platform, stop_watching), name=name, daemon=True).start()
        loops = (_beat(alive_file(platform)), _reconcile(platform), _rescue(app), _probe(platform))
        beside = [asyncio.create_task(loop) for loop in loops]
        ends = [asyncio.create_task(ending.wait()), asyncio.create_task(worker.stopped())]
        await asyncio.wait([*ends, work], return_when=asyncio.FIRST_COMPLETED)
        asked = ending.is_set()
        for task in (*beside, *ends):
            task.cancel()
        stop_watching.set()
        worker.stop()  # type: ignore[no-untyped-call]
        done, _ = await asyncio.wait([work], timeout=GRACE_S)
        if worker.worker_id is not None:
            await app.job_manager.unregister_worker(worker.worker_id)  # so that another one takes its tasks at once
    for task in done:
        task.result()
    if not asked:
        raise Unavailable("the queues are no longer worked on; the log says why")


def connector(platform: Platform) -> PsycopgConnector:
    """Return the queue's own connections, to the database and with the role of the platform's processes."""
    url = platform.logins.platform.url.set(drivername="postgresql").render_as_string(hide_password=False)
    options = f"-c search_path={SCHEMA} -c statement_timeout=30s -c idle_in_transaction_session_timeout=60s"
    given = {**CONNECTION, "application_name": "ft-worker", "options": options}
    return PsycopgConnector(conninfo=url, kwargs=given, min_size=1, max_size=4)


def make_worker(app: App, *, wait: bool = True) -> QueueWorker:
    """Return the worker of all queues. Without `wait`, it ends when nothing is due."""
    return QueueWorker(
        app, slots=CONCURRENCY, wait=wait, fetch_job_polling_interval=POLL_S, abort_job_polling_interval=60.0, delete_jobs="always",
        install_signal_handlers=False, update_heartbeat_interval=HEARTBEAT_S, stalled_worker_timeout=LOST_AFTER_S,
        task_middleware=[logged],
    )  # fmt: skip


def alive_file(platform: Platform) -> Path:
    """Return the file that a working process touches every second."""
    return platform.settings.home / "worker.alive"


async def _beat(file: Path) -> None:
    while True:
        file.touch()
        await asyncio.sleep(BEAT_S)


async def _probe(platform: Platform) -> None:
    """Log what is wrong with the object store. The platform starts all the same: damaged objects are found when they are read."""
    try:
        await asyncio.to_thread(probe, platform.objects)
    except FtError as error:
        log.error("%s", error.message)


async def _rescue(app: App) -> None:
    """Run the tasks of lost workers again; every worker looks, because the one that is lost may be another."""
    while True:
        try:
            await rescue(app.job_manager)
        except Exception:
            log.exception("tasks of lost workers cannot be looked for")
        await asyncio.sleep(RESCUE_EVERY_S)


async def _reconcile(platform: Platform) -> None:
    """Keep the inference servers at the desired state: one pass per second while an adapter is served, unless another process runs one."""
    due_at = 0.0
    while platform.fleet is not None:
        try:
            if time.monotonic() >= due_at or await asyncio.to_thread(rollout.is_needed, platform):
                await asyncio.to_thread(rollout.reconcile, platform)
                due_at = time.monotonic() + RECONCILE_UNASKED_S
        except FtError as error:
            log.warning("the inference servers cannot be reconciled: %s", error.message)
        except Exception:
            log.exception("the inference servers cannot be reconciled")
        await asyncio.sleep(RECONCILE_EVERY_S)
