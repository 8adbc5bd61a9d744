"""The validation report of a dataset in a terminal: the verdict, what was read, problems by cause, the first rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

MAX_PROBLEMS, MAX_TEXT = 20, 100
"""Kinds of problems listed, and characters of their messages."""
CONTAINERS = {"jsonl": "JSONL", "json_array": "a JSON array", "json_object": "a JSON object", "csv": "CSV", "parquet": "Parquet"}
LENGTHS = {"min": "shortest", "p50": "median", "p95": "95 % up to", "max": "longest", "total": "in all"}


def report_lines(report: Mapping[str, Any], *, name: str) -> Iterator[str]:
    """Format `report` on the file `name`, line by line."""
    from engine.data.checks import section_lines
    from engine.data.report.validation_report import DatasetReport

    verdict = report.get("verdict") or DatasetReport.from_dict(report).verdict
    yield f"{name}: {'NOT ' + verdict.removeprefix('not ').replace('valid', 'VALID', 1) if not report['valid'] else verdict}"
    if report.get("review"):
        yield f"  waits for review ({', '.join(report['review'])}): `ft datasets approve {report['dataset_id']}`"
    if not report["valid"] and not report.get("container"):
        yield from _remedy_lines(report)
        return
    stats = report.get("stats") or {}
    yield f"  {_container(report)}; {report.get('format_reason') or 'no row could be read'}"
    removed = stats.get("dedup_removed") or 0
    yield f"  {report['rows']:,} rows, {report['examples']:,} kept, {stats.get('bad_rows') or 0:,} bad, {removed:,} duplicates removed"
    for unit in ("tokens", "characters"):
        if (lengths := stats.get(unit)) and report["examples"]:
            yield f"  {unit} of an example: " + ", ".join(f"{word} {lengths[k]:,.0f}" for k, word in LENGTHS.items() if k in lengths)
    if (splits := stats.get("splits")) and report["examples"]:
        yield f"  {splits['train']:,} to train on, {splits['validation']:,} held out (by {splits['by']})"
    yield from (f"  {line}" for line in section_lines(stats))
    yield from _problem_lines(report)
    for warning in report["warnings"]:
        yield f"  warning: {warning['message']} [{warning['code']}]"
    yield from _first_row_lines(report.get("first_rows") or ())


def _container(report: Mapping[str, Any]) -> str:
    container, policies = report.get("container") or {}, report.get("policies") or {}
    kind = CONTAINERS.get(str(container.get("format")), "a file of unknown form")
    compression = f", {container['compression']}" if container.get("compression") else ""
    encoding = policies.get("encoding", "utf-8")
    return kind + compression + (f", read as {encoding}" if encoding != "utf-8" else "")


def _remedy_lines(report: Mapping[str, Any]) -> Iterator[str]:
    """For a file refused before any row was read: the verdict has said why, and what to do if no option helps."""
    from engine.data.report.validation_report import problems_of

    for problem in problems_of(report):
        if problem.get("command"):
            yield f"  fix: {problem['fix']}"
            yield f"  {problem['command']}"


def _problem_lines(report: Mapping[str, Any]) -> Iterator[str]:
    from engine.data.report.validation_report import problems_of

    found = problems_of(report)
    for problem in found[:MAX_PROBLEMS]:
        count = problem["count"]
        rows = f"{count:,} row{'s' if count != 1 else ''}" if problem["examples"] else "file"
        yield f"  {rows}: {problem['message']} [{problem['code']}]"
        for example in problem["examples"]:
            more = example["excerpt"] or (example["message"] if example["message"] != problem["message"] else "")
            yield f"      {_place(example)}{f': {more}' if more else ''}"
        yield f"      fix: {problem['fix']}"
        if problem.get("command"):
            yield f"      {problem['command']}"
    if len(found) > MAX_PROBLEMS:
        yield f"  {len(found) - MAX_PROBLEMS} more kinds of problem; --json lists them"


def _place(example: Mapping[str, Any]) -> str:
    at = f" (byte {example['byte_offset']})" if example.get("byte_offset") is not None else ""
    path = f", {example['path']}" if example.get("path") else ""
    return f"row {example['row']}{at}{path}"


def _first_row_lines(rows: Any) -> Iterator[str]:
    if rows:
        yield "  the first rows, as parsed:"
    for row in rows:
        label = "" if row.get("label") is None else f", {'a good' if row['label'] else 'a bad'} answer"
        yield f"    row {row['row']}{label}"
        if row.get("text") is not None:
            yield f"      {_line(row['text'])}"
        for message in row.get("messages") or ():
            yield f"      {message['role']}: {_line(message['content'])}"
        for side in ("chosen", "rejected"):
            for message in row.get(side) or ():
                yield f"      {side}: {_line(message['content'])}"


def _line(text: str) -> str:
    joined = " ".join(text.split())
    return joined if len(joined) <= MAX_TEXT else f"{joined[:MAX_TEXT]}..."
