"""``ft keys`` and ``ft whoami``: API keys of your tenant, and what yours may do."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from control_plane.cli.output import Json, ago, fields, print_json, say, table
from ft_assets.errors import InvalidRequest

KeyId = Annotated[str, typer.Argument(metavar="KEY_ID", help="Key id (`ft keys` lists them): key_...")]
Name = Annotated[str, typer.Argument(help="Name, shown in lists and in the audit log.")]
Scopes = Annotated[list[str] | None, typer.Option("--scope", help="read, write or admin; may be repeated. Default: read and write.")]
Lifetime = Annotated[str | None, typer.Option("--expires-in", metavar="SPAN", help="30d, 12h or seconds; never if left out.")]
UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def register(app: typer.Typer) -> None:
    keys = typer.Typer(help="List, create and revoke your tenant's API keys.", no_args_is_help=True)
    keys.command("list")(list_keys)
    for command in (create, show, rotate, revoke):
        keys.command()(command)
    app.add_typer(keys, name="keys", rich_help_panel="Account")
    app.command(rich_help_panel="Account")(whoami)


def list_keys(
    everything: Annotated[bool, typer.Option("--all", help="Include revoked and expired keys.")] = False,
    as_json: Json = False,
) -> None:
    """List your tenant's API keys, newest first; only active ones, unless you pass --all."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        found = [k for k in client.api_keys.list() if everything or state(k) == "active"]
    if as_json:
        print_json(found)
    else:
        table(COLUMNS, [row(k) for k in found])


def create(
    name: Name,
    scope: Scopes = None,
    expires_in: Lifetime = None,
    member: Annotated[
        str | None, typer.Option("--member", metavar="ID", help="Member who owns it; its scopes stay within their role.")
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option("--requests-per-minute", help="At most the tenant's limit.")] = None,
    as_json: Json = False,
) -> None:
    """Create a key. Its secret is written to stdout, only now."""
    from control_plane.cli.tenant.remote import connect

    options = {"scopes": scope, "expires_in": span_s(expires_in), "member_id": member, "requests_per_minute": requests_per_minute}
    with connect() as client:
        made = client.api_keys.create(name=name, **{k: v for k, v in options.items() if v is not None})
    show_new_key(made, f"key {made['id']} ({', '.join(made['scopes'])}); its secret is shown only now", as_json=as_json)


def show(key_id: KeyId, as_json: Json = False) -> None:
    """Show a key, without its secret."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        found = client.api_keys.retrieve(key_id)
    if as_json:
        print_json(found)
        return
    times = {name: ago(found[f"{name}_at"]) for name in ("created", "last_used", "revoked")}
    fields({**{k: found[k] for k in ("id", "name", "hint", "member_id", "requests_per_minute")}, "state": state(found), **times})


def rotate(
    key_id: KeyId,
    overlap: Annotated[
        str, typer.Option("--overlap", metavar="SPAN", help="How long the old secret stays valid; 0 ends it at once.")
    ] = "24h",
    expires_in: Lifetime = None,
    as_json: Json = False,
) -> None:
    """Replace a key; the new secret is written to stdout, and the old key expires after the overlap."""
    from control_plane.cli.tenant.remote import connect

    options = {"expires_in": span_s(expires_in)} if expires_in else {}
    with connect() as client:
        made = client.api_keys.rotate(key_id, overlap=span_s(overlap), **options)
    show_new_key(made, f"key {made['id']} replaces {key_id}, which expires in {overlap}; the secret is shown only now", as_json=as_json)


def revoke(key_id: KeyId, as_json: Json = False) -> None:
    """Revoke a key at once."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        done = client.api_keys.revoke(key_id)
    if as_json:
        print_json(done)
    else:
        say(f"key {done['id']} ({done['name']}) is revoked")


def whoami(as_json: Json = False) -> None:
    """Show who you are to the API: tenant, tier and limits, key and scopes."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        me = client.me.retrieve()
    if as_json:
        print_json(me)
        return
    limits, member = me["limits"], me["member"]
    fields(
        {
            "tenant": f"{me['tenant_id']} ({me['tenant_name']})",
            "tier": me["tier"],
            "jobs in flight": f"at most {limits['max_jobs_in_flight']}",
            "GPU-hours a month": f"overage from {_hours(limits['soft_gpu_hours'])}, cap {_hours(limits['hard_gpu_hours'])}",
            "requests a minute": me["requests_per_minute"],
            "key": f"{me['key']['id']} ({me['key']['name']}), {me['key']['hint']}",
            "scopes": ", ".join(me["scopes"]),
            "member": f"{member['email']} ({member['role']})" if member else None,
            "expires": _moment(me["key"]["expires_at"]),
        }
    )


COLUMNS = ("ID", "NAME", "KEY", "SCOPES", "MEMBER", "STATE", "LAST USED")


def row(key: dict[str, Any]) -> tuple[str, ...]:
    """Format a key as a line of a list."""
    return key["id"], key["name"], key["hint"], ",".join(key["scopes"]), key["member_id"] or "-", state(key), ago(key["last_used_at"])


def state(key: dict[str, Any]) -> str:
    import time

    if key["revoked_at"]:
        return "revoked"
    return "expired" if key["expires_at"] and key["expires_at"] <= time.time() else "active"


def show_new_key(made: dict[str, Any], sentence: str, *, as_json: bool) -> None:
    """Write the secret to stdout and its description to stderr."""
    if as_json:
        print_json(made)
        return
    print(made["secret"])
    say(sentence)


def span_s(text: str | None) -> int | None:
    """Parse ``30d``, ``12h``, ``90min``, ``45s`` or ``45`` into seconds; None for None."""
    if text is None:
        return None
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    unit = text[len(number) :] or "s"
    if not number.isdecimal() or unit not in UNITS:
        raise InvalidRequest(f"{text!r} is not a duration; write 30d, 12h, 90min or seconds", param="expires_in")
    return int(number) * UNITS[unit]


def _hours(hours: float | None) -> str:
    return "none" if hours is None else f"{hours:g}"


def _moment(unix_s: int | None) -> str | None:
    from datetime import UTC, datetime

    return None if unix_s is None else f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M} UTC"
