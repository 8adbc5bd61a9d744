"""One process, or several with a copy of the model each (DDP). Rank 0 holds everything and saves alone."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from engine.training.runtime.collectives import COLLECTIVE_TIMEOUT
from engine.training.runtime.model import optimizers, state_files
from engine.training.runtime.model.optimizers import make_optimizer, make_schedule
from engine.training.runtime.model.weights import WeightsCopy, load_weights
from engine.training.spec import TrainingSpec

INITIAL_LOSS_SCALE = 2.0**16
M_MMAP_THRESHOLD = -3
"""Number of this parameter in glibc's malloc.h."""
MAPPED_BYTES = 128 * 2**10
"""Where glibc starts."""


class Replicated:
    saves_alone = True

    def __init__(self, spec: TrainingSpec) -> None:
        self._spec = spec
        self.rank, self.world_size = int(os.environ.get("RANK", "0")), spec.world_size
        self.device = local_device()
        self.model: Any = None

    def start(self) -> None:
        if self.world_size > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo", timeout=COLLECTIVE_TIMEOUT)

    def load_part(self, directory: Path, *, dtype: torch.dtype, attention: str) -> None:
        """Returns None: every rank holds the whole model."""

    def wrap(self, model: Any, *, total_steps: int) -> None:
        self._bare = model.to(self.device) if self._spec.quantization is None else model
        self.optimizer = make_optimizer(self._bare, self._spec.optimization)
        self.schedule = make_schedule(self.optimizer, self._spec.optimization, total_steps=total_steps)
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=INITIAL_LOSS_SCALE, enabled=self._spec.precision == "fp16")
        self.model = self._bare
        if self._spec.strategy == "ddp":
            ids = [self.device.index] if self.device.type == "cuda" else None
            self.model = DistributedDataParallel(self._bare, device_ids=ids, gradient_as_bucket_view=True)

    def micro_batch(self, *, last: bool) -> contextlib.AbstractContextManager[None]:
        if last or self.model is self._bare:
            return contextlib.nullcontext()
        quiet: contextlib.AbstractContextManager[None] = self.model.no_sync()  # around the forward pass, which prepares the exchange
        return quiet

    def backward(self, loss: torch.Tensor) -> None:
        scaled: Any = self.scaler.scale(loss * self.world_size if self.world_size > 1 else loss)
        scaled.backward()

    def gradient_norm(self) -> float:
        self.scaler.unscale_(self.optimizer)
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        return float(torch.nn.utils.clip_grad_norm_(trained, self._spec.optimization.max_grad_norm))

    def step(self) -> None:
        scale = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scaler.get_scale() >= scale:  # otherwise the step was skipped, and the optimizer's count with it
            self.schedule.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def learning_rate(self) -> float:
        return float(self.schedule.get_last_lr()[0])

    def save(self, directory: Path, *, base_model: str) -> Callable[[], None]:
        weights = WeightsCopy.of(self._bare, base_model=base_model)
        state = optimizers.state_by_name(self.optimizer, self._bare, lambda t: t.detach().to("cpu", copy=True))
        optimizer = {"state": state, "groups": optimizers.settings(self.optimizer)}
        schedule, scaler = copied(self.schedule.state_dict()), self.scaler.state_dict()

        def write() -> None:
            weights.write(directory)
            state_files.write_optimizer(directory, optimizer)
            state_files.write_schedule(directory, {"schedule": schedule, "scaler": scaler})

        return write

    def load(self, directory: Path) -> None:
        load_weights(self._bare, directory)
        saved = optimizers.load_settings(self.optimizer, directory)
        optimizers.restore_state(self.optimizer, self._bare, saved, lambda tensor, p: tensor.to(p.device))
        state = state_files.read_schedule(directory)
        self.schedule.load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state.get("scaler", {}) if self.scaler.is_enabled() else {})
        set_rates(self.optimizer, self.schedule)

    def save_weights(self, directory: Path, *, base_model: str) -> None:
        if self.rank == 0:  # a second writer would continue while rank 0 seals and renames the directory
            WeightsCopy.of(self._bare, base_model=base_model, precision=self._spec.precision).write(directory)

    def evidence(self) -> Mapping[str, Any]:
        state = [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        return {
            "strategy": self._spec.strategy,
            "wrapped": type(self.model).__name__,
            "sharded_parameters": 0,
            "optimizer_elements": sum(v.numel() for v in state),
        }


def set_rates(optimizer: Any, schedule: Any) -> None:
    """Applies the rates of a loaded schedule to the optimizer, which would otherwise see them only at its next step."""
    for group, rate in zip(optimizer.param_groups, schedule.get_last_lr(), strict=True):
        group["lr"] = rate


def local_device() -> torch.device:
    """Returns the GPU of this rank, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def return_freed_memory() -> None:
    """Makes glibc map every block of :data:`MAPPED_BYTES` and more on its own, so that gathered weights return to the system when freed.

    Otherwise it raises that size up to 32 MiB as blocks are freed, and its heaps keep about as much as a whole model.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)


def copied(value: Any) -> Any:
    """Returns a nested state with every tensor copied to the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {k: copied(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copied(v) for v in value)
    return value
