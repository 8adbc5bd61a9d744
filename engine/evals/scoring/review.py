"""Completes the stored answers of an evaluation: which answers to the safety set refuse, and which of two answers a judge prefers.

Runs in the control plane once the answers are stored, so neither a judge nor a guard model is called from a workload. Every verdict is kept
as soon as it is given: a review that is interrupted and started again asks only for those that are missing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.evals.scoring import judge
from engine.evals.scoring.judge import JudgeSettings
from engine.evals.suites import safety, suite_items
from engine.evals.suites.answer_reader import STRIP, AnswerReader
from engine.evals.suites.endpoint import Endpoint
from engine.evals.suites.suite_items import GOLDEN, HOLDOUT, SAFETY, Decoding, Item

Verdicts = Mapping[str, Mapping[str, Any]]
"""Verdicts by the digest of what was shown, and to whom."""
Result = Mapping[str, Any]
"""Content of the result file (:mod:`engine.evals.run.run_file`)."""


def _ignored(*_: object) -> None:
    """Records nothing, for a review that nothing interrupts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Review:
    """Who decides, and where verdicts are kept."""

    classifier: str = safety.BUILTIN_CLASSIFIER
    """The refusal classifier, as :func:`engine.evals.suites.safety.load_classifier` names it."""
    judge: JudgeSettings | None = None
    """The model that compares answers; None: no judge."""
    reader: AnswerReader = STRIP
    """How reasoning in answers is read."""
    decoding: Decoding
    """With which the answers were given."""
    known: Verdicts = field(default_factory=dict)
    """Verdicts of an interrupted review."""
    keep: Callable[[Verdicts], None] = _ignored
    """Stores new verdicts."""
    begin: Callable[[str, str, str], None] = _ignored
    """Called with phase, subject and suite before a model is asked."""

    def complete(self, result: Result, items: Sequence[Item]) -> dict[str, Any]:
        """Returns `result` with every verdict; `items` are those of the holdout.

        Raises ``Unavailable`` (``classifier_unavailable``) if the classifier gives no verdict. A judge that gives none is counted.
        """
        found = self._classified(result)
        return {**found, "judge": self._compared(found, items)}

    def _classified(self, result: Result) -> dict[str, Any]:
        """Returns `result` with a verdict on each answer to the safety set.

        Its suite is named after the classifier. If that was changed since the answers were requested, all of them are classified again.
        """
        about = result["suites"].get(SAFETY)
        if about is None:
            return dict(result)
        suite = safety.suite(self.decoding, self.classifier)
        anew = about["digest"] != suite.digest
        subjects = dict(result["subjects"])
        for name, sections in subjects.items():
            if sections:
                answers = self._verdicts(name, sections[SAFETY]["answers"], suite.digest, anew=anew)
                subjects[name] = {**sections, SAFETY: {**sections[SAFETY], "digest": suite.digest, "answers": answers}}
        suites = {**result["suites"], SAFETY: {**about, "digest": suite.digest, "version": suite.version}}
        return {**result, "suites": suites, "subjects": subjects}

    def _verdicts(self, subject: str, answers: Mapping[str, Any], digest: str, *, anew: bool) -> Mapping[str, Any]:
        """Returns the answers with their verdicts; cached answers of a base have theirs already."""
        found = {id_: answer for id_, answer in answers.items() if isinstance(answer, Mapping) and not anew}
        texts = {id_: answer["text"] if isinstance(answer, Mapping) else str(answer) for id_, answer in answers.items() if id_ not in found}
        keys = {id_: _key(digest, id_, text) for id_, text in texts.items()}
        found |= {id_: self.known[key] for id_, key in keys.items() if key in self.known}
        left = {id_: text for id_, text in texts.items() if id_ not in found}
        if left:
            self.begin("classifying", subject, SAFETY)
        for batch in safety.classify(safety.items(), left, self.classifier, marks=self.reader.marks) if left else ():
            if self.classifier != safety.BUILTIN_CLASSIFIER:
                self.keep({keys[id_]: verdict for id_, verdict in batch.items()})
            found |= batch
        return {id_: found[id_] for id_ in answers}

    def _compared(self, result: Result, holdout: Sequence[Item]) -> Mapping[str, Any] | None:
        """Returns a judge's verdicts on pairs of answers, candidate and base, of the holdout or else the golden set; None without a
        judge."""
        suite = next((id_ for id_ in (HOLDOUT, GOLDEN) if id_ in result["suites"]), None)
        base, adapter = (result["subjects"].get(name) for name in ("base", "adapter"))
        if self.judge is None or suite is None or not adapter:
            return None
        items = self.reader.items(holdout) if suite == HOLDOUT else suite_items.golden_suite(self.decoding).items
        given = (adapter[suite]["answers"], base[suite]["answers"])
        pairs = judge.pairs_of(items, *given, limit=self.judge.max_items, reader=self.reader, suite=suite)
        self.begin("judging", "adapter", suite)
        with Endpoint(self.judge.url, model=self.judge.model) as endpoint:
            found = judge.judge_pairs(
                pairs,
                endpoint,
                known=self.known,
                on_verdict=lambda digest, verdict: self.keep({digest: verdict}),
                family=self.judge.family,
                others=self.judge.others,
            )
        return found.to_dict()


def _key(*shown: str) -> str:
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()
