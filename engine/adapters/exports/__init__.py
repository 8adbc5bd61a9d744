"""Exports of an adapter for a tenant: the adapter, merged weights, GGUF files, the tokenizer; each with a manifest.

Made in a separate process (it loads weights), and identified by the inputs: the same adapter, base and settings are the same export, which
is made once.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Mapping

from core.errors import InvalidRequest

VERSION = 2
"""Part of every key: raised when the same request gives other files."""


class ExportFormat(enum.StrEnum):
    ADAPTER = "adapter"
    GGUF_ADAPTER = "gguf_adapter"
    MERGED = "merged"
    GGUF = "gguf"
    TOKENIZER = "tokenizer"


class ExportPrecision(enum.StrEnum):
    """How matrices are stored; norms and biases keep more."""

    F32 = "f32"
    F16 = "f16"
    Q8_0 = "q8_0"
    Q4_K_M = "q4_k_m"
    FP8 = "fp8"


PRECISIONS: Mapping[ExportFormat, tuple[ExportPrecision, ...]] = {
    ExportFormat.GGUF: (ExportPrecision.F32, ExportPrecision.F16, ExportPrecision.Q8_0, ExportPrecision.Q4_K_M),
    ExportFormat.MERGED: (ExportPrecision.FP8,),
}
"""Precisions that can be chosen. Without one, a GGUF file has f16, and merged weights have the base's."""
AWQ = "awq"
NO_AWQ = (
    "precision awq is not made here: llm-compressor, which calibrates and writes it, needs an older transformers than the one that trains "
    "here; choose fp8, or export merged weights and quantize them with llm-compressor"
)


def checked_export(format: str, precision: str | None) -> tuple[ExportFormat, ExportPrecision | None]:
    """Parses the request, and refuses unknown kinds."""
    if format not in set(ExportFormat):
        raise InvalidRequest(f"format {format[:40]!r} is not one of {', '.join(ExportFormat)}", code="invalid_format", param="format")
    kind = ExportFormat(format)
    if precision is None:
        return kind, ExportPrecision.F16 if kind is ExportFormat.GGUF else None
    offered = PRECISIONS.get(kind, ())
    if precision == AWQ:
        raise InvalidRequest(NO_AWQ, code="invalid_precision", param="precision")
    if precision not in offered:
        choice = f"use {', '.join(offered)}, or leave it out" if offered else "leave it out"
        raise InvalidRequest(
            f"precision {precision[:40]!r} is not offered for {kind} exports; {choice}", code="invalid_precision", param="precision"
        )
    return kind, ExportPrecision(precision)


def export_key(manifest_sha256: str, base_digest: str, format: ExportFormat, precision: ExportPrecision | None) -> str:
    """Returns the export's key, derived from its inputs."""
    spelled = json.dumps([VERSION, manifest_sha256, base_digest, format, precision])
    return hashlib.sha256(spelled.encode()).hexdigest()[:40]
