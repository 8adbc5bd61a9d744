"""A picture of boxes in layers, each layer linked to the next, as inline SVG: side by side, or below each other for phones.

It uses the page's colors, and can be read without: what is not used has a dashed frame, what failed a double one, and each box says its
state in words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from markupsafe import Markup

HEIGHT, RADIUS, PADDING = 82, 8, 11
WIDE_BOX, TALL_PICTURE = 144, 320
"""Width of a box in the wide picture, and of the whole tall picture."""
ACROSS, BETWEEN, BELOW = 28, 16, 30
"""Gaps: from layer to layer side by side, between boxes of a layer, from layer to layer below each other."""
FIRST_LINE, LINE = 19, 17
"""From the top of a box to its first line where it has four, and from line to line."""
MAX_IN_ROW = 2
"""Boxes beside each other in the tall picture."""
CHARACTER = {"name": 8.0, "detail": 6.6}
"""Average width of a character by line, for cutting names; measured with DejaVu Sans, one of the widest system fonts."""
Mark = Literal["", "now", "off", "failed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """One thing of the picture."""

    kind: str
    name: str
    detail: str = ""
    href: str | None = None
    mark: Mark = ""
    """``now``: in use; ``off``: not in use; ``failed``."""
    joins: bool = True
    """Whether the layer before leads to it."""


@dataclass(frozen=True, slots=True)
class _Place:
    box: Box
    x: float
    y: float
    width: float

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


Layers = Sequence[Sequence[Box]]


def wide(layers: Layers, *, title: str) -> Markup:
    """Draw the layers side by side."""
    tallest = max(map(len, layers))
    height = tallest * (HEIGHT + BETWEEN) - BETWEEN
    placed = []
    for index, layer in enumerate(layers):
        top = (height - len(layer) * (HEIGHT + BETWEEN) + BETWEEN) / 2
        x = index * (WIDE_BOX + ACROSS)
        placed.append([_Place(box, x, top + row * (HEIGHT + BETWEEN), WIDE_BOX) for row, box in enumerate(layer)])
    return _svg("wide", len(layers) * (WIDE_BOX + ACROSS) - ACROSS, height, placed, title)


def tall(layers: Layers, *, title: str) -> Markup:
    """Draw the layers below each other, at most two boxes in a row."""
    placed, y = [], 0.0
    for layer in layers:
        row: list[_Place] = []
        for at in range(0, len(layer), MAX_IN_ROW):
            boxes = layer[at : at + MAX_IN_ROW]
            width = (TALL_PICTURE - BETWEEN * (len(boxes) - 1)) / len(boxes)
            row += [_Place(box, column * (width + BETWEEN), y, width) for column, box in enumerate(boxes)]
            y += HEIGHT + BETWEEN
        placed.append(row)
        y += BELOW - BETWEEN
    return _svg("tall", TALL_PICTURE, y - BELOW, placed, title)


def _svg(name: str, width: float, height: float, placed: Sequence[Sequence[_Place]], title: str) -> Markup:
    parts = [_arrow(name), *_edges(placed, name), *(_drawn(one) for layer in placed for one in layer)]
    svg = Markup('<svg class="lineage {}" viewBox="-1 -1 {:g} {:g}" role="group" aria-label="{}">{}</svg>')
    return svg.format(name, width + 2, height + 2, title, Markup("").join(parts))


def _arrow(name: str) -> Markup:
    head = '<defs><marker id="arrow-{}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    return Markup(head + '<path class="head" d="M0 0 8 4 0 8z"/></marker></defs>').format(name)


def _edges(placed: Sequence[Sequence[_Place]], name: str) -> Iterator[Markup]:
    for sources, targets in pairwise(placed):
        for source in sources:
            for target in (one for one in targets if one.box.joins):
                yield Markup('<path class="edge" d="{}" marker-end="url(#arrow-{})"/>').format(_curve(source, target, name), name)


def _curve(source: _Place, target: _Place, name: str) -> str:
    if name == "wide":
        x, y, to_x, to_y = source.x + source.width, source.y + HEIGHT / 2, target.x - 1, target.y + HEIGHT / 2
        half = (x + to_x) / 2
        return f"M{x:g} {y:g}C{half:g} {y:g} {half:g} {to_y:g} {to_x:g} {to_y:g}"
    x, y, to_x, to_y = source.middle, source.y + HEIGHT, target.middle, target.y - 1
    half = (y + to_y) / 2
    return f"M{x:g} {y:g}C{x:g} {half:g} {to_x:g} {half:g} {to_x:g} {to_y:g}"


def _drawn(place: _Place) -> Markup:
    box, x, y = place.box, place.x, place.y
    frame = Markup('<rect x="{:g}" y="{:g}" width="{:g}" height="{}" rx="{}"/>').format(x, y, place.width, HEIGHT, RADIUS)
    if box.mark == "failed":
        inner = '<rect class="inner" x="{:g}" y="{:g}" width="{:g}" height="{}" rx="{}"/>'
        frame += Markup(inner).format(x + 3, y + 3, place.width - 6, HEIGHT - 6, RADIUS - 3)
    room = place.width - 2 * PADDING
    name, details = cut(box.name, room / CHARACTER["name"]), folded(box.detail, room / CHARACTER["detail"])
    first = FIRST_LINE if len(details) > 1 else FIRST_LINE + LINE / 2
    lines = Markup("").join(
        Markup('<text class="{}" x="{:g}" y="{:g}">{}</text>').format(kind, x + PADDING, y + first + LINE * number, text)
        for number, (kind, text) in enumerate([("kind", box.kind), ("name", name), *(("detail", one) for one in details)])
    )
    inside = Markup("<title>{}</title>{}{}").format(", ".join(filter(None, (box.kind, box.name, box.detail))), frame, lines)
    if box.href is None:
        return Markup('<g class="box {}">{}</g>').format(box.mark, inside)
    return Markup('<a class="box {}" href="{}">{}</a>').format(box.mark, box.href, inside)


def folded(text: str, room: float) -> tuple[str, ...]:
    """Break a text into at most two lines at a space, each cut where a word of it is too long."""
    if len(text) <= room or " " not in text:
        return (cut(text, room),)
    breaks = [at for at, character in enumerate(text) if character == " "]
    at = max((one for one in breaks if one <= room), default=breaks[0])
    return cut(text[:at], room), cut(text[at + 1 :], room)


def cut(text: str, room: float) -> str:
    """Shorten a text in its middle: ends of names tell versions and kinds of files apart."""
    most = int(room)
    if len(text) <= most:
        return text
    head = (most - 1) * 2 // 3
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"
