"""Kinds of personal data and secrets: each has a gate, which is cheap and misses nothing, and functions that find exact matches.

A gate ignores context; whatever a finder finds contains a hit of its gate (a property test checks this).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from ft_assets.datasets.checks.pii.accounts import Span, find_cards, find_ibans, find_ssns
from ft_assets.datasets.checks.pii.contacts import (
    SEPARATOR,
    find_announced,
    find_emails,
    find_international,
    find_ipv4,
    find_ipv6,
    find_national,
    find_north_american,
)
from ft_assets.datasets.checks.pii.credentials import KEY_GATES, find_assigned, find_keys, find_private_keys

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
"""For overlapping text the earlier kind here takes precedence: those with a checksum or a vendor's prefix come first."""
KINDS: tuple[Kind, ...] = tuple(dict.fromkeys(d.kind for d in DETECTORS))

__all__ = ["DETECTORS", "KINDS", "SEPARATOR", "SEPARATOR_BYTES", "Detector", "Kind"]
