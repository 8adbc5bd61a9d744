"""Memory of real training steps on a CPU against the estimate of ``engine.training.memory``.

    python -m benchmarks.training.memory_cpu                 every case (about 6 minutes of CPU), result file included
    python -m benchmarks.training.memory_cpu --only 5 --only 7   some of them, printed only

Each case is a process of its own, forked when everything is imported. It trains a model of a few thousand parameters, so that libraries
and threads are there, and notes its resident memory. Then it resets the kernel's high-water mark, builds the model of the case and takes
two optimizer steps of two micro-batches: the peak over the note is what the case took. Windows hold two examples, so the attention mask
is there; every token has a label. What the forward pass saves is counted as well, by the hooks of
autograd: a number that no allocator blurs. The estimate without reserve is compared with a run whose allocator gives freed blocks back at
once. Every fourth case runs again under the allocator's usual settings, holes in the heap included: with it and the process itself the
estimate is compared as users see it, reserve and context included.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.datasets.measure import machine, versions
from engine.training.memory import Case, estimate
from engine.training.memory.estimates import activation_bytes, compute_copies
from engine.training.model_shapes import ModelShape

RESULTS = Path(__file__).parents[1] / f"training_memory_cpu_{time.strftime('%Y%m')}.json"
SETTINGS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
TIGHT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
"""Freed blocks of 64 KiB and more go back to the system at once, so that the peak is of what lives, not of holes in the heap."""
USUAL_EVERY = 4
"""Cases of which one is measured again under the allocator's usual settings."""
MICRO_BATCHES = 2
STEPS = 2
MIB = 1 << 20


def _shape(layers: int, hidden: int, heads: int, kv: int, intermediate: int, vocab: int, *, tied: bool = False) -> ModelShape:
    return ModelShape(
        num_layers=layers, hidden=hidden, num_heads=heads, num_kv_heads=kv, head_dim=hidden // heads, intermediate=intermediate,
        vocab=vocab, tied_embeddings=tied, context_length=4096,
    )  # fmt: skip


WARM_UP = _shape(1, 32, 2, 2, 64, 128)
SHAPES = {
    "3m": _shape(6, 192, 6, 6, 512, 2048),
    "13m": _shape(8, 320, 5, 5, 896, 4096),
    "30m": _shape(10, 448, 7, 7, 1216, 6000),
    "34m-grouped": _shape(8, 512, 8, 2, 1536, 8192, tied=True),
    "60m": _shape(12, 576, 9, 3, 1536, 16_000),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A case by the names and numbers that differ between cases."""

    model: str
    adapter: Literal["lora", "full"]
    batch: int
    seq: int
    checkpointing: bool = False
    rank: int = 16
    dropout: float = 0.0
    precision: Literal["fp32", "bf16"] = "fp32"

    @property
    def case(self) -> Case:
        return Case(
            shape=SHAPES[self.model],
            adapter=self.adapter,
            precision=self.precision,
            max_seq_len=self.seq,
            per_device_batch_size=self.batch,
            rank=self.rank,
            dropout=self.dropout,
            gradient_checkpointing=self.checkpointing,
            on_cpu=True,
        )

    @property
    def label(self) -> str:
        marks = f"{'ckpt ' if self.checkpointing else ''}{self.precision}{f' dropout {self.dropout}' if self.dropout else ''}"
        return f"{self.model} {self.adapter} {self.batch} x {self.seq} {marks}"


TRIALS: tuple[Trial, ...] = (
    Trial(model="3m", adapter="lora", batch=1, seq=512),
    Trial(model="3m", adapter="full", batch=4, seq=256),
    Trial(model="3m", adapter="lora", batch=2, seq=512, dropout=0.05),
    Trial(model="13m", adapter="full", batch=2, seq=512),
    Trial(model="13m", adapter="full", batch=4, seq=512, checkpointing=True),
    Trial(model="13m", adapter="lora", batch=1, seq=1024, precision="bf16"),
    Trial(model="13m", adapter="full", batch=1, seq=1024, precision="bf16"),
    Trial(model="30m", adapter="lora", batch=2, seq=512, checkpointing=True),
    Trial(model="30m", adapter="full", batch=1, seq=512),
    Trial(model="34m-grouped", adapter="lora", batch=2, seq=512, dropout=0.05),
    Trial(model="34m-grouped", adapter="full", batch=2, seq=512),
    Trial(model="60m", adapter="lora", batch=1, seq=1024),
    Trial(model="60m", adapter="lora", batch=2, seq=1024, rank=64, checkpointing=True),
    Trial(model="60m", adapter="full", batch=1, seq=1024, checkpointing=True),
)


def resident(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure(trial: Trial) -> dict[str, int]:
    """In a process of its own: what the steps of `trial` take over what the imports took."""
    train(replace(trial.case, shape=WARM_UP, max_seq_len=64, rank=2))
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    saved_bytes = train(trial.case)
    return {"measured_bytes": resident("VmHWM") - before, "measured_saved_bytes": saved_bytes, "baseline_bytes": before}


def measure_each(numbers: Sequence[int]) -> None:
    """Import once, then measure each trial in a fork: a process whose memory no earlier trial has touched. Prints a line for each."""
    importlib.import_module("peft")
    importlib.import_module("trl.trainer.utils")
    importlib.import_module("transformers.models.llama.modeling_llama")
    for number in numbers:
        child = os.fork()
        if child == 0:
            print(json.dumps(measure(TRIALS[number])), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            raise SystemExit(f"case {number} failed")


def train(case: Case) -> int:
    """Two optimizer steps as the training runtime takes them; returns what the last forward pass saved, 0 with checkpointing."""
    import torch

    model = build(case)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    batch = example(case)
    counted = 0
    for _ in range(STEPS):
        for _ in range(MICRO_BATCHES):
            counter = SavedBytes(model)
            hooks = torch.autograd.graph.saved_tensors_hooks(counter, lambda tensor: tensor)
            with torch.autocast("cpu", torch.bfloat16, enabled=case.half):
                if case.gradient_checkpointing:
                    loss = -model(**batch, use_cache=False, fused_lm_head=True).log_probs.mean()
                else:
                    with hooks:
                        loss = -model(**batch, use_cache=False, fused_lm_head=True).log_probs.mean()
            counted = counter.total
            loss.backward()
            del loss
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return counted


class SavedBytes:
    """Sums what autograd saves: each storage once, parameters not at all."""

    def __init__(self, model: Any) -> None:
        self._seen = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.total = 0

    def __call__(self, tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.total += storage.nbytes()
        return tensor


def build(case: Case) -> Any:
    """A model of that shape with weights drawn at random, as the runtime holds it: adapter and trained base in float32."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    s = case.shape
    config = LlamaConfig(
        vocab_size=s.vocab,
        hidden_size=s.hidden,
        intermediate_size=s.intermediate,
        num_hidden_layers=s.num_layers,
        num_attention_heads=s.num_heads,
        num_key_value_heads=s.num_kv_heads,
        head_dim=s.head_dim,
        max_position_embeddings=s.context_length,
        tie_word_embeddings=s.tied_embeddings,
    )
    config._attn_implementation = "sdpa"
    model: Any = LlamaForCausalLM(config)
    if case.half and not case.full:
        model = model.to(torch.bfloat16)
    if sum(p.numel() for p in model.parameters()) != s.num_parameters:
        raise RuntimeError("the shape does not count the model's parameters")
    if case.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    add_fused_lm_head(model)
    if not case.full:
        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        options: dict[str, Any] = {"lora_dropout": case.dropout, "target_modules": names, "use_dora": case.use_dora}
        lora = LoraConfig(r=case.rank, lora_alpha=2 * case.rank, task_type="CAUSAL_LM", **options)
        model = get_peft_model(model, lora)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    return model.train()


def example(case: Case) -> dict[str, Any]:
    """A micro-batch of windows, each a row of two examples."""
    import torch

    rows = case.per_device_batch_size
    ids = torch.randint(0, case.shape.vocab, (rows, case.max_seq_len))
    positions = torch.arange(case.max_seq_len // 2).repeat(rows, 2)
    return {"input_ids": ids, "position_ids": positions, "labels": ids.clone()}


def run(numbers: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Measure trials and put the estimates beside them."""
    usual = _measured([n for n in numbers if n % USUAL_EVERY == 0], SETTINGS)
    for number, measured in zip(numbers, _measured(numbers, SETTINGS | TIGHT), strict=True):
        trial = TRIALS[number]
        found = estimate(trial.case, overheads=False)
        kept = activation_bytes(trial.case) + compute_copies(trial.case)
        result: dict[str, Any] = {"case": trial.label, "settings": asdict(trial), **measured}
        result |= {"estimated_bytes": found.total_bytes, "estimated_saved_bytes": kept, "phase": found.phase}
        result |= {"parts": {name: value for name, value in found.parts.items() if value}}
        result["error"] = found.total_bytes / measured["measured_bytes"] - 1
        if measured["measured_saved_bytes"]:
            result["saved_error"] = kept / measured["measured_saved_bytes"] - 1
        if number % USUAL_EVERY == 0:
            again = next(usual)
            result["usual_bytes"] = again["measured_bytes"] + again["baseline_bytes"]
            result["usual_error"] = estimate(trial.case).total_bytes / result["usual_bytes"] - 1
        yield result


def _measured(numbers: Sequence[int], settings: dict[str, str]) -> Iterator[dict[str, int]]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")} | settings
    command = [sys.executable, "-m", "benchmarks.training.memory_cpu", "--child", ",".join(map(str, numbers))]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    if process.returncode:
        raise SystemExit(f"measuring ended with {process.returncode}")


def summary(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    errors = [r["error"] for r in results]
    kept = [abs(r["saved_error"]) for r in results if "saved_error" in r]
    usual = [abs(r["usual_error"]) for r in results if "usual_error" in r]
    return {
        "mean_absolute_error": statistics.fmean(map(abs, errors)),
        "worst_absolute_error": max(map(abs, errors)),
        "mean_error": statistics.fmean(errors),
        "lowest_error": min(errors),
        "usual_mean_absolute_error": statistics.fmean(usual) if usual else 0.0,
        "saved_mean_absolute_error": statistics.fmean(kept) if kept else 0.0,
    }


def row(result: dict[str, Any]) -> str:
    kept = f"{result['saved_error']:+7.1%}" if "saved_error" in result else "      -"
    usual = f"{result['usual_error']:+7.1%}" if "usual_error" in result else "      -"
    sizes = f"{result['measured_bytes'] / MIB:9.0f} {result['estimated_bytes'] / MIB:9.0f}"
    return f"{result['case']:42} {sizes} {result['error']:+7.1%} {kept} {usual}  {result['phase']}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, action="append", choices=range(len(TRIALS)), metavar="N", help="number of a case")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.child is not None:
        measure_each([int(n) for n in given.child.split(",")])
        return
    print(f"{'case':42} {'MiB taken':>9} {'estimated':>9} {'error':>7} {'saved':>7} {'usual':>7}  peak")
    results: list[dict[str, Any]] = []
    for result in run(given.only or range(len(TRIALS))):
        results.append(result)
        print(row(results[-1]), flush=True)
        if not given.only:
            write(results, RESULTS)
    print(", ".join(f"{name} {value:.1%}" for name, value in summary(results).items()))


def write(results: Sequence[dict[str, Any]], path: Path) -> None:
    packages = versions("torch", "transformers", "peft", "trl")
    document = {"machine": machine(), "versions": packages, "settings": SETTINGS | TIGHT, "summary": summary(results), "cases": results}
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
