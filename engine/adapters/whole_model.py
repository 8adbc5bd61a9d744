"""The package of a whole model, from full-parameter training: its config and weights, and the manifest with their digests.

It is registered with the lineage of an adapter, but shares no weights with its base, so no server of the base can load it: it needs one of
its own (:mod:`engine.adapters.servers`). Tokenizer and template stay the base's; an export adds them to the weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from core.base_models import text_config, ties_embeddings
from core.errors import IntegrityError
from engine.adapters import tensors
from engine.adapters.package import ADAPTER_CONFIG, unsafe_files, write_manifest
from engine.adapters.servability import Refusal

MODEL_CONFIG, INDEX, SHARDS = "config.json", "model.safetensors.index.json", "model*.safetensors"
OWN_SERVER = Refusal(
    code="needs_own_server",
    detail="it is a whole model, which cannot share a server with other adapters, and this platform starts no servers; "
    "export it (`ft export NAME --format merged`) and run it on a dedicated server",
)
SAME = (
    "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "tie_word_embeddings",
)  # fmt: skip
"""Fields of the config that training cannot change."""


def is_whole_model(directory: Path) -> bool:
    """Returns whether `directory` holds a whole model instead of an adapter."""
    return not (directory / ADAPTER_CONFIG).is_file() and (directory / MODEL_CONFIG).is_file()


def verify_whole_model(directory: Path, *, base_dir: Path) -> list[Refusal]:
    """Returns every reason why the model in `directory` cannot have been trained from `base_dir`; empty if it can.

    1. The files exist, are complete, and safetensors only.
    2. Its architecture is the base's.
    3. It has exactly the base's tensors, with their shapes.
    4. Every number is finite.
    """
    try:
        config, base_config = _config(directory), _config(base_dir)
        shapes, base_shapes = tensors.module_shapes(directory), tensors.module_shapes(base_dir)
    except IntegrityError as e:
        return [Refusal(code="unreadable", detail=e.message)]
    tied = ties_embeddings(config)
    found = [*unsafe_files(directory), *_architecture(config, base_config), *_shapes(shapes, base_shapes, tied=tied)]
    shards = sorted(directory.glob(SHARDS))
    bad = sorted(name for shard in shards for name in tensors.not_finite(shard, tensors.tensor_header(shard)))
    if bad:
        found.append(Refusal(code="not_finite", detail=f"{len(bad)} tensors hold NaN or infinity, the first is {bad[0]}"))
    return found


def _config(directory: Path) -> Mapping[str, Any]:
    try:
        config: Mapping[str, Any] = json.loads((directory / MODEL_CONFIG).read_text(encoding="utf-8"))
    except OSError as e:
        raise IntegrityError(f"{directory} holds no {MODEL_CONFIG}; a model is its config and its weights") from e
    except ValueError as e:
        raise IntegrityError(f"{directory / MODEL_CONFIG} is not JSON: {e}") from e
    return config


def _architecture(config: Mapping[str, Any], base: Mapping[str, Any]) -> Iterator[Refusal]:
    config, base = (
        text_config(config) | {"model_type": config.get("model_type")},
        text_config(base) | {"model_type": base.get("model_type")},
    )
    for name in SAME:
        if name in base and config.get(name) != base[name]:
            yield Refusal(code="shape_mismatch", detail=f"{name} of its config is {config.get(name)!r}, the base model's is {base[name]!r}")


def _shapes(shapes: Mapping[str, Sequence[int]], base: Mapping[str, Sequence[int]], *, tied: bool) -> Iterator[Refusal]:
    """A tied head may be stored or omitted on both sides."""
    free = {"lm_head.weight"} if tied else set()
    for name in sorted(base.keys() - shapes.keys() - free):
        yield Refusal(code="missing_tensor", detail=f"tensor {name} of the base model is not in it")
    for name, shape in sorted(shapes.items()):
        if name not in base and name not in free:
            yield Refusal(code="unknown_module", detail=f"tensor {name} belongs to no module of the base model")
        elif name in base and tuple(shape) != tuple(base[name]):
            yield Refusal(code="shape_mismatch", detail=f"tensor {name} has shape {list(shape)}, the base model's has {list(base[name])}")


def write_whole_model(source: Path, target: Path, *, served_name: str, base_digest: str) -> str:
    """Makes the package of a trained model in the new directory `target`; returns the sha256 of its manifest."""
    target.mkdir(parents=True)
    for path in (source / MODEL_CONFIG, source / INDEX, *sorted(source.glob(SHARDS))):
        if path.is_file():
            shutil.copyfile(path, target / path.name)
    return write_manifest(target, served_name=served_name, base_digest=base_digest)
