"""DeepSpeed ZeRO: shards optimizer state (1), gradients (2) and parameters (3) over the ranks.

An adapter's checkpoint holds whole tensors, gathered from the ranks, in the form of the other strategies: any number of ranks can resume
from it. Full parameters are saved in DeepSpeed's own format, which requires the same number of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from filelock import FileLock
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import cpp_extension
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from engine.training.checkpoints import read_manifest
from engine.training.runtime.model import decoder, optimizers, state_files
from engine.training.runtime.model.optimizers import make_optimizer, make_schedule
from engine.training.runtime.model.sharded_weights import load_shards
from engine.training.runtime.model.weights import ADAPTER_WEIGHTS, WeightsCopy, saved_adapter_name
from engine.training.runtime.parallel import reading_shards, zero_partitions
from engine.training.runtime.parallel.replicated import copied, local_device, return_freed_memory, set_rates
from engine.training.runtime.run_errors import BadInput, BadSpec
from engine.training.spec import TrainingSpec

TAG = "zero"
"""Directory of DeepSpeed's files within a checkpoint of full parameters."""
ADAM_STATE = ("exp_avg", "exp_avg_sq")


class Zero:
    saves_alone = False

    def __init__(self, spec: TrainingSpec) -> None:
        self.stage = int(spec.strategy.removeprefix("zero"))
        if spec.quantization is not None and self.stage == 3:
            raise BadSpec("ZeRO-3 cannot split bitsandbytes' packed weights; use zero2 with qlora")
        if spec.precision == "fp16":
            raise BadSpec("ZeRO supports only bf16 and fp32; set precision to bf16")
        if spec.optimization.optimizer != "adamw_torch":
            raise BadSpec(f"ZeRO supports only adamw_torch, not {spec.optimization.optimizer}")
        self._spec = spec
        self.rank, self.world_size = int(os.environ.get("RANK", "0")), spec.world_size
        self.device = local_device()
        self.model: Any = None

    def start(self) -> None:
        compile_operator()
        deepspeed.init_distributed(dist_backend="nccl" if self.device.type == "cuda" else "gloo")
        if self.device.type == "cpu" and self.stage == 3:
            return_freed_memory()

    def load_part(self, directory: Path, *, dtype: torch.dtype, attention: str) -> Any | None:
        if self.stage < 3:
            return None
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        model = load_shards(directory, mesh, dtype=dtype, attention=attention, device=self.device)
        if model is not None:
            zero_partitions.partition(model, self._config())
        # transformers and PEFT look for it from now on: when they load a model, and when they change parameters that are not whole.
        config: Any = HfDeepSpeedConfig
        self._gathers = config(self._config())
        return model

    def wrap(self, model: Any, *, total_steps: int) -> None:
        self._bare = model
        optimizer = make_optimizer(model, self._spec.optimization)
        self.model, self.optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=self._config())
        self.schedule = make_schedule(optimizer, self._spec.optimization, total_steps=total_steps)
        self._base_optimizer = optimizer
        self._trained = [p for p in model.parameters() if p.requires_grad]

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        self.model.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        self.model.backward(loss * self.world_size, scale_wrt_gas=False)

    def gradient_norm(self) -> float:
        """Takes the step and reads its norm afterwards, because DeepSpeed clips inside its step. A norm that is not finite ends the run
        before these weights are saved."""
        self.model.step()
        norm = self.model.get_global_grad_norm()
        return float("nan") if norm is None else float(norm)

    def step(self) -> None:
        self.schedule.step()

    def drop_gradients(self) -> None:
        self.model.zero_grad()

    def learning_rate(self) -> float:
        return float(self.schedule.get_last_lr()[0])

    def save(self, directory: Path, *, base_model: str) -> Callable[[], None]:
        schedule = copied(self.schedule.state_dict())
        if not isinstance(self._bare, PeftModel):
            self.model.save_checkpoint(str(directory), tag=TAG, save_latest=False)
            return lambda: state_files.write_schedule(directory, {"schedule": schedule}) if self.rank == 0 else None
        adapter = WeightsCopy.of_adapter(self._whole_adapter(), self._bare, base_model=base_model)
        self._link_state()
        names = optimizers.trained_names(self._bare)
        state = {names[p]: {k: _whole(safe_get_full_optimizer_state(p, k)) for k in ADAM_STATE} for p in names}
        steps, settings = self._optimizer_steps(), optimizers.settings(self._base_optimizer)

        def write() -> None:
            if self.rank == 0:
                adapter.write(directory)
                body = {name: {"step": torch.tensor(float(steps)), **values} for name, values in state.items()}
                state_files.write_optimizer(directory, {"state": body, "groups": settings})
                state_files.write_schedule(directory, {"schedule": schedule})

        return write

    def load(self, directory: Path) -> None:
        self.schedule.load_state_dict(state_files.read_schedule(directory)["schedule"])
        if not isinstance(self._bare, PeftModel):
            wrote = read_manifest(directory).world_size
            if wrote != self.world_size:
                raise BadSpec(
                    f"{directory.name} was written by {wrote} ranks of ZeRO-{self.stage}, this run has {self.world_size}; use as many ranks"
                )
            self.model.checkpoint_engine.load = reading_shards.of_deepspeed
            self.model.load_checkpoint(str(directory), tag=TAG)
        else:
            self._load_adapter(directory)
        set_rates(self._base_optimizer, self.schedule)

    def save_weights(self, directory: Path, *, base_model: str) -> None:
        if isinstance(self._bare, PeftModel):
            adapter = WeightsCopy.of_adapter(self._whole_adapter(), self._bare, base_model=base_model)
            if self.rank == 0:
                adapter.write(directory)
            return
        state = {name: _whole(safe_get_full_fp32_param(p)) for name, p in self._bare.named_parameters()}
        if self.rank == 0:
            WeightsCopy.of_state(state, self._bare, precision=self._spec.precision).write(directory)

    def evidence(self) -> Mapping[str, Any]:
        inner = self.optimizer.optimizer
        local = [v for s in inner.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.ndim]
        split = [p for p in self._bare.parameters() if hasattr(p, "ds_tensor")]
        return {
            "strategy": self._spec.strategy,
            "wrapped": type(self.model).__name__,
            "stage": self.model.zero_optimization_stage(),
            "optimizer_elements": sum(v.numel() for v in local),
            "optimizer_elements_whole": len(ADAM_STATE) * sum(decoder.num_elements(p) for p in self._trained),
            "sharded_parameters": len(split),
            "local_elements": sum(p.ds_tensor.numel() for p in split),
            "elements": sum(decoder.num_elements(p) for p in self._bare.parameters()),
        }

    def _config(self) -> dict[str, Any]:
        opt = self._spec.optimization
        return {
            "train_micro_batch_size_per_gpu": opt.per_device_batch_size,
            "gradient_accumulation_steps": opt.accumulation_steps,
            "gradient_clipping": opt.max_grad_norm,
            "bf16": {"enabled": self._spec.precision == "bf16"},
            "zero_optimization": {
                "stage": self.stage,
                "overlap_comm": self.device.type == "cuda",
                "contiguous_gradients": True,
                "stage3_param_persistence_threshold": 0,
            },
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "wall_clock_breakdown": False,
            "steps_per_print": 10**9,
        }

    def _whole_adapter(self) -> dict[str, torch.Tensor]:
        named = [(n, p) for n, p in self._bare.named_parameters() if p.requires_grad]
        return {saved_adapter_name(n): _whole(safe_get_full_fp32_param(p)) for n, p in named}

    def _load_adapter(self, directory: Path) -> None:
        found = load_file(directory / ADAPTER_WEIGHTS)
        fused = bool(self._base_optimizer.param_groups[0].get("fused"))  # here; the checkpoint's settings may differ
        saved = optimizers.load_settings(self._base_optimizer, directory)
        names = optimizers.trained_names(self._bare)
        if {saved_adapter_name(n) for n in names.values()} != set(found) or set(saved) != set(names.values()):
            raise BadInput(f"the adapter in {directory} does not fit this model: names of its tensors differ")
        self._make_state(next(iter(saved.values()))["step"], fused=fused)
        for p, name in names.items():
            value = found[saved_adapter_name(name)].to(self.device)
            self._fill(p, None, value)
            for key in ADAM_STATE:
                self._fill(p, key, saved[name][key].to(self.device))

    def _make_state(self, step: torch.Tensor, *, fused: bool) -> None:
        """Creates optimizer state as its first step would: before that there is none to fill."""
        flat = self.optimizer.fp32_partitioned_groups_flat if self.stage == 3 else self.optimizer.single_partition_of_fp32_groups
        for part in flat:
            count = step.to(part.device if fused else "cpu", copy=True)
            self.optimizer.optimizer.state[part] = {"step": count} | {key: torch.zeros_like(part) for key in ADAM_STATE}
        self._link_state()

    def _link_state(self) -> None:
        """Links each parameter to its optimizer state. DeepSpeed does so once, after the first step of the first group, when the others
        have no state yet."""
        if self.stage < 3:
            self.optimizer._hp_optimizer_states_linked = False
            self.optimizer._lazy_init_hp_params_optimizer_state()

    def _fill(self, parameter: Any, key: str | None, value: torch.Tensor) -> None:
        """Copies a whole tensor into this rank's part of a parameter's weights (`key` None) or of its optimizer state."""
        with torch.no_grad():
            if self.stage < 3:
                parameter.set_full_hp_param(value, key)
                if key is None:
                    parameter.data.copy_(value)
                return
            part, _ = self.optimizer._get_fp32_opt_state_partition(parameter, release_swap_buffers=False, optim_state_key=key)
            targets = [part.data] if key else [part.data, parameter.ds_tensor.data]
            for target in targets:
                mine = value.flatten()[self.rank * target.numel() : (self.rank + 1) * target.numel()]
                target[: mine.numel()].copy_(mine)  # the last rank's part is padded

    def _optimizer_steps(self) -> int:
        state: dict[str, Any] = next(iter(self.optimizer.optimizer.state.values()), {})
        return int(state.get("step", 0))


def _whole(tensor: Any) -> torch.Tensor:
    if tensor is None:
        raise BadInput("DeepSpeed returned no state for a trained parameter, so no resumable checkpoint can be saved")
    whole: torch.Tensor = tensor.detach().to("cpu", copy=True)
    return whole


def compile_operator() -> None:
    """Compiles the operator that DeepSpeed needs to communicate on CPU, once per machine; later calls load it.

    A process that is killed while it compiles leaves torch's lock file, and every later process would wait for it forever. Here one process
    at a time compiles, under a lock that ends with its process, so a lock file that it finds belongs to nobody.
    """
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is None or not builder.is_compatible():
        return
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / "ft_compile.lock"):
        for stale in root.glob(f"**/{builder.name}/lock"):
            stale.unlink(missing_ok=True)
        builder.load()
