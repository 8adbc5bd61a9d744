"""Optimizer and schedule of a spec. Weight decay excludes biases and norms."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import get_scheduler

from ft_assets.training.runtime.run_errors import BadInput, BadSpec
from ft_assets.training.spec import Optimization


def parameter_groups(model: Any, weight_decay: float) -> list[dict[str, Any]]:
    """Returns the trained parameters in model order, in two groups; one if nothing decays."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not weight_decay:
        return [{"params": trained, "weight_decay": 0.0}]
    decaying = [p for p in trained if p.ndim > 1]
    others = [p for p in trained if p.ndim <= 1]
    groups = [{"params": decaying, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [g for g in groups if g["params"]]


def make_optimizer(model: Any, opt: Optimization) -> torch.optim.Optimizer:
    groups = parameter_groups(model, opt.weight_decay)
    if opt.optimizer == "adamw_torch":
        fused = groups[0]["params"][0].device.type == "cuda"
        return torch.optim.AdamW(groups, lr=opt.learning_rate, betas=opt.adam_betas, eps=1e-8, fused=fused)
    if opt.optimizer == "adamw_8bit":
        from bitsandbytes.optim.adamw import AdamW8bit

        quantized: Any = AdamW8bit
        adam: torch.optim.Optimizer = quantized(groups, lr=opt.learning_rate, betas=opt.adam_betas, eps=1e-8)
        return adam
    if opt.optimizer == "adafactor":
        from transformers.optimization import Adafactor

        factored: Any = Adafactor
        made: torch.optim.Optimizer = factored(groups, lr=opt.learning_rate, scale_parameter=False, relative_step=False, warmup_init=False)
        return made
    raise BadSpec(f"optimizer {opt.optimizer!r} is not supported; use adamw_torch, adamw_8bit or adafactor")


def make_schedule(optimizer: Any, opt: Optimization, *, total_steps: int) -> Any:
    """Returns the multiplier of the learning rate per step; its only state is the step."""
    name = "constant_with_warmup" if opt.schedule == "constant" else opt.schedule
    return get_scheduler(name, optimizer, num_warmup_steps=math.ceil(total_steps * opt.warmup_ratio), num_training_steps=total_steps)


Convert = Callable[[torch.Tensor, Any], torch.Tensor]


def trained_names(model: Any) -> dict[Any, str]:
    """Returns the name of each trained parameter, without wrappers' prefixes."""
    return {p: name.replace("_orig_mod.", "") for name, p in model.named_parameters() if p.requires_grad}


def state_by_name(optimizer: Any, model: Any, whole: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, dict[str, Any]]:
    """Returns the state of each parameter in model order, its tensors passed through `whole`."""
    names = trained_names(model)
    return {
        names[p]: {k: whole(v) if isinstance(v, torch.Tensor) else v for k, v in optimizer.state[p].items()}
        for p in names
        if p in optimizer.state
    }


def settings(optimizer: Any) -> list[dict[str, Any]]:
    """Returns the settings of the optimizer's groups, including the current rate."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def load_settings(optimizer: Any, directory: Path) -> dict[str, dict[str, Any]]:
    """Restores the settings of the optimizer's groups from ``optimizer.pt`` and returns the state in it, by parameter."""
    saved = torch.load(directory / "optimizer.pt", map_location="cpu", weights_only=True)
    for group, values in zip(optimizer.param_groups, saved["groups"], strict=True):
        group.update(values)
    state: dict[str, dict[str, Any]] = saved["state"]
    return state


def restore_state(optimizer: Any, model: Any, state: dict[str, dict[str, Any]], place: Convert) -> None:
    """Fills `optimizer` from :func:`state_by_name`'s form; `place` converts a whole tensor to the form of the parameter."""
    names = trained_names(model)
    if not state:  # loss scaling has skipped every step so far
        return
    if set(names.values()) != set(state):
        odd = sorted(set(names.values()) ^ set(state))
        raise BadInput(f"the optimizer's state does not fit the model: {odd[0]} and {len(odd) - 1} more are missing or unknown")
    on_device = {id(p) for group in optimizer.param_groups if group.get("fused") or group.get("capturable") for p in group["params"]}
    for p, name in names.items():
        optimizer.state[p] = {k: _placed(v, p, place, counts_on_device=id(p) in on_device) for k, v in state[name].items()}


def _placed(value: Any, parameter: Any, place: Convert, *, counts_on_device: bool) -> Any:
    """A count without dimensions stays on the CPU, except for fused kernels, which read it where the parameter is."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.ndim:
        return place(value, parameter)
    return value.to(parameter.device) if counts_on_device else value
