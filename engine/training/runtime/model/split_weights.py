"""A model over several GPUs of this node in one process: whole layers on each, one after the other in every pass.

Inputs go to the first GPU, and outputs come back to it; accelerate's hooks move what is between layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def options(devices: Sequence[torch.device]) -> dict[str, Any]:
    """Returns options of ``from_pretrained`` that divide the layers evenly among `devices`."""
    memory = torch.get_device_module(devices[0]).get_device_properties
    return {"device_map": "balanced", "max_memory": {device.index: memory(device).total_memory for device in devices}}


def check(model: Any) -> None:
    """Raises ``OutOfMemoryError`` if a part of `model` was left out of the GPUs: every pass would read it from the disk."""
    outside = [name for name, device in model.hf_device_map.items() if not isinstance(device, int)]
    if outside:
        raise torch.OutOfMemoryError(f"{len(outside)} parts of the model, {outside[0]} first, do not fit on the GPUs beside the others")
