"""Base models in the object store, under their digest: what workloads load, on whichever node they run."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from control_plane.platform.context import Platform
from core import layout
from core.base_models import CHANGED, CONFIG_FILES, digest_of_files, file_sha256, weight_files
from core.errors import IntegrityError, NotFound
from core.workload import InputFile

LISTING = "files.json"
"""Names and digests of a model's files; written last."""
UNPINNED = ("generation_config.json", "special_tokens_map.json", "tokenizer.model")
"""Further files that loading a model may need."""


def publish(platform: Platform, model: str, digest: str) -> tuple[InputFile, ...]:
    """Return the files of the model with `digest` in the store, where they are put at the first call; a listing of other bytes is replaced.

    ``IntegrityError`` (``base_model_changed``) if the files that would be put there are other bytes.
    """
    prefix = layout.base_model_prefix(digest)
    listed: dict[str, str] = {}
    with contextlib.suppress(NotFound):
        listed = json.loads(platform.objects.get_bytes(f"{prefix}/{LISTING}"))
    if digest_of_files(listed) != digest:
        _, directory = platform.models.get_local(model, digest, fresh=True)
        listed = {path.name: file_sha256(path) for path in _files(directory)}
        if digest_of_files(listed) != digest:
            raise IntegrityError(f"base model {model} changed while it was read; restore its files", code=CHANGED)
        for name in listed:
            platform.objects.put_file(f"{prefix}/{name}", directory / name)
        platform.objects.put_bytes(f"{prefix}/{LISTING}", json.dumps(listed).encode())
    return tuple(InputFile(path=name, key=f"{prefix}/{name}", sha256=sha256) for name, sha256 in listed.items())


def _files(directory: Path) -> list[Path]:
    return [*weight_files(directory), *(path for name in (*CONFIG_FILES, *UNPINNED) if (path := directory / name).is_file())]
