"""A place to serve from: a database, inference servers, the API in processes of their own, and adapters with known answers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import sqlalchemy as sa

from control_plane.adapters.tables import adapters
from control_plane.composition import open_platform
from control_plane.platform.context import Platform
from control_plane.platform.settings import load
from control_plane.tenants import service as tenants
from engine.adapters import package
from resources.database import embedded, migrate
from tests.support.jobs.registered_adapter import add_adapter
from tests.support.models.tiny_adapter import build_tiny_adapter
from tests.support.platform.database_roles import as_owner
from tests.support.servers.inference_server import HEADERS, TOKEN, free_port

REPOSITORY = Path(__file__).resolve().parents[2]
BASE = REPOSITORY / "examples" / "demo" / "base_model"
BASE_NAME = "demo-llama-3m"
QUESTION = [{"role": "user", "content": "Where is my parcel?"}]
TOKENS = 4


def asked(model: str) -> dict[str, object]:
    """A request with one right answer: greedy, always the same question."""
    return {"model": model, "messages": QUESTION, "max_tokens": TOKENS, "temperature": 0}


def said(body: dict[str, object]) -> str:
    choices = body["choices"]
    assert isinstance(choices, list)
    return str(choices[0]["message"]["content"])


@dataclass(kw_only=True)
class Process:
    """A process that can be killed and started again."""

    command: Sequence[str]
    url: str
    probe: str
    env: dict[str, str] = field(default_factory=dict)
    _running: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._running is not None, f"{self.command} was not started"
        return self._running.pid

    def start(self) -> None:
        self._running = subprocess.Popen(self.command, cwd=REPOSITORY, env={**os.environ, "OMP_NUM_THREADS": "1", **self.env})

    def wait(self, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self._running is not None and self._running.poll() is None, f"{self.command} ended"
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}{self.probe}", headers=HEADERS, timeout=5, trust_env=False).is_success:
                    return
            time.sleep(0.05)
        raise TimeoutError(f"nothing at {self.url} in {timeout_s} s")

    def stop(self, how: int = signal.SIGTERM) -> None:
        if self._running is not None and self._running.poll() is None:
            self._running.send_signal(how)
            try:
                self._running.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self._running.kill()
                self._running.wait()


def server(*options: str) -> Process:
    port = free_port()
    command = [sys.executable, "-m", "resources.inference", "--model-dir", str(BASE), "--served-name", BASE_NAME, "--port", str(port)]
    return Process(
        command=[*command, *options],
        url=f"http://127.0.0.1:{port}",
        probe="/health",
        env={"HF_HUB_OFFLINE": "1", "FT_INFERENCE_TOKEN": TOKEN},
    )


def vllm_server(python: Path, *, base_digest: str, max_num_seqs: int, step_tokens: int = 256) -> Process:
    """The real vLLM on CPUs (`make vllm`), which serves the base without adapters, with as many tokens a step as the embedded server."""
    port = free_port()
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(BASE), "--host", "127.0.0.1", "--port", str(port),
        "--served-model-name", BASE_NAME, f"{BASE_NAME}@sha256:{base_digest}", "--dtype", "float32", "--max-model-len", "1024",
        "--max-num-seqs", str(max_num_seqs), "--max-num-batched-tokens", str(step_tokens), "--kv-cache-memory-bytes", str(256 << 20),
        "--api-key", TOKEN,
    ]  # fmt: skip
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    env = {**quiet, "VLLM_HOST_IP": "127.0.0.1", "VLLM_PLUGINS": "ft_fair_turns"}
    return Process(command=command, url=f"http://127.0.0.1:{port}", probe="/health", env=env)


@dataclass(kw_only=True)
class Place:
    platform: Platform
    api: Process
    servers: list[Process]
    tenant: str
    key: str
    known: dict[str, str] = field(default_factory=dict)
    """Answer by adapter id."""
    names: dict[str, str] = field(default_factory=dict)

    def adapter(self, suffix: str, seed: int) -> str:
        """Register a random adapter, and note what it answers by asking a server for it under another name; its id."""
        name = f"ft:{BASE_NAME}:{self.tenant}:{suffix}:v{seed}"
        digest = self.platform.models.get(BASE_NAME).digest
        id_ = add_adapter(
            self.platform, self.tenant, name=name, stage="draft", loaded=False, base_model=BASE_NAME, base_digest=digest
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as scratch:
            made = build_tiny_adapter(Path(scratch) / "trained", BASE, base_name=BASE_NAME, seed=seed, scale=0.1)
            sha256 = package.write_package(made, Path(scratch) / "package", served_name=BASE_NAME, base_digest=digest)
            with as_owner(self.platform).begin() as conn:
                prefix = conn.scalar(sa.select(adapters.c.object_prefix).where(adapters.c.id == id_))
                conn.execute(sa.text("SET LOCAL session_replication_role = replica"))  # records do not change but for this
                conn.execute(sa.update(adapters).where(adapters.c.id == id_).values(manifest_sha256=sha256))
            for path in sorted((Path(scratch) / "package").iterdir()):
                self.platform.objects.put_file(f"{prefix}/{path.name}", path)
            self.known[id_], self.names[id_] = self._answer(Path(scratch) / "package", f"known-{seed}"), name
        return id_

    def _answer(self, directory: Path, name: str) -> str:
        with httpx.Client(base_url=self.servers[0].url, headers=HEADERS, timeout=60, trust_env=False) as client:
            client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(directory)}).raise_for_status()
            answer = client.post("/v1/chat/completions", json=asked(name)).raise_for_status()
            client.post("/v1/unload_lora_adapter", json={"lora_name": name}).raise_for_status()
        return said(answer.json())

    def client(self) -> httpx.Client:
        headers = {"authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=self.api.url, headers=headers, timeout=60, trust_env=False)


@contextmanager
def place(num_servers: int = 2, *, given: Sequence[Process] = ()) -> Iterator[Place]:
    """Everything that a request passes, each in its process; all of it has ended when the block has. `given`: other servers than ours."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ft-serving-")))
        home.chmod(0o755)
        database = embedded.start(home / "postgres", databases=("ft",))
        stack.callback(embedded.stop, database)
        servers = list(given) or [server() for _ in range(num_servers)]
        port = free_port()
        env = {
            "FT_HOME": str(home / "ft"), "FT_DATABASE_URL": embedded.socket_url(home / "postgres", "ft"), "FT_API_PORT": str(port),
            "FT_INFERENCE_URLS": ",".join(s.url for s in servers), "FT_MLFLOW_URI": "off", "FT_LOG_LEVEL": "WARNING",
            "FT_INFERENCE_TOKEN": TOKEN,
        }  # fmt: skip
        platform = open_platform(load(env))
        stack.callback(platform.logins.dispose)
        migrate.upgrade(as_owner(platform))
        api = Process(command=[sys.executable, "-m", "control_plane.api"], url=f"http://127.0.0.1:{port}", probe="/healthz", env=env)
        for process in (*servers, api):
            stack.callback(process.stop)
            process.start()
        for process in (*servers, api):
            process.wait(timeout_s=480 if given else 120)
        _, key = tenants.create(platform, "bench")
        yield Place(platform=platform, api=api, servers=servers, tenant="bench", key=key.secret)
