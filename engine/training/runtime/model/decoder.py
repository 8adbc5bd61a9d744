"""The text decoder of a base model: how a checkpoint is loaded, which part of it is trained, and under which names it is stored.

A checkpoint whose config nests that of its text decoder (Gemma 3, Mistral Small 3, Llama 4, Qwen 3.5) is loaded whole: adapters name the
modules of the whole model, and servers look for those names. Only its decoder reads tokens here; everything else is frozen.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.core_model_loading import revert_weight_conversion
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from engine.training.model_shapes.configs import EXPERTS

ROUTERS = frozenset(("gate", "router", "shared_expert_gate"))
"""Last parts of the names of modules that choose or weigh experts."""
RECURRENT = frozenset(("linear_attn", "mamba", "short_conv"))
"""Parts of names of layers that pass a state from token to token."""
WITHOUT_POSITIONS = frozenset(("gpt_oss",))
"""Model types whose decoder makes its masks without ``position_ids``, and so lets packed examples see each other (transformers 5.23)."""


def load(directory: Path, **options: Any) -> Any:
    """Returns what ``from_pretrained`` of the right class returns. Safetensors only; no code of the repository is run."""
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    return auto_class(config).from_pretrained(directory, use_safetensors=True, trust_remote_code=False, **options)


def auto_class(config: Any) -> Any:
    """Returns the class that builds the whole model of a checkpoint, whether or not its config nests that of the text decoder."""
    nested = config.get_text_config(decoder=True) is not config
    return AutoModelForImageTextToText if nested and type(config) in AutoModelForImageTextToText._model_mapping else AutoModelForCausalLM


def model_class(config: Any) -> Any:
    """Returns the class of the model; ``ValueError`` if transformers has no decoder for this config."""
    known = auto_class(config)._model_mapping
    if type(config) not in known:
        raise ValueError(f"transformers has no text decoder for models of type {config.model_type}")
    return known[type(config)]


def text_model(model: Any) -> Any:
    """Returns the module with the text decoder and its head: `model` (without PEFT), or a part of it."""
    inner = getattr(model, "language_model", None)
    return model if inner is None or getattr(inner, "lm_head", None) is None else inner


def text_decoder(model: Any) -> Any:
    """Returns the module that turns token ids into hidden states."""
    text = text_model(model)
    found = text.get_decoder()
    return text.model if found is text else found


def backbone_name(text: Any, decoder: Any) -> str:
    """Returns the name of the child of `text` that is `decoder` or holds it."""
    return next(str(name) for name, child in text.named_children() if any(module is decoder for module in child.modules()))


def blocks(model: Any) -> list[Any]:
    """Returns the repeated blocks of a decoder in order, under PEFT or not; empty if there are none."""
    lists: list[Any] = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m)]
    return list(max(lists, key=lambda m: sum(num_elements(p) for p in m.parameters()), default=[]))


def num_elements(parameter: Any) -> int:
    """Returns the size of the whole parameter, of which ZeRO-3 holds a part."""
    return int(getattr(parameter, "ds_numel", None) or parameter.numel())


def packed_inputs(decoder: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the decoder's `inputs` with masks that end where an example does, for decoders that make none from positions."""
    config = decoder.config
    if config.model_type not in WITHOUT_POSITIONS or inputs.get("attention_mask") is not None or inputs.get("position_ids") is None:
        return dict(inputs)
    given: dict[str, Any] = {
        "config": config,
        "inputs_embeds": decoder.get_input_embeddings()(inputs["input_ids"]),
        "attention_mask": None,
        "past_key_values": None,
        "position_ids": inputs["position_ids"],
    }
    masks = {"full_attention": create_causal_mask(**given), "sliding_attention": create_sliding_window_causal_mask(**given)}
    return {**inputs, "attention_mask": masks}


def linear_layers(model: Any, wanted: tuple[str, ...] | None = None) -> list[str]:
    """Returns the linear layers that an adapter trains, as suffixes of module names that match these layers and no others.

    1. Layers of the text decoder's blocks; not its head.
    2. No routers: an adapter on one changes which experts answer, and servers keep routers whole.
    3. No layers with a recurrent state: servers fuse their projections in another order than the checkpoint.
    4. Only those whose names end in `wanted`, if given.
    """
    decoder = text_decoder(model)
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    chosen, others = [], []
    for name, module in model.named_modules():
        parts = name.split(".")
        inside = name.startswith(f"{prefix}.") and isinstance(module, torch.nn.Linear)
        if inside and parts[-1] not in ROUTERS and not RECURRENT.intersection(parts) and (wanted is None or parts[-1] in wanted):
            chosen.append(name)
        else:
            others.append(name)
        if parts[-1] == "experts":  # stored one by one, whether or not the model fuses them
            others += [f"{name}.0.{projection}" for projection in ("gate_proj", "up_proj", "down_proj")]
    return sorted({_suffix(name, others) for name in chosen})


def _suffix(name: str, others: list[str]) -> str:
    """Returns the shortest end of `name`, in whole parts, that none of `others` ends with."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        end = ".".join(parts[-count:])
        if not any(other == end or other.endswith(f".{end}") for other in others):
            return end
    return name


def is_router(name: str) -> bool:
    """Returns whether a parameter of that name decides which experts answer, or how much they count."""
    return bool(ROUTERS.intersection(name.split(".")))


def is_expert(name: str) -> bool:
    """Returns whether a parameter of that name belongs to experts among which a router chooses."""
    return "experts" in name.split(".")


def freeze(model: Any, *, experts: bool, router: bool) -> None:
    """Freezes everything but the text decoder and its head, because encoders of images and sounds get no gradient from text; also experts
    and routers, unless they are to be trained."""
    text = text_model(model)
    kept = {id(p) for module in (text_decoder(model), text.get_output_embeddings()) for p in module.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in kept or (is_router(name) and not router) or (is_expert(name) and not experts):
            parameter.requires_grad_(False)


def balance_loss(text: Any, router_logits: tuple[torch.Tensor, ...], is_token: torch.Tensor) -> torch.Tensor:
    """Returns the model's load-balancing loss over the tokens of a batch, with the weight that its config gives it.

    `is_token`: shape (rows, tokens), 0 for padding. 0 for a model without experts, or whose config gives the loss no weight.
    """
    config = text.config.get_text_config(decoder=True)
    weight = balance_weight(config)
    if not weight:
        return is_token.new_zeros((), dtype=torch.float32)
    define = balance_function(text)
    if define is None or not router_logits:
        raise RuntimeError(f"{type(text).__name__} gives no load-balancing loss, but its config gives that loss the weight {weight}")
    loss: torch.Tensor = define(router_logits, _num_experts(config), config.num_experts_per_tok, is_token)
    return weight * loss


def balance_weight(config: Any) -> float:
    """Returns the weight of the load-balancing loss in a text decoder's config; 0 without experts."""
    return float(getattr(config, "router_aux_loss_coef", None) or 0.0) if _num_experts(config) else 0.0


def balance_function(text: Any) -> Any | None:
    """Returns the load-balancing loss that transformers defines beside the model's class, or None. ``fully_shard`` puts a class of its own
    before that one."""
    modules = (sys.modules[known.__module__] for known in type(text).__mro__)
    return next((found for module in modules if (found := getattr(module, "load_balancing_loss_func", None))), None)


def _num_experts(config: Any) -> int | None:
    return next((n for name in EXPERTS if (n := getattr(config, name, None))), None)


def stored_form(model: Any, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the tensors of `model` under the names and in the shapes of its checkpoint: experts one by one, older prefixes."""
    return dict(revert_weight_conversion(model, dict(state)))
