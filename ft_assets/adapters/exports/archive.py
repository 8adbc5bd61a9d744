"""Makes one archive of an order: the files of an export with their manifest and a card; the same order gives the same bytes."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ft_assets.adapters import package, tensors, whole_model
from ft_assets.adapters.exports import Format, Precision
from ft_assets.durable_files import sha256_of

MANIFEST, CARD = "manifest.json", "README.md"
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "vocab.json",
    "merges.txt", "chat_template.jinja",
)  # fmt: skip

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    format: Format
    precision: Precision | None
    base_dir: Path
    adapter_dir: Path
    name: str
    """Model name of the adapter."""
    adapter: Mapping[str, Any]
    """Fields for the manifest: id, job, dataset, digests."""
    base: Mapping[str, Any]
    """Catalogue id, repo, revision, digest, license."""
    trained_in_4_bit: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    archive: Path
    manifest: Mapping[str, Any]


def build(order: Order, scratch: Path, *, say: Say = lambda _: None) -> Built:
    """Makes the export in `scratch`, verifies it if weights were changed or rewritten, and packs it."""
    out = scratch / "export"
    out.mkdir()
    made = _MAKERS[order.format](order, out, scratch, say)
    notes = []
    if order.trained_in_4_bit and order.format in (Format.MERGED, Format.GGUF):
        notes.append("trained over a base in 4 bits; merged into the base's unquantized weights, as served here")
    (out / CARD).write_text(_card(order), encoding="utf-8")
    manifest = {
        "format": 1, "kind": str(order.format), "precision": order.precision, "model": order.name, "adapter": dict(order.adapter),
        "base": dict(order.base), **made, "notes": notes,
        "files": {p.name: {"sha256": sha256_of(p), "bytes": p.stat().st_size} for p in sorted(out.iterdir())},
    }  # fmt: skip
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True), encoding="utf-8")
    say("packing")
    return Built(archive=pack(out, scratch / "export.tar"), manifest=manifest)


def pack(directory: Path, archive: Path) -> Path:
    """Writes the files of `directory` as a tar with normalized times, owners and order."""
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(directory.iterdir()):
            info = tarfile.TarInfo(path.name)
            info.size, info.mode = path.stat().st_size, 0o644
            with path.open("rb") as stream:
                tar.addfile(info, stream)
    return archive


def _make_adapter(order: Order, out: Path, _scratch: Path, _say: Say) -> Mapping[str, Any]:
    """Writes PEFT's form; its config names the base's repository, so that it loads without this platform."""
    for path in sorted(order.adapter_dir.iterdir()):
        if path.name not in (package.MANIFEST, package.CONFIG):
            shutil.copyfile(path, out / path.name)
    if (order.adapter_dir / package.CONFIG).is_file():
        config = json.loads((order.adapter_dir / package.CONFIG).read_text(encoding="utf-8"))
        if order.base.get("repo") not in (None, "local"):
            config |= {"base_model_name_or_path": order.base["repo"], "revision": order.base["revision"]}
        (out / package.CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
    return {}


def _make_tokenizer(order: Order, out: Path, _scratch: Path, _say: Say) -> Mapping[str, Any]:
    for name in TOKENIZER:
        if (order.base_dir / name).is_file():
            shutil.copyfile(order.base_dir / name, out / name)
    return {}


def _make_merged(order: Order, out: Path, _scratch: Path, say: Say) -> Mapping[str, Any]:
    from ft_assets.adapters.exports import merge, proof

    say("computing the answers of base and adapter")
    wanted = proof.reference(order.base_dir, order.adapter_dir)
    say("merging")
    merge.merge(order.base_dir, order.adapter_dir, out)
    say("verifying the merged weights")
    return {"proof": asdict(proof.prove(wanted, out, stored=_stored(out))), "stored_as": _stored(out)}


def _make_gguf(order: Order, out: Path, scratch: Path, say: Say) -> Mapping[str, Any]:
    from ft_assets.adapters.exports import gguf_file, merge, proof

    assert order.precision is not None
    gguf_file.check_architecture(json.loads((order.base_dir / "config.json").read_text()))
    say("computing the answers of base and adapter")
    wanted = proof.reference(order.base_dir, order.adapter_dir)
    merged = scratch / "merged"
    say("merging")
    merge.merge(order.base_dir, order.adapter_dir, merged)
    file = f"model-{order.precision}.gguf"
    say("writing GGUF")
    gguf_file.write_gguf(merged, out / file, name=order.name, precision=order.precision)
    for shard in merged.glob("*.safetensors"):
        shard.unlink()
    (merged / file).symlink_to(out / file)
    say("verifying the GGUF file")
    coarsest = max(_stored(order.base_dir), {"f32": "F32", "f16": "F16", "q8_0": "Q8_0"}[order.precision], key=list(proof.TOLERANCES).index)
    return {"proof": asdict(proof.prove(wanted, merged, stored=coarsest, gguf_file=file))}


def _stored(directory: Path) -> str:
    """Returns the coarsest type in which a matrix of the model is stored."""
    kinds = {t.dtype for f in directory.glob("*.safetensors") for t in tensors.header(f).values() if len(t.shape) > 1}
    return next((k for k in ("BF16", "F16") if k in kinds), "F32")


_MAKERS: Mapping[Format, Callable[[Order, Path, Path, Say], Mapping[str, Any]]] = {
    Format.ADAPTER: _make_adapter, Format.TOKENIZER: _make_tokenizer, Format.MERGED: _make_merged, Format.GGUF: _make_gguf,
}  # fmt: skip


def _card(order: Order) -> str:
    """Returns a model card with the front matter that a Hub reads."""
    base = order.base["repo"] if order.base.get("repo") not in (None, "local") else None
    whole = whole_model.is_whole(order.adapter_dir)
    kind = "merged" if whole and order.format is Format.ADAPTER else str(order.format)
    front = {
        "license": order.base.get("license") if order.base.get("license") != "unknown" else None,
        "base_model": base,
        "base_model_relation": None if base is None else {"adapter": "adapter", "gguf": "quantized"}.get(kind, "finetune"),
        "library_name": {"adapter": "peft", "merged": "transformers", "gguf": "gguf"}.get(kind),
    }
    lines = [f"{k}: {json.dumps(v)}" for k, v in front.items() if v]
    weights = "weights" if whole else "merged weights"
    what = {"adapter": "LoRA adapter", "merged": weights, "gguf": "GGUF file", "tokenizer": "tokenizer"}[kind]
    reported = [f"- base model: {order.base['id']} ({order.base['digest']})", *(f"- {k}: {v}" for k, v in order.adapter.items())]
    return "\n".join(["---", *lines, "---", f"# {order.name}", "", f"The {what} of a fine-tuning job.", "", *reported, ""])
