"""Uploads checkpoints while training runs, one at a time and newest first, and at the end the finished model.

Of a sharded training on several nodes, each agent uploads the part of its node, and that part's manifest last. The leader commits a
checkpoint once all parts are stored. Nodes whose uploads take longer than training needs for the next checkpoint may skip different ones;
then a later one is the first that all have stored, at the latest the last one.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agent.api_client import UNREACHABLE, ApiClient, Fenced
from agent.messages import Commit, Notice
from agent.objects import Objects
from core.durable_files import sha256_of
from core.errors import Conflict, FtError, IntegrityError, Unavailable
from core.retries import FAILURES, RetryPolicy
from core.telemetry.redaction import without_credentials
from core.workload import Workload
from engine.training import (
    CHECKPOINT_MANIFEST,
    CheckpointManifest,
    check_checkpoint_parts,
    encoded_manifest,
    manifest_digest,
    merged_manifest,
    parse_manifest,
    part_manifest,
    read_manifest,
    step_name,
)

POLL_S = 0.2
CHECKPOINT_RETRIES = RetryPolicy(give_up_s=120.0)
"""Time limit of an attempt's last checkpoint, whose GPUs are held meanwhile; other uploads have no limit."""
FINAL_RETRIES = RetryPolicy(give_up_s=600.0)
"""Time limit of the finished model. After it the attempt ends; the next one finds the model's last checkpoint on this node."""

API_LIMIT_S = 900.0
"""Time limit of both while it is the API that does not answer."""

JOIN_S = 0.5
"""Seconds between two looks at which parts the other nodes have stored."""
MAX_UNJOINED = 4
"""Checkpoints whose own part is stored and that wait for the others."""

log = logging.getLogger(__name__)
Tell = Callable[[Notice], None]


def store_directory(
    objects: Objects, directory: Path, prefix: str, sent: set[str], *, on_bytes: Callable[[], None] = lambda: None
) -> CheckpointManifest:
    """Store a committed directory, its manifest last; files named in `sent` are stored already, and those stored now are added to it.

    Every byte is held against the manifest. ``IntegrityError`` if the directory is damaged on this node.
    """
    manifest = read_manifest(directory)
    check_checkpoint_parts(manifest, directory)
    for name in sorted(set(manifest.files) - sent):
        objects.store(f"{prefix}/{name}", directory / name, manifest.files[name], on_bytes=on_bytes)
        sent.add(name)
    objects.store(f"{prefix}/{_stored_name(manifest)}", directory / CHECKPOINT_MANIFEST, None)
    return manifest


def _stored_name(manifest: CheckpointManifest) -> str:
    return part_manifest(manifest.node) if manifest.num_nodes > 1 else CHECKPOINT_MANIFEST


def commit(api: ApiClient, what: Commit, sent: set[str]) -> None:
    """Commit stored objects; ``Unavailable`` if the store does not have them all, which are then no longer in `sent`."""
    try:
        api.commit(what)
    except Conflict as error:
        sent.clear()
        raise Unavailable(error.message, code="object_store_unavailable") from error


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pinned:
    directory: Path
    """Directory of hard links to a checkpoint's files, which keep them while the training process retires it."""
    manifest: CheckpointManifest


class Uploader:
    """A background thread that uploads and commits the checkpoints of one attempt.

    One checkpoint waits while another is sent: a newer one replaces one that waits, or one whose upload fails. The one with the best
    validation waits behind it, if an early stop would return to it. `before_commit` reports what the checkpoint contains: a committed one
    never outruns its metrics. ``close`` ends the thread; unsent checkpoints stay on this node. `alone` says whether the agents of all other
    nodes have ended.
    """

    def __init__(
        self, workload: Workload, api: ApiClient, objects: Objects, work_dir: Path, *, node: int, resume_sha256: str, tell: Tell,
        before_commit: Callable[[], None], alone: Callable[[], bool], retries: RetryPolicy,
    ) -> None:  # fmt: skip
        self._workload, self._api, self._objects, self._tell, self._retries = workload, api, objects, tell, retries
        self._node, self._resume_sha256, self._before_commit, self._alone = node, resume_sha256, before_commit, alone
        self._pins = work_dir / "uploads"
        shutil.rmtree(self._pins, ignore_errors=True)
        self._known = {row.step: (row.attempt, row.manifest_sha256) for row in workload.checkpoints}
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._waiting: list[_Pinned] = []
        self._pinned_steps: set[int] = set()
        self._sending: _Pinned | None = None
        self._closed = False
        self._thread: threading.Thread | None = None
        self._failing_since: float | None = None
        self._api_is_away = False
        self._moved_at = time.monotonic()
        self._unjoined: dict[int, CheckpointManifest] = {}
        """This node's stored parts, by step, of checkpoints that wait for the parts of other nodes."""
        self._joined_at = 0.0
        """When the last look at the other parts began."""

    @property
    def committed(self) -> Sequence[int]:
        """Steps of the checkpoints that this attempt has committed."""
        return [step for step, (attempt, _) in dict(self._known).items() if attempt == self._workload.attempt]

    @property
    def newest(self) -> int:
        """Step of the job's newest committed checkpoint; 0 for none."""
        return max(self._known, default=0)

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
            self._thread = threading.Thread(target=self._work, name="upload", daemon=True)
            self._thread.start()
        return True

    def drain(self, *, abandon: Callable[[], bool] = lambda: False) -> bool:
        """Wait until everything is sent, and joined unless no part can come any more; False if `abandon` returned true or the store failed
        for too long."""
        self._moved_at = time.monotonic()
        alone_since = math.inf
        while True:
            with self._changed:
                if not self._waiting and self._sending is None:
                    if not self._unjoined or self._joined_at > alone_since:
                        return not self._unjoined
                    if self._alone():
                        alone_since = min(alone_since, time.monotonic())
                    else:
                        self._moved_at = time.monotonic()  # others still send, and are watched
                self._changed.wait(POLL_S)
            if abandon():
                return False
            stuck_since = self._moved_at if self._failing_since is None else self._failing_since
            limit_s = max(self._retries.give_up_s, API_LIMIT_S) if self._api_is_away else self._retries.give_up_s
            if time.monotonic() - stuck_since > limit_s:
                step = max((p.manifest.step for p in (*self._waiting, self._sending) if p is not None), default=0)
                message = f"The checkpoint of step {step} could not be uploaded; it stays on the machine that trained, and is used there."
                self._tell(Notice(code="checkpoint_upload_abandoned", level="warn", message=message, data={"step": step}))
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
        except (OSError, IntegrityError) as error:  # retired meanwhile, or damaged: keep the one before it
            log.debug("%s is not uploaded: %s", directory.name, error)
            shutil.rmtree(pin, ignore_errors=True)
            return None
        if not self._is_news(manifest, manifest_digest(pin)):
            shutil.rmtree(pin, ignore_errors=True)
            return None
        self._pinned_steps.add(manifest.step)
        return _Pinned(directory=pin, manifest=manifest)

    def _is_news(self, manifest: CheckpointManifest, digest: str) -> bool:
        """Whether the store lacks it, including one that an earlier attempt left only on this node.

        Of several nodes, the first one sends what is whole, and each its parts of this attempt: others would not fit together.
        """
        if manifest.resume_sha256 != self._resume_sha256:
            return False
        if manifest.attempt != self._workload.attempt if manifest.num_nodes > 1 else self._node > 0:
            return False
        attempt, known = self._known.get(manifest.step, (0, ""))
        return bool(known != digest and manifest.attempt > attempt)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    if not self._changed.wait(JOIN_S if self._unjoined else None):
                        break
                if self._closed:
                    return
                sending = self._sending = self._waiting.pop() if self._waiting else None
            try:
                if sending is not None:
                    self._send(sending)
                self._join()
            except Fenced:
                self._closed = True
            except Exception:
                log.exception("upload of %s failed", sending.directory.name if sending else "a whole manifest")
            finally:
                with self._changed:
                    if sending is not None and sending not in self._waiting:
                        shutil.rmtree(sending.directory, ignore_errors=True)
                    self._sending = None
                    self._changed.notify_all()

    def _send(self, item: _Pinned) -> None:
        step, failures, sent = item.manifest.step, 0, set[str]()
        while not self._closed:
            try:
                self._commit(item, sent)
                return
            except IntegrityError as error:
                log.warning("the checkpoint of step %s is damaged: %s", step, error.message)
                message = (
                    f"The checkpoint of step {step} is damaged on the machine that trained, and was not uploaded; the one before stands."
                )
                self._tell(Notice(code="checkpoint_skipped", level="warn", message=message, data={"step": step}))
                return
            except FAILURES as error:
                self._api_is_away = isinstance(error, Unavailable) and error.code == UNREACHABLE
                if not self._api_is_away:  # which says so elsewhere
                    self._failed(step, error)
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._newer_waits(step), timeout=self._retries.wait_s(failures))
                if self._newer_waits(step):
                    self._wait(item)  # after it, or not at all: the newer one matters more
                    return
            failures += 1

    def _newer_waits(self, step: int) -> bool:
        return any(p.manifest.step > step for p in self._waiting)

    def _commit(self, item: _Pinned, sent: set[str]) -> None:
        step, digest = item.manifest.step, manifest_digest(item.directory)
        prefix = f"{self._workload.checkpoint_prefix}/{step_name(step)}"
        before = set(sent)
        try:
            store_directory(self._objects, item.directory, prefix, sent, on_bytes=self._moved)
        finally:
            if sent - before:
                self._recovered()
        if self._closed:
            return
        if item.manifest.num_nodes == 1:
            self._before_commit()
            commit(self._api, Commit(step=step, manifest_sha256=digest), sent)
            self._known[step] = (self._workload.attempt, digest)
        elif self._node == 0:
            self._unjoined[step] = item.manifest
            self._forget_unjoined(sorted(self._unjoined)[:-MAX_UNJOINED])
        self._api_is_away = False
        self._recovered()

    def _join(self) -> None:
        """Commit the newest checkpoint of which every node has stored its part; older ones are not needed any more."""
        began = time.monotonic()
        for step in sorted(self._unjoined, reverse=True):
            try:
                if self._commit_whole(step):
                    self._forget_unjoined([older for older in self._unjoined if older <= step])
                    break
            except (IntegrityError, Conflict) as error:
                log.warning("the parts of step %d make no checkpoint: %s", step, error.message)
                self._forget_unjoined([step])
            except FAILURES as error:
                log.warning("step %d cannot be committed yet: %s", step, error)
        self._joined_at = began

    def _commit_whole(self, step: int) -> bool:
        """Commit the checkpoint of `step`, whose own part is stored; returns False while the part of another node is missing."""
        own, prefix = self._unjoined[step], f"{self._workload.checkpoint_prefix}/{step_name(step)}"
        keys = tuple(f"{prefix}/{part_manifest(node)}" for node in range(1, own.num_nodes))
        if len(self._api.read_urls(keys).urls) < len(keys):
            return False
        parts = [own]
        for key in keys:
            path = self._pins / Path(key).name
            self._objects.fetch(key, path)
            parts.append(parse_manifest(path.read_bytes(), name=key))
        whole = self._pins / CHECKPOINT_MANIFEST
        whole.write_bytes(encoded_manifest(merged_manifest(parts)))
        self._objects.store(f"{prefix}/{CHECKPOINT_MANIFEST}", whole, None)
        self._before_commit()
        digest = sha256_of(whole)
        self._api.commit(Commit(step=step, manifest_sha256=digest))
        self._known[step] = (self._workload.attempt, digest)
        return True

    def _forget_unjoined(self, steps: Iterable[int]) -> None:
        with self._changed:
            for step in steps:
                self._unjoined.pop(step, None)

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


def commit_final(
    workload: Workload, api: ApiClient, objects: Objects, directory: Path, *, step: int, tell: Tell, check: Callable[[], None],
    retries: RetryPolicy,
) -> None:  # fmt: skip
    """Store and commit the finished model; retries while the store fails, then raises ``Unavailable``.

    The limit counts from the last file that was stored; while the API is away, it is :data:`API_LIMIT_S`. `check` is called again and again
    meanwhile, and ends the upload by raising.
    """
    sent, failed_at = set[str](), list[float]()
    moved_at, failures = time.monotonic(), 0
    while True:
        before = len(sent)
        try:
            check()
            store_directory(objects, directory, workload.final_prefix, sent, on_bytes=check)
            commit(api, Commit(step=step, manifest_sha256=manifest_digest(directory), final=True), sent)
            break
        except FAILURES as error:
            is_api = isinstance(error, Unavailable) and error.code == UNREACHABLE
            if len(sent) > before:
                moved_at = time.monotonic()
            if not is_api and not failed_at:
                tell(upload_failed("the finished model", step, error))
                failed_at.append(time.monotonic())
            if time.monotonic() - moved_at > (max(retries.give_up_s, API_LIMIT_S) if is_api else retries.give_up_s):
                if isinstance(error, Unavailable):
                    raise
                raise Unavailable(str(error), code="object_store_unavailable") from error
            time.sleep(retries.wait_s(failures))
            failures += 1
    if failed_at:
        tell(upload_recovered(time.monotonic() - failed_at[0]))


def _best_step(manifest: CheckpointManifest) -> int | None:
    """Return the step that an early stop at this checkpoint would return to."""
    best = manifest.metrics.get("best_step")
    return None if best is None else int(best)


def upload_failed(what: str, step: int, error: Exception) -> Notice:
    """Report to the tenant that the upload is delayed; the cause is logged for operators."""
    reason = error.message if isinstance(error, FtError) else f"{type(error).__name__}: {error}"
    log.warning("the object store does not take %s: %s", what, without_credentials(reason))
    message = f"The object store is not accepting {what}. Training continues; the upload is retried."
    return Notice(code="checkpoint_upload_failed", level="warn", message=message, data={"step": step})


def upload_recovered(lasted_s: float) -> Notice:
    message = f"The object store takes checkpoints again, after {lasted_s:.0f} s."
    return Notice(code="checkpoint_upload_recovered", level="info", message=message)
