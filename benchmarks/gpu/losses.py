"""The loss of the output layer on one GPU: our slices, Liger's fused kernel (if installed), and all logits at once.

    python -m benchmarks.gpu.losses [--out FILE]

One micro-batch of an 8B model: 8,192 tokens, two thirds of them with a label, 128,256 words. Forward and backward, by CUDA events.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ft_assets.training.runtime.objectives.token_logps import score_tokens

ROWS, WIDTH, VOCABULARY = 5461, 4096, 128_256
REPEATS, WARM_UP = 10, 3

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ours(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    found = score_tokens(hidden, lambda rows: rows @ weight.T, labels, vocab_size=VOCABULARY, frozen=not weight.requires_grad)
    return -found["log_probs"].mean()


def at_once(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy((hidden @ weight.T).float(), labels)


def ligers() -> Loss | None:
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    fused: Any = importlib.import_module("liger_kernel.transformers").LigerFusedLinearCrossEntropyLoss()
    return lambda hidden, weight, labels: fused(weight, hidden, labels)


def measured(loss: Loss, *, trained: bool) -> dict[str, Any]:
    """`trained`: the layer's weight has a gradient, as in full fine-tuning; otherwise only its input, as in LoRA."""
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(VOCABULARY, WIDTH, generator=generator, device="cuda", dtype=torch.bfloat16) * 0.02).requires_grad_(trained)
    labels = torch.randint(0, VOCABULARY, (ROWS,), generator=generator, device="cuda")
    times = []
    value = torch.zeros(())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for number in range(WARM_UP + REPEATS):
        hidden.grad = weight.grad = None
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        value = loss(hidden, weight, labels)
        value.backward()
        end.record()
        end.synchronize()
        if number >= WARM_UP:
            times.append(start.elapsed_time(end))
    gradient = hidden.grad
    assert gradient is not None
    return {
        "ms": round(statistics.median(times), 2),
        "peak_gib": round((torch.cuda.max_memory_allocated() - before) / 2**30, 2),
        "loss": round(float(value.detach()), 5),
        "gradient_norm": float(gradient.double().norm()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.losses", description="Loss of the output layer: speed and memory.")
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    losses: dict[str, Loss | None] = {"slices": ours, "liger": ligers(), "at once": at_once}
    found = {
        f"{name}, {'trained' if trained else 'frozen'} layer": measured(loss, trained=trained)
        for trained in (False, True)
        for name, loss in losses.items()
        if loss is not None
    }
    for name, numbers in found.items():
        print(f"{name:24} {numbers}")
    if out:
        body = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": ROWS, "width": WIDTH, "vocabulary": VOCABULARY}
        out.write_text(json.dumps(body | {"results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
