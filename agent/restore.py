"""Where an attempt begins: the newest sound checkpoint on this node or in the store, and the best one that an early stop returns to."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from agent.inputs import fetch, link
from agent.messages import Restored, Skipped
from agent.objects import Objects
from core.errors import IntegrityError
from core.retries import RetryPolicy, with_retries
from core.workload import StoredCheckpoint
from engine.training import (
    CHECKPOINT_MANIFEST,
    TRAINER_STATE,
    TrainingSpec,
    checkpoint_parts,
    discard_draft,
    latest_valid_checkpoint,
    manifest_digest,
    read_manifest,
    recover_checkpoints,
    set_aside_newer,
    step_name,
    verify_checkpoint_for,
    verify_checkpoint_part,
)

RETRIES = RetryPolicy(give_up_s=300.0)
"""The store is unavailable: an older checkpoint on this node must not replace a newer one that is merely out of reach."""

log = logging.getLogger(__name__)
Skip = Callable[[Path, str], None]


def restore(objects: Objects, spec: TrainingSpec, stored: Sequence[StoredCheckpoint], directory: Path) -> Restored:
    """Have the checkpoint from which training resumes in `directory`; step 0 to start from the beginning.

    Skips, newest first, checkpoints that are damaged, incomplete or of another training. An unavailable store raises ``Unavailable`` and is
    not damage: it never causes a restart from the beginning.
    """
    recover_checkpoints(directory)
    skipped: dict[int, str] = {}

    def skip(path: Path, why: str) -> None:
        log.warning("%s: %s", path.name, why)
        skipped[int(path.name.removeprefix("step-"))] = why  # of two copies, report what was found in the store

    local = latest_valid_checkpoint(directory, spec, required=checkpoint_parts(spec), on_skip=skip)
    step = read_manifest(local).step if local else 0
    for row in stored:
        if row.step > step and _fetched(objects, spec, row, directory, skip):
            step = row.step
            break
    if step and spec.optimization.early_stopping is not None:
        _have_best(objects, spec, stored, directory, step, skip)
    set_aside_newer(directory, step)
    return Restored(step=step, skipped=tuple(Skipped(step=at, why=why) for at, why in skipped.items()))


def _have_best(objects: Objects, spec: TrainingSpec, stored: Sequence[StoredCheckpoint], directory: Path, step: int, skip: Skip) -> None:
    """Fetch the checkpoint with the best validation too: an early stop returns to it."""
    state = json.loads((directory / step_name(step) / TRAINER_STATE).read_text())
    best = directory / step_name(int(state.get("best_step") or step))
    try:
        verify_checkpoint_for(best, spec, required=checkpoint_parts(spec))
    except IntegrityError as error:
        row = next((row for row in stored if step_name(row.step) == best.name), None)
        if row is None or not _fetched(objects, spec, row, directory, skip):
            skip(best, f"it holds the best weights so far, and is lost: {error.message}")


def _fetched(objects: Objects, spec: TrainingSpec, row: StoredCheckpoint, directory: Path, skip: Skip) -> bool:
    target = directory / step_name(row.step)
    try:
        with_retries(lambda: _fetch(objects, row, target), RETRIES)
        verify_checkpoint_for(target, spec, required=checkpoint_parts(spec))
    except IntegrityError as error:
        skip(target, error.message)
        discard_draft(target)
        return False
    return True


def _fetch(objects: Objects, row: StoredCheckpoint, target: Path) -> None:
    """Have the committed checkpoint in `target`, whole and verified, by one rename; files that are here already are not fetched again."""
    beside = target.parent / f".fetching-{row.manifest_sha256[:32]}"
    _fetch_part(
        objects,
        f"{row.prefix}/{CHECKPOINT_MANIFEST}",
        beside / CHECKPOINT_MANIFEST,
        lambda path: _check_manifest(path, row.manifest_sha256),
    )
    for name, part in read_manifest(beside).files.items():
        if (target / name).is_file() and not (beside / name).exists():  # the part of this node
            link(target / name, beside / name)
        _fetch_part(objects, f"{row.prefix}/{name}", beside / name, lambda path, part=part: verify_checkpoint_part(path, part))  # type: ignore[misc]
    shutil.rmtree(target, ignore_errors=True)
    beside.rename(target)


def _check_manifest(path: Path, sha256: str) -> None:
    if not path.is_file() or manifest_digest(path.parent) != sha256:
        raise IntegrityError(f"{path} is not the manifest that was committed")


def _fetch_part(objects: Objects, key: str, path: Path, check: Callable[[Path], None]) -> None:
    for last in (False, False, True):  # what is here already; fetched; once more, because the way here may have spoiled it
        try:
            check(path)
            return
        except IntegrityError as error:
            if last:
                path.unlink(missing_ok=True)
                raise IntegrityError(f"object {key} is not the one that was committed; use the previous checkpoint") from error
        path.unlink(missing_ok=True)
        fetch(objects, key, path)
