"""The index of served adapters: which adapters an inference server may load on its own, and their exact bytes.

A restarted server does not wait for the platform: it looks up a requested name here, checks the files against the manifest's sha256, and
loads them. So the index is written before an adapter is loaded, and an adapter leaves it before it is unloaded: a server that gets a
request in between loads only what is desired. Servers of different bytes of a base read different files.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

INDEX_PATTERN = "index-*.json"


def index_filename(base_digest: str) -> str:
    """Located beside the directories of the adapters."""
    return f"index-{base_digest[:16]}.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexEntry:
    name: str
    directory: str
    """One path segment, below the directory of the index: each node may mount it anywhere."""
    manifest_sha256: str
    base_digest: str


def render(entries: Iterable[IndexEntry]) -> bytes:
    """Returns the index of `entries`: the same entries give the same bytes, in any order."""
    body: dict[str, dict[str, str]] = {}
    for entry in sorted(entries, key=lambda e: e.name):
        if entry.name in body:
            raise ValueError(f"{entry.name} is in the index twice; a name must refer to one adapter")
        body[entry.name] = {"directory": entry.directory, "manifest_sha256": entry.manifest_sha256, "base_digest": entry.base_digest}
    return json.dumps(body, indent=1, sort_keys=True).encode()


def write_index(path: Path, entries: Iterable[IndexEntry]) -> bool:
    """Replaces the index at `path` atomically; returns whether it changed."""
    body = render(entries)
    if path.is_file() and path.read_bytes() == body:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    with os.fdopen(handle, "wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
        os.fchmod(file.fileno(), 0o644)  # the servers run as another user
    Path(beside).replace(path)
    return True
