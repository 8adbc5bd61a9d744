"""Contact data of a person or a host: e-mail, IP addresses, telephone numbers.

Telephone numbers are ambiguous: they must be international, grouped like telephone numbers, or introduced by a word such as "phone"; a
number that could be a date, a price or a version does not count.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from engine.data.checks.pii.accounts import JOINT, Span

SEPARATOR = "[ .()/\\-\u00a0\u2010-\u2015\u202f]"
"""Separators between the groups of a telephone number."""
_GROUP = re.compile("[0-9]+")
FILE_ENDINGS = frozenset(("png", "jpg", "jpeg", "gif", "svg", "webp", "css", "js", "html", "pdf"))
"""Not top-level domains: ``icon@2x.png`` is a file."""


_DOMAIN = re.compile(r"@((?:[A-Za-z0-9](?:[A-Za-z0-9\-]{0,61}[A-Za-z0-9])?\.){1,8}([A-Za-z]{2,24}))(?![A-Za-z0-9@]|-[A-Za-z0-9])")
_LOCAL = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._%+-"


def find_emails(text: str) -> Iterator[Span]:
    """Finds addresses with a dotted domain; not ``git@host``, not file names, not packages with a version."""
    past = 0
    for match in _DOMAIN.finditer(text):
        head = text[max(past, match.start() - 65) : match.start()]
        local = head[len(head.rstrip(_LOCAL)) :].lstrip(".-%+")
        past = match.end()
        if 1 <= len(local) <= 64 and local[-1] != "." and local != "git" and match[2].lower() not in FILE_ENDINGS:
            yield match.start() - len(local), match.end()


_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = re.compile(rf"(?<![0-9A-Za-z_.\-+])(?<![0-9],){_OCTET}(?:\.{_OCTET}){{3}}(?![0-9A-Za-z_]|\.[0-9]|-[A-Za-z0-9])")
_VERSION = re.compile(
    r"(?ia)(?<![a-z])(?:version|ver|release|build|firmware|section|chapter|clause|v)[\s.:#=\"']{0,3}$|(?:[=~<>!]=|[~^])\s?$"
)
_IPV6 = re.compile(r"(?<![0-9A-Za-z_:.])(?:[23][0-9A-Fa-f]{3}|[fF][c-eC-E][0-9A-Fa-f]{2}):[0-9A-Fa-f:]*[0-9A-Fa-f:](?![0-9A-Za-z_])")


def find_ipv4(text: str) -> Iterator[Span]:
    """Finds addresses that can name a host: not loopback, unspecified, multicast or masks, and not a version of four numbers."""
    for match in _IPV4.finditer(text):
        address = ipaddress.IPv4Address(match[0])
        names_no_host = address.is_loopback or address.is_multicast or address.packed[0] in (0, 255)
        if not names_no_host and not _VERSION.search(text[max(0, match.start() - 14) : match.start()]):
            yield match.span()


def find_ipv6(text: str) -> Iterator[Span]:
    """Finds unicast addresses of three written groups or more, global (2000::/3), unique local or link-local; ``std::vector`` is not
    one."""
    for match in _IPV6.finditer(text):
        spelled = match[0].rstrip(":")
        try:
            ipaddress.IPv6Address(spelled)
        except ValueError:
            continue
        if sum(1 for group in spelled.split(":") if group) >= 3:
            yield match.start(), match.start() + len(spelled)


_END = "(?![0-9]|[.,][0-9])"
_START = "(?<![0-9A-Za-z_+$\u20ac\u00a3#=/\\-])(?<![0-9][.,])"
_GAP = f"(?:{SEPARATOR[:-1]}]{{1,3}})"
_INTERNATIONAL = re.compile(f"(?<![0-9A-Za-z_+])(?:\\(?\\+|(?<![0-9]{JOINT})00{JOINT}?)[1-9][0-9]*(?:{_GAP}[0-9]+){{0,7}}{_END}")
_NORTH_AMERICAN = re.compile(
    f"{_START}(?:1{JOINT})?(?:\\([0-9]{{3}}\\){JOINT}?[0-9]{{3}}(?:{JOINT}|\\.)|(?P<d>[0-9]{{3}}[\\-\u2010-\u2013])[0-9]{{3}}[\\-\u2010-\u2013]"
    f"|[2-9][0-9]{{2}}\\.[2-9][0-9]{{2}}\\.)[0-9]{{4}}(?![0-9A-Za-z_]|[\\-.,][0-9])"
)
_NATIONAL = re.compile(
    f"{_START}(?<![0-9]{JOINT})(?:\\(0[1-9][0-9]{{0,4}}\\) ?[0-9]{{2,8}}"
    f"|0[1-9][0-9]{{1,4}}[ /\\-][0-9]{{2,8}}"
    f"|0[1-9](?:(?P<s>[ .\\-])[0-9]{{2}})(?:(?P=s)[0-9]{{2}}){{3}}(?!{JOINT}?[0-9]))"
    f"(?:[ \\-][0-9]{{2,8}}){{0,3}}{_END}"
)
_ANNOUNCED = re.compile(
    r"(?i:(?<![A-Za-z\[])(?:(?:tele)?phone|tel|mobile|cell ?phone|my cell|fax|whatsapp"
    r"|(?P<verb>sms|call|text|dial|ring|reach|contact))(?![A-Za-z\]]))\.?"
    r"(?i:[\s:=#]*(?:number|no\.?|nr\.?|is|at|on|me|us|him|her|them)(?![A-Za-z]))*[\s:=#]*"
    f"(?P<told>\\(?[0-9]+(?:{_GAP}[0-9]+){{0,7}}){_END}",
    re.ASCII,
)
_DATE = re.compile(r"(?:[0-9]{4}([ ./\-])[0-9]{1,2}\1[0-9]{1,2}|[0-9]{1,2}([ ./\-])[0-9]{1,2}\2(?:19|20)[0-9]{2})(?![0-9])")


def _digits(text: str) -> str:
    return "".join(_GROUP.findall(text))


def _balanced(text: str, start: int, end: int) -> Span:
    """Strips a bracket that opens before the number and closes after it."""
    return start + (text[start] == "(" and text.count("(", start, end) > text.count(")", start, end)), end


def find_international(text: str) -> Iterator[Span]:
    """Finds telephone numbers that begin with a calling code and have a length in use there: +49 30 ..., 0044 20 ..."""
    for match in _INTERNATIONAL.finditer(text):
        ends = [g.end() for g in _GROUP.finditer(text, *match.span())]
        for end in reversed(ends):  # what follows the number may be another number
            if _is_international(text[match.start() : end]):
                yield _balanced(text, match.start(), end)
                break


def _is_international(spelled: str) -> bool:
    digits = _digits(spelled)
    grouped = len(_GROUP.findall(spelled)) > 1
    if "+" not in spelled:
        digits = digits[2:]
        grouped = len(_GROUP.findall(spelled)) > 2 or (grouped and spelled[2].isdigit())
        if not grouped:
            return False
    if not 8 <= len(digits) <= 15 or (digits[0] == "1" and digits[1] not in "23456789"):
        return False
    import phonenumbers  # loads for half a second, and hardly any text has a candidate

    try:
        number = phonenumbers.parse(f"+{digits}")
    except phonenumbers.NumberParseException:
        return False
    return bool(phonenumbers.is_possible_number_with_reason(number) == phonenumbers.ValidationResult.IS_POSSIBLE)


def find_north_american(text: str) -> Iterator[Span]:
    """Finds (415) 555-2671, 415-555-2671, 1-415-555-2671; with dots only if the digits follow the numbering plan."""
    for match in _NORTH_AMERICAN.finditer(text):
        yield match.span()


def find_national(text: str) -> Iterator[Span]:
    """Finds numbers with the trunk prefix 0 in groups: 030/901820, 020 7946 0958, 06 12 34 56 78."""
    for match in _NATIONAL.finditer(text):
        if 9 <= len(_digits(match[0])) <= 12 and not _DATE.match(match[0]):
            yield match.span()


def find_announced(text: str) -> Iterator[Span]:
    """Finds any 7 to 15 digits that the preceding word calls a telephone number."""
    for match in _ANNOUNCED.finditer(text):
        spelled = match["told"]
        at_least = 9 if match["verb"] and spelled.isdigit() else 7  # "call 1200000 customers"
        if at_least <= len(_digits(spelled)) <= 15 and not spelled.endswith("0000") and not _DATE.match(spelled):
            yield _balanced(text, *match.span("told"))
