"""A Prometheus server's query API over series that a test plants."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


class PrometheusServer(ThreadingHTTPServer):
    """Knows the two forms of expressions that the platform sends: a selector of names, and a median over time, which has no name."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.series: list[tuple[Mapping[str, str], float]] = []
        self.status = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def plant(self, metric: str, value: float, **labels: str) -> None:
        """Give a series its newest value."""
        key = {"__name__": metric, **labels}
        self.series = [(known, v) for known, v in self.series if known != key] + [(key, value)]

    def answer(self, expression: str) -> list[dict[str, Any]]:
        if median := re.fullmatch(r"quantile_over_time\(0\.5, (\w+)\[\w+\]\)", expression):
            found = [({k: v for k, v in key.items() if k != "__name__"}, value) for key, value in self._named(median[1])]
        else:
            selected = re.fullmatch(r'\{__name__=~"([^"]*)"\}', expression)
            assert selected, expression
            found = self._named(selected[1])
        return [{"metric": key, "value": [1_700_000_000.123, str(value)]} for key, value in found]

    def _named(self, pattern: str) -> list[Any]:
        return [(dict(key), value) for key, value in self.series if re.fullmatch(pattern, key["__name__"])]


class _Answers(BaseHTTPRequestHandler):
    server: PrometheusServer

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        assert asked.path == "/api/v1/query"
        result = self.server.answer(parse_qs(asked.query)["query"][0])
        body = json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}}).encode()
        self.send_response(self.server.status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        return None


@contextmanager
def prometheus() -> Iterator[PrometheusServer]:
    """A server on a port of its own."""
    server = PrometheusServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
