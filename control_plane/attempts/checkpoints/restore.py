"""Where an attempt goes on from: the newest sound checkpoint, of this machine or of the object store. What is passed over is said."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from control_plane.attempts import service as attempts
from control_plane.attempts.checkpoints import retention
from control_plane.attempts.service import Claim
from control_plane.platform.context import Platform
from control_plane.platform.job_events import Event
from control_plane.platform.transfer import Patience, fetch_committed, patiently
from ft_assets.errors import IntegrityError, NotAdmitted
from ft_assets.training import checkpoints

log = logging.getLogger(__name__)

PATIENCE = Patience(give_up_s=300.0)
"""For a store that is away: an older checkpoint of this machine is no substitute for a newer one that is merely out of reach."""


def restore(platform: Platform, held: Claim, work_dir: Path, *, patience: Patience = PATIENCE) -> int:
    """Have the newest sound checkpoint on this machine and return its step; 0 to start from the beginning.

    Newest first, whatever is damaged, incomplete or of another training is passed over, and an event names it with the
    reason; it is given up, here and in the store. A store that stays away is ``Unavailable``, not damage: nothing is trained anew
    because of it.
    """
    directory = work_dir / "checkpoints"
    if attempts.holds(platform, held):
        checkpoints.recover(directory)  # as the workload will, and this tells where it goes on from
    skipped: list[tuple[int, str]] = []

    def skip(path: Path, why: str) -> None:
        log.warning("%s: %s", path.name, why)
        skipped.append((int(path.name.removeprefix("step-")), why))

    local = checkpoints.latest_valid(directory, held.spec, required=checkpoints.checkpoint_parts(held.spec), on_skip=skip)
    step = checkpoints.read_manifest(local).step if local else 0
    step = _newest_stored(platform, held, directory, step, skip, patience)
    if step and held.spec.optimization.early_stopping is not None:
        _have_best(platform, held, directory, step, skip, patience)
    _say(platform, held, skipped, step)
    retention.give_up_newer(platform, held, directory, step)
    return step


Skip = Callable[[Path, str], None]


def _newest_stored(platform: Platform, held: Claim, directory: Path, step: int, skip: Skip, patience: Patience) -> int:
    """Fetch the newest sound checkpoint that is newer than `step`; its step, or `step` where there is none."""
    for row in attempts.committed(platform, held.job_id):
        if row.final or row.step <= step:
            continue
        if _fetched(platform, held, row, directory, skip, patience):
            return int(row.step)
    return step


def _have_best(platform: Platform, held: Claim, directory: Path, step: int, skip: Skip, patience: Patience) -> None:
    """Have the checkpoint of the best validation here too: an early stop goes back to it."""
    state = json.loads((directory / checkpoints.step_name(step) / checkpoints.STATE).read_text())
    best = directory / checkpoints.step_name(int(state.get("best_step") or step))
    try:
        checkpoints.verify_for(best, held.spec, required=checkpoints.checkpoint_parts(held.spec))
    except IntegrityError as e:
        for row in attempts.committed(platform, held.job_id):
            if checkpoints.step_name(row.step) == best.name and _fetched(platform, held, row, directory, skip, patience):
                return
        skip(best, f"it holds the best weights so far, and is lost: {e.message}")


def _fetched(platform: Platform, held: Claim, row: sa.Row[Any], directory: Path, skip: Skip, patience: Patience) -> bool:
    target = directory / checkpoints.step_name(row.step)
    try:
        patiently(lambda: _fetch(platform, held, row.object_prefix, target, row.manifest_sha256), patience)
    except IntegrityError as e:
        skip(target, e.message)
        checkpoints.discard(target)
        return False
    return True


def _fetch(platform: Platform, held: Claim, prefix: str, target: Path, manifest_sha256: str) -> None:
    if not attempts.holds(platform, held):
        raise NotAdmitted(f"attempt {held.attempt} of job {held.job_id} was released, so it fetches nothing; its successor trains")
    target.parent.mkdir(parents=True, exist_ok=True)
    fetch_committed(platform.objects, prefix, target, manifest_sha256=manifest_sha256)
    checkpoints.verify_for(target, held.spec, required=checkpoints.checkpoint_parts(held.spec))


def _say(platform: Platform, held: Claim, skipped: Sequence[tuple[int, str]], step: int) -> None:
    reasons: dict[int, str] = {}
    for at, why in skipped:
        reasons[at] = why  # of two copies, what was found in the store
    onward = f"Training goes on from step {step}." if step else "Training starts from the beginning."
    for at, why in reasons.items():
        message = f"The checkpoint of step {at} was not used: {why}. {onward}"
        attempts.tell(platform, held, Event(code="checkpoint_skipped", level="warn", message=message, data={"step": at, "used": step}))
