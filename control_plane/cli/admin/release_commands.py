"""``ft admin adapters release``: serve a tenant's model that did not pass its gate."""

from __future__ import annotations

import getpass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane.cli.admin.local_platform import local
from control_plane.cli.record_views import add_group, document

if TYPE_CHECKING:
    from control_plane.platform.context import Platform


def register(admin: typer.Typer) -> None:
    add_group(admin, "adapters", {"release": release}, help="Models of tenants.")


@local("{name} is released and in {stage}")
def release(
    platform: Platform,
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Id of the tenant.")],
    adapter: Annotated[str, typer.Argument(metavar="NAME", help="Adapter id or model name.")],
    reason: Annotated[str, typer.Option("--reason", help="Why it is good enough; shown to the tenant.")],
) -> Any:
    """Serve a tenant's model that did not pass its gate, also one that failed the safety rule."""
    from control_plane.evaluations import releases

    by = f"operator:cli:{getpass.getuser()}"
    released = releases.release(platform, tenant, adapter, by=by, reason=reason, by_operator=True)
    return document(released, "id", "tenant_id", "name", "stage", "job_id", "released_by", "released_at", "release_reason")
