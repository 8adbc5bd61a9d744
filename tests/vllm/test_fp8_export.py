"""Merged weights exported in FP8, served by the real vLLM, whose kernels for a CPU take them."""

from __future__ import annotations

from pathlib import Path

import httpx
import torch
from transformers import AutoModelForCausalLM

from engine.adapters.exports import ExportFormat, ExportPrecision, fp8
from tests.engine.adapters.test_exports import made, order
from tests.support.models.tiny_adapter import build_tiny_adapter
from tests.vllm.vllm_server import SERVED, Server

NUM_PROMPTS, LENGTH = 8, 24
CLOSE = 0.3
"""Mean difference of log-probabilities: the server also rounds activations to FP8, for each token."""


def test_vllm_loads_fp8_weights_and_answers_from_them(vllm_python: Path, base: Path, tmp_path: Path) -> None:
    adapter = build_tiny_adapter(tmp_path / "adapter", base, base_name=SERVED)
    _, files = made(order(base, adapter, ExportFormat.MERGED, ExportPrecision.FP8), tmp_path / "export")
    fp8.read_back(files, tmp_path / "plain", dtype=torch.float32)
    server = Server(python=vllm_python, base=files, base_digest="0" * 64, adapters=tmp_path, log=tmp_path / "log")
    server.command = [
        str(vllm_python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(files), "--served-model-name", SERVED,
        "--host", "127.0.0.1", "--port", str(server.port), "--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", "8",
        "--kv-cache-memory-bytes", str(64 << 20),
    ]  # fmt: skip
    prompts = torch.randint(0, 250, (NUM_PROMPTS, LENGTH), generator=torch.Generator().manual_seed(1))
    server.start()
    try:
        server.wait()
        body = {"model": SERVED, "prompt": prompts.tolist(), "max_tokens": 1, "temperature": 0, "logprobs": 1, "return_token_ids": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
    finally:
        server.stop()
    choices = answer.json()["choices"]
    tokens = torch.tensor([choice["token_ids"][0] for choice in choices])
    served = torch.tensor([choice["logprobs"]["token_logprobs"][0] for choice in choices])
    assert float((served - _logprobs(tmp_path / "plain", prompts, tokens)).abs().mean()) < CLOSE
    assert float((served - _logprobs(base, prompts, tokens)).abs().mean()) > 2 * CLOSE, "the base alone answers otherwise"


def _logprobs(model_dir: Path, prompts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of `tokens`, one after each of `prompts`."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=prompts).logits[:, -1].log_softmax(-1)
    return found.gather(1, tokens[:, None])[:, 0]
