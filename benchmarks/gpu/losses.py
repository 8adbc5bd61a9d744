"""The loss of the output layer: our slices, Liger's fused kernel (if installed), and all logits at once.

    python -m benchmarks.gpu.losses [--out FILE] [--device cpu]

One micro-batch of an 8B model: 8,192 tokens, two thirds of them with a label, 128,256 words. Forward and backward. On a CPU
a tiny layer: whether the program works.

Slices stay the loss of training unless Liger's kernel saves ``WORTH`` of a whole micro-batch: it returns one loss instead of a loss per
token, which accuracy, the loss by source and the packing self-test need.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.training.runtime.objectives.token_logps import score_tokens

REPEATS, WARM_UP = 10, 3
WORTH = 0.03
"""Share of a micro-batch's time: less than what the order of cases moves a measurement by (docs/gpu.md)."""
MICRO_BATCH_MS = {"frozen": 536.0, "trained": 746.0}
"""Two windows of 4,096 tokens of 8B on an H200, with LoRA and with full parameters: ``lora-8b`` and ``full-8b-adam8bit`` of
benchmarks/gpu_h200_202611.json."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    rows: int
    """Labeled tokens."""
    width: int
    vocabulary: int
    device: str


ON_GPU = Layer(rows=5461, width=4096, vocabulary=128_256, device="cuda")
ON_CPU = Layer(rows=64, width=32, vocabulary=512, device="cpu")
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ours(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    found = score_tokens(hidden, lambda rows: rows @ weight.T, labels, vocab_size=len(weight), frozen=not weight.requires_grad)
    return -found["log_probs"].mean()


def at_once(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy((hidden @ weight.T).float(), labels)


def ligers() -> Loss | None:
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    fused: Any = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
    return lambda hidden, weight, labels: fused(weight, hidden, labels)


def measured(loss: Loss, layer: Layer, *, trained: bool) -> dict[str, Any]:
    """`trained`: the layer's weight has a gradient, as in full fine-tuning; otherwise only its input, as in LoRA."""
    generator = torch.Generator(layer.device).manual_seed(0)
    given: dict[str, Any] = {"generator": generator, "device": layer.device}
    hidden = torch.randn(layer.rows, layer.width, dtype=torch.bfloat16, **given).requires_grad_()
    weight = (torch.randn(layer.vocabulary, layer.width, dtype=torch.bfloat16, **given) * 0.02).requires_grad_(trained)
    labels = torch.randint(0, layer.vocabulary, (layer.rows,), **given)
    times, value, before = [], torch.zeros(()), 0
    if on_gpu := layer.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    for number in range(WARM_UP + REPEATS):
        hidden.grad = weight.grad = None
        began = time.perf_counter()
        value = loss(hidden, weight, labels)
        value.backward()
        if on_gpu:
            torch.cuda.synchronize()
        if number >= WARM_UP:
            times.append(1000 * (time.perf_counter() - began))
    gradient = hidden.grad
    assert gradient is not None
    return {
        "ms": round(statistics.median(times), 2),
        "peak_gib": round((torch.cuda.max_memory_allocated() - before) / 2**30, 2) if on_gpu else None,
        "loss": round(float(value.detach()), 5),
        "gradient_norm": float(gradient.double().norm()),
    }


def verdict(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What Liger's kernel would save of a whole micro-batch, by kind of layer, and whether that is worth it; empty if it was not run."""
    kinds = [kind for kind in MICRO_BATCH_MS if f"liger, {kind} layer" in found]
    saved = {k: (found[f"slices, {k} layer"]["ms"] - found[f"liger, {k} layer"]["ms"]) / MICRO_BATCH_MS[k] for k in kinds}
    return {k: {"saved_share": round(share, 4), "worth_it": share >= WORTH} for k, share in saved.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.losses", description="Loss of the output layer: speed and memory.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    asked = parser.parse_args()
    layer = ON_CPU if asked.device == "cpu" else ON_GPU
    losses: dict[str, Loss | None] = {"slices": ours, "liger": ligers() if layer is ON_GPU else None, "at once": at_once}
    found = {
        f"{name}, {kind} layer": measured(loss, layer, trained=kind == "trained")
        for kind in MICRO_BATCH_MS
        for name, loss in losses.items()
        if loss is not None
    }
    for name, numbers in found.items():
        print(f"{name:24} {numbers}")
    body = {"rows": layer.rows, "width": layer.width, "vocabulary": layer.vocabulary, "losses": found, "liger": verdict(found)}
    print(body["liger"] or "liger-kernel was not run")
    if asked.out:
        asked.out.write_text(json.dumps(body | {"torch": torch.__version__}, indent=1) + "\n")


if __name__ == "__main__":
    main()
