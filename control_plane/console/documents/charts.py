"""Inline SVG charts: the interval of a difference, and curves over steps.

They use the page's colors, and can be read without: lines differ by dashes, validation has a circle at each point, and lines of several
runs end with a letter. The page's script redraws curves from ``data-lines``, while a job runs and when the reader zooms.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup, escape

BAR_WIDTH, BAR_HEIGHT = 120, 18
WIDE, SMALL = (640, 220), (320, 150)
"""Sizes of charts."""
LEFT, BOTTOM, TOP, RIGHT = 52, 24, 10, 10
"""Margins of a chart, with room for axis labels."""
MAX_POINTS = 400
"""Most points of a wide chart, about one per pixel; more are averaged."""
TICKS = 4
NAME_WIDTH = 40
"""Room for the name below a column; where it is too narrow, not every column has one."""
DIGITS = 4
CURVES = (
    ("Loss", ("loss", "eval_loss")),
    ("Learning rate", ("learning_rate",)),
    ("Gradient norm", ("grad_norm",)),
    ("Tokens per second", ("tokens_per_s",)),
    ("GPU memory in GiB", ("memory_bytes",)),
)
"""Charts of a training: title, and the metric of each line."""
COMPARED = (("Loss", ("loss",)), ("Validation loss", ("eval_loss",)), *CURVES[1:])
"""The same for several runs."""
SCALE = {"memory_bytes": 1 / 2**30}
BY_SOURCE = "train_loss/"
"""Prefix of the training loss of one dataset of a mixture, followed by its id."""
LETTERS = "ABCDEFGHIJKLMNOP"
STYLES = ("", "run-2", "run-3", "run-4")
"""Styles of lines in one chart; with more lines they come again, and letters tell them apart."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    points: Points
    metric: str | None
    """Name of its metric, for the script that adds to it; None for a line of another run."""
    style: str = ""
    """Second class of the line: its color and dashes."""
    has_dots: bool = False
    """A circle at each point, as on lines with few."""
    letter: str = ""
    """Written at its end, to tell runs apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A chart of lines over steps."""

    title: str
    lines: Sequence[Line]
    is_wide: bool = False
    names: Sequence[str] = ()
    """What each line shows, beside its letter, where a legend is needed."""

    @property
    def last(self) -> float | None:
        """The newest value of the first line."""
        return self.lines[0].points[-1][1] if self.lines[0].points else None

    def svg(self) -> Markup:
        """Draw the chart; empty with fewer than two values."""
        drawn = [line for line in self.lines if line.points]
        values = [y for line in drawn for _, y in line.points]
        if len(values) < 2:
            return Markup("")
        last = max(line.points[-1][0] for line in drawn) or 1.0
        low, high = min(values), max(values)
        space = (high - low) * 0.05 or abs(high) * 0.05 or 0.01
        low, high = max(0.0, low - space) if low >= 0 else low - space, high + space
        frame = Frame(*(WIDE if self.is_wide else SMALL), low=low, high=high, last=last)
        parts = Markup("".join([frame.axis(), *(_drawn(line, frame) for line in self.lines)]))
        stored = [{"points": [[x, float(f"{y:.6g}")] for x, y in line.points], "metric": line.metric} for line in self.lines]
        label = f"{self.title} over steps, last value {self.last or 0:.{DIGITS}g}"
        svg = Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}" data-lines="{}">{}</svg>')
        return svg.format(frame.width, frame.height, label, json.dumps(stored, separators=(",", ":")), parts)


def _drawn(line: Line, frame: Frame) -> str:
    """Draw a line, its circles and its letter."""
    at = [frame.at(*point) for point in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
    parts = [f'<polyline class="line {line.style}" points="{path}"/>']
    if line.has_dots:
        titles = (f"<title>step {x:g}: {y:.{DIGITS}g}</title>" for x, y in line.points)
        circles = (
            f'<circle class="dot {line.style}" cx="{x:.1f}" cy="{y:.1f}" r="3">{t}</circle>' for (x, y), t in zip(at, titles, strict=True)
        )
        parts += circles
    if line.letter:
        x, y = at[-1] if at else (0.0, 0.0)
        parts.append(f'<text class="letter" x="{x - 4:.1f}" y="{y - 6:.1f}" text-anchor="end">{line.letter if at else ""}</text>')
    return f"<g{' data-dots' if line.has_dots else ''}>{''.join(parts)}</g>"


@dataclass(frozen=True, slots=True)
class Frame:
    """Places values in a chart, and draws its grid."""

    width: int
    height: int
    low: float
    high: float
    last: float = 1.0

    def at(self, x: float, y: float) -> tuple[float, float]:
        across = LEFT + x / self.last * (self.width - LEFT - RIGHT)
        return across, TOP + (self.high - y) / (self.high - self.low) * (self.height - TOP - BOTTOM)

    def grid(self) -> str:
        drawn = []
        for tick in range(TICKS + 1):
            value = self.low + (self.high - self.low) * tick / TICKS
            _, y = self.at(0.0, value)
            drawn.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{self.width - RIGHT}" y2="{y:.1f}"/>')
            drawn.append(f'<text class="y" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_short(value)}</text>')
        return "".join(drawn)

    def axis(self) -> str:
        """Return the grid, with steps below it."""
        ends = (
            (0.0, "start", "0"),
            (0.5, "middle", f"{self.last / 2:.0f}" if self.last > 1 else ""),
            (1.0, "end", f"step {self.last:.0f}"),
        )
        width = self.width - LEFT - RIGHT
        return self.grid() + "".join(
            f'<text class="x" x="{LEFT + width * share:.1f}" y="{self.height - 6}" text-anchor="{anchor}">{label}</text>'
            for share, anchor, label in ends
        )


def _short(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 or value == 0 else f"{value:.1e}"


def curves(
    lines: Sequence[Mapping[str, Any]], others: Sequence[Sequence[Mapping[str, Any]]] = (), names: Mapping[str, str] | None = None
) -> Iterator[Curve]:
    """Yield the charts of a training whose ``metrics.jsonl`` has these lines; those without a value are left out.

    `names`: of the datasets of a mixture by their ids, which are used where a name is missing.

    `others`: of at most three runs to compare with, whose lines are drawn beside its own, each with a letter; validation then has a chart
    of its own.
    """
    for title, parts in COMPARED if others else CURVES:
        is_wide = title in ("Loss", "Validation loss")
        most = MAX_POINTS if is_wide else MAX_POINTS // 2
        drawn = [_line(lines, metric, metric=metric, most=most, style="second" if index else "") for index, metric in enumerate(parts)]
        if others:
            drawn = [replace(line, letter="A") for line in drawn]
            drawn += [
                _line(other, parts[0], metric=None, most=most, style=f"run-{number}", letter="ABCD"[number - 1])
                for number, other in enumerate(others, 2)
            ]
        if sum(len(line.points) for line in drawn) > 1:
            yield Curve(title=title, lines=drawn, is_wide=is_wide)
        if title == "Loss" and (by_source := sorted({key for line in lines for key in line if key.startswith(BY_SOURCE)})):
            yield _by_source(lines, by_source, names or {})


def _by_source(lines: Sequence[Mapping[str, Any]], metrics: Sequence[str], names: Mapping[str, str]) -> Curve:
    """Draw the training loss of each dataset of a mixture."""
    ids = [metric.removeprefix(BY_SOURCE) for metric in metrics]
    order = sorted(range(len(ids)), key=lambda n: list(names).index(ids[n]) if ids[n] in names else len(names))
    drawn = [
        _line(
            lines, metrics[n], metric=metrics[n], most=MAX_POINTS, style=STYLES[place % len(STYLES)], letter=LETTERS[place % len(LETTERS)]
        )
        for place, n in enumerate(order)
    ]
    return Curve(title="Loss by file", lines=drawn, is_wide=True, names=[names.get(ids[n], ids[n]) for n in order])


def _line(lines: Sequence[Mapping[str, Any]], name: str, *, most: int, **drawn: Any) -> Line:
    return Line(points=thinned(_points(lines, name), most), has_dots=name == "eval_loss", **drawn)


def interval_bar(low: float, high: float, middle: float, *, reach: float) -> str:
    """Draw an interval on a line from ``-reach`` to ``reach`` with zero in the middle; its class shows on which side of zero it lies."""
    reach = reach if reach > 0 and math.isfinite(reach) else 1.0

    def x(value: float) -> float:
        return BAR_WIDTH / 2 + max(-1.0, min(1.0, value / reach if math.isfinite(value) else 0.0)) * (BAR_WIDTH / 2 - 4)

    side = "good" if low > 0 else "bad" if high < 0 else "even"
    y = BAR_HEIGHT / 2
    return (
        f'<svg class="bar {side}" viewBox="0 0 {BAR_WIDTH} {BAR_HEIGHT}" width="{BAR_WIDTH}" height="{BAR_HEIGHT}" role="img" '
        f'aria-label="95 % interval {low:+.3f} to {high:+.3f}"><line class="axis" x1="2" y1="{y}" x2="{BAR_WIDTH - 2}" y2="{y}"/>'
        f'<line class="zero" x1="{BAR_WIDTH / 2}" y1="1" x2="{BAR_WIDTH / 2}" y2="{BAR_HEIGHT - 1}"/>'
        f'<rect x="{x(low):.1f}" y="{y - 3}" width="{max(1.5, x(high) - x(low)):.1f}" height="6" rx="2"/>'
        f'<circle cx="{x(middle):.1f}" cy="{y}" r="4"/><title>{middle:+.3f} ({low:+.3f} to {high:+.3f})</title></svg>'
    )


def columns(values: Sequence[tuple[str, float]], *, title: str, form: str, size: tuple[int, int] = WIDE) -> Markup:
    """Draw one column for each name and value; `form` formats values. Empty without a value above zero."""
    top = max((value for _, value in values), default=0.0)
    if top <= 0:
        return Markup("")
    frame = Frame(*size, low=0.0, high=_rounded_up(top), last=float(len(values)))
    parts, width = [frame.grid()], (frame.width - LEFT - RIGHT) / len(values)
    for index, (name, value) in enumerate(values):
        x, y = frame.at(index, value)
        parts.append(
            f'<rect class="column" x="{x + width * 0.15:.1f}" y="{y:.1f}" width="{width * 0.7:.1f}" '
            f'height="{frame.height - BOTTOM - y:.1f}" rx="2"><title>{escape(name)}: {escape(form.format(value))}</title></rect>'
        )
        if index % math.ceil(len(values) * NAME_WIDTH / frame.width) == 0:
            parts.append(f'<text x="{x + width / 2:.1f}" y="{frame.height - 6}" text-anchor="middle">{escape(name)}</text>')
    svg = Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>')
    return svg.format(frame.width, frame.height, title, Markup("".join(parts)))


def over_time(lines: Sequence[Points], *, title: str, ends: tuple[str, str, str], limit: float) -> Markup:
    """Draw one or two lines from zero, with names for the start, middle and end of the axis, and a dashed line at `limit`."""
    top = max([limit, *(y for line in lines for _, y in line)])
    last = max((line[-1][0] for line in lines if line), default=0.0)
    if top <= 0 or last <= 0:
        return Markup("")
    frame = Frame(*WIDE, low=0.0, high=_rounded_up(top), last=last)
    parts = [frame.grid(), *(_drawn(Line(points=line, metric=None, style="second" if at else ""), frame) for at, line in enumerate(lines))]
    (left, y), (right, _) = frame.at(0.0, limit), frame.at(last, limit)
    parts.append(f'<line class="limit" x1="{left:.1f}" y1="{y:.1f}" x2="{right:.1f}" y2="{y:.1f}"><title>{limit:,.0f}</title></line>')
    for share, anchor, name in zip((0.0, 0.5, 1.0), ("start", "middle", "end"), ends, strict=True):
        x, _ = frame.at(last * share, 0.0)
        parts.append(f'<text x="{x:.1f}" y="{frame.height - 6}" text-anchor="{anchor}">{escape(name)}</text>')
    svg = Markup('<svg class="chart" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>')
    return svg.format(frame.width, frame.height, title, Markup("".join(parts)))


def _rounded_up(value: float) -> float:
    """Return the end of an axis: the next number of which the quarters are short."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 6, 8, 10) if step * power >= value)


def thinned(points: Points, most: int) -> Points:
    """Return at most so many points: neighbors are averaged."""
    size = math.ceil(len(points) / most)
    groups = [points[at : at + size] for at in range(0, len(points), size)] if size > 1 else [[p] for p in points]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def _points(lines: Sequence[Mapping[str, Any]], name: str) -> Points:
    found = [(float(row["step"]), float(row[name]) * SCALE.get(name, 1.0)) for row in lines if row.get(name) is not None]
    return [(x, y) for x, y in found if math.isfinite(y)]
