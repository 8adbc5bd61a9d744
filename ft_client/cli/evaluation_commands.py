"""``ft eval``: an adapter compared with its base, the gate's verdict, and what to change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from core.storable_text import shown_answer
from ft_client.cli.output import Exit, Json, number, print_json, say, table
from ft_client.cli.session import connect

if TYPE_CHECKING:
    from ft_client import Record

SAMPLE_CHARS = 500
CLASSES_SHOWN = 20
"""Classes of a classification in the terminal, most frequent first; `--json` has all."""
COLUMNS = ("SUITE", "METRIC", "N", "BASE", "PREVIOUS", "CANDIDATE", "GAIN, 95 %", "")


def register(app: typer.Typer) -> None:
    app.command("eval", rich_help_panel="Jobs")(evaluation)


def evaluation(
    job_id: Annotated[str, typer.Argument(metavar="ID", help="Job id (`ft jobs` lists them).")],
    samples: Annotated[bool, typer.Option("--samples", help="Show every item with each model's answer, instead of the scores.")] = False,
    suite: Annotated[
        str | None, typer.Option("--suite", help="With --samples: holdout, safety, golden, suite/NAME, capability/NAME.")
    ] = None,
    only: Annotated[str | None, typer.Option("--only", help="With --samples: changed, worse or better.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write the evaluation as a page to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Show a job's evaluation. Exit code 0 if the adapter passed its gate, 1 if it is quarantined, so that a build can depend on it."""
    with connect() as client:
        listed = client.jobs.evaluation_samples(job_id, suite=suite, only=only) if samples or suite or only else None
        tell(client.jobs.evaluation(job_id), lambda: client.jobs.evaluation_page(job_id), samples=listed, html=html, as_json=as_json)


def tell(
    found: Mapping[str, Any], page: Callable[[], bytes], *, samples: Iterable[Record] | None, html: Path | None, as_json: bool
) -> None:
    """Show an evaluation in the requested format; exits with 1 if the adapter did not pass."""
    if html is not None:
        html.write_bytes(page())
        say(f"the evaluation is in {html}")
    if samples is not None:
        show_samples(samples, as_json=as_json)
    elif as_json:
        print_json(found)
    elif html is None:
        show(found)
    if found["verdict"]["outcome"] != "passed":
        raise typer.Exit(Exit.FAILED)


def show(found: Mapping[str, Any]) -> None:
    """Print verdict, scores and advice, in this order."""
    for line in verdict_lines(found["verdict"]):
        print(line)
    print()
    table(COLUMNS, [score_row(s) for s in found["report"]["scores"]])
    if found["report"].get("classification"):
        _classes(found["report"]["classification"])
    for line in _after(found):
        print(line)


MODES = {
    "experiment": " (experiment: a failed rule blocks its promotion)", "monitor": " (monitored: what failed does not block)",
    "off": " (gate off: what failed does not block)",
}  # fmt: skip


def verdict_lines(verdict: Mapping[str, Any]) -> Iterator[str]:
    yield f"{verdict['outcome'].upper()}{MODES.get(verdict['mode'], '')}"
    yield f"  rests on {verdict['rests_on']}"
    for f in verdict["findings"]:
        mark = "failed" if not f["passed"] else "ok" if f["code"] in ("ok", "no_previous") else "note"
        skipped = "" if f["passed"] or f["blocking"] else " (does not block)"
        yield f"  {mark:<6} {f['rule']}: {printable(f['detail'])} [{f['code']}]{skipped}"
        if mark != "ok" and f["next_step"]:
            yield f"         next: {f['next_step']}"


def score_row(s: Mapping[str, Any]) -> tuple[str, ...]:
    low, high = s["ci_low"], s["ci_high"]
    message = "better" if low > 0 else "worse" if high < 0 else ""
    numbers = ("" if value is None else f"{value:.3f}" for value in (s["base"], s["previous"], s["adapter"]))
    return (s["suite"], s["metric"], str(s["n"]), *numbers, f"{low:+.3f} to {high:+.3f}", message)


def _classes(found: Mapping[str, Any]) -> None:
    """Print macro and micro averages of each model, and the candidate's classes beside the base's F1."""
    low, high = found["macro_f1_ci_low"], found["macro_f1_ci_high"]
    print(f"\nclassification of {found['n']} items; gain in macro F1 {low:+.3f} to {high:+.3f} (95 %)")
    rows = [
        (
            who.replace("adapter", "candidate"),
            kind,
            *(f"{of[kind][rate]:.3f}" for rate in ("precision", "recall", "f1")),
            str(of["num_other"]),
        )
        for who, of in found["subjects"].items()
        for kind in ("macro", "micro")
    ]
    table(("MODEL", "AVERAGE", "PRECISION", "RECALL", "F1", "NO CLASS"), rows)
    classes, base = found["subjects"]["adapter"]["classes"], found["subjects"]["base"]["classes"]
    print()
    table(
        ("CLASS", "N", "PRECISION", "RECALL", "F1", "BASE F1"),
        [
            (printable(c["label"]), str(c["support"]), *(f"{x:.3f}" for x in (c["precision"], c["recall"], c["f1"], b["f1"])))
            for c, b in list(zip(classes, base, strict=True))[:CLASSES_SHOWN]
        ],
    )
    if len(classes) > CLASSES_SHOWN:
        print(f"and {len(classes) - CLASSES_SHOWN} more classes (--json)")


def _after(found: Mapping[str, Any]) -> Iterator[str]:
    report, judge = found["report"], found["report"].get("judge")
    if judge and judge["n"]:
        yield (
            f"\njudge {judge['model']}: {judge['win_rate']:.1%} won ({judge['wins']} won, {judge['draws']} draws, {judge['losses']} lost); "
            f"{judge['order_bias']:.0%} turned with the places"
        )
    for name, counts in (report.get("unsafe_categories") or {}).items():
        yield f"unsafe answers of {name.replace('adapter', 'candidate')}: " + ", ".join(f"{n} {category}" for category, n in counts.items())
    if found["advice"]:
        yield "\nfor the next run:"
        yield from (f"  - {printable(a['message'])}" for a in found["advice"])
    if found["next_run"]:
        yield "  ft submit FILE " + " ".join(f"--hp {name}={value}" for name, value in found["next_run"].items())
    cost = report["cost"]
    tokens = cost["judge_prompt_tokens"] + cost["judge_completion_tokens"]
    note = f" (vLLM did not: {printable(report['engine_note'])})" if report.get("engine_note") else ""
    yield f"\nanswers of all models generated by {report.get('engine', 'transformers')}{note}"
    yield f"took {report['seconds']:.1f} s, {cost['gpu_s']:.1f} GPU-seconds, {tokens} judge tokens"


def show_samples(samples: Iterable[Record], *, as_json: bool) -> None:
    """Print one JSON object per line, or a few lines per sample."""
    for sample in samples:
        if as_json:
            print_json(sample)
            continue
        judged = f", judge: {sample['judge']}" if sample.get("judge") else ""
        print(f"{printable(sample['id'])}  {sample['change']}{judged}")
        message = {name: sample[name] for name in ("prompt", "expected", "base")}
        has_answers = not sample["suite"].startswith("capability/")
        for name, text in {**message, "previous": sample.get("previous"), "adapter": sample["adapter"]}.items():
            if text is not None and has_answers and name in ("base", "previous", "adapter"):
                print(f"  {name + ':':<10}{printable(shown_answer(text))}")
            elif text:
                print(f"  {name + ':':<10}{printable(text)}")
        metric, scores = sample.get("metric"), sample.get("scores")
        if sample["suite"].startswith("capability/") and metric and scores:
            reported = (f"{who} {number(of[metric]) if metric in of else ''}" for who, of in scores.items())
            print(f"  {metric}: {', '.join(reported)}")


def printable(text: str) -> str:
    """Return `text` on one line without terminal control characters: it comes from files and models."""
    short = text if len(text) <= SAMPLE_CHARS else text[: SAMPLE_CHARS - 3] + "..."
    return "".join(c if c.isprintable() else "\\n" if c == "\n" else "\\t" if c == "\t" else "?" for c in short)
