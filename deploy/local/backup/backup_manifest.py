"""What a backup consists of: ``files.jsonl`` lists each file with its size and sha256, ``manifest.json`` seals the list.

The manifest is written last, so a directory without one is an unfinished backup.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import BinaryIO, TextIO

from core.durable_files import sha256_of, sync_to_disk
from core.errors import Conflict, IntegrityError, NotFound
from core.typed_json import from_json
from engine.training import canonical_json

FORMAT = 1
FILES, MANIFEST = "files.jsonl", "manifest.json"
CHUNK_BYTES = 1 << 20
MAX_NAMED = 10
"""Damaged files that an error names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    path: str
    """Relative to the backup, with ``/``."""
    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    format: int
    taken_at: float
    """Unix seconds of the moment that both databases show."""
    version: str
    """Of ft-platform."""
    commit: str
    schema: str
    """Revision of the control plane's schema."""
    rows: Mapping[str, Mapping[str, int]]
    """Rows by database and table."""
    home: str
    object_store: str
    """URLs of both directories, to which MLflow's store refers."""
    settings: Mapping[str, str]
    """Environment variables that configured the stack, without secrets."""
    absent: tuple[str, ...]
    """Prefixes and objects that the database refers to and the store did not have."""
    key_file_outside: bool
    """Whether the installation's keys are outside the home, and so not in the backup."""
    num_files: int
    num_bytes: int
    files_sha256: str
    """Of ``files.jsonl``."""
    sha256: str = ""
    """Of all of the above."""

    @property
    def num_rows(self) -> int:
        return sum(sum(tables.values()) for tables in self.rows.values())


class FileList:
    """Writes ``files.jsonl`` of the backup in `directory`, a line per file, and counts."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.num_files, self.num_bytes = directory, 0, 0
        self._out: TextIO = (directory / FILES).open("x", encoding="utf-8")

    def copy(self, source: Path, path: str) -> bool:
        """Copy a file into the backup and list it; returns False if it no longer exists."""
        try:
            opened = source.open("rb")
        except FileNotFoundError:
            return False
        with opened:
            target = self.directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as out:
                self._list(path, *copy_hashed(opened, out))
        return True

    def add(self, path: str) -> None:
        """List a file that is in the backup already."""
        file = self.directory / path
        self._list(path, file.stat().st_size, sha256_of(file))

    def close(self) -> str:
        """Complete the list; returns its sha256."""
        self._out.close()
        return sha256_of(self.directory / FILES)

    def _list(self, path: str, num_bytes: int, sha256: str) -> None:
        self.num_files, self.num_bytes = self.num_files + 1, self.num_bytes + num_bytes
        self._out.write(json.dumps(asdict(Entry(path=path, num_bytes=num_bytes, sha256=sha256))) + "\n")


def copy_hashed(source: BinaryIO, out: BinaryIO) -> tuple[int, str]:
    """Copy to the end of `source`; returns the number of bytes and their sha256."""
    digest, copied = hashlib.sha256(), 0
    while chunk := source.read(CHUNK_BYTES):
        out.write(chunk)
        digest.update(chunk)
        copied += len(chunk)
    return copied, digest.hexdigest()


def write(directory: Path, manifest: Manifest) -> Manifest:
    """Seal the backup in `directory`, once all of it is on disk."""
    os.sync()
    sealed = replace(manifest, sha256=_seal(manifest))
    with (directory / MANIFEST).open("x", encoding="utf-8") as out:
        json.dump(asdict(sealed), out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    sync_to_disk(directory)
    return sealed


def verify(directory: Path) -> Manifest:
    """Read every file of the backup and compare it with the manifest.

    Raises ``NotFound`` if there is no backup, ``Conflict`` if it was not finished or has another format, ``IntegrityError`` that names the
    damaged files.
    """
    manifest = read(directory)
    listed = {FILES, MANIFEST}
    damaged = []
    for entry in entries(directory, manifest):
        listed.add(entry.path)
        if (found := _damage(directory, entry)) is not None:
            damaged.append(found)
    for path in sorted(directory.rglob("*")):
        if path.is_symlink() or (not path.is_dir() and path.relative_to(directory).as_posix() not in listed):
            damaged.append(f"{path.relative_to(directory)} ({'a link' if path.is_symlink() else 'not listed'})")
    if damaged:
        more = f", and {len(damaged) - MAX_NAMED} more" if len(damaged) > MAX_NAMED else ""
        raise _damaged(directory, f"{', '.join(damaged[:MAX_NAMED])}{more}")
    return manifest


def read(directory: Path) -> Manifest:
    """Return the manifest, whose own digest and the list's are checked; the errors are those of :func:`verify`."""
    if not directory.is_dir() or not any(directory.iterdir()):
        raise NotFound(f"no backup in {directory}; name the directory that `ft admin backup` wrote", code="backup_not_found")
    try:
        text = (directory / MANIFEST).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise Conflict(
            f"the backup in {directory} has no {MANIFEST}: it was not finished; use another one", code="backup_unfinished"
        ) from None
    try:
        body = json.loads(text)
        if (made := body["format"]) != FORMAT:
            raise Conflict(f"the backup in {directory} has format {made}, this version reads {FORMAT}; use the version that made it",
                code="backup_of_another_version")  # fmt: skip
        manifest = from_json(Manifest, body)
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(directory, f"{MANIFEST} ({error})") from error
    if manifest.sha256 != _seal(manifest):
        raise _damaged(directory, MANIFEST)
    if not (directory / FILES).is_file() or sha256_of(directory / FILES) != manifest.files_sha256:
        raise _damaged(directory, FILES)
    return manifest


def entries(directory: Path, manifest: Manifest) -> Iterator[Entry]:
    """Yield the listed files in the order in which they were written, one at a time."""
    with (directory / FILES).open(encoding="utf-8") as lines:
        for line in lines:
            try:
                entry = from_json(Entry, json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise _damaged(directory, f"{FILES} ({error})") from error
            parts = PurePosixPath(entry.path)
            if parts.is_absolute() or ".." in parts.parts:
                raise _damaged(directory, f"{FILES} of {manifest.num_files} files (path {entry.path!r})")
            yield entry


def damaged_file(directory: Path, path: str) -> IntegrityError:
    return _damaged(directory, path)


def _damage(directory: Path, entry: Entry) -> str | None:
    file = directory / entry.path
    try:
        if file.stat().st_size != entry.num_bytes:
            return f"{entry.path} ({file.stat().st_size} bytes instead of {entry.num_bytes})"
        return None if sha256_of(file) == entry.sha256 else f"{entry.path} (other bytes)"
    except FileNotFoundError:
        return f"{entry.path} (missing)"


def _damaged(directory: Path, what: str) -> IntegrityError:
    return IntegrityError(f"the backup in {directory} is damaged: {what}; nothing was restored, use another backup", code="backup_damaged")


def _seal(manifest: Manifest) -> str:
    return hashlib.sha256(canonical_json(asdict(replace(manifest, sha256=""))).encode()).hexdigest()
