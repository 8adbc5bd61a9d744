"""Usage and invoices as CSV, built from their JSON, so that the API and the command line produce the same bytes."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from control_plane.billing.rules import MICROS, metadata_key

INVOICE_COLUMNS = (
    "entry_id", "kind", "description", "job_id", "attempt", "model", "gpu_type", "pricing", "gpu_seconds", "occurred_at", "late",
    "list_micros", "amount_micros", "amount_usd",
)  # fmt: skip
SUMS = (
    "gpu_seconds", "refunded_gpu_seconds", "usage_micros", "refund_micros", "storage_micros", "adjustment_micros", "spot_savings_micros",
    "amount_micros", "amount_usd",
)  # fmt: skip
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters of cells that a spreadsheet would evaluate."""


def invoice(document: Mapping[str, Any]) -> str:
    """Return the lines of an invoice with a header, and its total as the last line."""
    lines = [dict(line) | {"amount_usd": usd(line["amount_micros"])} for line in document["lines"]]
    total = {"kind": "total", "description": document["month"], "amount_micros": document["total_micros"]}
    return _sheet(INVOICE_COLUMNS, [*lines, total | {"amount_usd": usd(document["total_micros"])}])


def usage(document: Mapping[str, Any]) -> str:
    """Return one line per bucket and group; empty buckets are left out."""
    rows = [
        {
            "start": _time(bucket["start_time"]),
            "end": _time(bucket["end_time"]),
            **result,
            **{name: dimension(result, name) for name in document["group_by"]},
            "amount_usd": usd(result["amount_micros"]),
        }
        for bucket in document["data"]
        for result in bucket["results"]
    ]
    return _sheet(("start", "end", *document["group_by"], *SUMS), rows)


def dimension(result: Mapping[str, Any], name: str) -> str | None:
    """Return a group's value of the dimension `name`."""
    key = metadata_key(name)
    found: str | None = result[name] if key is None else (result["metadata"] or {}).get(key)
    return found


def usd(micros: int) -> str:
    """Format exactly, with all six decimal places."""
    whole, rest = divmod(abs(micros), MICROS)
    return f"{'-' if micros < 0 else ''}{whole}.{rest:06d}"


def _sheet(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\r\n", extrasaction="ignore")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: value if name == "amount_usd" else _cell(value) for name, value in row.items()})
    return out.getvalue()


def _cell(value: Any) -> Any:
    """Quote text so that it is never a formula."""
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def _time(unix: int) -> str:
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
