"""A collector of spans: a real OTLP/HTTP server that decodes what it is sent, or one that accepts and never answers."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest, ExportTraceServiceResponse


@dataclass(frozen=True, kw_only=True)
class Received:
    """One span as it arrived."""

    service: str
    pid: int
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    attributes: dict[str, Any]
    failed: bool


@dataclass
class Collector:
    url: str
    spans: list[Received] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)

    def named(self, name: str) -> Received:
        """The one span of this name."""
        (found,) = [s for s in self.spans if s.name == name]
        return found

    def names(self) -> list[str]:
        return [s.name for s in self.spans]

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest()
        request.ParseFromString(body)
        for resource in request.resource_spans:
            about = {a.key: _value(a.value) for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [
                    Received(
                        service=about["service.name"],
                        pid=about["process.pid"],
                        name=s.name,
                        trace_id=s.trace_id.hex(),
                        span_id=s.span_id.hex(),
                        parent_id=s.parent_span_id.hex(),
                        kind=s.kind,
                        attributes={a.key: _value(a.value) for a in s.attributes},
                        failed=s.status.code == 2,
                    )
                    for s in scope.spans
                ]


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


@contextlib.contextmanager
def collecting(*, hanging: bool = False) -> Iterator[Collector]:
    """A collector on a port of its own; `hanging`: it answers nobody until the end."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.paths.append(self.path)
            if hanging:
                over.wait()
                return
            collector.take(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    collector = Collector(url=f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield collector
    finally:
        over.set()
        server.shutdown()
        server.server_close()
        thread.join()
