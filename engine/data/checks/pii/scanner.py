"""Finds personal data and secrets in texts, and redacts them.

Two steps: Hyperscan runs the gates of all kinds over a text at once and returns the kinds that it may contain; only those are searched
exactly, with ``re`` and checksums. Without Hyperscan (it needs SSSE3 or an emulation of it) the gates run in ``re``: slower, with the same
matches. Almost every text has no hit and costs only the gate.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from engine.data.checks.pii.accounts import Span, find_cards, find_ibans, find_ssns
from engine.data.checks.pii.contacts import (
    SEPARATOR,
    find_announced,
    find_emails,
    find_international,
    find_ipv4,
    find_ipv6,
    find_national,
    find_north_american,
)
from engine.data.checks.pii.credentials import KEY_GATES, find_assigned, find_keys, find_private_keys

Finder = Callable[[str], Iterator[Span]]
Kind = Literal["private_key", "api_key", "iban", "card", "ssn", "email", "ip_address", "phone"]

SEPARATOR_BYTES = r"(?:[ .()/\-]|\xc2\xa0|\xe2\x80[\x90-\x95\xaf])"
"""The characters of SEPARATOR in UTF-8; gates write either as ``{sep}``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Detector:
    kind: Kind
    gates: tuple[str, ...]
    """Expressions with the same meaning in Hyperscan and ``re``; one of them occurs wherever a finder finds anything."""
    finds: tuple[Finder, ...]
    """Exact positions in a text; of two that overlap, the earlier finder's, and of one finder the first."""
    needs: str = ""
    """Without Hyperscan: an expression that is quick to search and required for any gate to hit; empty: none."""


DETECTORS: tuple[Detector, ...] = (
    Detector(kind="private_key", gates=("PRIVATE KEY",), finds=(find_private_keys,), needs="PRIVATE KEY"),
    Detector(
        kind="api_key",
        gates=KEY_GATES,
        finds=(find_keys,),
        needs="sk-|A[KS]IA|gh[opsur]_|github_|glpat-|xox|slack|AIza|k_(?:live|test)|whsec_|hf_|npm_|SG|eyJ",
    ),
    Detector(
        kind="iban",
        gates=("(?i)[a-z]{2}[0-9]{2}{sep}?[a-z0-9]{4}{sep}?[a-z0-9]{4}{sep}?[a-z0-9]{3}",),
        finds=(find_ibans,),
        needs="[A-Za-z]{2}[0-9]{2}",
    ),
    Detector(kind="card", gates=("[0-9](?:{sep}?[0-9]){12}",), finds=(find_cards,), needs="[0-9]{4}"),
    Detector(
        kind="ssn",
        gates=("[0-9]{3}-[0-9]{2}-[0-9]{4}", "(?i)(?:ssn|social security)[ \\t\\r\\n\\f\\v:=#a-z.]{0,48}[0-9]{3}"),
        finds=(find_ssns,),
        needs="[0-9]{3}",
    ),
    Detector(kind="email", gates=("(?i)@[a-z0-9][a-z0-9.\\-]*\\.[a-z]{2}",), finds=(find_emails,), needs="@"),
    Detector(
        kind="ip_address",
        gates=("[0-9]\\.[0-9]{1,3}\\.[0-9]{1,3}\\.[0-9]", "(?i)(?:[23][0-9a-f]{3}|f[cde][0-9a-f]{2}):[0-9a-f]{0,4}:"),
        finds=(find_ipv4, find_ipv6),
        needs="[0-9]\\.[0-9]|[0-9A-Fa-f]:[0-9A-Fa-f]{0,4}:",
    ),
    Detector(
        kind="phone",
        gates=("[0-9](?:{sep}{0,3}[0-9]){6}",),
        finds=(find_international, find_north_american, find_national, find_announced),
        needs="[0-9]{2}",
    ),
    Detector(
        kind="api_key",
        gates=("(?i)(?:key|token|secret|passw(?:or)?d|pwd)[\"']?[ \\t]{0,3}(?::=|==|=>|[:=])[ \\t]{0,3}[\"']?[a-z0-9+/=_.\\-]{16}",),
        finds=(find_assigned,),
        needs="[:=]",
    ),
)
"""In a gate, context is ignored; whatever a finder finds contains a hit of its gate (a property test checks this).

For overlapping text the earlier kind here takes precedence: those with a checksum or a vendor's prefix come first."""
KINDS: tuple[Kind, ...] = tuple(dict.fromkeys(d.kind for d in DETECTORS))
ALL: tuple[Kind, ...] = KINDS
MASK = "]"
"""Replaces found text while the rest is searched again; no pattern contains it, and none contains a placeholder's brackets."""

Gate = Callable[[Sequence[str]], dict[int, set[int]]]
"""Maps texts to the detectors that may match each: both by index."""


class Match(NamedTuple):
    """Characters `start` to `end` of a text are of `kind`."""

    kind: Kind
    start: int
    end: int


class PiiScanner:
    """Scans texts for some kinds of personal data. Cheap to create after the first time; picklable; not thread-safe."""

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
        """Returns for each text its matches in order, without overlaps. Texts without matches share one empty list."""
        nothing: list[Match] = []
        found = [nothing] * len(texts)
        for index, passed in self._gate(texts).items():
            found[index] = self._exact(texts[index], sorted(passed))
        return found

    def suspects(self, texts: Sequence[str]) -> list[int]:
        """Returns the indexes of texts that may contain a match: a cheap first look that misses nothing that :meth:`scan` finds."""
        return sorted(self._gate(texts))

    def _exact(self, text: str, passed: Sequence[int]) -> list[Match]:
        """Scans until nothing more is found: a match may hide another, and a redacted text must be clean."""
        matches: list[Match] = []
        while fresh := self._once(text, passed):
            matches += fresh
            text = _replaced(text, fresh, lambda match: MASK * (match.end - match.start))
        return sorted(matches, key=_start)

    def _once(self, text: str, passed: Sequence[int]) -> list[Match]:
        kept: list[Match] = []
        for detector in (self._detectors[i] for i in passed):
            for find in detector.finds:
                if spans := sorted(find(text)):
                    kept = _joined(kept, [Match(detector.kind, start, end) for start, end in spans])
        return kept


def redact(text: str, matches: Sequence[Match]) -> str:
    """Returns `text` with each match replaced by its kind, such as ``[EMAIL]``; scanning the result finds nothing."""
    return _replaced(text, sorted(matches, key=_start), lambda match: f"[{match.kind.upper()}]")


def _start(match: Match) -> int:
    return match.start


def _replaced(text: str, matches: Sequence[Match], by: Callable[[Match], str]) -> str:
    parts, past = [], 0
    for match in matches:
        parts += [text[past : match.start], by(match)]
        past = match.end
    return "".join([*parts, text[past:]])


def _joined(kept: list[Match], fresh: Sequence[Match]) -> list[Match]:
    """Returns `kept` and those of `fresh` that overlap neither them nor each other; all in order of their starts."""
    added: list[Match] = []
    index = past = 0
    for match in fresh:
        while index < len(kept) and kept[index].end <= match.start:
            index += 1
        if match.start >= past and (index == len(kept) or match.end <= kept[index].start):
            added.append(match)
            past = match.end
    return sorted([*kept, *added], key=_start) if added else kept


def _gates(kinds: Sequence[Kind], separator: str) -> list[tuple[int, str, bool]]:
    """Returns (detector, expression, whether to ignore case) for all gates of some kinds."""
    detectors = [d for d in DETECTORS if d.kind in kinds]
    spelled = [(i, gate.replace("{sep}", separator)) for i, d in enumerate(detectors) for gate in d.gates]
    return [(i, gate.removeprefix("(?i)"), gate.startswith("(?i)")) for i, gate in spelled]


@functools.lru_cache(maxsize=8)
def _hyperscan_gate(kinds: tuple[Kind, ...]) -> Gate | None:
    """Compiles a gate of one Hyperscan database (25 ms); None without Hyperscan."""
    try:
        import hyperscan
    except ImportError:
        return None
    gates = _gates(kinds, SEPARATOR_BYTES)
    database = hyperscan.Database()
    once = hyperscan.HS_FLAG_SINGLEMATCH  # one report per gate and text limits the calls back into Python
    database.compile(
        expressions=[gate.encode() for _, gate, _ in gates],
        ids=[i for i, _, _ in gates],
        elements=len(gates),
        flags=[once | (hyperscan.HS_FLAG_CASELESS if caseless else 0) for _, _, caseless in gates],
    )

    def gate(texts: Sequence[str]) -> dict[int, set[int]]:
        passed: dict[int, set[int]] = {}

        def on_match(detector: int, _start: int, _end: int, _flags: int, index: Any) -> None:
            passed.setdefault(index, set()).add(detector)

        scan = database.scan
        for index, text in enumerate(texts):
            scan(text.encode("utf-8", "surrogatepass"), match_event_handler=on_match, context=index)
        return passed

    return gate


@functools.lru_cache(maxsize=8)
def _re_gate(kinds: tuple[Kind, ...]) -> Gate:
    compiled = [(i, re.compile(gate, re.ASCII | (re.IGNORECASE if caseless else 0))) for i, gate, caseless in _gates(kinds, SEPARATOR)]
    needs = [re.compile(d.needs) for d in DETECTORS if d.kind in kinds]

    def could_match(text: str) -> set[int]:
        near = {i for i, need in enumerate(needs) if need.search(text)}
        return {i for i, gate in compiled if i in near and gate.search(text)}

    return lambda texts: {index: passed for index, text in enumerate(texts) if (passed := could_match(text))}
