"""Weights: loads the base model by the spec, and saves bytes that depend on the weights alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer, BitsAndBytesConfig

from engine.training import methods
from engine.training.model_shapes import context_split, from_config
from engine.training.model_shapes.attention_kernels import Choice
from engine.training.runtime.model import attention, decoder
from engine.training.runtime.model.split_windows import Context
from engine.training.runtime.run_errors import BadInput, BadSpec, Diverged
from engine.training.spec import Quantization, RunFile, TrainingSpec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ADAPTER_WEIGHTS, MODEL_WEIGHTS = "adapter_model.safetensors", "model.safetensors"
SHARD_BYTES = 4 * 2**30
"""Bytes per file of full weights."""


class PartLoader(Protocol):
    def __call__(self, directory: Path, *, dtype: torch.dtype, attention: str) -> Any | None: ...


def load_base(
    directory: Path,
    spec: TrainingSpec,
    *,
    device: torch.device,
    load_part: PartLoader | None = None,
    context: Context | None = None,
    weights_dir: Path | None = None,
) -> tuple[Any, Any]:
    """Loads the frozen or trainable base model and its tokenizer. Safetensors only; no code of the repository is run.

    A trainable base is held in float32 and computed in the spec's precision: half-precision weights lose updates smaller than a 256th of
    themselves. A frozen one is held in the spec's precision, or in 4 bits. `load_part` returns it in the parts of sharded ranks, or None.
    `context`: ranks that share windows with this one. `weights_dir`: a whole model trained from this base, in its place.
    """
    weights_dir = weights_dir or directory
    dtype = torch.float32 if spec.adapter == "full" else DTYPES[spec.precision]
    options: dict[str, Any] = {}
    if device.type == "cuda" and spec.strategy in ("single", "ddp"):
        options = {"device_map": {"": device}}  # directly on each GPU: not through the machine's memory
    if spec.quantization is not None:
        options = quantized(spec.quantization, dtype=dtype, device=device)
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
        choice = choice_of_attention(spec, device, config)
        _require_splittable(spec, config, choice, device)
        implementation = attention.register(choice, max_seq_len=spec.max_seq_len, context=context)
        model: Any = None if load_part is None else load_part(weights_dir, dtype=dtype, attention=implementation)
        if model is None:
            model = decoder.load(weights_dir, dtype=dtype, attn_implementation=implementation, **options)
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except (OSError, ImportError, ValueError, SafetensorError) as e:
        raise BadInput(f"base model {spec.base_model} cannot be loaded from {weights_dir}: {e}", code="base_model_unavailable") from e
    for part in (model.config, model.config.get_text_config(decoder=True)):
        part.use_cache = False
    decoder.freeze(model, experts=spec.train_experts, router=spec.train_router)
    if spec.train_router:
        _require_balance(model)
    if spec.adapter == "full" and spec.strategy.startswith("zero") and not all(p.requires_grad for p in model.parameters()):
        raise BadSpec(
            f"strategy {spec.strategy} saves only models whose parameters are all trained, and parts of this one are frozen; use fsdp2"
        )
    if spec.quantization is not None:
        keep_layout(model)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
    if spec.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return model, tokenizer


def choice_of_attention(spec: TrainingSpec, device: torch.device, config: Any) -> Choice:
    """Returns the attention kernel of a run for a model of `config`, and why."""
    packed = methods.method_named(spec.method).pack == "windows"
    return attention.chosen(spec.attention, device, config, precision=spec.precision, packed=packed)


def _require_splittable(spec: TrainingSpec, config: Any, choice: Choice, device: torch.device) -> None:
    if (size := spec.context_parallel) == 1:
        return
    why = context_split.context_objection(from_config(config.to_dict()), size, kernel=choice.kernel, on_cpu=device.type == "cpu")
    if why is not None:
        raise BadSpec(f"windows of {spec.base_model} cannot be split over {size} ranks: {why}; set context_parallel to 1")


def _require_balance(model: Any) -> None:
    text = decoder.text_model(model)
    config = text.config.get_text_config(decoder=True)
    if (weight := decoder.balance_weight(config)) and decoder.balance_function(text) is None:
        raise BadSpec(
            f"the config of this {config.model_type} gives its load-balancing loss the weight {weight}, but transformers defines no such "
            "loss for it, and a router trained without it sends most tokens to a few experts; set train_router to false"
        )


def quantized(how: Quantization, *, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Options for loading a base in 4 bits, in one place, so that a reference is quantized like the trained model."""
    config = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type=how.kind,
        bnb_4bit_use_double_quant=how.double,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
    )
    return {"quantization_config": config, "device_map": {"": device}}


def keep_layout(model: Any) -> None:
    """Stops the 4-bit layers from repacking their weights for inference on a CPU with AVX512-BF16.

    They would do so at the first pass without gradients (the self-test, a validation) and silently pass no gradient from then on.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def lora_config(spec: TrainingSpec, model: Any) -> LoraConfig | None:
    """Returns the spec's LoRA settings as PEFT's; None for full parameters.

    ``all-linear`` is expanded to the last parts of the layers' names, the form that inference servers read. Raises ``BadSpec`` if the model
    has no layer of a requested name.
    """
    if spec.lora is None:
        return None
    alpha = spec.lora.saved_alpha
    return LoraConfig(
        r=spec.lora.saved_rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,  # type: ignore[arg-type]
        lora_dropout=spec.lora.dropout,
        target_modules=_target_modules(model, spec.lora.target_modules),
        use_rslora=spec.lora.use_rslora,
        use_dora=spec.lora.use_dora,
        task_type="CAUSAL_LM",
        bias="none",
    )


def whole_start(run: RunFile) -> Path | None:
    """Returns the directory of the whole model that a full-parameter run starts from instead of its base; None if it starts from that.

    Raises ``BadInput`` if the run file lacks what ``spec.warm_start`` names.
    """
    if run.spec.warm_start is not None and run.warm_start_dir is None:
        raise BadInput(f"the spec starts from {run.spec.warm_start.adapter}, but the run file has no warm_start_dir")
    return run.warm_start_dir if run.spec.warm_start is not None and run.spec.adapter == "full" else None


def start_warm(model: Any, run: RunFile) -> None:
    """Loads the weights of ``spec.warm_start`` into the adapter, if there is one; raises ``BadInput`` if they do not fit."""
    if run.spec.warm_start is not None and run.warm_start_dir is not None and run.spec.adapter != "full":
        load_weights(model, run.warm_start_dir)


def hold_trained_in_fp32(model: Any) -> None:
    """Converts trained parameters to float32: in half precision, updates smaller than a 256th of a weight are lost."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsCopy:
    """A snapshot of weights on the CPU."""

    tensors: Mapping[str, torch.Tensor]
    config: Mapping[str, Any] | None
    """Configuration of the adapter; None for a whole model."""
    model_config: Any = None

    @classmethod
    def of(cls, model: Any, *, base_model: str, precision: str | None = None) -> Self:
        """Copies the trained weights of `model`. `precision`: casts a whole model to it, as it will be served."""
        if isinstance(model, PeftModel):
            return cls.of_adapter(get_peft_model_state_dict(model, save_embedding_layers=False), model, base_model=base_model)
        return cls.of_state(model.state_dict(), model, precision=precision)

    @classmethod
    def of_adapter(cls, state: Mapping[str, Any], model: Any, *, base_model: str) -> Self:
        """Makes a copy from the adapter's whole tensors."""
        config = json.loads(json.dumps(model.peft_config["default"].to_dict(), default=_plain))
        config |= {"base_model_name_or_path": base_model, "inference_mode": True}
        return cls(tensors=_copies(state, None), config=config)

    @classmethod
    def of_state(cls, state: Mapping[str, Any], model: Any, *, precision: str | None = None) -> Self:
        """Makes a copy from the whole tensors of a model; tied weights are written once. With a `precision`, as the base is stored."""
        tensors = _copies({k: v for k, v in state.items() if k not in model.all_tied_weights_keys}, None)
        if precision is not None:
            tensors = _copies(decoder.stored_form(model, tensors), DTYPES[precision])
        return cls(tensors=tensors, config=None, model_config=model.config)

    def write(self, directory: Path) -> None:
        """Writes the weights; the same weights always give the same bytes."""
        if self.config is not None:
            save_file(dict(self.tensors), directory / ADAPTER_WEIGHTS, metadata={"format": "pt"})
            (directory / "adapter_config.json").write_text(json.dumps(self.config, indent=2, sort_keys=True))
            return
        dtype = next(iter(self.tensors.values())).dtype
        config = json.loads(self.model_config.to_json_string()) | {"dtype": str(dtype).removeprefix("torch."), "use_cache": True}
        (directory / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
        shards = _shards(self.tensors)
        if len(shards) == 1:
            save_file(dict(self.tensors), directory / MODEL_WEIGHTS, metadata={"format": "pt"})
            return
        index: dict[str, str] = {}
        for number, names in enumerate(shards, start=1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            save_file({n: self.tensors[n] for n in names}, directory / file, metadata={"format": "pt"})
            index |= dict.fromkeys(names, file)
        size = sum(t.numel() * t.element_size() for t in self.tensors.values())
        body = {"metadata": {"total_size": size}, "weight_map": index}
        (directory / "model.safetensors.index.json").write_text(json.dumps(body, indent=2, sort_keys=True))


def load_weights(model: Any, directory: Path) -> None:
    """Loads into `model` (adapter or whole) what :class:`WeightsCopy` wrote; raises ``BadInput`` for names or shapes that do not fit."""
    files = sorted(directory.glob(ADAPTER_WEIGHTS if isinstance(model, PeftModel) else "model*.safetensors"))
    if not files:
        raise BadInput(f"{directory} holds no weights for a {'LoRA adapter' if isinstance(model, PeftModel) else 'whole model'}")
    state = {k: v for file in files for k, v in load_file(file).items()}
    try:
        if isinstance(model, PeftModel):
            own = {k: v.shape for k, v in get_peft_model_state_dict(model, save_embedding_layers=False).items()}
            if own != {k: v.shape for k, v in state.items()}:
                different = sorted(k for k in own.keys() | state.keys() if own.get(k) != (state[k].shape if k in state else None))
                raise BadInput(
                    f"the adapter in {directory} does not fit: {different[0]} and {len(different) - 1} more differ in shape or name"
                )
            set_peft_model_state_dict(model, state)
            return
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as e:
        raise BadInput(f"the weights in {directory} do not fit: {str(e)[:300]}") from e
    tied = model.all_tied_weights_keys.keys()
    if unexpected or set(missing) - tied:
        raise BadInput(f"the weights in {directory} do not fit: {(sorted(set(missing) - tied) + unexpected)[0]} is missing or unknown")


def require_finite(model: Any) -> None:
    """Refuses to save weights whose output is NaN."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not torch.isfinite(parameter).all():
            raise Diverged(f"{name} has values that are not finite after the last step; lower learning_rate")


def saved_adapter_name(name: str) -> str:
    """Returns the name of a trained parameter in the adapter's file, which omits adapter names."""
    return name.replace(".default.weight", ".weight")


def _copies(state: Mapping[str, Any], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    copies = {}
    for name, tensor in sorted(state.items()):
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        copies[name] = tensor.detach().to("cpu", wanted, copy=True).contiguous()
    return copies


def _shards(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and filled + size > SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _target_modules(model: Any, modules: str | Sequence[str]) -> list[str]:
    if isinstance(modules, str):
        return decoder.linear_layers(model)
    found = decoder.linear_layers(model, tuple(modules))
    if absent := sorted(set(modules) - {name.rpartition(".")[2] for name in found}):
        offered = sorted({name.rpartition(".")[2] for name in decoder.linear_layers(model)})
        raise BadSpec(f"target_modules names {absent[0]}, which adapters cannot train in this base model; it has {', '.join(offered)}")
    return found


def _plain(value: Any) -> Any:
    """Converts values that JSON lacks: sets to sorted lists, enums to their values."""
    return sorted(value) if isinstance(value, (set, frozenset)) else str(getattr(value, "value", value))
