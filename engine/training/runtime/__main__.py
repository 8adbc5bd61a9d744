"""Entry point: signals first, then evidence, then the heavy imports; exits with the code of the outcome."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from core.base_models import text_config
from core.processes.parent_death import die_with
from core.telemetry import logs, spans
from engine.training.disk_space import free_bytes, is_disk_full
from engine.training.failures import EXIT_CODES, Outcome
from engine.training.runtime import imports, pack_loader
from engine.training.runtime.run_errors import BadInput, BadSpec, RunEnded
from engine.training.runtime.status_files import Heartbeat, Progress, reserve_space, write_exit
from engine.training.runtime.stop_request import StopRequest
from engine.training.runtime.topology import Topology
from engine.training.spec import RunFile, TrainingSpec

log = logging.getLogger(__name__)

SERVICE = "ft-training"
TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK", "MASTER_ADDR", "MASTER_PORT")


class Attempt:
    """One attempt of one rank: its progress, and the only way to end it."""

    def __init__(self, run: RunFile) -> None:
        self.run = run
        self.here = Topology.of_environment()
        self.progress = Progress()
        self._lock = threading.RLock()
        self._leaver: int | None = None
        """Thread that writes the evidence: the first one to leave."""
        self.stop = StopRequest(leave=self._preempted)
        path = run.work_dir / ("heartbeat.json" if self.here.leads_node else f".heartbeat.rank{self.here.rank}.json")
        self.heartbeat = Heartbeat(path, self.progress, attempt=run.attempt, on_beat=self.stop.enforce_deadline)

    def _preempted(self, why: str) -> None:
        if self._leaver != threading.get_ident():  # otherwise a signal arrived while this very thread leaves
            self.leave(Outcome.PREEMPTED, why, {})

    def leave(self, outcome: Outcome, message: str, detail: Mapping[str, Any]) -> NoReturn:
        """Writes the evidence and ends the process immediately: no teardown may hang or override the exit code."""
        with self._lock:
            self._leaver = self._leaver or threading.get_ident()
        while self._leaver != threading.get_ident():
            time.sleep(1.0)  # another thread writes the evidence and ends this process
        opt = self.run.spec.optimization
        facts = {"per_device_batch_size": opt.per_device_batch_size, "accumulation_steps": opt.accumulation_steps, **detail}
        try:
            write_exit(
                self.run.work_dir,
                self.progress,
                attempt=self.run.attempt,
                here=self.here,
                outcome=outcome,
                message=message,
                detail=facts,
            )
            self.heartbeat.stop()
            self.heartbeat.enter("done")
            log.info("%s: %s", outcome, message)
            failed = None if outcome in (Outcome.SUCCEEDED, Outcome.PREEMPTED) else str(outcome)
            spans.close(failure=failed, ft__outcome=str(outcome), ft__step=self.progress.step)
        finally:
            os._exit(EXIT_CODES[outcome])

    def execute(self) -> dict[str, Any]:
        """Runs everything between the first heartbeat and the evidence."""
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if world_size != self.run.spec.world_size:
            raise BadSpec(f"{world_size} ranks were started, but the spec requires {self.run.spec.world_size}; start that many")
        _check_adapter(self.run.spec)
        if world_size == 1:
            for name in TORCHRUN_VARIABLES:
                os.environ.pop(name, None)
        method = pack_loader.method_of(self.run.spec)
        vocab_size = _vocab_size(self.run)
        pack = pack_loader.load(self.run.pack_dir, self.run.spec, vocab_size=vocab_size, waiting=self.progress.touch)
        self.heartbeat.enter("import")
        with spans.span("import"):
            imports.import_stack(method, self.run.spec)
            from engine.training.runtime import train

        return train.run(
            self._with_reference(), pack, vocab_size=vocab_size, progress=self.progress, heartbeat=self.heartbeat, stop=self.stop
        )

    def _with_reference(self) -> RunFile:
        """Returns the run file with the directory of the reference log-probabilities, if the method needs them."""
        run = self.run
        if run.spec.reference is None or run.reference_dir is not None:
            return run
        from engine.training.runtime import reference

        self.heartbeat.enter("reference")
        with spans.span("reference"):
            return replace(run, reference_dir=reference.compute_for(run, touch=self.progress.touch))


def is_broken_connection(error: BaseException) -> bool:
    """Returns whether `error` only means that another rank is gone."""
    if type(error).__name__ in ("DistNetworkError", "DistBackendError", "DistStoreError"):
        return True
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "gloo", "TCPStore")
    return isinstance(error, (RuntimeError, ConnectionError)) and any(sign in str(error) for sign in signs)


def _check_adapter(spec: TrainingSpec) -> None:
    """Refuses a spec whose parts contradict each other: it was not resolved by the platform."""
    full, quantized = spec.adapter == "full", spec.adapter == "qlora"
    if full != (spec.lora is None) or quantized != (spec.quantization is not None):
        raise BadSpec(f"adapter {spec.adapter!r} is inconsistent with lora {spec.lora} and quantization {spec.quantization}")
    if spec.world_size % spec.context_parallel:
        raise BadSpec(f"context_parallel {spec.context_parallel} does not divide the {spec.world_size} ranks; use a divisor")
    if (spec.strategy == "single") != (spec.world_size == 1) and not spec.strategy.startswith("zero"):
        raise BadSpec(f"strategy {spec.strategy!r} is not valid for {spec.world_size} ranks; use single for exactly one rank")


def _die_with_the_agent() -> None:
    """Makes the kernel kill this rank when torchrun's agent dies.

    The agent starts each rank in a session of its own, which signals to the agent's group do not reach: a surviving rank would write into
    the work directory of the next attempt. If the agent died before this line, the parent process is already another one.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()
    if not die_with(parent) or not _is_agent(parent):
        os._exit(EXIT_CODES[Outcome.PREEMPTED])


def _is_agent(pid: int) -> bool:
    if sys.platform != "linux":
        return True
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return b"torchrun" in command or b"torch.distributed" in command


def _watch() -> None:
    """Configures logging for the tenant, who reads this process's output; one rank of a gang sends its spans."""
    logs.configure(SERVICE, stream="stdout", plain=True)
    for name in ("accelerate", "opentelemetry"):
        logging.getLogger(name).setLevel(logging.ERROR if name == "accelerate" else logging.CRITICAL)
    if os.environ.get("RANK", "0") == "0":
        spans.configure(SERVICE)


def main(arguments: list[str]) -> NoReturn:
    _die_with_the_agent()
    _watch()
    if len(arguments) != 1:
        sys.exit("usage: python -m engine.training.runtime RUN.json")
    try:
        run = RunFile.read(Path(arguments[0]))
    except (OSError, ValueError, KeyError, TypeError) as e:
        log.error("run file %s cannot be read: %s: %s", arguments[0], type(e).__name__, e)
        sys.exit(EXIT_CODES[Outcome.BAD_SPEC])
    run.work_dir.mkdir(parents=True, exist_ok=True)
    reserve_space(run.work_dir)
    attempt = Attempt(run)
    attempt.stop.install()
    attempt.heartbeat.start()
    with spans.span("training", ft__method=run.spec.method, ft__model=run.spec.base_model, ft__attempt=run.attempt):
        _carry_out(attempt)


def _carry_out(attempt: Attempt) -> NoReturn:
    run = attempt.run
    try:
        detail = attempt.execute()
    except RunEnded as e:
        attempt.leave(e.outcome, e.message, e.detail)
    except BaseException as e:
        broken = is_broken_connection(e)
        if broken and attempt.stop.requested:  # another rank has left, or another thread handles this one's stop
            if attempt.here.node:  # nothing is committed here, and rank 0 needs no connection any more
                attempt.leave(Outcome.PREEMPTED, "stop requested; the ranks of another node have left", {})
            attempt.stop.settle()
        log.error("%s", type(e).__name__, exc_info=True)
        outcome = Outcome.OOM if is_out_of_memory(e) else Outcome.DISK_FULL if is_disk_full(e) else Outcome.INTERNAL
        space = f" ({free_bytes(run.work_dir)} bytes are free on the disk)" if outcome is Outcome.DISK_FULL else ""
        detail = {"traceback": traceback.format_exc()[-8000:], "communication": broken}
        attempt.leave(outcome, f"{type(e).__name__}: {str(e)[:500]}{space}", detail)
    attempt.leave(Outcome.SUCCEEDED, f"trained {attempt.progress.step} steps in {time.time() - attempt.progress.started_at:.1f} s", detail)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether `error` means that memory ran out: the GPU's, the host's, or in torch's CPU allocator."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(
        s in str(error) for s in ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC")
    )


def _vocab_size(run: RunFile) -> int:
    path = run.base_model_dir / "config.json"
    try:
        return int(text_config(json.loads(path.read_text()))["vocab_size"])
    except (OSError, ValueError, KeyError) as e:
        raise BadInput(f"base model {run.spec.base_model}: {path} cannot be read ({e})", code="base_model_unavailable") from e


if __name__ == "__main__":
    main(sys.argv[1:])
