"""What happens at the edges of a step: health before it is applied; metrics, checkpoint and stop after it."""

# ruff: noqa: ARG002 -- the Trainer calls every hook with the same arguments

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from ft_assets.training.runtime.endings import Diverged, Preempted
from ft_assets.training.runtime.reporting import Heartbeat, MetricsLog, Progress
from ft_assets.training.runtime.saving import Checkpointer
from ft_assets.training.runtime.stopping import StopRequest
from ft_assets.training.spec import CheckpointPolicy

log = logging.getLogger(__name__)

EXPLODED_OVER_UNIFORM = 2.0
"""A model that knows nothing has loss ln(vocabulary); ten steps at twice that are no noise."""
EXPLODED_STEPS = 10
MAX_SKIPPED_STEPS = 20
"""fp16 only: steps in a row that loss scaling may skip before it is called divergence; its scale starts at 2^16."""


class HealthCallback(TrainerCallback):
    """Looks at loss and gradient after the backward pass and before the optimizer applies them: weights stay clean."""

    def __init__(self, *, loss_is_finite: Callable[[], bool], vocab_size: int, loss_scaling: bool) -> None:
        self._loss_is_finite = loss_is_finite
        self._limit = EXPLODED_OVER_UNIFORM * math.log(vocab_size)
        self._recent: deque[float] = deque(maxlen=EXPLODED_STEPS)
        self._allowed = MAX_SKIPPED_STEPS if loss_scaling else 0
        self._skipped = 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        gradients = [p.grad for p in kwargs["model"].parameters() if p.grad is not None]
        norms = torch.stack(torch._foreach_norm(gradients))
        healthy = _agree_all(bool(torch.isfinite(norms).all()) and self._loss_is_finite(), device=norms.device)
        self._skipped = 0 if healthy else self._skipped + 1
        if self._skipped > self._allowed:
            raise Diverged(
                f"loss or gradient of step {state.global_step + 1} is not finite; the step was not applied. Lower learning_rate "
                f"(now {args.learning_rate:g}) to a third, or raise warmup_ratio",
                step=state.global_step + 1,
            )

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs:
            return
        self._recent.append(logs["loss"])
        mean = sum(self._recent) / len(self._recent)
        if len(self._recent) == EXPLODED_STEPS and mean > self._limit:
            raise Diverged(
                f"the loss of the last {EXPLODED_STEPS} steps is {mean:.2f}, {self._limit:.2f} is twice what knowing nothing gives; "
                f"lower learning_rate (now {args.learning_rate:g}) to a third",
                step=state.global_step,
            )


@dataclass(kw_only=True)
class LoopCallback(TrainerCallback):
    """Metrics line, then checkpoint if one is due, then stop if asked: in this order, at the end of each step.

    The line precedes the checkpoint, so that a resume finds every step up to its own already written.
    """

    progress: Progress
    heartbeat: Heartbeat
    metrics: MetricsLog
    stop: StopRequest
    checkpointer: Checkpointer
    policy: CheckpointPolicy
    validate: Callable[[], float | None]
    tokens_before: int
    """Tokens trained on by earlier attempts."""

    def __post_init__(self) -> None:
        self._committed_at = self._stepped_at = time.monotonic()
        self._printed_at = 0.0
        self._last: dict[str, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.progress.step = self.progress.committed_step = state.global_step
        self.progress.train_began_at = time.time()
        self._committed_at = self._stepped_at = time.monotonic()
        self.stop.defer()
        self.heartbeat.enter("train")

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Between micro-batches a single process need not finish the step: the last one is still whole in memory."""
        if args.world_size == 1 and self.stop.requested:
            self._leave(state)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs:
            return
        self._record(state, logs)
        self.checkpointer.mark()
        state.log_history.clear()
        now = time.monotonic()
        last = state.global_step >= state.max_steps
        due = last or state.global_step % self.policy.every_steps == 0 or now - self._committed_at >= self.policy.every_s
        stop, due = _agree_any(self.stop.requested, due)
        if due and not stop:
            self._checkpoint(state, validate=True)
            stop, _ = _agree_any(self.stop.requested, False)
        if stop and not last:
            self._leave(state)

    def _record(self, state: Any, logs: dict[str, Any]) -> None:
        now = time.monotonic()
        p = self.progress
        num_tokens = self.tokens_before + int(logs["num_tokens"])
        self._last = {
            "step": state.global_step,
            "total_steps": state.max_steps,
            "loss": logs["loss"],
            "learning_rate": logs["learning_rate"],
            "grad_norm": logs["grad_norm"],
            "epoch": logs["epoch"],
            "tokens_per_s": round((num_tokens - p.num_tokens) / max(now - self._stepped_at, 1e-9), 1),
            "num_tokens": num_tokens,
            "mean_token_accuracy": logs.get("mean_token_accuracy"),
            "time": time.time(),
        }
        p.step, p.num_tokens, self._stepped_at = state.global_step, num_tokens, now
        if p.first_step_s is None:
            p.first_step_s = round(time.time() - p.started_at, 3)
        if state.is_world_process_zero:
            self.metrics.append(self._last)
            if now - self._printed_at >= 1.0 or p.step >= p.total_steps:
                self._printed_at = now
                speed = self._last["tokens_per_s"]
                log.info("step %d/%d loss %.4f lr %.2e %.0f tokens/s", p.step, p.total_steps, logs["loss"], logs["learning_rate"], speed)

    def _checkpoint(self, state: Any, *, validate: bool) -> None:
        """Commit the last finished step; the validation loss is part of its metrics and of the metrics log."""
        self.heartbeat.enter("save")
        metrics = dict(self._last)
        eval_loss = self.validate() if validate and state.is_world_process_zero else None
        if eval_loss is not None:
            metrics["eval_loss"] = eval_loss
            self.metrics.append({"step": state.global_step, "eval_loss": eval_loss, "time": time.time()})
        self.checkpointer.commit(metrics)
        self.progress.committed_step = state.global_step
        self._committed_at = self._stepped_at = time.monotonic()
        self.heartbeat.enter("train")

    def _leave(self, state: Any) -> None:
        if state.global_step > self.progress.committed_step:
            self._checkpoint(state, validate=False)
        raise Preempted(f"asked to stop; step {state.global_step} of {state.max_steps} is committed", committed_step=state.global_step)


def _agree_all(value: bool, *, device: torch.device) -> bool:
    """Whether `value` holds on every rank."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return value
    flag = torch.tensor([float(value)], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def _agree_any(*values: bool) -> tuple[bool, ...]:
    """Each value, true if it is true on any rank: all ranks stop and save at the same step."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return values
    gathered: list[tuple[bool, ...]] = [values] * dist.get_world_size()
    dist.all_gather_object(gathered, values)
    return tuple(any(column) for column in zip(*gathered, strict=True))
