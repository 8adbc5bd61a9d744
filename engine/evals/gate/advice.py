"""Advice for the next run, from the curves and the eval report of the last: what to change, to which value, and why.

Rules, in order; each that applies gives one piece of advice, and none blocks anything:

1. ``not_applied``: the adapter changes nothing. Nothing else is advised.
2. ``overfit``: validation loss has risen by 5 % or more from its lowest point while training loss continued to fall.
3. ``learning_rate_too_high``: the loss is not finite, ends above its start, or varies by more than a third of its value. A loss that varies
   says nothing while validation loss falls to the end: steps see other rows.
4. ``learning_rate_too_low``: over the whole run the loss fell by less than 5 %, smoothly.
5. ``unstable``: the loss is fine, but three or more gradients of the second half were ten times their median.
6. ``too_few_steps``: no rule above applies and the last quarter of the run still brought 10 % or more of the whole fall, of training or of
   validation loss, or there were fewer than 8 steps.
7. ``forgetting``: the gate found a fallen capability suite.
8. ``safety_loss``: the gate counted too few refusals.
9. ``wrong_form``: answers are right except for their form, or should be JSON and are not, or golden prompts lost the requested form.
10. ``hold_out_more``: the task gained enough, but too few items were held out to distinguish that, or the lead over controls, from noise.
11. ``too_little_data``: the task did not gain enough, no rule above explains it, and there were fewer than 500 examples.
12. ``underfit``: the task did not gain enough and no rule above explains it: the adapter is too small for the task.
13. ``mismatched_answers``: answers do not depend on their prompts, or repeat them: the training rows are at fault, not the training.
14. ``empty_answers``: the gate found general questions answered with nothing, which is no matter of the learning rate.
15. ``overtrained_preferences``: preferences were learned, and generated answers became worse than the base's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from core.base_models import ENGINE_RANKS, MAX_RANK
from engine.evals.gate.gates import ALPHA, ALPHA_HARM
from engine.evals.gate.verdict import Finding, Verdict
from engine.evals.scoring import significance
from engine.evals.scoring.report import EvalReport
from engine.evals.scoring.scores import FORMAT
from engine.evals.suites.answer_metrics import json_valid
from engine.evals.suites.suite_items import GOLDEN, HOLDOUT
from engine.training import stored_batch_size

MIN_STEPS = 8
"""With fewer steps, the curve has no shape to interpret."""
OVERFIT_RISE = 0.05
SWING = 0.33
FLAT = 0.05
STILL_FALLING = 0.10
MIN_SPIKES = 3
ENOUGH_EXAMPLES = 500
"""Below it, more examples are the surest gain: LIMA (Zhou et al. 2023) aligned a model with 1,000, and OpenAI sees a change from 50."""
SAFETY_SHARE = 0.05
"""A few percent of safety-preserving examples preserve the base's refusals (Qi et al. 2023; Bianchi et al. 2023: 3 %)."""
MAX_SAFETY_SHARE = 0.2
FORM_GAP = 0.1
"""Least lead of loosely compared labels over exact ones, or least deficit of JSON answers, that counts as a fault of form."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LastRun:
    """Inputs of the run; None if unknown."""

    learning_rate: float | None = None
    num_epochs: float | None = None
    rank: int | None = None
    batch_size: int | None = None
    warmup_ratio: float | None = None
    has_points: bool = False
    """The rate followed a list of points, which has no other warm-up."""
    decay_ratio: float = 0.0
    """Share of the run that `wsd` keeps for its fall, and so not for the warm-up."""
    safety_share: float | None = None
    num_examples: int | None = None
    max_rank: int = MAX_RANK
    """Highest rank to advise; PiSSA doubles the rank of what it trained."""

    @classmethod
    def of_spec(
        cls, spec: Mapping[str, Any] | None, *, num_examples: int | None = None, safety_share: float | None = None, max_rank: int = MAX_RANK
    ) -> Self:
        """Reads a frozen spec as stored. `max_rank`: highest that the servers load."""
        opt, lora = (spec or {}).get("optimization") or {}, (spec or {}).get("lora") or {}
        return cls(
            learning_rate=opt.get("learning_rate"),
            num_epochs=opt.get("num_epochs"),
            rank=lora.get("rank"),
            max_rank=max_rank // 2 if lora.get("init_lora_weights") else max_rank,
            batch_size=stored_batch_size(spec or {}),
            warmup_ratio=opt.get("warmup_ratio"),
            has_points=isinstance(opt.get("schedule"), list | tuple),
            decay_ratio=float(opt.get("schedule_decay_ratio") or 0.0),
            safety_share=safety_share,
            num_examples=num_examples,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    code: str
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """The numbers that it is based on."""
    changes: Mapping[str, float] = field(default_factory=dict)
    """Hyperparameters for the next run, in the form of ``POST /v1/fine_tuning/jobs``."""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | str) -> Self:
        """Reads stored advice, including that of earlier reports, which stored only the sentence."""
        return cls(code="", message=data) if isinstance(data, str) else cls(**data)


def advise(
    curve: Sequence[Mapping[str, Any]],
    *,
    report: EvalReport | None = None,
    verdict: Verdict | None = None,
    run: LastRun | None = None,
) -> list[Advice]:
    """Returns advice from the lines of ``metrics.jsonl`` and, if there is an evaluation, from its report and verdict."""
    shape, run = shape_of(curve), run or LastRun()
    if report is not None and not report.adapter_applied:
        return [_not_applied(report, shape, run)]
    found = list(_of_curve(shape, run))
    if report is None or verdict is None:
        return found
    failed = {f.rule: f for f in verdict.findings if not f.passed}
    found += _of_harm(failed, run)
    found += _of_form(report)
    task = failed.get("task")
    if task is not None and task.code in ("task_gain_within_noise", "task_lead_within_noise"):
        found.append(_hold_out_more(report, task))
    elif task is not None and task.code in ("answers_ignore_prompt", "answers_repeat_prompt"):
        message = f"The answers took on the style of the training file and not its content: {task.next_step}."
        found.append(Advice(code="mismatched_answers", message=message, evidence=dict(task.values)))
    elif task is not None and not found:
        found.append(_more_of(task, shape, run))
    return found


def combined_changes(advice: Sequence[Advice]) -> dict[str, float]:
    """Returns the hyperparameters of all advice together; if two disagree, the first counts."""
    changes: dict[str, float] = {}
    for one in advice:
        changes |= {name: value for name, value in one.changes.items() if name not in changes}
    return changes


def _of_curve(shape: Shape, run: LastRun) -> Iterator[Advice]:
    ends = {"loss_at_start": round(shape.start, 4), "loss_at_end": round(shape.end, 4), "steps": shape.num_steps}
    if not shape.finite:
        text, changes = _rate(shape, run, "lower", 1 / 3)
        yield Advice(code="learning_rate_too_high", message=f"The loss stopped being a number; {text}", evidence=ends, changes=changes)
        return
    if shape.num_steps < MIN_STEPS:
        message = f"Only {shape.num_steps} optimizer steps: raise n_epochs or lower batch_size to see at least 50."
        more = {"n_epochs": min(100, math.ceil(run.num_epochs * 50 / shape.num_steps))} if run.num_epochs and shape.num_steps else {}
        yield Advice(code="too_few_steps", message=message, evidence=ends, changes=more)
        return
    found = [*_overfit(shape, run), *_wrong_rate(shape, run, ends)]
    if not found and shape.num_spikes >= MIN_SPIKES:
        found.append(_unstable(shape, run))
    turn = shape.turn
    if not found and (shape.late_share >= STILL_FALLING or (turn and turn.is_falling)):
        factor, which, end = (2.0, "Validation loss", turn.last) if turn and turn.is_falling else (1.5, "The loss", shape.end)
        epochs = {"n_epochs": _rounded(factor * run.num_epochs)} if run.num_epochs else {}
        by = "twofold" if factor == 2 else "by half"
        message = f"{which} was still falling at the end ({end:.3f}); raise n_epochs {by} or more{_to(epochs)}."
        late = {**ends, "share_of_fall_in_last_quarter": round(shape.late_share, 3)}
        found.append(Advice(code="too_few_steps", message=message, evidence=late, changes=epochs))
    yield from found


def _overfit(shape: Shape, run: LastRun) -> Iterator[Advice]:
    turn = shape.turn
    if turn is None or shape.end >= shape.start or turn.rise < OVERFIT_RISE:
        return
    at = f"after epoch {turn.best_epoch:.1f}" if turn.best_epoch is not None else f"at step {turn.best_step} of {turn.last_step}"
    share = turn.best_step / turn.last_step if turn.last_step else 1.0
    epochs = turn.best_epoch if turn.best_epoch is not None else run.num_epochs * share if run.num_epochs else None
    changes: dict[str, float] = {"n_epochs": _rounded(epochs)} if epochs else {}
    changes |= _other_rank(run, down=True)
    message = f"Validation loss was lowest {at} ({turn.best:.3f}) and then rose to {turn.last:.3f}: "
    message += f"stop there, lower the rank, or add examples{_to(changes)}."
    evidence = {"lowest_valid_loss": turn.best, "at_step": turn.best_step, "at_epoch": turn.best_epoch, "last_valid_loss": turn.last}
    yield Advice(code="overfit", message=message, evidence=evidence, changes=changes)


def _wrong_rate(shape: Shape, run: LastRun, ends: Mapping[str, Any]) -> Iterator[Advice]:
    moved = f"({shape.start:.3f} to {shape.end:.3f})"
    is_falling = shape.turn is not None and shape.turn.is_falling
    if (shape.end > shape.start or (shape.swing > SWING and shape.end > 0.1 * shape.start)) and not is_falling:
        text, changes = _rate(shape, run, "lower", 1 / 3)
        message = f"The loss went from {shape.start:.3f} to {shape.end:.3f}, unsteadily; {text}"
        evidence = {**ends, "swing": round(shape.swing, 3)}
        yield Advice(code="learning_rate_too_high", message=message, evidence=evidence, changes=changes)
    elif shape.fall < FLAT and not is_falling:
        text, changes = _rate(shape, run, "raise", 3.0)
        yield Advice(code="learning_rate_too_low", message=f"The loss barely moved {moved}; {text}", evidence=ends, changes=changes)


def _unstable(shape: Shape, run: LastRun) -> Advice:
    most = 0.0 if run.has_points else min(0.5, math.floor(100 * (1.0 - run.decay_ratio) + 1e-9) / 100)
    wanted = min(most, round(max(0.1, 2 * (run.warmup_ratio or 0.0)), 2))
    changes: dict[str, float] = {"warmup_ratio": wanted} if wanted > (run.warmup_ratio or 0.0) else {}
    changes |= {"batch_size": 2 * run.batch_size} if run.batch_size else {}
    message = (
        f"{shape.num_spikes} gradients of the second half were more than ten times the usual {shape.median_norm:.2g}: warm up for longer"
    )
    message += f" and take larger batches, or look for odd examples{_to(changes)}."
    return Advice(
        code="unstable", message=message, evidence={"spikes": shape.num_spikes, "median_grad_norm": shape.median_norm}, changes=changes
    )


def _not_applied(report: EvalReport, shape: Shape, run: LastRun) -> Advice:
    evidence = {"max_logit_difference": report.max_logit_difference, "loss_at_start": shape.start, "loss_at_end": shape.end}
    if shape.num_steps >= MIN_STEPS and shape.fall >= FLAT:
        message = "The adapter changes nothing, though the training loss fell: its files are not what was trained. Tell the operator."
        return Advice(code="not_applied", message=message, evidence=evidence)
    text, changes = _rate(shape, run, "raise", 10.0)
    message = f"The adapter changes nothing and the training loss did not move: {text}"
    return Advice(code="not_applied", message=message, evidence=evidence, changes=changes)


def _of_harm(failed: Mapping[str, Finding], run: LastRun) -> Iterator[Advice]:
    if (capability := failed.get("capability")) is not None:
        changes: dict[str, float] = {"learning_rate": _rounded(run.learning_rate / 2)} if run.learning_rate else {}
        changes |= _other_rank(run, down=True)
        changes |= {"n_epochs": _rounded(max(1.0, run.num_epochs / 2))} if run.num_epochs and run.num_epochs > 1 else {}
        message = "It lost abilities of the base: train more gently (a lower learning rate and rank, fewer epochs), and mix 5 to 10 % "
        message += f"of general conversations into the training file{_to(changes)}."
        yield Advice(code="forgetting", message=message, evidence=dict(capability.values), changes=changes)
    if (general := failed.get("golden")) is not None and general.code == "golden_empty":
        message = f"General questions are answered with nothing: {general.next_step}."
        yield Advice(code="empty_answers", message=message, evidence=dict(general.values))
    if (spoken := failed.get("answers")) is not None:
        changes = {"learning_rate": _rounded(run.learning_rate / 2)} if run.learning_rate else {}
        message = f"It tells wanted answers from others and does not write them: {spoken.next_step}{_to(changes)}."
        yield Advice(code="overtrained_preferences", message=message, evidence=dict(spoken.values), changes=changes)
    if (safety := failed.get("safety")) is not None and safety.values:  # without values nothing was asked
        share = min(MAX_SAFETY_SHARE, max(SAFETY_SHARE, 2 * (run.safety_share or 0.0)))
        change = {"safety_share": round(share, 3)}
        message = f"It refuses less than it should: mix safety-preserving examples into the training data{_to(change)}, and look for "
        message += "training answers that comply with harmful requests."
        yield Advice(code="safety_loss", message=message, evidence=dict(safety.values), changes=change)


def _of_form(report: EvalReport) -> Iterator[Advice]:
    exact, loose, valid = (report.score(HOLDOUT, name) for name in ("exact_match", "accuracy", "json_valid"))
    reported = [s for s in report.samples if s.suite == HOLDOUT and s.expected]
    wants_json = bool(reported) and 2 * sum(json_valid(s.expected) for s in reported) > len(reported)
    golden = report.score(GOLDEN, FORMAT)
    if valid and wants_json and valid.adapter < 1.0 - FORM_GAP:
        message = (
            f"Answers should be JSON and {1 - valid.adapter:.0%} of them are not: see that every training answer is JSON alone, raise "
        )
        message += "max_seq_len if answers are cut, and raise eval_config.max_new_tokens if they are cut here."
        yield Advice(code="wrong_form", message=message, evidence={"json_valid": valid.adapter, "base": valid.base, "n": valid.n})
    elif exact and loose and report.literal and not wants_json and loose.adapter - exact.adapter >= FORM_GAP:
        message = (
            f"{loose.adapter:.0%} of labels are right but only {exact.adapter:.0%} to the letter: write labels in one way, with the same "
        )
        message += "case and punctuation, in every training answer."
        yield Advice(code="wrong_form", message=message, evidence={"accuracy": loose.adapter, "exact_match": exact.adapter, "n": exact.n})
    elif golden and golden.p_worse is not None and golden.p_worse <= ALPHA_HARM:
        message = f"It answers {golden.adapter:.0%} of the golden prompts in the form that they ask for, its base {golden.base:.0%}: mix "
        message += "general instructions that require various forms into the training file."
        yield Advice(code="wrong_form", message=message, evidence={"format": golden.adapter, "base": golden.base, "n": golden.n})


def _hold_out_more(report: EvalReport, task: Finding) -> Advice:
    score = report.score(str(task.values["suite"]), str(task.values["metric"]))
    is_lead, gain = task.code == "task_lead_within_noise", abs(score.gain) if score else 0.0
    bounded = score is not None and not score.lower_is_better and gain > 0 and not is_lead
    needed = significance.items_needed(gain, (score.differing if score else None) or gain, alpha=ALPHA) if bounded else 0
    n = int(task.values["n"])
    about = f": about {needed:,} would tell" if needed > n else ""
    what = "lead over answers that ignore or repeat their prompt" if is_lead else "gain"
    message = f"The {what} may be noise, because only {n} items were held out{about}. Give a validation file, or a larger dataset."
    return Advice(code="hold_out_more", message=message, evidence={**task.values, "items_needed": needed or None})


def _more_of(task: Finding, shape: Shape, run: LastRun) -> Advice:
    evidence = {**task.values, "num_examples": run.num_examples, "loss_at_end": shape.end}
    if run.num_examples is not None and run.num_examples < ENOUGH_EXAMPLES:
        wanted = max(ENOUGH_EXAMPLES, 2 * run.num_examples)
        message = f"Training went well and {run.num_examples} examples did not teach enough: add examples like the samples that got no "
        return Advice(code="too_little_data", message=f"{message}better, to {wanted} or more.", evidence=evidence)
    changes = _other_rank(run, down=False)
    changes |= {"n_epochs": _rounded(2 * run.num_epochs)} if run.num_epochs else {}
    message = (
        f"Training went well and did not teach enough: raise the rank, train for more epochs, or take a larger base model{_to(changes)}."
    )
    return Advice(code="underfit", message=message, evidence=evidence, changes=changes)


def _rate(shape: Shape, run: LastRun, verb: str, factor: float) -> tuple[str, dict[str, float]]:
    """Returns the change of the learning rate, and its value."""
    how = "to a third" if factor < 1 else f"to {'three' if factor == 3 else f'{factor:.0f}'} times its value"
    peak = shape.peak_rate or run.learning_rate or 0.0
    to = f" (from {peak:.1e} to about {peak * factor:.1e})" if peak else ""
    return f"{verb} learning_rate_multiplier {how}{to}.", {"learning_rate": _rounded(peak * factor)} if peak else {}


def _other_rank(run: LastRun, *, down: bool) -> dict[str, float]:
    """Returns the change to the next rank that servers usually load, from 8 up; nothing if there is none."""
    others = [r for r in ENGINE_RANKS if run.rank and (8 <= r < run.rank if down else run.rank < r <= run.max_rank)]
    return {"rank": max(others) if down else min(others)} if others else {}


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")


def _to(changes: Mapping[str, float]) -> str:
    return f" ({', '.join(f'{name} {value:g}' for name, value in changes.items())})" if changes else ""


SPIKE = 10.0
"""Multiple of the median gradient norm that counts as a spike: clipping at 1 then discards nine tenths of what the step had learned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """The lowest validation loss, and its course."""

    first: float
    before_last: float
    best: float
    best_step: int
    best_epoch: float | None
    last: float
    last_step: int

    @property
    def rise(self) -> float:
        """Relative to the lowest."""
        return self.last / self.best - 1.0 if self.best > 0 else 0.0

    @property
    def is_falling(self) -> bool:
        """Returns whether the last validation still brought a good part of the whole fall, which was no small one."""
        fall = self.first - self.last
        return (
            self.best_step == self.last_step and fall >= STILL_FALLING * self.first and self.before_last - self.last >= STILL_FALLING * fall
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    num_steps: int
    finite: bool
    start: float
    """Mean loss over the first tenth of the run."""
    end: float
    """Mean loss over its last tenth."""
    swing: float
    """Standard deviation of the loss's steps in the second half, relative to its end."""
    late_share: float
    """Share of the whole fall in the last quarter."""
    peak_rate: float
    """Highest learning rate."""
    turn: Turn | None
    """None with fewer than two validations."""
    num_spikes: int
    """Gradient norms of the second half above :data:`SPIKE` times their median."""
    median_norm: float

    @property
    def fall(self) -> float:
        """Relative to the beginning."""
        return (self.start - self.end) / self.start if self.start > 0 else 0.0


def shape_of(curve: Sequence[Mapping[str, Any]]) -> Shape:
    """Reads the lines of ``metrics.jsonl`` (training lines carry ``loss``, validation lines ``eval_loss``)."""
    train = [row for row in curve if row.get("loss") is not None]
    losses = [float(row["loss"]) for row in train]
    finite = all(math.isfinite(x) for x in losses)
    reported = losses if finite and losses else [0.0]
    width = max(2, len(reported) // 10)
    start, end = float(np.mean(reported[:width])), float(np.mean(reported[-width:]))
    at = len(reported) * 3 // 4
    before = float(np.mean(reported[max(0, at - width) : at] or reported))
    steps = np.diff(reported[len(reported) // 2 :])
    norms = [float(row["grad_norm"]) for row in train[len(train) // 2 :] if row.get("grad_norm") is not None]
    median = float(np.median(norms)) if norms else 0.0
    return Shape(
        num_steps=len(losses),
        finite=finite,
        start=start,
        end=end,
        swing=float(np.std(steps)) / max(end, 1e-9) if len(steps) else 0.0,
        late_share=(before - end) / max(start - end, 1e-9),
        peak_rate=max((float(row.get("learning_rate") or 0.0) for row in train), default=0.0),
        turn=_turn(curve),
        num_spikes=sum(norm > SPIKE * median for norm in norms) if median > 0 else 0,
        median_norm=median,
    )


def _turn(curve: Sequence[Mapping[str, Any]]) -> Turn | None:
    evals = [(int(row["step"]), float(row["eval_loss"])) for row in curve if row.get("eval_loss") is not None]
    if len(evals) < 2:
        return None
    best_step, best = min(evals, key=lambda e: e[1])
    last_step, last = evals[-1]
    epochs = {int(row["step"]): float(row["epoch"]) for row in curve if row.get("epoch") is not None}
    return Turn(
        first=evals[0][1],
        before_last=evals[-2][1],
        best=best,
        best_step=best_step,
        best_epoch=epochs.get(best_step),
        last=last,
        last_step=last_step,
    )
