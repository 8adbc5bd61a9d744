"""The loss curve as inline SVG that follows the page's colors, for asset metadata and the console."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 560, 220, 46, 24, 10
TRAIN, VALIDATION = "#4c78a8", "#e45756"
MAX_POINTS = 400
"""Points per line; more than pixels add no detail."""


def loss_curve_svg(lines: Sequence[Mapping[str, Any]]) -> str:
    """Returns training and validation loss over steps, from the lines of ``metrics.jsonl``; empty for fewer than two steps."""
    train = [(float(m["step"]), float(m["loss"])) for m in lines if m.get("loss") is not None]
    validation = [(float(m["step"]), float(m["eval_loss"])) for m in lines if m.get("eval_loss") is not None]
    if len(train) < 2:
        return ""
    points = train + validation
    low_x, high_x = points[0][0], max(x for x, _ in points)
    low_y, high_y = 0.0, max(y for _, y in points) * 1.05 or 1.0

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x = LEFT + (point[0] - low_x) / max(high_x - low_x, 1.0) * (WIDTH - LEFT - 8)
        y = HEIGHT - BOTTOM - (point[1] - low_y) / (high_y - low_y) * (HEIGHT - BOTTOM - TOP)
        return round(x, 1), round(y, 1)

    body = [_axes(low_x, high_x, high_y), _line(_thinned(train), place, TRAIN, 1.5), _line(validation, place, VALIDATION, 2.0)]
    body += [f'<circle cx="{x}" cy="{y}" r="3" fill="{VALIDATION}"/>' for x, y in map(place, validation)]
    body += [_legend(0, TRAIN, f"training {train[-1][1]:.3f}")]
    if validation:
        body += [_legend(1, VALIDATION, f"validation {validation[-1][1]:.3f}")]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'aria-label="loss over optimizer steps" font-family="sans-serif" font-size="11">{"".join(body)}</svg>'
    )


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    stride = max(1, -(-len(points) // MAX_POINTS))
    return points[::stride] + ([points[-1]] if (len(points) - 1) % stride else [])


def _line(points: Sequence[tuple[float, float]], place: Any, colour: str, width: float) -> str:
    joined = " ".join(f"{x},{y}" for x, y in map(place, points))
    return f'<polyline points="{joined}" fill="none" stroke="{colour}" stroke-width="{width}"/>' if points else ""


def _axes(low_x: float, high_x: float, high_y: float) -> str:
    grid = "".join(
        f'<line x1="{LEFT}" x2="{WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}" stroke="#888" stroke-opacity="0.25"/>'
        f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#888">{value:.2f}</text>'
        for value, y in ((high_y * k / 4, HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * k / 4) for k in range(5))
    )
    ends = f'<text x="{LEFT}" y="{HEIGHT - 8}" fill="#888">step {low_x:g}</text>'
    return grid + ends + f'<text x="{WIDTH - 8}" y="{HEIGHT - 8}" text-anchor="end" fill="#888">{high_x:g}</text>'


def _legend(row: int, colour: str, text: str) -> str:
    x, y = WIDTH - 160, TOP + 8 + 16 * row
    return f'<rect x="{x}" y="{y - 8}" width="10" height="10" fill="{colour}"/><text x="{x + 15}" y="{y + 1}" fill="#888">{text}</text>'
