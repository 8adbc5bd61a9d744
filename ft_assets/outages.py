"""One line at the start of an outage and one at its end, in place of a traceback at every turn of every loop.

A loop that needs a database, a code location or an HTTP service fails at each turn while that is away. :class:`OneLinePerOutage`
recognizes such errors by what the drivers write. The first one becomes a single line, the next ones are counted, and when none has
come for :data:`OVER_S` a line tells how many there were. Other errors pass unchanged.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from dataclasses import dataclass, field

OVER_S = 30.0
"""Seconds without a further error after which an outage counts as over: loops try again every 30 s at the latest."""

KINDS = {
    "the database": (
        r"server closed the connection|connection to server|could not connect to server|terminating connection"
        r"|the database system is (starting up|shutting down|in recovery)|connection already closed|SSL connection has been closed"
        r"|embedded database of .* is not running|database does not answer"
    ),
    "the code location": r"DagsterUserCodeUnreachableError|user code server",
    "another service": r"ConnectError|ConnectionError|Connection refused|RemoteProtocolError|ReadTimeout|Server disconnected",
}
"""Text of errors of a peer that is away, by its name. Errors that a running database reports (a deadlock, a timeout) are none."""
_PATTERNS = {name: re.compile(pattern) for name, pattern in KINDS.items()}


@dataclass(slots=True)
class _Outage:
    began_at: float
    last_at: float
    num_more: int = 0


@dataclass(slots=True)
class _Seen:
    outages: dict[str, _Outage] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


_seen = _Seen()
"""Of this process: several handlers and loggers report the same outage."""
log = logging.getLogger("ft_assets.outages")


def peer_away(record: logging.LogRecord) -> str | None:
    """Name of the peer whose absence `record` reports, None for any other record."""
    if record.levelno < logging.WARNING or record.name == log.name:
        return None
    text = record.getMessage()
    error = record.exc_info[1] if record.exc_info else None
    while error is not None:
        text += f"\n{type(error).__name__}: {error}"
        error = error.__cause__ or error.__context__
    return next((name for name, pattern in _PATTERNS.items() if pattern.search(text)), None)


class OneLinePerOutage(logging.Filter):
    """For handlers."""

    def filter(self, record: logging.LogRecord) -> bool:
        told = getattr(record, "outage", None)
        if told is not None:
            return bool(told)  # another handler of this process has seen the record
        name = peer_away(record)
        if name is None:
            return True
        first = _count(name)
        record.outage = first
        if first:
            _shorten(record, name)
        return first


class Logger(logging.Logger):
    """Where another library sets the handlers: call ``logging.setLoggerClass(outages.Logger)`` before its modules are imported."""

    _filter = OneLinePerOutage()

    def handle(self, record: logging.LogRecord) -> None:
        if self._filter.filter(record):
            super().handle(record)


def _count(name: str) -> bool:
    """Whether this error is the first of an outage."""
    now = time.monotonic()
    with _seen.lock:
        known = _seen.outages.get(name)
        if known is not None:
            known.last_at, known.num_more = now, known.num_more + 1
            return False
        _seen.outages[name] = _Outage(began_at=now, last_at=now)
    threading.Thread(target=_await_end, args=(name,), name="outage", daemon=True).start()
    return True


def _shorten(record: logging.LogRecord, name: str) -> None:
    message = record.getMessage().strip().split("\n", 1)[0]
    error = record.exc_info[1] if record.exc_info else None
    why = f" ({type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''})" if error else ""
    record.msg = f"{name} does not answer: {message}{why}; further errors of this outage are counted, not logged"
    record.args, record.exc_info, record.exc_text, record.stack_info = (), None, None, None


def _await_end(name: str) -> None:
    while True:
        with _seen.lock:
            outage = _seen.outages[name]
            left_s = outage.last_at + OVER_S - time.monotonic()
            if left_s <= 0:
                del _seen.outages[name]
                break
        time.sleep(left_s)
    lasted_s = outage.last_at - outage.began_at
    log.warning(
        "%s: no further error for %.0f s; the outage lasted %.0f s, %d errors were not logged", name, OVER_S, lasted_s, outage.num_more
    )
