"""The verdict on an adapter: its findings, what it rests on, and the next step for each code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from core.typed_json import from_json
from engine.evals.config import Mode

PASSED: Literal["passed"] = "passed"
QUARANTINED: Literal["quarantined"] = "quarantined"
OK, NOT_MEASURED = "ok", "not_measured"
Basis = Literal["answers", "judge", "preferences", "perplexity", "nothing"]
BASES: Mapping[Basis, str] = {
    "answers": "generated answers, scored against the expected ones",
    "judge": "generated answers, compared by a judge",
    "preferences": "held-out preferences",
    "perplexity": "perplexity alone; no generated answers were compared",
    "nothing": "no measure of the task",
}
"""What rule 3 compared, in words."""
NOTHING: Basis = "nothing"
QUIET = frozenset({OK, "no_previous", "skipped"})
"""Codes of a passed rule that are not warnings."""
NEXT_STEPS: Mapping[str, str] = {
    "adapter_not_applied": "look at the loss curve: if it did not move, raise the learning rate; if it did, contact the operator",
    "adapter_unloadable": "contact the operator: the adapter's files cannot be loaded",
    "golden_within_noise": "look at the golden answers in the samples",
    "golden_empty": "look for training rows whose answer is empty or cut off by max_seq_len: they teach to end at once",
    "specialist": "nothing, if it is to do this one task; otherwise mix general conversations into the training file",
    "golden_incoherent": "lower the learning rate or the number of epochs, and look at the golden answers in the samples",
    "task_not_better": "look at the samples that got worse; more or better examples help more than more epochs",
    "answers_ignore_prompt": "check that every training row pairs a prompt with its own answer; a shuffled column is the usual cause",
    "answers_repeat_prompt": "check that the training answers are answers, and not copies of their prompts",
    "answers_not_compared": "hold out rows with written answers, or compare answers by hand before you promote",
    "task_gain_within_noise": "hold out more examples (a validation file), or train further",
    "task_lead_within_noise": "hold out more examples (a validation file), or train further",
    "answers_degenerate": "lower the learning rate or the number of epochs, or raise beta: speech was lost to the preferences",
    "answers_off_target": "lower the learning rate or the number of epochs, raise beta, or train with sft on the chosen answers first",
    "answers_wrong_length": "compare the lengths of chosen and rejected answers: preferences that go by length teach length",
    "answers_within_noise": "look at the held-out answers in the samples",
    "perplexity_worse": "train for fewer epochs, or lower the learning rate or the rank",
    "perplexity_rise_within_noise": "hold out more examples to be sure",
    "capability_dropped": "lower the learning rate, the rank or the epochs, or mix general data into the training file; "
    "or allow it: eval_config.max_capability_drop",
    "suite_below_limit": "{suite} scores {score:.3f} and needs {limit:g}: read its answers (ft eval JOB --samples --suite {suite}) and "
    "train on more rows like its items, or lower its min_score",
    "suite_dropped": "{suite} fell from {base:.3f} to {score:.3f}, and may fall by {limit:g}: read the answers that got worse "
    "(ft eval JOB --samples --only worse --suite {suite}) and mix rows like them into the training file, or raise its max_drop",
    "suite_drop_within_noise": "{suite} fell from {base:.3f} to {score:.3f} over {n} items, and may fall by {limit:g}: add items to it "
    "to be sure",
    "capability_drop_within_noise": "evaluate more items of each suite to be sure: eval_config.capability_limit",
    "refusals_too_few": "mix safety-preserving examples in: hyperparameters.safety_share 0.05",
    "refusals_within_noise": "look at the safety samples; hyperparameters.safety_share mixes safety-preserving examples in",
    "safety_not_judged": "read its answers to the unsafe prompts in the samples, or mix safety-preserving examples in: "
    "hyperparameters.safety_share 0.05",
    "judge_prefers_base": "look at the pairs that were lost; the style of the training answers is what the adapter learned",
    "judge_failed": "ask the operator to check the judge",
    "judge_inconsistent": "ask the operator for a better judge model; this one prefers a position",
    "judge_same_family": "ask the operator for a judge of another family; models prefer answers like their own",
    "worse_than_previous": "keep the earlier adapter in production, or check what the new data changed",
    "nothing_measured": "give a validation file or a larger dataset",
    "not_measured": "give the rule data, or skip it: eval_config.skip",
}
"""Next steps by code of failures and warnings; those of scored suites are templates for each suite."""
MEANINGS: Mapping[str, str] = {
    "adapter_not_applied": "the model answers exactly as its base",
    "adapter_unloadable": "the trained weights could not be loaded",
    "golden_empty": "it answers general questions with nothing",
    "golden_incoherent": "it no longer answers general questions coherently",
    "task_not_better": "its answers are not better than the base model's",
    "task_gain_within_noise": "its lead over the base model may be chance",
    "task_lead_within_noise": "it beats the base model, but its answers may fit other questions, or the question itself, as well",
    "answers_degenerate": "its answers are empty, repetitive or garbled",
    "answers_off_target": "its answers are less like the wanted ones than the base model's",
    "answers_wrong_length": "its answers are far longer or shorter than the wanted ones",
    "answers_ignore_prompt": "its answers do not depend on the question",
    "answers_repeat_prompt": "its answers repeat the question",
    "perplexity_worse": "it predicts held-out answers worse than the base model",
    "suite_below_limit": "it scores less than you require in a suite of yours",
    "suite_dropped": "it got worse than the base model in a suite of yours",
    "capability_dropped": "it lost abilities that the base model has",
    "refusals_too_few": "it refuses fewer unsafe requests than it should",
    "safety_not_judged": "nothing shows that it refuses unsafe requests",
    "judge_prefers_base": "the judge prefers the base model's answers",
    "worse_than_previous": "its answers are worse than those of the model in production",
    "nothing_measured": "nothing was held out, so no measurement says that it is better",
}
"""What a failure means to users of the model, by code."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    rule: str
    code: str
    """``ok``, ``not_measured``, or the reason code of the failure or warning."""
    passed: bool
    blocking: bool
    detail: str
    values: Mapping[str, Any] = field(default_factory=dict)
    """The numbers that decided: scores, interval, n, limit."""
    next_step: str = ""

    @property
    def sentence(self) -> str:
        """The finding in one sentence: what it means, with the numbers."""
        return f"{MEANINGS.get(self.code, self.code)} ({self.code}: {self.detail})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    outcome: Literal["passed", "quarantined"]
    findings: tuple[Finding, ...]
    mode: Mode = "gate"
    basis: Basis | None = None
    """What rule 3 compared; None in verdicts of earlier versions."""

    @property
    def passed(self) -> bool:
        return self.outcome == PASSED

    @property
    def rests_on(self) -> str:
        """`basis` in words."""
        return BASES[self.basis] if self.basis else "an unrecorded measure"

    @property
    def failed(self) -> tuple[Finding, ...]:
        """The findings that quarantined it, in the order of the rules."""
        return tuple(f for f in self.findings if f.blocking and not f.passed)

    @property
    def why_not(self) -> str:
        """The blocking findings in words; empty if it passed."""
        return "; ".join(f.sentence for f in self.failed)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Reason codes of blocking findings, in the order of the rules."""
        return tuple(f.code for f in self.failed)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Codes of findings that do not block but deserve attention, in the order of the rules."""
        shown = [f.code for f in self.findings if f.code not in QUIET and (f.passed or not f.blocking)]
        return tuple(dict.fromkeys(shown))

    def to_dict(self) -> Mapping[str, Any]:
        return {**asdict(self), "rests_on": self.rests_on, "reasons": list(self.reasons), "warnings": list(self.warnings)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Reads a stored verdict, including those from before modes existed."""
        return from_json(cls, data, ignore_unknown=True)
