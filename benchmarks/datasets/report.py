"""Writes the results as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

LIMITS = (Path(__file__).parent / "limits.md").read_text(encoding="utf-8") if (Path(__file__).parent / "limits.md").exists() else ""


def _number(value: Any) -> str:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "" if value is None else str(value)
    return f"{value:,.0f}" if abs(value) >= 20 or isinstance(value, int) else f"{value:.4f}"


def _table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    names = list(head)
    lines = [names, ["---"] * len(names), *([_number(v) for v in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _pipelines(found: dict[str, Any]) -> str:
    usual, tuned, ours = found["usual"], found["tuned"], found["ours"]
    whole = [
        ("rows measured", usual["rows"], tuned["rows"], ours["rows"], None),
        ("whole, without tokens", *_row(usual, tuned, ours, "without_tokens")),
        (f"the same on {tuned['rows']:,} rows", None, None, ours["without_tokens_at_the_size_of_tuned"], None),
        ("the same in 2 workers, their start included", None, None, ours["without_tokens_in_2_workers"], None),
        ("whole, with tokens (ours: packed and written too)", *_row(usual, tuned, ours, "with_tokens")),
        ("ours, tokens counted only", None, None, ours["with_tokens_counted_only"], None),
        ("ours, reading and checks of single rows only", None, None, ours["read, validate and hash only"], None),
    ]
    head = ("rows per CPU second", "usual", "tuned usual", "ours", "ours / tuned")
    names = list(dict.fromkeys((*usual["stages"], *tuned["stages"])))
    stages = [(name, usual["stages"].get(name), tuned["stages"].get(name)) for name in names]
    bad, did = ours["bad_rows_reported"], ours["did"]
    return "\n".join(
        (
            "## The whole pipeline\n",
            _table(head, whole),
            "Stages of the usual pipelines:\n",
            _table(("stage, rows per CPU second", "usual", "tuned usual"), stages),
            "Parts of ours, measured one by one on the kept rows:\n",
            _table(("part", "rows per CPU second"), ours["stages"].items()),
            f"Of {bad['labelled']:,} rows made bad, ours counted {bad['counted']:,} and named {bad['named']:,} "
            "(the first 1,000 problems are spelled out), "
            f"{bad['named_wrongly']:,} of them wrongly; {did['removed']:,} duplicates removed, {did['kept']:,} rows kept. "
            f"The index of 30,000 suite items took {ours['suite_index_cpu_s']:.1f} CPU seconds, once.\n",
        )
    )


def _row(usual: dict[str, Any], tuned: dict[str, Any], ours: dict[str, Any], key: str) -> tuple[Any, ...]:
    return usual[key], tuned[key], ours[key], f"{ours[key] / tuned[key]:.1f} x"


def _near(found: dict[str, Any]) -> str:
    rows = []
    for name, tool in found.items():
        if isinstance(tool, dict):
            skipped = tool.get("skipped")
            numbers = [None] * 4 if skipped else [tool[k] for k in ("recall", "precision", "removed", "rows_per_cpu_s")]
            rows.append((f"{name} {tool.get('version', '')}".strip(), skipped or tool["settings"], *numbers))
    head = ("tool", "settings", "recall", "precision", "removed", "rows per CPU second")
    text = f"{found['rows']:,} texts, {found['labelled_pairs']:,} labelled pairs at a true Jaccard index of 0.9 or more.\n"
    return f"## Near duplicates, tool by tool\n\n{text}\n{_table(head, rows)}"


def _unseen(found: list[dict[str, Any]]) -> str:
    names = ("seed", "rows", "pairs", "recall", "precision", "removed", "exact_labelled", "exact")
    rows = [[str(run["seed"]), *(run[n] for n in names[1:]), f"{run['bad']['counted']} of {run['bad']['labelled']}"] for run in found]
    pairs = sum(run["pairs"] for run in found)
    hits = sum(run["pairs"] * run["recall"] for run in found)
    text = f"Over all seeds: recall {hits / pairs:.4f} on {pairs:,} pairs.\n"
    return f"## The whole pipeline on seeds that nothing was tuned on\n\n{_table((*names, 'bad rows'), rows)}\n{text}"


def _personal(found: dict[str, Any]) -> str:
    rows = [
        (
            f"{name} {tool.get('version', '')}".strip(),
            tool.get("skipped") or tool["rows_per_cpu_s"],
            tool.get("recall"),
            tool.get("recall_without_keys"),
            tool.get("rows_flagged_without"),
        )
        for name, tool in found.items()
        if isinstance(tool, dict)
    ]
    head = ("tool", "rows per CPU second", "rows found", "the same without API keys", "rows flagged that have none planted")
    return f"## Personal data\n\n{found['rows']:,} rows, {found['planted']:,} with a planted value.\n\n{_table(head, rows)}"


def _contamination(found: dict[str, Any]) -> str:
    rows = [(n, *(t[k] for k in ("rows_per_cpu_s", "flagged", "of_whole_items"))) for n, t in found.items() if isinstance(t, dict)]
    text = (
        f"{found['rows']:,} rows, of which {found['repeat_a_whole_item']:,} repeat a whole item (some have under 13 words); "
        f"{found['flagged_by_one_only']} flagged by one only, largest difference of a share {found['largest_difference_of_shares']:.2g}.\n"
    )
    return f"## Contamination\n\n{text}\n{_table(('how', 'rows per CPU second', 'rows flagged', 'of whole items'), rows)}"


def _packing(found: dict[str, Any]) -> str:
    ours = found["ours"]
    rows = [
        (f"ours, placement, {found['rows']:,} rows", ours["rows_per_cpu_s"], f"{ours['fill']:.5f}"),
        (
            f"ours, placement, {found['rows_trl']:,} rows",
            ours["rows_per_cpu_s_at_the_size_of_trl"],
            f"{ours['fill_at_the_size_of_trl']:.5f}",
        ),
        ("ours, moves input_ids and labels", ours["rows_per_cpu_s_with_tokens_moved"], f"{ours['fill_at_the_size_of_trl']:.5f}"),
    ]
    rows += [(n, t["rows_per_cpu_s"], f"{t['fill']:.5f}") for n, t in found.items() if n.startswith("trl")]
    return f"## Packing into windows of 4,096\n\n{_table(('tool', 'rows per CPU second', 'fill'), rows)}"


SECTIONS: dict[str, Callable[[Any], str]] = {
    "pipelines": _pipelines,
    "near_duplicates": _near,
    "unseen": _unseen,
    "personal_data": _personal,
    "contamination": _contamination,
    "packing": _packing,
}


def as_markdown(results: dict[str, Any]) -> str:
    """The sections that `results` has; a whole result also says how it was made and what it does not show."""
    parts = [write(results[name]) for name, write in SECTIONS.items() if name in results]
    if "machine" not in results:
        return "\n".join(parts)
    machine = results["machine"]
    head = (
        "# The dataset stage against the usual way and its peers\n\n"
        "    sh benchmarks/datasets/peers.sh && python -m benchmarks.datasets\n\n"
        f"{machine['cpu']}, {machine['cores']} cores, Python {machine['python']}; "
        + ", ".join(f"{name} {version}" for name, version in results["versions"].items())
        + ".\n\nMeasured: "
        + ", ".join(f"{name} {when['at']}" for name, when in results["measured"].items())
        + ".\n"
    )
    return "\n".join((head, *parts, LIMITS))
