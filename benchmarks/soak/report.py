"""The report of a soak: faults by kind and target, how long each took to recover, and what held."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Z = 1.96
"""Of a 95 % interval."""


def wilson(hits: int, number: int) -> tuple[float, float]:
    """95 % score interval of a rate (Wilson 1927)."""
    if not number:
        return 0.0, 1.0
    rate, z2 = hits / number, Z * Z
    middle = (rate + z2 / (2 * number)) / (1 + z2 / number)
    half = Z / (1 + z2 / number) * (rate * (1 - rate) / number + z2 / (4 * number**2)) ** 0.5
    return max(0.0, middle - half), min(1.0, middle + half)


def table(faults: Sequence[Mapping[str, Any]], losses: Sequence[tuple[float, float]]) -> list[dict[str, Any]]:
    """A row a target and kind, in the order of names; `losses` are times and GPU-seconds of work that was done again."""
    ends = [*(f["at"] for f in faults[1:]), float("inf")]
    lost = [sum(s for when, s in losses if f["at"] <= when < end) for f, end in zip(faults, ends, strict=True)]
    rows = []
    for target, kind in sorted({(f["target"], f["kind"]) for f in faults}):
        of = [(f, s) for f, s in zip(faults, lost, strict=True) if (f["target"], f["kind"]) == (target, kind)]
        detected = [f["detected_s"] for f, _ in of if f["detected_s"] is not None]
        back = [f["recovered_s"] for f, _ in of if f["recovered_s"] is not None]
        rows.append({
            "target": target, "kind": kind, "count": len(of), "hits": sum(f["hit"] for f, _ in of), "detected": len(detected),
            **_spread("detected_s", detected), "recovered": len(back), **_spread("recovered_s", back),
            **_spread("lost_gpu_s", [s for _, s in of]),
            "tracebacks": sum(f["log"]["tracebacks"] for f, _ in of), "outage_lines": sum(f["log"]["outage_lines"] for f, _ in of),
        })  # fmt: skip
    return rows


def _spread(name: str, values: Sequence[float]) -> dict[str, float | None]:
    p50, most = (statistics.median(values), max(values)) if values else (None, None)
    return {f"{name}_p50": None if p50 is None else round(p50, 1), f"{name}_max": None if most is None else round(most, 1)}


def rates(faults: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Shares of all faults, with their intervals."""
    counts = {
        "hit work in progress": sum(f["hit"] for f in faults),
        "recovered": sum(f["recovered_s"] is not None for f in faults),
        "recovered within 60 s": sum(f["recovered_s"] is not None and f["recovered_s"] <= 60.0 for f in faults),
    }
    found = {}
    for name, hits in counts.items():
        low, high = wilson(hits, len(faults))
        found[name] = {"count": hits, "of": len(faults), "low": round(low, 3), "high": round(high, 3)}
    return found


def as_markdown(result: Mapping[str, Any]) -> str:
    return "\n".join(_lines(result)) + "\n"


def _lines(result: Mapping[str, Any]) -> Iterator[str]:
    machine, work, minutes = result["machine"], result["work"], result["minutes"]
    yield "# A soaked platform: faults, recoveries and what held"
    yield ""
    yield (
        f"`python -m benchmarks.soak {result['options']}`, seed {result['seed']}, {machine['cores']} cores, load {machine['load_1_min']} "
        f"at the end, {minutes} minutes of faults. {work['jobs']} jobs, {work['attempts']} attempts ({_counts(work['outcomes'])}), "
        f"{work['bad_uploads']} bad uploads. {work['adapters_compared']} adapters were compared with undisturbed twins, "
        f"{work['of_jobs_with_several_attempts']} of them of jobs with several attempts. Work repeated: {work['lost_gpu_s']} GPU-seconds."
    )
    yield ""
    yield "| rate | faults | share | 95 % interval |"
    yield "|---|---|---|---|"
    for name, r in result["rates"].items():
        yield f"| {name} | {r['count']} of {r['of']} | {r['count'] / max(1, r['of']):.2f} | {r['low']:.2f} to {r['high']:.2f} |"
    yield ""
    columns = "target, fault, count, hit work, detected s p50, max, back s p50, max, work lost GPU-s p50, max, tracebacks, outage lines"
    yield f"| {columns.replace(', ', ' | ')} |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|"
    for r in result["faults"]:
        measured = [r[f"{name}_{which}"] for name in ("detected_s", "recovered_s", "lost_gpu_s") for which in ("p50", "max")]
        cells = [
            r["target"],
            r["kind"],
            r["count"],
            r["hits"],
            *("-" if m is None else m for m in measured),
            r["tracebacks"],
            r["outage_lines"],
        ]
        yield f"| {' | '.join(map(str, cells))} |"
    yield ""
    yield "Detected: seconds after the fault began. Back: seconds after it ended; a kill or a restart ends as it begins."
    yield ""
    yield f"Left out: {'; '.join(result['left_out']) or 'nothing'}. Without a target in time: {result['skipped']}."
    yield ""
    yield "| measure | first quarter | last quarter | slope an hour |"
    yield "|---|---|---|---|"
    for name, t in result["trends"].items():
        yield f"| {name} | {t['first']} | {t['last']} | {t['per_hour']}{' (' + str(t['per_job']) + ' a job)' if 'per_job' in t else ''} |"
    yield ""
    yield f"Breaches: {len(result['breaches'])}."
    yield from (f"- {breach}" for breach in result["breaches"])


def _counts(outcomes: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in sorted(outcomes.items()))


def as_json(result: Mapping[str, Any]) -> str:
    """The result with a line for each entry of its lists."""
    parts = []
    for name, value in result.items():
        listed = ",\n".join(f"  {json.dumps(entry)}" for entry in value) if isinstance(value, list) else ""
        parts.append(f" {json.dumps(name)}: " + (f"[\n{listed}\n ]" if listed else json.dumps(value)))
    return "{\n" + ",\n".join(parts) + "\n}\n"
