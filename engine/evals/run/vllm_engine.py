"""Answers that vLLM generates, where it is installed; likelihoods, losses and the proof stay with transformers.

1. The engine is chosen when the run starts, for all subjects: the run file names the Python of an environment with vLLM, and if that exists
   and takes base and adapters, vLLM generates; otherwise transformers does, and the result says why.
2. It runs before transformers loads the model, and has ended when that does: only one copy of the base is in memory.
3. Base, adapter and last accepted adapter answer from one loaded engine, one after the other; a whole model has an engine of its own.
4. Chunks are composed from all requests and given to the engine as a whole, so a continued run gets the same answers. Answers are kept
   under the engine's own environment, and never mixed with those of transformers.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import FtError
from engine.evals.run import vllm_script
from engine.evals.run.replicas import VISIBLE
from engine.evals.run.request_encoder import Prompt
from engine.evals.suites.model_requests import Generate

CHUNK = 128
"""Prompts given to the engine together, as many as transformers answers together on a GPU: a chunk of long answers takes minutes, and an
evaluation without an answer for ten is stopped."""
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Values of ``max_lora_rank`` that vLLM takes."""
ADAPTER_CONFIG = "adapter_config.json"
ABOUT_S = 120.0
POLL_S = 0.2
FIRST_ANSWER_S = 3600.0
"""Loading and compiling a model and answering its first requests take a small part of this."""
STOP_S = 5.0
SETTINGS: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_PLUGINS": "ft_base_rows",
}  # fmt: skip
"""The plugin keeps a base's rows from an adapter's on CPUs (deploy/vllm); without it installed the name has no effect."""


class EngineRefused(Exception):
    """vLLM does not take the model or an adapter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Requests of one suite to one subject that are given to the engine together."""

    subject: str
    suite: str
    """Its digest."""
    stops: tuple[str, ...]
    budget: int
    prompts: Mapping[str, Prompt]
    """By id of the request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    python: Path
    environment: str
    """What answers depend on besides model and question."""
    devices: Sequence[str]
    """Names of the GPUs, as ``CUDA_VISIBLE_DEVICES`` has them; none: the CPU."""
    dtype: str
    scratch: Path

    def answer(
        self,
        chunks: Sequence[Chunk],
        directories: Mapping[str, Path],
        base: Path,
        *,
        context: int,
        ends: Sequence[int],
        loading: Callable[[str], None],
    ) -> Iterator[tuple[Chunk, Mapping[str, Sequence[int]], float]]:
        """Yields each chunk with the generated tokens by request, and the seconds that it took.

        `directories`: of every subject but the base. `loading` is called before a model is loaded, with the first subject that it answers
        for. Raises :class:`EngineRefused` before an engine's first answer, or ``FtError`` if it dies.
        """
        whole = {name for name, place in directories.items() if not (place / ADAPTER_CONFIG).is_file()}
        for model, subjects in ((base, {"base", *directories} - whole), *((directories[name], {name}) for name in sorted(whole))):
            adapters = {name: directories[name] for name in subjects if name in directories and name not in whole}
            if asked := [chunk for chunk in chunks if chunk.subject in subjects]:
                loading(asked[0].subject)
                yield from self._run(asked, model, adapters, context=context, ends=ends)

    def _run(
        self, chunks: Sequence[Chunk], model: Path, adapters: Mapping[str, Path], *, context: int, ends: Sequence[int]
    ) -> Iterator[tuple[Chunk, Mapping[str, Sequence[int]], float]]:
        order = {
            "model": str(model), "dtype": self.dtype, "context": context, "num_gpus": len(self.devices), "ends": list(ends),
            "adapters": {name: str(place) for name, place in adapters.items()}, "max_rank": max_rank(adapters.values()),
            "chunks": [
                {
                    "adapter": chunk.subject if chunk.subject in adapters else None, "stops": chunk.stops, "budget": chunk.budget,
                    "prompts": {id_: prompt.ids for id_, prompt in chunk.prompts.items()},
                }
                for chunk in chunks
            ],
        }  # fmt: skip
        self.scratch.mkdir(parents=True, exist_ok=True)
        ordered, answers, log = (self.scratch / name for name in ("order.json", "answers.jsonl", "vllm.log"))
        ordered.write_text(json.dumps(order), encoding="utf-8")
        answers.unlink(missing_ok=True)
        with log.open("ab") as output:
            process = subprocess.Popen(
                [str(self.python), vllm_script.__file__, str(ordered), str(answers)], stdout=output, stderr=output, env=self._environment()
            )
        try:
            for line in _lines(answers, process):
                if (why := line.get("refused")) is not None:
                    raise EngineRefused(str(why))
                yield chunks[line["chunk"]], line["tokens"], float(line["seconds"])
        finally:
            _end(process)
        if process.returncode:
            end = log.read_bytes()[-2000:].decode(errors="replace").strip()
            raise FtError(f"vLLM ended with exit code {process.returncode} while it answered: {end}")

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
        return {**kept, **SETTINGS, VISIBLE: ",".join(self.devices)}


def find(python: str, *, devices: Sequence[str], device: str, dtype: str, scratch: Path) -> Engine | str:
    """Returns the engine of the environment of `python` on `devices`, each of which is a `device`; why there is none as a text."""
    if not Path(python).is_file():
        return f"{python} does not exist on this node"
    try:
        said = subprocess.run([python, vllm_script.__file__, "--about"], capture_output=True, text=True, check=True, timeout=ABOUT_S)
        versions = json.loads(said.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return f"{python} has no vLLM: {type(error).__name__}"
    place = f"{len(devices)} x {device}" if len(devices) > 1 else device
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    environment = f"{named}, {place}, {dtype}, chunks of {CHUNK}".replace("@", " ").replace("+", " ")
    return Engine(python=Path(python), environment=environment, devices=devices, dtype=dtype, scratch=scratch)


def max_rank(adapters: Any) -> int:
    """Returns the least value that vLLM takes and that holds every adapter's ranks."""
    ranks = [8]
    for directory in adapters:
        config = json.loads((directory / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        ranks += [int(config.get("r") or 0), *map(int, (config.get("rank_pattern") or {}).values())]
    return next((rank for rank in RANKS if rank >= max(ranks)), RANKS[-1])


def is_generated(requests: Sequence[Any]) -> bool:
    """Returns whether a suite only asks for texts, which the engine then generates."""
    return bool(requests) and all(isinstance(request, Generate) for request in requests)


def _lines(path: Path, process: subprocess.Popen[bytes]) -> Iterator[Mapping[str, Any]]:
    """Yields complete lines as they are written, until the process has ended; ``FtError`` if there is none for :data:`FIRST_ANSWER_S`."""
    at, until = 0, time.monotonic() + FIRST_ANSWER_S
    while True:
        ended = process.poll() is not None
        whole = path.read_bytes()[at:] if path.exists() else b""
        complete = whole[: whole.rfind(b"\n") + 1]
        at += len(complete)
        for line in complete.splitlines():
            yield json.loads(line)
        if ended:
            return
        if at == 0 and time.monotonic() > until:
            raise FtError(f"vLLM answered nothing for {FIRST_ANSWER_S / 60:.0f} min")
        time.sleep(POLL_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
