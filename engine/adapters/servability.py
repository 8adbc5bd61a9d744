"""Whether servers can serve an adapter: every reason against it, from the config's text and the tensors' names, types and shapes.

The rules are vLLM's, and stricter where vLLM loads with a 200 what it then computes wrongly: another base's shapes, a config whose rank is
not the tensors', an unknown switch, tensors that the config does not mention.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from core.base_models import ENGINE_RANKS
from engine.adapters.tensors import FLOAT_TYPES, TensorInfo
from engine.training import HYPERPARAMETER_LIMITS

MAX_ALPHA = HYPERPARAMETER_LIMITS["alpha"].high
"""Same as at submission. With extreme values the product overflows in half precision, and one adapter's NaN reaches other tenants'
caches."""
UNSUPPORTED: Mapping[str, str] = {
    "lora_bias": "biases on the LoRA matrices",
    "modules_to_save": "modules saved whole (modules_to_save)",
    "trainable_token_indices": "trainable tokens",
    "target_parameters": "adapters on bare parameters",
    "layer_replication": "replicated layers",
    "fan_in_fan_out": "transposed weights",
    "alora_invocation_tokens": "activated LoRA",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "a router over adapters (Arrow)",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "ensure_weight_tying": "tied embeddings trained with the adapter",
}
"""Switches of adapter_config.json that no server here can serve, and their meaning."""
HARMLESS = frozenset((
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config", "exclude_modules", "inference_mode",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config",
    "megatron_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "runtime_config", "target_modules", "task_type", "use_dora", "use_rslora",
))  # fmt: skip
"""Fields of PEFT 0.21 about training, or checked below. A field in neither list is a later library's switch: refused if set, because its
effect on a server is unknown."""
PLAIN_STARTS = frozenset(("gaussian", "orthogonal", "eva"))
"""Initializations that leave the base unchanged; PiSSA, OLoRA, CorDA and LoftQ change it."""
OUTSIDE_LAYERS = frozenset(("lm_head", "embed_tokens", "embed_in", "embed_out", "wte", "wpe", "score", "classifier"))
"""Heads and embeddings: a server would need a copy of them for each adapter, and those with a changed vocabulary cannot be batched."""
TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
MAGNITUDE = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_magnitude_vector")
"""Lengths of the rows of a weight, of shape (out,), which DoRA trains."""
NEEDS_MERGE = "needs_merge"
"""Code of the refusal of a sound adapter that only a merged model can contain."""
DORA_DETAIL = (
    "vLLM serves no DoRA adapters; export it merged (`ft export NAME --format merged`) and run that model on a server of its own, or "
    "train without use_dora"
)
OTHER_TENSORS: Mapping[str, str] = {
    "lora_embedding_": "trains the embedding",
    "lora_magnitude_vector": "belongs to DoRA",
    "modules_to_save": "is a module saved whole",
    "embed_tokens": "is an embedding, as one is saved when the vocabulary was resized",
    "lm_head": "is a head, as one is saved when the vocabulary was resized",
    "bias": "is a trained bias",
}
"""Parts of names of tensors that are not LoRA matrices of a linear layer."""
PATTERN = re.compile(r"\^?[A-Za-z0-9_.\\]{1,200}\$?")
"""Names of modules, complete or as a suffix; an arbitrary regular expression could run for minutes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """One reason why an adapter may not be served."""

    code: str
    detail: str

    @property
    def is_fault(self) -> bool:
        """Whether the adapter is not what its training should have made, so that it is quarantined."""
        return self.code != NEEDS_MERGE


def of_config(config: object, *, served_name: str, max_rank: int) -> list[Refusal]:
    """Returns the reasons in the config. A malformed config is refused for that alone (``malformed_config``)."""
    if malformed := list(_malformed(config)):
        return malformed
    assert isinstance(config, dict)
    return [*_switches(config), *_start(config), *_base(config, served_name), *_ranks(config, max_rank)]


def _malformed(config: object) -> Iterator[Refusal]:
    """Checks for NaN, which Python accepts in JSON: as alpha it makes every answer of the batch NaN."""
    if not isinstance(config, dict):
        yield _bad(f"it is a {type(config).__name__}, not an object")
        return
    for key, value in (("r", config.get("r")), *_pairs(config, "rank_pattern")):
        if type(value) is not int or not 0 < value <= max(ENGINE_RANKS):
            yield _bad(f"{key} is {_short(value)}, not a whole number from 1 to {max(ENGINE_RANKS)}")
    for key, value in (("lora_alpha", config.get("lora_alpha")), *_pairs(config, "alpha_pattern")):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= MAX_ALPHA:
            yield _bad(f"{key} is {_short(value)}, not a number above 0 and at most {MAX_ALPHA:g}")
    for key in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(key)
        if not isinstance(patterns, dict | None):
            yield _bad(f"{key} is a {type(patterns).__name__}, not an object")
        elif strange := [p for p in patterns or {} if not _is_pattern(p)]:
            yield _bad(f"{key} names {_short(strange[0])}, which is not the name of a module")
    modules = config.get("target_modules")
    if not (isinstance(modules, str) and modules) and not _is_names(modules):
        yield _bad(f"target_modules is {_short(modules)}, not a list of names of modules")


def _pairs(config: Mapping[str, Any], key: str) -> list[tuple[str, object]]:
    patterns = config.get(key)
    return [(f"{key}.{_short(name)}", value) for name, value in patterns.items()] if isinstance(patterns, dict) else []


def _is_pattern(text: str) -> bool:
    try:
        return bool(PATTERN.fullmatch(text) and re.compile(text))
    except re.error:
        return False


def _is_names(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, str) and v for v in value)


def _bad(detail: str) -> Refusal:
    return Refusal(code="malformed_config", detail=f"adapter_config.json: {detail}")


def _short(value: object) -> str:
    return repr(value)[:80]


def _switches(config: Mapping[str, Any]) -> Iterator[Refusal]:
    if config.get("peft_type") != "LORA":
        yield Refusal(code="not_lora", detail=f"peft_type is {_short(config.get('peft_type'))}, only LORA is served")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        yield _unsupported("task_type", config["task_type"], "only CAUSAL_LM is served")
    for key, what in UNSUPPORTED.items():
        if config.get(key):
            yield _unsupported(key, config[key], f"{what} cannot be served")
    for key in sorted(config.keys() - UNSUPPORTED.keys() - HARMLESS):
        if config[key]:
            yield _unsupported(key[:80], config[key], "a switch that no server here knows")
    if config.get("use_dora"):
        yield Refusal(code=NEEDS_MERGE, detail=DORA_DETAIL)
    if config.get("bias", "none") != "none":
        yield _unsupported("bias", config["bias"], "trained biases cannot be served; train with bias='none'")


def _start(config: Mapping[str, Any]) -> Iterator[Refusal]:
    start = config.get("init_lora_weights", True)
    if not isinstance(start, bool | None) and not (isinstance(start, str) and start.lower() in PLAIN_STARTS):
        yield _unsupported("init_lora_weights", start, "it changes the base weights, which are shared")


def _base(config: Mapping[str, Any], served_name: str) -> Iterator[Refusal]:
    made_for = config.get("base_model_name_or_path")
    if made_for != served_name:
        yield Refusal(code="base_name_mismatch", detail=f"made for {_short(made_for)}, but the base is served as {served_name!r}")


def _unsupported(key: str, value: object, why: str) -> Refusal:
    return Refusal(code="unsupported_feature", detail=f"{key}={_short(value)}: {why}")


def _ranks(config: Mapping[str, Any], max_rank: int) -> Iterator[Refusal]:
    for rank in sorted({config["r"], *(config.get("rank_pattern") or {}).values()}):
        if rank not in ENGINE_RANKS or rank > max_rank:
            allowed = ", ".join(str(r) for r in ENGINE_RANKS if r <= max_rank)
            yield Refusal(code="rank_not_servable", detail=f"rank {rank} is not one of {allowed}; train with one of these")


def rank_of(config: Mapping[str, Any], module: str) -> int:
    """Returns the rank of one module: that of the first matching pattern, else the adapter's."""
    return int(_by_pattern(config.get("rank_pattern"), module, config["r"]))


def scale_of(config: Mapping[str, Any], module: str) -> float:
    """Returns the factor of the product of the two matrices: alpha / r, or alpha / sqrt(r) for rsLoRA."""
    rank, alpha = rank_of(config, module), float(_by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"]))
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """Applies PEFT's rule: a pattern matches a module with that name, or whose name ends with it after a dot."""
    return next((value for pattern, value in (patterns or {}).items() if re.match(rf"(.*\.)?({pattern})$", module)), default)


def of_tensors(config: Mapping[str, Any], weights: Mapping[str, TensorInfo], base_shapes: Mapping[str, Sequence[int]]) -> list[Refusal]:
    """Returns the reasons in the names, types and shapes of the tensors, for a config without reasons.

    1. There are tensors, each of a type that servers read.
    2. Each is half of a pair on a linear layer of the base, inside of its blocks.
    3. Its shape follows from the base's and from the config's rank for that module; DoRA adds a number for each row.
    4. The config's target modules and the tensors' modules are the same.
    """
    if not weights:
        return [Refusal(code="empty_adapter", detail="the adapter holds no tensors")]
    found = [*_types(weights)]
    sides: dict[str, set[str]] = {}
    magnitudes = {name: match for name in weights if config.get("use_dora") and (match := MAGNITUDE.fullmatch(name))}
    for name, info in weights.items():
        match = magnitudes.get(name) or TENSOR.fullmatch(name)
        base = base_shapes.get(f"{match['module']}.weight") if match else None
        if match is None or base is None or len(base) != 2 or match["module"].rsplit(".", 1)[-1] in OUTSIDE_LAYERS:
            found.append(Refusal(code="unknown_module", detail=f"tensor {name[:160]} {_what(name)}"))
            continue
        side, rank = "magnitude" if name in magnitudes else match["side"], rank_of(config, match["module"])
        sides.setdefault(match["module"], set()).add(side)
        wanted = {"A": (rank, base[1]), "B": (base[0], rank), "magnitude": (base[0],)}[side]
        if info.shape != wanted:
            detail = f"tensor {name} has shape {list(info.shape)}, base model and rank need {list(wanted)}"
            found.append(Refusal(code="shape_mismatch", detail=detail))
    return [*found, *_pairing(sides, dora=bool(config.get("use_dora"))), *_targets(config, sides.keys(), base_shapes)]


def _types(weights: Mapping[str, TensorInfo]) -> Iterator[Refusal]:
    odd = sorted(name for name, info in weights.items() if info.dtype not in FLOAT_TYPES)
    if odd:
        dtype = weights[odd[0]].dtype[:16]
        detail = f"{len(odd)} tensors are not {', '.join(FLOAT_TYPES)}; the first is {odd[0][:160]} of type {dtype}"
        yield Refusal(code="dtype_not_servable", detail=detail)


def _what(name: str) -> str:
    return next((what for part, what in OTHER_TENSORS.items() if part in name), "belongs to no linear module of the base model")


def _pairing(sides: Mapping[str, set[str]], *, dora: bool) -> Iterator[Refusal]:
    needed = {"A", "B", "magnitude"} if dora else {"A", "B"}
    for module, found in sides.items():
        if found != needed:
            has = " and ".join(f"lora_{side}" for side in sorted(found))
            yield Refusal(code="unpaired_tensor", detail=f"module {module} has only {has}; {'all three' if dora else 'both'} are needed")


def _targets(config: Mapping[str, Any], adapted: Sequence[str] | Any, base_shapes: Mapping[str, Sequence[int]]) -> Iterator[Refusal]:
    """Compares modules: training and evaluation adapt what the config names; a server adapts what has tensors. They must be the same."""
    targets = config["target_modules"]
    if isinstance(targets, str):
        return
    named = [module for module in adapted if not _is_target(module, targets)]
    if named:
        yield Refusal(code="module_mismatch", detail=f"module {named[0]} has tensors, and target_modules does not name it")
    if config.get("layers_to_transform") is not None or config.get("exclude_modules"):
        return
    linear = (name.removesuffix(".weight") for name, shape in base_shapes.items() if name.endswith(".weight") and len(shape) == 2)
    bare = sorted(module for module in linear if _is_target(module, targets) and module not in adapted)
    if bare and adapted:
        yield Refusal(code="module_mismatch", detail=f"target_modules names {len(bare)} modules without tensors, the first is {bare[0]}")


def _is_target(module: str, targets: Sequence[str]) -> bool:
    return any(module == target or module.endswith(f".{target}") for target in targets)
