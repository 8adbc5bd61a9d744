"""The package of an adapter: the servable files, and the manifest with their digests.

A package is a directory of ``adapter_model.safetensors``, ``adapter_config.json`` and ``manifest.json``. The servers themselves check
little (wrong shapes, another base's weights and NaN load with a 200 and then give wrong answers, also to other tenants), so everything is
checked here and in :mod:`engine.adapters.servability`, before a byte reaches a server.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.base_models import MAX_RANK
from core.durable_files import sha256_of
from core.errors import IntegrityError
from engine.adapters import servability, tensors
from engine.adapters.servability import TENSOR, Refusal
from engine.adapters.tensors import TensorInfo

ADAPTER_WEIGHTS, ADAPTER_CONFIG, PACKAGE_MANIFEST = "adapter_model.safetensors", "adapter_config.json", "manifest.json"
MAX_CONFIG_BYTES = 1 << 20
ALLOWED_FILES = frozenset((ADAPTER_WEIGHTS, ADAPTER_CONFIG, PACKAGE_MANIFEST))
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.json",
    "merges.txt", "chat_template.jinja",
)  # fmt: skip
"""Files of a tokenizer that go with an export, as far as its base has them."""
PICKLES = frozenset((".bin", ".pt", ".pth", ".pkl", ".ckpt"))


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


def read_package(directory: Path) -> Package:
    """Reads config and tensor shapes of the adapter in `directory`; ``IntegrityError`` if a file is missing or torn."""
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if (directory / name).is_symlink() or not (directory / name).is_file():
            raise IntegrityError(f"{directory} holds no file {name}; an adapter is {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}")
    if (directory / ADAPTER_CONFIG).stat().st_size > MAX_CONFIG_BYTES:
        raise IntegrityError(f"{ADAPTER_CONFIG} has more than {MAX_CONFIG_BYTES} bytes; it describes an adapter in a few thousand")
    try:
        config = json.loads((directory / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise IntegrityError(f"{directory / ADAPTER_CONFIG} is not JSON: {e}") from e
    return Package(config=config, weights=tensors.tensor_header(directory / ADAPTER_WEIGHTS))


def verify_package(
    directory: Path, *, base_shapes: Mapping[str, Sequence[int]], served_name: str, max_rank: int = MAX_RANK
) -> list[Refusal]:
    """Returns every reason why the adapter in `directory` may not be served on this base; empty if it may. Never raises, whatever the files
    hold.

    1. The files exist, are complete, plain, safetensors only, and there are no others.
    2. The config is well formed, uses nothing that the servers refuse or ignore, and names the base as it is served.
    3. Ranks are allowed and at most `max_rank`.
    4. Each tensor belongs to a module of the base that the config names, in pairs, of a type that servers read, with the shapes of base and
       rank.
    5. Every number is finite, and within the range of half precision.
    """
    try:
        package = read_package(directory)
    except IntegrityError as e:
        return [Refusal(code="unreadable", detail=e.message)]
    found = [*unsafe_files(directory), *odd_files(directory)]
    refused = servability.of_config(package.config, served_name=served_name, max_rank=max_rank)
    found += refused
    if not any(r.code == "malformed_config" for r in refused):
        found += servability.of_tensors(package.config, package.weights, base_shapes)
    return [*found, *_numbers(directory / ADAPTER_WEIGHTS, package.weights)]


def _numbers(path: Path, weights: Mapping[str, TensorInfo]) -> Iterator[Refusal]:
    bad = sorted(tensors.not_finite(path, dict(weights)))
    if bad:
        yield Refusal(code="not_finite", detail=f"{len(bad)} tensors hold NaN or infinity, the first is {bad[0][:160]}")
    elif large := sorted(tensors.too_large(path, dict(weights))):
        limit = f"beyond {tensors.LARGEST:g}, which is infinity in half precision"
        yield Refusal(code="not_finite", detail=f"{len(large)} tensors hold numbers {limit}; the first is {large[0][:160]}")


def unsafe_files(directory: Path) -> Iterator[Refusal]:
    pickles = sorted(p.name for p in directory.iterdir() if p.suffix in PICKLES)
    if pickles:
        yield Refusal(code="unsafe_files", detail=f"{', '.join(pickles)} could run code when loaded; only safetensors are served")


def odd_files(directory: Path) -> Iterator[Refusal]:
    """Returns what an adapter does not need: other files, directories, links (which could lead to bytes of others), devices."""
    for path in sorted(directory.iterdir()):
        if path.is_symlink() or not path.is_file():
            yield Refusal(code="odd_files", detail=f"{path.name[:160]!r} is not a plain file")
        elif path.name not in ALLOWED_FILES and path.suffix not in PICKLES:
            yield Refusal(
                code="odd_files", detail=f"{path.name[:160]!r} is not part of an adapter; allowed files: {', '.join(sorted(ALLOWED_FILES))}"
            )


def write_package(source: Path, target: Path, *, served_name: str, base_digest: str) -> str:
    """Makes the package of a trained adapter in the new directory `target`; returns the sha256 of its manifest.

    The weights are copied unchanged; the config names the base as it is served (servers match it by that text).
    """
    package = read_package(source)
    target.mkdir(parents=True)
    shutil.copyfile(source / ADAPTER_WEIGHTS, target / ADAPTER_WEIGHTS)
    config = {**package.config, "base_model_name_or_path": served_name, "inference_mode": True}
    (target / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
    return write_manifest(target, served_name=served_name, base_digest=base_digest)


def write_manifest(target: Path, *, served_name: str, base_digest: str) -> str:
    """Lists the files of a package and the base that they came from; returns the sha256 of the list."""
    files = {p.name: {"sha256": sha256_of(p), "bytes": p.stat().st_size} for p in sorted(target.iterdir())}
    body = json.dumps({"format": 1, "base_model": served_name, "base_digest": base_digest, "files": files}, indent=2, sort_keys=True)
    (target / PACKAGE_MANIFEST).write_text(body, encoding="utf-8")
    return hashlib.sha256(body.encode()).hexdigest()


def manifest_files(manifest: bytes, *, sha256: str) -> dict[str, str]:
    """Returns name and sha256 of each file that `manifest` lists, after comparing its digest with `sha256`."""
    actual = hashlib.sha256(manifest).hexdigest()
    if actual != sha256:
        raise IntegrityError(f"the manifest's sha256 is {actual}, the registry says {sha256}; restore the adapter's files from a backup")
    return listed_files(json.loads(manifest))


def listed_files(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Returns name and sha256 of each file that `manifest` lists."""
    return {str(name): str(entry["sha256"]) for name, entry in manifest["files"].items()}


def check_package_files(directory: Path, *, manifest_sha256: str) -> list[Refusal]:
    """Returns the differences between the files in `directory` and their manifest; empty if there are none."""
    try:
        files = manifest_files((directory / PACKAGE_MANIFEST).read_bytes(), sha256=manifest_sha256)
    except (IntegrityError, OSError) as e:
        return [Refusal(code="manifest_mismatch", detail=str(e))]
    wrong = [name for name, sha in files.items() if not (directory / name).is_file() or sha256_of(directory / name) != sha]
    return [Refusal(code="manifest_mismatch", detail=f"{name} is absent or not the file that was registered") for name in wrong]
