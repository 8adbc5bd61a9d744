"""FSDP2: every rank holds a shard of each parameter as a DTensor, of its gradient and of its optimizer state.

Wrapped by ``fully_shard`` itself and not through accelerate, which on CPUs silently falls back to plain DDP; :meth:`Fsdp2.wrap` counts
DTensors and refuses a model without any. An adapter's checkpoint holds whole tensors, from which any number of ranks and any replicated run
can resume; full parameters are saved by torch's distributed checkpoint, which reshards.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from engine.training.runtime.collectives import COLLECTIVE_TIMEOUT
from engine.training.runtime.model import decoder, optimizers, sharded_weights, state_files
from engine.training.runtime.model.optimizers import make_optimizer, make_schedule
from engine.training.runtime.model.weights import ADAPTER_WEIGHTS, WeightsCopy, saved_adapter_name
from engine.training.runtime.parallel import reading_shards
from engine.training.runtime.parallel.replicated import copied, local_device, return_freed_memory, set_rates
from engine.training.runtime.run_errors import BadInput, BadSpec
from engine.training.spec import TrainingSpec

DISTRIBUTED = "distributed"
"""Directory of torch's distributed checkpoint within a checkpoint of full parameters."""


class Fsdp2:
    saves_alone = False

    def __init__(self, spec: TrainingSpec) -> None:
        if spec.quantization is not None:
            raise BadSpec("FSDP2 does not shard quantized weights here; use ddp or zero2 with qlora")
        if spec.precision == "fp16":
            raise BadSpec("FSDP2 runs in bf16 or fp32: fp16 loss scaling does not support sharded gradients; set precision to bf16")
        self._spec = spec
        self.rank, self.world_size = int(os.environ.get("RANK", "0")), spec.world_size
        self.device = local_device()
        self._mesh: Any = None
        self.model: Any = None

    def start(self) -> None:
        if not dist.is_initialized():
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo", timeout=COLLECTIVE_TIMEOUT)
        if self.device.type == "cpu":
            return_freed_memory()
        self._mesh = init_device_mesh(self.device.type, (self.world_size,))

    def load_part(self, directory: Path, *, dtype: torch.dtype, attention: str) -> Any | None:
        return sharded_weights.load_shards(directory, self._mesh, dtype=dtype, attention=attention, device=self.device)

    def wrap(self, model: Any, *, total_steps: int) -> None:
        shards = sharded_weights.take(model)
        bf16 = self._spec.precision == "bf16"
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
        if not (layers := decoder.blocks(model)):
            raise BadSpec(f"{type(model).__name__} has no list of layers to shard by; use ddp")
        for layer in layers:
            fully_shard(layer, mesh=self._mesh, mp_policy=policy)
        self.model = fully_shard(model, mesh=self._mesh, mp_policy=policy)
        sharded_weights.give_back(model, shards, self.device)
        plain = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
        if plain:
            raise BadSpec(f"{len(plain)} parameters are not sharded ({plain[0]}, ...): this would be plain data parallelism")
        self.optimizer = make_optimizer(model, self._spec.optimization)
        self.schedule = make_schedule(self.optimizer, self._spec.optimization, total_steps=total_steps)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        # Without reduction, micro-batches leave whole float32 gradients on every rank: for full parameters, as much again as the model.
        self.model.set_requires_gradient_sync(last or self._spec.adapter == "full")
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        share: Any = loss * self.world_size
        share.backward()

    def gradient_norm(self) -> float:
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(trained, self._spec.optimization.max_grad_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def step(self) -> None:
        self.optimizer.step()
        self.schedule.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def learning_rate(self) -> float:
        return float(self.schedule.get_last_lr()[0])

    def save(self, directory: Path, *, base_model: str) -> Callable[[], None]:
        """Copies the state. Adapters are gathered now and written by rank 0 later; of full parameters, each rank writes its part now."""
        schedule = copied(self.schedule.state_dict())
        if not isinstance(self.model, PeftModel):
            weights, optimizer = get_state_dict(self.model, self.optimizer)
            state_dict_saver.save({"model": weights, "optimizer": optimizer}, checkpoint_id=directory / DISTRIBUTED)
            return lambda: state_files.write_schedule(directory, {"schedule": schedule}) if self.rank == 0 else None
        adapter = self._whole_adapter(base_model)
        state = optimizers.state_by_name(self.optimizer, self.model, _whole)
        settings = optimizers.settings(self.optimizer)  # read now: the rate changes while the rest is written

        def write() -> None:
            if self.rank == 0:
                adapter.write(directory)
                state_files.write_optimizer(directory, {"state": state, "groups": settings})
                state_files.write_schedule(directory, {"schedule": schedule})

        return write

    def load(self, directory: Path) -> None:
        self.schedule.load_state_dict(state_files.read_schedule(directory)["schedule"])
        if not isinstance(self.model, PeftModel):
            weights, optimizer = get_state_dict(self.model, self.optimizer)
            state: Any = {"model": weights, "optimizer": optimizer}
            reader, planner = reading_shards.distributed(directory / DISTRIBUTED)
            state_dict_loader.load(state, storage_reader=reader, planner=planner)
            set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            set_rates(self.optimizer, self.schedule)
            return
        self._load_adapter(directory / ADAPTER_WEIGHTS)
        saved = optimizers.load_settings(self.optimizer, directory)
        optimizers.restore_state(self.optimizer, self.model, saved, _sharded_like)
        set_rates(self.optimizer, self.schedule)

    def save_weights(self, directory: Path, *, base_model: str) -> None:
        if isinstance(self.model, PeftModel):
            adapter = self._whole_adapter(base_model)
            if self.rank == 0:
                adapter.write(directory)
            return
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.model, options=options)
        if self.rank == 0:
            WeightsCopy.of_state(state, self.model, precision=self._spec.precision).write(directory)

    def evidence(self) -> Mapping[str, Any]:
        parameters = list(self.model.parameters())
        sharded = [p for p in parameters if isinstance(p, DTensor)]
        state = [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, DTensor)]
        return {
            "strategy": "fsdp2",
            "wrapped": type(self.model).__name__,
            "parameters": len(parameters),
            "sharded_parameters": len(sharded),
            "local_elements": sum(p.to_local().numel() for p in sharded),
            "elements": sum(p.numel() for p in parameters),
            "optimizer_elements": sum(v.to_local().numel() for v in state),
            "optimizer_elements_whole": sum(v.numel() for v in state),
        }

    def _whole_adapter(self, base_model: str) -> WeightsCopy:
        state = get_peft_model_state_dict(self.model, save_embedding_layers=False)
        return WeightsCopy.of_adapter({k: _whole(v) for k, v in state.items()}, self.model, base_model=base_model)

    def _load_adapter(self, file: Path) -> None:
        found = load_file(file)
        own = {saved_adapter_name(name): p for name, p in self.model.named_parameters() if p.requires_grad}
        if set(own) != set(found):
            raise BadInput(f"{file} does not fit the adapter: {sorted(set(own) ^ set(found))[0]} is missing or unknown")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(_sharded_like(found[name], parameter))


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the whole of a sharded tensor on the CPU; every rank calls it."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().to("cpu", copy=True)


def _sharded_like(tensor: torch.Tensor, parameter: Any) -> torch.Tensor:
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(tensor.to(parameter.to_local().device), mesh, placements)
