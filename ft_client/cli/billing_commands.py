"""``ft usage``, ``cost``, ``invoice``, ``invoices`` and ``budgets``: what is used, what it costs, and alerts."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from ft_client.cli.command_options import MICROS, micros_of, moment_of, percents
from ft_client.cli.commands import Limit, NewName, add_commands, add_group, argument, given, listing, option
from ft_client.cli.output import Json, fields, print_json, say, table
from ft_client.cli.session import connect, remote

Start = Annotated[str | None, typer.Option("--start", metavar="DATE", help="Start, as a day or time (UTC); this month if absent.")]
End = Annotated[str | None, typer.Option("--end", metavar="DATE", help="End (exclusive), as a day or time (UTC); now if absent.")]
By = Annotated[str, typer.Option("--by", help="hour, day or month.")]
Csv = Annotated[bool, typer.Option("--csv", help="CSV on stdout.")]
BudgetId = argument("Id of a budget (`ft budgets list`).", metavar="BUDGET")
Thresholds = option("--thresholds", "Percentages at which you are notified: 50,80,100.", metavar="PERCENTS")


def usd(micros: int) -> str:
    """Format exactly, with all six decimal places."""
    whole, rest = divmod(abs(micros), MICROS)
    return f"{'-' if micros < 0 else ''}{whole}.{rest:06d}"


def when(unix: int, width: str) -> str:
    """Format the start of a bucket, as short as its width allows."""
    form = {"hour": "%Y-%m-%d %H:00", "day": "%Y-%m-%d", "month": "%Y-%m"}.get(width, "%Y-%m-%d")
    return datetime.fromtimestamp(unix, UTC).strftime(form)


INVOICES = listing({"MONTH": "month", "ISSUED": lambda i: when(i["issued_at"], "day"), "USD": lambda i: usd(i["total_micros"])})
BUDGETS = listing({
    "ID": "id", "NAME": "name", "LIMIT USD": lambda b: usd(b["limit_micros"]), "SPENT USD": lambda b: usd(b["spent_micros"]),
    "THRESHOLDS %": lambda b: ",".join(map(str, b["thresholds"])), "TOLD": lambda b: ",".join(map(str, b["alerted"])) or "-",
})  # fmt: skip


def register(app: typer.Typer) -> None:
    add_commands(app, "Account", {
        "usage": usage,
        "cost": remote.call("jobs.cost", "Show what a job cost, attempt by attempt, with refunds and what is not billed yet.", _show_cost,
            job_id=argument("Id of a job.", metavar="JOB")),
        "invoice": invoice,
        "invoices": remote.call("invoices.list", "List issued invoices, newest month first.", INVOICES, limit=(Limit, 20)),
    })  # fmt: skip
    add_group(app, "budgets", "Budgets: get notified when a month's spending reaches thresholds.", {
        "create": remote.call(_budget("create"), "Create a budget. It stops nothing: you are notified at its thresholds, by webhook and "
            "e-mail.", _show_budget, name=argument("Name of the budget."),
            usd=option("--usd", "Dollars per month: 250 or 99.50.", metavar="AMOUNT", type=str), thresholds=Thresholds),
        "list": remote.call("budgets.list", "List budgets with what was spent this month.", BUDGETS),
        "update": remote.call(_budget("update"), "Change a budget.", _show_budget, budget_id=BudgetId, name=NewName,
            usd=option("--usd", "Dollars per month.", metavar="AMOUNT"), thresholds=Thresholds),
        "delete": remote.call("budgets.delete", "Delete a budget.", "budget {budget_id} is deleted", budget_id=BudgetId),
    }, panel="Account")  # fmt: skip


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
    span = {name: found and int(found.timestamp()) for name, found in
        (("start_time", moment_of(start, "--start")), ("end_time", moment_of(end, "--end")))}  # fmt: skip
    with connect() as client:
        asked: Any = {**span, "bucket_width": by, "group_by": group.split(",") if group else None}
        if as_csv and not as_json:
            sys.stdout.write(client.usage.csv(**asked).decode())
            return
        found = client.usage.retrieve(**asked)
    if as_json:
        print_json(found)
        return
    names = found["group_by"]
    rows = [
        (when(bucket["start_time"], by), *(_dimension(result, n) or "-" for n in names), *_sums(result))
        for bucket in found["data"]
        for result in bucket["results"]
    ]
    show_usage(by, names, rows, _sums(found["total"]))
    for one in found["unbilled"]:
        hours = one["gpu_seconds"] / 3600
        say(f"{one['job_id']} (attempt {one['attempt']}) runs: {hours:.4f} GPU-hours, {usd(one['amount_micros'])} USD so far, not billed")
    if found["total"]["spot_savings_micros"]:
        say(f"spot has saved {usd(found['total']['spot_savings_micros'])} USD")
    if found["stored"]:
        classes = ", ".join(f"{name} {value / 2**30:.2f}" for name, value in found["stored"]["bytes"].items())
        say(f"stored on {found['stored']['day']}, in GiB: {classes}")


def show_usage(by: str, names: list[str], rows: list[tuple[str, ...]], total: tuple[str, ...]) -> None:
    """Print a row for each bucket and group, and their total."""
    heading = (by.upper(), *(n.upper() for n in names), "GPU-HOURS", "REFUNDED", "STORAGE USD", "USD")
    table(heading, [*rows, ("total", *("" for _ in names), *total)])


def _dimension(result: Mapping[str, Any], name: str) -> str | None:
    """Return a group's value of the dimension `name`, which may be a key of jobs' metadata."""
    of, key = (result["metadata"] or {}, name[len("metadata[") : -1]) if name.startswith("metadata[") else (result, name)
    return of.get(key)  # type: ignore[no-any-return]


def _sums(result: Mapping[str, Any]) -> tuple[str, ...]:
    hours = (f"{result[name] / 3600:.4f}" for name in ("gpu_seconds", "refunded_gpu_seconds"))
    return (*hours, usd(result["storage_micros"]), usd(result["amount_micros"]))


def _show_cost(found: Mapping[str, Any]) -> None:
    rows = [
        (e["kind"], str(e["attempt"] or "-"), str(e["detail"].get("outcome", "-")), e["gpu_type"] or "-", f"{e['gpu_seconds'] / 3600:.4f}",
         usd(e["amount_micros"]))
        for e in found["entries"]
    ]  # fmt: skip
    rows += [
        ("running", str(one["attempt"]), "-", one["gpu_type"], f"{one['gpu_seconds'] / 3600:.4f}", f"({usd(one['amount_micros'])})")
        for one in found["unbilled"]
    ]
    total = ("total", "", "", "", "", usd(found["total"]["amount_micros"]))
    table(("KIND", "ATTEMPT", "OUTCOME", "GPU", "GPU-HOURS", "USD"), [*rows, total])
    for case in found["refund_cases"]:
        why = f": {case['note']}" if case["note"] else ""
        say(f"a refund of {usd(case['amount_micros'])} USD for attempt {case['attempt']} ({case['outcome']}) is {case['state']}{why}")


def invoice(
    month: Annotated[str | None, typer.Argument(metavar="MONTH", help="yyyy-mm; this month's draft if absent.")] = None,
    as_csv: Csv = False,
    as_json: Json = False,
) -> None:
    """Show the invoice of a month, or its draft until it is issued."""
    requested = month or f"{datetime.now(UTC):%Y-%m}"
    with connect() as client:
        if as_csv and not as_json:
            sys.stdout.write(client.invoices.csv(requested).decode())
            return
        found = client.invoices.retrieve(requested)
    if as_json:
        print_json(found)
        return
    rows = [
        (line["kind"] + (" (late)" if line["late"] else ""), line["description"], line["job_id"] or "", usd(line["amount_micros"]))
        for line in found["lines"]
    ]
    table(("KIND", "FOR", "JOB", "USD"), [*rows, ("total", f"{found['month']} ({found['status']})", "", found["total_usd"])])
    over = found["overage"]
    if over and over["overage_gpu_hours"]:
        say(
            f"{over['overage_gpu_hours']:.4f} GPU-hours exceed the soft limit of {over['soft_gpu_hours']:g}; they are in the lines above, "
            f"{usd(over['overage_micros'])} USD"
        )
    if found["spot_savings_micros"]:
        say(f"spot has saved {usd(found['spot_savings_micros'])} USD")
    if found["unbilled"]:
        say(f"{len(found['unbilled'])} attempts running, {usd(sum(one['amount_micros'] for one in found['unbilled']))} USD so far")


def _budget(call: str) -> Any:
    """Return a function that creates or updates a budget: its limit in dollars, its thresholds with commas between."""

    def change(client: Any, usd: str | None = None, thresholds: str | None = None, **named: Any) -> Any:
        limits = given(limit_micros=micros_of(usd) if usd else None, thresholds=percents(thresholds))
        return getattr(client.budgets, call)(**named, **limits)

    return change


def _show_budget(budget: Mapping[str, Any]) -> None:
    fields({
        "id": budget["id"], "name": budget["name"], "limit": f"{usd(budget['limit_micros'])} USD a month",
        "spent": f"{usd(budget['spent_micros'])} USD", "told at": ", ".join(f"{t} %" for t in budget["thresholds"]),
    })  # fmt: skip
