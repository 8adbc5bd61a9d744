"""Uploads checkpoints to the object store while training runs, one at a time and newest first, and restores them."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from control_plane.attempts import checkpoint_retention
from control_plane.attempts import service as attempts
from control_plane.attempts.service import Claim
from control_plane.attempts.tables import Checkpoint
from control_plane.platform.context import Platform
from control_plane.platform.job_events import Event
from control_plane.platform.transfer import FAILURES, RetryPolicy, Sending, fetch_committed, with_retries
from ft_assets import layout
from ft_assets.errors import IntegrityError, NotAdmitted, Unavailable
from ft_assets.telemetry.redaction import without_credentials
from ft_assets.training import checkpoints
from ft_assets.training.checkpoints import Manifest, manifest_digest, read_manifest, step_name

log = logging.getLogger(__name__)

POLL_S = 0.2
CHECKPOINT_RETRIES = RetryPolicy(give_up_s=120.0)
"""Time limit of an attempt's last checkpoint, whose GPUs are held meanwhile; other uploads have no limit."""
FINAL_RETRIES = RetryPolicy(give_up_s=600.0)
"""Time limit of the finished model. After it the step fails and is replaced; the next step adopts the workload and uploads it again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pinned:
    directory: Path
    """Directory of hard links to a checkpoint's files, which keep them while the training process retires it."""
    manifest: Manifest


class _Lost(Exception):
    """The attempt was released; it may not upload anything."""


class Uploader:
    """A background thread that uploads and commits the checkpoints of one attempt.

    One checkpoint waits while another is sent: a newer one replaces one that waits, or one whose upload fails. The one with the best
    validation waits behind it, if an early stop would return to it. ``close`` ends the thread; unsent checkpoints stay on this machine.
    """

    def __init__(self, platform: Platform, held: Claim, work_dir: Path, *, retries: RetryPolicy = CHECKPOINT_RETRIES) -> None:
        self._platform, self._held, self._retries = platform, held, retries
        self._pins = work_dir / "uploads"
        shutil.rmtree(self._pins, ignore_errors=True)
        self._known = {row.step: (row.attempt, row.manifest_sha256) for row in attempts.committed(platform, held.job_id)}
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._waiting: list[_Pinned] = []
        self._pinned_steps: set[int] = set()
        self._sending: _Pinned | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self._failing_since: float | None = None
        self._moved_at = time.monotonic()

    def offer(self, directory: Path) -> bool:
        """Queue the committed checkpoint in `directory` for upload; returns False if that is impossible or unnecessary.

        The checkpoint with the best validation is queued with it: it may have appeared and been superseded between two polls.
        """
        pinned = self._pin(directory)
        if pinned is None:
            return False
        best = _best_step(pinned.manifest)
        missed = self._pin(directory.with_name(step_name(best))) if best is not None and best not in self._pinned_steps else None
        with self._changed:
            self._wait(*([missed] if missed else []), pinned)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"upload-{self._held.workload}", daemon=True)
            self._thread.start()
        return True

    def drain(self, *, abandon: Callable[[], bool] = lambda: False) -> bool:
        """Wait until everything is sent; False if `abandon` returned true or the store failed for too long."""
        self._moved_at = time.monotonic()
        while True:
            with self._changed:
                if not self._waiting and self._sending is None:
                    return True
                self._changed.wait(POLL_S)
            if abandon():
                return False
            stuck_since = self._moved_at if self._failing_since is None else self._failing_since
            if time.monotonic() - stuck_since > self._retries.give_up_s:
                step = max((p.manifest.step for p in (*self._waiting, self._sending) if p is not None), default=0)
                message = f"The checkpoint of step {step} could not be uploaded; it stays on the machine that trained, and is used there."
                self._tell(Event(code="checkpoint_upload_abandoned", level="warn", message=message, data={"step": step}))
                return False

    def close(self) -> None:
        """End the thread at its next poll; a hanging put is left alone, because its row is never written."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        shutil.rmtree(self._pins, ignore_errors=True)

    def _wait(self, *pinned: _Pinned) -> None:
        """Queue the newest of the waiting ones and of `pinned`, then the best one that it names; drop the others."""
        waiting = sorted([*self._waiting, *pinned], key=lambda p: p.manifest.step)
        newest = waiting[-1].manifest
        self._waiting = [p for p in waiting if p.manifest.step in (newest.step, _best_step(newest))]
        for passed in waiting:
            if passed not in self._waiting:
                shutil.rmtree(passed.directory, ignore_errors=True)
        self._changed.notify_all()

    def _pin(self, directory: Path) -> _Pinned | None:
        pin = self._pins / f"{next(self._numbers)}-{directory.name}"
        try:
            for path in (p for p in sorted(directory.rglob("*")) if p.is_file()):
                linked = pin / path.relative_to(directory)
                linked.parent.mkdir(parents=True, exist_ok=True)
                os.link(path, linked)
            manifest = read_manifest(pin)
        except (FileNotFoundError, IntegrityError):  # retired meanwhile, or damaged: keep the one before it
            shutil.rmtree(pin, ignore_errors=True)
            return None
        if not self._is_news(manifest, manifest_digest(pin)):
            shutil.rmtree(pin, ignore_errors=True)
            return None
        self._pinned_steps.add(manifest.step)
        return _Pinned(directory=pin, manifest=manifest)

    def _is_news(self, manifest: Manifest, digest: str) -> bool:
        """Whether the store lacks it, including one that an earlier attempt left only on this machine."""
        if manifest.resume_sha256 != self._held.spec.resume_sha256:
            return False
        attempt, known = self._known.get(manifest.step, (0, ""))
        return bool(known != digest and manifest.attempt > attempt)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                sending = self._sending = self._waiting.pop()
            try:
                self._send(sending)
            except _Lost:
                self._closed = True
            except Exception:
                log.exception("upload of %s failed", sending.directory.name)
            finally:
                with self._changed:
                    if sending not in self._waiting:
                        shutil.rmtree(sending.directory, ignore_errors=True)
                    self._sending = None
                    self._changed.notify_all()

    def _send(self, item: _Pinned) -> None:
        held, step = self._held, item.manifest.step
        prefix = layout.checkpoint_prefix(held.tenant, held.job_id, held.attempt, step)
        sending = Sending(
            objects=self._platform.objects, directory=item.directory, prefix=prefix, on_bytes=self._moved, on_part=self._recovered
        )
        failures = 0
        while not self._closed:
            try:
                self._commit(sending, prefix)
                return
            except IntegrityError as e:
                log.warning("checkpoint of step %s of %s is damaged: %s", step, held.workload, e.message)
                message = (
                    f"The checkpoint of step {step} is damaged on the machine that trained, and was not uploaded; the one before stands."
                )
                self._tell(Event(code="checkpoint_skipped", level="warn", message=message, data={"step": step}))
                return
            except (*FAILURES, SQLAlchemyError) as e:
                self._failed(step, e)
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._newer_waits(step), timeout=self._retries.wait_s(failures))
                if self._newer_waits(step):
                    self._wait(item)  # after it, or not at all: the newer one matters more
                    return
            failures += 1

    def _newer_waits(self, step: int) -> bool:
        return any(p.manifest.step > step for p in self._waiting)

    def _commit(self, sending: Sending, prefix: str) -> None:
        if not attempts.holds(self._platform, self._held):
            raise _Lost
        manifest = sending.go_on()
        if self._closed:
            return
        digest = manifest_digest(sending.directory)
        metrics = openai_metrics(manifest.step, manifest.metrics)
        recorded = attempts.record_checkpoint(
            self._platform, self._held, step=manifest.step, prefix=prefix, manifest_sha256=digest, metrics=metrics
        )
        if not recorded:
            raise _Lost
        self._known[manifest.step] = (self._held.attempt, digest)
        self._recovered()
        checkpoint_retention.retire_checkpoints(self._platform, self._held)

    def _moved(self) -> None:
        self._moved_at = time.monotonic()

    def _failed(self, step: int, error: Exception) -> None:
        if self._failing_since is None:
            self._failing_since = time.monotonic()
            self._tell(upload_failed(f"the checkpoint of step {step}", step, error))

    def _recovered(self) -> None:
        if self._failing_since is not None:
            lasted, self._failing_since = time.monotonic() - self._failing_since, None
            self._tell(upload_recovered(lasted))

    def _tell(self, event: Event) -> None:
        with contextlib.suppress(SQLAlchemyError):
            attempts.tell(self._platform, self._held, event)


def commit_final(platform: Platform, held: Claim, directory: Path, *, step: int, retries: RetryPolicy = FINAL_RETRIES) -> bool:
    """Upload the finished model, read it back and commit it; False if the attempt was released.

    Retries while the store fails, then raises ``Unavailable``: nothing is lost, the files stay on this machine.
    """
    prefix = final_prefix(held.tenant, held.job_id, held.attempt)
    sending = Sending(objects=platform.objects, directory=directory, prefix=prefix, read_back=True)
    failed_at: list[float] = []

    def failed(error: Exception) -> None:
        if not attempts.holds(platform, held):
            raise error
        if not failed_at:
            attempts.tell(platform, held, upload_failed("the finished model", step, error))
        failed_at.append(time.monotonic())

    if not attempts.holds(platform, held):
        return False
    try:
        manifest = with_retries(sending.go_on, retries, on_failure=failed)
    except Unavailable as e:
        message = f"the finished model of {held.job_id} is on this machine and could not be stored yet: {e.message}"
        raise Unavailable(message, code=e.code) from e
    if failed_at:
        attempts.tell(platform, held, upload_recovered(time.monotonic() - failed_at[0]))
    return attempts.record_checkpoint(
        platform,
        held,
        step=step,
        prefix=prefix,
        manifest_sha256=manifest_digest(directory),
        metrics=openai_metrics(step, manifest.metrics),
        final=True,
    )


def final_prefix(tenant: str, job_id: str, attempt: int) -> str:
    """Prefix of a job's finished model until it is registered; each attempt has its own."""
    return f"{layout.job_prefix(tenant, job_id)}/final/a{attempt}"


def _best_step(manifest: Manifest) -> int | None:
    """Return the step that an early stop at this checkpoint would return to."""
    best = manifest.metrics.get("best_step")
    return None if best is None else int(best)


def openai_metrics(step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return checkpoint metrics under the names of OpenAI's clients, and the step of the best validation if an early stop returns to it.
    Values that are not finite are left out: JSON has no notation for them."""
    names = {"loss": "train_loss", "eval_loss": "full_valid_loss", "best_step": "best_step"}
    return {"step": step} | {names[k]: v for k, v in metrics.items() if k in names and v is not None and math.isfinite(v)}


def upload_failed(what: str, step: int, error: Exception) -> Event:
    """Report to the tenant that the upload is delayed; the cause is logged for operators."""
    reason = error.message if isinstance(error, Unavailable) else f"{type(error).__name__}: {error}"
    log.warning("the object store does not take %s: %s", what, without_credentials(reason))
    message = f"The object store is not accepting {what}. Training continues; the upload is retried."
    return Event(code="checkpoint_upload_failed", level="warn", message=message, data={"step": step})


def upload_recovered(lasted_s: float) -> Event:
    message = f"The object store takes checkpoints again, after {lasted_s:.0f} s."
    return Event(code="checkpoint_upload_recovered", message=message)


RETRIES = RetryPolicy(give_up_s=300.0)
"""The store is unavailable: an older checkpoint on this machine must not replace a newer one that is merely out of reach."""


def restore(platform: Platform, held: Claim, work_dir: Path, *, retries: RetryPolicy = RETRIES) -> int:
    """Restore the newest sound checkpoint to this machine and return its step; 0 to start from the beginning.

    Skips, newest first, checkpoints that are damaged, incomplete or of another training; an event names each with the reason, and it is
    retired here and in the store. An unavailable store raises ``Unavailable`` and is not damage: it never causes a restart from the
    beginning.
    """
    directory = work_dir / "checkpoints"
    if attempts.holds(platform, held):
        checkpoints.recover(directory)  # the workload does the same; this shows where it resumes
    skipped: list[tuple[int, str]] = []

    def skip(path: Path, why: str) -> None:
        log.warning("%s: %s", path.name, why)
        skipped.append((int(path.name.removeprefix("step-")), why))

    local = checkpoints.latest_valid(directory, held.spec, required=checkpoints.checkpoint_parts(held.spec), on_skip=skip)
    step = checkpoints.read_manifest(local).step if local else 0
    step = _newest_stored(platform, held, directory, step, skip, retries)
    if step and held.spec.optimization.early_stopping is not None:
        _have_best(platform, held, directory, step, skip, retries)
    _say(platform, held, skipped, step)
    checkpoint_retention.give_up_newer(platform, held, directory, step)
    return step


Skip = Callable[[Path, str], None]


def _newest_stored(platform: Platform, held: Claim, directory: Path, step: int, skip: Skip, retries: RetryPolicy) -> int:
    """Fetch the newest sound checkpoint newer than `step`; returns its step, or `step` if there is none."""
    for row in attempts.committed(platform, held.job_id):
        if row.final or row.step <= step:
            continue
        if _fetched(platform, held, row, directory, skip, retries):
            return int(row.step)
    return step


def _have_best(platform: Platform, held: Claim, directory: Path, step: int, skip: Skip, retries: RetryPolicy) -> None:
    """Fetch the checkpoint with the best validation too: an early stop returns to it."""
    state = json.loads((directory / checkpoints.step_name(step) / checkpoints.STATE).read_text())
    best = directory / checkpoints.step_name(int(state.get("best_step") or step))
    try:
        checkpoints.verify_for(best, held.spec, required=checkpoints.checkpoint_parts(held.spec))
    except IntegrityError as e:
        for row in attempts.committed(platform, held.job_id):
            if checkpoints.step_name(row.step) == best.name and _fetched(platform, held, row, directory, skip, retries):
                return
        skip(best, f"it holds the best weights so far, and is lost: {e.message}")


def _fetched(platform: Platform, held: Claim, row: Checkpoint, directory: Path, skip: Skip, retries: RetryPolicy) -> bool:
    target = directory / checkpoints.step_name(row.step)
    try:
        with_retries(lambda: _fetch(platform, held, row.object_prefix, target, row.manifest_sha256), retries)
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
        reasons[at] = why  # of two copies, report what was found in the store
    onward = f"Training continues from step {step}." if step else "Training starts from the beginning."
    for at, why in reasons.items():
        message = f"The checkpoint of step {at} was not used: {why}. {onward}"
        attempts.tell(platform, held, Event(code="checkpoint_skipped", level="warn", message=message, data={"step": at, "used": step}))
