"""Makes one archive of an order: the files of an export with their manifest and a card; the same order gives the same bytes."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.durable_files import sha256_of
from core.errors import IntegrityError, InvalidRequest
from engine.adapters import package, whole_model
from engine.adapters.exports import ExportFormat, ExportPrecision

if TYPE_CHECKING:
    from engine.adapters.exports.proof import Reference

MANIFEST, CARD = "manifest.json", "README.md"

NO_LLAMA_CPP = (
    "precision q4_k_m is made by llama.cpp, which the machine that makes exports does not have; choose q8_0, or have an operator install "
    "the extra gguf there"
)

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOrder:
    format: ExportFormat
    precision: ExportPrecision | None
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
class BuiltExport:
    archive: Path
    manifest: Mapping[str, Any]
    manifest_sha256: str
    """Of ``manifest.json`` in the archive. A database keeps the manifest's values, but not how its numbers are written."""


def build_export(order: ExportOrder, scratch: Path, *, say: Say = lambda _: None) -> BuiltExport:
    """Makes the export in `scratch`, verifies it if weights were changed or rewritten, and packs it."""
    out = scratch / "export"
    out.mkdir()
    made = _MAKERS[order.format](order, out, scratch, say)
    notes = []
    if order.trained_in_4_bit and order.format in (ExportFormat.MERGED, ExportFormat.GGUF):
        notes.append("trained over a base in 4 bits; merged into the base's unquantized weights, as served here")
    (out / CARD).write_text(_card(order), encoding="utf-8")
    manifest = {
        "format": 1, "kind": str(order.format), "precision": order.precision, "model": order.name, "adapter": dict(order.adapter),
        "base": dict(order.base), **made, "notes": notes,
        "files": {p.name: {"sha256": sha256_of(p), "bytes": p.stat().st_size} for p in sorted(out.iterdir())},
    }  # fmt: skip
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True), encoding="utf-8")
    say("packing")
    return BuiltExport(archive=pack(out, scratch / "export.tar"), manifest=manifest, manifest_sha256=sha256_of(out / MANIFEST))


def pack(directory: Path, archive: Path) -> Path:
    """Writes the files of `directory` as a tar with normalized times, owners and order."""
    with tarfile.open(archive, "w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(directory.iterdir()):
            info = tarfile.TarInfo(path.name)
            info.size, info.mode = path.stat().st_size, 0o644
            with path.open("rb") as stream:
                tar.addfile(info, stream)
    return archive


def unpack_export(archive: Path, directory: Path) -> None:
    """Write the files of an archive of :func:`pack` into a new `directory`; ``IntegrityError`` for all but plain files with bare names.

    tarfile's filter ``data`` is not enough: some releases of Python follow links that an archive brings along (CVE-2025-4517).
    """
    directory.mkdir()
    with tarfile.open(archive) as tar:
        for member in tar:
            is_bare = Path(member.name).name == member.name and member.name not in ("", ".", "..")
            if not member.isreg() or not is_bare or (directory / member.name).exists():
                what = f"the archive holds {member.name[:80]!a}, which is no plain file at its top, or is there twice; tell your operator"
                raise IntegrityError(what, code="export_damaged")
            stream = tar.extractfile(member)
            assert stream is not None
            with stream, (directory / member.name).open("xb") as target:
                shutil.copyfileobj(stream, target)


def _make_adapter(order: ExportOrder, out: Path, _scratch: Path, _say: Say) -> Mapping[str, Any]:
    """Writes PEFT's form; its config names the base's repository, so that it loads without this platform."""
    for path in sorted(order.adapter_dir.iterdir()):
        if path.name not in (package.PACKAGE_MANIFEST, package.ADAPTER_CONFIG):
            shutil.copyfile(path, out / path.name)
    if (order.adapter_dir / package.ADAPTER_CONFIG).is_file():
        config = json.loads((order.adapter_dir / package.ADAPTER_CONFIG).read_text(encoding="utf-8"))
        if order.base.get("repo") not in (None, "local"):
            config |= {"base_model_name_or_path": order.base["repo"], "revision": order.base["revision"]}
        (out / package.ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
    return {}


def _make_tokenizer(order: ExportOrder, out: Path, _scratch: Path, _say: Say) -> Mapping[str, Any]:
    for name in package.TOKENIZER_FILES:
        if (order.base_dir / name).is_file():
            shutil.copyfile(order.base_dir / name, out / name)
    return {}


def _make_gguf_adapter(order: ExportOrder, out: Path, _scratch: Path, say: Say) -> Mapping[str, Any]:
    from engine.adapters.exports import gguf_adapter

    say("writing GGUF")
    gguf_adapter.write_adapter(order.adapter_dir, _config(order), out / "adapter.gguf", name=order.name)
    return {}


def _make_merged(order: ExportOrder, out: Path, scratch: Path, say: Say) -> Mapping[str, Any]:
    from engine.adapters.exports import merge, proof

    if order.precision is ExportPrecision.FP8:
        return _make_fp8(order, out, scratch, say)
    say("computing the answers of base and adapter")
    wanted = proof.reference(order.base_dir, order.adapter_dir)
    say("merging")
    merge.merge(order.base_dir, order.adapter_dir, out)
    say("verifying the merged weights")
    return {"proof": asdict(proof.prove(wanted, out, stored=proof.stored_type(out))), "stored_as": proof.stored_type(out)}


def _make_fp8(order: ExportOrder, out: Path, scratch: Path, say: Say) -> Mapping[str, Any]:
    from engine.adapters.exports import fp8, merge, proof

    fp8.check_layers(order.base_dir)
    say("computing the answers of base and adapter")
    wanted = proof.reference(order.base_dir, order.adapter_dir)
    say("merging")
    merged = scratch / "merged"
    merge.merge(order.base_dir, order.adapter_dir, merged)
    say("verifying the merged weights")
    before = proof.prove(wanted, merged, stored=proof.stored_type(merged))
    say("writing FP8 weights")
    fp8.write_fp8(merged, out)
    shutil.rmtree(merged)
    say("verifying the FP8 weights")
    fp8.read_back(out, scratch / "read_back", dtype=wanted.dtype)
    after = proof.prove(wanted, scratch / "read_back", stored="FP8")
    return {"proof": asdict(after), "before_quantization": asdict(before), "stored_as": "FP8"}


def _make_gguf(order: ExportOrder, out: Path, scratch: Path, say: Say) -> Mapping[str, Any]:
    from engine.adapters.exports import gguf_file, llama_cpp, merge, proof

    assert order.precision is not None
    if order.precision is ExportPrecision.Q4_K_M and not llama_cpp.is_installed():
        raise InvalidRequest(NO_LLAMA_CPP, code="llama_cpp_missing", param="precision")
    gguf_file.check_architecture(_config(order))
    say("computing the answers of base and adapter")
    wanted = proof.reference(order.base_dir, order.adapter_dir)
    merged = scratch / "merged"
    say("merging")
    merge.merge(order.base_dir, order.adapter_dir, merged)
    file = out / f"model-{order.precision}.gguf"
    stored = proof.stored_type(order.base_dir)
    say("writing GGUF")
    if order.precision is ExportPrecision.Q4_K_M:
        return _quantized(order, wanted, merged, file, stored, say)
    gguf_file.write_gguf(merged, file, name=order.name, precision=order.precision)
    say("verifying the GGUF file")
    coarsest = max(stored, order.precision.upper(), key=list(proof.TOLERANCES).index)
    return {"proof": asdict(proof.prove_gguf(wanted, file, merged, stored=coarsest))}


def _quantized(order: ExportOrder, wanted: Reference, merged: Path, file: Path, stored: str, say: Say) -> Mapping[str, Any]:
    from engine.adapters.exports import gguf_file, llama_cpp, proof

    whole = merged / "model-f32.gguf"
    gguf_file.write_gguf(merged, whole, name=order.name, precision=ExportPrecision.F32)
    say("verifying the GGUF file")
    before = proof.prove_gguf(wanted, whole, merged, stored=stored)
    say("quantizing with llama.cpp")
    llama_cpp.quantize(whole, file, llama_cpp.Q4_K_M)
    whole.unlink()
    say("verifying the quantized file")
    after = proof.prove_gguf(wanted, file, merged, stored="Q4_K_M")
    return {"proof": asdict(after), "before_quantization": asdict(before)}


def _config(order: ExportOrder) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads((order.base_dir / "config.json").read_text(encoding="utf-8"))
    return found


_MAKERS: Mapping[ExportFormat, Callable[[ExportOrder, Path, Path, Say], Mapping[str, Any]]] = {
    ExportFormat.ADAPTER: _make_adapter, ExportFormat.TOKENIZER: _make_tokenizer, ExportFormat.MERGED: _make_merged,
    ExportFormat.GGUF: _make_gguf,
    ExportFormat.GGUF_ADAPTER: _make_gguf_adapter,
}  # fmt: skip


def _card(order: ExportOrder) -> str:
    """Returns a model card with the front matter that a Hub reads."""
    base = order.base["repo"] if order.base.get("repo") not in (None, "local") else None
    whole = whole_model.is_whole_model(order.adapter_dir)
    kind = "merged" if whole and order.format is ExportFormat.ADAPTER else str(order.format)
    relations = {"adapter": "adapter", "gguf_adapter": "adapter", "gguf": "quantized"}
    relation = "quantized" if order.precision is ExportPrecision.FP8 else relations.get(kind, "finetune")
    front = {
        "license": order.base.get("license") if order.base.get("license") != "unknown" else None,
        "base_model": base,
        "base_model_relation": None if base is None else relation,
        "library_name": {"adapter": "peft", "merged": "transformers", "gguf": "gguf", "gguf_adapter": "gguf"}.get(kind),
    }
    lines = [f"{k}: {json.dumps(v)}" for k, v in front.items() if v]
    weights = "weights" if whole else "merged weights"
    names = {
        "adapter": "LoRA adapter",
        "merged": weights,
        "gguf": "GGUF file",
        "gguf_adapter": "LoRA adapter (GGUF)",
        "tokenizer": "tokenizer",
    }
    what = f"{names[kind]} in FP8" if order.precision is ExportPrecision.FP8 else names[kind]
    reported = [f"- base model: {order.base['id']} ({order.base['digest']})", *(f"- {k}: {v}" for k, v in order.adapter.items())]
    return "\n".join(["---", *lines, "---", f"# {order.name}", "", f"The {what} of a fine-tuning job.", "", *reported, ""])
