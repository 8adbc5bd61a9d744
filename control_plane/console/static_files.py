"""Style, scripts and icons: read once per process, compressed once, and named by a digest, so that browsers keep them for good."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "static"
MEDIA_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}
DIGEST_CHARS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class StaticFile:
    media_type: str
    body: bytes
    compressed: bytes


@cache
def files() -> Mapping[str, StaticFile]:
    """Return every file by its name."""
    found = {}
    for path in sorted(FOLDER.iterdir()):
        body = path.read_bytes()
        found[path.name] = StaticFile(media_type=MEDIA_TYPES[path.suffix], body=body, compressed=gzip.compress(body, mtime=0))
    return found


@cache
def version() -> str:
    """Return a digest of all files: modules import each other by relative names, so they change their address together."""
    digest = hashlib.sha256()
    for name, file in files().items():
        digest.update(f"{name}:{len(file.body)}:".encode() + file.body)
    return digest.hexdigest()[:DIGEST_CHARS]


def url(name: str) -> str:
    """Return the path of a file; ``KeyError`` if there is none."""
    files()[name]
    return f"/console/static/{version()}/{name}"


def text(name: str) -> str:
    """Return the content of a text file."""
    return files()[name].body.decode()
