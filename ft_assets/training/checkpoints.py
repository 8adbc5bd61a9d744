"""Checkpoints as files: written beside, digested, verified, committed by one rename; damage is found before it is loaded.

    checkpoints/.tmp-<pid>-step-00000010/   being written; never read, swept by ``retain``
    checkpoints/step-00000010/              committed: complete, its digests were re-read after writing
        manifest.json                       the list of every part with sha256 and size

A part that the manifest lists and the directory lacks is damage, and so is a part that it does not list: a resume that
silently does without the optimizer, the scheduler or the random state trains a different model.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ft_assets.errors import IntegrityError

MANIFEST = "manifest.json"
FORMAT = 1
RESUMABLE = ("*model*.safetensors", "optimizer.pt", "scheduler.pt", "rng_state*.pth", "trainer_state.json")
"""Patterns that each must match a part for an exact resume: weights, optimizer, scheduler, random state, step."""
ADAPTER = ("adapter_model.safetensors", "adapter_config.json")
"""Parts of a finished LoRA adapter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    sha256: str
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    step: int
    attempt: int
    spec_sha256: str
    files: Mapping[str, Part]
    """Every file of the directory but the manifest itself, by relative path."""
    created_at: float
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Counters and losses at the step; a resume continues the counters."""
    format: int = FORMAT

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def step_name(step: int) -> str:
    """Directory name of the checkpoint of `step`; names sort as steps do."""
    return f"step-{step:08d}"


def write_manifest(
    directory: Path, *, step: int, attempt: int, spec_sha256: str, created_at: float, metrics: Mapping[str, Any] | None = None
) -> Manifest:
    """Digest every file of `directory`, make it durable, and write the manifest last."""
    parts: dict[str, Part] = {}
    for name in _relative_files(directory):
        path = directory / name
        parts[name] = Part(sha256=_sha256(path), bytes=path.stat().st_size)
        _fsync(path)
    manifest = Manifest(
        step=step, attempt=attempt, spec_sha256=spec_sha256, files=parts, created_at=created_at, metrics=dict(metrics or {})
    )
    path = directory / MANIFEST
    path.write_text(json.dumps(manifest.to_dict(), indent=1, sort_keys=True))
    _fsync(path)
    _fsync(directory)
    return manifest


def read_manifest(directory: Path) -> Manifest:
    """The manifest of `directory`; ``IntegrityError`` where it is absent, torn or of another format."""
    path = directory / MANIFEST
    try:
        body = json.loads(path.read_text())
        if body["format"] != FORMAT:
            raise IntegrityError(f"{path} has format {body['format']}, this version reads {FORMAT}; use the version that wrote it")
        files = {str(k): Part(sha256=str(v["sha256"]), bytes=int(v["bytes"])) for k, v in body["files"].items()}
        return Manifest(**{**body, "files": files})
    except FileNotFoundError as e:
        raise IntegrityError(f"{path} is missing: the directory was never committed; use the checkpoint before it") from e
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise IntegrityError(f"{path} cannot be read ({type(e).__name__}: {e}); use the checkpoint before it") from e


def verify(directory: Path, *, required: Iterable[str] = ()) -> Manifest:
    """The manifest, after every part was read and found to be as written.

    `required` are patterns that each must match at least one listed part.
    """
    manifest = read_manifest(directory)
    for pattern in required:
        if not fnmatch.filter(manifest.files, pattern):
            raise IntegrityError(f"{directory / pattern} is not part of the manifest; use the checkpoint before it")
    for name, part in manifest.files.items():
        _verify_part(directory / name, part)
    unlisted = sorted(set(_relative_files(directory)) - set(manifest.files))
    if unlisted:
        raise IntegrityError(f"{directory / unlisted[0]} is not in the manifest: somebody added it after the commit; remove it")
    return manifest


def commit(
    target: Path,
    write: Callable[[Path], None],
    *,
    step: int,
    attempt: int,
    spec_sha256: str,
    created_at: float,
    metrics: Mapping[str, Any] | None = None,
    required: Iterable[str] = RESUMABLE,
) -> Manifest:
    """Have `write` fill a directory beside `target`, then verify it and rename it to `target`.

    A crash at any moment leaves `target` as it was or complete. An earlier `target` of the same name is replaced.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.parent / f".tmp-{os.getpid()}-{target.name}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        write(draft)
        write_manifest(draft, step=step, attempt=attempt, spec_sha256=spec_sha256, created_at=created_at, metrics=metrics)
        manifest = verify(draft, required=required)
        if target.exists():
            old = target.parent / f".tmp-{os.getpid()}-old-{target.name}"
            target.rename(old)
            draft.rename(target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            draft.rename(target)
        _fsync(target.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return manifest


def committed(checkpoints_dir: Path) -> list[Path]:
    """Directories of committed checkpoints, oldest first; their content is not looked at."""
    if not checkpoints_dir.is_dir():
        return []
    return sorted(p for p in checkpoints_dir.iterdir() if p.is_dir() and fnmatch.fnmatch(p.name, "step-" + "[0-9]" * 8))


def latest_valid(checkpoints_dir: Path, spec_sha256: str, *, on_skip: Callable[[Path, str], None] | None = None) -> Path | None:
    """The newest checkpoint of this spec from which an exact resume is possible; None: start from the beginning.

    Torn, corrupt, incomplete and foreign ones are passed over, newest first; each is told to `on_skip` with the reason.
    """
    for directory in reversed(committed(checkpoints_dir)):
        try:
            manifest = verify(directory, required=RESUMABLE)
            if manifest.spec_sha256 != spec_sha256:
                raise IntegrityError(f"{directory} was written by spec {manifest.spec_sha256[:12]}, not by {spec_sha256[:12]}")
            if step_name(manifest.step) != directory.name:
                raise IntegrityError(f"{directory} holds step {manifest.step}: it was renamed after the commit")
        except IntegrityError as e:
            if on_skip:
                on_skip(directory, e.message)
            continue
        return directory
    return None


def retain(checkpoints_dir: Path, keep_last: int) -> list[Path]:
    """Delete all but the newest `keep_last` committed checkpoints, and drafts of processes that are gone."""
    if keep_last < 1:
        raise ValueError(f"keep_last {keep_last} would delete the checkpoint just written; use at least 1")
    removed = committed(checkpoints_dir)[:-keep_last]
    drafts = [p for p in checkpoints_dir.glob(".tmp-*") if not p.name.startswith(f".tmp-{os.getpid()}-")]
    for path in removed + drafts:
        shutil.rmtree(path, ignore_errors=True)
    return removed


def _verify_part(path: Path, part: Part) -> None:
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise IntegrityError(f"{path} is missing, the manifest lists it; use the checkpoint before it") from None
    if size != part.bytes:
        raise IntegrityError(f"{path} has {size} bytes, {part.bytes} were written; use the checkpoint before it")
    if _sha256(path) != part.sha256:
        raise IntegrityError(f"{path} has not the digest that was written ({part.sha256[:12]}); use the checkpoint before it")


def _relative_files(directory: Path) -> list[str]:
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file() and p != directory / MANIFEST)


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
