"""Optimizer and schedule of a spec. Weight decay excludes biases and norms; some parameters have rates of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from engine.training import schedules
from engine.training.runtime.model import decoder, state_files
from engine.training.runtime.run_errors import BadInput, BadSpec
from engine.training.spec import Optimization


def parameter_groups(model: Any, opt: Optimization) -> list[dict[str, Any]]:
    """Returns the trained parameters, in model order within a group for each pair of rate and weight decay.

    Groups with the spec's own rate come first, decaying ones before others.
    """
    factors = _layer_factors(model, opt.layer_lr_decay)
    groups: dict[tuple[float, float], list[Any]] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            is_matrix = len(getattr(p, "ds_shape", p.shape)) > 1  # ZeRO-3 holds a flat part
            factor = factors.get(p, 1.0) * _loraplus_factor(name, opt, is_matrix=is_matrix)
            groups.setdefault((factor, opt.weight_decay if is_matrix else 0.0), []).append(p)
    ordered = sorted(groups, key=lambda key: (key[0] != 1.0, -key[0], -key[1]))
    return [{"params": groups[key], "lr": opt.learning_rate * key[0], "weight_decay": key[1]} for key in ordered]


def _layer_factors(model: Any, decay: float) -> dict[Any, float]:
    """Returns the factor of each parameter's rate: 1 for the last block, `decay` to a power for those before it and for the embedding.

    Parameters that are left out, those of the last norm and of an output layer of its own, have the full rate.
    """
    if decay == 1.0:
        return {}
    bare = model.get_base_model() if isinstance(model, PeftModel) else model
    layers = [decoder.text_decoder(bare).get_input_embeddings(), *decoder.blocks(bare)]
    return {p: decay ** (len(layers) - 1 - number) for number, layer in enumerate(layers) for p in layer.parameters()}


def _loraplus_factor(name: str, opt: Optimization, *, is_matrix: bool) -> float:
    """Returns the factor of B and of DoRA's magnitudes, as in PEFT's ``create_loraplus_optimizer``; 1 for A."""
    return opt.loraplus_lr_ratio if "lora_B" in name or not is_matrix else 1.0


def make_optimizer(model: Any, opt: Optimization) -> torch.optim.Optimizer:
    groups = parameter_groups(model, opt)
    if opt.optimizer == "adamw_torch":
        fused = groups[0]["params"][0].device.type == "cuda"
        return torch.optim.AdamW(groups, lr=opt.learning_rate, betas=opt.adam_betas, eps=opt.adam_epsilon, fused=fused)
    if opt.optimizer == "adamw_8bit":
        from bitsandbytes.optim.adamw import AdamW8bit

        quantized: Any = AdamW8bit
        adam: torch.optim.Optimizer = quantized(groups, lr=opt.learning_rate, betas=opt.adam_betas, eps=opt.adam_epsilon)
        return adam
    if opt.optimizer == "adafactor":
        from transformers.optimization import Adafactor

        factored: Any = Adafactor
        made: torch.optim.Optimizer = factored(groups, lr=opt.learning_rate, scale_parameter=False, relative_step=False, warmup_init=False)
        return made
    raise BadSpec(f"optimizer {opt.optimizer!r} is not supported; use adamw_torch, adamw_8bit or adafactor")


def make_schedule(optimizer: Any, opt: Optimization, *, total_steps: int) -> Any:
    """Returns the multiplier of the learning rate per step; its only state is the step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedules.factor(opt, step, total_steps=total_steps))


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
    """Restores the settings of the optimizer's groups from its file and returns the state in it, by parameter."""
    saved = state_files.read_optimizer(directory)
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
