"""Inline SVG charts: the interval of a difference, and loss curves. They use the page's colors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

BAR_WIDTH, BAR_HEIGHT = 150, 18
WIDTH, HEIGHT = 640, 220
LEFT, BOTTOM, TOP, RIGHT = 46, 24, 10, 10
"""Margins of the chart, with room for axis labels."""
MAX_POINTS = 400
"""Most points drawn, one per pixel; more are averaged."""
TICKS = 4


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


def loss_curves(lines: Sequence[Mapping[str, Any]]) -> str:
    """Draw training and validation loss over steps; empty if nothing finite was measured."""
    train = _points(lines, "loss")
    valid = _points(lines, "eval_loss")
    values = [y for _, y in [*train, *valid]]
    if len(values) < 2:
        return ""
    last = max(x for x, _ in [*train, *valid]) or 1.0
    low, high = min(values), max(values)
    space = (high - low) * 0.05 or max(abs(high) * 0.05, 0.01)
    low, high = max(0.0, low - space), high + space

    def at(point: tuple[float, float]) -> str:
        x = LEFT + point[0] / last * (WIDTH - LEFT - RIGHT)
        y = TOP + (high - point[1]) / (high - low) * (HEIGHT - TOP - BOTTOM)
        return f"{x:.1f},{y:.1f}"

    parts = [_axis(low, high, last)]
    parts.append(f'<polyline class="train" points="{" ".join(map(at, _thinned(train)))}"/>' if train else "")
    parts.append(f'<polyline class="valid" points="{" ".join(map(at, _thinned(valid)))}"/>' if len(valid) > 1 else "")
    for point in _thinned(valid):
        x, y = at(point).split(",")
        parts.append(f'<circle class="valid" cx="{x}" cy="{y}" r="3"><title>step {point[0]:g}: {point[1]:.4f}</title></circle>')
    return (
        f'<svg class="curves" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="loss over steps">'
        f"{''.join(parts)}</svg>"
    )


def _axis(low: float, high: float, last: float) -> str:
    drawn = []
    for tick in range(TICKS + 1):
        value, y = low + (high - low) * tick / TICKS, HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * tick / TICKS
        drawn.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>')
        drawn.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    drawn += [
        f'<text x="{LEFT + (WIDTH - LEFT - RIGHT) * share:.1f}" y="{HEIGHT - 6}" text-anchor="{anchor}">{label}</text>'
        for share, anchor, label in ((0.0, "start", "0"), (0.5, "middle", f"{last / 2:g}"), (1.0, "end", f"step {last:g}"))
    ]
    return "".join(drawn)


def _points(lines: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    found = [(float(row["step"]), float(row[name])) for row in lines if row.get(name) is not None]
    return [(x, y) for x, y in found if math.isfinite(y)]


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    size = math.ceil(len(points) / MAX_POINTS)
    groups = [points[at : at + size] for at in range(0, len(points), size)] if size > 1 else [[p] for p in points]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]
