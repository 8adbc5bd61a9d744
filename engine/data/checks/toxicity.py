"""Scores texts for toxicity and unsafe content with a small lexicon, a service with OpenAI's moderation API, or a class of the operator's.

A classifier gives each text a number from 0 (harmless) to 1; the policy's threshold decides (0.9 by default).
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from core.errors import InvalidRequest
from engine.data.blocks.block_result import BlockResult
from engine.data.blocks.decision import Decision
from engine.data.checks.check import Check, Finding, KeptExamples, Option

LEXICON = Path(__file__).parent / "lexicon.yaml"
GAPS = {"~": r"(?: \S+){0,5}", "~1": r"(?: \S+)?"}
"""Placeholder for words between two parts of a phrase."""
ENDINGS = ("", "s", "es", "ed", "ing", "er", "ers", "y", "in")
"""Pattern for ``word+``."""
_WORDS = re.compile("[a-z0-9']+")
_SPELLINGS = str.maketrans({"\u2019": "'", "@": "a", "$": "s", "\u200b": None, "\u00ad": None})
_KEPT = "abcdefghijklmnopqrstuvwxyz0123456789'"
_ASCII = bytes(ord(c if c in _KEPT else {"@": "a", "$": "s"}.get(c, " ")) for c in (chr(code).lower() for code in range(128))) + b" " * 128
"""The same for ASCII only, as a byte table: five times as fast."""


class Toxicity(Check):
    name = "toxicity"
    options = (
        Option(
            "toxicity",
            ("off", "warn", "drop", "review", "fail"),
            help="rows with a classifier score of `toxicity_threshold` or above; see [classifiers](datasets.md#toxicity-classifiers)",
            in_every_id=True,
        ),
        Option("toxicity_threshold", 0.9, help="score of the classifier, 0 to 1, from which a row counts", in_every_id=True),
    )
    findings = (Finding("toxic", "a row that the classifier scores as toxic", plural="toxic", words="scored as toxic"),)
    order = 60

    @cached_property
    def _classifier(self) -> Classifier:
        return load_classifier(self.setup.options.classifier)

    def identity(self) -> Mapping[str, Any]:
        return {"classifier": self._classifier.name}

    def measure(self, kept: KeptExamples, result: BlockResult) -> Mapping[str, NDArray[Any]]:  # noqa: ARG002 - columns are enough
        return {"toxicity": np.array(self._classifier.scores(kept.texts), np.float32)}

    def decide(self, decision: Decision) -> None:
        score = decision.columns.read("toxicity")
        found = np.flatnonzero(decision.keep & (score >= self.policies.options["toxicity_threshold"]))
        decision.flag("toxic", "toxic", found, self.action, score=score[found].round(3))


CHECK = Toxicity


@runtime_checkable
class Classifier(Protocol):
    """Anything that scores texts. Called from one thread, with a few hundred texts at a time."""

    name: str
    """Part of the report and of the dataset's id: another classifier gives another dataset."""

    def scores(self, texts: Sequence[str]) -> Sequence[float]:
        """Returns a score from 0 to 1 for each text, in order. Raises ``Unavailable`` if it cannot."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Phrase:
    """One entry of the lexicon, prepared for searching."""

    category: str
    weight: float
    anchors: tuple[str, ...]
    """Words, one of which the text must contain; the search for the phrase begins there."""
    pattern: re.Pattern[str]
    """Pattern over the text's words joined by single spaces, with a space before and after."""


class LexiconClassifier:
    """Weighted phrases of seven categories, combined by noisy-or: 1 - product(1 - weight) over the different phrases found.

    English only, without context or intent: a first filter for gross content, not to be relied on alone. Measurements are in
    ``docs/datasets.md``.
    """

    name = "builtin-lexicon-1"

    def __init__(self, phrases: Iterable[Phrase] | None = None) -> None:
        self._by_anchor: dict[str, list[Phrase]] = {}
        for phrase in load_lexicon() if phrases is None else phrases:
            for anchor in phrase.anchors:
                self._by_anchor.setdefault(anchor, []).append(phrase)

    def scores(self, texts: Sequence[str]) -> list[float]:
        return [self._score(text) for text in texts]

    def categories(self, text: str) -> dict[str, float]:
        """Returns the score of each category that has any, worst first: why a text was flagged."""
        found: dict[str, float] = {}
        for phrase in self._found(text):
            found[phrase.category] = 1.0 - (1.0 - found.get(phrase.category, 0.0)) * (1.0 - phrase.weight)
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))

    def _score(self, text: str) -> float:
        harmless = 1.0
        for phrase in self._found(text):
            harmless *= 1.0 - phrase.weight
        return 1.0 - harmless

    def _found(self, text: str) -> list[Phrase]:
        words = words_of(text)
        anchors = self._by_anchor.keys() & words
        if not anchors:
            return []
        joined = f" {' '.join(words)} "
        near = {id(phrase): phrase for anchor in sorted(anchors) for phrase in self._by_anchor[anchor]}
        return [phrase for phrase in near.values() if phrase.pattern.search(joined)]


def words_of(text: str) -> list[str]:
    """Returns the words of a text in lower case, without accents or punctuation; ``a$$`` is spelled with letters."""
    if text.isascii():
        return text.encode().translate(_ASCII).decode().split()
    return _WORDS.findall(text.casefold().translate(_SPELLINGS))


@functools.cache
def load_lexicon(path: Path = LEXICON) -> tuple[Phrase, ...]:
    """Parses the phrases of a lexicon file: category -> weight -> phrases."""
    import yaml

    entries: Mapping[str, Mapping[float, Sequence[str]]] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return tuple(
        phrase_of(spelled, category=category, weight=float(weight))
        for category, weights in entries.items()
        for weight, phrases in weights.items()
        for spelled in phrases
    )


def phrase_of(spelled: str, *, category: str, weight: float) -> Phrase:
    """Parses one phrase of the lexicon; its anchor is the last part, by convention the rarest."""
    if not 0.0 < weight < 1.0:
        raise ValueError(f"weight {weight} of {spelled!r} is outside of 0 < w < 1")
    parts: list[tuple[str, ...]] = []
    pattern = ""
    for part in spelled.split():
        if part in GAPS:
            pattern += GAPS[part]
            continue
        words = tuple(dict.fromkeys(form for word in part.split("|") for form in _forms(word)))
        parts.append(words)
        pattern += f" (?:{'|'.join(map(re.escape, words))})"
    return Phrase(category=category, weight=weight, anchors=parts[-1], pattern=re.compile(f"{pattern} "))


def _forms(word: str) -> list[str]:
    if not word.endswith("+"):
        return [word]
    stem = word[:-1]
    return [*(stem + ending for ending in ENDINGS), *(stem[:-1] + ending for ending in ("ed", "ing", "er", "ers") if stem.endswith("e"))]


def load_classifier(spec: str) -> Classifier:
    """Returns the classifier that a setting names: ``builtin``, ``http(s)://host/v1/moderations[#model]``, or ``package.module:factory``.

    The factory is called without arguments and returns a classifier; a class is its own factory. Raises ``InvalidRequest`` if it cannot be
    loaded. Naming a module runs its code: the setting is the operator's, never a tenant's.
    """
    if spec == "builtin":
        return LexiconClassifier()
    if spec.startswith(("http://", "https://")):
        from engine.data.checks.moderation import ModerationClassifier

        url, _, model = spec.partition("#")
        return ModerationClassifier(url, model=model or None)
    module, colon, factory = spec.partition(":")
    if not (colon and module and factory):
        raise _not_loaded(spec, "it is not 'builtin', an http(s) address, or 'package.module:factory'")
    return _from_module(spec, module, factory)


def _from_module(spec: str, module: str, factory: str) -> Classifier:
    try:
        made: Any = getattr(importlib.import_module(module), factory)()
    except ImportError as error:
        raise _not_loaded(spec, f"{error}; install the package where datasets are checked") from error
    except (AttributeError, TypeError) as error:
        raise _not_loaded(spec, str(error)) from error
    if not isinstance(made, Classifier):
        raise _not_loaded(spec, f"{factory} gave a {type(made).__name__}, which lacks 'name' or 'scores(texts)'")
    return made


def _not_loaded(spec: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"toxicity classifier {spec[:120]!r} cannot be loaded: {why}", code="invalid_classifier", param="classifier")
