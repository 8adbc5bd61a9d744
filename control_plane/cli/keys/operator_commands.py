"""``ft admin operators`` and ``ft admin audit``: operator keys, and the audit log of all tenants."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane.cli.local_platform import local, open_local
from control_plane.cli.protection import audit_chain_commands
from ft_client.cli import account_commands as key_commands
from ft_client.cli.account import audit_commands
from ft_client.cli.account_commands import Lifetime, span_s
from ft_client.cli.dates import unix_seconds
from ft_client.cli.output import Json
from ft_client.cli.record_views import add_group, document, listing, since

if TYPE_CHECKING:
    from control_plane.platform.context import Platform

KEYS = listing({"ID": "id", "NAME": "name", "KEY": "hint", "STATE": key_commands.state, "LAST USED": since("last_used_at")})


def register(admin: typer.Typer) -> None:
    commands = {"create": create, "list": list_keys, "revoke": revoke}
    add_group(admin, "operators", commands, help="Operator keys for /v1/admin, which tenants' keys cannot access.")
    audit: dict[str, Callable[..., Any]] = {
        "list": audit_of_all,
        "export": audit_chain_commands.export,
        "verify": audit_chain_commands.verify,
    }
    add_group(admin, "audit", audit, help="The audit log of all tenants: list, export and verify its chain.")


def _created(made: Mapping[str, Any]) -> str:
    until = time.strftime("%Y-%m-%d", time.gmtime(made["expires_at"]))
    return f"operator's key {made['id']} of {made['name']}, until {until}; its secret is shown only now"


@local(_created, prints="secret")
def create(
    platform: Platform,
    name: Annotated[str, typer.Argument(help="Name of the person or machine that holds it.")],
    expires_in: Lifetime = "90d",
) -> Any:
    """Create an operator's key (ft-op-...). Its secret is written to stdout, only now; it expires after 90 days, or at most a year."""
    from control_plane.tenants import operators

    made = operators.create(platform, name, expires_in_s=span_s(expires_in) or 0)
    return document(made, "id", "name", "secret", "expires_at")


@local(KEYS)
def list_keys(platform: Platform) -> Any:
    """List operators' keys, newest first, including revoked ones."""
    from control_plane.tenants import operators

    names = ("id", "name", "hint", "created_at", "expires_at", "revoked_at", "last_used_at")
    return [document(key, *names) for key in operators.list_all(platform)]


@local("operator's key {id} ({name}) is revoked")
def revoke(
    platform: Platform, key_id: Annotated[str, typer.Argument(metavar="KEY_ID", help="Key id (`ft admin operators list`): opk_...")]
) -> Any:
    """Revoke an operator's key immediately."""
    from control_plane.tenants import operators

    return document(operators.revoke(platform, key_id), "id", "name", "revoked_at")


def audit_of_all(
    tenant: Annotated[str | None, typer.Option("--tenant", help="Only this tenant.")] = None,
    of: audit_commands.Of = None,
    kind: audit_commands.Kind = None,
    action: audit_commands.Action = None,
    actor: audit_commands.ByWhom = None,
    since: audit_commands.Since = None,
    before: audit_commands.Before = None,
    limit: audit_commands.Limit = None,
    as_csv: audit_commands.AsCsv = False,
    as_jsonl: audit_commands.AsJsonl = False,
    as_json: Json = False,
) -> None:
    """List changes in all tenants and of the platform itself, newest first."""
    from control_plane.tenants.audit_log import Wanted, document, every

    wanted = Wanted(
        object_id=of, object_type=kind, action=action, actor=actor, since_s=unix_seconds(since, "since"),
        before_s=unix_seconds(before, "before"),
    )  # fmt: skip
    with open_local() as platform:
        lines = every(platform, tenant, wanted, at_most=audit_commands.at_most(limit, as_csv or as_jsonl))
        audit_commands.show((document(line) for line in lines), as_csv, as_jsonl, as_json)
