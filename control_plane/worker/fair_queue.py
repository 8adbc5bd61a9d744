"""A queue with a few threads of its own, fair to tenants: whatever one tenant's files do to a thread, another's find one free."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ft_assets.errors import FtError

AT_ONCE = 2
"""Files of a lane under work at once: each may take the memory of a validation, so they are few."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Task:
    file_id: str
    tenant: str
    done: threading.Event = field(default_factory=threading.Event)


class Lane:
    """Does `work` for each file once: tenants in turn, the files of one in the order in which they came.

    A tenant has at most all threads but one: its next file waits while the first file of another tenant does not.
    """

    def __init__(self, name: str, work: Callable[[str], None], *, at_once: int = AT_ONCE) -> None:
        self._work = work
        self._share = max(1, at_once - 1)
        self._changed = threading.Condition()
        self._waiting: list[_Task] = []
        self._running: list[_Task] = []
        self._turns: dict[str, int] = {}
        """Of each tenant, the number of the turn that it had last."""
        self._stopped = False
        self._threads = [threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(at_once)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Take no further file; one under work is left to the next start."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def put(self, file_id: str, tenant: str) -> threading.Event:
        """Have `file_id` done, unless it waits or is under work already; the event is set when it is done."""
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
                    task = min(fitting, key=lambda t: self._turns.get(t.tenant, 0))  # the first of those who waited longest
                    self._turns[task.tenant] = max(self._turns.values(), default=0) + 1
                    self._waiting.remove(task)
                    self._running.append(task)
                    return task
                self._changed.wait()
            return None
