"""Every step of a run is that of a plain loop: gradient, clipping, warm-up, schedule, weight decay and Adam, each written out here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

torch = pytest.importorskip("torch", reason="needs the training environment")

from safetensors.torch import load_file  # noqa: E402

from engine.training.data_order import DataOrder  # noqa: E402
from engine.training.spec import Optimization, RunFile  # noqa: E402
from tests.engine.training.attempts import SPEC, write_pack  # noqa: E402
from tests.engine.training.in_process import Training  # noqa: E402
from tests.support.models.deterministic_torch import deterministic_only_here  # noqa: E402, F401
from tests.support.models.tiny_model import build_tiny_model  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries; a run silences them too

WARM_UP, STEPS = 2, 6
OPTIMIZATION = Optimization(
    learning_rate=5e-3, num_epochs=1, per_device_batch_size=2, accumulation_steps=2, warmup_ratio=0.3, weight_decay=1.0,
    adam_betas=(0.8, 0.95),
)  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("files")
    return build_tiny_model(root / "base"), write_pack(root / "pack", validation=0)


def examples(pack: Path, rows: list[int]) -> list[tuple[list[int], list[int]]]:
    """Ids and labels of each example of these windows, taken apart."""
    windows = [row for path in sorted(pack.glob("shard-*.parquet")) for row in pq.read_table(path).to_pylist()]
    found = []
    for window in (windows[r] for r in rows):
        start = 0
        for length in window["seq_lengths"]:
            end = start + length
            found.append((window["input_ids"][start:end], window["labels"][start:end]))
            start = end
    return found


def mean_loss(model: Any, batch: list[tuple[list[int], list[int]]]) -> Any:
    """Of all labelled tokens of the step, one example at a time."""
    losses = []
    for ids, labels in batch:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(labels[1:]), ignore_index=-100, reduction="sum"))
    return torch.stack(losses).sum() / sum(label != -100 for _, labels in batch for label in labels[1:])


def rate(step: int, schedule: str) -> float:
    """Of the step counted from 0: up from nothing, then down."""
    if step < WARM_UP:
        return OPTIMIZATION.learning_rate * step / WARM_UP
    done = (step - WARM_UP) / (STEPS - WARM_UP)
    factor = {"linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done)), "constant": 1.0}[schedule]
    return OPTIMIZATION.learning_rate * factor


class Plain:
    """AdamW as Loshchilov and Hutter write it, on gradients scaled down to a largest norm; only matrices decay."""

    def __init__(self, model: Any) -> None:
        self.parameters = dict(model.named_parameters())
        self.first = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.steps = 0

    def step(self, *, learning_rate: float, max_grad_norm: float) -> float:
        """The norm before clipping."""
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in self.parameters.values()))
        scale = min(1.0, max_grad_norm / (norm + 1e-6))
        self.steps += 1
        one, two = OPTIMIZATION.adam_betas
        with torch.no_grad():
            for name, p in self.parameters.items():
                gradient = p.grad * scale
                self.first[name] = one * self.first[name] + (1 - one) * gradient
                self.second[name] = two * self.second[name] + (1 - two) * gradient**2
                mean, square = self.first[name] / (1 - one**self.steps), self.second[name] / (1 - two**self.steps)
                p -= learning_rate * (OPTIMIZATION.weight_decay if p.ndim > 1 else 0.0) * p
                p -= learning_rate * mean / (square.sqrt() + 1e-8)
                p.grad = None
        return norm


def plain_run(base: Path, pack: Path, *, schedule: str, max_grad_norm: float) -> tuple[list[Mapping[str, float]], dict[str, Any]]:
    """What each step measures, and the weights at the end."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    optimizer, found = Plain(model), []
    order = DataOrder(shard_rows=(21,), seed=SPEC.seed, per_device_batch_size=2, accumulation_steps=2)
    for step in range(STEPS):
        loss = mean_loss(model, examples(pack, order.step(step).tolist()))
        loss.backward()
        learning_rate = rate(step, schedule)
        norm = optimizer.step(learning_rate=learning_rate, max_grad_norm=max_grad_norm)
        found.append({"loss": float(loss.detach()), "learning_rate": learning_rate, "grad_norm": norm})
    return found, {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_every_step_is_that_of_a_plain_loop(files: tuple[Path, Path], tmp_path: Path, schedule: Any) -> None:
    base, pack = files
    unclipped, _ = plain_run(base, pack, schedule=schedule, max_grad_norm=math.inf)
    norms = sorted(step["grad_norm"] for step in unclipped)
    most = (norms[0] + norms[-1]) / 2
    spec = replace(
        SPEC,
        adapter="full",
        lora=None,
        optimization=replace(OPTIMIZATION, schedule=schedule, max_grad_norm=most),
        checkpoint=replace(SPEC.checkpoint, every_steps=100),
    )
    run = Training(run_file=RunFile(spec=spec, attempt=1, base_model_dir=base, pack_dir=pack, work_dir=tmp_path / "work"))
    assert run.attempt()
    expected, weights = plain_run(base, pack, schedule=schedule, max_grad_norm=most)
    steps = [line for line in run.lines() if "loss" in line]
    assert [{name: step[name] for name in expected[0]} for step in steps] == [pytest.approx(step, rel=1e-3, abs=1e-9) for step in expected]
    clipped = [step["grad_norm"] > most for step in steps]
    assert any(clipped) and not all(clipped), "the largest norm lies between those of the steps"
    start, final = load_file(base / "model.safetensors"), load_file(run.run_file.work_dir / "final" / "model.safetensors")
    for name, wanted in weights.items():
        moved = torch.linalg.vector_norm(wanted - start[name])
        assert moved > 0, name
        assert torch.linalg.vector_norm(final[name] - wanted) < 1e-4 * moved, name  # 3e-6 measured; without clipping 2e-3
