"""The embedded inference server as a process of its own, for tests."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

ROOT = Path(__file__).parent.parent
TOKEN = "ft-inference-of-tests"
HEADERS = {"authorization": f"Bearer {TOKEN}"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def inference_server(base: Path, *, port: int, name: str = "tiny", options: tuple[str, ...] = ()) -> Iterator[str]:
    """A running server's URL; the process has ended when the block has."""
    command = [sys.executable, "-m", "resources.inference", "--model-dir", str(base), "--served-name", name, "--port", str(port), *options]
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "FT_INFERENCE_TOKEN": TOKEN}
    )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(process, url)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended with {process.returncode}"
        try:
            if httpx.get(f"{url}/health", headers=HEADERS, timeout=2).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.1)
    raise TimeoutError(f"no server at {url} in 150 s")
