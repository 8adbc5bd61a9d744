"""Work on files outside of requests: fetching imports, validating in child processes, and finishing what other processes left undone.

The API validates only tiny uncompressed uploads in its own process, and only once. Everything else, and whatever was started before, is
read by child processes (``control_plane.sandbox.sandbox_parent``), so that their memory, time and crashes do not affect the API. Lanes
limit how many run at once: one for files whose upload waits, one for large files, one for fetches, so that none blocks the others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from sqlalchemy.engine import RowMapping

from control_plane.datasets.hub_fetch import is_fetched
from control_plane.datasets.uploads import uploaded_files
from control_plane.platform.context import Platform
from control_plane.sandbox import scratch
from ft_assets.errors import FtError, Unavailable

LOOK_EVERY_S = 60.0
"""Interval of looking for uploads that a dead process left unvalidated, and for its temporary files."""
WAIT_S = 45.0
"""Seconds that an upload waits for its validation: clients and proxies give up after a minute of silence."""
MAX_WAITING = 16
"""Uploads that may wait at once: less than half of the 40 threads that handle requests."""

log = logging.getLogger(__name__)


class ValidationWorker:
    """Daemon threads: a restart loses only tokens, because unfinished files are found again by their rows."""

    def __init__(self, platform: Platform, *, look_every_s: float = LOOK_EVERY_S, wait_s: float = WAIT_S) -> None:
        self._platform = platform
        self._look_every_s = look_every_s
        self._wait_s = wait_s
        self._stopped = threading.Event()
        self._waiting = threading.BoundedSemaphore(MAX_WAITING)
        self._tokens: dict[str, str] = {}
        self._short = Lane("validation", self._validate)
        self._long = Lane("long-validation", self._validate)
        self._fetches = Lane("fetch", self._fetch)
        self._looker = threading.Thread(target=self._look, name="unvalidated", daemon=True)

    def start(self) -> None:
        for lane in (self._short, self._long, self._fetches):
            lane.start()
        self._looker.start()

    def stop(self) -> None:
        """Take no further file; one being read is left to the next start."""
        self._stopped.set()
        for lane in (self._short, self._long, self._fetches):
            lane.stop()

    def take(self, file: RowMapping) -> RowMapping:
        """Have an upload validated; returns it when done, or in its present state if that takes long."""
        lane = self._lane(file)
        done = lane.put(file["id"], file["tenant_id"])
        if lane is self._short and self._waiting.acquire(blocking=False):
            try:
                done.wait(self._wait_s)
            finally:
                self._waiting.release()
        return uploaded_files.find(self._platform, file["id"])

    def enqueue(self, file_id: str, *, hub_token: str = "") -> threading.Event:
        """Process a file after the response; the token is kept in memory until its import is fetched."""
        if hub_token:
            self._tokens[file_id] = hub_token
        file = uploaded_files.find(self._platform, file_id)
        return self._lane(file).put(file_id, file["tenant_id"])

    def _lane(self, file: RowMapping) -> Lane:
        if not is_fetched(file):
            return self._fetches
        try:
            return self._long if uploaded_files.is_large(self._platform, file) else self._short
        except Unavailable:
            return self._long

    def _look(self) -> None:
        while True:
            try:
                for file_id in uploaded_files.unvalidated(self._platform):
                    self.enqueue(file_id)
                scratch.remove_leftovers(self._platform.settings.work_dir)
            except Exception:
                log.exception("cannot look for unvalidated files and for what killed processes left of them")
            if self._stopped.wait(self._look_every_s):
                return

    def _validate(self, file_id: str) -> None:
        uploaded_files.validate(self._platform, file_id, wait=False)

    def _fetch(self, file_id: str) -> None:
        file = uploaded_files.validate(self._platform, file_id, wait=False, hub_token=self._tokens.get(file_id, ""), only_fetch=True)
        if is_fetched(file) or file["status"] != "uploaded":
            self._tokens.pop(file_id, None)
        if is_fetched(file) and file["status"] == "uploaded" and file["deleted_at"] is None:
            self.enqueue(file_id)


AT_ONCE = 2
"""Files per lane processed at once: few, because each may take the memory of a validation."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Task:
    file_id: str
    tenant: str
    done: threading.Event = field(default_factory=threading.Event)


class Lane:
    """Runs `work` once per file: tenants take turns, and a tenant's files run in the order in which they came.

    A tenant uses at most all threads but one: its next file waits, while the first file of another tenant does not.
    """

    def __init__(self, name: str, work: Callable[[str], None], *, at_once: int = AT_ONCE) -> None:
        self._work = work
        self._share = max(1, at_once - 1)
        self._changed = threading.Condition()
        self._waiting: list[_Task] = []
        self._running: list[_Task] = []
        self._turns: dict[str, int] = {}
        """Number of each tenant's last turn."""
        self._stopped = False
        self._threads = [threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(at_once)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Take no further file; one in progress is left to the next start."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def put(self, file_id: str, tenant: str) -> threading.Event:
        """Queue `file_id` unless it already waits or runs; the event is set when it is done."""
        with self._changed:
            for task in (*self._running, *self._waiting):
                if task.file_id == file_id:
                    return task.done
            task = _Task(file_id=file_id, tenant=tenant)
            self._waiting.append(task)
            self._changed.notify()
            return task.done

    def _run(self) -> None:
        while (task := self._next()) is not None:
            try:
                self._work(task.file_id)
            except FtError as error:
                log.warning("the work on %s waits: %s", task.file_id, error.message)
            except Exception:
                log.exception("the work on %s failed", task.file_id)
            with self._changed:
                self._running.remove(task)
                self._changed.notify_all()
            task.done.set()

    def _next(self) -> _Task | None:
        with self._changed:
            while not self._stopped:
                busy = [task.tenant for task in self._running]
                fitting = [task for task in self._waiting if busy.count(task.tenant) < self._share]
                if fitting:
                    task = min(fitting, key=lambda t: self._turns.get(t.tenant, 0))  # the first file of the tenant that has waited longest
                    self._turns[task.tenant] = max(self._turns.values(), default=0) + 1
                    self._waiting.remove(task)
                    self._running.append(task)
                    return task
                self._changed.wait()
            return None
