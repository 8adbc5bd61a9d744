"""Verifies a folder of downloaded files against its signature, without a network."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from core.durable_files import sha256_of
from core.errors import IntegrityError
from engine.adapters.package import PACKAGE_MANIFEST
from engine.adapters.servability import Refusal
from engine.adapters.signatures import dsse, statements

ENVELOPE_FILE = "manifest.intoto.json"
"""Name of the signature in an export."""
MAX_ENVELOPE_BYTES = 8 << 20


def check_signed_folder(
    folder: Path, keys: Mapping[str, Ed25519PublicKey], *, envelope: Path | None = None
) -> tuple[Mapping[str, Any] | None, list[Refusal]]:
    """Returns the signed statement and every difference between it and the files of `folder`; no statement if its signature is refused.

    `envelope`: file with the signature if it is not ``manifest.intoto.json`` in `folder`.

    1. One of `keys` signed the statement (``signature_missing``, ``signature_malformed``, ``signing_key_unknown``, ``signature_invalid``).
    2. Every file that it names is there with its bytes (``file_missing``, ``file_changed``; the manifest itself: ``manifest_changed``).
    3. There is no other file, directory or link (``file_added``).
    """
    source = envelope or folder / ENVELOPE_FILE
    try:
        statement = dsse.open_envelope(_read(source), keys)
        expected = statements.statement_subjects(statement)
    except IntegrityError as e:
        return None, [Refusal(code=e.code, detail=e.message)]
    except ValueError as e:
        return None, [Refusal(code=dsse.MALFORMED, detail=f"{source.name}: {e}")]
    return statement, [*_changed(folder, expected), *_added(folder, expected, source)]


def _read(source: Path) -> object:
    if source.is_symlink():
        raise IntegrityError(f"{source} is a link; a signature is a file", code="signature_missing")
    if not source.is_file():
        raise IntegrityError(
            f"no signature {source}; `ft export` writes it, over REST it is `signature` of the export; adapters: `ft adapters signature`",
            code="signature_missing",
        )
    if source.stat().st_size > MAX_ENVELOPE_BYTES:
        raise IntegrityError(f"{source} has more than {MAX_ENVELOPE_BYTES} bytes, which no signature has", code=dsse.MALFORMED)
    try:
        return json.loads(source.read_bytes(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as e:
        raise IntegrityError(f"{source.name} is not JSON: {e}", code=dsse.MALFORMED) from e


def _once(pairs: Sequence[tuple[str, Any]]) -> Mapping[str, Any]:
    """Two readers may disagree on which of two equal fields counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a field appears twice")
    return found


def _changed(folder: Path, expected: Mapping[str, str]) -> Iterator[Refusal]:
    for name, sha256 in sorted(expected.items()):
        path = folder / name
        if Path(name).name != name or path.is_symlink() or not path.is_file():
            yield Refusal(code="file_missing", detail=f"{name[:160]} is signed and not in {folder}")
        elif (found := sha256_of(path)) != sha256:
            code = "manifest_changed" if name == PACKAGE_MANIFEST else "file_changed"
            yield Refusal(code=code, detail=f"{name} has sha256 {found}, signed was {sha256}")


def _added(folder: Path, expected: Mapping[str, str], source: Path) -> Iterator[Refusal]:
    for path in sorted(folder.iterdir()):
        is_source = path.name == source.name and path.parent.samefile(source.parent) and not path.is_symlink()
        if path.name not in expected and not is_source:
            yield Refusal(code="file_added", detail=f"{path.name[:160]} is not signed")
