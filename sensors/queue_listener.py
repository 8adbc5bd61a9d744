"""Does at once what the sensors would do at their next tick: ``python -m sensors.queue_listener``.

The database notifies each committed change of the queue (channel ``ft_queue``). This process then runs a scheduling cycle and requests the
runs that are due, with the same functions and keys as the sensors ``admission`` and ``scheduling``; it launches through GraphQL, so that
runs pass Dagster's queue and its admission. If it is down or loses its connection, the sensors do everything within their five seconds.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import dagster as dg
import psycopg
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from control_plane.composition import open_platform
from control_plane.platform.context import Platform
from control_plane.platform.secrets import dagster_token
from control_plane.platform.settings import load
from control_plane.queue import launches
from control_plane.queue.cycle import run_cycle
from control_plane.queue.launches import DueRun, due_runs
from ft_assets.errors import FtError, Unavailable
from ft_assets.partitions import JOBS, partition_key
from ft_assets.telemetry import logs, spans
from resources.dagster.graphql_client import DagsterLaunches
from resources.database.engine import CONNECTION
from sensors.run_requests import MAX_REQUESTS_PER_TICK, missing, run_request

CHANNEL = "ft_queue"
STAGES = ("train", "prepare", "evaluate")
"""Order in which runs are requested: a job with a reservation does not wait for a burst of submissions."""
BURST_S = 0.05
"""Notifications within this time share a cycle: 50 submissions at once make a few cycles, not 50."""
LAUNCHES_AT_ONCE = 4
"""As many as Dagster's daemon dequeues at once."""
RETRY_S = 2.0
"""Pause after an error; by then the sensors may have done the work."""
MAX_PAUSE_S = 30.0
"""Pause between cycles while Dagster does not answer; the sensors ask every five seconds."""
REFUSED_S = 60.0
"""How long a run that Dagster refused is left to the sensors, which request it at least ten times meanwhile."""
LOOK_EVERY_S = 1.0
"""How soon SIGTERM is noticed."""
LISTENER = "queue-listener"
"""Name of this process in claims and in the tag ``dagster/ft_asked_by``."""

log = logging.getLogger("sensors.queue_listener")


class QueueListener:
    """Runs one cycle at a time for a platform and its Dagster instance."""

    def __init__(
        self, platform: Platform, instance: dg.DagsterInstance, launches: DagsterLaunches, ending: threading.Event | None = None
    ) -> None:
        self._platform, self._instance, self._launches = platform, instance, launches
        self._ending = ending or threading.Event()
        self._away = threading.Event()
        self._refused: dict[str, float] = {}
        """Until when a run is left to the sensors, by its key."""
        self.pause_s = 0.0
        """How long to leave everything to the sensors after this cycle, because Dagster did not answer in it."""

    def round(self) -> list[str]:
        """Run a scheduling cycle and request the runs that are due; returns the keys of the requested runs.

        Claims that led to no run are released, so that the rest is due again. A run that Dagster refuses is not requested again for
        :data:`REFUSED_S`, and does not hold up others; if Dagster does not answer at all, this is the last attempt of the cycle.
        """
        run_cycle(self._platform)
        launched: list[str] = []
        self._away.clear()
        while not self._ending.is_set():
            due = missing(self._platform, self._instance, self._wanted(), by=LISTENER)
            self._instance.add_dynamic_partitions(str(JOBS.name), [partition_key(d.tenant, d.job_id) for d in due if d.stage == "prepare"])
            with ThreadPoolExecutor(LAUNCHES_AT_ONCE) as threads:
                launched += [key for key in threads.map(self._ask, due) if key]
            if self._away.is_set():
                self.pause_s = min(MAX_PAUSE_S, max(RETRY_S, 2 * self.pause_s))
                return launched
            if len(due) < MAX_REQUESTS_PER_TICK:
                break
        self.pause_s = 0.0
        return launched

    def _wanted(self) -> list[DueRun]:
        """Return what is due, without recently refused runs."""
        now = time.monotonic()
        self._refused = {key: until for key, until in self._refused.items() if until > now}
        return [due for due in due_runs(self._platform, STAGES) if due.run_key not in self._refused]

    def _ask(self, due: DueRun) -> str | None:
        why = "this process ends" if self._ending.is_set() else "Dagster did not answer before" if self._away.is_set() else ""
        if not why:
            try:
                self._launches.launch(run_request(due, by=LISTENER))
                return due.run_key
            except FtError as error:
                why = error.message
                if isinstance(error, Unavailable):
                    self._away.set()
                else:
                    self._refused[due.run_key] = time.monotonic() + REFUSED_S
        log.warning("%s is left to the sensors: %s", due.run_key, why)
        launches.give_up(self._platform, [due.run_key], by=LISTENER)
        return None


def listen(database: sa.URL, on_notification: Callable[[], float | None], ending: threading.Event) -> None:
    """Call `on_notification` at once, for missed notifications, and after each one until `ending`; raises when the connection is lost.

    If it returns a number of seconds, it is called when they have passed, with or without a notification, and not before.
    """
    url = database.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url, autocommit=True, application_name="ft", **CONNECTION) as conn:
        conn.execute(f"LISTEN {CHANNEL}")
        notified, not_before = True, 0.0
        while not ending.is_set():
            if notified and time.monotonic() >= not_before:
                pause_s = on_notification() or 0.0
                notified, not_before = pause_s > 0, time.monotonic() + pause_s
            if list(conn.notifies(timeout=LOOK_EVERY_S, stop_after=1)):
                time.sleep(BURST_S)
                list(conn.notifies(timeout=0))  # those of the burst share the cycle
                notified = True


def run(platform: Platform, dagster_url: str, alive: Path, ending: threading.Event) -> None:
    """Listen until `ending`, through errors of the database and of Dagster; touches `alive` once it listens."""
    launches = DagsterLaunches(dagster_url, token=dagster_token(platform.settings))
    try:
        with dg.DagsterInstance.get() as instance:
            listener = QueueListener(platform, instance, launches, ending)

            def on_notification() -> float:
                alive.touch()
                began = time.monotonic()
                launched = listener.round()
                if launched:
                    log.info("asked for %d runs in %.2f s: %s", len(launched), time.monotonic() - began, ", ".join(launched))
                return listener.pause_s

            while not ending.is_set():
                try:
                    listen(platform.engine.url, on_notification, ending)
                except (SQLAlchemyError, psycopg.Error, OSError, FtError, dg.DagsterError) as error:
                    log.warning("the sensors are alone for a moment: %s: %s", type(error).__name__, str(error)[:300])
                    ending.wait(RETRY_S)
    finally:
        launches.close()


def alive_file(home: Path) -> Path:
    return home / "queue-listener.alive"


def main() -> int:
    logs.configure("ft-queue-listener")
    spans.configure("ft-queue-listener")
    settings, ending = load(), threading.Event()

    def end(_signum: int, _frame: FrameType | None) -> None:
        ending.set()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    platform = open_platform(settings)
    url = os.environ.get("FT_DAGSTER_URL") or f"http://127.0.0.1:{settings.dagster_port}"
    run(platform, url, alive_file(settings.home), ending)
    return 0


if __name__ == "__main__":
    sys.exit(main())
