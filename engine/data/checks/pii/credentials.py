"""Secrets: keys with a vendor's format, values assigned to a "key" or "password", private keys in PEM and PGP armor."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from math import log2

from engine.data.checks.pii.accounts import Span

MIN_RANDOM_BITS = 3.0
"""Entropy per character from which a value assigned to a "secret" counts as one: 32 random hex digits have about 3.5, English words and
placeholders of that length 2 to 3 and no digits among the letters."""
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
    r"eyJ[A-Za-z0-9_\-]{8,600}\.eyJ[A-Za-z0-9_\-]{8,8000}\.[A-Za-z0-9_\-]{16,1000}",
)
"""Formats documented by the vendors: OpenAI, Anthropic, AWS, GitHub, GitLab, Slack, Google, Stripe, Hugging Face, npm, SendGrid, and
JSON web tokens."""
KEY_GATES = (
    r"sk-(?:(?:proj|svcacct|admin|ant|or)-[A-Za-z0-9_\-]{20}|[A-Za-z0-9]{20})",
    r"A[KS]IA[A-Z0-9]{16}",
    r"gh[opsur]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{22}|glpat-[A-Za-z0-9_\-]{20}",
    r"xox[abeoprs]-[A-Za-z0-9\-]{10}|hooks\.slack\.com/services/T",
    r"AIza[A-Za-z0-9_\-]{35}|[rs]k_(?:live|test)_[A-Za-z0-9]{16}|whsec_[A-Za-z0-9]{24}",
    r"hf_[A-Za-z0-9]{30}|npm_[A-Za-z0-9]{36}|SG\.[A-Za-z0-9_\-]{22}\.",
    r"\.eyJ[A-Za-z0-9_\-]{8}",
)
_KEY = re.compile(f"(?<![A-Za-z0-9])(?:{'|'.join(_KEY_FORMS)})")
_ASSIGNED = re.compile(
    r"(?i:key|token|secret|passw(?:or)?d|pwd)[\"']?[ \t]{0,3}(?::=|==|=>|[:=])[ \t]{0,3}"
    r"[\"']?(?P<value>[A-Za-z0-9+/=_.\-]{16,512})(?![A-Za-z0-9+/=_.\-\[])",
    re.ASCII,
)


def find_keys(text: str) -> Iterator[Span]:
    """Finds keys with a vendor's format."""
    for match in _KEY.finditer(text):
        yield match.span()


def find_assigned(text: str) -> Iterator[Span]:
    """Finds values assigned to a key, token, secret or password that look random; only the value is matched."""
    for match in _ASSIGNED.finditer(text):
        value = match["value"].rstrip(".")
        if len(value) >= 16 and looks_random(value):
            yield match.start("value"), match.start("value") + len(value)


def looks_random(value: str) -> bool:
    """Digits spread among letters, and few repeats: not a name, a path, a number or a placeholder."""
    changes = sum(1 for a, b in itertools.pairwise(value) if a.isalnum() and b.isalnum() and a.isdigit() != b.isdigit())
    entropy = -sum(n / len(value) * log2(n / len(value)) for n in Counter(value).values())
    return changes >= 3 and entropy >= MIN_RANDOM_BITS


_PEM = r"-----{} [A-Z0-9 ]{{0,40}}PRIVATE KEY(?: BLOCK)?-----"
_PEM_BEGIN, _PEM_END = (
    re.compile(_PEM.format("BEGIN").replace("BEGIN ", "BEGIN[ ]")),
    re.compile(_PEM.format("END").replace("END ", "END[ ]")),
)
_PEM_BODY = re.compile(r"[A-Za-z0-9+/=\s\\]*")


def find_private_keys(text: str) -> Iterator[Span]:
    """Finds PEM and PGP blocks from BEGIN to END, or to the end of the body if END is cut off. A header alone is not a key."""
    past = 0
    for begin in _PEM_BEGIN.finditer(text):
        following = _PEM_BEGIN.search(text, begin.end())
        end = _PEM_END.search(text, begin.end(), following.start() if following else len(text))
        if end:
            past = end.end()
        else:
            body = _PEM_BODY.match(text, begin.end())
            past = body.end() if body else begin.end()
            if past - begin.end() < 40:
                continue
        yield begin.start(), past
