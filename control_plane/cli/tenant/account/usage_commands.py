"""``ft usage``, ``ft cost``, ``ft invoice`` and ``ft budgets``: usage, cost, and alerts."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from control_plane.billing import csv_export
from control_plane.cli.output import Json, fields, print_json, say, table

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


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Account")(usage)
    app.command(rich_help_panel="Account")(cost)
    app.command(rich_help_panel="Account")(invoice)
    app.command(rich_help_panel="Account")(invoices)
    group = typer.Typer(help="Budgets: get notified when a month's spending reaches thresholds.", no_args_is_help=True)
    for name, command in (("create", create_budget), ("list", list_budgets), ("update", update_budget), ("delete", delete_budget)):
        group.command(name)(command)
    app.add_typer(group, name="budgets", rich_help_panel="Account")


def usage(
    start: Start = None,
    end: End = None,
    by: By = "day",
    group: Annotated[str | None, typer.Option("--group", help="job_id, model, gpu_type, pricing, kind; several with commas.")] = None,
    as_csv: Csv = False,
    as_json: Json = False,
) -> None:
    """Show GPU-hours, storage and cost over time, and running work that is not billed yet."""
    from control_plane.cli.tenant.remote import connect

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
        (when(bucket["start_time"], by), *(result[n] or "-" for n in names), *_sums(result))
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


def cost(job_id: JobId, as_json: Json = False) -> None:
    """Show what a job cost, attempt by attempt, with refunds and what is not billed yet."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        found = client.jobs.cost(job_id)
    if as_json:
        print_json(found)
        return
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


def invoice(
    month: Annotated[str | None, typer.Argument(metavar="[MONTH]", help="yyyy-mm; this month's draft if absent.")] = None,
    as_csv: Csv = False,
    as_json: Json = False,
) -> None:
    """Show the invoice of a month, or its draft until it is issued."""
    from control_plane.cli.tenant.remote import connect

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


def invoices(limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=100)] = 20, as_json: Json = False) -> None:
    """List issued invoices, newest month first."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        found = client.invoices.list(limit=limit).page()["data"]
    if as_json:
        print_json(found)
        return
    table(("MONTH", "ISSUED", "USD"), [(i["month"], when(i["issued_at"], "day"), _usd(i["total_micros"])) for i in found])


def create_budget(
    name: Annotated[str, typer.Argument(help="Name of the budget.")],
    usd: Annotated[str, typer.Option("--usd", metavar="AMOUNT", help="Dollars per month: 250 or 99.50.")],
    thresholds: Thresholds = None,
    as_json: Json = False,
) -> None:
    """Create a budget. It stops nothing: you are notified at its thresholds, by webhook and e-mail."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        made = client.budgets.create(name=name, limit_micros=micros_of(usd), **_percents(thresholds))
    _shown(made, as_json=as_json)


def list_budgets(as_json: Json = False) -> None:
    """List budgets with what was spent this month."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        found = client.budgets.list().all()
    if as_json:
        print_json(found)
        return
    rows = [
        (b["id"], b["name"], _usd(b["limit_micros"]), _usd(b["spent_micros"]), ",".join(map(str, b["thresholds"])),
         ",".join(map(str, b["alerted"])) or "-")
        for b in found
    ]  # fmt: skip
    table(("ID", "NAME", "LIMIT USD", "SPENT USD", "THRESHOLDS %", "TOLD"), rows)


def update_budget(
    budget_id: BudgetId,
    name: Annotated[str | None, typer.Option("--name")] = None,
    usd: Annotated[str | None, typer.Option("--usd", metavar="AMOUNT", help="Dollars per month.")] = None,
    thresholds: Thresholds = None,
    as_json: Json = False,
) -> None:
    """Change a budget."""
    from control_plane.cli.tenant.remote import connect

    changes: dict[str, Any] = ({"name": name} if name else {}) | ({"limit_micros": micros_of(usd)} if usd else {}) | _percents(thresholds)
    with connect() as client:
        made = client.budgets.update(budget_id, **changes)
    _shown(made, as_json=as_json)


def delete_budget(budget_id: BudgetId, as_json: Json = False) -> None:
    """Delete a budget."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        done = client.budgets.delete(budget_id)
    if as_json:
        print_json(done)
        return
    say(f"budget {budget_id} is deleted")


def micros_of(text: str) -> int:
    """Parse ``-99.50`` into micro-dollars, exactly, without a float."""
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text)
    whole, _, rest = digits.partition(".")
    if not whole.isdecimal() or (rest and not rest.isdecimal()) or len(rest) > 6 or len(whole) > 12:
        raise typer.BadParameter(f"{text!r} is not an amount in dollars with at most six decimals: 250 or 99.50")
    return sign * (int(whole) * MICROS + int(rest.ljust(6, "0") or "0"))


def _shown(budget: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(budget)
        return
    fields({
        "id": budget["id"], "name": budget["name"], "limit": f"{_usd(budget['limit_micros'])} USD a month",
        "spent": f"{_usd(budget['spent_micros'])} USD", "told at": ", ".join(f"{t} %" for t in budget["thresholds"]),
    })  # fmt: skip


def _percents(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise typer.BadParameter(f"{text!r} is not a list of percents: 50,80,100")
    return {"thresholds": [int(part) for part in parts]}


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
