"""The audit of the locked packages, against an advisory source that answers as OSV does: over HTTP, by pip-audit's own variables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tools.audit import NO_ANSWER, NONE_KNOWN, VULNERABLE
from tools.lock import ROOT

ADVISORY = {
    "id": "PYSEC-2026-1", "summary": "a test", "modified": "2026-11-01T00:00:00Z", "schema_version": "1.4.0",
    "affected": [{"package": {"name": "six", "ecosystem": "PyPI"}, "ranges": [
        {"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "1.17.0"}]}]}],
}  # fmt: skip


class Source(BaseHTTPRequestHandler):
    """Knows one advisory."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        known = asked["package"]["name"] == "six" and asked["version"] == "1.16.0"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"vulns": [ADVISORY]} if known else {}).encode())

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def source() -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), Source) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("version", "code", "said"), [
    ("1.16.0", VULNERABLE, "six 1.16.0: PYSEC-2026-1; fixed in 1.17.0"),
    ("1.17.0", NONE_KNOWN, "1 packages, 0 known vulnerabilities"),
])  # fmt: skip
def test_known_vulnerabilities_are_reported(source: HTTPServer, tmp_path: Path, version: str, code: int, said: str) -> None:
    done = audit(tmp_path, version, f"http://127.0.0.1:{source.server_port}/v1/query")
    assert (done.returncode, said in done.stdout) == (code, True), done.stdout + done.stderr


def test_an_audit_without_an_answer_has_a_code_of_its_own(source: HTTPServer, tmp_path: Path) -> None:
    port = source.server_port
    source.server_close()
    done = audit(tmp_path, "1.17.0", f"http://127.0.0.1:{port}/v1/query")
    assert done.returncode == NO_ANSWER, done.stdout + done.stderr
    assert "no advisory source responded" in done.stderr


def test_a_package_that_cannot_be_audited_hides_no_other(source: HTTPServer, tmp_path: Path) -> None:
    done = audit(tmp_path, "1.16.0", f"http://127.0.0.1:{source.server_port}/v1/query", "local @ https://files.example/local.zip")
    assert done.returncode == VULNERABLE, done.stdout + done.stderr
    assert "six 1.16.0: PYSEC-2026-1" in done.stdout
    assert "local: not audited: " in done.stdout


def audit(directory: Path, version: str, url: str, *others: str) -> subprocess.CompletedProcess[str]:
    locked = (f"six=={version}", *others)
    (directory / "requirements.lock").write_text("".join(f"{package} --hash=sha256:{'0' * 64}\n" for package in locked))
    env = {**os.environ, "PIP_AUDIT_VULNERABILITY_SERVICE": "osv", "PIP_AUDIT_OSV_URL": url}
    command = [sys.executable, "-m", "tools.audit", str(directory / "requirements.lock")]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=env)
