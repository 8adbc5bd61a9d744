"""The guides in ``docs/``, rendered for the console."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

FOLDER = Path(__file__).resolve().parents[3] / "docs"
"""Absent where only the packages are installed; then no page offers a guide."""
PLACE, INDEX, CODES = "/console/guides", "README", "errors"
NOT_IN_ANCHORS = re.compile(r"[^\w\- ]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Guide:
    title: str
    text: Markup


@cache
def names() -> frozenset[str]:
    """Return the guides that are installed."""
    return frozenset(path.stem for path in FOLDER.glob("*.md"))


@cache
def guide(name: str) -> Guide:
    """Render one of :func:`names`. Links to other guides stay in the console; what is not installed with them is named without a link."""
    parser = _parser()
    tokens = parser.parse((FOLDER / f"{name}.md").read_text(encoding="utf-8"))
    title = name
    for heading, inline in pairwise(tokens):
        if heading.type == "heading_open":
            words = "".join(part.content for part in inline.children or ())
            heading.attrSet("id", NOT_IN_ANCHORS.sub("", words.lower()).strip().replace(" ", "-"))
            title = words if heading.tag == "h1" else title
    for token in tokens:
        token.children = None if token.children is None else list(_linked(token.children))
    return Guide(title=title, text=Markup(parser.renderer.render(tokens, parser.options, {})))


def _linked(parts: Sequence[Token]) -> Iterator[Token]:
    """Yield the parts of a line without pictures, and without links that lead nowhere in the console."""
    dropped = 0
    for part in parts:
        if part.type == "link_open":
            target = _target(str(part.attrGet("href") or ""))
            dropped += target is None
            if target is not None:
                part.attrSet("href", target)
        if part.type != "image" and not (dropped and part.type in ("link_open", "link_close")):
            yield part
        dropped -= bool(dropped) and part.type == "link_close"


def _target(href: str) -> str | None:
    path, _, anchor = href.partition("#")
    if not path or path.startswith(("http://", "https://")):
        return href
    name = path.removesuffix(".md")
    return f"{PLACE}/{name}{f'#{anchor}' if anchor else ''}" if name in names() and path.endswith(".md") else None


@cache
def _parser() -> MarkdownIt:
    """CommonMark with tables and without HTML; wide tables and code scroll by themselves."""
    made = MarkdownIt("js-default")
    made.add_render_rule("table_open", lambda *_: '<div class="scroll" tabindex="0" role="group" aria-label="Table"><table>')
    made.add_render_rule("table_close", lambda *_: "</table></div>")
    made.add_render_rule("fence", _code)
    return made


def _code(_: Any, tokens: Sequence[Token], at: int, *__: Any) -> str:
    return f'<div class="code"><pre tabindex="0">{escape(tokens[at].content)}</pre><button class="compact" data-copy>Copy</button></div>'
