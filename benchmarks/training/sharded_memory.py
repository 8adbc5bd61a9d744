"""Host memory of a run whose ranks share a model, from its imports to the end of its first step.

    python -m benchmarks.training.sharded_memory [--strategy fsdp2] [--out benchmarks/training_sharded_memory_202611.json]

Two ranks train one step of a LoRA on a random model of TinyLlama's shape (1.1B parameters, bf16) over gloo. Each rank resets the kernel's
high-water mark when everything is imported. Reported is the peak above that, as a share of the bytes of all weights: of resident memory
(``VmHWM``, which counts pages of mapped files) and of anonymous memory alone (``RssAnon``, sampled every 5 ms).
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.datasets.measure import machine, versions
from benchmarks.training import in_process
from benchmarks.training.memory_cpu import resident
from benchmarks.training.overhead import write_pack
from engine.training import methods
from engine.training.runtime import imports
from engine.training.runtime.status_files import Progress
from engine.training.spec import CheckpointPolicy, LoraSettings, Optimization, RunFile, TrainingSpec

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO = REPOSITORY / "examples" / "demo" / "base_model"
RANKS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    layers: int
    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool


SHAPES = {
    "deep-1b": Shape(layers=84, hidden=1024, mlp=2816, heads=16, kv_heads=4, vocab=16_000, tied=True),
    "tinyllama-1.1b": Shape(layers=22, hidden=2048, mlp=5632, heads=32, kv_heads=4, vocab=32_000, tied=False),
}
"""A model of 0.96B parameters in many small layers, and TinyLlama-1.1B by its config.json, with few large ones."""
LENGTH = 64
"""Tokens of a window: few, because activations are not what this measures."""
SAMPLE_S = 0.005
SETTINGS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class FirstStep(Progress):
    """Measures memory until the first step is done."""

    def __init__(self) -> None:
        super().__init__()
        self.before = {field: resident(field) for field in ("VmRSS", "RssAnon")}
        self.anonymous: dict[str, int] = {}
        """Peak of each phase."""
        self.found: dict[str, Any] = {}
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        threading.Thread(target=self._sample, daemon=True).start()

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name == "step" and value == 1:
            self.found = {
                "resident_bytes": resident("VmHWM") - self.before["VmRSS"],
                "anonymous_bytes": max(self.anonymous.values()),
                "anonymous_bytes_by_phase": self.anonymous,
                "imports_bytes": self.before["VmRSS"],
            }

    def _sample(self) -> None:
        while not self.found:
            taken = resident("RssAnon") - self.before["RssAnon"]
            self.anonymous[self.phase] = max(self.anonymous.get(self.phase, 0), taken)
            time.sleep(SAMPLE_S)


def write_model(directory: Path, shape: Shape) -> int:
    """Writes a random model with the demo model's tokenizer, tensor by tensor into two files; returns the bytes of its weights."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).write_bytes((DEMO / name).read_bytes())
    config = json.loads((DEMO / "config.json").read_text()) | {
        "vocab_size": shape.vocab, "hidden_size": shape.hidden, "intermediate_size": shape.mlp, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.hidden // shape.heads,
        "tie_word_embeddings": shape.tied, "attention_bias": False, "dtype": "bfloat16",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    index: dict[str, str] = {}
    total = 0
    for number, sizes in enumerate(_sizes(shape)):
        file = f"model-{number + 1:05d}-of-{shape.layers + 1:05d}.safetensors"
        tensors = {
            name: torch.randn(size).mul(0.02).bfloat16() if len(size) > 1 else torch.ones(size).bfloat16() for name, size in sizes.items()
        }
        save_file(tensors, directory / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
        total += sum(t.numel() * t.element_size() for t in tensors.values())
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}))
    return total


def _sizes(shape: Shape) -> list[dict[str, tuple[int, ...]]]:
    """Names and sizes of the tensors of each file: a layer each, then the rest."""
    hidden, kv = shape.hidden, shape.hidden // shape.heads * shape.kv_heads
    layer = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (shape.mlp, hidden), "mlp.up_proj": (shape.mlp, hidden),
        "mlp.down_proj": (hidden, shape.mlp), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    layers = [{f"model.layers.{n}.{name}.weight": size for name, size in layer.items()} for n in range(shape.layers)]
    rest: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, hidden), "model.norm.weight": (hidden,)}
    return [*layers, rest if shape.tied else rest | {"lm_head.weight": (shape.vocab, hidden)}]


def _spec(strategy: str) -> TrainingSpec:
    return TrainingSpec(
        method="sft", method_settings={}, adapter="lora", base_model="random-1b", base_digest="0", pack_fingerprint="pk_bench",
        dataset_id="ds", reference=None, warm_start=None, max_seq_len=LENGTH,
        optimization=Optimization(learning_rate=1e-3, num_epochs=1, per_device_batch_size=1, accumulation_steps=1, schedule="constant",
                                  warmup_ratio=0.0, max_steps=1),
        lora=LoraSettings(rank=8, alpha=16, dropout=0.0, target_modules=("q_proj", "v_proj")),
        quantization=None, checkpoint=CheckpointPolicy(every_steps=20), precision="bf16",
        attention="sdpa", gradient_checkpointing=True, strategy=strategy, world_size=RANKS, seed=3, recipe="bench", lock_sha256="0",
        commit="0", image="local",
    )  # fmt: skip


def measure(run_file: Path) -> dict[str, Any]:
    """In a process of its own: trains one rank and returns what it took."""
    run = RunFile.read(run_file)
    imports.import_stack(methods.method_named("sft"), run.spec)
    importlib.import_module("engine.training.runtime.train")
    importlib.import_module(f"engine.training.runtime.parallel.{'zero' if run.spec.strategy.startswith('zero') else 'fsdp2'}")
    importlib.import_module("transformers.models.llama.modeling_llama")
    progress = FirstStep()
    in_process.train(run, progress)
    return progress.found


def run(strategy: str, name: str, directory: Path) -> dict[str, Any]:
    base = directory / name
    total = write_model(base, SHAPES[name]) if not base.exists() else _bytes(base)
    pack = directory / "pack" if (directory / "pack").exists() else write_pack(directory / "pack", num_windows=RANKS, length=LENGTH)
    with tempfile.TemporaryDirectory(dir=directory) as work, socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
        file = RunFile(spec=_spec(strategy), attempt=1, base_model_dir=base, pack_dir=pack, work_dir=Path(work) / "work")
        file.write(Path(work) / "run.json")
        free.close()
        ranks = [_start(Path(work) / "run.json", rank, port) for rank in range(RANKS)]
        outputs = [process.communicate()[0] for process in ranks]
    if any(process.returncode for process in ranks):
        raise RuntimeError("\n".join(outputs)[-3000:])
    found = [json.loads(text.splitlines()[-1]) for text in outputs]
    shares = {f"{kind}_share": round(max(f[f"{kind}_bytes"] for f in found) / total, 3) for kind in ("resident", "anonymous")}
    return {"model": name, "strategy": strategy, "weights_bytes": total, **shares, "ranks": found}


def _bytes(base: Path) -> int:
    total: int = json.loads((base / "model.safetensors.index.json").read_text())["metadata"]["total_size"]
    return total


def _start(file: Path, rank: int, port: int) -> subprocess.Popen[str]:
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": RANKS,
        "LOCAL_WORLD_SIZE": RANKS,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    env = {**os.environ, **SETTINGS, **{k: str(v) for k, v in place.items()}}
    command = [sys.executable, "-m", "benchmarks.training.sharded_memory", "--rank", str(file)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY, env=env)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", action="append", help="default: fsdp2")
    parser.add_argument("--model", action="append", choices=SHAPES, help="default: every one")
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.rank is not None:
        print(json.dumps(measure(given.rank)))
        return
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        for strategy, name in itertools.product(given.strategy or ["fsdp2"], given.model or SHAPES):
            results.append(run(strategy, name, given.directory or Path(temporary)))
            print(json.dumps(results[-1]), flush=True)
    if given.out:
        body = {"machine": machine(), "versions": versions("torch", "transformers", "safetensors"), "settings": SETTINGS, "cases": results}
        given.out.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
