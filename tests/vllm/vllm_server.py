"""vLLM as a process of its own, with the platform's plugin, for tests."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import load_file, save_file

from engine.adapters.serving_index import index_filename
from tests.support.models.tiny_model import HEADS, HIDDEN, KV_HEADS, LAYERS, build_tiny_model
from tests.support.servers.inference_server import free_port

SERVED, MAX_LORAS, MAX_RANK, MAX_CPU_LORAS = "tiny", 4, 16, 8
HEAD_DIM = 64
"""vLLM's CPU attention has no kernel for the tiny model's heads of 16."""
PLUGINS = "ft_adapter_index,ft_base_rows,ft_free_on_unload,ft_trained_prompts,ft_fair_turns"
START_S = 480.0
"""30 to 40 s on a quiet machine, minutes on a busy one."""


def build_servable_model(directory: Path, *, seed: int = 0) -> Path:
    """The tiny model with wider heads."""
    build_tiny_model(directory, seed=seed)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "head_dim": HEAD_DIM}, indent=1))
    weights, rng = load_file(directory / "model.safetensors"), np.random.default_rng(seed + 7)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for layer in range(LAYERS):
        for name, shape in (("q_proj", (q, HIDDEN)), ("k_proj", (kv, HIDDEN)), ("v_proj", (kv, HIDDEN)), ("o_proj", (HIDDEN, q))):
            weights[f"model.layers.{layer}.self_attn.{name}.weight"] = (rng.standard_normal(shape) * 0.08).astype(np.float32)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@dataclass(kw_only=True)
class Server:
    """One replica; :meth:`start` may follow :meth:`stop`, on the same port."""

    python: Path
    base: Path
    base_digest: str
    adapters: Path
    """Directory of the served adapters, with their index."""
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    command: Sequence[str] = ()
    """Instead of the one for adapters."""
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = list(self.command) or [
            str(self.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.base),
            "--served-model-name", SERVED, f"{SERVED}@sha256:{self.base_digest}", "--host", "127.0.0.1", "--port", str(self.port),
            "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 << 20),
            "--enable-lora", "--max-loras", str(MAX_LORAS), "--max-lora-rank", str(MAX_RANK), "--max-cpu-loras", str(MAX_CPU_LORAS),
        ]  # fmt: skip
        settings = {
            "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_HOST_IP": "127.0.0.1", "OMP_NUM_THREADS": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_PLUGINS": PLUGINS,
            "FT_ADAPTER_INDEX": str(self.adapters / index_filename(self.base_digest)), "FT_BASE_DIGEST": self.base_digest,
        }  # fmt: skip
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **settings, **self.env}, cwd=self.log.parent, start_new_session=True
            )

    def wait(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self.process is not None and self.process.poll() is None, self.tail()
            if self.is_healthy():
                return
            time.sleep(0.25)
        raise TimeoutError(f"no vLLM at {self.url} in {START_S:.0f} s: {self.tail()}")

    def is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=2).is_success
        except httpx.HTTPError:
            return False

    def stop(self, *, kill: bool = False) -> None:
        """End it with all of its processes, which are a session of their own."""
        if self.process is None:
            return
        if not kill:
            self.process.terminate()
            try:
                self.process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                kill = True
        if kill or _lives(self.process.pid):
            _kill_session(self.process.pid)
        self.process.wait()
        self.process = None

    def tail(self) -> str:
        return self.text()[-3000:]

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=60)

    def load(self, name: str, directory: Path) -> httpx.Response:
        return self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(directory)})

    def unload(self, name: str) -> httpx.Response:
        return self.post("/v1/unload_lora_adapter", {"lora_name": name})

    def names(self) -> set[str]:
        """Adapters that it serves."""
        return {card["id"] for card in httpx.get(f"{self.url}/v1/models", timeout=30).json()["data"] if card.get("parent")}

    def ask(self, model: str, prompt: str, *, tokens: int = 16) -> httpx.Response:
        """Greedy, of exactly `tokens` tokens, whose ids are in the answer."""
        body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "min_tokens": tokens}
        return self.post("/v1/chat/completions", {**body, "temperature": 0, "return_token_ids": True})

    def tokens(self, model: str, prompt: str, *, tokens: int = 16) -> list[int]:
        answer = self.ask(model, prompt, tokens=tokens)
        assert answer.status_code == 200, answer.text
        ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return ids


def _lives(session: int) -> bool:
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return False
    return True


def _kill_session(session: int) -> None:
    try:
        os.killpg(session, signal.SIGKILL)
    except ProcessLookupError:
        return
