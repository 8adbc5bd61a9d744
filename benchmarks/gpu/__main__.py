"""Training on one GPU (H100 or H200), and of windows that several share, without network.

    python -m benchmarks.gpu                              every case, 25 minutes at most
    python -m benchmarks.gpu --only 'lora-8b*' --only full-1b   some of them, by pattern
    python -m benchmarks.gpu --quick                      fewer steps
    python -m benchmarks.gpu --device cpu --quick         the same program with a tiny model: whether it works, no numbers

Each case is a training process as the platform starts it. The result file is written again after every case, so that a run which is cut
off keeps what it has. See docs/gpu.md.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.datasets.measure import machine, versions
from benchmarks.gpu import measure, models
from benchmarks.gpu.attempts import REPOSITORY, Failed, Job, OutOfTime
from benchmarks.gpu.cases import ON_CPU, ON_GPU, SHAPES, Trial
from benchmarks.gpu.report import line, table

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets", "triton", "bitsandbytes", "liger-kernel")
NEEDED = ("torch", "transformers", "trl", "peft", "datasets", "safetensors", "tokenizers", "pyarrow", "numpy", "pydantic", "yaml")
TOTAL_S = 25 * 60.0
LEAST_S = 30.0
"""Time under which no case is begun."""
QUICK_STEPS = 4
ROOM = 1.03
"""Free space that a model wants, in its own size."""
ASK_GPU = """
import json, torch
there = torch.cuda.is_available()
p = torch.cuda.get_device_properties(0) if there else None
print(json.dumps({"name": p and p.name, "memory_bytes": p and p.total_memory, "capability": p and [p.major, p.minor],
                  "count": torch.cuda.device_count(), "torch": torch.__version__, "cuda": torch.version.cuda}))
"""


@dataclass(kw_only=True)
class Session:
    """One run of the benchmark: where things lie, what was found, and the file that tells of it."""

    out: Path
    scratch: Path
    models_at: tuple[Path, ...]
    on_cpu: bool
    deadline: float
    keep_models: bool
    facts: dict[str, Any]
    results: list[dict[str, Any]] = field(default_factory=list)

    def run(self, trials: Sequence[Trial]) -> None:
        for number, trial in enumerate(trials):
            result = {"name": trial.name, "spec": trial.spec().to_dict(), **self._one(trial)}
            self.results.append(result)
            self._write()
            print(line(result), flush=True)
            if not self.keep_models and all(later.model != trial.model for later in trials[number + 1 :]):
                self._drop(trial.model)

    def _one(self, trial: Trial) -> dict[str, Any]:
        missing = [name for name in trial.needs if importlib.util.find_spec(name) is None]
        if missing:
            return {"skipped": f"{', '.join(missing)} is not installed"}
        if not self.on_cpu and trial.ranks > self.facts["gpu"]["count"]:
            return {"skipped": f"needs {trial.ranks} GPUs, {self.facts['gpu']['count']} are here"}
        if self.deadline - time.monotonic() < LEAST_S:
            return {"skipped": "no time left"}
        root = self.scratch / trial.name
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        job: Job | None = None
        began = time.monotonic()
        try:
            if trial.kind == "losses":
                return self._losses(root / "losses.json", timeout_s=min(trial.budget_s, self.deadline - time.monotonic()))
            base, prepare_s = self._model(trial)
            pack, packed = self._pack(trial)
            deadline = min(time.monotonic() + trial.budget_s, self.deadline)
            job = Job(root=root, spec=trial.spec(), base=base, pack=pack, deadline=deadline, on_cpu=self.on_cpu)
            found = measure.run(trial, job)
            return {**found, "pack": packed, "model_s": prepare_s, "wall_s": round(time.monotonic() - began, 1)}
        except (Failed, OutOfTime, OSError, ValueError, subprocess.SubprocessError) as e:
            return {"failed": f"{type(e).__name__}: {e}"[-2000:], "wall_s": round(time.monotonic() - began, 1)}
        finally:
            if job is not None:
                job.kill()
            shutil.rmtree(root, ignore_errors=True)

    def _losses(self, out: Path, *, timeout_s: float) -> dict[str, Any]:
        command = [sys.executable, "-m", "benchmarks.gpu.losses", "--out", str(out), *(["--device", "cpu"] if self.on_cpu else [])]
        subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=timeout_s)
        body: dict[str, Any] = json.loads(out.read_text())
        return body

    def _model(self, trial: Trial) -> tuple[Path, float]:
        """Written by the first case that wants it."""
        began, needed = time.monotonic(), 2 * trial.shape.num_parameters * ROOM
        for place in self.models_at:
            if (place / trial.model / "config.json").exists():
                return place / trial.model, 0.0
        for place in self.models_at:
            place.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(place).free > needed:
                break
        else:
            raise OSError(f"{trial.model} wants {needed / 2**30:.0f} GiB, which none of {[str(p) for p in self.models_at]} has free")
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
        if self.on_cpu:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        command = [sys.executable, "-m", "benchmarks.gpu.models", trial.model, str(place / trial.model)]
        try:
            done = subprocess.run(
                command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=max(self.deadline - time.monotonic(), 1)
            )
        except subprocess.TimeoutExpired:
            self._drop(trial.model)
            raise
        if done.returncode:
            self._drop(trial.model)
            raise OSError(f"{trial.model} could not be written: {done.stderr[-500:]}")
        return place / trial.model, round(time.monotonic() - began, 1)

    def _drop(self, model: str) -> None:
        for place in self.models_at:
            shutil.rmtree(place / model, ignore_errors=True)

    def _pack(self, trial: Trial) -> tuple[Path, dict[str, Any]]:
        directory = self.scratch / f"pack-{SHAPES[trial.model].vocab}-{trial.max_seq_len}-{'packed' if trial.packed else 'padded'}"
        found = models.write_pack(directory, vocab=trial.shape.vocab, max_seq_len=trial.max_seq_len, packed=trial.packed)
        return directory, found

    def _write(self) -> None:
        draft = self.out.with_suffix(".tmp")
        draft.write_text(json.dumps({**self.facts, "results": self.results}, indent=1) + "\n")
        draft.replace(self.out)


def facts(*, on_cpu: bool) -> dict[str, Any]:
    """The machine and its libraries, asked in a process of its own."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""} if on_cpu else dict(os.environ)
    asked = subprocess.run([sys.executable, "-c", ASK_GPU], env=environment, capture_output=True, text=True, timeout=300)
    if asked.returncode:
        raise SystemExit(f"torch cannot be asked for its GPU: {asked.stderr[-500:]}")
    gpu = json.loads(asked.stdout.splitlines()[-1])
    return {
        "benchmark": "gpu",
        "made_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "machine": machine(),
        "gpu": gpu | {"driver": None if on_cpu else _driver()},
        "versions": versions(*PACKAGES),
    }


def _driver() -> str | None:
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def chosen(patterns: Sequence[str], *, on_cpu: bool, quick: bool) -> list[Trial]:
    """The cases whose names match, all without patterns."""
    known = ON_CPU if on_cpu else ON_GPU
    found = [t for t in known if not patterns or any(fnmatch.fnmatch(t.name, p) for p in patterns)]
    if not found:
        raise SystemExit(f"no case is called {' or '.join(patterns)}; known are {', '.join(t.name for t in known)}")
    return [replace(t, steps=min(t.steps, QUICK_STEPS)) if quick and t.kind == "speed" else t for t in found]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description="Training on one GPU: speed, memory, checkpoints, resume."
    )
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="cases by name; may be given again")
    parser.add_argument("--quick", action="store_true", help=f"measure {QUICK_STEPS} steps at most")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="result file; default benchmarks/gpu_<GPU>_<yyyymm>.json")
    parser.add_argument("--models", type=Path, help="where random weights are written; default: what has room of the temporary directory "
                        "and /dev/shm")  # fmt: skip
    parser.add_argument("--keep-models", action="store_true", help="leave them there for the next run (with --models)")
    parser.add_argument("--total-s", type=float, default=TOTAL_S, help="time for all cases together")
    parser.add_argument("--list", action="store_true", help="print the cases and end")
    asked = parser.parse_args(arguments)
    on_cpu = asked.device == "cpu"
    trials = chosen(asked.only, on_cpu=on_cpu, quick=asked.quick)
    if asked.list:
        print("\n".join(f"{t.name:24} {t.kind:12} up to {t.budget_s:.0f} s" for t in trials))
        return
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise SystemExit(f"not installed: {', '.join(missing)}; the versions are in requirements.lock")
    deadline = time.monotonic() + asked.total_s
    found = facts(on_cpu=on_cpu)
    if not on_cpu and found["gpu"]["name"] is None:
        raise SystemExit("torch sees no GPU; --device cpu tries the program out with a tiny model")
    name = "cpu" if on_cpu else found["gpu"]["name"].lower().replace("nvidia", "").strip().replace(" ", "-")
    # A smoke run says nothing that should be kept beside the others.
    default = Path(tempfile.gettempdir()) if on_cpu else Path(__file__).parents[1]
    out = asked.out or default / f"gpu_{name}_{time.strftime('%Y%m')}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-benchmark-") as scratch, MemoryDisk() as shared:
        places = (asked.models,) if asked.models else (Path(scratch) / "models", *([Path(shared)] if shared else []))
        session = Session(
            out=out, scratch=Path(scratch), models_at=places, on_cpu=on_cpu, deadline=deadline,
            keep_models=asked.keep_models and asked.models is not None, facts=found,
        )  # fmt: skip
        session.run(trials)
    print(f"\n{table(session.facts, session.results)}\n\n{out}")


class MemoryDisk:
    """A directory of ours in memory, for weights that the disk has no room for; None where there is none."""

    def __enter__(self) -> str | None:
        self._path = tempfile.mkdtemp(prefix="gpu-benchmark-", dir="/dev/shm") if os.access("/dev/shm", os.W_OK) else None
        return self._path

    def __exit__(self, *_: object) -> None:
        if self._path:
            shutil.rmtree(self._path, ignore_errors=True)


if __name__ == "__main__":
    main()
