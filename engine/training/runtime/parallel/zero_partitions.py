"""Makes ZeRO-3's parameters from a base model that was read in shards, as DeepSpeed makes them from one that it sees whole.

DeepSpeed gives each rank an equal part of the flattened parameter. A shard by rows is that part, unless the rows do not divide evenly: such
a parameter is gathered once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
import torch.distributed as dist


def partition(model: Any, config: Mapping[str, Any]) -> None:
    """Replaces each parameter of `model`, a DTensor of this rank's rows, with a parameter of DeepSpeed that holds this rank's part."""
    init = deepspeed.zero.Init(config_dict_or_path=dict(config))
    with init:  # replaces torch's linear function for good, as it does when a model is made within it
        pass
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, shard in list(module.named_parameters(recurse=False)):
            if shard not in made:
                made[shard] = _partitioned(init, shard)
            setattr(module, name, made[shard])


def _partitioned(init: Any, shard: Any) -> torch.nn.Parameter:
    local = shard.detach().to_local()
    whole = torch.empty(shard.shape, dtype=init.dtype, device=local.device)
    parameter: Any = torch.nn.Parameter(whole, requires_grad=shard.requires_grad)
    init._convert_to_deepspeed_param(parameter)
    parameter.partition()
    parameter.ds_tensor.data = _flat_part(shard.detach(), parameter.ds_tensor.numel()).to(init.dtype)
    made: torch.nn.Parameter = parameter
    return made


def _flat_part(shard: Any, size: int) -> torch.Tensor:
    """Returns the part of `size` elements, the last ones padded with zeros."""
    part: torch.Tensor = shard.to_local().flatten()
    if shard.ndim > 1 and shard.shape[0] % dist.get_world_size():
        begins = size * dist.get_rank()
        part = shard.full_tensor().flatten()[begins : begins + size].clone()
    return torch.nn.functional.pad(part, (0, size - part.numel())) if part.numel() < size else part
