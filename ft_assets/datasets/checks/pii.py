"""Finds personal data and secrets in texts, and takes them out.

Two steps: Hyperscan runs the gates of all kinds over a text at once and says which kinds could be in it; only those are looked
for exactly, with ``re`` and checksums. Where Hyperscan does not exist (it needs SSSE3 or an emulation of it) the gates run in ``re``:
slower, the same matches. Almost every text has no hit and costs the gate alone.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ft_assets.datasets.checks.pii_patterns import DETECTORS, KINDS, SEPARATOR, SEPARATOR_BYTES, Detector, Kind

ALL: tuple[Kind, ...] = KINDS
MASK = "]"
"""Stands for found text while the rest is searched again; no pattern contains it, as none contains a placeholder's brackets."""

Gate = Callable[[Sequence[str]], dict[int, set[int]]]
"""Texts to, for each text that could match, the detectors that could: by index, both."""


class Match(NamedTuple):
    """Characters `start` to `end` of a text are of `kind`."""

    kind: Kind
    start: int
    end: int


class PiiScanner:
    """Scans texts for some kinds of personal data. Cheap to make after the first time; pickles; one thread at a time."""

    def __init__(self, kinds: Sequence[Kind] = ALL, *, use_hyperscan: bool = True) -> None:
        unknown = [kind for kind in kinds if kind not in ALL]
        if unknown:
            raise ValueError(f"kind {unknown[0]!r} is not one of: {', '.join(ALL)}")
        self.kinds = tuple(kind for kind in ALL if kind in kinds)
        self.use_hyperscan = use_hyperscan
        self._detectors = tuple(d for d in DETECTORS if d.kind in self.kinds)
        self._gate = (use_hyperscan and _hyperscan_gate(self.kinds)) or _re_gate(self.kinds)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(PiiScanner, use_hyperscan=self.use_hyperscan), (self.kinds,)

    def scan(self, texts: Sequence[str]) -> list[list[Match]]:
        """For each text its matches in order; they do not overlap. A text without any shares one empty list with the others."""
        nothing: list[Match] = []
        found = [nothing] * len(texts)
        for index, passed in self._gate(texts).items():
            found[index] = self._exact(texts[index], sorted(passed))
        return found

    def _exact(self, text: str, passed: Sequence[int]) -> list[Match]:
        """Until nothing more is found: what a match hid becomes visible, so that a redacted text is clean."""
        matches: list[Match] = []
        while fresh := _disjoint((self._detectors[i].kind, span) for i in passed for span in self._detectors[i].find(text)):
            matches += fresh
            for _, start, end in fresh:
                text = f"{text[:start]}{MASK * (end - start)}{text[end:]}"
        return sorted(matches, key=lambda match: match.start)


def redact(text: str, matches: Sequence[Match]) -> str:
    """`text` with each match replaced by its kind, as ``[EMAIL]``; a scan of the result finds nothing, so a second time changes nothing."""
    parts, past = [], 0
    for kind, start, end in sorted(matches, key=lambda match: match.start):
        parts += [text[past:start], f"[{kind.upper()}]"]
        past = end
    return "".join([*parts, text[past:]])


def _disjoint(candidates: Any) -> list[Match]:
    """The candidates without those that overlap an earlier one: they come from the most specific detector first."""
    kept: list[Match] = []
    for kind, (start, end) in candidates:
        if all(end <= match.start or match.end <= start for match in kept):
            kept.append(Match(kind, start, end))
    return kept


def _gates(kinds: Sequence[Kind], separator: str) -> list[tuple[int, str, bool]]:
    """(detector, expression, whether case matters not) for all gates of some kinds."""
    detectors = [d for d in DETECTORS if d.kind in kinds]
    spelled = [(i, gate.replace("{sep}", separator)) for i, d in enumerate(detectors) for gate in d.gates]
    return [(i, gate.removeprefix("(?i)"), gate.startswith("(?i)")) for i, gate in spelled]


@functools.lru_cache(maxsize=8)
def _hyperscan_gate(kinds: tuple[Kind, ...]) -> Gate | None:
    """A gate of one Hyperscan database (25 ms to compile), or None where there is no Hyperscan."""
    try:
        import hyperscan
    except ImportError:
        return None
    gates = _gates(kinds, SEPARATOR_BYTES)
    database = hyperscan.Database()
    once = hyperscan.HS_FLAG_SINGLEMATCH  # one report a gate and text bounds the calls back into Python
    database.compile(
        expressions=[gate.encode() for _, gate, _ in gates],
        ids=[i for i, _, _ in gates],
        elements=len(gates),
        flags=[once | (hyperscan.HS_FLAG_CASELESS if caseless else 0) for _, _, caseless in gates],
    )

    def gate(texts: Sequence[str]) -> dict[int, set[int]]:
        passed: dict[int, set[int]] = {}

        def on_match(detector: int, _start: int, _end: int, _flags: int, index: int) -> None:
            passed.setdefault(index, set()).add(detector)

        scan = database.scan
        for index, text in enumerate(texts):
            scan(text.encode("utf-8", "surrogatepass"), match_event_handler=on_match, context=index)
        return passed

    return gate


@functools.lru_cache(maxsize=8)
def _re_gate(kinds: tuple[Kind, ...]) -> Gate:
    compiled = [(i, re.compile(gate, re.IGNORECASE if caseless else 0)) for i, gate, caseless in _gates(kinds, SEPARATOR)]
    needs = [re.compile(d.needs) for d in DETECTORS if d.kind in kinds]

    def could_match(text: str) -> set[int]:
        near = {i for i, need in enumerate(needs) if need.search(text)}
        return {i for i, gate in compiled if i in near and gate.search(text)}

    return lambda texts: {index: passed for index, text in enumerate(texts) if (passed := could_match(text))}


__all__ = ["ALL", "Detector", "Match", "PiiScanner", "redact"]
