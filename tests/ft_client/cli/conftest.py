"""``ft`` in the test's process and in one of its own, with and without the real API."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.ft_command import run_ft

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Ft = Callable[..., Done]


@pytest.fixture
def ft_env(tmp_path: Path) -> dict[str, str]:
    """An environment without login, stack or settings; tests add to it."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("FT_")}
    return {**clean, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(tmp_path / "config"), "FT_HOME": str(tmp_path / "home")}


@pytest.fixture
def offline(ft_env: dict[str, str], tmp_path: Path) -> Ft:
    """Runs ``ft`` without an API."""

    def run(*args: str | Path, stdin: str = "", **env: str) -> Done:
        done = run_ft(*map(str, args), env={**ft_env, **env}, cwd=tmp_path, stdin=stdin)
        return Done(code=done.returncode, out=done.stdout, err=done.stderr)

    return run


@pytest.fixture
def process(ft_env: dict[str, str], tmp_path: Path) -> Ft:
    """Runs the installed ``ft`` without an API: what `offline` is held against."""

    def run(*args: str | Path, stdin: str = "", **env: str) -> Done:
        command = [Path(sys.executable).parent / "ft", *map(str, args)]
        done = subprocess.run(command, env={**ft_env, **env}, cwd=tmp_path, input=stdin, capture_output=True, text=True, timeout=60)
        assert "Traceback" not in done.stderr, done.stderr
        return Done(code=done.returncode, out=done.stdout, err=done.stderr)

    return run


@pytest.fixture
def ft(offline: Ft, api_url: str, api_key: str) -> Ft:
    """Runs ``ft`` as a tenant of the API."""

    def run(*args: str | Path, stdin: str = "", **env: str) -> Done:
        return offline(*args, stdin=stdin, FT_API_URL=api_url, FT_API_KEY=api_key, **env)

    return run


@pytest.fixture
def listener() -> Iterator[str]:
    """The address of a server that answers every request with an error: something listens, and that is all."""

    class Silent(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
