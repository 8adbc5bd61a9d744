"""Trace spans: one trace per job, from the submitting request to the training process.

Spans go to the OTLP/HTTP collector in ``FT_OTLP_ENDPOINT``. Without one, nothing is imported or measured, but a trace started by a caller
is still passed on and logged. An unavailable or slow collector costs spans, not time: they wait in a bounded queue, and an ending process
waits for them only briefly.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from core.telemetry.otlp import Exporter

ENDPOINT, SHARE = "FT_OTLP_ENDPOINT", "FT_TRACE_SHARE"
HEADERS = "OTEL_EXPORTER_OTLP_HEADERS"
"""OpenTelemetry's own variable for headers such as a key; of workloads, only those on the control plane's own machine get it."""
PARENT = "TRACEPARENT"
"""Environment variable of a workload: the span that started it."""
FLUSH_S = 2.0
"""Seconds that the end of a step or a process waits for its last spans."""

Value = str | int | float | bool
Kind = Literal["internal", "server", "client", "producer", "consumer"]

_FORM = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")
_current: ContextVar[str | None] = ContextVar("ft_traceparent", default=None)

log = logging.getLogger(__name__)


class Span(Protocol):
    """A timed operation."""

    recorded: bool

    def rename(self, name: str) -> None: ...
    def set(self, **attributes: Value | None) -> None:
        """Sets attributes; ``__`` in a name stands for a dot."""

    def fail(self, why: str) -> None:
        """Marks it as failed; `why` is a code or a class name without data."""

    def end(self) -> None: ...


class _Unrecorded:
    recorded = False

    def rename(self, name: str) -> None: ...
    def set(self, **attributes: Value | None) -> None: ...
    def fail(self, why: str) -> None: ...
    def end(self) -> None: ...


class _Process:
    """Span settings of this process, and its parent span."""

    def __init__(self) -> None:
        self.service, self.endpoint, self.share = "ft", "", 1.0
        self.parent: str | None = None
        self.open: list[Span] = []
        self.lock = threading.Lock()
        self._exporter: Exporter | None = None

    def exporter(self) -> Exporter | None:
        """Returns the exporter, created on first use so that OpenTelemetry's SDK is imported only in processes that send spans."""
        with self.lock:
            if self._exporter is None and self.endpoint:
                try:
                    from core.telemetry.otlp import Exporter

                    self._exporter = Exporter(endpoint=self.endpoint, service=self.service, share=self.share)
                except Exception as error:  # tracing failed, not the traced work
                    log.warning("no spans are sent to %s: %s: %s", self.endpoint, type(error).__name__, error)
                    self.endpoint = ""
            return self._exporter if self.endpoint else None

    def flush(self, timeout_s: float) -> bool:
        return self._exporter is None or self._exporter.flush(timeout_s)


_this = _Process()


def configure(service: str) -> None:
    """Sends spans of this process as `service` if its environment names a collector. Without this call none are sent."""
    e = os.environ
    _this.service = service
    _this.endpoint = (e.get(ENDPOINT) or "").rstrip("/")
    _this.share = float(e.get(SHARE) or 1.0)
    _this.parent = valid(e.get(PARENT))


def is_on() -> bool:
    """Returns whether this process sends spans."""
    return bool(_this.endpoint)


def valid(header: str | None) -> str | None:
    """Returns a valid W3C ``traceparent`` unchanged, else None: callers' values are not trusted."""
    return header if header and len(header) < 200 and _FORM.fullmatch(header) else None


def current() -> str | None:
    """Returns the ``traceparent`` of the open span, or of the one that the process was started in."""
    return _current.get() or _this.parent


def ids() -> tuple[str, str] | None:
    """Returns trace id and span id of :func:`current`."""
    parent = current()
    return None if parent is None else (parent[3:35], parent[36:52])


@contextlib.contextmanager
def span(name: str, *, parent: str | None = None, kind: Kind = "internal", **attributes: Value | None) -> Iterator[Span]:
    """Times the wrapped work as `name`, within the span `parent` (default: the open one); ``__`` in an attribute's name stands for a dot.

    Tenant, job and attempt are added from :mod:`core.telemetry.correlation` at the end.
    """
    within = valid(parent) or current()
    exporter = _this.exporter() if _this.endpoint else None
    recording = None if exporter is None else exporter.start(name, within, kind, attributes)
    token = _current.set(within if recording is None else recording.traceparent)
    if recording is not None:
        _this.open.append(recording)
    made: Span = recording or _Unrecorded()
    try:
        yield made
    except Exception as error:
        if getattr(error, "outcome", None) != "preempted":  # a preempted step has not failed
            made.fail(str(getattr(error, "code", None) or type(error).__name__))
        raise
    finally:
        _current.reset(token)
        made.end()
        with contextlib.suppress(ValueError):
            _this.open.remove(made)


@contextlib.contextmanager
def whole_process(parent: str | None) -> Iterator[None]:
    """Makes `parent` the parent span of the whole process, including threads started inside."""
    before, _this.parent = _this.parent, valid(parent) or _this.parent
    try:
        yield
    finally:
        _this.parent = before


def environment() -> dict[str, str]:
    """Returns the environment variables with which a workload continues the current trace."""
    parent = current()
    found = {PARENT: parent} if parent else {}
    return found | {ENDPOINT: _this.endpoint, SHARE: str(_this.share)} if _this.endpoint else found


def flush(*, timeout_s: float = FLUSH_S) -> bool:
    """Sends recorded spans. Returns False if that takes longer than `timeout_s`, and continues in the background."""
    return _this.flush(timeout_s)


def close(*, failure: str | None = None, **attributes: Value | None) -> bool:
    """Ends every open span, innermost first, and sends them. For a process about to exit, possibly in a signal handler.

    A separate thread does the work, because the interrupted one may hold locks that ending a span needs.
    """
    if not _this.open:
        return flush()

    def end_all() -> None:
        for each in reversed(list(_this.open)):
            each.set(**attributes)
            if failure:
                each.fail(failure)
            each.end()
        flush()

    ending = threading.Thread(target=end_all, name="last-spans", daemon=True)
    ending.start()
    ending.join(FLUSH_S)
    return not ending.is_alive()
