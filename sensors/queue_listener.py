"""Does at once what the sensors would do at their next tick, in a thread of Dagster's daemon (:mod:`sensors.daemon`).

The database notifies each committed change of the queue (channel ``ft_queue``). The listener then runs a scheduling cycle and requests the
runs that are due, with the same functions and keys as the sensors ``admission``, ``scheduling`` and ``evaluations``; it launches through
GraphQL, so that runs pass Dagster's queue and its admission. While a job or an evaluation is open, it does so every five seconds too, and
replaces dead runs as the sensor ``failures`` does. Without it, the sensors do everything, within half a minute.
"""

from __future__ import annotations

import logging
import math
import select
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import dagster as dg
import psycopg
import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from control_plane.platform.context import Platform
from control_plane.platform.secrets import dagster_token
from control_plane.queue import launches
from control_plane.queue.cycle import run_cycle
from control_plane.queue.launches import DueRun, due_runs
from core.errors import FtError, Unavailable
from ft_assets.partitions import JOBS, partition_key
from resources.dagster.graphql_client import DagsterLaunches
from resources.database.engine import CONNECTION
from resources.launcher import open_launcher
from sensors import recovery
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
MAX_PAUSE_S = 8.0
"""Pause between cycles while Dagster's webserver does not answer, which is restarted within seconds."""
REFUSED_S = 60.0
"""How long a run that Dagster refused is left to the sensors."""
OPEN_LOOK_S = 5.0
"""Between cycles while a job or an evaluation is open, without a notification: for what becomes due with time, and for runs that die."""
LOOK_EVERY_S = 1.0
"""How late the end of the process is noticed."""
LISTENER = "queue-listener"
"""Name of this process in claims and in the tag ``dagster/ft_asked_by``."""

log = logging.getLogger("sensors.queue_listener")


class QueueListener:
    """Runs one cycle at a time for a platform and its Dagster instance."""

    def __init__(
        self,
        platform: Platform,
        instance: dg.DagsterInstance,
        launches: DagsterLaunches,
        ending: threading.Event | None = None,
        *,
        open_look_s: float = OPEN_LOOK_S,
    ) -> None:
        self._platform, self._instance, self._launches, self._open_look_s = platform, instance, launches, open_look_s
        self._ending = ending or threading.Event()
        self._away = threading.Event()
        self._launcher = open_launcher(platform.settings)
        self._look_at = 0.0
        """When dead runs are looked for again, without a notification too."""
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
                self.pause_s = _longer(self.pause_s)
                return launched
            if len(due) < MAX_REQUESTS_PER_TICK:
                break
        self.pause_s = 0.0
        return launched

    def is_due(self) -> bool:
        """Whether something is open that was not looked at for a while."""
        return time.monotonic() >= self._look_at

    def look(self) -> list[str]:
        """Run a cycle, request evaluations, and replace dead runs if it is time; returns the keys of the requested runs."""
        before_s, launched = self.pause_s, self.round()
        if not self._away.is_set():
            launched += self._evaluate()
            if self._away.is_set():
                self.pause_s = _longer(before_s)
        if due := self.is_due():
            for what in recovery.replace_dead(self._platform, self._instance, self._launcher):
                log.info("replaced: %s", what)
        if not launches.any_open(self._platform):
            self._look_at = math.inf
        elif due or math.isinf(self._look_at):
            self._look_at = time.monotonic() + self._open_look_s
        return launched

    def _evaluate(self) -> list[str]:
        if not launches.evaluation_open(self._platform):
            return []
        from sensors import evaluation_requests  # 50 MiB of libraries that a daemon without evaluations does not need

        due = evaluation_requests.due_requests(self._platform, self._instance, self._launcher, by=LISTENER)
        requests = [r for r in due if r.run_key not in self._refused]
        self._instance.add_dynamic_partitions(str(JOBS.name), sorted({str(r.partition_key) for r in requests}))
        launched = []
        for request in requests:
            if self._away.is_set():
                break
            try:
                self._launches.launch(request)
            except FtError as error:
                self._leave(str(request.run_key), error)
            else:
                launched.append(str(request.run_key))
        return launched

    def _leave(self, run_key: str, error: FtError) -> None:
        """Leave a run that was not launched to the sensors."""
        if isinstance(error, Unavailable):
            self._away.set()
        else:
            self._refused[run_key] = time.monotonic() + REFUSED_S
        log.warning("%s is left to the sensors: %s", run_key, error.message)

    def _wanted(self) -> list[DueRun]:
        """Return what is due, without recently refused runs."""
        now = time.monotonic()
        self._refused = {key: until for key, until in self._refused.items() if until > now}
        return [due for due in due_runs(self._platform, STAGES) if due.run_key not in self._refused]

    def _ask(self, due: DueRun) -> str | None:
        if not self._ending.is_set() and not self._away.is_set():
            try:
                self._launches.launch(run_request(due, by=LISTENER))
                return due.run_key
            except FtError as error:
                self._leave(due.run_key, error)
        launches.give_up(self._platform, [due.run_key], by=LISTENER)
        return None


def _longer(pause_s: float) -> float:
    return min(MAX_PAUSE_S, max(RETRY_S, 2 * pause_s))


def listen(
    database: sa.URL, on_notification: Callable[[], float | None], ending: threading.Event, is_due: Callable[[], bool] = lambda: False
) -> None:
    """Call `on_notification` at once, for missed notifications, after each one, and when it `is_due`, until `ending`; raises when the
    connection is lost.

    If it returns a number of seconds, it is called when they have passed, with or without a notification, and not before.
    """
    url = database.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(url, autocommit=True, application_name="ft", **CONNECTION) as conn:
        conn.execute(f"LISTEN {CHANNEL}")
        notified, not_before = True, 0.0
        while not ending.is_set():
            if (notified or is_due()) and time.monotonic() >= not_before:
                pause_s = on_notification() or 0.0
                notified, not_before = pause_s > 0, time.monotonic() + pause_s
            wait_s = min(LOOK_EVERY_S, max(0.0, not_before - time.monotonic())) if notified else LOOK_EVERY_S
            if any(select.select([conn], [], [], wait_s)) and list(conn.notifies(timeout=0)):
                time.sleep(BURST_S)
                list(conn.notifies(timeout=0))  # those of the burst share the cycle
                notified = True


def run(platform: Platform, dagster_url: str, ending: threading.Event) -> None:
    """Listen until `ending`, through errors of the database and of Dagster."""
    launches = DagsterLaunches(dagster_url, token=dagster_token(platform.settings))
    try:
        with dg.DagsterInstance.get() as instance:
            listener = QueueListener(platform, instance, launches, ending)

            def on_notification() -> float:
                began = time.monotonic()
                launched = listener.look()
                if launched:
                    log.info("asked for %d runs in %.2f s: %s", len(launched), time.monotonic() - began, ", ".join(launched))
                return listener.pause_s

            while not ending.is_set():
                try:
                    listen(platform.engine.url, on_notification, ending, listener.is_due)
                except (SQLAlchemyError, psycopg.Error, OSError, FtError, dg.DagsterError) as error:
                    log.warning("the sensors are alone for a moment: %s: %s", type(error).__name__, str(error)[:300])
                    ending.wait(RETRY_S)
    finally:
        launches.close()
