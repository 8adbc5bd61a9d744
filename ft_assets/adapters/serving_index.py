"""The index of served adapters: what an inference server may load on its own, and which bytes that means.

A server that was restarted does not wait for the platform: it looks a requested name up here, checks the files against the manifest's
sha256, and loads them. So the index is written before an adapter is loaded, and an adapter leaves it before it is unloaded: a server
that is asked in between loads what is wanted, and nothing that is not. Servers of different bytes of a base read different files.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PATTERN = "index-*.json"


def filename(base_digest: str) -> str:
    """Beside the directories of the adapters."""
    return f"index-{base_digest[:16]}.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    name: str
    directory: str
    """One path segment, below the directory that the index lies in: each node may mount it where it likes."""
    manifest_sha256: str
    base_digest: str


def render(entries: Iterable[Entry]) -> bytes:
    """The index of `entries`: the same ones give the same bytes, in whatever order."""
    body: dict[str, dict[str, str]] = {}
    for entry in sorted(entries, key=lambda e: e.name):
        if entry.name in body:
            raise ValueError(f"{entry.name} is in the index twice; a name stands for one adapter")
        body[entry.name] = {"directory": entry.directory, "manifest_sha256": entry.manifest_sha256, "base_digest": entry.base_digest}
    return json.dumps(body, indent=1, sort_keys=True).encode()


def write(path: Path, entries: Iterable[Entry]) -> bool:
    """Replace the index at `path` as a whole; whether it changed. A reader sees the old one or the new one."""
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
