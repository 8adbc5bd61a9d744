"""``ft admin tenants delete-data``, ``ft admin tenants deletions`` and ``ft admin verify-deletions``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane.cli.local_platform import local, open_local
from ft_client.cli.output import Json, print_json, say
from ft_client.cli.record_views import listing

if TYPE_CHECKING:
    from control_plane.platform.context import Platform


def register(admin: typer.Typer, tenants: typer.Typer) -> None:
    tenants.command("delete-data")(delete_data)
    tenants.command("deletions")(list_deletions)
    admin.command("verify-deletions")(verify_deletions)


def delete_data(
    tenant: Annotated[str, typer.Argument(help="Id of the tenant.")],
    reason: Annotated[str, typer.Option("--reason", help="Reason, kept in the proof.")],
    confirm: Annotated[str | None, typer.Option("--confirm", help="The tenant's id again, instead of the prompt.")] = None,
    close_account: Annotated[
        bool, typer.Option("--close-account", help="End the account too: members with names and addresses, keys, webhooks, budgets.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Permanently delete all data of a tenant: objects, texts, adapters. Ids, digests and invoices stay; a proof is kept."""
    from control_plane.tenant_data import deletion, deletion_requests

    typed = (
        confirm
        if confirm is not None
        else typer.prompt(
            f"This permanently deletes everything that {tenant} stored{', and ends its account' if close_account else ''}. "
            "Type the tenant's id to continue",
            err=True,
        )
    )
    with open_local() as platform:
        requested = deletion_requests.request_tenant(
            platform, tenant, confirm=typed, reason=reason, requested_by="operator", close_account=close_account
        )
        deletion.carry_out(platform, requested.id)
        found = deletion.get(platform, tenant, requested.id)
    if as_json:
        print_json(json.loads(deletion.json_of(found)))
    elif found.proof is None:
        say(f"{found.id}: {found.waiting_for}; the platform retries every ten minutes")
    else:
        say(f"{found.id} is done: {found.proof['num_objects']} objects; its proof has sha256 {found.sha256}")


@local(
    listing(
        {"ID": "id", "OF": "subject_id", "REQUESTED": "requested_at", "DONE": "done_at", "WAITS FOR": "waiting_for", "REASON": "reason"}
    )
)
def list_deletions(platform: Platform, tenant: Annotated[str, typer.Argument(help="Id of the tenant, also of a closed account.")]) -> Any:
    """List the deletions of a tenant, newest first. With --json, each includes its proof, which you can send to a former tenant."""
    from control_plane.tenant_data import deletion
    from control_plane.tenants import service as tenants

    tenants.get(platform, tenant)
    return [json.loads(deletion.json_of(deletion.get(platform, tenant, one.id))) for one in deletion.list_all(platform, tenant)]


@local(
    lambda c: f"{c['num_deletions']} deletions, the last one {c['head'] or 'none'}; broken: {', '.join(c['broken']) or 'none'}",
    fails=lambda chain: bool(chain["broken"]),
)
def verify_deletions(platform: Platform) -> Any:
    """Recompute the proofs of all deletions; exits with 1 if one was changed or is missing."""
    from control_plane.tenant_data import deletion

    chain = deletion.verify_chain(platform)
    return {"num_deletions": chain.num_deletions, "head": chain.head, "broken": list(chain.broken)}
