"""Results as lines and a table that people read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

COLUMNS = ("case", "tokens/s", "MFU", "step s", "peak GiB", "estimate", "error", "goal")


def line(result: Mapping[str, Any]) -> str:
    """One case as it ends."""
    shown = {k: v for k, v in result.items() if k not in ("name", "spec", "pack")}
    return f"{result['name']}: " + ", ".join(f"{k} {v}" for k, v in shown.items())


def table(facts: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> str:
    """All cases; those that show no speed are told below."""
    gpu = facts["gpu"]
    head = f"{gpu['name'] or 'CPU'}, driver {gpu['driver']}, torch {gpu['torch']} (CUDA {gpu['cuda']}), {facts['machine']['cpu']}"
    rows = [COLUMNS, *(_row(r) for r in results if "tokens_per_s" in r)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = [head, "", *("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)]
    return "\n".join([*lines, "", *(line(r) for r in results if "tokens_per_s" not in r), *packing(results)])


def packing(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Speed of each packed case over the one that pads the same examples, where both were run."""
    speeds = {r["name"]: r["tokens_per_s"] for r in results if "tokens_per_s" in r}
    pairs = ((name, name.removesuffix("-padded")) for name in speeds if name.endswith("-padded"))
    return [f"packing over padding ({packed}): {speeds[packed] / speeds[padded]:.2f}x" for padded, packed in pairs if packed in speeds]


def _row(result: Mapping[str, Any]) -> tuple[str, ...]:
    mfu, goal = result["mfu"], result.get("goal")
    wanted = ""
    if goal is not None:
        wanted = (
            f"{goal['metric']} >= {goal['at_least']:g}: {'not measured' if goal['met'] is None else 'met' if goal['met'] else 'MISSED'}"
        )
    return (
        result["name"],
        f"{result['tokens_per_s']:.0f}",
        "" if mfu is None else f"{mfu:.1%}",
        f"{result['step_s']:.3f}",
        f"{result['peak_gib']:.1f}",
        f"{result['estimate_gib']:.1f}",
        f"{result['estimate_error']:+.0%}",
        wanted,
    )
