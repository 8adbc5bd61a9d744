"""Does at once what the sensors would do at their next tick: ``python -m sensors.nudge``.

The database tells of each change of the queue when it is committed (channel ``ft_queue``). Then this process runs a round of
the scheduler and asks for the runs that are due, by the same functions and under the same keys as the sensors ``admission`` and
``scheduling``; it launches through GraphQL, so that Dagster's queue and the admission before it are crossed. Where it is dead, or
loses its connection, the sensors do everything within their five seconds.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import dagster as dg
import sqlalchemy as sa
from sqlalchemy.engine import Engine
from sqlalchemy.exc import SQLAlchemyError

from control_plane.service import run_launches
from control_plane.service.due_runs import DueRun, due_runs
from control_plane.service.platform import Platform
from control_plane.service.scheduling import place
from control_plane.settings import load
from ft_assets import logs, tracing
from ft_assets.errors import FtError
from ft_assets.partitions import JOBS, partition_key
from resources.dagster_launches import DagsterLaunches
from resources.database.engine import make_engine
from resources.platform import open_platform
from sensors.run_requests import MAX_REQUESTS_PER_TICK, missing, run_request

CHANNEL = "ft_queue"
STAGES = ("prepare", "train", "evaluate")
BURST_S = 0.05
"""What comes within this of the first word is one round: 50 submissions at once make a few rounds, not 50."""
LAUNCHES_AT_ONCE = 4
"""As many as Dagster's daemon dequeues at once."""
RETRY_S = 2.0
"""After an error; by then the sensors may have done it."""
LOOK_EVERY_S = 1.0
"""How soon SIGTERM is heard."""
NUDGE = "nudge"
"""Who asks, in claims and in the tag ``ft/asked_by``."""

log = logging.getLogger("sensors.nudge")


class Nudge:
    """One round at a time over a platform and its Dagster instance."""

    def __init__(self, platform: Platform, instance: dg.DagsterInstance, launches: DagsterLaunches) -> None:
        self._platform, self._instance, self._launches = platform, instance, launches

    def round(self) -> list[str]:
        """Place what fits, ask for what is due; the keys of the runs that were asked for."""
        place(self._platform)
        asked: list[str] = []
        while True:
            due = missing(self._platform, self._instance, due_runs(self._platform, STAGES), by=NUDGE)
            self._instance.add_dynamic_partitions(str(JOBS.name), [partition_key(d.tenant, d.job_id) for d in due if d.stage == "prepare"])
            with ThreadPoolExecutor(LAUNCHES_AT_ONCE) as threads:
                asked += [key for key in threads.map(self._ask, due) if key]
            if len(due) < MAX_REQUESTS_PER_TICK:
                return asked

    def _ask(self, due: DueRun) -> str | None:
        try:
            self._launches.launch(run_request(due, by=NUDGE))
        except FtError as error:
            log.warning("%s is left to the sensors: %s", due.run_key, error.message)
            run_launches.give_up(self._platform, [due.run_key], by=NUDGE)
            return None
        return due.run_key


def listen(engine: Engine, heard: Callable[[], object], ending: threading.Event) -> None:
    """Call `heard` at once, for what was missed, and after each word until `ending`; raises when the connection is lost."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as conn:
        conn.execute(sa.text(f"LISTEN {CHANNEL}"))
        raw = conn.connection.driver_connection
        assert raw is not None
        heard()
        while not ending.is_set():
            ready, _, _ = select.select([raw], [], [], LOOK_EVERY_S)
            if not ready:
                continue
            time.sleep(BURST_S)
            raw.poll()
            if raw.notifies:
                raw.notifies.clear()
                heard()


def run(platform: Platform, dagster_url: str, alive: Path, ending: threading.Event) -> None:
    """Listen until `ending`, through errors of the database and of Dagster; `alive` is touched once it listens."""
    engine = make_engine(platform.engine.url.render_as_string(hide_password=False), pool_size=1, max_overflow=0)
    launches = DagsterLaunches(dagster_url)
    try:
        with dg.DagsterInstance.get() as instance:
            nudge = Nudge(platform, instance, launches)

            def heard() -> None:
                alive.touch()
                began = time.monotonic()
                asked = nudge.round()
                if asked:
                    log.info("asked for %d runs in %.2f s: %s", len(asked), time.monotonic() - began, ", ".join(asked))

            while not ending.is_set():
                try:
                    listen(engine, heard, ending)
                except (SQLAlchemyError, OSError, FtError, dg.DagsterError) as error:
                    log.warning("the sensors are alone for a moment: %s: %s", type(error).__name__, str(error)[:300])
                    ending.wait(RETRY_S)
    finally:
        launches.close()
        engine.dispose()


def alive_file(home: Path) -> Path:
    return home / "nudge.alive"


def main() -> int:
    logs.configure("ft-nudge")
    tracing.configure("ft-nudge")
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
