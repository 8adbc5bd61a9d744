"""The package of an adapter: what may be served, and the manifest that says which bytes it is.

A package is a directory of ``adapter_model.safetensors``, ``adapter_config.json`` and ``manifest.json``. The servers
themselves check little (wrong shapes, another base's weights and NaN load with a 200 and then answer wrongly, also to
other tenants), so everything is checked here, before a byte reaches a server.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ft_assets.adapters import tensors
from ft_assets.adapters.tensors import TensorInfo
from ft_assets.errors import IntegrityError
from ft_assets.training import hyperparameters

WEIGHTS, CONFIG, MANIFEST = "adapter_model.safetensors", "adapter_config.json", "manifest.json"
RANKS = hyperparameters.ENGINE_RANKS
MAX_RANK = hyperparameters.MAX_RANK
"""The limit at submission is the limit here."""
UNSUPPORTED: Mapping[str, str] = {
    "use_dora": "DoRA",
    "lora_bias": "biases on the LoRA matrices",
    "modules_to_save": "modules saved whole (modules_to_save)",
    "trainable_token_indices": "trainable tokens",
    "target_parameters": "adapters on bare parameters",
    "layer_replication": "replicated layers",
    "fan_in_fan_out": "transposed weights",
    "alora_invocation_tokens": "activated LoRA",
}
"""Switches of adapter_config.json that no server here can serve, and what they stand for."""
TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """One reason why an adapter may not be served."""

    code: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    config: Mapping[str, Any]
    weights: Mapping[str, TensorInfo]

    @property
    def rank(self) -> int:
        return int(self.config.get("r") or 0)

    @property
    def alpha(self) -> float:
        return float(self.config.get("lora_alpha") or 0)

    @property
    def modules(self) -> tuple[str, ...]:
        """Short names of the adapted modules (``q_proj``), sorted."""
        return tuple(sorted({m["module"].rsplit(".", 1)[-1] for m in map(TENSOR.fullmatch, self.weights) if m}))


def read(directory: Path) -> Package:
    """Config and tensor shapes of the adapter in `directory`; ``IntegrityError`` if a file is absent or torn."""
    for name in (CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            raise IntegrityError(f"{directory} holds no {name}; an adapter is {CONFIG} and {WEIGHTS}")
    try:
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    except ValueError as e:
        raise IntegrityError(f"{directory / CONFIG} is not JSON: {e}") from e
    return Package(config=config, weights=tensors.header(directory / WEIGHTS))


def verify(directory: Path, *, base_shapes: Mapping[str, Sequence[int]], served_name: str, max_rank: int = MAX_RANK) -> list[Refusal]:
    """Every reason why the adapter in `directory` may not be served on this base; empty if it may.

    1. The files are there, whole, and safetensors only.
    2. The config asks for nothing that the servers refuse or ignore, and names the base as it is served.
    3. Ranks are allowed and at most `max_rank`.
    4. Each tensor belongs to a module of the base, in pairs, with the shapes of base and rank.
    5. Every number is finite.
    """
    try:
        package = read(directory)
    except IntegrityError as e:
        return [Refusal(code="unreadable", detail=e.message)]
    found = [*unsafe_files(directory), *_config(package.config, served_name), *_ranks(package.config, max_rank)]
    found += _shapes(package, base_shapes)
    bad = sorted(tensors.not_finite(directory / WEIGHTS, dict(package.weights)))
    if bad:
        found.append(Refusal(code="not_finite", detail=f"{len(bad)} tensors hold NaN or infinity, the first is {bad[0]}"))
    return found


def unsafe_files(directory: Path) -> Iterator[Refusal]:
    pickles = sorted(p.name for p in directory.iterdir() if p.suffix in {".bin", ".pt", ".pth", ".pkl", ".ckpt"})
    if pickles:
        yield Refusal(code="unsafe_files", detail=f"{', '.join(pickles)} could run code when loaded; only safetensors are served")


def _config(config: Mapping[str, Any], served_name: str) -> Iterator[Refusal]:
    if config.get("peft_type") != "LORA":
        yield Refusal(code="not_lora", detail=f"peft_type is {config.get('peft_type')!r}, only LORA is served")
    for key, what in UNSUPPORTED.items():
        if config.get(key):
            yield Refusal(code="unsupported_feature", detail=f"{key}={config[key]!r}: {what} cannot be served")
    if config.get("bias", "none") != "none":
        yield Refusal(
            code="unsupported_feature", detail=f"bias={config['bias']!r}: trained biases cannot be served; train with bias='none'"
        )
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower() not in {"gaussian", "orthogonal", "eva"}:
        yield Refusal(code="unsupported_feature", detail=f"init_lora_weights={start!r} changes the base weights, which are shared")
    if config.get("base_model_name_or_path") != served_name:
        yield Refusal(
            code="base_name_mismatch",
            detail=f"made for {config.get('base_model_name_or_path')!r}, but the base is served as {served_name!r}",
        )


def _ranks(config: Mapping[str, Any], max_rank: int) -> Iterator[Refusal]:
    for rank in sorted({config.get("r"), *(config.get("rank_pattern") or {}).values()}, key=str):
        if rank not in RANKS or rank > max_rank:
            allowed = ", ".join(str(r) for r in RANKS if r <= max_rank)
            yield Refusal(code="rank_not_servable", detail=f"rank {rank} is not one of {allowed}; train with one of these")


def rank_of(config: Mapping[str, Any], module: str) -> int:
    """Rank of one module: that of the first matching pattern, else the adapter's."""
    return int(_by_pattern(config.get("rank_pattern"), module, config["r"]))


def scale_of(config: Mapping[str, Any], module: str) -> float:
    """What the product of the two matrices is multiplied with: alpha / r, or alpha / sqrt(r) for rsLoRA."""
    rank, alpha = rank_of(config, module), float(_by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"]))
    return alpha / rank**0.5 if config.get("use_rslora") else alpha / rank


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """PEFT's rule: a pattern matches a module whose name it is, or ends with it after a dot."""
    return next((value for pattern, value in (patterns or {}).items() if re.match(rf"(.*\.)?({pattern})$", module)), default)


def _shapes(package: Package, base_shapes: Mapping[str, Sequence[int]]) -> Iterator[Refusal]:
    sides: dict[str, set[str]] = {}
    for name, info in package.weights.items():
        match = TENSOR.fullmatch(name)
        base = base_shapes.get(f"{match['module']}.weight") if match else None
        if match is None or base is None or len(base) != 2:
            yield Refusal(code="unknown_module", detail=f"tensor {name} belongs to no linear module of the base model")
            continue
        sides.setdefault(match["module"], set()).add(match["side"])
        rank = rank_of(package.config, match["module"]) if package.rank else 0
        wanted = (rank, base[1]) if match["side"] == "A" else (base[0], rank)
        if info.shape != wanted:
            yield Refusal(
                code="shape_mismatch", detail=f"tensor {name} has shape {list(info.shape)}, base model and rank need {list(wanted)}"
            )
    for module, found in sides.items():
        if found != {"A", "B"}:
            yield Refusal(code="unpaired_tensor", detail=f"module {module} has only lora_{next(iter(found))}; both are needed")
    if not package.weights:
        yield Refusal(code="empty_adapter", detail="the adapter holds no tensors")


def write(source: Path, target: Path, *, served_name: str, base_digest: str) -> str:
    """Make the package of a trained adapter in the new directory `target`; returns the sha256 of its manifest.

    The weights are copied as they are; the config names the base as it is served (servers match it by that text).
    """
    package = read(source)
    target.mkdir(parents=True)
    shutil.copyfile(source / WEIGHTS, target / WEIGHTS)
    config = {**package.config, "base_model_name_or_path": served_name, "inference_mode": True}
    (target / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
    return write_manifest(target, served_name=served_name, base_digest=base_digest)


def write_manifest(target: Path, *, served_name: str, base_digest: str) -> str:
    """List the files of a package and the base that they came from; returns the sha256 of the list."""
    files = {p.name: {"sha256": file_sha256(p), "bytes": p.stat().st_size} for p in sorted(target.iterdir())}
    body = json.dumps({"format": 1, "base_model": served_name, "base_digest": base_digest, "files": files}, indent=2, sort_keys=True)
    (target / MANIFEST).write_text(body, encoding="utf-8")
    return hashlib.sha256(body.encode()).hexdigest()


def manifest_files(manifest: bytes, *, sha256: str) -> dict[str, str]:
    """Name and sha256 of each file that `manifest` lists, after checking that it is the manifest meant by `sha256`."""
    actual = hashlib.sha256(manifest).hexdigest()
    if actual != sha256:
        raise IntegrityError(f"the manifest's sha256 is {actual}, the registry says {sha256}; restore the adapter's files from a backup")
    return {str(name): str(entry["sha256"]) for name, entry in json.loads(manifest)["files"].items()}


def check_files(directory: Path, *, manifest_sha256: str) -> list[Refusal]:
    """Differences between the files in `directory` and their manifest; empty if there are none."""
    try:
        files = manifest_files((directory / MANIFEST).read_bytes(), sha256=manifest_sha256)
    except (IntegrityError, OSError) as e:
        return [Refusal(code="manifest_mismatch", detail=str(e))]
    wrong = [name for name, sha in files.items() if not (directory / name).is_file() or file_sha256(directory / name) != sha]
    return [Refusal(code="manifest_mismatch", detail=f"{name} is absent or not the file that was registered") for name in wrong]


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
