"""``ft admin tenants``: create, list, change, suspend and resume tenants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane.cli.local_platform import local
from core.errors import InvalidRequest
from ft_client.cli.record_views import NewName, add_group, document, given, listing

if TYPE_CHECKING:
    from control_plane.platform.context import Platform
    from control_plane.tenants.rules import Tenant

Id = Annotated[str, typer.Argument(metavar="TENANT", help="Id of the tenant.")]
OF_TIER = "tier"
"""Placeholder for the tier's limit where an option takes a number."""


def _hours(hours: float | None) -> str:
    return "no limit" if hours is None else f"{hours:g}"


TENANTS = listing({
    "ID": "id", "NAME": "name", "TIER": "tier", "JOBS IN FLIGHT, AT MOST": "max_jobs_in_flight",
    "GPU-HOURS, AT MOST": lambda t: _hours(t["hard_gpu_hours"]), "REQUESTS/MIN": "requests_per_minute", "SUSPENDED": "suspended_reason",
})  # fmt: skip


def register(admin: typer.Typer) -> typer.Typer:
    commands = {"create": create, "list": list_tenants, "update": update, "suspend": suspend, "resume": resume}
    return add_group(admin, "tenants", commands, help="Create, list, change and suspend tenants.")


def _shown(tenant: Mapping[str, Any]) -> str:
    suspended = f"; suspended: {tenant['suspended_reason']}" if tenant["suspended_at"] else ""
    return (
        f"{tenant['id']} is {tenant['tier']}: {tenant['max_jobs_in_flight']} jobs in flight, GPU-hours a month "
        f"{_hours(tenant['soft_gpu_hours'])} then overage, {_hours(tenant['hard_gpu_hours'])} at most, "
        f"{tenant['requests_per_minute']} requests a minute{suspended}"
    )


@local("tenant {id} ({tier}); its key is shown only now: `ft login` asks for it and stores it", prints="api_key")
def create(
    platform: Platform,
    tenant: Annotated[str, typer.Argument(help="Id of the tenant: lower-case letters, digits and '-'.")],
    tier: Annotated[str, typer.Option("--tier", help="free, standard or premium.")] = "standard",
    owner: Annotated[str | None, typer.Option("--owner", metavar="E-MAIL", help="E-mail address of a person to add as owner.")] = None,
) -> Any:
    """Create a tenant and its first API key. The key is shown once: only its hash is stored."""
    from control_plane.tenants import service as tenants

    made, key = tenants.create(platform, tenant, tier=tier, owner_email=owner)
    return {"id": made.id, "name": made.name, "tier": made.tier, "key_id": key.id, "api_key": key.secret}


@local(TENANTS)
def list_tenants(platform: Platform) -> Any:
    """List tenants with their effective limits."""
    from control_plane.tenants import service as tenants

    return [_document(t) for t in tenants.list_all(platform)]


@local(_shown)
def update(
    platform: Platform,
    tenant: Id,
    tier: Annotated[str | None, typer.Option("--tier", help="free, standard or premium.")] = None,
    name: NewName = None,
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
) -> Any:
    """Change a tenant's name, tier or limits; options left out stay unchanged. Running jobs continue."""
    from control_plane.tenants import suspension as tenant_changes

    limits = given(
        max_jobs_in_flight=max_jobs, soft_gpu_hours=soft_gpu_hours, hard_gpu_hours=hard_gpu_hours, requests_per_minute=requests_per_minute
    )
    changes = {"tier": tier, "name": name, **{k: _number(k, v) for k, v in limits.items()}}
    return _document(tenant_changes.update(platform, tenant, changes))


@local(_shown)
def suspend(
    platform: Platform,
    tenant: Id,
    reason: Annotated[str, typer.Option("--reason", help="Reason, shown to the tenant with every refusal.")],
) -> Any:
    """Refuse every call of a tenant's keys from now on; running jobs continue."""
    from control_plane.tenants import suspension as tenant_changes

    return _document(tenant_changes.suspend(platform, tenant, reason=reason))


@local(_shown)
def resume(platform: Platform, tenant: Id) -> Any:
    """Accept calls of a suspended tenant's keys again."""
    from control_plane.tenants import suspension as tenant_changes

    return _document(tenant_changes.resume(platform, tenant))


def _document(tenant: Tenant) -> Mapping[str, Any]:
    limits = ("max_jobs_in_flight", "soft_gpu_hours", "hard_gpu_hours", "requests_per_minute")
    return document(tenant, "id", "name", "tier", *limits, "suspended_reason", "suspended_at")


def _number(name: str, text: str) -> float | int | None:
    if text == OF_TIER:
        return None
    try:
        number = float(text)
    except ValueError:
        raise InvalidRequest(f"{name} {text!r} is neither a number nor `{OF_TIER}`", param=name) from None
    return int(number) if number.is_integer() else number
