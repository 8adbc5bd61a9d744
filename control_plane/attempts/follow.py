"""Follows one training workload: start or adopt it, relay its reports, commit its checkpoints, judge its end.

The workload does not know this module: it writes files, which this module reads. A follower may die; the next one adopts the workload by
its name and continues from the files.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from control_plane.attempts import checkpoint_retention, checkpoint_transfer, endings, health
from control_plane.attempts import service as attempts
from control_plane.attempts.checkpoint_transfer import CHECKPOINT_RETRIES, FINAL_RETRIES, Uploader, restore
from control_plane.attempts.health import Liveness, Watch
from control_plane.attempts.log_upload import LogShipper
from control_plane.attempts.service import Claim, Ending, Reported
from control_plane.jobs import warm_starts
from control_plane.platform.context import Platform
from control_plane.platform.job_events import PROVISIONING, Event
from control_plane.platform.protocols import Launcher, Workload, WorkloadPhase, WorkloadStatus
from control_plane.platform.transfer import RetryPolicy, download
from ft_assets import layout
from ft_assets.base_models import CHANGED
from ft_assets.datasets.packs.build import verify as verify_pack
from ft_assets.errors import IntegrityError, NotAdmitted
from ft_assets.telemetry import correlation, logs, spans
from ft_assets.training import checkpoints
from ft_assets.training.failures import Evidence, ExitEvidence, Outcome, StopReason, classify
from ft_assets.training.reference_logps import verify as verify_reference
from ft_assets.training.spec import RunFile

log = logging.getLogger(__name__)

POLL_S = 0.5
"""Seconds between polls of the workload: a tenant sees a step this much later."""
STOPPING_POLL_S = 0.1
"""The same while it stops, because a job may be waiting for its GPUs."""
LOG_RETRIES = RetryPolicy(give_up_s=30.0)
STOP_GRACE_S = 30.0
"""Seconds between SIGTERM and SIGKILL; a checkpoint is promised within 25."""


@dataclass(kw_only=True)
class Tail:
    """New lines of the job's ``metrics.jsonl``. A resume rewrites the file, so lines are tracked by step, not by offset.

    Until then the file also holds steps that an earlier attempt made after its last checkpoint; those are lost, and older than `since`.
    """

    path: Path
    last_step: int = 0
    last_validation: int = 0
    from_step: int = 0
    since: float = 0.0
    seen: tuple[int, int] = (0, 0)

    def read(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return metric lines and validation lines not returned before."""
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            return [], []
        if self.seen == (stat.st_mtime_ns, stat.st_size):
            return [], []
        self.seen = (stat.st_mtime_ns, stat.st_size)
        lines = [m for m in self._lines() if m["step"] <= self.from_step or m["time"] >= self.since]
        steps = [m for m in lines if "loss" in m and m["step"] > self.last_step]
        validation = [m for m in lines if "eval_loss" in m and m["step"] > self.last_validation]
        self.last_step = max((m["step"] for m in steps), default=self.last_step)
        self.last_validation = max((m["step"] for m in validation), default=self.last_validation)
        return steps, validation

    def seconds_after(self, step: int) -> float:
        """Return the seconds that this attempt spent on the steps after `step`."""
        mine = [m for m in self._lines() if "loss" in m and m["time"] >= self.since]
        after = [m for m in mine if m["step"] > step]
        if not after:
            return 0.0
        began = max((m["time"] for m in mine if m["step"] <= step), default=after[0]["time"] - after[0].get("step_s", 0.0))
        return max(0.0, float(after[-1]["time"] - began))

    def began_at(self) -> float | None:
        """Return when the first step of this attempt began. If it took longer than the second, the excess counts as warm-up."""
        mine = [m for m in self._lines() if "loss" in m and m["time"] >= self.since]
        if not mine:
            return None
        took = float(mine[0].get("step_s", 0.0))
        return float(mine[0]["time"]) - (took if len(mine) == 1 else min(took, float(mine[1]["time"] - mine[0]["time"])))

    def ended_at(self, step: int) -> float | None:
        """Return when this attempt ended `step`."""
        ends = [float(m["time"]) for m in self._lines() if "loss" in m and m["time"] >= self.since and m["step"] == step]
        return max(ends, default=None)

    def _lines(self) -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in self.path.read_text().split("\n")[:-1] if line]
        except FileNotFoundError:
            return []


def job_dir(platform: Platform, job_id: str) -> Path:
    """Return the job's directory on this node, shared by its attempts on this machine."""
    return platform.settings.work_dir / "jobs" / layout.checked_id(job_id)


def take(platform: Platform, launcher: Launcher, tenant: str, job_id: str) -> Claim:
    """Claim the right to train a job. If its spec is unreadable, the job and its workload end here, because a retry cannot help."""
    try:
        return attempts.claim(platform, tenant, job_id)
    except NotAdmitted as error:
        if error.code == attempts.UNREADABLE:
            workload = attempts.workload_held(platform, job_id)
            if workload is not None:
                launcher.stop(workload, grace_s=STOP_GRACE_S)
            attempts.abandon(platform, tenant, job_id, error)
        raise


def follow(
    platform: Platform,
    launcher: Launcher,
    held: Claim,
    *,
    say: Callable[[str], None],
    retries: RetryPolicy = CHECKPOINT_RETRIES,
    final_retries: RetryPolicy = FINAL_RETRIES,
    stop_grace_s: float = STOP_GRACE_S,
) -> Ending:
    """Run the attempt to its end and return how it ended; ``attempts.finish`` then moves the job.

    `retries` bounds the retries of uploading the last checkpoint, `final_retries` those of the finished model. After the latter,
    ``Unavailable`` is raised: the step is replaced, and the next one adopts the workload and commits what it left.
    """
    correlation.bind(attempt=held.attempt)
    work_dir = job_dir(platform, held.job_id)
    restored = attempts.from_step(platform, held)
    if launcher.status(held.workload).phase is WorkloadPhase.ABSENT:  # a running workload already has its checkpoint, and writes new ones
        if (unbegun := _unbegun(platform, held)) is not None:
            say(f"not started: {unbegun.outcome}")
            return unbegun
        restored = restore(platform, held, work_dir)
        attempts.mark_restored(platform, held, from_step=restored)
        say(f"attempt {held.attempt} starts from step {restored}")
    try:
        if launcher.status(held.workload).phase is WorkloadPhase.ABSENT:
            attempts.record_provisioning(platform, held, "fetch")
        workload = _workload(platform, launcher, held, work_dir)
        attempts.must_hold(platform, held)  # fetching took a while
        status = launcher.start_or_adopt(workload)
    except NotAdmitted:
        if launcher.status(held.workload).phase is not WorkloadPhase.ABSENT:  # adopt it: no other follower has it any more
            launcher.stop(held.workload, grace_s=stop_grace_s)
        raise
    except IntegrityError as error:
        if error.code != CHANGED:
            raise
        say(error.message)
        return endings.changed_ending(held, error, last_step=restored)
    followed = attempts.mark_started(platform, held, from_step=restored, started_at=status.started_at)
    before = attempts.reported(platform, held, from_step=restored)
    tail = Tail(
        path=work_dir / "metrics.jsonl",
        last_step=min(followed, before.step),
        last_validation=min(followed, before.validation),
        from_step=restored,
        since=status.started_at or 0.0,
    )
    watch = health.begin(platform, held)
    uploader = Uploader(platform, held, work_dir, retries=retries)
    follower = _Follower(
        platform=platform,
        held=held,
        work_dir=work_dir,
        tail=tail,
        before=before,
        alive=Liveness(path=work_dir / "heartbeat.json", attempt=held.attempt, timeout_s=platform.settings.heartbeat_timeout_s),
        watch=watch,
        uploader=uploader,
        final_retries=final_retries,
        stop_grace_s=stop_grace_s,
    )
    shipper = _shipper(platform, launcher, held)
    shipper.start()
    try:
        return _follow_to_end(launcher, follower, shipper, say)
    finally:
        shipper.close()
        uploader.close()


def _unbegun(platform: Platform, held: Claim) -> Ending | None:
    """Return the ending of an attempt that was asked to stop before its workload started; None if it was not asked."""
    requested = attempts.requested_stop(platform, held)
    if requested is None:
        return None
    step = max((row.step for row in attempts.committed(platform, held.job_id)), default=0)
    failure = classify(Evidence(phase=WorkloadPhase.ABSENT, stop_reason=StopReason(requested), committed_step=step, last_step=step))
    assert failure is not None
    status = WorkloadStatus(name=held.workload, phase=WorkloadPhase.ABSENT)
    return Ending(outcome=failure.code, failure=failure, last_step=step, trained_tokens=0, status=status)


def _follow_to_end(launcher: Launcher, follower: _Follower, shipper: LogShipper, say: Callable[[str], None]) -> Ending:
    """Poll the workload until it ends, including after a stop was sent: saved checkpoints are still uploaded, and the follower's
    heartbeats continue."""
    platform, held, watch = follower.platform, follower.held, follower.watch
    stopping: Stopping | None = None
    while True:
        requested = attempts.requested_stop(platform, held)
        status = launcher.status(held.workload)
        if stopping is not None:
            stopping.check()
        elif requested or (stall := follower.alive.stall(status)):
            follower.stop_reason, follower.stall = (StopReason(requested), None) if requested else (StopReason.STALLED, stall)
            say(f"stopping: {follower.stall or f'{requested} was requested'}")
            silent = follower.stall is not None and follower.alive.is_silent(status)
            grace_s = platform.settings.heartbeat_grace_s if silent else follower.stop_grace_s
            stopping = Stopping(launcher, held.workload, grace_s=grace_s)
        follower.relay()
        watch.record_silence(silence_s=follower.alive.silence_s(status), running=status.phase is WorkloadPhase.RUNNING)
        if status.phase in (WorkloadPhase.EXITED, WorkloadPhase.LOST, WorkloadPhase.ABSENT):
            if stopping is not None:
                stopping.wait()
            follower.relay()
            ending = follower.ending(status)
            shipper.finish(LOG_RETRIES)
            watch.ended(ending, follower.work_dir / "final")
            return ending
        time.sleep(POLL_S if stopping is None else STOPPING_POLL_S)


def _shipper(platform: Platform, launcher: Launcher, held: Claim) -> LogShipper:
    """Start storing the attempt's output with the job while it is written, for the tenant to read."""
    prefix = layout.attempt_prefix(held.tenant, held.job_id, held.attempt)
    return LogShipper(platform.objects, launcher, workload=held.workload, prefix=prefix)


def fetch_pack(platform: Platform, tenant: str, fingerprint: str) -> Path:
    """Return the pack in this machine's cache, downloaded once and verified."""
    target = platform.settings.work_dir / "packs" / layout.checked_id(tenant) / layout.checked_id(fingerprint)
    try:
        verify_pack(target)
    except IntegrityError:  # missing or damaged on this machine
        shutil.rmtree(target, ignore_errors=True)
        download(platform.objects, layout.pack_prefix(tenant, fingerprint), target, last="manifest.json")
        verify_pack(target)
    return target


def fetch_reference(platform: Platform, tenant: str, key: str) -> Path:
    """Return the reference log-probabilities in this machine's cache, downloaded once and verified."""
    target = platform.settings.work_dir / "references" / layout.checked_id(tenant) / layout.checked_id(key)
    try:
        verify_reference(target)
    except IntegrityError:  # missing or damaged on this machine
        shutil.rmtree(target, ignore_errors=True)
        download(platform.objects, layout.reference_prefix(tenant, key), target, last="manifest.json")
        verify_reference(target)
    return target


def _workload(platform: Platform, launcher: Launcher, held: Claim, work_dir: Path) -> Workload:
    """Return the workload to run. Before it starts, every byte of the base model is verified against the digest that the spec names."""
    begins = launcher.status(held.workload).phase is WorkloadPhase.ABSENT  # a running workload has already loaded its model
    _, model_dir = platform.models.get_local(held.model, held.spec.base_digest, fresh=begins)
    run_file = work_dir / f"run-a{held.attempt}.json"
    RunFile(
        spec=held.spec,
        attempt=held.attempt,
        base_model_dir=model_dir,
        pack_dir=fetch_pack(platform, held.tenant, held.spec.pack_fingerprint),
        work_dir=work_dir,
        reference_dir=fetch_reference(platform, held.tenant, held.spec.reference) if held.spec.reference else None,
        warm_start_dir=None if held.spec.warm_start is None else warm_starts.fetch(platform, held.tenant, held.spec.warm_start),
    ).write(run_file)
    return Workload(
        name=held.workload,
        module="ft_assets.training.runtime",
        run_file=run_file,
        work_dir=work_dir,
        num_processes=held.spec.world_size,
        torchrun=True,
        devices=held.devices,
        env=_watched_as(held),
        secrets=(spans.HEADERS,),
        labels={"tenant": held.tenant, "job": held.job_id, "pool": held.pool},
    )


def _watched_as(held: Claim) -> dict[str, str]:
    """Environment that ties the workload's logs and spans to this attempt and its trace."""
    with correlation.scope(tenant=held.tenant, job=held.job_id, attempt=held.attempt):
        return logs.environment()


@dataclass(kw_only=True)
class _Follower:
    platform: Platform
    held: Claim
    work_dir: Path
    tail: Tail
    before: Reported
    alive: Liveness
    watch: Watch
    uploader: Uploader
    final_retries: RetryPolicy
    stop_grace_s: float
    stop_reason: StopReason | None = None
    stall: str | None = None
    offered: str = ""
    """Name of the newest checkpoint seen."""
    reported_phase: str = ""
    """The newest phase before the first step that was reported to the tenant."""

    def relay(self) -> None:
        """Relay new metrics and newly committed checkpoints."""
        phase = self.alive.phase()
        if phase in PROVISIONING and phase != self.reported_phase:
            self.reported_phase = phase
            attempts.record_provisioning(self.platform, self.held, phase)
        steps, validation = self.tail.read()
        self.alive.saw(steps)
        attempts.record_progress(self.platform, self.held, steps, validation=validation, phase=phase, before=self.before)
        self.watch.saw(steps, validation)
        newest = checkpoints.committed(self.work_dir / "checkpoints")[-1:]
        if newest and newest[0].name != self.offered:
            self.offered = newest[0].name
            self.uploader.offer(newest[0])

    def ending(self, status: WorkloadStatus) -> Ending:
        """Judge the end of the workload, once its last checkpoint is stored or the store has failed for too long; on success, commit the
        finished model first."""
        self.uploader.drain(abandon=lambda: attempts.requested_stop(self.platform, self.held) == StopReason.CANCEL)
        exit_ = ExitEvidence.read(self.work_dir, self.held.attempt)
        committed = attempts.committed(self.platform, self.held.job_id)
        last_step = max(self.tail.last_step, self.tail.from_step, exit_.step if exit_ else 0)
        failure = classify(
            Evidence(
                phase=status.phase,
                exit=exit_,
                exit_code=status.exit_code,
                stop_reason=self.stop_reason,
                stall=self.stall,
                spec=self.held.spec,
                committed_step=committed[0].step if committed else 0,
                last_step=last_step,
                history=endings.history(self.platform, self.held.job_id),
            )
        )
        tokens = exit_.trained_tokens if exit_ else 0
        seen = status.ended_at is not None
        if not seen:
            status = replace(status, ended_at=self.alive.last_sign() or status.started_at)
        if failure is None:
            checkpoint_transfer.commit_final(self.platform, self.held, self.work_dir / "final", step=last_step, retries=self.final_retries)
        if failure is not None and failure.code == Outcome.DISK_FULL:
            self._free_space()
        outcome = failure.code if failure else "succeeded"
        again_s = self.tail.seconds_after(committed[0].step if committed else 0)
        own = [row.step for row in committed if row.attempt == self.held.attempt]
        return Ending(
            outcome=outcome, failure=failure, last_step=last_step, trained_tokens=tokens, status=status, seen=seen, again_s=again_s,
            began_at=self.tail.began_at(), kept_until=self.tail.ended_at(own[0]) if own else None,
        )  # fmt: skip

    def _free_space(self) -> None:
        freed = checkpoint_retention.free_machine(self.platform, self.held.job_id)
        message = f"The disk of the machine was full; {freed / 2**20:.0f} MiB of old checkpoints were removed from it."
        attempts.tell(self.platform, self.held, Event(code="disk_space_freed", level="warn", message=message, data={"freed_bytes": freed}))


class Stopping:
    """A stop in progress: SIGTERM, and SIGKILL after `grace_s`. The follower may die meanwhile; sending a stop again is harmless."""

    def __init__(self, launcher: Launcher, workload: str, *, grace_s: float) -> None:
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._stop, args=(launcher, workload, grace_s), name=f"stop-{workload}", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error of the stop, if any."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait until the stop is done; raises its error."""
        self._thread.join()
        self.check()

    def _stop(self, launcher: Launcher, workload: str, grace_s: float) -> None:
        try:
            launcher.stop(workload, grace_s=grace_s)
        except Exception as error:  # raised by check()
            self._error = error
