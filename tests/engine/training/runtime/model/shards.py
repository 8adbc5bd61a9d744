"""One of two ranks that load models in shards and whole, and compare them.

    python -m tests.engine.training.runtime.model.shards STRATEGY RANK RENDEZVOUS_FILE DIRECTORY

Prints a line for each case of :data:`CASES`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import get_peft_model
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, GPT2Config, MixtralConfig, Qwen3Config, set_seed

from engine.training.runtime import parallel
from engine.training.runtime.model.weights import hold_trained_in_fp32, load_base, lora_config
from engine.training.spec import TrainingSpec
from tests.engine.training.attempts import SPEC
from tests.support.models.tiny_model import VOCAB, build_tiny_model

RANKS = 2


def tied(base: Path) -> None:
    """A checkpoint of tied embeddings stores them once."""
    change(base, tie_word_embeddings=True)
    rewrite(base, lambda tensors: tensors.pop("lm_head.weight"))


def unnamed_prefix(base: Path) -> None:
    """Some checkpoints store the backbone without the prefix of the causal model."""
    rewrite(base, lambda tensors: [tensors.update({n.removeprefix("model."): tensors.pop(n)}) for n in list(tensors)])


def in_two_files(base: Path) -> None:
    tensors = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    index: dict[str, str] = {}
    for number in range(2):
        names = sorted(tensors)[number::2]
        save_file({n: tensors[n] for n in names}, base / f"model-{number}.safetensors", metadata={"format": "pt"})
        index |= dict.fromkeys(names, f"model-{number}.safetensors")
    (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def without_a_norm(base: Path) -> None:
    rewrite(base, lambda tensors: tensors.pop("model.norm.weight"))


def of_another_shape(base: Path) -> None:
    rewrite(base, lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}))


def odd_vocabulary(base: Path) -> None:
    """No tensor with a row per token divides evenly."""
    change(base, vocab_size=VOCAB + 1)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    rewrite(base, lambda tensors: tensors.update({n: torch.cat([tensors[n], tensors[n][:1]]) for n in names}))


def gpt2(base: Path) -> None:
    """Its layers store their weights transposed, and its embeddings are tied."""
    replace_model(base, GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=64))


def qwen3(base: Path) -> None:
    replace_model(base, Qwen3Config(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                                    num_key_value_heads=1, head_dim=16))  # fmt: skip


def mixtral(base: Path) -> None:
    """Stored expert by expert, which transformers merges as it loads."""
    replace_model(base, MixtralConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
                                      num_key_value_heads=1, num_local_experts=4))  # fmt: skip


def as_it_is(base: Path) -> None:
    del base


CASES: dict[str, tuple[Callable[[Path], Any], TrainingSpec]] = {
    "llama": (as_it_is, SPEC),
    "llama in bf16": (as_it_is, replace(SPEC, precision="bf16")),
    "llama, all parameters": (as_it_is, replace(SPEC, adapter="full", lora=None, precision="bf16")),
    "recomputed activations": (as_it_is, replace(SPEC, gradient_checkpointing=True)),
    "tied": (tied, SPEC),
    "tied, all parameters": (tied, replace(SPEC, adapter="full", lora=None)),
    "in two files": (in_two_files, SPEC),
    "without a prefix": (unnamed_prefix, SPEC),
    "odd vocabulary": (odd_vocabulary, SPEC),
    "gpt2": (gpt2, replace(SPEC, adapter="full", lora=None)),
    "qwen3": (qwen3, SPEC),
    "mixtral": (mixtral, SPEC),
    "without a norm": (without_a_norm, SPEC),
    "of another shape": (of_another_shape, SPEC),
}


def change(base: Path, **settings: Any) -> None:
    config = json.loads((base / "config.json").read_text()) | settings
    (base / "config.json").write_text(json.dumps(config))


def rewrite(base: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(base / "model.safetensors")
    edit(tensors)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})


def replace_model(base: Path, config: Any) -> None:
    set_seed(1)
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(base)


def compare(base: Path, spec: TrainingSpec) -> dict[str, Any]:
    """Returns how the model in shards differs from the whole one, before and after both are adapted and wrapped alike."""
    strategy = parallel.build(spec)
    strategy.start()
    dtype = torch.float32 if spec.adapter == "full" else {"fp32": torch.float32, "bf16": torch.bfloat16}[spec.precision]
    part = strategy.load_part(base, dtype=dtype, attention=spec.attention)
    if part is None:
        return {"loaded": "whole"}
    shards, _ = load_base(base, spec, device=strategy.device, load_part=lambda *_, **__: part)
    whole, _ = load_base(base, spec, device=strategy.device)
    return {
        "loaded": "in shards",
        "share": sum(held(p).numel() for p in shards.parameters()) / sum(size(p) for p in shards.parameters()),
        "different": [*different(shards, whole), *settings_that_differ(shards, whole)],
        "different when trained": different(*(trained(model, spec) for model in (shards, whole))),
    }


def trained(model: Any, spec: TrainingSpec) -> Any:
    """The model after a step, with its gradients and the log-probabilities before it in buffers."""
    strategy = parallel.build(spec)
    strategy.start()
    set_seed(spec.seed)
    if (lora := lora_config(spec, model)) is not None:
        model = get_peft_model(model, lora)
    hold_trained_in_fp32(model)
    strategy.wrap(model, total_steps=4)
    strategy.model.eval()
    tokens = torch.arange(24).reshape(2, 12) + 7 * dist.get_rank()
    with strategy.micro_batch(last=True):
        logits = strategy.model(input_ids=tokens, use_cache=False).logits
        strategy.backward(logits.float().log_softmax(-1)[..., 5].mean())
    model.register_buffer("found_norm", torch.tensor(strategy.gradient_norm()))
    strategy.step()
    model.register_buffer("found_logits", logits.detach())
    return model


def different(left: Any, right: Any) -> list[str]:
    """Names of parameters and buffers whose bytes, types or settings are not the same."""
    found = []
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = (dict(getattr(model, kind)(remove_duplicate=False)) for model in (left, right))
        found += sorted(ours.keys() ^ theirs.keys())
        for name in sorted(ours.keys() & theirs.keys()):
            a, b = gathered(ours[name]), gathered(theirs[name])
            if a.dtype != b.dtype or ours[name].requires_grad != theirs[name].requires_grad or not torch.equal(a, b):
                found.append(name)
    aliases = [{n: id(p) for n, p in m.named_parameters(remove_duplicate=False)} for m in (left, right)]
    shared = [sorted(n for n, i in names.items() if list(names.values()).count(i) > 1) for names in aliases]
    return found + (["tied names"] if shared[0] != shared[1] else [])


def settings_that_differ(left: Any, right: Any) -> list[str]:
    pairs = {
        "class": (type(left), type(right)),
        "config": (left.config.to_json_string(use_diff=False), right.config.to_json_string(use_diff=False)),
        "attention": (left.config._attn_implementation, right.config._attn_implementation),
        "generation": (left.generation_config.to_dict(), right.generation_config.to_dict()),
        "training": (left.training, right.training),
    }
    return [name for name, (a, b) in pairs.items() if a != b]


def gathered(tensor: Any) -> torch.Tensor:
    """The whole of a DTensor; of a parameter of ZeRO-3, this rank's part, with its shape before it."""
    if hasattr(tensor, "ds_tensor"):
        return torch.cat([torch.tensor(tensor.ds_shape).to(held(tensor).dtype), held(tensor)])
    found: torch.Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach()


def held(parameter: Any) -> torch.Tensor:
    """What this rank holds of a sharded parameter, without padding."""
    if isinstance(parameter, DTensor):
        return parameter.detach().to_local()
    part: torch.Tensor = parameter.ds_tensor.detach()
    return part[: max(0, parameter.ds_numel - dist.get_rank() * part.numel())]


def size(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


if __name__ == "__main__":
    strategy_name, rank, rendezvous, root = sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_SIZE": str(RANKS)}
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    for name, (prepare, spec) in CASES.items():
        base = root / name
        if rank == 0:
            prepare(build_tiny_model(base))
        dist.barrier()
        result = compare(base, replace(spec, strategy=strategy_name, world_size=RANKS))
        sys.stdout.write(json.dumps({"case": name, **result}) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()
