"""Pictures of simulations: waits, the queue, GPUs in use. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from control_plane.queue.simulation.outcome import Outcome

INCHES, DPI = (7.0, 4.0), 80
"""Small enough to lie in a repository: about 40 KB each."""


def draw(outcomes: Mapping[str, Outcome], directory: Path, *, prefix: str = "") -> list[Path]:
    """Writes ``waits.png``, ``queue.png`` and ``used.png``, each with one line for each policy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    directory.mkdir(parents=True, exist_ok=True)
    made = []
    for name, title, line in (
        ("waits", "share of jobs that waited longer", _waits),
        ("queue", "GPUs asked for", _queued),
        ("used", "GPUs in use", _used),
    ):
        figure, axes = pyplot.subplots(figsize=INCHES)
        for policy, outcome in outcomes.items():
            x, y = line(outcome)
            axes.plot(x, y, label=policy, drawstyle="steps-post", linewidth=1.2)
        axes.set_xlabel("hours of waiting" if name == "waits" else "days")
        axes.set_ylabel(title)
        if name == "waits":
            axes.set_yscale("log")
            axes.set_xscale("symlog", linthresh=0.1)
        axes.legend()
        axes.grid(alpha=0.3)
        path = directory / f"{prefix}{name}.png"
        figure.tight_layout()
        figure.savefig(path, dpi=DPI)
        pyplot.close(figure)
        made.append(path)
    return made


def _waits(outcome: Outcome) -> tuple[list[float], list[float]]:
    waits = sorted(r.waited_s / 3600 for r in outcome.records)
    return waits, [1 - i / len(waits) for i in range(len(waits))]


def _queued(outcome: Outcome) -> tuple[list[float], list[float]]:
    return [s.start / 86400 for s in outcome.spans], [float(s.queued) for s in outcome.spans]


def _used(outcome: Outcome) -> tuple[list[float], list[float]]:
    return [s.start / 86400 for s in outcome.spans], [float(s.used) for s in outcome.spans]
