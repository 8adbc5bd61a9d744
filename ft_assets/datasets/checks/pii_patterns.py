"""What personal data and secrets look like: for each kind a gate, which is cheap and misses nothing, and an exact form with its check.

A gate sees bytes and knows no context; whatever an exact form finds contains a hit of its gate (a property test holds the two
together). Exact forms prefer to miss a doubtful number over flagging prices, dates and versions: a telephone number must be
international, grouped as telephone numbers are, or introduced by a word such as "phone".
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import log2
from typing import Literal

Kind = Literal["private_key", "api_key", "iban", "card", "ssn", "email", "ip_address", "phone"]
Span = tuple[int, int]

SEPARATOR = "[ .()/\\-\u00a0\u2010-\u2015\u202f]"
SEPARATOR_BYTES = r"(?:[ .()/\-]|\xc2\xa0|\xe2\x80[\x90-\x95\xaf])"
"""The same characters in UTF-8; gates spell them ``{sep}``."""
JOINT = "[ \\-\u00a0\u2010-\u2015\u202f]"
"""What stands between the groups of a card number or an IBAN."""
IBAN_LENGTHS = {
    country: int(length)
    for country, length in re.findall(
        "([A-Z]{2})([0-9]{2})",
        "AD24AE23AL28AT20AZ28BA20BE16BG22BH22BI27BR29BY28CH21CR22CY28CZ24DE22DJ27DK18DO28EE20EG29ES24FI18FK18FO18FR27GB22GE22GI23GL18"
        "GR27GT28HN28HR21HU28IE22IL23IQ23IS26IT27JO30KW30KZ20LB28LC32LI21LT20LU20LV21LY25MC27MD24ME22MK19MN20MR27MT31MU30NI28NL18NO15"
        "OM23PK24PL28PS29PT25QA29RO24RS22RU33SA24SC31SD18SE24SI19SK24SM27SO23ST25SV28TL23TN24TR26UA29VA22VG24XK20YE30",
    )
}
"""Characters of an IBAN by country: the SWIFT IBAN registry."""
CALLING_CODES = frozenset(
    "1 7 20 27 30 31 32 33 34 36 39 40 41 43 44 45 46 47 48 49 51 52 53 54 55 56 57 58 60 61 62 63 64 65 66 81 82 84 86 90 91 92 93 94 95 98 "
    "211 212 213 216 218 220 221 222 223 224 225 226 227 228 229 230 231 232 233 234 235 236 237 238 239 240 241 242 243 244 245 246 248 249 "
    "250 251 252 253 254 255 256 257 258 260 261 262 263 264 265 266 267 268 269 290 291 297 298 299 350 351 352 353 354 355 356 357 358 359 "
    "370 371 372 373 374 375 376 377 378 379 380 381 382 383 385 386 387 389 420 421 423 500 501 502 503 504 505 506 507 508 509 590 591 592 "
    "593 594 595 596 597 598 599 670 672 673 674 675 676 677 678 679 680 681 682 683 685 686 687 688 689 690 691 692 850 852 853 855 856 880 "
    "886 960 961 962 963 964 965 966 967 968 970 971 972 973 974 975 976 977 992 993 994 995 996 998".split()
)
"""Country calling codes in use: ITU-T E.164."""
FILE_ENDINGS = frozenset(("png", "jpg", "jpeg", "gif", "svg", "webp", "css", "js", "html", "pdf"))
"""Not top-level domains: ``icon@2x.png`` is a file."""
MIN_RANDOM_BITS = 3.0
"""Entropy a character from which a value assigned to a "secret" counts as one: 32 random hex digits have about 3.5, English words
and placeholders of that length 2 to 3 and no digits among the letters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Detector:
    kind: Kind
    gates: tuple[str, ...]
    """Expressions that Hyperscan and ``re`` read alike, of which one occurs wherever `find` finds anything."""
    find: Callable[[str], Iterator[Span]]
    """The exact places in a text, in order; those of one detector may touch but not overlap."""
    needs: str = ""
    """Without Hyperscan: an expression that is quick to search, and without which no gate can hit; empty: none."""


def luhn(digits: str) -> bool:
    """The check of ISO/IEC 7812-1, which a tenth of all numbers pass by chance."""
    odd, even = digits[-1::-2], digits[-2::-2]
    return (sum(map(int, odd)) + sum(sum(divmod(2 * int(d), 10)) for d in even)) % 10 == 0


def known_issuer(digits: str) -> bool:
    """Whether a card scheme issues numbers that begin so and are so long (ISO/IEC 7812 issuer ranges)."""
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


_DIGIT_RUN = re.compile(f"(?<![0-9A-Za-z_])(?<![0-9][.,])[0-9](?:{JOINT}?[0-9]){{12,}}(?![0-9A-Za-z_])")
_GROUP = re.compile("[0-9]+")
_CARD_GROUPS = re.compile("(?:4 4 4 (?:[1-4]|4 [1-3])|4 6 [45]|1[3-9])$")


def find_cards(text: str) -> Iterator[Span]:
    """Card numbers, in one piece or in the groups that cards print, also beside other numbers."""
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
    joints = {text[a[1] : b[0]] for a, b in zip(groups, groups[1:], strict=False)}
    grouped = _CARD_GROUPS.match(" ".join(str(b - a) for a, b in groups))
    return bool(grouped) and len(joints) < 2 and known_issuer(digits) and len(set(digits)) > 1 and luhn(digits)


_IBAN = re.compile(
    f"(?<![0-9A-Za-z_])[A-Za-z]{{2}}[0-9]{{2}}(?:(?:{JOINT}[0-9A-Za-z]{{4}}){{2,7}}{JOINT}?[0-9A-Za-z]{{1,4}}|[0-9A-Za-z]{{11,29}})"
)
_ALNUM = re.compile("[0-9A-Za-z]")


def find_ibans(text: str) -> Iterator[Span]:
    """IBANs of the length of their country whose remainder by 97 is 1 (ISO 13616), in one piece or in groups of four."""
    for match in _IBAN.finditer(text):
        length = IBAN_LENGTHS.get(match[0][:2].upper(), 0)
        places = [m.start() for m in _ALNUM.finditer(match[0])]
        if not 0 < length <= len(places):
            continue
        end = match.start() + places[length - 1] + 1
        whole = "".join(_ALNUM.findall(text[match.start() : end])).upper()
        if not text[end : end + 1].isalnum() and int("".join(str(int(c, 36)) for c in whole[4:] + whole[:4])) % 97 == 1:
            yield match.start(), end


_SSN = re.compile(
    r"(?<![0-9A-Za-z_\-.])(?!000|666|9)[0-9]{3}-(?!00)[0-9]{2}-(?!0000)[0-9]{4}(?![0-9A-Za-z_]|-[0-9])"
    r"|(?i:(?<![A-Za-z\[])(?:ssn|social security(?: number| no\.?| num\.?)?)(?:[\s:=#]|is|are)*)(?P<told>(?!000|666|9)[0-9]{3} ?(?!00)[0-9]{2} ?(?!0000)[0-9]{4})(?![0-9A-Za-z_])"
)


def find_ssns(text: str) -> Iterator[Span]:
    """US social security numbers of areas that are issued; without hyphens only after words that say so."""
    for match in _SSN.finditer(text):
        yield match.span("told") if match["told"] else match.span()


_DOMAIN = re.compile(r"@((?:[A-Za-z0-9](?:[A-Za-z0-9\-]{0,61}[A-Za-z0-9])?\.){1,8}([A-Za-z]{2,24}))(?![A-Za-z0-9@]|-[A-Za-z0-9])")
_LOCAL = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._%+-"


def find_emails(text: str) -> Iterator[Span]:
    """Addresses with a dotted domain; not ``git@host``, not file names, not packages with a version."""
    past = 0
    for match in _DOMAIN.finditer(text):
        head = text[max(past, match.start() - 65) : match.start()]
        local = head[len(head.rstrip(_LOCAL)) :].lstrip(".-%+")
        past = match.end()
        if 1 <= len(local) <= 64 and local[-1] != "." and local != "git" and match[2].lower() not in FILE_ENDINGS:
            yield match.start() - len(local), match.end()


_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = re.compile(rf"(?<![0-9A-Za-z_.\-+])(?<![0-9],){_OCTET}(?:\.{_OCTET}){{3}}(?![0-9A-Za-z_]|\.[0-9]|-[A-Za-z0-9])")
_VERSION = re.compile(r"(?i)(?:version|ver|release|build|firmware|section|chapter|clause|v)[\s.:#=\"']{0,3}$|[=~^<>]=?\s?$")
_IPV6 = re.compile(r"(?<![0-9A-Za-z_:.])(?:[23][0-9A-Fa-f]{3}|[fF][c-eC-E][0-9A-Fa-f]{2}):[0-9A-Fa-f:]*[0-9A-Fa-f:](?![0-9A-Za-z_])")


def find_ip_addresses(text: str) -> Iterator[Span]:
    """Addresses that can name a host: not loopback, unspecified, multicast or masks, and not a version of four numbers."""
    for match in _IPV4.finditer(text):
        address = ipaddress.IPv4Address(match[0])
        names_no_host = address.is_loopback or address.is_multicast or address.packed[0] in (0, 255)
        if not names_no_host and not _VERSION.search(text[max(0, match.start() - 14) : match.start()]):
            yield match.span()
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
_INTERNATIONAL = re.compile(f"(?<![0-9A-Za-z_+])(?:\\(?\\+|(?<![0-9]{JOINT})00{JOINT}?)[1-9][0-9]{{0,13}}(?:{_GAP}?[0-9]+){{0,7}}{_END}")
_NORTH_AMERICAN = re.compile(
    f"{_START}(?:1{JOINT})?(?:\\([0-9]{{3}}\\){JOINT}?[0-9]{{3}}(?:{JOINT}|\\.)|(?P<d>[0-9]{{3}}[\\-\u2010-\u2013])[0-9]{{3}}[\\-\u2010-\u2013]"
    f"|[2-9][0-9]{{2}}\\.[2-9][0-9]{{2}}\\.)[0-9]{{4}}(?![0-9A-Za-z_]|[\\-.,][0-9])"
)
_NATIONAL = re.compile(
    f"{_START}(?<![0-9]{JOINT})(?:\\(0[1-9][0-9]{{0,4}}\\) ?[0-9]{{2,8}}|0[1-9][0-9]{{1,4}}[ /\\-][0-9]{{2,8}}|0[1-9](?:(?P<s>[ .\\-])[0-9]{{2}})(?:(?P=s)[0-9]{{2}}){{3}}(?!{JOINT}?[0-9]))(?:[ \\-][0-9]{{2,8}}){{0,3}}{_END}"
)
_TOLD = re.compile(
    r"(?i:(?<![A-Za-z\[])(?:(?:tele)?phone|tel|mobile|cell ?phone|my cell|fax|whatsapp|(?P<verb>sms|call|text|dial|ring|reach|contact))(?![A-Za-z\]]))\.?"
    r"(?i:[\s:=#]*(?:number|no\.?|nr\.?|is|at|on|me|us|him|her|them)(?![A-Za-z]))*[\s:=#]*"
    f"(?P<told>\\(?[0-9](?:{_GAP}?[0-9]+){{1,7}}){_END}"
)
_DATE = re.compile(r"(?:[0-9]{4}([ ./\-])[0-9]{1,2}\1[0-9]{1,2}|[0-9]{1,2}([ ./\-])[0-9]{1,2}\2(?:19|20)[0-9]{2})(?![0-9])")


def find_phones(text: str) -> Iterator[Span]:
    """Telephone numbers: +49 30 ..., 0044 20 ..., (415) 555-2671, 415-555-2671, 030/..., and any of 7 to 15 digits after "phone"."""
    taken: list[Span] = []
    for start, end in (*_international(text), *_grouped(text), *_told(text)):
        if all(end <= a or b <= start for a, b in taken):
            taken.append((start, end))
    yield from sorted(taken)


def _digits(text: str) -> str:
    return "".join(_GROUP.findall(text))


def _international(text: str) -> Iterator[Span]:
    for match in _INTERNATIONAL.finditer(text):
        ends = [g.end() for g in _GROUP.finditer(text, *match.span())]
        for end in reversed(ends):  # what follows the number may be another number
            if _is_international(text[match.start() : end]):
                yield match.start(), end
                break


def _is_international(spelled: str) -> bool:
    digits = _digits(spelled)
    grouped = len(_GROUP.findall(spelled)) > 1
    if "+" not in spelled:
        digits = digits[2:]
        grouped = len(_GROUP.findall(spelled)) > 2 or (grouped and spelled[2].isdigit())
        if not grouped:
            return False
    if digits[:1] == "1":
        return len(digits) == 11 and digits[1] in "23456789"
    known = any(digits[:n] in CALLING_CODES for n in (1, 2, 3))
    return known and (8 if grouped else 9) <= len(digits) <= 15


def _grouped(text: str) -> Iterator[Span]:
    for match in _NORTH_AMERICAN.finditer(text):
        yield match.span()
    for match in _NATIONAL.finditer(text):
        if 9 <= len(_digits(match[0])) <= 12 and not _DATE.match(match[0]):
            yield match.span()


def _told(text: str) -> Iterator[Span]:
    for match in _TOLD.finditer(text):
        spelled = match["told"]
        at_least = 9 if match["verb"] and spelled.isdigit() else 7  # "call 1200000 customers"
        if at_least <= len(_digits(spelled)) <= 15 and not spelled.endswith("0000") and not _DATE.match(spelled):
            yield match.start("told") + (spelled[0] == "(" and ")" not in spelled), match.end("told")


_KEY_FORMS = (
    r"sk-(?:proj|svcacct|admin|ant|or)-[A-Za-z0-9_\-]{20,250}",
    r"sk-[A-Za-z0-9]{20,64}(?![A-Za-z0-9\-])",
    r"(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])",
    r"gh[opsur]_[A-Za-z0-9]{36,251}",
    r"github_pat_[A-Za-z0-9_]{22,251}",
    r"glpat-[A-Za-z0-9_\-]{20,64}",
    r"xox[abeoprs]-[A-Za-z0-9\-]{10,250}",
    r"hooks\.slack\.com/services/T[A-Z0-9]{6,12}/B[A-Z0-9]{6,12}/[A-Za-z0-9]{18,32}",
    r"AIza[A-Za-z0-9_\-]{35}(?![A-Za-z0-9_\-])",
    r"[rs]k_(?:live|test)_[A-Za-z0-9]{16,250}",
    r"whsec_[A-Za-z0-9]{24,64}",
    r"hf_[A-Za-z0-9]{30,64}",
    r"npm_[A-Za-z0-9]{36}(?![A-Za-z0-9])",
    r"SG\.[A-Za-z0-9_\-]{22}\.[A-Za-z0-9_\-]{43}",
    r"eyJ[A-Za-z0-9_\-]{8,4000}\.eyJ[A-Za-z0-9_\-]{8,8000}\.[A-Za-z0-9_\-]{16,1000}",
)
"""As the vendors' own secret scanners document them: OpenAI, Anthropic, AWS, GitHub, GitLab, Slack, Google, Stripe, Hugging Face, npm, SendGrid,
JSON web tokens."""
_KEY_GATES = (
    r"sk-(?:(?:proj|svcacct|admin|ant|or)-[A-Za-z0-9_\-]{20}|[A-Za-z0-9]{20})",
    r"A[KS]IA[A-Z0-9]{16}",
    r"gh[opsur]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{22}|glpat-[A-Za-z0-9_\-]{20}",
    r"xox[abeoprs]-[A-Za-z0-9\-]{10}|hooks\.slack\.com/services/T",
    r"AIza[A-Za-z0-9_\-]{35}|[rs]k_(?:live|test)_[A-Za-z0-9]{16}|whsec_[A-Za-z0-9]{24}",
    r"hf_[A-Za-z0-9]{30}|npm_[A-Za-z0-9]{36}|SG\.[A-Za-z0-9_\-]{22}\.",
    r"eyJ[A-Za-z0-9_\-]{8,4000}\.eyJ".replace("{8,4000}", "{8,}"),
)
_KEY = re.compile(f"(?<![A-Za-z0-9])(?:{'|'.join(_KEY_FORMS)})")
_ASSIGNED = re.compile(
    r"(?i:key|token|secret|passw(?:or)?d|pwd)[\"']?[ \t]{0,3}(?::=|==|=>|[:=])[ \t]{0,3}[\"']?(?P<value>[A-Za-z0-9+/=_.\-]{16,512})(?![A-Za-z0-9+/=_.\-\[])"
)


def find_keys(text: str) -> Iterator[Span]:
    """Keys whose form tells the vendor."""
    for match in _KEY.finditer(text):
        yield match.span()


def find_assigned(text: str) -> Iterator[Span]:
    """Values assigned to a key, token, secret or password that look drawn at random; the value alone."""
    for match in _ASSIGNED.finditer(text):
        value = match["value"].rstrip(".")
        if len(value) >= 16 and looks_random(value):
            yield match.start("value"), match.start("value") + len(value)


def looks_random(value: str) -> bool:
    """Digits scattered among letters, and few repeats: not a name, a path, a number or a placeholder."""
    changes = sum(1 for a, b in zip(value, value[1:], strict=False) if a.isalnum() and b.isalnum() and a.isdigit() != b.isdigit())
    entropy = -sum(n / len(value) * log2(n / len(value)) for n in Counter(value).values())
    return changes >= 3 and entropy >= MIN_RANDOM_BITS


_PEM = r"-----{} [A-Z0-9 ]{{0,40}}PRIVATE KEY(?: BLOCK)?-----"
_PEM_BEGIN, _PEM_END = (
    re.compile(_PEM.format("BEGIN").replace("BEGIN ", "BEGIN[ ]")),
    re.compile(_PEM.format("END").replace("END ", "END[ ]")),
)
_PEM_BODY = re.compile(r"[A-Za-z0-9+/=\s\\]*")


def find_private_keys(text: str) -> Iterator[Span]:
    """PEM and PGP blocks from BEGIN to END; where the END is cut off, as far as the body reaches. A header alone is no key."""
    past = 0
    for begin in _PEM_BEGIN.finditer(text):
        if begin.start() < past:
            continue
        end = _PEM_END.search(text, begin.end())
        following = _PEM_BEGIN.search(text, begin.end())
        if end and not (following and following.start() < end.start()):
            past = end.end()
        else:
            body = _PEM_BODY.match(text, begin.end())
            past = body.end() if body else begin.end()
            if past - begin.end() < 40:
                continue
        yield begin.start(), past


DETECTORS: tuple[Detector, ...] = (
    Detector(kind="private_key", gates=("PRIVATE KEY",), find=find_private_keys, needs="PRIVATE KEY"),
    Detector(
        kind="api_key",
        gates=_KEY_GATES,
        find=find_keys,
        needs="sk-|A[KS]IA|gh[opsur]_|github_|glpat-|xox|slack|AIza|k_(?:live|test)|whsec_|hf_|npm_|SG|eyJ",
    ),
    Detector(
        kind="iban",
        gates=("(?i)[a-z]{2}[0-9]{2}{sep}?[a-z0-9]{4}{sep}?[a-z0-9]{4}{sep}?[a-z0-9]{3}",),
        find=find_ibans,
        needs="[A-Za-z]{2}[0-9]{2}",
    ),
    Detector(kind="card", gates=("[0-9](?:{sep}?[0-9]){12}",), find=find_cards, needs="[0-9]{4}"),
    Detector(
        kind="ssn",
        gates=("[0-9]{3}-[0-9]{2}-[0-9]{4}", "(?i)(?:ssn|social security)[ \\t\\r\\n:=#a-z.]{0,24}[0-9]{3}"),
        find=find_ssns,
        needs="[0-9]{3}",
    ),
    Detector(kind="email", gates=("(?i)@[a-z0-9][a-z0-9.\\-]*\\.[a-z]{2}",), find=find_emails, needs="@"),
    Detector(
        kind="ip_address",
        gates=("[0-9]\\.[0-9]{1,3}\\.[0-9]{1,3}\\.[0-9]", "(?i)(?:[23][0-9a-f]{3}|f[cde][0-9a-f]{2}):[0-9a-f]{0,4}:"),
        find=find_ip_addresses,
        needs="[0-9]\\.[0-9]|[0-9A-Fa-f]:[0-9A-Fa-f]{0,4}:",
    ),
    Detector(kind="phone", gates=("[0-9](?:{sep}{0,3}[0-9]){6}",), find=find_phones, needs="[0-9]{2}"),
    Detector(
        kind="api_key",
        gates=("(?i)(?:key|token|secret|passw(?:or)?d|pwd)[\"']?[ \\t]{0,3}(?::=|==|=>|[:=])[ \\t]{0,3}[\"']?[a-z0-9+/=_.\\-]{16}",),
        find=find_assigned,
        needs="[:=]",
    ),
)
"""Where two find overlapping text, the earlier one here wins: those with a checksum or a vendor's mark before those without."""
KINDS: tuple[Kind, ...] = tuple(dict.fromkeys(d.kind for d in DETECTORS))
