"""A Hub of models on this machine: it speaks the protocol that the real client and our own transfers speak, uploads included."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_of_the_operator"


class ModelHub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.spoiled: set[str] = set()
        """Paths whose bytes are not those of the commit."""
        self.refused: dict[str, list[int]] = {}
        """Paths whose next transfers are answered with these statuses."""
        self.break_after: dict[str, int] = {}
        """Paths whose first transfer breaks off after so many bytes."""
        self.asked: list[tuple[str, str, str | None, str | None]] = []
        """Method, path, authorization, range."""
        self.stored: dict[str, bytes] = {}
        """Uploaded LFS objects by sha256."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def transfers(self, name: str) -> list[str | None]:
        """Ranges of the transfers of one file."""
        return [asked[3] for asked in self.asked if asked[0] == "GET" and asked[1].endswith(f"/{name}") and "/api/" not in asked[1]]


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".gguf"))


class _Answers(BaseHTTPRequestHandler):
    server: ModelHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.answer()

    def do_PUT(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = (
            self.rfile.read(int(self.headers.get("content-length") or 0))
            if self.headers.get("transfer-encoding") is None
            else self.chunks()
        )
        self.server.asked.append((self.command, path, self.headers.get("authorization"), self.headers.get("range")))
        if path.startswith("/cdn/"):
            repo, _, name = path.removeprefix("/cdn/").partition("/-/")
            return self.content(repo, name)
        if path.startswith("/lfs/"):
            self.server.stored[path.rsplit("/", 1)[-1]] = body
            return self.reply(200, b"", {})
        allowed = self.headers.get("authorization") == f"Bearer {TOKEN}"
        if self.command == "POST":
            return self.upload(path, body) if allowed else self.json({"error": "Invalid user token."}, status=401)
        parts = path.strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        repo, rest = ("/".join(parts[2:4]), parts[4:]) if api else ("/".join(parts[:2]), parts[2:])
        if repo not in self.server.repos or (repo in self.server.private and not allowed):
            return self.reply(404 if allowed else 401, b"", {"X-Error-Code": "RepoNotFound"})
        if rest and rest[1] not in (SHA, "main"):
            return self.reply(404, b"", {"X-Error-Code": "RevisionNotFound"})
        if not rest or rest[0] == "revision":
            return self.json(
                {"id": repo, "sha": SHA, "siblings": [], "private": repo in self.server.private, "tags": [], "downloads": 0, "likes": 0}
            )
        if rest[0] == "tree":
            return self.json([self.listed(repo, name) for name in sorted(self.server.repos[repo])])
        name = "/".join(rest[2:])
        if name not in self.server.repos[repo]:
            return self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})
        if is_large(name):
            content = self.server.repos[repo][name]
            linked = {"X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Linked-Size": str(len(content))}
            where = f"http://localhost:{self.server.server_address[1]}/cdn/{repo}/-/{name}"
            return self.reply(302, b"", {"X-Repo-Commit": SHA, **linked, "Location": where})
        return self.content(repo, name)

    def content(self, repo: str, name: str) -> None:
        content = self.server.repos[repo][name]
        etag = {"X-Repo-Commit": SHA, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        content = content[::-1] if name in self.server.spoiled else content
        asked = self.headers.get("range")
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        if (stop := self.server.break_after.pop(name, None)) is not None:
            self.send_response(200)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[:stop])
            self.close_connection = True
            return
        if statuses := self.server.refused.get(name):
            self.reply(statuses.pop(0), b"", {})
        else:
            self.reply(206 if asked else 200, content[start:], etag)

    def listed(self, repo: str, name: str) -> dict[str, object]:
        content = self.server.repos[repo][name]
        entry: dict[str, object] = {"type": "file", "path": name, "size": len(content)}
        entry["oid"] = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        if is_large(name):
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return entry

    def upload(self, path: str, body: bytes) -> None:
        if path == "/api/validate-yaml":
            return self.json({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            wanted = json.loads(body)
            repo = "/".join(filter(None, (wanted.get("organization"), wanted["name"])))
            exists = repo in self.server.repos
            self.server.repos.setdefault(repo, {})
            if not exists and (wanted.get("private") or wanted.get("visibility") == "private"):
                self.server.private.add(repo)
            return self.json({"url": f"{self.server.endpoint}/{repo}"}, status=409 if exists else 200)
        repo = "/".join(path.removeprefix("/api/models/").removeprefix("/").split("/")[:2])
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            mode = [{"path": f["path"], "uploadMode": "lfs" if is_large(f["path"]) else "regular", "shouldIgnore": False} for f in files]
            return self.json({"files": mode})
        if path.endswith("/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            put = {o["oid"]: {"upload": {"href": f"{self.server.endpoint}/lfs/{o['oid']}"}} for o in wanted}
            return self.json({"transfer": "basic", "objects": [{**o, "actions": put[o["oid"]]} for o in wanted]})
        for line in map(json.loads, body.decode().splitlines()):
            if line["key"] == "file":
                self.server.repos[repo][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            if line["key"] == "lfsFile":
                self.server.repos[repo][line["value"]["path"]] = self.server.stored[line["value"]["oid"]]
        return self.json({"success": True, "commitOid": SHA, "commitUrl": f"{self.server.endpoint}/{repo}/commit/{SHA}"})

    def chunks(self) -> bytes:
        body = b""
        while size := int(self.rfile.readline().strip(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def json(self, body: object, *, status: int = 200) -> None:
        self.reply(status, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def running_model_hub() -> Iterator[ModelHub]:
    server = ModelHub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
