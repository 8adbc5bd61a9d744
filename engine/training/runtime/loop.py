"""The training loop: steps, health checks, metrics, checkpoints, and stopping at any moment. Its position in the data is the step.

await       the step's rows, which may still be on their way; ranks exchange: has each its rows, was any asked to stop
measure     what the loss needs of the whole step before its first micro-batch (KTO's KL estimate)
compute     forward and backward of each micro-batch; no state changes, so a stop may occur anywhere
agree       ranks exchange: is every loss finite, was any rank asked to stop
apply       clip, check, optimizer step: the only moment at which weights change, under a lock
report      metrics line, then a checkpoint if due, then the stop if requested
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch

from core.telemetry import spans
from engine.training.data_order import DataOrder
from engine.training.runtime.checkpoint_writer import Saver
from engine.training.runtime.collectives import reduce_sum
from engine.training.runtime.model import device_metrics, precision
from engine.training.runtime.objectives import Batch, Objective
from engine.training.runtime.parallel import Strategy
from engine.training.runtime.randomness import seed_micro_batch
from engine.training.runtime.run_errors import Diverged, Preempted
from engine.training.runtime.status_files import Heartbeat, MetricsLog, Progress
from engine.training.runtime.stop_request import StopRequest
from engine.training.spec import EarlyStopping, TrainingSpec

log = logging.getLogger(__name__)

EXPLODED_OVER_UNIFORM = 2.0
"""An untrained model has loss ln(vocabulary); ten steps at twice that are not noise."""
EXPLODED_STEPS = 10
MAX_SKIPPED_STEPS = 20
"""fp16 only: consecutive steps that loss scaling may skip before the run counts as diverged; its scale starts at 2^16."""
UTILIZATION_EVERY_S = 5.0
"""Seconds between queries: asking the driver costs a millisecond."""
STOP_CHECK_S = 0.5
"""Seconds between two looks for a stop while the data is waited for."""


@dataclass(kw_only=True)
class RunState:
    """State that a resume needs besides weights, optimizer and schedule. ``step`` optimizer steps are done."""

    step: int = 0
    num_tokens: int = 0
    """Tokens read by the model over all ranks and attempts."""
    best_eval_loss: float | None = None
    best_step: int | None = None
    stale_validations: int = 0
    """Consecutive validations without improvement."""
    validation_due: bool = False
    """A stop prevented the validation due at this step: the resume makes up for it, because early stopping would otherwise see other
    losses."""
    ended_early: bool = False
    """Early stopping has ended the run at this step."""
    skipped_steps: int = 0
    """fp16: consecutive steps that loss scaling has skipped."""
    recent_losses: list[float] = field(default_factory=list)

    def take_validation(self, loss: float, early: EarlyStopping | None) -> bool:
        """Compare a validation with the best one; returns whether there was no improvement for too long."""
        if self.best_eval_loss is None or loss < self.best_eval_loss - (early.min_delta if early else 0.0):
            self.best_eval_loss, self.best_step, self.stale_validations = loss, self.step, 0
        else:
            self.stale_validations += 1
        return early is not None and self.stale_validations >= early.patience


@dataclass(frozen=True, kw_only=True, slots=True)
class StepData:
    """The micro-batches of a step on this rank, and what those of all ranks add up to."""

    batches: list[Batch]
    weight: float
    num_tokens: int
    began: float
    """Monotonic time at which the step began to wait for them."""
    waited_s: float
    """Seconds until every rank had its micro-batches."""


class Loop:
    def __init__(
        self,
        spec: TrainingSpec,
        *,
        order: DataOrder,
        objective: Objective,
        strategy: Strategy,
        saver: Saver,
        metrics: MetricsLog,
        progress: Progress,
        heartbeat: Heartbeat,
        stop: StopRequest,
        vocab_size: int,
    ) -> None:
        self.spec, self.order, self.objective, self.strategy, self.saver = spec, order, objective, strategy, saver
        self.metrics, self.progress, self.heartbeat, self.stop = metrics, progress, heartbeat, stop
        self.total_steps = progress.total_steps
        self.state = RunState()
        self._loss_limit = EXPLODED_OVER_UNIFORM * math.log(vocab_size)
        self._recent: deque[float] = deque(maxlen=EXPLODED_STEPS)
        self._between_steps = threading.RLock()
        self._last: dict[str, Any] = {}
        self._torn = False
        """A step is being applied: saving must wait."""
        self._applied: Any = None
        """On a GPU: the event after the last step in its queue of work."""
        self._flops = device_metrics.flops_per_token(objective.model)
        self._peak = device_metrics.peak_flops(strategy.device)
        self._utilization: tuple[float, float | None] = (-math.inf, None)
        self._printed_at = 0.0

    def resume(self, state: RunState, last: Mapping[str, Any]) -> None:
        """Continues after ``state.step``; the strategy has loaded weights, optimizer and schedule. `last`: metrics of that step."""
        self.state, self._last = state, dict(last)
        self._recent.extend(state.recent_losses)
        self.saver.committed_step = self.saver.offered_step = state.step

    def run(self) -> None:
        """Trains to the end; raises a ``RunEnded`` if it ends otherwise."""
        p = self.progress
        p.step = p.committed_step = self.state.step
        p.num_tokens = self.state.num_tokens
        p.train_began_at = time.time()
        self._committed_at = time.monotonic()
        self.stop.defer(self._commit_meanwhile if self.strategy.saves_alone else None)
        self.heartbeat.enter("train")
        self._note_applied()
        self.strategy.model.train()
        ended = self.state.ended_early or (self.state.validation_due and self._checkpoint())
        if not ended:
            self._train()
        p.ended_early = self.state.ended_early
        self.stop.defer(None)  # the last checkpoint is offered, and the rest takes seconds
        self.saver.wait()
        p.committed_step = self.saver.committed_step

    def _train(self) -> None:
        """Runs the steps; the batches of the next one are made while the current one computes."""
        ahead = ThreadPoolExecutor(1, thread_name_prefix="collate")
        try:
            batches = ahead.submit(self._collate, self.state.step)
            while self.state.step < self.total_steps:
                data = self._await(batches)
                batches = ahead.submit(self._collate, min(self.state.step + 1, self.total_steps - 1))
                self._step(data)
                if self._end_of_step():
                    return
        finally:
            ahead.shutdown(wait=False)  # it may wait for a shard that never arrives

    def _await(self, batches: Future[list[Batch]]) -> StepData:
        """Returns the step's data once every rank has its own.

        While any rank waits for a shard that is still on its way, all of them exchange twice a second whether to stop: they leave together.
        """
        began = time.monotonic()
        while True:
            ready = bool(wait((batches,), timeout=STOP_CHECK_S).done)
            waited = time.monotonic() - began
            own = batches.result() if ready else []
            sums = [sum(self.objective.weight(b) for b in own), sum(self.objective.num_tokens(b) for b in own)]
            stopping, missing, weight, tokens = reduce_sum([self.stop.requested, not ready, *sums], self.strategy.device)
            if stopping:
                self._leave()
            if not missing:
                return StepData(batches=own, weight=weight, num_tokens=int(tokens), began=began, waited_s=waited)
            self.progress.touch()

    def _collate(self, step: int) -> list[Batch]:
        rank = self.strategy.rank // self.spec.context_parallel
        return [self.objective.collate(self.order.micro_batch(step, n, rank)) for n in range(self.order.accumulation_steps)]

    def _step(self, data: StepData) -> None:
        opt, device = self.spec.optimization, self.strategy.device
        with precision.training(self.spec, device):
            self.objective.prepare_step(self.strategy.model, self._moved(data.batches))
        loss = torch.zeros((), dtype=torch.float64, device=device)
        for number, batch in enumerate(self._moved(data.batches)):
            seed_micro_batch(self.spec.seed, self.state.step, number * self.strategy.world_size + self.strategy.rank)
            with self.strategy.micro_batch(last=number == opt.accumulation_steps - 1):
                with precision.training(self.spec, device):
                    share = self.objective.loss(self.strategy.model, batch, total_weight=data.weight)
                loss += share.detach().double()
                self.strategy.backward(share)
        if self.strategy.world_size == 1:
            self._leave_on_stop_request()
        value, stop_requested = reduce_sum([float(loss), float(self.stop.requested)], device)
        measured = self.objective.metrics()  # ranks exchange them: never while the lock is held
        with self._between_steps:
            rate = self.strategy.learning_rate()
            self._require_finite_loss(value)
            self._torn = True
            norm = self.strategy.gradient_norm()
            self._require_finite_gradient(norm)
            self.strategy.step()
            self._advance(value, data.num_tokens)
            self._record(value, rate, norm, measured, data)
            self._torn = False
            self._note_applied()
        self._stop_requested = stop_requested > 0
        self._check_explosion()

    def _advance(self, loss: float, tokens: int) -> None:
        """Counts the step. Validation depends on steps only: if it also followed the clock, early stopping would depend on speed."""
        state = self.state
        state.step += 1
        state.num_tokens += tokens
        self._recent.append(loss)
        state.recent_losses = list(self._recent)
        state.validation_due = state.step >= self.total_steps or state.step % self.spec.checkpoint.every_steps == 0

    def _end_of_step(self) -> bool:
        """Saves a checkpoint if due and leaves if requested; returns whether early stopping ends the run."""
        self.saver.raise_failure()
        policy, state = self.spec.checkpoint, self.state
        last = state.step >= self.total_steps
        elapsed = float(time.monotonic() - self._committed_at >= policy.every_s)
        due = state.validation_due or reduce_sum([elapsed], self.strategy.device)[0] > 0
        ended = due and (last or not self._stop_requested) and self._checkpoint()
        if not last and not ended and (self._stop_requested or (self.strategy.world_size == 1 and self.stop.requested)):
            self._leave()
        return ended

    def _checkpoint(self) -> bool:
        """Validates if due and commits the step just done; returns whether early stopping ends the run here."""
        with spans.span("checkpoint", ft__step=self.state.step, ft__validation=self.state.validation_due):
            return self._validate_and_commit()

    def _validate_and_commit(self) -> bool:
        self.heartbeat.enter("save")
        began = time.monotonic()
        metrics, ended = dict(self._last), False
        if self.state.validation_due:
            stop_requested: list[bool] = [False]
            with precision.evaluation(self.spec, self.strategy.device):
                found = dict(self.objective.validate(self.strategy.model, stop=lambda: self._note_stop_request(stop_requested)))
            if stop_requested[0]:
                self._leave()
            if "eval_loss" in found:
                found["eval_loss"] = self._of_rank_0(found["eval_loss"])  # early stopping must not depend on a rank's rounding
                metrics |= found
                self._append({"step": self.state.step, **found, "validation_s": round(time.monotonic() - began, 3), "time": time.time()})
        with self._between_steps:
            if self.state.validation_due:
                self.state.validation_due = False
                ended = "eval_loss" in metrics and self._judge(float(metrics["eval_loss"]))
            if self.spec.optimization.early_stopping:
                metrics["best_step"] = self.state.best_step
            self.saver.save(vars(self.state) | {"last": self._last}, metrics)
        self.progress.committed_step = self.saver.committed_step
        self._committed_at = time.monotonic()
        self.heartbeat.enter("train")
        return ended

    def _of_rank_0(self, value: float) -> float:
        return reduce_sum([value if self.strategy.rank == 0 else 0.0], self.strategy.device)[0]

    def _note_stop_request(self, stop_requested: list[bool]) -> bool:
        self.progress.touch()
        stop_requested[0] = stop_requested[0] or self._any_rank_stopping()
        return stop_requested[0]

    def _any_rank_stopping(self) -> bool:
        """Returns whether any rank was asked to stop; all ranks get the same answer, or one would wait for the others forever."""
        return reduce_sum([float(self.stop.requested)], self.strategy.device)[0] > 0

    def _judge(self, eval_loss: float) -> bool:
        """Returns whether validation has not improved for too long."""
        state, early = self.state, self.spec.optimization.early_stopping
        if not math.isfinite(eval_loss):
            raise Diverged(f"the validation loss after step {state.step} is {eval_loss:g}; lower learning_rate to a third", step=state.step)
        if not state.take_validation(eval_loss, early) or early is None or state.step >= self.total_steps:
            return False
        log.info("early stop at step %d: %d validations without improvement on %.4f", state.step, early.patience, state.best_eval_loss)
        state.ended_early = True
        return True

    def _require_finite_loss(self, loss: float) -> None:
        """Checks the loss before its gradient is applied: the faulty row is named while the weights are still sound."""
        if math.isfinite(loss):
            return
        self._blame_rows()
        raise self._not_finite(f"its loss is {loss:g}")

    def _require_finite_gradient(self, norm: float) -> None:
        self.state.skipped_steps = 0 if math.isfinite(norm) else self.state.skipped_steps + 1
        if self.state.skipped_steps > (MAX_SKIPPED_STEPS if self.spec.precision == "fp16" else 0):
            if not self.spec.strategy.startswith("zero"):  # there the step was applied
                self._blame_rows()  # KTO's loss of a micro-batch leaves out rows that are not a number
            raise self._not_finite(f"its gradient has norm {norm:g}")

    def _blame_rows(self) -> None:
        """Raises ``BadExample`` if only some rows of this step, which was not applied yet, give a loss that is not finite."""
        self.strategy.drop_gradients()
        with precision.evaluation(self.spec, self.strategy.device):
            self.objective.blame(self.strategy.model, self.order.step(self.state.step).tolist())

    def _not_finite(self, what: str) -> Diverged:
        step, rate = self.state.step + 1, self.spec.optimization.learning_rate
        return Diverged(
            f"loss or gradient of step {step} is not finite ({what}); the step was not applied. Lower learning_rate (now {rate:g}) "
            "to a third, or raise warmup_ratio",
            step=step,
        )

    def _check_explosion(self) -> None:
        mean = sum(self._recent) / len(self._recent)
        if len(self._recent) == EXPLODED_STEPS and mean > self._loss_limit:
            raise Diverged(
                f"the loss of the last {EXPLODED_STEPS} steps is {mean:.2f}, limit {self._loss_limit:.2f} (twice random guessing); "
                f"lower learning_rate (now {self.spec.optimization.learning_rate:g}) to a third",
                step=self.state.step,
            )

    def _record(self, loss: float, rate: float, norm: float, measured: Mapping[str, float], data: StepData) -> None:
        state, p, now = self.state, self.progress, time.monotonic()
        seconds = max(now - data.began, 1e-9)
        device = self.strategy.device
        speed = data.num_tokens / seconds
        self._last = {
            "step": state.step,
            "total_steps": self.total_steps,
            "loss": loss,
            "learning_rate": rate,
            "grad_norm": norm,
            "epoch": round(self.order.epoch(state.step), 6),
            "num_tokens": state.num_tokens,
            **measured,
            "tokens_per_s": round(speed, 1),
            "steps_per_s": round(1 / seconds, 4),
            "step_s": round(seconds, 4),
            "data_s": round(data.waited_s, 4),
            "mfu": round(speed / self.strategy.world_size * self._flops / self._peak, 4) if self._peak else None,
            "memory_bytes": device_metrics.peak_memory_bytes(device),
            "gpu_utilization": self._utilized(now),
            "time": time.time(),
        }
        p.step, p.num_tokens = state.step, state.num_tokens
        if p.first_step_s is None:
            p.first_step_s = round(time.time() - p.started_at, 3)
        self._append(self._last)
        if self.strategy.rank == 0 and (now - self._printed_at >= 1.0 or state.step >= self.total_steps):
            self._printed_at = now
            log.info("step %d/%d loss %.4f lr %.2e %.0f tokens/s", state.step, self.total_steps, loss, rate, speed)

    def _utilized(self, now: float) -> float | None:
        if now - self._utilization[0] > UTILIZATION_EVERY_S:
            self._utilization = (now, device_metrics.gpu_utilization(self.strategy.device))
        return self._utilization[1]

    def _append(self, line: Mapping[str, Any]) -> None:
        if self.strategy.rank == 0:
            self.metrics.append(line)

    def _moved(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yields each micro-batch on the device; a stop may occur before it."""
        for number, batch in enumerate(batches):
            if number or self.strategy.world_size == 1:  # ranks have just agreed at the end of the step before
                self._leave_on_stop_request()
            self.progress.touch()
            yield _on(batch, self.strategy.device)

    def _leave_on_stop_request(self) -> None:
        """Stops between micro-batches without finishing the step: the state after the last step is still in memory."""
        if self._any_rank_stopping():
            self.strategy.drop_gradients()
            self._leave()

    def _leave(self) -> None:
        step = self.state.step
        if step > 0:
            self.heartbeat.enter("save")
            with spans.span("checkpoint", ft__step=step), self._between_steps:
                self.saver.save_now(vars(self.state) | {"last": self._last}, self._last)
            self.progress.committed_step = self.saver.committed_step
        raise Preempted(f"stop requested; step {step} of {self.total_steps} is committed", committed_step=step)

    def _note_applied(self) -> None:
        if self.strategy.device.type == "cuda":
            event: Any = torch.cuda.Event
            self._applied = event()
            self._applied.record()

    @contextlib.contextmanager
    def _after_last_step(self) -> Iterator[None]:
        """GPU work that must wait for the last step only, and not for later work such as an exchange with a rank that is gone."""
        if self._applied is None:
            yield
            return
        stream: Any = torch.cuda.Stream
        aside = stream(self.strategy.device)
        aside.wait_event(self._applied)
        with torch.cuda.stream(aside):
            yield

    def _commit_meanwhile(self) -> int:
        """Commits the last finished step from another thread while a step computes: a stop must not wait for a long step.

        Rank 0 holds everything and writes. The others stay until it is done: a rank that left would break the connections of rank 0.
        """
        with self._between_steps, self._after_last_step():
            step = self.state.step
            if step > 0 and self.strategy.rank == 0 and not self._torn:
                self.saver.save_now(vars(self.state) | {"last": self._last}, self._last)
                self.progress.committed_step = self.saver.committed_step
        if step > 0 and self.strategy.rank:
            self.saver.await_committed(step)
        return self.saver.committed_step


def _on(batch: Batch, device: torch.device) -> Batch:
    if device.type == "cpu":
        return batch
    return {k: v.pin_memory().to(device, non_blocking=True) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
