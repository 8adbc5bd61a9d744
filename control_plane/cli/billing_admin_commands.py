"""``ft admin usage``, ``refunds``, ``adjust`` and ``ledger``: bills of all tenants, decisions about them, and the ledger's verification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane.cli.local_platform import local, open_local, user
from ft_client.cli.billing_commands import By, End, Start, show_usage, usd, when
from ft_client.cli.command_options import micros_of, moment_of
from ft_client.cli.commands import add_commands, add_group, argument, document, listing, option, show, since
from ft_client.cli.output import Json, print_json, say, table

if TYPE_CHECKING:
    from control_plane.billing.tables import RefundCase
    from control_plane.billing.usage.rules import Total
    from control_plane.platform.context import Platform

CaseId = argument("Id of a case (`ft admin refunds list`).", metavar="CASE")
Note = option("--note", "Reason, shown to the tenant.", type=str)
CASES = listing({
    "CASE": "id", "TENANT": "tenant_id", "OUTCOME": "outcome", "USD": lambda c: usd(c["amount_micros"]), "STATE": "state",
    "SINCE": since("created_at"),
})  # fmt: skip
DIFFERENCES = listing({"DIFFERENCE": "code", "OF": "id", "": "detail"})


def register(admin: typer.Typer) -> None:
    def decided(case: Mapping[str, Any]) -> str:
        return f"{case['id']}: {usd(case['amount_micros'])} USD {case['state']} by {case['decided_by']}"

    add_group(admin, "refunds", "Refunds of attempts whose failure cannot be attributed for certain.", {
        "list": list_cases,
        "grant": local.call(_decide("grant"), "Refund the whole attempt. Granting again changes nothing.", decided, case_id=CaseId,
            note=Note),
        "refuse": local.call(_decide("refuse"), "Refuse the refund, and tell the tenant why.", decided, case_id=CaseId, note=Note),
    })  # fmt: skip
    add_commands(admin, None, {
        "usage": usage,
        "adjust": local.call(_adjust, "Correct a tenant's bill with a separate entry.",
            lambda made: f"{made['tenant']}: {usd(made['amount_micros'])} USD entered as {made['id']}",
            tenant=argument("Id of the tenant."), reason=option("--reason", "Reason, shown on the invoice.", type=str),
            usd=option("--usd", "Dollars; positive: the tenant owes more; --usd=-5 refunds 5.", metavar="AMOUNT", type=str),
            key=option("--key", "Idempotency key, such as a ticket number: repeated calls post one entry.")),
    })  # fmt: skip
    add_group(admin, "ledger", "The ledger of all tenants.", {
        "check": local.call(_check, "Verify the whole ledger: both sides of every entry, and every entry recomputed. Exit code 1 on a "
            "difference.", _checked, fails=lambda found: bool(found["differences"] or found["total_micros"])),
        "balance": local.call(_balance, "Show every account with its balance; the balances add up to zero.", _balances),
    })  # fmt: skip


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
    show_usage(by, names, rows, _sums(found.total))
    if found.unbilled:
        so_far = usd(sum(one.amount_micros for one in found.unbilled))
        say(f"{len(found.unbilled)} attempts running, {so_far} USD so far, not billed")


def _sums(total: Total) -> tuple[str, ...]:
    hours = (f"{ms / 3_600_000:.4f}" for ms in (total.gpu_ms, total.refunded_gpu_ms))
    return (*hours, usd(total.storage_micros), usd(total.amount_micros))


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


def _decide(what: str) -> Any:
    def decide(platform: Platform, case_id: str, note: str) -> Mapping[str, Any]:
        from control_plane.billing import refunds

        return _case(getattr(refunds, what)(platform, case_id, by=user(), note=note))

    return decide


def _case(case: RefundCase) -> Mapping[str, Any]:
    return document(case, *(field.name for field in fields(case)))


def _adjust(platform: Platform, tenant: str, usd: str, reason: str, key: str | None = None) -> Mapping[str, Any]:
    from control_plane.billing import refunds

    made = refunds.adjust(platform, tenant, amount_micros=micros_of(usd), reason=reason, by=user(), key=key)
    return {"id": made.id, "tenant": tenant, "amount_micros": made.amount_micros}


def _balance(platform: Platform) -> Mapping[str, Any]:
    from control_plane.billing import ledger

    found = ledger.trial_balance(platform)
    return asdict(found) | {"total_micros": found.total}


def _balances(found: Mapping[str, Any]) -> None:
    owed = ((f"of receivable: {tenant}", micros) for tenant, micros in found["receivables"].items())
    rows = [*found["accounts"].items(), ("total", found["total_micros"]), *owed]
    table(("ACCOUNT", "USD"), [(name, usd(value)) for name, value in rows])


def _check(platform: Platform) -> Mapping[str, Any]:
    from control_plane.billing import ledger_check

    return asdict(ledger_check.check(platform))


def _checked(found: Mapping[str, Any]) -> str:
    if found["differences"]:
        DIFFERENCES(found["differences"])
    counted = f"{found['num_entries']} entries, {found['num_intervals']} intervals, {found['num_invoices']} invoices"
    num, total = len(found["differences"]) or "no", found["total_micros"]
    return f"{counted}: {num} differences; all accounts add up to {total} micro-dollars"
