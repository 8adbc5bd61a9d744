"""Checkpoints as files: written to a draft, digested, verified, committed by one rename. Damage is found before anything is loaded.

    checkpoints/.tmp-<token>-step-00000010/   being written; never read, swept by ``retain``
    checkpoints/.tmp-...-replaced-step-...    the previous one while the two change places; ``sweep`` restores it after a crash
    checkpoints/.tmp-...-gone-step-...        deleted; a half-deleted checkpoint never has a checkpoint's name
    checkpoints/step-00000010/                committed: complete, its digests were re-read after writing
        manifest.json                         who wrote it, every part with sha256 and size, and a digest of all this

A part that the manifest lists and the directory lacks is damage, and so is a part that it does not list: a resume that silently does
without the optimizer or the schedule trains a different model. Random state is not stored: it is a function of seed and step.

Of a sharded training on several nodes, each has a directory with the files of its own ranks, whose manifest says so; :func:`merged` makes
the manifest of the whole.

A saver calls ``begin``, fills the draft, and ``seal`` digests and commits it, in another thread while training continues.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Self

from core.durable_files import in_threads, sha256_of, swap_names, sync_to_disk
from core.errors import IntegrityError
from core.typed_json import from_json
from engine.training.disk_space import directory_bytes, raising_disk_full
from engine.training.spec import TrainingSpec, canonical_json

CHECKPOINT_MANIFEST = "manifest.json"
FORMAT = 2
TRAINER_STATE = "trainer_state.json"
"""Position in the run: every checkpoint has it, whatever the strategy, and no finished model does."""
RESUMABLE = ("*model*.safetensors", "optimizer.*", "schedule.*", TRAINER_STATE)
"""Patterns that must each match a part where rank 0 holds the whole state: weights, optimizer, schedule, position in the run."""
ADAPTER = ("adapter_model.safetensors", "adapter_config.json")
"""Parts of a finished LoRA adapter."""
_DRAFT = ".tmp-"
_REPLACED, _GONE = "replaced", "gone"
_PROCESS = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
"""Distinguishes this process's drafts from those of dead processes: in a container every process may have the same id."""
_tokens = {_PROCESS}
_STEP = "step-" + "[0-9]" * 8


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointPart:
    sha256: str
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointManifest:
    step: int
    attempt: int
    spec_sha256: str
    resume_sha256: str
    """Digest of the spec's resume-relevant fields: specs with the same value can resume from here (``TrainingSpec.resume_sha256``)."""
    strategy: str
    world_size: int
    """Number of ranks that wrote it."""
    node: int = 0
    num_nodes: int = 1
    """More than 1: these are the files of one `node` of so many, and no checkpoint without those of the others."""
    required: tuple[str, ...]
    """Patterns that must each match a part: what the writer's strategy needs to resume."""
    files: Mapping[str, CheckpointPart] = field(default_factory=dict)
    """Every file of the directory except the manifest, by relative path."""
    created_at: float
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Counters and losses at the step. A resume continues the counters."""
    kernels: Mapping[str, Any] = field(default_factory=dict)
    """Of a finished model: how it was computed, each choice with its reason."""
    format: int = FORMAT

    @classmethod
    def of(cls, spec: TrainingSpec, *, required: Iterable[str] = RESUMABLE, **facts: Any) -> Self:
        """Returns the manifest of what a training of `spec` wrote, before its files are known; `facts` are the fields named like that."""
        return cls(
            spec_sha256=spec.sha256,
            resume_sha256=spec.resume_sha256,
            strategy=spec.strategy,
            world_size=spec.world_size,
            required=tuple(required),
            **facts,
        )


def checkpoint_parts(spec: TrainingSpec) -> tuple[str, ...]:
    """Returns patterns that must each match a part to resume under the strategy of `spec`, including the position in the run."""
    if spec.adapter != "full":
        return ("adapter_model.safetensors", "optimizer.*", "schedule.*", TRAINER_STATE)
    if spec.strategy == "fsdp2":
        return ("distributed/.metadata", "distributed/*.distcp", "schedule.*", TRAINER_STATE)
    if spec.strategy.startswith("zero"):
        return ("zero/*optim_states.pt", "zero/*model_states.pt", "schedule.*", TRAINER_STATE)
    return RESUMABLE


def is_sharded(spec: TrainingSpec) -> bool:
    """Returns whether each rank writes a part of the state; otherwise rank 0 writes all of it."""
    return spec.adapter == "full" and (spec.strategy == "fsdp2" or spec.strategy.startswith("zero"))


def part_manifest(node: int) -> str:
    """Returns the name under which the manifest of one node's part is stored, beside the manifest of the whole."""
    return f"part-{node}.json"


def step_name(step: int) -> str:
    """Returns the directory name of the checkpoint of `step`; names sort in the order of steps."""
    return f"step-{step:08d}"


def begin(target: Path, *, token: str | None = None) -> Path:
    """Creates a draft directory beside `target`; it is not read before it is sealed.

    Without a `token` it is new and empty, for this process alone. Processes that write one checkpoint together share a token, and so the
    directory; one of them calls :func:`sweep` before the first begins.
    """
    draft = target.parent / f"{_DRAFT}{token or _PROCESS}-{target.name}"
    if token is None:
        discard_draft(draft)
    else:
        _tokens.add(token)
    with raising_disk_full(draft):
        draft.mkdir(parents=True, exist_ok=token is not None)
    return draft


def sweep(checkpoints_dir: Path) -> None:
    """Removes every draft. An attempt calls it before its first checkpoint, when no other process writes there.

    A complete draft that a crash kept from its name gets it (:func:`recover`).
    """
    recover_checkpoints(checkpoints_dir)
    for draft in checkpoints_dir.glob(f"{_DRAFT}*"):
        discard_draft(draft)


def recover_checkpoints(checkpoints_dir: Path) -> list[Path]:
    """Renames sealed drafts that a crash left before the rename, and restores a replaced checkpoint whose successor is not complete."""
    found = []
    for path in sorted(checkpoints_dir.glob(f"{_DRAFT}*-{_STEP}"), key=lambda p: f"-{_REPLACED}-" in p.name):
        target = path.with_name(path.name[-len(step_name(0)) :])
        if target.exists() or f"-{_GONE}-" in path.name:
            continue
        try:
            verify_checkpoint(path)
        except IntegrityError:
            continue
        path.rename(target)
        sync_to_disk(checkpoints_dir)
        found.append(target)
    return found


def discard_draft(draft: Path) -> None:
    """Removes a draft that will not be sealed; does nothing if it no longer exists."""
    shutil.rmtree(draft, ignore_errors=True)


def seal(draft: Path, target: Path, manifest: CheckpointManifest) -> CheckpointManifest:
    """Digests the files in `draft` for `manifest`, makes it durable, re-reads it, and renames it to `target`; any thread may call this.

    A crash at any moment leaves `target` as it was or complete, and a failure removes the draft. After success, a second call returns the
    manifest that the first one wrote.
    """
    if not draft.exists() and (done := _sealed_before(target, manifest)):
        return done
    try:
        with raising_disk_full(draft):
            write_manifest(draft, manifest)
        written = verify_checkpoint(draft)
        _put_in_place(draft, target)
    finally:
        discard_draft(draft)
    return written


def place(draft: Path, target: Path, manifest: CheckpointManifest) -> None:
    """Commits files that another node has sealed under `manifest`; raises ``IntegrityError`` if these are others."""
    try:
        (draft / CHECKPOINT_MANIFEST).write_bytes(encoded_manifest(manifest))
        verify_checkpoint(draft)
        _put_in_place(draft, target)
    finally:
        discard_draft(draft)


def merged_manifest(parts: Sequence[CheckpointManifest]) -> CheckpointManifest:
    """Returns the manifest of the checkpoint whose nodes wrote `parts`; raises ``IntegrityError`` if one is missing or of another one."""
    ordered = sorted(parts, key=lambda part: part.node)
    first = ordered[0]
    if [part.node for part in ordered] != list(range(first.num_nodes)):
        raise IntegrityError(f"step {first.step} has parts of nodes {[part.node for part in ordered]}, of {first.num_nodes}")
    alike = ("step", "attempt", "spec_sha256", "resume_sha256", "world_size", "num_nodes", "format")
    if other := next((name for name in alike for part in ordered if getattr(part, name) != getattr(first, name)), None):
        raise IntegrityError(f"the parts of step {first.step} differ in {other}: they are not of one checkpoint")
    files = {name: part for each in ordered for name, part in each.files.items()}
    if len(files) < sum(len(part.files) for part in ordered):
        raise IntegrityError(f"two nodes wrote the same file of step {first.step}")
    return replace(first, files=files, num_nodes=1)


def write_manifest(directory: Path, manifest: CheckpointManifest) -> None:
    """Makes every file of `directory` durable, digests it, and writes `manifest` with the digests last."""
    names = _relative_files(directory)
    parts = in_threads(_durable_part, [directory / name for name in names])
    path = directory / CHECKPOINT_MANIFEST
    path.write_bytes(encoded_manifest(replace(manifest, files=dict(zip(names, parts, strict=True)))))
    for synced in (path, *(p for p in directory.rglob("*") if p.is_dir()), directory):
        sync_to_disk(synced)


def encoded_manifest(manifest: CheckpointManifest) -> bytes:
    """Returns the manifest as it is stored: the same bytes for the same manifest."""
    body = asdict(manifest)
    return json.dumps({**body, "sha256": _own_digest(body)}, indent=1, sort_keys=True).encode()


def read_manifest(directory: Path) -> CheckpointManifest:
    """Reads the manifest of `directory`; raises ``IntegrityError`` if it is absent, torn, edited, a link or of another format."""
    path = directory / CHECKPOINT_MANIFEST
    _refuse_link(path)
    try:
        return parse_manifest(path.read_bytes(), name=str(path))
    except FileNotFoundError as e:
        raise IntegrityError(f"{path} is missing: the directory was never committed; use the previous checkpoint") from e
    except OSError as e:
        raise IntegrityError(f"{path} cannot be read ({e.strerror}); use the previous checkpoint") from e


def parse_manifest(data: bytes, *, name: str) -> CheckpointManifest:
    """Parses the manifest in `data` and checks its own digest; `name` is its origin, for errors."""
    try:
        body = json.loads(data)
        if body["format"] != FORMAT:
            raise IntegrityError(f"{name} has format {body['format']}, this version reads {FORMAT}; use the version that wrote it")
        if body.pop("sha256") != _own_digest(body):
            raise IntegrityError(f"{name} does not match its own digest: it was modified; use the previous checkpoint")
        for part in body["files"]:
            _check_inside(part)
        return from_json(CheckpointManifest, body)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise IntegrityError(f"{name} cannot be read ({type(e).__name__}: {e}); use the previous checkpoint") from e


def verify_checkpoint(directory: Path, *, required: Iterable[str] = ()) -> CheckpointManifest:
    """Reads every part, compares it with the manifest, and returns the manifest.

    `required` are patterns that must each match at least one listed part, besides those that the manifest itself names.
    """
    manifest = read_manifest(directory)
    check_checkpoint_parts(manifest, directory, required=required)
    unlisted = sorted(set(_relative_files(directory)) - set(manifest.files))
    if unlisted:
        raise IntegrityError(f"{directory / unlisted[0]} is not in the manifest: it was added after the commit; remove it")
    in_threads(lambda name: verify_checkpoint_part(directory / name, manifest.files[name]), sorted(manifest.files))
    return manifest


def check_checkpoint_parts(manifest: CheckpointManifest, directory: Path, *, required: Iterable[str] = ()) -> None:
    """Raises ``IntegrityError`` if the manifest lists no part for a required pattern."""
    for pattern in sorted({*manifest.required, *required}):
        if not fnmatch.filter(manifest.files, pattern):
            raise IntegrityError(f"{directory / pattern} is not part of the manifest; use the previous checkpoint")


def verify_checkpoint_part(path: Path, part: CheckpointPart) -> None:
    """Raises ``IntegrityError`` if the file at `path` is not the one that was written, or a link to it."""
    _refuse_link(path)
    try:
        size = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        raise IntegrityError(f"{path} is missing but listed in the manifest; use the previous checkpoint") from None
    if size != part.bytes:
        raise IntegrityError(f"{path} has {size} bytes, {part.bytes} were written; use the previous checkpoint")
    try:
        digest = sha256_of(path)
    except OSError as e:  # includes a disk that cannot read its own sectors
        raise IntegrityError(f"{path} cannot be read ({e.strerror}); use the checkpoint before it") from e
    if digest != part.sha256:
        raise IntegrityError(f"{path} does not match the digest that was written ({part.sha256[:12]}); use the previous checkpoint")


def verify_checkpoint_for(directory: Path, spec: TrainingSpec, *, required: Iterable[str] = ()) -> CheckpointManifest:
    """Returns the manifest of a sound checkpoint from which `spec` may resume; raises ``IntegrityError`` with the reason otherwise."""
    manifest = verify_checkpoint(directory, required=required)
    if manifest.resume_sha256 != spec.resume_sha256:
        raise IntegrityError(
            f"{directory} was written by a different training job ({manifest.resume_sha256[:12]}, not {spec.resume_sha256[:12]})"
        )
    if TRAINER_STATE not in manifest.required:
        raise IntegrityError(f"{directory} is a finished model and not a checkpoint: it has no state to resume from")
    if step_name(manifest.step) != directory.name:
        raise IntegrityError(f"{directory} holds step {manifest.step}: it was renamed after the commit")
    return manifest


def committed_checkpoints(checkpoints_dir: Path) -> list[Path]:
    """Returns the directories of committed checkpoints, oldest first, without reading them."""
    if not checkpoints_dir.is_dir():
        return []
    return sorted(p for p in checkpoints_dir.iterdir() if p.is_dir() and fnmatch.fnmatch(p.name, _STEP))


def latest_valid_checkpoint(
    checkpoints_dir: Path, spec: TrainingSpec, *, required: Iterable[str] = (), on_skip: Callable[[Path, str], None] | None = None
) -> Path | None:
    """Returns the newest checkpoint from which `spec` resumes exactly; None to start from the beginning.

    `required` are the parts that the strategy of `spec` reads. Torn, corrupt, incomplete and foreign checkpoints are skipped, newest first;
    each is passed to `on_skip` with the reason. A checkpoint written with another micro-batch, world size or strategy but the same global
    batch is not foreign. What one node of several wrote is passed over.
    """
    needed = tuple(required)
    for directory in reversed(committed_checkpoints(checkpoints_dir)):
        try:
            if read_manifest(directory).num_nodes > 1:
                continue
            verify_checkpoint_for(directory, spec, required=needed)
        except IntegrityError as e:
            if on_skip:
                on_skip(directory, e.message)
            continue
        return directory
    return None


def size_of_newest(checkpoints_dir: Path) -> int:
    """Returns the bytes of the newest committed checkpoint, which the next one is expected to take; 0 if there is none."""
    found = committed_checkpoints(checkpoints_dir)
    return directory_bytes(found[-1]) if found else 0


def retain(checkpoints_dir: Path, keep_last: int, *, keep_step: int | None = None) -> list[Path]:
    """Deletes all but the newest `keep_last` committed checkpoints, and drafts of dead processes. Keeps `keep_step`."""
    if keep_last < 1:
        raise ValueError(f"keep_last {keep_last} would delete the checkpoint just written; use at least 1")
    spared = None if keep_step is None else step_name(keep_step)
    removed = [p for p in committed_checkpoints(checkpoints_dir)[:-keep_last] if p.name != spared]
    ours = tuple(f"{_DRAFT}{token}-" for token in _tokens)
    doomed = [p for p in checkpoints_dir.glob(f"{_DRAFT}*") if not p.name.startswith(ours)]
    doomed += [_renamed(path, _GONE) for path in removed]
    for path in doomed:
        discard_draft(path)
    return removed


def set_aside_newer(checkpoints_dir: Path, step: int) -> list[Path]:
    """Deletes the committed checkpoints after `step`, from which a run is about to resume (0: all), and returns their paths.

    Damaged or of another training, they would count as the newest and take precedence over what the run writes.
    """
    newer = [path for path in committed_checkpoints(checkpoints_dir) if path.name > step_name(step)]
    for aside in [_renamed(path, _GONE) for path in newer]:
        discard_draft(aside)
    return newer


def manifest_digest(directory: Path) -> str:
    """Returns the digest of the manifest's bytes, which covers every part."""
    return sha256_of(directory / CHECKPOINT_MANIFEST)


def _sealed_before(target: Path, manifest: CheckpointManifest) -> CheckpointManifest | None:
    try:
        found = read_manifest(target)
    except IntegrityError:
        return None
    same = all(getattr(found, name) == getattr(manifest, name) for name in ("step", "attempt", "spec_sha256"))
    return found if same else None


def _put_in_place(draft: Path, target: Path) -> None:
    """Renames `draft` to `target`; if that exists, swaps the two in one step."""
    replaced = None
    if target.exists() and not swap_names(draft, target):  # without swap support: `recover` finds both after a crash
        replaced = _renamed(target, _REPLACED)
    if draft.exists() and not target.exists():
        draft.rename(target)
    sync_to_disk(target.parent)
    if replaced is not None:
        discard_draft(replaced)


def _renamed(path: Path, why: str) -> Path:
    """Renames `path` to a name that no checkpoint has."""
    aside = path.with_name(f"{_DRAFT}{_PROCESS}-{why}-{path.name}")
    discard_draft(aside)
    path.rename(aside)
    return aside


def _refuse_link(path: Path) -> None:
    if path.is_symlink():
        raise IntegrityError(f"{path} is a link, whose target may change after it was verified; use the previous checkpoint")


def _check_inside(name: str) -> None:
    """Raises ``ValueError`` if `name` is not a path inside the directory."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or str(path) != name:
        raise ValueError(f"{name!r} is not a path inside the checkpoint")


def _own_digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(body).encode()).hexdigest()


def _relative_files(directory: Path) -> list[str]:
    return sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file() and p != directory / CHECKPOINT_MANIFEST)


def _durable_part(path: Path) -> CheckpointPart:
    part = CheckpointPart(sha256=sha256_of(path), bytes=path.stat().st_size)
    sync_to_disk(path, forget=True)
    return part
