"""Generates the synchronous half of the client from the asynchronous one, by removing the awaits.

Other differences between the two are pairs of names, listed in :data:`NAMES`.
"""

from __future__ import annotations

import re
from pathlib import Path

NAMES = {
    "AsyncIterator": "Iterator",
    "AsyncIterable": "Iterable",
    "AsyncClient": "Client",
    "AsyncBaseTransport": "BaseTransport",
    "AsyncGenerator": "Generator",
    "aclosing": "closing",
    "asynccontextmanager": "contextmanager",
    "async_pause": "pause",
    "asynchronous": "synchronous",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "aiter_bytes": "iter_bytes",
    "aiter_lines": "iter_lines",
    "aclose": "close",
    "aread": "read",
}
KEYWORD = re.compile(r"\b(?:async (?=def|with|for)|await )")
PREFIX = re.compile(r"\bAsync(?=[A-Z])")
AWAITED = re.compile(r"\bAwaitable\[(\w+)\]")
WORD = re.compile(r"\b(?:" + "|".join(map(re.escape, NAMES)) + r")\b")
HEADER = "# Written by `python -m tools.client` from {source}: change that, and run it again.\n"


def modules(source: Path) -> dict[str, str]:
    """Returns the text of each module, by its path below the client's package."""
    names = [path.relative_to(source).as_posix() for path in sorted(source.rglob("*.py"))]
    return {
        f"synchronous/{name}": HEADER.format(source=f"asynchronous/{name}") + synchronous((source / name).read_text()) for name in names
    }


def synchronous(text: str) -> str:
    text = AWAITED.sub(r"\1", KEYWORD.sub("", text))
    text = WORD.sub(lambda found: NAMES[found[0]], text)
    return PREFIX.sub("", text)
