"""``ft check`` (offline) and ``ft upload``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane.cli.exits import Exit
from control_plane.cli.output import Json, fields, print_json, say
from ft_assets.errors import InvalidDataset, InvalidRequest, NotFound

if TYPE_CHECKING:
    from control_plane.client import FtClient
    from ft_assets.datasets.ingest import IngestResult

Map = Annotated[
    str | None, typer.Option("--map", help="Columns of a CSV or Parquet file: `text=prompt,category=completion` (theirs=ours).")
]
Model = Annotated[str | None, typer.Option("--model", "-m", help="Base model: counts tokens and finds its control tokens.")]


def register(app: typer.Typer) -> None:
    panel = "Data"
    app.command(rich_help_panel=panel)(check)
    app.command(rich_help_panel=panel)(upload)


def parse_map(text: str | None) -> dict[str, str] | None:
    """``{"text": "prompt"}`` for ``text=prompt``; a usage error for anything else."""
    if text is None:
        return None
    pairs = [part.partition("=") for part in text.split(",")]
    bad = [f"{a}{sep}{b}" for a, sep, b in pairs if not (a.strip() and sep and b.strip())]
    if bad:
        raise typer.BadParameter(f"{bad[0]!r} is not COLUMN=FIELD; write --map text=prompt,category=completion")
    return {a.strip(): b.strip() for a, _, b in pairs}


def check(
    file: Annotated[Path, typer.Argument(help="JSONL, JSON, CSV or Parquet; .gz and .zst too.")],
    column_map: Map = None,
    model: Model = None,
    as_json: Json = False,
) -> None:
    """Check a dataset here, without uploading it: the same report that the platform makes. Exit code 0 valid, 1 not, 2 unreadable."""
    mapping = parse_map(column_map)
    if not file.is_file() or not os.access(file, os.R_OK):
        say(f"ft: {file} can not be read: {'it is no file' if file.exists() else 'there is no such file'} [unreadable_file]")
        raise typer.Exit(Exit.USAGE)
    report = _validate(file, mapping, model).report.to_dict()
    if as_json:
        print_json(report)
    else:
        show_report(report, name=str(file))
    if not report["valid"]:
        raise typer.Exit(Exit.FAILED)


def _validate(file: Path, mapping: Mapping[str, str] | None, model: str | None) -> IngestResult:
    from ft_assets.datasets.ingest import validate_file

    if model is None:
        return validate_file(file, filename=file.name, column_map=mapping)
    from control_plane.settings import load
    from ft_assets.base_models import Catalogue
    from ft_assets.datasets.tokens.chat_tokenizer import ChatTokenizer

    base = Catalogue.load(load().base_models).get(model)
    if base.directory is None:
        raise InvalidRequest(
            f"base model {model} has no files on this machine; leave out --model, or upload the file to check it there", param="model"
        )
    tokenizer = ChatTokenizer.load(base.directory)
    return validate_file(file, filename=file.name, column_map=mapping, tokenizer=tokenizer, max_seq_len=base.context_length)


def show_report(report: Mapping[str, Any], *, name: str) -> None:
    """A validation report as text: what it is, every stored problem with its fix, then counts and warnings."""
    for line in report_lines(report, name=name):
        print(line)


def report_lines(report: Mapping[str, Any], *, name: str) -> Iterator[str]:
    stats = report.get("stats") or {}
    yield f"{name}: {'valid' if report['valid'] else 'NOT VALID'}"
    container = report.get("container") or {}
    kind = " ".join(str(v) for v in (container.get("format"), container.get("compression")) if v)
    yield f"  {kind or 'unknown container'}; {report.get('format_reason') or 'no row could be read'}"
    removed = stats.get("dedup_removed") or 0
    yield f"  {report['rows']} rows, {report['examples']} kept, {stats.get('bad_rows') or 0} bad, {removed} duplicates removed"
    for unit in ("tokens", "characters"):
        if lengths := stats.get(unit):
            shown = ", ".join(f"{k} {lengths[k]:.0f}" for k in ("min", "p50", "p95", "max", "total") if k in lengths)
            yield f"  {unit}: {shown}"
    for error in report["errors"]:
        yield f"  {_place(error)}: {error['message']} [{error['code']}]"
        yield f"      fix: {error['fix']}"
    counts = report["error_counts"]
    if counts:
        yield "  problems: " + ", ".join(f"{code} {n}" for code, n in counts.items())
    hidden = sum(counts.values()) - len(report["errors"])
    if hidden > 0:
        yield f"  {hidden} more problems are counted above but not listed"
    for warning in report["warnings"]:
        yield f"  warning: {warning['message']} [{warning['code']}]"


def _place(error: Mapping[str, Any]) -> str:
    if error.get("row") is None:
        return "file"
    at = f" (byte {error['byte_offset']})" if error.get("byte_offset") is not None else ""
    path = f", {error['path']}" if error.get("path") else ""
    return f"row {error['row']}{at}{path}"


def upload(
    file: Annotated[Path, typer.Argument(help="JSONL, JSON, CSV or Parquet; .gz and .zst too.")],
    column_map: Map = None,
    as_json: Json = False,
) -> None:
    """Upload a dataset; it is validated there. Exit code 1 when it is not valid, with every bad row."""
    from control_plane.cli.remote import connect

    with connect() as client:
        made = client.upload_file(file, column_map=parse_map(column_map))
        if as_json:
            print_json(made)
        else:
            accepted(client, made)
            print(made["id"])
            fields({"file": made["filename"], "bytes": made["bytes"], "status": made["status"]})
    if made["status"] == "error":
        raise typer.Exit(Exit.FAILED)


def accepted(client: FtClient, made: Mapping[str, Any]) -> Mapping[str, Any]:
    """`made` if the upload is valid or still being looked at; else its report on stderr and a refusal."""
    if made["status"] != "error":
        return made
    try:
        for line in report_lines(client.dataset_report(made["id"]), name=made["filename"]):
            say(line)
    except NotFound:
        pass  # refused before a report could be made; the reason is in the details
    raise InvalidDataset(f"{made['filename']} ({made['id']}) is not valid: {made.get('status_details') or 'see the report above'}")
