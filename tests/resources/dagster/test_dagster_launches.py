"""Runs asked for at Dagster's webserver."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from dagster import RunRequest

from resources.dagster.graphql_client import DagsterLaunches


class Webserver(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert self.headers["authorization"] == "Bearer t"
        self.rfile.read(int(self.headers["content-length"]))
        answer = {"data": {"launchRun": {"__typename": "LaunchRunSuccess", "run": {"runId": "r1", "status": "QUEUED"}}}}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())


def test_a_launch_passes_by_the_proxies_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with HTTPServer(("127.0.0.1", 0), Webserver) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        launches = DagsterLaunches(f"http://127.0.0.1:{server.server_port}", token="t")
        try:
            assert launches.launch(RunRequest(run_key="k", job_name="prepare")) == "r1"
        finally:
            launches.close()
            server.shutdown()
