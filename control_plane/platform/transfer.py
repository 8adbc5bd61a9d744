"""Files between this machine and the object store: digested on the way, checked on arrival, gone on with after a failure."""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

from control_plane.platform.protocols import ObjectStore
from ft_assets.errors import IntegrityError, NotFound, Unavailable
from ft_assets.training.checkpoints import MANIFEST, Manifest, check_parts, manifest_digest, read_manifest, verify_part

FAILURES = (Unavailable, OSError)
"""What a store raises that may answer later: it is away, it drops connections, its disk is full."""
CHUNK_BYTES = 1 << 20
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How a store that fails is asked again."""

    first_s: float = 0.5
    """Wait after the first failure; each later one waits twice as long."""
    most_s: float = 30.0
    give_up_s: float = 120.0
    """Seconds of failure in a row after which the caller goes on without."""

    def wait_s(self, failures: int) -> float:
        return min(self.most_s, self.first_s * 2.0 ** min(failures, 30))


def with_retries(call: Callable[[], _T], retries: RetryPolicy, *, on_failure: Callable[[Exception], None] | None = None) -> _T:
    """`call`, again and again while the store fails; after ``give_up_s`` its last failure, as ``Unavailable``."""
    began, failures = time.monotonic(), 0
    while True:
        try:
            return call()
        except FAILURES as error:
            if on_failure:
                on_failure(error)
            if time.monotonic() - began >= retries.give_up_s:
                raise error if isinstance(error, Unavailable) else Unavailable(str(error), code="object_store_unavailable") from error
            time.sleep(retries.wait_s(failures))
            failures += 1


def download(objects: ObjectStore, prefix: str, target: Path, *, last: str | None = None) -> None:
    """Copy every object under `prefix` to `target`; `last` names the file that marks it complete."""
    infos = sorted(objects.list(prefix), key=lambda i: i.key.endswith(f"/{last}"))
    for info in infos:
        objects.get_file(info.key, target / info.key.removeprefix(prefix + "/"))


def upload(objects: ObjectStore, directory: Path, prefix: str, *, last: str = MANIFEST) -> None:
    """Copy every file of `directory` under `prefix`, the manifest at the end."""
    paths = sorted((p for p in directory.rglob("*") if p.is_file()), key=lambda p: p.name == last)
    for path in paths:
        objects.put_file(f"{prefix}/{path.relative_to(directory).as_posix()}", path)


@dataclass(kw_only=True)
class Sending:
    """One committed directory on its way to `prefix`; ``go_on`` may be called again after it failed, and sends only what is missing.

    Every byte that is handed over is held against the manifest, so that damage on this machine is not stored; then sizes in
    the store are, and with `read_back` the bytes.
    """

    objects: ObjectStore
    directory: Path
    prefix: str
    read_back: bool = False
    on_bytes: Callable[[], None] = lambda: None
    on_part: Callable[[], None] = lambda: None
    sent: set[str] = field(default_factory=set)

    def go_on(self) -> Manifest:
        """The manifest, once all of it is stored. ``IntegrityError``: the directory is damaged on this machine."""
        manifest = read_manifest(self.directory)
        check_parts(manifest, self.directory)
        for name in sorted(set(manifest.files) - self.sent):
            part = manifest.files[name]
            digest, size = self._put(name)
            if (digest, size) != (part.sha256, part.bytes):
                self.objects.delete(f"{self.prefix}/{name}")
                verify_part(self.directory / name, part)
                raise Unavailable(f"{name} was read differently twice on this machine", code="object_store_unavailable")
            self.sent.add(name)
            self.on_part()
        self._put(MANIFEST)
        self._check(manifest)
        return manifest

    def _put(self, name: str) -> tuple[str, int]:
        with (self.directory / name).open("rb") as source:
            digested = _Digested(source, self.on_bytes)
            self.objects.put_stream(f"{self.prefix}/{name}", cast(BinaryIO, digested))
            return digested.hexdigest(), digested.num_bytes

    def _check(self, manifest: Manifest) -> None:
        """Forget what the store has not as it was sent, and say so."""
        stored = {i.key.removeprefix(f"{self.prefix}/"): i.size_bytes for i in self.objects.list(self.prefix)}
        wrong = {name for name, part in manifest.files.items() if stored.get(name) != part.bytes}
        if self.read_back:
            wrong |= {name for name, part in manifest.files.items() if name not in wrong and self._stored_digest(name) != part.sha256}
        if stored.get(MANIFEST) is None or self._stored_digest(MANIFEST) != manifest_digest(self.directory):
            wrong.add(MANIFEST)
        if wrong:
            self.sent -= wrong
            raise Unavailable(
                f"the object store has not what was sent as {sorted(wrong)[0]}; it is sent again", code="object_store_unavailable"
            )

    def _stored_digest(self, name: str) -> str:
        digest = hashlib.sha256()
        try:
            with self.objects.open(f"{self.prefix}/{name}") as stored:
                while chunk := stored.read(CHUNK_BYTES):
                    digest.update(chunk)
        except (NotFound, IntegrityError):
            return ""
        return digest.hexdigest()


def fetch_committed(objects: ObjectStore, prefix: str, target: Path, *, manifest_sha256: str) -> Manifest:
    """Have what was committed under `prefix` in `target`, whole and verified; files that are there already are not fetched again.

    `target` appears by one rename. ``IntegrityError`` where an object is missing or is not the one that was committed.
    """
    beside = target.parent / f".fetching-{manifest_sha256[:32]}"
    try:
        _fetch_part(objects, f"{prefix}/{MANIFEST}", beside / MANIFEST, lambda path: _check_manifest(path, manifest_sha256))
        manifest = read_manifest(beside)
        for name, part in manifest.files.items():
            _fetch_part(objects, f"{prefix}/{name}", beside / name, lambda path, part=part: verify_part(path, part))  # type: ignore[misc]
    except NotFound as e:
        raise IntegrityError(f"{e.message} in the object store, and the manifest lists it; use the previous checkpoint") from e
    shutil.rmtree(target, ignore_errors=True)
    beside.rename(target)
    return manifest


def _check_manifest(path: Path, sha256: str) -> None:
    if not path.is_file() or manifest_digest(path.parent) != sha256:
        raise IntegrityError(f"{path} is not the manifest that was committed")


def _fetch_part(objects: ObjectStore, key: str, path: Path, check: Callable[[Path], None]) -> None:
    for last in (False, False, True):  # what is here already; fetched; once more, for the way here may have spoiled it
        try:
            check(path)
            return
        except IntegrityError as e:
            if last:
                path.unlink(missing_ok=True)
                raise IntegrityError(f"object {key} is not the one that was committed; use the previous checkpoint") from e
        with contextlib.suppress(IntegrityError):
            objects.get_file(key, path)


class _Digested:
    """A readable stream that digests what it gives."""

    def __init__(self, stream: BinaryIO, on_bytes: Callable[[], None]) -> None:
        self._stream, self._on_bytes, self._digest = stream, on_bytes, hashlib.sha256()
        self.num_bytes = 0

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self._digest.update(data)
        self.num_bytes += len(data)
        self._on_bytes()
        return data

    def hexdigest(self) -> str:
        return self._digest.hexdigest()
