"""Base model in, adapter out: loading by the spec, and saving bytes that depend on the weights alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ft_assets.training.runtime.endings import BadInput, Diverged
from ft_assets.training.spec import TrainingSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_base(directory: Path, spec: TrainingSpec) -> tuple[Any, Any]:
    """Model in the spec's precision, and its tokenizer. Safetensors only, no code of the repository is run."""
    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=DTYPES[spec.precision], use_safetensors=True, trust_remote_code=False, attn_implementation="sdpa"
        )
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except OSError as e:
        raise BadInput(f"base model {spec.base_model} cannot be loaded from {directory}: {e}", code="base_model_unavailable") from e
    return model, tokenizer


def lora_config(spec: TrainingSpec, model: Any) -> LoraConfig | None:
    """PEFT's form of the spec's LoRA settings; None for full parameters.

    ``all-linear`` is spelled out as the last parts of the layers' names: the form that inference servers read.
    """
    if spec.lora is None:
        return None
    modules, alpha = spec.lora.target_modules, spec.lora.alpha
    return LoraConfig(
        r=spec.lora.rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,  # type: ignore[arg-type]
        lora_dropout=spec.lora.dropout,
        target_modules=_linear_layers(model) if modules == "all-linear" else list(modules),
        task_type="CAUSAL_LM",
        bias="none",
    )


def save_weights(model: Any, directory: Path, *, base_model: str) -> None:
    """Write adapter (or model) into `directory`; the same weights always give the same bytes."""
    if not isinstance(model, PeftModel):
        model.save_pretrained(directory)
        return
    tensors = {k: v.detach().cpu().contiguous() for k, v in sorted(get_peft_model_state_dict(model, save_embedding_layers=False).items())}
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = json.loads(json.dumps(model.peft_config["default"].to_dict(), default=_plain))
    config |= {"base_model_name_or_path": base_model, "inference_mode": True}
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True))


def require_finite(model: Any) -> None:
    """Refuse to hand out weights that answer with NaN."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not torch.isfinite(parameter).all():
            raise Diverged(f"{name} holds values that are not finite after the last step; lower learning_rate")


def _linear_layers(model: Any) -> list[str]:
    head = model.get_output_embeddings()
    return sorted({name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m is not head})


def _plain(value: Any) -> Any:
    """Sets sorted, enums by value: what JSON has no word for."""
    return sorted(value) if isinstance(value, (set, frozenset)) else str(getattr(value, "value", value))
