"""Loads a base model in shards: each rank reads only its rows of each tensor, so no process ever holds a whole copy.

1. The model is built on the meta device, as ``from_pretrained`` builds it, and its parameters become DTensors without memory.
2. transformers' own loader fills them: it maps names and types, ties weights and recomputes buffers, and asks for this rank's rows only.
3. PEFT and TRL's trainers see these DTensors as the base's parameters, on its device and in its shape.
4. For FSDP2, :func:`take` leaves parameters on the meta device for ``fully_shard``, and :func:`give_back` puts the shards in their place.

ZeRO-3 makes its own parameters of these DTensors before PEFT sees them (``parallel/zero_partitions.py``).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AutoConfig, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, convert_and_load_state_dict_in_model, rename_source_key
from transformers.initialization import no_tie_weights
from transformers.modeling_utils import LoadStateDictConfig

from engine.training.runtime.model import decoder

log = logging.getLogger(__name__)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class StoredTensor:
    """A tensor in a safetensors file, read when it is indexed.

    The file is mapped for one read only: pages of a mapping that stays count as memory of this process, and its weights would depend on the
    file for as long as they live.
    """

    def __init__(self, file: Path, name: str) -> None:
        self._file, self._name = file, name

    def get_shape(self) -> list[int]:
        with safe_open(self._file, framework="pt") as opened:
            shape: list[int] = opened.get_slice(self._name).get_shape()
            return shape

    def __getitem__(self, index: Any) -> torch.Tensor:
        with safe_open(self._file, framework="pt") as opened:
            part: torch.Tensor = opened.get_slice(self._name)[index]
            return part.clone()


def load_shards(directory: Path, mesh: DeviceMesh, *, dtype: torch.dtype, attention: str, device: torch.device) -> Any | None:
    """Returns the causal model in `directory`, each parameter a DTensor of which this rank has read its rows, in evaluation mode.

    Returns None, after logging the reason, if its files need more than renaming: rows of a stored tensor are then not rows of a parameter.
    """
    stored = _stored_tensors(directory)
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    if stored is None or getattr(config, "quantization_config", None) is not None:
        return _whole_instead("it is not a plain safetensors checkpoint")
    with torch.device("meta"), no_tie_weights():
        model = decoder.auto_class(config).from_config(config, dtype=dtype, attn_implementation=attention, trust_remote_code=False)
    mapping: list[Any] = list(get_model_conversion_mapping(model))
    how = LoadStateDictConfig(
        pretrained_model_name_or_path=str(directory),
        device_map={"": device},
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        weight_mapping=mapping,
    )
    if converted := _converted(model, stored, mapping):
        return _whole_instead(f"{converted} is stored in another form")
    _distribute(model, mesh)
    found, _ = convert_and_load_state_dict_in_model(model, stored, how)
    absent = found.missing_keys - model.all_tied_weights_keys.keys()
    if absent or found.mismatched_keys or found.conversion_errors:
        return _whole_instead(f"{sorted(absent)[0] if absent else 'a tensor'} is missing or has another shape")
    model._finalize_model_loading(model, how, found)
    if model.can_generate():
        model.generation_config = _generation_config(directory)
    return model.eval()


def take(model: Any) -> dict[str, torch.nn.Parameter]:
    """Replaces parameters loaded by :func:`load_shards` with parameters on the meta device; returns the shards by name, tied ones twice."""
    named = model.named_parameters(remove_duplicate=False)
    shards: dict[str, Any] = {name: parameter for name, parameter in named if isinstance(parameter, DTensor)}
    empty: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for name, parameter in shards.items():
        meta = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        place = empty.setdefault(parameter, torch.nn.Parameter(meta, requires_grad=parameter.requires_grad))
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, place)
    return shards


def give_back(model: Any, shards: Mapping[str, torch.nn.Parameter], device: torch.device) -> None:
    """Puts `shards` into a model that ``fully_shard`` has wrapped, on `device`."""
    placed: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for shard in shards.values():
        whole: Any = shard
        local = whole.detach().to_local().to(device)
        like = {"shape": whole.shape, "stride": whole.stride(), "run_check": False}
        placed[shard] = torch.nn.Parameter(DTensor.from_local(local, whole.device_mesh, whole.placements, **like))
    model.load_state_dict({name: placed[shard] for name, shard in shards.items()}, strict=False, assign=True)


def _stored_tensors(directory: Path) -> dict[str, StoredTensor] | None:
    """Returns the tensors of the checkpoint by name; None if there are none in safetensors, or if they belong to an adapter."""
    if (directory / "adapter_config.json").exists():
        return None
    if (directory / SINGLE).exists():
        files = [SINGLE]
    elif (directory / INDEX).exists():
        files = sorted(set(json.loads((directory / INDEX).read_text())["weight_map"].values()))
    else:
        return None
    stored: dict[str, StoredTensor] = {}
    for file in files:
        with safe_open(directory / file, framework="pt") as opened:
            stored |= {name: StoredTensor(directory / file, name) for name in opened.keys()}  # noqa: SIM118
    return stored


def _converted(model: Any, stored: Mapping[str, StoredTensor], mapping: list[Any]) -> str | None:
    """Returns the name of a stored tensor that transformers converts (splits, merges, permutes) and does not only rename."""
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    state = model.state_dict()
    for name in stored:
        _, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if pattern is not None:
            return name
    return None


def _distribute(model: Any, mesh: DeviceMesh) -> None:
    """Makes each parameter on the meta device a DTensor, sharded by rows as ``fully_shard`` does it."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            rows = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(module, name, torch.nn.Parameter(rows, requires_grad=parameter.requires_grad))


def _generation_config(directory: Path) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(directory)
    except OSError:
        return GenerationConfig.from_pretrained(directory, config_file_name="config.json", _from_model_config=True)


def _whole_instead(why: str) -> Any:
    log.warning("every rank reads the whole base model instead of its part: %s", why)
    return None
