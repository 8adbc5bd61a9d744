"""Metrics of a step on its device: speed, share of the peak, memory, utilization. Absent if the device does not report them."""

from __future__ import annotations

import resource
import warnings
from typing import Any

import torch
from peft import PeftModel

from engine.training.model_shapes.configs import EXPERTS
from engine.training.runtime.model import decoder

PEAK_FLOPS = {
    "H200": 989e12, "H100": 989e12, "H800": 989e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12, "L4": 121e12, "A10G": 125e12,
}  # fmt: skip
"""Dense bf16 operations per second of the tensor cores, without sparsity: NVIDIA's data sheets (SXM parts)."""


def peak_flops(device: torch.device) -> float | None:
    """Peak of one device; None for a CPU and for a GPU that is not in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for key, flops in PEAK_FLOPS.items() if key in name), None)


def flops_per_token(model: Any) -> float:
    """Returns the model operations per trained token: 2 per parameter forward, 2 for the gradients of activations, 2 for those of trained
    weights. Of experts only the chosen share counts.

    Counts the text decoder and its head: encoders of images and sounds see no token. Omits attention's own products, like Kaplan et al.
    2020 (2.1): under a tenth at 4,096 tokens. Recomputed activations do not count (MFU, not HFU).
    """
    total = trained = 0.0
    config = model.config.get_text_config(decoder=True)
    num_experts = next((n for name in EXPERTS if (n := getattr(config, name, None))), 1)
    active = (getattr(config, "num_experts_per_tok", None) or num_experts) / num_experts
    bare = model.get_base_model() if isinstance(model, PeftModel) else model
    text = (decoder.text_decoder(bare), decoder.text_model(bare).get_output_embeddings())
    counted = {id(parameter) for module in text for parameter in module.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in counted:
            continue
        if "embed_tokens" in name and not model.config.get_text_config().tie_word_embeddings:
            continue
        elements = getattr(parameter, "ds_numel", None) or parameter.numel()
        if type(parameter).__name__ == "Params4bit":
            elements = 2 * elements * parameter.element_size()  # two weights per byte, stored as other types
        if ".experts." in name:
            elements *= active
        total += elements
        trained += elements if parameter.requires_grad else 0
    return float(4 * total + 2 * trained)


def peak_memory_bytes(device: torch.device) -> int:
    """Peak of allocated GPU memory; on a CPU, the process's largest resident set."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def gpu_utilization(device: torch.device) -> float | None:
    """Returns the share of the last second in which a kernel ran; None without a GPU or the driver's library."""
    if device.type != "cuda":
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.cuda.utilization(device) / 100.0
    except (ModuleNotFoundError, RuntimeError):
        return None
