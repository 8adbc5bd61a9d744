"""``ft admin usage``, ``refunds``, ``adjust`` and ``ledger``: bills of all tenants, decisions about them, and verification of the
ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane.billing import csv_export
from control_plane.cli.local_platform import local, open_local
from ft_client.cli.billing_commands import By, End, Start, micros_of, moment_of, when
from ft_client.cli.output import Json, print_json, say, table
from ft_client.cli.record_views import add_group, document, listing, show, since

if TYPE_CHECKING:
    from control_plane.billing.tables import RefundCase
    from control_plane.billing.usage.rules import Total
    from control_plane.platform.context import Platform

CaseId = Annotated[str, typer.Argument(metavar="CASE", help="Id of a case (`ft admin refunds list`).")]
Note = Annotated[str, typer.Option("--note", help="Reason, shown to the tenant.")]


def _decided(case: Mapping[str, Any]) -> str:
    return f"{case['id']}: {csv_export.usd(case['amount_micros'])} USD {case['state']} by {case['decided_by']}"


CASES = listing({
    "CASE": "id", "TENANT": "tenant_id", "OUTCOME": "outcome", "USD": lambda c: csv_export.usd(c["amount_micros"]), "STATE": "state",
    "SINCE": since("created_at"),
})  # fmt: skip
DIFFERENCES = listing({"DIFFERENCE": "code", "OF": "id", "": "detail"})


def register_admin(admin: typer.Typer) -> None:
    cases = {"list": list_cases, "grant": grant, "refuse": refuse}
    add_group(admin, "refunds", cases, help="Refunds of attempts whose failure cannot be attributed for certain.")
    admin.command("usage")(usage)
    admin.command("adjust")(adjust)
    add_group(admin, "ledger", {"check": check, "balance": balance}, help="The ledger of all tenants.")


def usage(
    tenant: Annotated[str | None, typer.Option("--tenant", help="Only this tenant.")] = None,
    start: Start = None,
    end: End = None,
    by: By = "month",
    group: Annotated[str, typer.Option("--group", help="tenant, job_id, model, gpu_type, pricing, kind; several with commas.")] = "tenant",
    as_json: Json = False,
) -> None:
    """Show GPU-hours, storage and cost of all tenants over time, and running work that is not billed yet."""
    from control_plane.billing.usage import service
    from control_plane.billing.usage.rules import OF_OPERATORS
    from control_plane.quotas.rules import month_of
    from control_plane.tenants import service as tenants

    with open_local() as platform:
        if tenant is not None:
            tenants.get(platform, tenant)
        now = platform.clock()
        begins, ends = moment_of(start, "--start") or month_of(now).begins, moment_of(end, "--end") or now
        names = [name for name in group.split(",") if name]
        found = service.used(platform, tenant, start=begins, end=ends, width=by, by=names, allowed=OF_OPERATORS)
    if as_json:
        buckets = [
            {**key, **asdict(total), "start_time": one.bucket.begins.timestamp()} for one in found.buckets for key, total in one.results
        ]
        running = [asdict(one) | {"since": one.since.timestamp()} for one in found.unbilled]
        print_json({"data": buckets, "total": asdict(found.total), "unbilled": running})
        return
    rows = [
        (when(int(one.bucket.begins.timestamp()), by), *(key[name] or "-" for name in names), *_sums(total))
        for one in found.buckets
        for key, total in one.results
    ]
    table(
        (by.upper(), *(name.upper() for name in names), "GPU-HOURS", "REFUNDED", "STORAGE USD", "USD"),
        [*rows, ("total", *("" for _ in names), *_sums(found.total))],
    )
    if found.unbilled:
        so_far = csv_export.usd(sum(one.amount_micros for one in found.unbilled))
        say(f"{len(found.unbilled)} attempts running, {so_far} USD so far, not billed")


def list_cases(
    state: Annotated[str, typer.Option("--state", help="pending, granted, refused or all.")] = "pending",
    tenant: Annotated[str | None, typer.Option("--tenant")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=100)] = 100,
    as_json: Json = False,
) -> None:
    """List refund cases, oldest first; by default those waiting for a decision."""
    from control_plane.billing import refunds

    with open_local() as platform:
        found = refunds.list_cases(platform, state=None if state == "all" else state, tenant=tenant, limit=limit)
    show([_case(row) for row in found.items], CASES, as_json=as_json)
    if found.has_more and not as_json:
        say(f"more than {limit} results; raise --limit")


@local(_decided)
def grant(platform: Platform, case_id: CaseId, note: Note) -> Any:
    """Refund the whole attempt. Granting again changes nothing."""
    from control_plane.billing import refunds

    return _case(refunds.grant(platform, case_id, by=_me(), note=note))


@local(_decided)
def refuse(platform: Platform, case_id: CaseId, note: Note) -> Any:
    """Refuse the refund, and tell the tenant why."""
    from control_plane.billing import refunds

    return _case(refunds.refuse(platform, case_id, by=_me(), note=note))


@local(lambda made: f"{made['tenant']}: {csv_export.usd(made['amount_micros'])} USD entered as {made['id']}")
def adjust(
    platform: Platform,
    tenant: Annotated[str, typer.Argument(help="Id of the tenant.")],
    usd: Annotated[str, typer.Option("--usd", metavar="AMOUNT", help="Dollars; positive: the tenant owes more; --usd=-5 refunds 5.")],
    reason: Annotated[str, typer.Option("--reason", help="Reason, shown on the invoice.")],
    key: Annotated[
        str | None, typer.Option("--key", help="Idempotency key, such as a ticket number: repeated calls post one entry.")
    ] = None,
) -> Any:
    """Correct a tenant's bill with a separate entry."""
    from control_plane.billing import refunds

    made = refunds.adjust(platform, tenant, amount_micros=micros_of(usd), reason=reason, by=_me(), key=key)
    return {"id": made.id, "tenant": tenant, "amount_micros": made.amount_micros}


def _balances(found: Mapping[str, Any]) -> None:
    owed = ((f"of receivable: {tenant}", micros) for tenant, micros in found["receivables"].items())
    rows = [*found["accounts"].items(), ("total", found["total_micros"]), *owed]
    table(("ACCOUNT", "USD"), [(name, csv_export.usd(value)) for name, value in rows])


@local(_balances)
def balance(platform: Platform) -> Any:
    """Show every account with its balance; the balances add up to zero."""
    from control_plane.billing import ledger

    found = ledger.trial_balance(platform)
    return asdict(found) | {"total_micros": found.total}


def _checked(found: Mapping[str, Any]) -> str:
    if found["differences"]:
        DIFFERENCES(found["differences"])
    counted = f"{found['num_entries']} entries, {found['num_intervals']} intervals, {found['num_invoices']} invoices"
    num, total = len(found["differences"]) or "no", found["total_micros"]
    return f"{counted}: {num} differences; all accounts add up to {total} micro-dollars"


@local(_checked, fails=lambda found: bool(found["differences"] or found["total_micros"]))
def check(platform: Platform) -> Any:
    """Verify the whole ledger: both sides of every entry, and every entry recomputed. Exit code 1 on a difference."""
    from control_plane.billing import ledger_check

    return asdict(ledger_check.check(platform))


def _sums(total: Total) -> tuple[str, ...]:
    hours = (f"{ms / 3_600_000:.4f}" for ms in (total.gpu_ms, total.refunded_gpu_ms))
    return (*hours, csv_export.usd(total.storage_micros), csv_export.usd(total.amount_micros))


def _me() -> str:
    import getpass

    return f"cli:{getpass.getuser()}"


def _case(case: RefundCase) -> Mapping[str, Any]:
    return document(case, *(field.name for field in fields(case)))
