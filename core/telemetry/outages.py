"""Logs one line at the start of an outage and one at its end, rather than a traceback at every iteration of every loop.

A loop that needs a database, a code location or an HTTP service fails at each iteration while that is unavailable.
:class:`OneLinePerOutage` recognizes such errors by the drivers' texts. The first error of each peer becomes a single line that names it,
further ones are counted, and when none has come for :data:`OVER_S` a line reports how many there were. Other errors pass unchanged.

An error that names no peer ("server closed the connection") belongs to the current outage of its kind, if there is one; an outage that
began with such an error gets the name of the first peer of its kind that a later one names.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from dataclasses import dataclass, field

OVER_S = 30.0
"""Seconds without another error after which an outage counts as over: loops retry at least every 30 s."""

KINDS = {
    "the database": (
        r"server closed the connection|connection to server|could not connect to server|terminating connection"
        r"|the database system is (starting up|shutting down|in recovery)|connection already closed|SSL connection has been closed"
        r"|embedded database of .* is not running|database does not answer"
    ),
    "the code location": r"DagsterUserCodeUnreachableError|user code server",
    "another service": (
        r"ConnectError|ConnectionError|Connection refused|Connection reset by peer|Remote end closed connection|ProtocolError|ReadTimeout"
        r"|Server disconnected|the Kubernetes API did not answer"
    ),
}
"""Error texts of an unavailable peer, by kind of peer. Excludes errors reported by a running database (a deadlock, a timeout)."""
_PATTERNS = {name: re.compile(pattern) for name, pattern in KINDS.items()}
OTHER = "another service"
MAX_PEERS = 100
"""Maximum concurrent outages with their own lines; further peers are counted with the newest outage of their kind."""
_ADDRESSES = {
    "the database": re.compile(r'connection to server (?:at "([^"]+)"(?: \([^)]*\))?, port (\d+)|on socket "([^"]+)")'),
    "the code location": re.compile(r"ipv[46]:([^\s:]+):(\d+)|(unix:[^\s:]+)"),
    OTHER: re.compile(r"host='([^']+)', port='?(\d+)|https?://(?:[^/\s\"'@]*@)?([^/\s\"'@]+)"),
}
"""Host and port, or address, of the peer in an error's text: libpq; gRPC; urllib3 and URLs."""


@dataclass(frozen=True, slots=True)
class Peer:
    kind: str
    """Key of :data:`KINDS`."""
    address: str = ""
    """``host:port`` or a socket; empty if the error names none."""

    def __str__(self) -> str:
        if self.kind == OTHER and self.address:
            return self.address
        return f"{self.kind} at {self.address}" if self.address else self.kind


@dataclass(slots=True)
class _Outage:
    peer: Peer
    began_at: float
    last_at: float
    num_more: int = 0


@dataclass(slots=True)
class _Seen:
    outages: list[_Outage] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


_seen = _Seen()
"""State of this process: several handlers and loggers report the same outage."""
log = logging.getLogger("core.telemetry.outages")


def peer_away(record: logging.LogRecord) -> Peer | None:
    """Returns the unavailable peer that `record` reports; None for any other record."""
    if record.levelno < logging.WARNING or record.name == log.name:
        return None
    text, requested = record.getMessage(), ""
    error = record.exc_info[1] if record.exc_info else None
    passed: set[int] = set()  # an error may be its own cause
    while error is not None and id(error) not in passed:
        passed.add(id(error))
        text += f"\n{type(error).__name__}: {error}"
        requested = requested or _request_url(error)
        error = error.__cause__ or error.__context__
    kind = next((name for name, pattern in _PATTERNS.items() if pattern.search(text)), None)
    if kind is None:
        return None
    found = _ADDRESSES[kind].search(f"{requested}\n{text}" if kind == OTHER else text)
    return Peer(kind, ":".join(part for part in found.groups() if part) if found else "")


def _request_url(error: BaseException) -> str:
    """Return the URL of the request that `error` is about; errors of HTTP clients carry it, but rarely print it."""
    try:
        return str(getattr(getattr(error, "request", None), "url", ""))
    except RuntimeError:  # httpx raises this if there is no request
        return ""


class OneLinePerOutage(logging.Filter):
    """Logs one line per outage. Attach it to handlers."""

    def filter(self, record: logging.LogRecord) -> bool:
        reported = getattr(record, "outage", None)
        if reported is not None:
            return bool(reported)  # another handler of this process has seen the record
        peer = peer_away(record)
        if peer is None:
            return True
        first = _count(peer)
        record.outage = first
        if first:
            _shorten(record, peer)
        return first


class Logger(logging.Logger):
    """Logger for processes whose handlers belong to another library: call ``logging.setLoggerClass(outages.Logger)`` before importing
    its modules."""

    _filter = OneLinePerOutage()

    def handle(self, record: logging.LogRecord) -> None:
        if self._filter.filter(record):
            super().handle(record)


def _count(peer: Peer) -> bool:
    """Counts an error. Returns whether it is the first of an outage."""
    now = time.monotonic()
    with _seen.lock:
        known = _under_way(peer) or (_under_way(Peer(peer.kind)) if len(_seen.outages) >= MAX_PEERS else None)
        if known is not None:
            known.last_at, known.num_more = now, known.num_more + 1
            return False
        _begin(peer, now)
    return True


def _under_way(peer: Peer) -> _Outage | None:
    """Returns the outage that an error of `peer` belongs to. An outage without an address takes the peer's."""
    same = [o for o in _seen.outages if o.peer.kind == peer.kind]
    if not peer.address:
        return max(same, key=lambda o: o.last_at, default=None)
    found = next((o for o in same if o.peer == peer), None)
    if found is None and (found := next((o for o in same if not o.peer.address), None)) is not None:
        found.peer = peer
    return found


def _begin(peer: Peer, now: float) -> None:
    _seen.outages.append(_Outage(peer, began_at=now, last_at=now))
    if len(_seen.outages) == 1:
        threading.Thread(target=_await_ends, name="outages", daemon=True).start()


def _shorten(record: logging.LogRecord, peer: Peer) -> None:
    message = record.getMessage().strip().split("\n", 1)[0]
    error = record.exc_info[1] if record.exc_info else None
    why = f" ({type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''})" if error else ""
    record.msg = f"{peer} does not answer: {message}{why}; further errors of this outage are counted, not logged"
    record.args, record.exc_info, record.exc_text, record.stack_info = (), None, None, None


def _await_ends() -> None:
    """Reports the end of each outage; runs while there is one."""
    while True:
        with _seen.lock:
            now = time.monotonic()
            over = [o for o in _seen.outages if o.last_at + OVER_S <= now]
            _seen.outages = [o for o in _seen.outages if o.last_at + OVER_S > now]
            left_s = min((o.last_at + OVER_S - now for o in _seen.outages), default=None)
        for outage in over:
            log.warning(
                "%s: no further error for %.0f s; the outage lasted %.0f s, %d errors were not logged",
                outage.peer, OVER_S, outage.last_at - outage.began_at, outage.num_more,
            )  # fmt: skip
        if left_s is None:
            return
        time.sleep(left_s)
