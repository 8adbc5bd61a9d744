"""``ft admin operators`` and ``ft admin audit``: operator keys, and the audit log of all tenants."""

from __future__ import annotations

from typing import Annotated

import typer

from control_plane.cli.output import Json, ago, print_json, say, table
from control_plane.cli.tenant.account import audit_commands
from control_plane.cli.tenant.account.key_commands import Lifetime, span_s


def register(admin: typer.Typer) -> None:
    operators = typer.Typer(help="Operator keys for /v1/admin, which tenants' keys cannot access.", no_args_is_help=True)
    for name, command in (("create", create), ("list", list_keys), ("revoke", revoke)):
        operators.command(name)(command)
    admin.add_typer(operators, name="operators")
    admin.command("audit")(audit_of_all)


def create(
    name: Annotated[str, typer.Argument(help="Name of the person or machine that holds it.")],
    expires_in: Lifetime = "90d",
    as_json: Json = False,
) -> None:
    """Create an operator's key (ft-op-...). Its secret is written to stdout, only now; it expires after 90 days, or at most a year."""
    from control_plane.cli.admin.local_platform import open_local
    from control_plane.tenants import operators

    with open_local() as platform:
        made = operators.create(platform, name, expires_in_s=span_s(expires_in) or 0)
    if as_json:
        print_json({"id": made.id, "name": made.name, "secret": made.secret, "expires_at": made.expires_at.timestamp()})
        return
    print(made.secret)
    say(f"operator's key {made.id} of {made.name}, until {made.expires_at:%Y-%m-%d}; its secret is shown only now")


def list_keys(as_json: Json = False) -> None:
    """List operators' keys, newest first, including revoked ones."""
    from control_plane.cli.admin.local_platform import open_local
    from control_plane.tenants import operators

    with open_local() as platform:
        found, now = operators.list_all(platform), platform.clock()
    times = ("created_at", "expires_at", "revoked_at", "last_used_at")
    if as_json:
        print_json([
            {n: getattr(k, n) for n in ("id", "name", "hint")} | {n: at.timestamp() if (at := getattr(k, n)) else None for n in times}
            for k in found
        ])  # fmt: skip
        return
    state = ["revoked" if k.revoked_at else "expired" if k.expires_at and k.expires_at <= now else "active" for k in found]
    used = [ago(k.last_used_at.timestamp()) if k.last_used_at else "" for k in found]
    table(
        ("ID", "NAME", "KEY", "STATE", "LAST USED"),
        [(k.id, k.name, k.hint, s, u) for k, s, u in zip(found, state, used, strict=True)],
    )


def revoke(
    key_id: Annotated[str, typer.Argument(metavar="KEY_ID", help="Key id (`ft admin operators list`): opk_...")], as_json: Json = False
) -> None:
    """Revoke an operator's key at once."""
    from control_plane.cli.admin.local_platform import open_local
    from control_plane.tenants import operators

    with open_local() as platform:
        done = operators.revoke(platform, key_id)
    if as_json:
        print_json({"id": done.id, "name": done.name, "revoked_at": done.revoked_at and done.revoked_at.timestamp()})
        return
    say(f"operator's key {done.id} ({done.name}) is revoked")


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
    from control_plane.cli.admin.local_platform import open_local
    from control_plane.cli.dates import unix_seconds
    from control_plane.tenants.audit_log import Wanted, document, every

    wanted = Wanted(
        object_id=of, object_type=kind, action=action, actor=actor, since_s=unix_seconds(since, "since"),
        before_s=unix_seconds(before, "before"),
    )  # fmt: skip
    with open_local() as platform:
        lines = every(platform, tenant, wanted, at_most=audit_commands.at_most(limit, as_csv or as_jsonl))
        audit_commands.show((document(line) for line in lines), as_csv, as_jsonl, as_json)
