"""Distribution of lengths: summary numbers, a histogram, and its picture as inline SVG."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

MAX_BINS = 20
WIDTH, HEIGHT, AXIS = 480, 120, 18
"""Pixels of the picture; AXIS is the strip of labels below the bars."""


def length_stats(lengths: ArrayLike) -> dict[str, float]:
    """Returns ``{"min","max","mean","p50","p95","p99","total"}``; zeros for no lengths."""
    values = np.asarray(lengths, dtype=np.int64)
    if not values.size:
        return dict.fromkeys(("min", "max", "mean", "p50", "p95", "p99", "total"), 0)
    p50, p95, p99 = (int(np.percentile(values, q, method="higher")) for q in (50, 95, 99))
    mean, total = round(float(values.mean()), 2), int(values.sum())
    return {"min": int(values.min()), "max": int(values.max()), "mean": mean, "p50": p50, "p95": p95, "p99": p99, "total": total}


def histogram(lengths: ArrayLike) -> dict[str, list[int]]:
    """Returns ``{"counts", "edges"}`` with integer edges: bin i holds edges[i] <= length < edges[i + 1], the last one its right edge
    too."""
    values = np.asarray(lengths, dtype=np.int64)
    if not values.size:
        return {"counts": [], "edges": []}
    low, high = int(values.min()), int(values.max())
    bins = min(MAX_BINS, high - low + 1)
    edges = np.unique(np.linspace(low, high + 1, bins + 1).round().astype(np.int64))
    counts, _ = np.histogram(values, bins=edges)
    return {"counts": counts.tolist(), "edges": edges.tolist()}


def histogram_svg(counts: Sequence[int], edges: Sequence[float], *, unit: str = "length") -> str:
    """Returns bars over `edges` (one more than `counts`) in the page's text color; each bar has its range and count as title."""
    if not counts:
        return ""
    top, width = max(max(counts), 1), WIDTH / len(counts)
    bars = []
    for index, count in enumerate(counts):
        height = (HEIGHT - AXIS) * count / top
        bars.append(
            f'<rect x="{index * width + 1:.1f}" y="{HEIGHT - AXIS - height:.1f}" width="{max(width - 2, 1):.1f}" height="{height:.1f}">'
            f"<title>{edges[index]:g} to {edges[index + 1]:g}: {count}</title></rect>"
        )
    label = f'y="{HEIGHT - 4}" font-size="11" fill="currentColor"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'aria-label="histogram of {unit}" font-family="sans-serif"><g fill="#4c78a8">{"".join(bars)}</g>'
        f'<text x="2" {label}>{edges[0]:g}</text><text x="{WIDTH / 2}" text-anchor="middle" {label}>{unit}</text>'
        f'<text x="{WIDTH - 2}" text-anchor="end" {label}>{edges[-1]:g}</text></svg>'
    )


def markdown_picture(svg: str, *, title: str) -> str:
    """Returns `svg` as a Markdown image: renderers of Markdown remove raw SVG, but not an image."""
    return f"![{title}](data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()})"
