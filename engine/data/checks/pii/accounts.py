"""Numbers of accounts and persons: payment cards, IBANs, US social security numbers, each with its check digits."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterator

from stdnum import iban, luhn, numdb

Span = tuple[int, int]

JOINT = "[ \\-\u00a0\u2010-\u2015\u202f]"
"""Separators between the groups of a card number or an IBAN."""


def known_issuer(digits: str) -> bool:
    """Returns whether a card scheme issues numbers with this prefix and length (ISO/IEC 7812 issuer ranges)."""
    length, two, three, four = len(digits), int(digits[:2]), int(digits[:3]), int(digits[:4])
    if digits[0] == "4":
        return length in (13, 16, 19)
    if two in (34, 37):
        return length == 15
    if 51 <= two <= 55 or 2221 <= four <= 2720:
        return length == 16
    if two in (36, 38, 39) or 300 <= three <= 305:
        return 14 <= length <= 19
    if four == 6011 or two in (62, 65) or 644 <= three <= 649 or 3528 <= four <= 3589:
        return 16 <= length <= 19
    return two in (50, 56, 57, 58, 60, 63, 67) and length in (13, 15, 16, 18, 19)


_DIGIT_RUN = re.compile(f"(?<![0-9A-Za-z_])(?<![0-9][.,])[0-9](?:{JOINT}?[0-9]){{12,}}")
_GROUP = re.compile("[0-9]+")
_CARD_GROUPS = re.compile("(?:4 4 4 (?:[1-4]|4 [1-3])|4 6 [45]|1[3-9])$")


def find_cards(text: str) -> Iterator[Span]:
    """Finds card numbers, in one piece or in the groups printed on cards, also beside other numbers."""
    for run in _DIGIT_RUN.finditer(text):
        groups = [g.span() for g in _GROUP.finditer(text, *run.span())]
        first = 0
        while first < len(groups):
            last = next((i for i in range(min(first + 5, len(groups)), first, -1) if _is_card(text, groups[first:i])), first)
            if last > first:
                yield groups[first][0], groups[last - 1][1]
            first = max(last, first + 1)


def _is_card(text: str, groups: list[Span]) -> bool:
    digits = "".join(text[a:b] for a, b in groups)
    joints = {text[a[1] : b[0]] for a, b in itertools.pairwise(groups)}
    if text[groups[-1][1] : groups[-1][1] + 1].isalpha():
        return False
    grouped = _CARD_GROUPS.match(" ".join(str(b - a) for a, b in groups))
    return bool(grouped) and len(joints) < 2 and known_issuer(digits) and len(set(digits)) > 1 and luhn.is_valid(digits)


_IBAN = re.compile(
    f"(?<![0-9A-Za-z_])[A-Za-z]{{2}}[0-9]{{2}}(?:(?:{JOINT}[0-9A-Za-z]{{4}}){{2,7}}{JOINT}?[0-9A-Za-z]{{1,4}}|[0-9A-Za-z]{{11,29}})"
)
_ALNUM = re.compile("[0-9A-Za-z]")


def find_ibans(text: str) -> Iterator[Span]:
    """Finds IBANs with the length and structure of their country and valid check digits, in one piece or in groups of four."""
    for match in _IBAN.finditer(text):
        length = iban_length(match[0][:2].upper())
        places = [m.start() for m in _ALNUM.finditer(match[0])]
        if not 0 < length <= len(places):
            continue
        end = match.start() + places[length - 1] + 1
        whole = "".join(_ALNUM.findall(text[match.start() : end]))
        if not text[end : end + 1].isalnum() and iban.is_valid(whole, check_country=False):  # banks' own check digits are not always kept
            yield match.start(), end


@functools.cache
def iban_length(country: str) -> int:
    """Returns the length of an IBAN by the SWIFT IBAN registry; 0 for a country without."""
    structure = numdb.get("iban").info(country)[0][1].get("bban", "")
    return 4 + sum(map(int, re.findall("([0-9]+)!", structure))) if structure else 0


_SSN = re.compile(
    r"(?<![0-9A-Za-z_\-.])(?!000|666|9)[0-9]{3}-(?!00)[0-9]{2}-(?!0000)[0-9]{4}(?![0-9A-Za-z_]|-[0-9])"
    r"|(?i:(?<![A-Za-z\[])(?:ssn|social security(?: number| no\.?| num\.?)?)(?:[\s:=#]|is|are){0,12})"
    r"(?P<told>(?!000|666|9)[0-9]{3} ?(?!00)[0-9]{2} ?(?!0000)[0-9]{4})(?![0-9A-Za-z_])",
    re.ASCII,
)


def find_ssns(text: str) -> Iterator[Span]:
    """Finds US social security numbers of issued areas; without hyphens only after words that announce one."""
    for match in _SSN.finditer(text):
        yield match.span("told") if match["told"] else match.span()
