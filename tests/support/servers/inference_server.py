"""The embedded inference server as a process of its own, for tests."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.support.processes import forked_modules
from tests.support.processes.forked_modules import Forked

ROOT = Path(__file__).parents[3]
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
    arguments = ["--model-dir", str(base), "--served-name", name, "--port", str(port), *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "FT_INFERENCE_TOKEN": TOKEN}
    log = Path(tempfile.gettempdir()) / f"inference-{port}.log"
    process = forked_modules.start("resources.inference", arguments, env=env, cwd=ROOT, log=log)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(process, url, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: Forked, url: str, log: Path) -> None:
    deadline = time.monotonic() + 150
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended with {process.returncode}:\n{log.read_text()}"
        try:
            if httpx.get(f"{url}/health", headers=HEADERS, timeout=2).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.1)
    raise TimeoutError(f"no server at {url} in 150 s")
