"""Following one training workload: start or adopt it, relay what it reports, commit its checkpoints, judge its end.

The workload knows nothing of this module: it writes files, this reads them. Whoever follows may die; the next follower
adopts the workload by its name and goes on from the files.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from control_plane.protocols import Launcher, ObjectStore, Workload, WorkloadPhase, WorkloadStatus
from control_plane.service import attempts
from control_plane.service.attempts import Claim, Ending
from control_plane.service.platform import Platform
from ft_assets import layout
from ft_assets.datasets.packs.build import verify as verify_pack
from ft_assets.errors import IntegrityError, Unavailable
from ft_assets.training import checkpoints
from ft_assets.training.failures import HEARTBEAT_LIMIT_S, Evidence, ExitEvidence, StopReason, classify
from ft_assets.training.spec import RunFile

POLL_S = 0.5
"""Seconds between looks at the workload: what a tenant sees of a step lags by this much."""
STALLED_AFTER_S = 4 * HEARTBEAT_LIMIT_S
"""Seconds without a heartbeat after which a workload is ended and resumed. The thread that beats every 5 s is late on an
overloaded machine; four times the limit of an alert tells late from hung."""
MAX_LOG_BYTES = 4 * 2**20
"""Of an attempt's output; the end says why it ended."""
STOP_GRACE_S = 30.0
"""Seconds between SIGTERM and SIGKILL: a checkpoint is promised within 25."""


@dataclass(kw_only=True)
class Tail:
    """New lines of the job's ``metrics.jsonl``; a resume rewrites the file, so it is followed by step and not by offset."""

    path: Path
    last_step: int = 0
    last_validation: int = 0
    seen: tuple[int, int] = (0, 0)

    def read(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Metric lines and validation lines not returned before."""
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            return [], []
        if self.seen == (stat.st_mtime_ns, stat.st_size):
            return [], []
        self.seen = (stat.st_mtime_ns, stat.st_size)
        lines = [json.loads(line) for line in self.path.read_text().split("\n")[:-1] if line]
        steps = [m for m in lines if "loss" in m and m["step"] > self.last_step]
        validation = [m for m in lines if "eval_loss" in m and m["step"] > self.last_validation]
        self.last_step = max((m["step"] for m in steps), default=self.last_step)
        self.last_validation = max((m["step"] for m in validation), default=self.last_validation)
        return steps, validation


def job_dir(platform: Platform, job_id: str) -> Path:
    """Node-local directory of the job, shared by its attempts on this machine."""
    return platform.settings.work_dir / "jobs" / layout.checked_id(job_id)


def follow(platform: Platform, launcher: Launcher, held: Claim, *, say: Callable[[str], None]) -> Ending:
    """Run the attempt to its end and return how it ended; ``attempts.finish`` then moves the job."""
    work_dir = job_dir(platform, held.job_id)
    restored = _restore(platform, held, work_dir)
    say(f"attempt {held.attempt} starts from step {restored}")
    status = launcher.start_or_adopt(_workload(platform, held, work_dir))
    reported = attempts.mark_started(platform, held, from_step=restored, started_at=status.started_at)
    tail = Tail(path=work_dir / "metrics.jsonl", last_step=reported, last_validation=reported)
    follower = _Follower(platform=platform, held=held, work_dir=work_dir, tail=tail)
    while True:
        asked = attempts.stop_requested(platform, held.job_id)
        if asked and follower.stop_reason is None:
            follower.stop_reason = StopReason(asked)
            say(f"stopping: {asked} was requested")
            launcher.stop(held.workload, grace_s=STOP_GRACE_S)
        status = launcher.status(held.workload)
        if follower.stop_reason is None and status.phase is WorkloadPhase.RUNNING and follower.silence_s(status) > STALLED_AFTER_S:
            follower.stop_reason = StopReason.STALLED
            say(f"stopping: no heartbeat for {STALLED_AFTER_S:.0f} s")
            launcher.stop(held.workload, grace_s=STOP_GRACE_S)
        follower.relay()
        if status.phase in (WorkloadPhase.EXITED, WorkloadPhase.LOST, WorkloadPhase.ABSENT):
            follower.relay()
            _keep_log(platform, launcher, held)
            return follower.ending(status)
        time.sleep(POLL_S)


def _keep_log(platform: Platform, launcher: Launcher, held: Claim) -> None:
    """Store the end of the attempt's output with the job; the tenant reads it there."""
    log = launcher.read_log(held.workload)[-MAX_LOG_BYTES:]
    platform.objects.put_bytes(f"{layout.attempt_prefix(held.tenant, held.job_id, held.attempt)}/train.log", log)


def _restore(platform: Platform, held: Claim, work_dir: Path) -> int:
    """Bring pack and newest usable checkpoint to this machine; returns the step to go on from."""
    fetch_pack(platform, held.tenant, held.spec.pack_fingerprint)
    directory = work_dir / "checkpoints"
    local = checkpoints.latest_valid(directory, held.spec.sha256)
    local_step = checkpoints.read_manifest(local).step if local else 0
    for row in attempts.committed(platform, held.job_id):
        if row.step <= local_step or row.final:
            continue
        target = directory / checkpoints.step_name(row.step)
        shutil.rmtree(target, ignore_errors=True)
        download(platform.objects, row.object_prefix, target)
        try:
            if checkpoints.verify(target, required=checkpoints.RESUMABLE).spec_sha256 == held.spec.sha256:
                return int(row.step)
        except IntegrityError:
            pass
        shutil.rmtree(target, ignore_errors=True)
    return local_step


def fetch_pack(platform: Platform, tenant: str, fingerprint: str) -> Path:
    """The pack in this machine's cache, downloaded once and verified."""
    target = platform.settings.work_dir / "packs" / layout.checked_id(tenant) / layout.checked_id(fingerprint)
    try:
        verify_pack(target)
    except IntegrityError:  # absent, or damaged on this machine
        shutil.rmtree(target, ignore_errors=True)
        download(platform.objects, layout.pack_prefix(tenant, fingerprint), target, last="manifest.json")
        verify_pack(target)
    return target


def download(objects: ObjectStore, prefix: str, target: Path, *, last: str | None = None) -> None:
    """Copy every object under `prefix` to `target`; `last` names the file that marks it complete."""
    infos = sorted(objects.list(prefix), key=lambda i: i.key.endswith(f"/{last}"))
    for info in infos:
        objects.get_file(info.key, target / info.key.removeprefix(prefix + "/"))


def upload(objects: ObjectStore, directory: Path, prefix: str, *, last: str = "manifest.json") -> None:
    """Copy every file of `directory` under `prefix`, the manifest at the end."""
    paths = sorted((p for p in directory.rglob("*") if p.is_file()), key=lambda p: p.name == last)
    for path in paths:
        objects.put_file(f"{prefix}/{path.relative_to(directory).as_posix()}", path)


def _workload(platform: Platform, held: Claim, work_dir: Path) -> Workload:
    model = platform.models.get(held.model)
    if model.directory is None:
        raise Unavailable(f"base model {held.model} is not on this machine", code="base_model_unavailable")
    run_file = work_dir / f"run-a{held.attempt}.json"
    RunFile(
        spec=held.spec,
        attempt=held.attempt,
        base_model_dir=model.directory,
        pack_dir=fetch_pack(platform, held.tenant, held.spec.pack_fingerprint),
        work_dir=work_dir,
    ).write(run_file)
    return Workload(
        name=held.workload,
        module="ft_assets.training.runtime",
        run_file=run_file,
        work_dir=work_dir,
        num_processes=held.spec.world_size,
        torchrun=True,
        labels={"tenant": held.tenant, "job": held.job_id, "pool": held.pool},
    )


@dataclass(kw_only=True)
class _Follower:
    platform: Platform
    held: Claim
    work_dir: Path
    tail: Tail
    stop_reason: StopReason | None = None
    uploaded: set[str] = field(default_factory=set)

    def relay(self) -> None:
        """Pass on new metrics and newly committed checkpoints."""
        phase = self._phase()
        steps, validation = self.tail.read()
        attempts.record_progress(self.platform, self.held, steps, validation=validation, phase=phase)
        for directory in checkpoints.committed(self.work_dir / "checkpoints"):
            if directory.name not in self.uploaded:
                self._commit(directory)

    def silence_s(self, status: WorkloadStatus) -> float:
        """Seconds since the workload last gave a sign of life; before its first heartbeat, since its start."""
        try:
            last = (self.work_dir / "heartbeat.json").stat().st_mtime
        except FileNotFoundError:
            last = 0.0
        return time.time() - max(last, status.started_at or time.time())

    def _phase(self) -> str:
        try:
            return str(json.loads((self.work_dir / "heartbeat.json").read_text())["phase"])
        except (OSError, ValueError, KeyError):
            return ""

    def _commit(self, directory: Path) -> None:
        self.uploaded.add(directory.name)
        try:
            manifest = checkpoints.verify(directory, required=checkpoints.RESUMABLE)
        except IntegrityError:
            return  # retired by keep_last while it was read, or damaged: the one before it stands
        if manifest.attempt != self.held.attempt:
            return
        held = self.held
        prefix = layout.checkpoint_prefix(held.tenant, held.job_id, held.attempt, manifest.step)
        try:
            upload(self.platform.objects, directory, prefix)
        except FileNotFoundError:
            return
        attempts.record_checkpoint(
            self.platform,
            held,
            step=manifest.step,
            prefix=prefix,
            manifest_sha256=manifest_digest(directory),
            metrics=openai_metrics(manifest.step, manifest.metrics),
        )

    def ending(self, status: WorkloadStatus) -> Ending:
        """Judge the end of the workload; on success the final adapter is verified and committed first."""
        exit_ = ExitEvidence.read(self.work_dir, self.held.attempt)
        committed = attempts.committed(self.platform, self.held.job_id)
        last_step = max(self.tail.last_step, exit_.step if exit_ else 0)
        failure = classify(
            Evidence(
                phase=status.phase,
                exit=exit_,
                exit_code=status.exit_code,
                stop_reason=self.stop_reason,
                committed_step=committed[0].step if committed else 0,
                last_step=last_step,
                history=attempts.history(self.platform, self.held.job_id),
            )
        )
        tokens = exit_.trained_tokens if exit_ else 0
        if failure is None:
            self._commit_final(last_step)
        outcome = failure.code if failure else "succeeded"
        return Ending(outcome=outcome, failure=failure, last_step=last_step, trained_tokens=tokens, status=status)

    def _commit_final(self, step: int) -> None:
        final = self.work_dir / "final"
        manifest = checkpoints.verify(final)
        prefix = final_prefix(self.held.tenant, self.held.job_id)
        upload(self.platform.objects, final, prefix)
        attempts.record_checkpoint(
            self.platform,
            self.held,
            step=step,
            prefix=prefix,
            manifest_sha256=manifest_digest(final),
            metrics=openai_metrics(step, manifest.metrics),
            final=True,
        )


def final_prefix(tenant: str, job_id: str) -> str:
    """Where the finished adapter of a job lies until it is registered."""
    return f"{layout.job_prefix(tenant, job_id)}/final"


def manifest_digest(directory: Path) -> str:
    return hashlib.sha256((directory / "manifest.json").read_bytes()).hexdigest()


def openai_metrics(step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Checkpoint metrics under the names that OpenAI's clients know; what is not a number is left out, JSON has no word for it."""
    names = {"loss": "train_loss", "eval_loss": "full_valid_loss"}
    return {"step": step} | {names[k]: v for k, v in metrics.items() if k in names and v is not None and math.isfinite(v)}
