"""Optimizer state by the names of parameters, so that it means the same under any strategy that holds whole tensors when it saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ft_assets.training.runtime.run_errors import BadInput

Convert = Callable[[torch.Tensor, Any], torch.Tensor]


def trained_names(model: Any) -> dict[Any, str]:
    """Name of each trained parameter, wrappers' prefixes left out."""
    return {p: name.replace("_orig_mod.", "") for name, p in model.named_parameters() if p.requires_grad}


def by_name(optimizer: Any, model: Any, whole: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, dict[str, Any]]:
    """State of each parameter, its tensors passed through `whole`, in the order of the model."""
    names = trained_names(model)
    return {
        names[p]: {k: whole(v) if isinstance(v, torch.Tensor) else v for k, v in optimizer.state[p].items()}
        for p in names
        if p in optimizer.state
    }


def restore(optimizer: Any, model: Any, state: dict[str, dict[str, Any]], place: Convert) -> None:
    """Fill `optimizer` from :func:`by_name`'s form; `place` turns a whole tensor into what the parameter's own are."""
    names = trained_names(model)
    if not state:  # every step so far was skipped by loss scaling
        return
    if set(names.values()) != set(state):
        odd = sorted(set(names.values()) ^ set(state))
        raise BadInput(f"the optimizer's state does not fit the model: {odd[0]} and {len(odd) - 1} more are missing or unknown")
    on_device = {id(p) for group in optimizer.param_groups if group.get("fused") or group.get("capturable") for p in group["params"]}
    for p, name in names.items():
        optimizer.state[p] = {k: _placed(v, p, place, counts_on_device=id(p) in on_device) for k, v in state[name].items()}


def _placed(value: Any, parameter: Any, place: Convert, *, counts_on_device: bool) -> Any:
    """A count without dimensions stays on the CPU, but for fused kernels, which read it where the parameter is."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.ndim:
        return place(value, parameter)
    return value.to(parameter.device) if counts_on_device else value
