"""Small real training attempts for the tests: a pack, a spec, and the process that trains it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from engine.training.spec import CheckpointPolicy, LoraSettings, Optimization, RunFile, TrainingSpec
from tests.support.models.tiny_model import VOCAB, build_tiny_model
from tests.support.processes import forked_modules
from tests.support.processes.forked_modules import Forked

REPOSITORY = Path(__file__).parents[3]
RUNTIME = "engine.training.runtime"
SPEC = TrainingSpec(
    method="sft",
    method_settings={},
    adapter="lora",
    base_model="tiny",
    base_digest="0" * 64,
    pack_fingerprint="pk_test",
    dataset_id="ds_test",
    reference=None,
    warm_start=None,
    max_seq_len=64,
    optimization=Optimization(
        learning_rate=1e-2, num_epochs=3, per_device_batch_size=2, accumulation_steps=2, schedule="linear", warmup_ratio=0.1
    ),
    lora=LoraSettings(rank=4, alpha=8, dropout=0.1),
    quantization=None,
    checkpoint=CheckpointPolicy(every_steps=3, every_s=600, keep_last=3),
    precision="fp32",
    attention="sdpa",
    gradient_checkpointing=False,
    strategy="single",
    world_size=1,
    seed=7,
    recipe="test@1",
    lock_sha256="0" * 64,
    commit="0" * 40,
    image="local",
)


def write_pack(
    directory: Path, *, num_windows: int = 21, length: int = 64, validation: int = 2, seed: int = 1, shards: int = 1,
    examples: int | None = None, fingerprint: str = SPEC.pack_fingerprint, ids: Sequence[int] = range(VOCAB - 4),
) -> Path:  # fmt: skip
    """A pack of random windows of `ids`, two to four examples each, or `examples`; the first third of an example carries no loss."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    body: dict[str, Any] = {"fingerprint": fingerprint, "dataset_id": SPEC.dataset_id, "max_seq_len": length}
    windows = [_window(rng, length, examples, ids) for _ in range(num_windows)]
    parts = [_write_shard(directory / f"shard-{n:05d}.parquet", windows[n * num_windows // shards : (n + 1) * num_windows // shards])
             for n in range(shards)]  # fmt: skip
    body |= {name: sum(part[name] for part in parts) for name in ("num_windows", "num_examples", "num_tokens")}
    body["shards"] = [shard for part in parts for shard in part["shards"]]
    body["validation"] = None
    if validation:
        body["validation"] = _write_shard(directory / "val-00000.parquet", [_window(rng, length, examples, ids) for _ in range(validation)])
    (directory / "manifest.json").write_text(json.dumps(body))
    return directory


def _window(rng: random.Random, length: int, examples: int | None, ids: Sequence[int]) -> dict[str, list[int]]:
    lengths: list[int] = []
    while (left := length - sum(lengths)) > 20 and len(lengths) < (examples or 4):
        lengths.append(rng.randint(10, min(left, 30)))
    chosen = [rng.choice(ids) for _ in range(sum(lengths))]
    labels = []
    for n in lengths:
        labels += [-100] * (n // 3) + chosen[len(labels) + n // 3 : len(labels) + n]
    return {"input_ids": chosen, "labels": labels, "seq_lengths": lengths}


def _write_shard(path: Path, windows: list[dict[str, list[int]]]) -> dict[str, Any]:
    columns = {name: pa.array([w[name] for w in windows], pa.list_(pa.int32())) for name in ("input_ids", "labels", "seq_lengths")}
    pq.write_table(pa.table(columns), path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return {
        "num_windows": len(windows),
        "num_examples": sum(len(w["seq_lengths"]) for w in windows),
        "num_tokens": sum(len(w["input_ids"]) for w in windows),
        "shards": [{"name": path.name, "sha256": digest, "num_windows": len(windows)}],
    }


@dataclass(kw_only=True)
class Job:
    """A work directory with a base model and a pack; ``start`` trains in a process of its own."""

    root: Path
    spec: TrainingSpec = SPEC
    attempts: int = 0
    started: list[subprocess.Popen[bytes] | Forked] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.base = build_tiny_model(self.root / "base")
        self.pack = write_pack(self.root / "pack")
        self.work = self.root / "work"

    def like(self, root: Path, **changes: Any) -> Job:
        return Job(root=root, spec=replace(self.spec, **changes))

    def start(self, *, module: tuple[str, ...] = (RUNTIME,), fresh: bool = False) -> subprocess.Popen[bytes] | Forked:
        """The next attempt; forked where that makes no difference to it (see ``forked_modules``), unless it is to be `fresh`.

        A module after others (torchrun's) is started by them, and one that quantizes finds what the fork server hides.
        """
        self.attempts += 1
        path = self._run_file()
        process: subprocess.Popen[bytes] | Forked
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
        log = self.root / f"log-a{self.attempts}"
        if fresh or len(module) > 1 or self.spec.quantization is not None:
            with log.open("wb") as out:
                command = [sys.executable, "-m", *module, str(path)]
                process = subprocess.Popen(command, env=env, cwd=self.root, stdout=out, stderr=subprocess.STDOUT)
        else:
            process = forked_modules.start(module[0], [str(path)], env=env, cwd=self.root, log=log)
        self.started.append(process)
        return process

    def work_of(self, node: int) -> Path:
        """Work directory of a node."""
        return self.root / f"work-{node}" if node else self.work

    def start_ranks(self, *, module: str = RUNTIME, apart: bool = False) -> list[Forked]:
        """The next attempt on several ranks, each of them told its place as torchrun tells it; no agent watches over them.

        `apart`: each is on a node of its own.
        """
        self.attempts += 1
        paths = [self._run_file(rank if apart else 0) for rank in range(self.spec.world_size)]
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        ranks = []
        for rank in range(self.spec.world_size):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.spec.world_size, "LOCAL_WORLD_SIZE": self.spec.world_size}
            place |= {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank, "GROUP_WORLD_SIZE": len(paths)} if apart else {}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), **{k: str(v) for k, v in place.items()}}
            log = self.root / f"log-a{self.attempts}{f'-rank{rank}' if rank else ''}"
            ranks.append(forked_modules.start(module, [str(paths[rank])], env=env, cwd=self.root, log=log))
        self.started += ranks
        return ranks

    def _run_file(self, node: int = 0) -> Path:
        path, work = self.root / f"run-a{self.attempts}{f'-{node}' if node else ''}.json", self.work_of(node)
        RunFile(spec=self.spec, attempt=self.attempts, base_model_dir=self.base, pack_dir=self.pack, work_dir=work).write(path)
        return path

    def train(self, *, fresh: bool = False) -> int:
        return self.start(fresh=fresh).wait(timeout=120)

    def wait_until(self, condition: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"did not happen within {timeout_s} s; log:\n{self.log()}"
            assert self.started[-1].poll() is None, f"ended with {self.started[-1].returncode} before it happened; log:\n{self.log()}"
            time.sleep(0.02)

    def metrics(self) -> list[dict[str, Any]]:
        path = self.work / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def steps(self) -> list[dict[str, Any]]:
        return [m for m in self.metrics() if "loss" in m]

    def exit(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads((self.work / f"exit-a{self.attempts}.json").read_text())
        return body

    def heartbeat(self) -> dict[str, Any]:
        path = self.work / "heartbeat.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def log(self) -> str:
        return (self.root / f"log-a{self.attempts}").read_text(errors="replace")[-4000:]

    def close(self) -> None:
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait(timeout=60)


@contextlib.contextmanager
def job(root: Path, **changes: Any) -> Iterator[Job]:
    """A job whose processes end with the block."""
    made = Job(root=root, spec=replace(SPEC, **changes))
    try:
        yield made
    finally:
        made.close()
