"""Heartbeats, metrics, notices and the log, sent from a thread of their own: an API that is away delays nothing and loses nothing.

What has not been accepted stays in the files of the training process and in the list of notices, and is sent again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from agent.api_client import ApiClient, Fenced
from agent.messages import Exit, Facts, Heartbeat, HeartbeatAnswer, Notice, Reported
from agent.training_files import Line
from agent.uploads.log_upload import LogUpload
from core.errors import FtError, Unavailable
from core.retries import RetryPolicy
from engine.training import StopReason

HUNG_EXIT = 70
"""Exit code of an agent that gave up."""
LOG_EVERY_S = 2.0
"""How far a reader of the log lags behind."""
MAX_LINES = 500
"""Metric lines per heartbeat: after an outage the rest follows at once."""
RETRIES = RetryPolicy(first_s=0.5, most_s=5.0, give_up_s=900.0)
"""Time limit of the last report, whose GPUs are held meanwhile. After it the end is judged by what the launcher saw."""
LOG_RETRIES = RetryPolicy(give_up_s=30.0)
"""Time limit of the log's end while the object store does not take it: it is lost rather than the job delayed."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """What the next heartbeat says."""

    phase: str
    facts: Facts
    evaluation: Mapping[str, Any] | None = None
    address: str = ""
    """Where this node could lead its gang; empty before it can start."""


@dataclass(kw_only=True)
class Reporter:
    api: ApiClient
    log_upload: LogUpload | None
    """None where the log stays on the node: an attempt has one, of its first node."""
    state: Callable[[], State]
    unsent: Callable[[Reported], Sequence[Line]]
    """Returns the metric lines after those that were accepted."""
    hangs: Callable[[], str | None]
    """Returns what was observed if the agent gets nowhere: a call that does not return cannot be ended, only its process."""
    node: int = 0
    log_retries: RetryPolicy = LOG_RETRIES
    answer: HeartbeatAnswer = field(default_factory=HeartbeatAnswer)
    """The last one."""
    fenced: threading.Event = field(default_factory=threading.Event)
    """Set once the attempt was released: nothing more may be done."""
    _notices: list[Notice] = field(default_factory=list)
    _num_told: int = 0
    _number: int = 0
    accepted: Reported = field(default_factory=lambda: Reported(step=0, validation=0))
    """The newest metrics that were accepted."""
    _sending: threading.Lock = field(default_factory=threading.Lock)
    _ended: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _failures: int = 0

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="reporter", daemon=True)
        self._thread.start()

    def tell(self, notice: Notice) -> None:
        """Send `notice` with the next heartbeat."""
        with self._lock:
            self._notices.append(notice)

    def flush(self) -> None:
        """Send every metric line that exists now: a checkpoint is not committed before the metrics of its steps."""
        while self._beat():
            pass

    def finish(self, end: Exit) -> bool:
        """Send everything that is left, then how the workload ended; False if the API was away for too long or the attempt was released.

        An error that no retry can help with is raised: the launcher's observation then decides.
        """
        self._ended.set()
        self._thread.join()
        began, failures = time.monotonic(), 0
        while not self.fenced.is_set() and time.monotonic() - began < RETRIES.give_up_s:
            try:
                self.flush()
                self._send_rest_of_log(abandon=time.monotonic() - began >= self.log_retries.give_up_s)
                self._beat(end)
                return True
            except Fenced:
                self.fenced.set()
            except Unavailable as error:
                log.warning("the end cannot be reported yet: %s", error.message)
                time.sleep(RETRIES.wait_s(failures))
                failures += 1
        return False

    def _send_rest_of_log(self, *, abandon: bool) -> None:
        try:
            while self.log_upload is not None and self.log_upload.send(last=True):
                pass
        except FtError as error:
            if not abandon:
                raise
            log.warning("the end of the log is not stored: %s", error.message)
        except OSError as error:
            log.warning("the end of the log cannot be read: %s", error)

    def _send_log(self) -> bool:
        """Send new output, at most one piece; returns whether more is left. A store that does not take it delays no heartbeat."""
        try:
            return self.log_upload is not None and self.log_upload.send()
        except (FtError, OSError) as error:
            log.debug("the log is not sent now: %s", error)
            return False

    def _run(self) -> None:
        log_sent_at = 0.0
        while not self._ended.is_set():
            began = time.monotonic()
            try:
                more = self._beat()
                self._failures = 0
                if (stall := self.hangs()) is not None:
                    self._give_up(stall)
                if time.monotonic() - log_sent_at >= LOG_EVERY_S:
                    log_sent_at = 0.0 if self._send_log() else time.monotonic()
            except Fenced:
                self.fenced.set()
                return
            except FtError as error:
                self._failures += 1
                log.log(logging.WARNING if self._failures == 1 else logging.DEBUG, "not reported yet: %s", error.message)
                more = False
            except Exception:
                log.exception("a report failed")
                more = False
            self._ended.wait(0.0 if more else self._pause_s(time.monotonic() - began))

    def _pause_s(self, took_s: float) -> float:
        """Return how long to wait for the next heartbeat: a slow log does not make it later."""
        return RETRIES.wait_s(self._failures) if self._failures else max(0.0, self.answer.next_s - took_s)

    def _give_up(self, stall: str) -> NoReturn:
        log.error("the agent gives up: %s", stall)
        self._beat(Exit(exit_code=None, evidence=None, stop_reason=StopReason.STALLED, stall=stall))
        os._exit(HUNG_EXIT)

    def _beat(self, end: Exit | None = None) -> bool:
        """Send one heartbeat; returns whether metric lines are left."""
        with self._sending:
            state, accepted = self.state(), self.accepted
            lines = self.unsent(accepted)
            with self._lock:
                notices = tuple(self._notices)
            sent = tuple(lines[:MAX_LINES])
            self._number += 1
            beat = Heartbeat(
                node=self.node, address=state.address, phase=state.phase, facts=state.facts, evaluation=state.evaluation, metrics=sent,
                notices=notices,
                first_notice=self._num_told, number=self._number, exit=end,
            )  # fmt: skip
            self.answer = self.api.heartbeat(beat)
            self.accepted = Reported(
                step=max((m["step"] for m in sent if "loss" in m), default=accepted.step),
                validation=max((m["step"] for m in sent if "eval_loss" in m), default=accepted.validation),
            )
            with self._lock:
                del self._notices[: len(notices)]
                self._num_told += len(notices)
            return len(lines) > MAX_LINES
