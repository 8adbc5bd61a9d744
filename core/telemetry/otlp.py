"""The only module that uses OpenTelemetry's SDK; :mod:`core.telemetry.spans` imports it when the first span is sent."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags, set_span_in_context

from core.telemetry import correlation

Value = str | int | float | bool
PATH = "/v1/traces"
TIMEOUT_S = 5.0
"""Time limit of one request to the collector, including retries."""
EVERY_S = 1.0
MAX_WAITING = 4096
"""Maximum spans, about 1 KB each, queued while the collector is unavailable; the oldest are dropped."""
LAST_FLUSH_S = 1.0


class Ids(IdGenerator):
    """Ids from the operating system. The SDK draws them from Python's global generator, which training seeds: two attempts would share
    ids, and each span would change the order in which data is read."""

    def generate_span_id(self) -> int:
        return int.from_bytes(os.urandom(8), "big") or 1

    def generate_trace_id(self) -> int:
        return int.from_bytes(os.urandom(16), "big") or 1


class Recording:
    """A span of the SDK with its ``traceparent``; repeated ends have no effect."""

    recorded = True

    def __init__(self, span: Span) -> None:
        self._span, self._ended = span, False
        c = span.get_span_context()
        self.traceparent = f"00-{c.trace_id:032x}-{c.span_id:016x}-{int(c.trace_flags) & 1:02x}"

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def set(self, **attributes: Value | None) -> None:
        if not self._ended:
            self._span.set_attributes({k.replace("__", "."): v for k, v in attributes.items() if v is not None})

    def fail(self, why: str) -> None:
        if not self._ended:
            self._span.set_status(Status(StatusCode.ERROR, why))

    def end(self) -> None:
        if not self._ended:
            self.set(**{f"ft.{k}": v for k, v in correlation.fields().items()})
            self._ended = True
            self._span.end()


class Exporter:
    """Spans of one process, sent by a separate thread."""

    def __init__(self, *, endpoint: str, service: str, share: float) -> None:
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": service, "service.namespace": "ft", "process.pid": os.getpid()}),
            sampler=ParentBased(TraceIdRatioBased(share)),
            id_generator=Ids(),
            shutdown_on_exit=False,  # the SDK's own shutdown would wait for half a minute
        )
        url = endpoint if urlsplit(endpoint).path.endswith(PATH) else endpoint + PATH
        sender = OTLPSpanExporter(endpoint=url, timeout=TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(sender, max_queue_size=MAX_WAITING, schedule_delay_millis=1000 * EVERY_S))
        self._tracer = self._provider.get_tracer("ft")
        self._flushing: threading.Thread | None = None
        atexit.register(self.flush, LAST_FLUSH_S)

    def start(self, name: str, parent: str | None, kind: str, attributes: Mapping[str, Value | None]) -> Recording:
        made = Recording(self._tracer.start_span(name, context=_context(parent), kind=SpanKind[kind.upper()]))
        made.set(**attributes)
        return made

    def flush(self, timeout_s: float) -> bool:
        """Returns whether everything was sent in time. Returns False immediately while an earlier call still waits: the collector hangs."""
        if self._flushing is not None and self._flushing.is_alive():
            return False
        self._flushing = threading.Thread(target=self._provider.force_flush, name="spans", daemon=True)
        self._flushing.start()
        self._flushing.join(timeout_s)
        return not self._flushing.is_alive()


def _context(parent: str | None) -> Context:
    if parent is None:
        return Context()
    _, trace_id, span_id, flags = parent.split("-")[:4]
    remote = SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))
    return set_span_in_context(NonRecordingSpan(remote))
