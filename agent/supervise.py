"""One attempt of a training workload on one node: stage in, meet the other nodes, run, watch, upload, report.

The agent of node 0 leads: it restores the checkpoint, and stores metrics, the log and the finished model.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agent import node_space
from agent.inputs import NodeInputs, Stream
from agent.messages import Exit, Facts, Notice, Reported, Restored
from agent.prewarmed_trainer import PrewarmedTrainer
from agent.process_group import ONE_NODE, ProcessGroup, free_address, training_command
from agent.reporter import Reporter, State
from agent.restore import restore
from agent.training_files import KEPT_STEPS, Liveness, Metrics
from agent.uploads import checkpoint_uploads
from agent.uploads.checkpoint_uploads import Uploader
from agent.uploads.log_upload import LogUpload
from agent.uploads.reference_upload import ReferenceUpload
from agent.workload_supervisor import FETCH, OUTSIDE, TICK_S, Stop, WorkloadSupervisor, as_error, environment
from core.errors import Unavailable
from core.retries import RetryPolicy, with_retries
from core.workload import Workload
from engine.training import ExitEvidence, Outcome, StopReason, TrainingSpec, committed_checkpoints, lost_another_rank

API_RETRIES = RetryPolicy(first_s=0.5, most_s=5.0, give_up_s=600.0)
PEER = "peer"
"""Why a workload stops: another node of its gang has ended."""

log = logging.getLogger(__name__)


class Supervisor(WorkloadSupervisor):
    """Runs one training to its end."""

    checkpoint_retries, final_retries = checkpoint_uploads.CHECKPOINT_RETRIES, checkpoint_uploads.FINAL_RETRIES
    _reference: ReferenceUpload

    def __init__(self, workload: Workload, *, token: str, node: int, node_dir: Path) -> None:
        super().__init__(workload, token=token, node=node, node_dir=node_dir)
        self._prewarmed = PrewarmedTrainer.of_environment()
        self._spec = TrainingSpec.from_dict(dict(workload.run["spec"]))
        self._log_file = self.job_dir / f"train-a{workload.attempt}.log"
        self._metrics = Metrics(path=self.job_dir / "metrics.jsonl", from_step=0, since=time.time())
        log_upload = LogUpload(self._api, self._log_file) if self._leads else None
        self._reporter = Reporter(
            api=self._api, log_upload=log_upload, state=self._state, unsent=self._metrics.unsent, hangs=self._hangs, node=node
        )
        self._address = self._leader = ""
        self._uploader: Uploader | None = None
        self._liveness: Liveness | None = None
        self._stream: Stream | None = None

    @property
    def _leads(self) -> bool:
        return self.node == 0

    def _supervise(self) -> Exit:
        return self._train(self._staged())

    def _stopped(self, stop: Stop) -> Exit:
        """Without a request of the control plane, as a training process would have said it."""
        if stop.reason != OUTSIDE:
            return Exit(exit_code=None, evidence=None, stop_reason=_reported(stop.reason), follows=stop.reason == PEER)
        return Exit(exit_code=None, evidence=asdict(self._taken_back(self._metrics.from_step)), stop_reason=None)

    def _runs(self) -> bool:
        return self._liveness is not None

    def _staged(self) -> Path:
        """Stage everything in, and meet the other nodes; returns the run file."""
        inputs = self._inputs()
        run_file = self._prepared(lambda: self._prepare(inputs))
        if self.workload.num_nodes > 1:
            self._meet()
        self._stream = inputs.stream(self._spec, self._metrics.from_step, make_room=lambda: self._make_room(trains=True))
        return run_file

    def _meet(self) -> None:
        """Wait until every node of the gang can start: a rank does not wait for another longer than some minutes."""
        self._address = free_address(self.workload.report_to)
        while not (answer := self._reporter.answer).leader:
            self._check_stop()
            time.sleep(TICK_S)
        self._leader, self._metrics.from_step = answer.leader, answer.from_step

    def _prepare(self, inputs: NodeInputs) -> Path:
        """Stage inputs in, and the checkpoint on the first node, from which the ranks of the others get it; returns the run file."""
        found = inputs.stage(self._check_stop)
        self._check_stop()
        if self._leads:
            restored = restore(self._objects, self._spec, self.workload.checkpoints, self.job_dir / "checkpoints")
            with_retries(lambda: self._restored(restored), API_RETRIES)
            self._metrics.from_step = restored.step
            self._check_stop()
        stores = self._leads and "reference_dir" not in found  # what was fetched is stored; each node of a gang computes the same ones
        prefix = self.workload.reference_prefix if stores else ""
        self._reference = ReferenceUpload(self._objects, self.job_dir / "reference", prefix=prefix, workload=self.workload.name)
        run_file = self.job_dir / f"run-a{self.workload.attempt}.json"
        paths = {name: str(path) for name, path in found.items()}
        run_file.write_text(json.dumps({**self.workload.run, **paths, "work_dir": str(self.job_dir)}))
        return run_file

    def command(self, run_file: Path) -> list[str]:
        """Return the command that starts the training process."""
        return training_command(
            self.workload.module, run_file, num_processes=self.workload.processes[self.node], node=self.node,
            num_nodes=self.workload.num_nodes, leader=self._leader,
        )  # fmt: skip

    def _fits_prewarmed(self) -> bool:
        """Whether a prewarmed process equals a fresh one: it is one rank, and has hidden what quantization needs (``import_stack``)."""
        in_8_or_4_bits = self._spec.adapter == "qlora" or self._spec.optimization.optimizer == "adamw_8bit"
        return self.workload.processes == (1,) and not in_8_or_4_bits and not self._spec.strategy.startswith("zero")

    def _restored(self, restored: Restored) -> None:
        self._check_stop()
        known = self._api.restored(restored)  # what earlier attempts reported of this one's steps is stored once, and sent all the same
        self._reporter.accepted = Reported(step=min(known.step, restored.step), validation=min(known.validation, restored.step))

    def _train(self, run_file: Path) -> Exit:
        env = environment() | (ONE_NODE if self.workload.num_nodes == 1 else {})
        prewarmed = self._prewarmed if self._fits_prewarmed() else None
        group = ProcessGroup(self.command(run_file), cwd=self.job_dir, log=self._log_file, env=env, prewarmed=prewarmed)
        self._metrics.since = group.started_at
        heartbeat = self.job_dir / "heartbeat.json"
        liveness = self._liveness = Liveness(
            path=heartbeat, attempt=self.workload.attempt, timeout_s=self.workload.heartbeat_timeout_s, started_at=group.started_at
        )
        uploader = self._uploader = Uploader(
            self.workload, self._api, self._objects, self.job_dir, node=self.node, resume_sha256=self._spec.resume_sha256,
            tell=self._reporter.tell, before_commit=self._reporter.flush, alone=lambda: self._reporter.answer.alone,
            retries=self.checkpoint_retries,
        )  # fmt: skip
        try:
            reason, stall = self._watch(group, liveness, uploader)
            return self._ended(group, uploader, reason, stall)
        finally:
            if self._stream:
                self._stream.close()
            uploader.close()
            group.kill()

    def _watch(self, group: ProcessGroup, liveness: Liveness, uploader: Uploader) -> tuple[str | None, str | None]:
        """Watch the training process until it has ended; returns why it was stopped, and what was observed if it stalled."""
        reason = stall = None
        offered = ""
        while group.exit_code is None:
            self._check_fenced()
            if self._stream and self._stream.error and reason is None:
                reason = OUTSIDE  # the steps so far are kept
                group.stop(self.workload.grace_s)
            self._reference.look()
            try:
                offered = self._offer(uploader, offered)
                liveness.saw(self._metrics.newest_times(KEPT_STEPS))
            except (OSError, ValueError) as error:  # training goes on, whatever the disk does to its watcher
                log.warning("the files of the training cannot be read now: %s", error)
            if reason is None:
                wanted = self._wanted_stop()
                if wanted is None and (stall := liveness.stall()) is not None:
                    wanted = StopReason.STALLED
                if wanted is not None:
                    reason = wanted
                    log.info("stopping: %s", stall or wanted)
                    group.stop(1.0 if stall and liveness.is_silent() else self.workload.grace_s)
            group.enforce()
            time.sleep(TICK_S)
        self._offer(uploader, offered)
        return reason, stall

    def _offer(self, uploader: Uploader, offered: str) -> str:
        """Read new metrics, and queue the newest checkpoint for upload unless it was already; returns its name."""
        newest = committed_checkpoints(self.job_dir / "checkpoints")[-1:]
        if self._leads:
            self._metrics.read()  # now: a checkpoint appears after the metrics of its steps
        if newest and newest[0].name != offered:
            uploader.offer(newest[0])
            return newest[0].name
        return offered

    def _ended(self, group: ProcessGroup, uploader: Uploader, reason: str | None, stall: str | None) -> Exit:
        """Store what the process left, and say how it ended."""
        code = group.exit_code
        uploader.drain(abandon=lambda: self._reporter.fenced.is_set() or self._reporter.answer.stop == StopReason.CANCEL)
        self._reference.finish()
        self._check_fenced()
        evidence = ExitEvidence.read(self.job_dir, self.workload.attempt)
        error: Mapping[str, Any] | None = None
        if self._leads and evidence is not None and evidence.outcome is Outcome.SUCCEEDED:
            step = max(self._metrics.last_step, evidence.step)
            try:
                checkpoint_uploads.commit_final(
                    self.workload, self._api, self._objects, self.job_dir / "final", step=step, tell=self._reporter.tell,
                    check=self._check_cancelled, retries=self.final_retries,
                )  # fmt: skip
            except (Unavailable, OSError) as failed:
                error, evidence = as_error(failed), None
        elif reason == OUTSIDE and self._stream and self._stream.error:
            error, evidence = as_error(self._stream.error), None
        elif reason == OUTSIDE and evidence is None:  # it ended before it could say so, such as while it still imported its modules
            evidence = self._taken_back(self._metrics.last_step)
        if evidence is not None and evidence.outcome is Outcome.DISK_FULL:
            self._make_room()
        body = None if evidence is None else asdict(evidence)
        follows = reason == PEER or (body is None and lost_another_rank(self.job_dir, self.workload.attempt))
        return Exit(exit_code=code, evidence=body, stop_reason=_reported(reason), stall=stall, error=error, follows=follows)

    def _check_cancelled(self) -> None:
        """Raise if nobody needs the finished model: the attempt was released, or its job was cancelled."""
        self._check_fenced()
        if self._reporter.answer.stop == StopReason.CANCEL:
            raise Stop(StopReason.CANCEL)

    def _taken_back(self, step: int) -> ExitEvidence:
        return ExitEvidence(outcome=Outcome.PREEMPTED, step=step, total_steps=0, message="the node took the workload back")

    def _make_room(self, *, trains: bool = False) -> None:
        freed = node_space.free(self._node_dir, self.workload.job, trains=trains)
        message = f"The disk of the machine was full; {freed / 2**20:.0f} MiB of old checkpoints were removed from it."
        self._reporter.tell(Notice(code="disk_space_freed", level="warn", message=message, data={"freed_bytes": freed}))

    def _wanted_stop(self) -> str | None:
        return super()._wanted_stop() or (PEER if self._reporter.answer.peer_failed else None)

    def _state(self) -> State:
        """Return what the next heartbeat says; called by the reporter's thread."""
        metrics, liveness, uploader = self._metrics, self._liveness, self._uploader
        if liveness is None or uploader is None:
            return State(phase=FETCH, facts=Facts(last_step=metrics.from_step), address=self._address)
        own = max(uploader.committed, default=None)
        facts = Facts(
            last_step=metrics.last_step, began_at=metrics.began_at(), again_s=metrics.seconds_after(uploader.newest),
            kept_until=None if own is None else metrics.ended_at(own), silence_s=liveness.silence_s(),
        )  # fmt: skip
        return State(phase=liveness.phase() or FETCH, facts=facts, address=self._address)


def _reported(reason: str | None) -> str | None:
    """Return the reason for a stop as the control plane knows it."""
    return None if reason in (OUTSIDE, PEER) else reason
