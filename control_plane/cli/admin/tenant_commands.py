"""``ft admin tenants``: create, list, change, suspend and resume tenants."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane.cli.output import Json, print_json, say, table
from ft_assets.errors import InvalidRequest

if TYPE_CHECKING:
    from control_plane.tenants.rules import Tenant

Id = Annotated[str, typer.Argument(metavar="TENANT", help="Id of the tenant.")]
OF_TIER = "tier"
"""Placeholder for the tier's limit where an option takes a number."""


def register(tenants: typer.Typer) -> None:
    for name, command in (("create", create), ("list", list_tenants), ("update", update), ("suspend", suspend), ("resume", resume)):
        tenants.command(name)(command)


def create(
    tenant: Annotated[str, typer.Argument(help="Id of the tenant: lower-case letters, digits and '-'.")],
    tier: Annotated[str, typer.Option("--tier", help="free, standard or premium.")] = "standard",
    owner: Annotated[str | None, typer.Option("--owner", metavar="E-MAIL", help="E-mail address of a person to add as owner.")] = None,
    as_json: Json = False,
) -> None:
    """Create a tenant and its first API key. The key is shown once: only its hash is stored."""
    from control_plane.cli.admin.local_platform import open_local
    from control_plane.tenants import service as tenants

    with open_local() as platform:
        made, key = tenants.create(platform, tenant, tier=tier, owner_email=owner)
    if as_json:
        print_json({"id": made.id, "name": made.name, "tier": made.tier, "key_id": key.id, "api_key": key.secret})
        return
    print(key.secret)
    say(f"tenant {made.id} ({made.tier}); its key is shown only now: `ft --api-key KEY login` stores it")


def list_tenants(as_json: Json = False) -> None:
    """List tenants with their effective limits."""
    from control_plane.cli.admin.local_platform import open_local
    from control_plane.tenants import service as tenants

    with open_local() as platform:
        found = tenants.list_all(platform)
    if as_json:
        print_json([_document(t) for t in found])
        return
    rows = [
        (t.id, t.name, t.tier, str(t.max_jobs_in_flight), _hours(t.hard_gpu_hours), str(t.requests_per_minute), t.suspended_reason or "")
        for t in found
    ]
    table(("ID", "NAME", "TIER", "JOBS IN FLIGHT, AT MOST", "GPU-HOURS, AT MOST", "REQUESTS/MIN", "SUSPENDED"), rows)


def update(
    tenant: Id,
    tier: Annotated[str | None, typer.Option("--tier", help="free, standard or premium.")] = None,
    name: Annotated[str | None, typer.Option("--name")] = None,
    max_jobs: Annotated[str | None, typer.Option("--max-jobs", metavar="N", help="Jobs in flight; `tier`: the tier's limit.")] = None,
    soft_gpu_hours: Annotated[
        str | None, typer.Option("--soft-gpu-hours", metavar="H", help="GPU-hours per month, then overage; or `tier`.")
    ] = None,
    hard_gpu_hours: Annotated[
        str | None, typer.Option("--hard-gpu-hours", metavar="H", help="GPU-hours per month, then jobs are paused; or `tier`.")
    ] = None,
    requests_per_minute: Annotated[
        str | None, typer.Option("--requests-per-minute", metavar="N", help="Requests per minute of each key; or `tier`.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Change a tenant's name, tier or limits; options left out stay unchanged. Running jobs continue."""
    from control_plane.cli.admin.local_platform import open_local
    from control_plane.tenants import suspension as tenant_changes

    given = {
        "max_jobs_in_flight": max_jobs, "soft_gpu_hours": soft_gpu_hours, "hard_gpu_hours": hard_gpu_hours,
        "requests_per_minute": requests_per_minute,
    }  # fmt: skip
    limits = {k: _number(k, v) for k, v in given.items() if v is not None}
    with open_local() as platform:
        _show(tenant_changes.update(platform, tenant, {"tier": tier, "name": name, **limits}), as_json=as_json)


def suspend(
    tenant: Id,
    reason: Annotated[str, typer.Option("--reason", help="Reason, shown to the tenant with every refusal.")],
    as_json: Json = False,
) -> None:
    """Refuse every call of a tenant's keys from now on; running jobs continue."""
    from control_plane.cli.admin.local_platform import open_local
    from control_plane.tenants import suspension as tenant_changes

    with open_local() as platform:
        _show(tenant_changes.suspend(platform, tenant, reason=reason), as_json=as_json)


def resume(tenant: Id, as_json: Json = False) -> None:
    """Accept calls of a suspended tenant's keys again."""
    from control_plane.cli.admin.local_platform import open_local
    from control_plane.tenants import suspension as tenant_changes

    with open_local() as platform:
        _show(tenant_changes.resume(platform, tenant), as_json=as_json)


def _show(tenant: Tenant, *, as_json: bool) -> None:
    if as_json:
        print_json(_document(tenant))
        return
    suspended = f"; suspended: {tenant.suspended_reason}" if tenant.suspended_at else ""
    say(
        f"{tenant.id} is {tenant.tier}: {tenant.max_jobs_in_flight} jobs in flight, GPU-hours a month {_hours(tenant.soft_gpu_hours)} "
        f"then overage, {_hours(tenant.hard_gpu_hours)} at most, {tenant.requests_per_minute} requests a minute{suspended}"
    )


def _document(t: Tenant) -> dict[str, Any]:
    names = ("id", "name", "tier", "max_jobs_in_flight", "soft_gpu_hours", "hard_gpu_hours", "requests_per_minute", "suspended_reason")
    since = None if t.suspended_at is None else t.suspended_at.timestamp()
    return {**{name: getattr(t, name) for name in names}, "suspended_at": since}


def _hours(hours: float | None) -> str:
    return "no limit" if hours is None else f"{hours:g}"


def _number(name: str, text: str) -> float | int | None:
    if text == OF_TIER:
        return None
    try:
        number = float(text)
    except ValueError:
        raise InvalidRequest(f"{name} {text!r} is neither a number nor `{OF_TIER}`", param=name) from None
    return int(number) if number.is_integer() else number
