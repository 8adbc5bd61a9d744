"""``ft audit``: changes in your tenant, by whom and from where; as a table, CSV, or JSON lines."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from itertools import islice
from typing import Annotated, Any

import typer

from core.errors import InvalidRequest
from ft_client.cli.dates import unix_seconds
from ft_client.cli.output import Json, print_json, table
from ft_client.cli.remote import connect

Of = Annotated[str | None, typer.Option("--object", metavar="ID", help="Id of one object.")]
Kind = Annotated[str | None, typer.Option("--type", help="Kind of object: job, file, api_key, ...")]
Action = Annotated[str | None, typer.Option("--action", help="Action, such as `api_key.created`.")]
ByWhom = Annotated[str | None, typer.Option("--actor", metavar="ID", help="Id of a key, of a member (all their keys), or of an operator.")]
Since = Annotated[str | None, typer.Option("--since", metavar="TIME", help="2026-11-21, 2026-11-21T15:04 (UTC) or unix seconds.")]
Before = Annotated[str | None, typer.Option("--before", metavar="TIME")]
Limit = Annotated[int | None, typer.Option("-n", "--limit", help="Lines; default 20 in a table, all in an export.")]
AsCsv = Annotated[bool, typer.Option("--csv", help="Write all lines as CSV, for a spreadsheet.")]
AsJsonl = Annotated[bool, typer.Option("--jsonl", help="Write all lines as JSON objects.")]
IN_A_TABLE = 20
MAX_CELL = 60
FIELDS = ("id", "time", "tenant_id", "actor_type", "actor_id", "actor_name", "actor_email", "action", "object_type", "object_id",
    "changes", "ip", "user_agent", "request_id", "redacted_at")  # fmt: skip


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Account")(audit)


def audit(
    of: Of = None,
    kind: Kind = None,
    action: Action = None,
    actor: ByWhom = None,
    since: Since = None,
    before: Before = None,
    limit: Limit = None,
    as_csv: AsCsv = False,
    as_jsonl: AsJsonl = False,
    as_json: Json = False,
) -> None:
    """List changes in your tenant, newest first: who, what, when, from where."""
    with connect() as client:
        lines = client.audit_log.list(
            object_id=of, object_type=kind, action=action, actor=actor,
            created_from=unix_seconds(since, "since"), created_before=unix_seconds(before, "before"),
        )  # fmt: skip
        show(islice(lines, at_most(limit, as_csv or as_jsonl)), as_csv, as_jsonl, as_json)


def at_most(limit: int | None, export: bool) -> int | None:
    if limit is not None and limit < 1:
        raise InvalidRequest(f"limit {limit} is below 1", param="limit")
    return limit if limit is not None or export else IN_A_TABLE


def show(lines: Iterable[Mapping[str, Any]], as_csv: bool, as_jsonl: bool, as_json: bool) -> None:
    """Write `lines` in the requested format; exports are written as they arrive."""
    if as_jsonl:
        for line in lines:
            print_json(line)
    elif as_json:
        print_json(list(lines))
    elif as_csv:
        out = csv.writer(sys.stdout, lineterminator="\n")
        out.writerow(FIELDS)
        out.writerows(_record(line) for line in lines)
    else:
        table(("TIME", "WHO", "FROM", "ACTION", "OBJECT", "CHANGES"), [_row(line) for line in lines])


def _row(line: Mapping[str, Any]) -> tuple[str, ...]:
    who = line["actor"]
    name = who["email"] or who["name"]
    changed = "(redacted)" if line["redacted_at"] else _changes(line["changes"])
    at = f"{datetime.fromtimestamp(line['created_at'], UTC):%Y-%m-%d %H:%M:%S}"
    return at, f"{who['id']} ({name})" if name else who["id"], line["ip"] or "-", line["action"], line["object_id"], changed


def _changes(changes: Mapping[str, Any]) -> str:
    reported = "; ".join(f"{name}: {_show(old)} -> {_show(new)}" for name, (old, new) in changes.items())
    return " ".join(reported.split())


def _show(value: Any) -> str:
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_CELL else f"{text[: MAX_CELL - 3]}..."


def _record(line: Mapping[str, Any]) -> list[str]:
    who = line["actor"]
    at, redacted = (None if line[k] is None else datetime.fromtimestamp(line[k], UTC).isoformat() for k in ("created_at", "redacted_at"))
    cells = (line["id"], at, line["tenant_id"], who["type"], who["id"], who["name"], who["email"], line["action"], line["object_type"],
        line["object_id"], json.dumps(line["changes"]), line["ip"], line["user_agent"], line["request_id"], redacted)  # fmt: skip
    return [_cell(cell) for cell in cells]


def _cell(value: str | None) -> str:
    """Mark text that a spreadsheet would evaluate: names and user agents come from callers."""
    text = value or ""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
