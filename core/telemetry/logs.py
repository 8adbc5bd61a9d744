"""Logs of every process of the platform: one line per event, as JSON (``FT_LOG_FORMAT=json``) or as text (the default).

The formatter needs only the standard library, so that training and inference processes have no extra imports. Fields come from
:mod:`core.telemetry.correlation`, which threads share. Anything that looks like a secret is removed here, whichever code wrote the
line.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from types import TracebackType
from typing import Any, TextIO

from core.telemetry import correlation, spans
from core.telemetry.outages import OneLinePerOutage
from core.telemetry.redaction import without_data, without_secrets

FORMAT, LEVEL = "FT_LOG_FORMAT", "FT_LOG_LEVEL"
PACKAGES = ("agent", "control_plane", "core", "deploy", "engine", "ft_assets", "ft_client", "resources", "sensors")
FIELDS = ("time", "level", "logger", "message", "service", "tenant", "job", "attempt", "request_id", "trace_id", "span_id", "exception")
"""Fields of every line, if known; a line may add others (``extra={"fields": {...}}``)."""
TEXT_FIELDS = ("tenant", "job", "attempt", "request_id")
"""Fields that text lines show after the message."""
QUIET = dict.fromkeys(("httpx", "httpcore", "httpx2", "httpcore2", "urllib3", "alembic"), logging.WARNING)
"""Loggers that log every request with its full URL, or every schema access."""
SELDOM_S = 60.0


@lru_cache(maxsize=1024)
def warn_once(logger: logging.Logger, message: str) -> None:
    """Log what every pass of a loop finds anew."""
    logger.warning("%s", message)


class JsonLines(logging.Formatter):
    """One JSON object per record."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        body: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": without_secrets(record.getMessage()),
            "service": self._service,
            **_known(record),
        }
        if record.exc_info:
            body["exception"] = without_data(self.formatException(record.exc_info))
        return json.dumps(body, default=str)


class TextLines(logging.Formatter):
    """Text with the known fields at the end; `plain`, for the log of a single job, has only time and message."""

    def __init__(self, *, plain: bool) -> None:
        super().__init__("%(asctime)s %(message)s" if plain else "%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._plain = plain

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        known = _known(record)
        behind = "" if self._plain else "".join(f" {k}={known[k]}" for k in TEXT_FIELDS if k in known)
        return without_secrets(super().formatMessage(record)) + behind

    def formatException(self, ei: Any) -> str:  # noqa: N802
        return without_data(super().formatException(ei))


class _Standard(logging.StreamHandler[TextIO]):
    """Writes to the current ``sys.stdout`` or ``sys.stderr``."""

    def __init__(self, name: str) -> None:
        logging.Handler.__init__(self)
        self._of = name

    @property
    def stream(self) -> TextIO:
        stream: TextIO = getattr(sys, self._of)
        return stream

    @stream.setter
    def stream(self, _: TextIO) -> None:
        return None


class _Seldom(logging.Filter):
    """Passes one line per minute, rather than one per span, while a collector is unavailable."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith("opentelemetry"):
            return True
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + SELDOM_S
        return True


def is_json() -> bool:
    """Returns whether the environment selects JSON."""
    return os.environ.get(FORMAT) == "json"


def handler(service: str, *, stream: str = "stderr", plain: bool = False) -> logging.Handler:
    """Returns a log handler for `service`."""
    made = _Standard(stream)
    made.setFormatter(JsonLines(service) if is_json() else TextLines(plain=plain))
    made.addFilter(_Seldom())
    made.addFilter(OneLinePerOutage())
    return made


def configure(service: str, *, stream: str = "stderr", plain: bool = False) -> None:
    """Logs everything in this process as `service`, with the fields it was started with. Calling it again changes the service, and so does
    calling it after :func:`configure_packages`, as in a service that was forked from a process with Dagster's logs."""
    correlation.adopt(os.environ)
    root = logging.getLogger()
    for logger in (root, *map(logging.getLogger, PACKAGES)):
        for old in list(logger.handlers):
            logger.removeHandler(old)
    root.addHandler(handler(service, stream=stream, plain=plain))
    _set_levels(root)
    if is_json():
        logging.captureWarnings(True)
        sys.excepthook = _uncaught
        threading.excepthook = lambda a: _uncaught(a.exc_type, a.exc_value or a.exc_type(), a.exc_traceback)


def configure_packages(service: str) -> None:
    """Logs messages of our own packages in a process whose other logs belong to Dagster."""
    for name in PACKAGES:
        logger = logging.getLogger(name)
        if not any(isinstance(h, _Standard) for h in logger.handlers):
            logger.addHandler(handler(service))
            _set_levels(logger)


def environment() -> dict[str, str]:
    """Environment variables with which a workload logs in the same format, for the same job and trace."""
    requested = {name: os.environ[name] for name in (FORMAT, LEVEL) if os.environ.get(name)}
    return {**requested, **correlation.environment(), **spans.environment()}


def readable(line: str) -> str:
    """Returns a line of a workload's log as its tenant reads it: the message of a JSON line, any other line unchanged."""
    if not line.startswith('{"time": '):
        return line
    try:
        body = json.loads(line)
        at = datetime.fromisoformat(body["time"]).strftime("%Y-%m-%d %H:%M:%S,%f")[:-3]
        return "\n".join([f"{at} {body['message']}", *([body["exception"]] if "exception" in body else [])])
    except (ValueError, KeyError, TypeError):
        return line


def _known(record: logging.LogRecord) -> dict[str, Any]:
    found: dict[str, Any] = dict(correlation.fields())
    ids = spans.ids()
    if ids is not None:
        found |= {"trace_id": ids[0], "span_id": ids[1]}
    own = getattr(record, "fields", None)
    return {**found, **own} if isinstance(own, Mapping) else found


def _set_levels(logger: logging.Logger) -> None:
    logger.setLevel((os.environ.get(LEVEL) or "INFO").upper())
    for name, level in QUIET.items():
        logging.getLogger(name).setLevel(level)


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt | SystemExit):
        return
    logging.getLogger("uncaught").critical("%s ended the %s", kind.__name__, "thread or process", exc_info=(kind, error, trace))
