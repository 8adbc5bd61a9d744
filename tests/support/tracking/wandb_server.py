"""A server that keeps runs as Weights & Biases does, for its own client and for ours."""

from __future__ import annotations

import base64
import gzip
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

KEY = "a1b2c3d4" * 5
DEFAULT_ENTITY = "acme"
FILE_STREAM = re.compile(r"/files/([^/]+)/([^/]+)/([^/]+)/file_stream")


@dataclass(kw_only=True)
class StoredRun:
    name: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: Mapping[str, Any] = field(default_factory=dict)
    exit_code: int | None = None


@dataclass(kw_only=True)
class WandbServer:
    url: str
    runs: dict[tuple[str, str, str], StoredRun] = field(default_factory=dict)
    """By entity, project and id."""
    requests: list[str] = field(default_factory=list)
    """Paths, with the operation of a query."""
    answers: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Status and body by path in place of its own: ``/graphql`` or ``file_stream``."""

    def graphql(self, query: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
        project = {"id": "p", "name": given.get("project"), "entity": {"id": "e", "name": given.get("entity") or DEFAULT_ENTITY}}
        if "upsertBucket" in query:
            run = self.runs.setdefault((project["entity"]["name"], given["project"], given["name"]), StoredRun())
            run.name = given.get("displayName") or run.name
            run.config = json.loads(given["config"]) if given.get("config") else run.config
            run.tags = given.get("tags") or run.tags
            bucket = {"id": "b", "name": given["name"], "displayName": run.name, "config": json.dumps(run.config), "project": project}
            return {"upsertBucket": {"bucket": bucket | {"historyLineCount": len(run.history)}, "inserted": True}}
        if "createRunFiles" in query:
            return {"createRunFiles": {"runID": "b", "uploadHeaders": [], "files": []}}
        return {"model": {**project, "bucket": None}, "serverInfo": {"features": []}, "viewer": {"id": "v", "entity": DEFAULT_ENTITY}}

    def stream(self, where: tuple[str, str, str], body: Mapping[str, Any]) -> None:
        """Raises ``ValueError`` for what W&B would not store."""
        if (run := self.runs.get(where)) is None:
            raise ValueError(f"no run {where}")
        for name, chunk in body.get("files", {}).items():
            lines = [json.loads(line) for line in chunk["content"]]
            if name == "wandb-history.jsonl":
                if chunk["offset"] > len(run.history):
                    raise ValueError(f"offset {chunk['offset']} after {len(run.history)} lines")
                run.history[chunk["offset"] :] = lines
            elif name == "wandb-summary.json":
                (run.summary,) = lines
        if body.get("complete"):
            run.exit_code = body["exitcode"]


@contextmanager
def wandb_server() -> Iterator[WandbServer]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"] or 0))
            if self.headers["content-encoding"] == "gzip":
                body = gzip.decompress(body)
            kind = "file_stream" if self.path.endswith("/file_stream") else self.path
            here.requests.append(self.path)
            given = f"Basic {base64.b64encode(f'api:{KEY}'.encode()).decode()}"
            if kind in here.answers:
                self._answer(*here.answers[kind])
            elif kind not in ("/graphql", "file_stream"):
                self._answer(200, "{}")  # measurements of the client about itself
            elif self.headers["authorization"] != given:
                self._answer(401, '{"error": "invalid API key"}')
            elif kind == "/graphql":
                request = json.loads(body)
                self._answer(200, json.dumps({"data": here.graphql(request["query"], request.get("variables") or {})}))
            else:
                self._stored(json.loads(body))

        def _stored(self, body: Mapping[str, Any]) -> None:
            found = FILE_STREAM.fullmatch(self.path)
            assert found is not None, self.path
            entity, project, run = map(unquote, found.groups())
            try:
                here.stream((entity, project, run), body)
            except ValueError as error:
                self._answer(400, json.dumps({"error": str(error)}))
            else:
                self._answer(200, "{}")

        def _answer(self, status: int, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    here = WandbServer(url=f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield here
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
