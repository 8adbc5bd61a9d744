"""The operator's catalogue of base models: one YAML file, replaced as a whole under a lock, read by every process of the platform."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock

from core.base_models import read_entries

Entry = Mapping[str, Any]
"""A model, or one version of its bytes, as the file has it: ``FIELDS`` and ``VERSION_FIELDS`` of :mod:`core.base_models`."""
HEAD = "# Base models of this platform's operator; written by `ft admin models`. Each digest is what jobs and adapters were promised.\n"


@contextmanager
def edited(file: Path) -> Iterator[dict[str, Entry]]:
    """Yield the entries by id, to be changed in place; they are written at the end. One editor at a time.

    Readers see the file before or after the change; an error in the block leaves it unchanged.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(file.with_suffix(".lock")):
        entries: dict[str, Entry] = {entry["id"]: entry for entry in (read_entries(file) if file.exists() else ())}
        yield entries
        text = HEAD + yaml.safe_dump({"models": [entries[k] for k in sorted(entries)]}, sort_keys=False, allow_unicode=True)
        _replace(file, text)


def _replace(file: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}-", encoding="utf-8", delete=False) as beside:
        beside.write(text)
        beside.flush()
        os.fsync(beside.fileno())
    made = Path(beside.name)
    made.chmod(0o644)
    made.replace(file)
