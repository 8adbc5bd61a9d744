"""``ft admin usage``, ``refunds``, ``adjust`` and ``ledger``: bills of all tenants, decisions about them, and verification of the
ledger."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane.billing import csv_export
from control_plane.cli.exits import Exit
from control_plane.cli.output import Json, ago, print_json, say, table
from control_plane.cli.tenant.account.usage_commands import By, End, Start, micros_of, moment_of, when

if TYPE_CHECKING:
    from control_plane.billing.tables import RefundCase
    from control_plane.billing.usage.rules import Total

CaseId = Annotated[str, typer.Argument(metavar="CASE", help="Id of a case (`ft admin refunds list`).")]
Note = Annotated[str, typer.Option("--note", help="Reason, shown to the tenant.")]


def register_admin(admin: typer.Typer) -> None:
    refunds = typer.Typer(help="Refunds of attempts whose failure cannot be attributed for certain.", no_args_is_help=True)
    for name, command in (("list", list_cases), ("grant", grant), ("refuse", refuse)):
        refunds.command(name)(command)
    admin.add_typer(refunds, name="refunds")
    admin.command("usage")(usage)
    admin.command("adjust")(adjust)
    ledger = typer.Typer(help="The ledger of all tenants.", no_args_is_help=True)
    ledger.command("check")(check)
    ledger.command("balance")(balance)
    admin.add_typer(ledger, name="ledger")


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
    from control_plane.cli.admin.local_platform import open_local
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
    from control_plane.cli.admin.local_platform import open_local

    with open_local() as platform:
        found = refunds.list_cases(platform, state=None if state == "all" else state, tenant=tenant, limit=limit)
    if as_json:
        print_json([_case(case) for case in found.items])
        return
    rows = [(r.id, r.tenant_id, r.outcome, csv_export.usd(r.amount_micros), r.state, ago(r.created_at.timestamp())) for r in found.items]
    table(("CASE", "TENANT", "OUTCOME", "USD", "STATE", "SINCE"), rows)
    if found.has_more:
        say(f"more than {limit} results; raise --limit")


def grant(case_id: CaseId, note: Note, as_json: Json = False) -> None:
    """Refund the whole attempt. Granting again changes nothing."""
    from control_plane.billing import refunds
    from control_plane.cli.admin.local_platform import open_local

    with open_local() as platform:
        _decided(refunds.grant(platform, case_id, by=_me(), note=note), as_json=as_json)


def refuse(case_id: CaseId, note: Note, as_json: Json = False) -> None:
    """Refuse the refund, and tell the tenant why."""
    from control_plane.billing import refunds
    from control_plane.cli.admin.local_platform import open_local

    with open_local() as platform:
        _decided(refunds.refuse(platform, case_id, by=_me(), note=note), as_json=as_json)


def adjust(
    tenant: Annotated[str, typer.Argument(help="Id of the tenant.")],
    usd: Annotated[str, typer.Option("--usd", metavar="AMOUNT", help="Dollars; positive: the tenant owes more; --usd=-5 refunds 5.")],
    reason: Annotated[str, typer.Option("--reason", help="Reason, shown on the invoice.")],
    key: Annotated[
        str | None, typer.Option("--key", help="Idempotency key, such as a ticket number: repeated calls post one entry.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Correct a tenant's bill with a separate entry."""
    from control_plane.billing import refunds
    from control_plane.cli.admin.local_platform import open_local

    with open_local() as platform:
        made = refunds.adjust(platform, tenant, amount_micros=micros_of(usd), reason=reason, by=_me(), key=key)
    if as_json:
        print_json({"id": made.id, "tenant": tenant, "amount_micros": made.amount_micros})
        return
    say(f"{tenant}: {csv_export.usd(made.amount_micros)} USD entered as {made.id}")


def balance(as_json: Json = False) -> None:
    """Show every account with its balance; the balances add up to zero."""
    from control_plane.billing import ledger
    from control_plane.cli.admin.local_platform import open_local

    with open_local() as platform:
        found = ledger.trial_balance(platform)
    if as_json:
        print_json(asdict(found) | {"total_micros": found.total})
        return
    rows = [*found.accounts.items(), ("total", found.total), *((f"of receivable: {t}", owed) for t, owed in found.receivables.items())]
    table(("ACCOUNT", "USD"), [(name, csv_export.usd(value)) for name, value in rows])


def check(as_json: Json = False) -> None:
    """Verify the whole ledger: both sides of every entry, and every entry recomputed. Exit code 1 on a difference."""
    from control_plane.billing import ledger_check
    from control_plane.cli.admin.local_platform import open_local

    with open_local() as platform:
        found = ledger_check.check(platform)
    if as_json:
        print_json(asdict(found))
    else:
        if found.differences:
            table(("DIFFERENCE", "OF", ""), [(d.code, d.id, d.detail) for d in found.differences])
        counted = f"{found.num_entries} entries, {found.num_intervals} intervals, {found.num_invoices} invoices"
        say(f"{counted}: {len(found.differences) or 'no'} differences; all accounts add up to {found.total_micros} micro-dollars")
    if found.differences or found.total_micros:
        raise typer.Exit(Exit.FAILED)


def _sums(total: Total) -> tuple[str, ...]:
    hours = (f"{ms / 3_600_000:.4f}" for ms in (total.gpu_ms, total.refunded_gpu_ms))
    return (*hours, csv_export.usd(total.storage_micros), csv_export.usd(total.amount_micros))


def _me() -> str:
    import getpass

    return f"cli:{getpass.getuser()}"


def _decided(case: RefundCase, *, as_json: bool) -> None:
    if as_json:
        print_json(_case(case))
        return
    say(f"{case.id}: {csv_export.usd(case.amount_micros)} USD {case.state} by {case.decided_by}")


def _case(case: RefundCase) -> dict[str, Any]:
    decided_at = None if case.decided_at is None else case.decided_at.timestamp()
    return asdict(case) | {"created_at": case.created_at.timestamp(), "decided_at": decided_at}
