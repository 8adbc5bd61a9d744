"""Objects between the node and the store, through URLs that the control plane grants for this attempt's own objects."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

import httpx

from agent.api_client import ApiClient
from agent.messages import PART_BYTES, Completion, PartGrant, WriteRequest
from core.durable_files import sync_to_disk
from core.encrypted_files import DataKey, decrypted, encrypt, envelope_of, key_in
from core.errors import IntegrityError, Unavailable
from engine.training import CheckpointPart, verify_checkpoint_part

CHUNK_BYTES = 1 << 20
TIMEOUT = httpx.Timeout(60.0, connect=5.0)
PARTS_AT_ONCE = 4
"""Parts of a file that are sent at the same time: one connection seldom fills the line to a store."""
RENEW_AFTER_S = 1800.0
"""Half of the hour for which URLs are granted: a part that is begun has the other half."""


class Objects:
    """Reads and writes whole objects, each held against its digest. `on_bytes` is called as bytes arrive."""

    def __init__(self, api: ApiClient, *, on_bytes: Callable[[], None] = lambda: None, renew_after_s: float = RENEW_AFTER_S) -> None:
        self._api, self._on_bytes, self._renew_after_s = api, on_bytes, renew_after_s
        self._http = httpx.Client(timeout=TIMEOUT, trust_env=False)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def fetch(self, key: str, path: Path) -> None:
        """Write the object to `path`, which appears by one rename; the caller verifies it. ``IntegrityError`` if there is none."""
        url = self._api.read_urls((key,)).urls.get(key)
        if url is None:
            raise IntegrityError(f"{key} is not in the object store; restore it from a backup")
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            if url.startswith("file:"):
                _copy(url, beside, self._on_bytes)
            else:
                self._download(url, beside)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)

    def store(self, key: str, path: Path, part: CheckpointPart | None, *, on_bytes: Callable[[], None] = lambda: None) -> None:
        """Store the file under `key`. ``IntegrityError`` if it is not the one that `part` describes: it was damaged on this node."""
        digests, whole, size = _digests(path, on_bytes)
        if part is not None and (whole, size) != (part.sha256, part.bytes):
            verify_checkpoint_part(path, part)
            raise Unavailable(f"{path.name} was read differently twice on this node", code="object_store_unavailable")
        grants = _Grants(self._api, WriteRequest(key=key, part_sha256=digests), renew_after_s=self._renew_after_s)
        first = grants.of_part(0)
        if first.url.startswith("file:"):
            _put_local(path, first.url, whole)
            return
        with ThreadPoolExecutor(PARTS_AT_ONCE, thread_name_prefix="part") as pool:
            etags = tuple(pool.map(lambda number: self._put(path, number, grants.of_part(number), on_bytes), range(len(digests))))
        if grants.upload_id is not None:
            self._api.complete(Completion(key=key, upload_id=grants.upload_id, etags=etags, part_sha256=digests))

    def _download(self, url: str, target: Path) -> None:
        try:
            with self._http.stream("GET", url) as answer, target.open("wb") as out:
                if answer.status_code == 404:
                    raise IntegrityError("an object that was granted is no longer in the object store")
                answer.raise_for_status()
                for chunk in answer.iter_bytes(CHUNK_BYTES):
                    out.write(chunk)
                    self._on_bytes()
        except httpx.HTTPError as error:
            raise Unavailable(f"the object store did not answer ({type(error).__name__})", code="object_store_unavailable") from error

    def _put(self, path: Path, number: int, grant: PartGrant, on_bytes: Callable[[], None]) -> str:
        begins = number * PART_BYTES
        size = min(PART_BYTES, path.stat().st_size - begins)
        headers = {**grant.headers, "content-length": str(size)}
        try:
            answer = self._http.put(grant.url, content=_part(path, begins, size, on_bytes), headers=headers)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            raise Unavailable(
                f"the object store did not take {path.name} ({type(error).__name__})", code="object_store_unavailable"
            ) from error
        return str(answer.headers.get("etag", ""))


class _Grants:
    """URLs of the parts of one object, which are asked for again before they expire."""

    def __init__(self, api: ApiClient, request: WriteRequest, *, renew_after_s: float) -> None:
        self._api, self._request, self._renew_after_s = api, request, renew_after_s
        self._lock = threading.Lock()
        self._renew()

    @property
    def upload_id(self) -> str | None:
        return self._request.upload_id

    def of_part(self, number: int) -> PartGrant:
        with self._lock:
            if time.monotonic() - self._granted_at > self._renew_after_s:
                self._renew()
            return self._grant.parts[number]

    def _renew(self) -> None:
        self._grant, self._granted_at = self._api.write_urls(self._request), time.monotonic()
        self._request = replace(self._request, upload_id=self._grant.upload_id)


def _local(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))


def _copy(url: str, target: Path, on_bytes: Callable[[], None]) -> None:
    source = _local(url)
    try:
        with _plain(source, key_in(url)) as read, target.open("wb") as written:
            while chunk := read.read(CHUNK_BYTES):
                written.write(chunk)
                on_bytes()
    except FileNotFoundError:
        raise IntegrityError(f"object {source} is not in the object store; restore it from a backup") from None


def _plain(path: Path, key: DataKey | None) -> BufferedReader:
    """Open a file of a local object store, which is encrypted if there is a `key`."""
    stored = path.open("rb")
    if key is None:
        return stored
    try:
        envelope_of(stored, name=f"object {path}")
    except IntegrityError:
        stored.close()
        raise
    return decrypted(stored, key.key, name=f"object {path}")


def _put_local(path: Path, url: str, sha256: str) -> None:
    """Copy a file into a local object store, whole or not at all, and read it back."""
    target, key = _local(url), key_in(url)
    staged = _staging(target)
    try:
        with path.open("rb") as source, staged.open("xb") as out:
            if key is None:
                shutil.copyfileobj(source, out, CHUNK_BYTES)
            else:
                encrypt(source, out, key)
            out.flush()
            os.fsync(out.fileno())
        with _plain(staged, key) as written:
            if hashlib.file_digest(written, "sha256").hexdigest() != sha256:
                raise Unavailable(f"{path.name} was not stored as it was read", code="object_store_unavailable")
        new = [parent for parent in target.parents if not parent.exists()]
        target.parent.mkdir(parents=True, exist_ok=True)
        staged.replace(target)
        for directory in (target.parent, *(parent.parent for parent in new)):
            sync_to_disk(directory)
    finally:
        staged.unlink(missing_ok=True)


def _staging(target: Path) -> Path:
    """Return a new name in the store's staging directory, which is beside its objects."""
    root = next((parent for parent in target.parents if (parent / ".staging").is_dir()), None)
    if root is None:
        raise Unavailable(f"the object store of {target} is not mounted", code="object_store_unavailable")
    return root / ".staging" / uuid.uuid4().hex


def _digests(path: Path, on_bytes: Callable[[], None]) -> tuple[tuple[str, ...], str, int]:
    """Return the digests of the file's parts and of the whole file, and its size."""
    whole, parts, size = hashlib.sha256(), list[str](), 0
    with path.open("rb") as stream:
        while True:
            part, length = hashlib.sha256(), 0
            while length < PART_BYTES and (chunk := stream.read(min(CHUNK_BYTES, PART_BYTES - length))):
                part.update(chunk)
                whole.update(chunk)
                length += len(chunk)
                on_bytes()
            if length or not parts:
                parts.append(part.hexdigest())
            size += length
            if length < PART_BYTES:
                return tuple(parts), whole.hexdigest(), size


def _part(path: Path, begins: int, size: int, on_bytes: Callable[[], None]) -> Iterator[bytes]:
    with path.open("rb") as stream:
        stream.seek(begins)
        yield from _chunks(stream, size, on_bytes)


def _chunks(stream: BinaryIO, size: int, on_bytes: Callable[[], None]) -> Iterator[bytes]:
    while size > 0 and (chunk := stream.read(min(CHUNK_BYTES, size))):
        size -= len(chunk)
        on_bytes()
        yield chunk
