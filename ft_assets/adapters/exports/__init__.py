"""What a tenant can take along of an adapter: the adapter, merged weights, a GGUF file, the tokenizer; each with a manifest.

Made by a process of its own (it loads weights), and told apart by what it is made of: the same adapter, base and settings
are the same export, which is made once.
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
    """Of the matrices in a GGUF file; norms and biases are float32 in each."""

    F32 = "f32"
    F16 = "f16"
    Q8_0 = "q8_0"


def checked(format: str, precision: str | None) -> tuple[Format, Precision | None]:
    """What was asked for, if there is such a thing."""
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
    """Names the export by what it is made of."""
    spelled = json.dumps([VERSION, manifest_sha256, base_digest, format, precision])
    return hashlib.sha256(spelled.encode()).hexdigest()[:40]
