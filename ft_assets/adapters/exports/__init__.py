"""Exports of an adapter for a tenant: the adapter, merged weights, a GGUF file, the tokenizer; each with a manifest.

Made in a separate process (it loads weights), and identified by the inputs: the same adapter, base and settings are the same export, which
is made once.
"""

from __future__ import annotations

import enum
import hashlib
import json

from ft_assets.errors import InvalidRequest

VERSION = 1
"""Part of every key: raised when the same request gives other files."""


class Format(enum.StrEnum):
    ADAPTER = "adapter"
    MERGED = "merged"
    GGUF = "gguf"
    TOKENIZER = "tokenizer"


class Precision(enum.StrEnum):
    """Types of the matrices in a GGUF file; norms and biases are always float32."""

    F32 = "f32"
    F16 = "f16"
    Q8_0 = "q8_0"


def checked(format: str, precision: str | None) -> tuple[Format, Precision | None]:
    """Parses the request, and refuses unknown kinds."""
    if format not in set(Format):
        raise InvalidRequest(f"format {format[:40]!r} is not one of {', '.join(Format)}", code="invalid_format", param="format")
    if format != Format.GGUF and precision is not None:
        raise InvalidRequest(
            f"precision is chosen for gguf alone; a {format} export keeps that of its weights: leave it out",
            code="invalid_precision",
            param="precision",
        )
    if precision is not None and precision not in set(Precision):
        raise InvalidRequest(
            f"precision {precision[:40]!r} is not one of {', '.join(Precision)}", code="invalid_precision", param="precision"
        )
    return Format(format), Precision(precision or Precision.F16) if format == Format.GGUF else None


def export_key(manifest_sha256: str, base_digest: str, format: Format, precision: Precision | None) -> str:
    """Returns the export's key, derived from its inputs."""
    spelled = json.dumps([VERSION, manifest_sha256, base_digest, format, precision])
    return hashlib.sha256(spelled.encode()).hexdigest()[:40]
