"""``ft usage``, ``ft cost``, ``ft invoice`` and ``ft budgets``: usage, cost, and alerts."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane.billing import csv_export
from ft_client.cli.output import Json, fields, print_json, say, table
from ft_client.cli.record_views import Limit, NewName, add_commands, add_group, given, listing
from ft_client.cli.remote import connect, remote

if TYPE_CHECKING:
    from ft_client import FtClient

MICROS = 1_000_000
Start = Annotated[str | None, typer.Option("--start", metavar="DATE", help="Start, as a day or time (UTC); this month if absent.")]
End = Annotated[str | None, typer.Option("--end", metavar="DATE", help="End (exclusive), as a day or time (UTC); now if absent.")]
By = Annotated[str, typer.Option("--by", help="hour, day or month.")]
Csv = Annotated[bool, typer.Option("--csv", help="CSV on stdout.")]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="Id of a job.")]
BudgetId = Annotated[str, typer.Argument(metavar="BUDGET", help="Id of a budget (`ft budgets list`).")]
Thresholds = Annotated[
    str | None, typer.Option("--thresholds", metavar="PERCENTS", help="Percentages at which you are notified: 50,80,100.")
]

INVOICES = listing({"MONTH": "month", "ISSUED": lambda i: when(i["issued_at"], "day"), "USD": lambda i: _usd(i["total_micros"])})
BUDGETS = listing({
    "ID": "id", "NAME": "name", "LIMIT USD": lambda b: _usd(b["limit_micros"]), "SPENT USD": lambda b: _usd(b["spent_micros"]),
    "THRESHOLDS %": lambda b: ",".join(map(str, b["thresholds"])), "TOLD": lambda b: ",".join(map(str, b["alerted"])) or "-",
})  # fmt: skip


def register(app: typer.Typer) -> None:
    add_commands(app, "Account", usage, cost, invoice, invoices)
    commands = {"create": create_budget, "list": list_budgets, "update": update_budget, "delete": delete_budget}
    add_group(app, "budgets", commands, help="Budgets: get notified when a month's spending reaches thresholds.", panel="Account")


def usage(
    start: Start = None,
    end: End = None,
    by: By = "day",
    group: Annotated[
        str | None, typer.Option("--group", help="job_id, model, gpu_type, pricing, kind, api_key_id, metadata[KEY]; several with commas.")
    ] = None,
    as_csv: Csv = False,
    as_json: Json = False,
) -> None:
    """Show GPU-hours, storage and cost over time, and running work that is not billed yet."""
    span = {"start_time": _unix(start, "--start"), "end_time": _unix(end, "--end")}
    with connect() as client:
        found = client.usage.retrieve(**span, bucket_width=by, group_by=group.split(",") if group else None)
    if as_json:
        print_json(found)
        return
    if as_csv:
        sys.stdout.write(csv_export.usage(found))
        return
    names = found["group_by"]
    rows = [
        (when(bucket["start_time"], by), *(csv_export.dimension(result, n) or "-" for n in names), *_sums(result))
        for bucket in found["data"]
        for result in bucket["results"]
    ]
    total = ("total", *("" for _ in names), *_sums(found["total"]))
    table((by.upper(), *(n.upper() for n in names), "GPU-HOURS", "REFUNDED", "STORAGE USD", "USD"), [*rows, total])
    for one in found["unbilled"]:
        hours = one["gpu_seconds"] / 3600
        say(f"{one['job_id']} (attempt {one['attempt']}) runs: {hours:.4f} GPU-hours, {_usd(one['amount_micros'])} USD so far, not billed")
    if found["total"]["spot_savings_micros"]:
        say(f"spot has saved {_usd(found['total']['spot_savings_micros'])} USD")
    if found["stored"]:
        classes = ", ".join(f"{name} {value / 2**30:.2f}" for name, value in found["stored"]["bytes"].items())
        say(f"stored on {found['stored']['day']}, in GiB: {classes}")


def _show_cost(found: Mapping[str, Any]) -> None:
    rows = [
        (e["kind"], str(e["attempt"] or "-"), str(e["detail"].get("outcome", "-")), e["gpu_type"] or "-", f"{e['gpu_seconds'] / 3600:.4f}",
         _usd(e["amount_micros"]))
        for e in found["entries"]
    ]  # fmt: skip
    rows += [
        ("running", str(one["attempt"]), "-", one["gpu_type"], f"{one['gpu_seconds'] / 3600:.4f}", f"({_usd(one['amount_micros'])})")
        for one in found["unbilled"]
    ]
    table(
        ("KIND", "ATTEMPT", "OUTCOME", "GPU", "GPU-HOURS", "USD"), [*rows, ("total", "", "", "", "", _usd(found["total"]["amount_micros"]))]
    )
    for case in found["refund_cases"]:
        why = f": {case['note']}" if case["note"] else ""
        say(f"a refund of {_usd(case['amount_micros'])} USD for attempt {case['attempt']} ({case['outcome']}) is {case['state']}{why}")


@remote(_show_cost)
def cost(client: FtClient, job_id: JobId) -> Any:
    """Show what a job cost, attempt by attempt, with refunds and what is not billed yet."""
    return client.jobs.cost(job_id)


def invoice(
    month: Annotated[str | None, typer.Argument(metavar="MONTH", help="yyyy-mm; this month's draft if absent.")] = None,
    as_csv: Csv = False,
    as_json: Json = False,
) -> None:
    """Show the invoice of a month, or its draft until it is issued."""
    requested = month or f"{datetime.now(UTC):%Y-%m}"
    with connect() as client:
        found = client.invoices.retrieve(requested)
    if as_json:
        print_json(found)
        return
    if as_csv:
        sys.stdout.write(csv_export.invoice(found))
        return
    rows = [
        (line["kind"] + (" (late)" if line["late"] else ""), line["description"], line["job_id"] or "", _usd(line["amount_micros"]))
        for line in found["lines"]
    ]
    table(("KIND", "FOR", "JOB", "USD"), [*rows, ("total", f"{found['month']} ({found['status']})", "", found["total_usd"])])
    over = found["overage"]
    if over and over["overage_gpu_hours"]:
        say(
            f"{over['overage_gpu_hours']:.4f} GPU-hours exceed the soft limit of {over['soft_gpu_hours']:g}; they are in the lines above, "
            f"{_usd(over['overage_micros'])} USD"
        )
    if found["spot_savings_micros"]:
        say(f"spot has saved {_usd(found['spot_savings_micros'])} USD")
    if found["unbilled"]:
        say(f"{len(found['unbilled'])} attempts running, {_usd(sum(one['amount_micros'] for one in found['unbilled']))} USD so far")


@remote(INVOICES)
def invoices(client: FtClient, limit: Limit = 20) -> Any:
    """List issued invoices, newest month first."""
    return client.invoices.list(limit=limit).page()["data"]


def _show_budget(budget: Mapping[str, Any]) -> None:
    fields({
        "id": budget["id"], "name": budget["name"], "limit": f"{_usd(budget['limit_micros'])} USD a month",
        "spent": f"{_usd(budget['spent_micros'])} USD", "told at": ", ".join(f"{t} %" for t in budget["thresholds"]),
    })  # fmt: skip


@remote(_show_budget)
def create_budget(
    client: FtClient,
    name: Annotated[str, typer.Argument(help="Name of the budget.")],
    usd: Annotated[str, typer.Option("--usd", metavar="AMOUNT", help="Dollars per month: 250 or 99.50.")],
    thresholds: Thresholds = None,
) -> Any:
    """Create a budget. It stops nothing: you are notified at its thresholds, by webhook and e-mail."""
    return client.budgets.create(name=name, limit_micros=micros_of(usd), **given(thresholds=_percents(thresholds)))


@remote(BUDGETS)
def list_budgets(client: FtClient) -> Any:
    """List budgets with what was spent this month."""
    return client.budgets.list().all()


@remote(_show_budget)
def update_budget(
    client: FtClient,
    budget_id: BudgetId,
    name: NewName = None,
    usd: Annotated[str | None, typer.Option("--usd", metavar="AMOUNT", help="Dollars per month.")] = None,
    thresholds: Thresholds = None,
) -> Any:
    """Change a budget."""
    limit = micros_of(usd) if usd else None
    return client.budgets.update(budget_id, **given(name=name or None, limit_micros=limit, thresholds=_percents(thresholds)))


@remote("budget {budget_id} is deleted")
def delete_budget(client: FtClient, budget_id: BudgetId) -> Any:
    """Delete a budget."""
    return client.budgets.delete(budget_id)


def micros_of(text: str) -> int:
    """Parse ``-99.50`` into micro-dollars, exactly, without a float."""
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text)
    whole, _, rest = digits.partition(".")
    if not whole.isdecimal() or (rest and not rest.isdecimal()) or len(rest) > 6 or len(whole) > 12:
        raise typer.BadParameter(f"{text!r} is not an amount in dollars with at most six decimals: 250 or 99.50")
    return sign * (int(whole) * MICROS + int(rest.ljust(6, "0") or "0"))


def _percents(text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise typer.BadParameter(f"{text!r} is not a list of percents: 50,80,100")
    return [int(part) for part in parts]


def _sums(result: Mapping[str, Any]) -> tuple[str, str, str, str]:
    hours = (f"{result[name] / 3600:.4f}" for name in ("gpu_seconds", "refunded_gpu_seconds"))
    return (*hours, _usd(result["storage_micros"]), _usd(result["amount_micros"]))  # type: ignore[return-value]


def _usd(micros: int) -> str:
    return csv_export.usd(micros)


def when(unix: int, width: str) -> str:
    """Format the start of a bucket, as short as its width allows."""
    form = {"hour": "%Y-%m-%d %H:00", "day": "%Y-%m-%d", "month": "%Y-%m"}.get(width, "%Y-%m-%d")
    return datetime.fromtimestamp(unix, UTC).strftime(form)


def moment_of(text: str | None, name: str) -> datetime | None:
    """Parse a day or a time, in UTC unless stated."""
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{name} {text!r} is not a date: write 2026-01-31 or 2026-01-31T12:00") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _unix(text: str | None, name: str) -> int | None:
    found = moment_of(text, name)
    return None if found is None else int(found.timestamp())
