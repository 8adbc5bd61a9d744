"""An evaluation as the platform starts it: the base and a LoRA adapter of random weights answer the same items.

With random weights no answer ends by itself, so every answer takes all the tokens that it may: the slowest case.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.attempts import LOG_TAIL, REPOSITORY, Failed, Job, OutOfTime
from benchmarks.gpu.cases import Trial
from engine.evals.run import run_file, run_status
from engine.training.model_shapes import ModelShape

PROMPT_TOKENS, ANSWER_TOKENS = 300, 64
"""Median prompt, and the expected answer, in tokens of one byte. The platform lets an answer take half as many again, and 8."""
SPREAD = 0.5


def run(trial: Trial, job: Job) -> dict[str, Any]:
    """Seconds from the start of the process to its result, and those that each subject took to answer."""
    out = job.root / "evaluation"
    adapter, holdout = job.root / "adapter", job.root / "holdout.jsonl"
    write_adapter(trial.shape, adapter)
    holdout.write_text("".join(json.dumps(item) + "\n" for item in items(trial.num_items)))
    path = job.root / "run.json"
    run_file.EvalRun(
        base_model_dir=job.base, adapter_dir=adapter, holdout=holdout, golden=False, max_items=trial.num_items, batch_size=trial.batch,
        out_dir=out,
    ).write(path)  # fmt: skip
    began = time.monotonic()
    _finish(job, path)
    wall_s = time.monotonic() - began
    result = json.loads((out / run_status.RESULT_NAME).read_text())
    if error := result.get("error"):
        raise Failed(f"the evaluation ended with {error}")
    answered = {m["subject"]: m["seconds"] for m in run_status.read_milestones(out) if m["kind"] == "answered"}
    return {
        "items": trial.num_items,
        "answer_tokens": ANSWER_TOKENS + ANSWER_TOKENS // 2 + 8,
        "evaluation_s": round(wall_s, 1),
        "base_s": answered["base"],
        "adapter_s": answered["adapter"],
        "loading_s": round(wall_s - sum(answered.values()), 1),
    }


def items(count: int) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(0)
    for number in range(count):
        length = int(np.clip(PROMPT_TOKENS * np.exp(rng.normal(0, SPREAD)), 16, 4 * PROMPT_TOKENS))
        content, expected = (rng.integers(97, 123, n, dtype=np.uint8).tobytes().decode() for n in (length, ANSWER_TOKENS))
        yield {"id": f"item-{number:04d}", "messages": [{"role": "user", "content": content}], "expected": expected}


def write_adapter(shape: ModelShape, directory: Path) -> None:
    """Rank 16 on every linear layer of the decoder, as the recipes train."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(1)
    weights: dict[str, Any] = {}
    modules = [f"self_attn.{n}" for n in ("q_proj", "k_proj", "v_proj", "o_proj")] + [
        f"mlp.{n}" for n in ("gate_proj", "up_proj", "down_proj")
    ]
    for layer in range(shape.num_layers):
        for module, (inputs, outputs) in zip(modules, shape.linears, strict=True):
            at = f"base_model.model.model.layers.{layer}.{module}"
            weights[f"{at}.lora_A.weight"] = torch.randn(16, inputs, generator=generator) * 0.02
            weights[f"{at}.lora_B.weight"] = torch.randn(outputs, 16, generator=generator) * 0.02
    save_file(weights, directory / "adapter_model.safetensors")
    names = [m.split(".")[1] for m in modules]
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 16, "lora_alpha": 32, "target_modules": names, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))


def _finish(job: Job, path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    if job.on_cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "engine.evals.run.runner", str(path)]
    with (job.root / "log").open("wb") as log:
        try:
            left = max(job.deadline - time.monotonic(), 1)
            code = subprocess.run(command, env=environment, cwd=job.root, stdout=log, stderr=subprocess.STDOUT, timeout=left).returncode
        except subprocess.TimeoutExpired as e:
            beat = (job.root / "evaluation" / run_status.HEARTBEAT_NAME).read_text()
            raise OutOfTime(f"its time was over at {beat}") from e
    if code:
        raise Failed(f"ended with {code}: {(job.root / 'log').read_text(errors='replace')[-LOG_TAIL:]}")
