"""``ft keys`` and ``ft whoami``: API keys of your tenant, and what yours may do."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from core.errors import InvalidRequest
from ft_client.cli.output import ago, fields
from ft_client.cli.record_views import add_commands, add_group, given, listing, since
from ft_client.cli.remote import remote

if TYPE_CHECKING:
    from ft_client import FtClient, Record

KeyId = Annotated[str, typer.Argument(metavar="KEY_ID", help="Key id (`ft keys` lists them): key_...")]
Name = Annotated[str, typer.Argument(help="Name, shown in lists and in the audit log.")]
Scopes = Annotated[list[str] | None, typer.Option("--scope", help="read, write or admin; may be repeated. Default: read and write.")]
Lifetime = Annotated[str | None, typer.Option("--expires-in", metavar="SPAN", help="30d, 12h or seconds; never if left out.")]
UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def state(key: Mapping[str, Any]) -> str:
    if key["revoked_at"]:
        return "revoked"
    return "expired" if key["expires_at"] and key["expires_at"] <= time.time() else "active"


KEYS = listing({
    "ID": "id", "NAME": "name", "KEY": "hint", "SCOPES": lambda k: ",".join(k["scopes"]), "MEMBER": lambda k: k["member_id"] or "-",
    "STATE": state, "LAST USED": since("last_used_at"),
})  # fmt: skip


def register(app: typer.Typer) -> None:
    commands = {"list": list_keys, "create": create, "show": show, "rotate": rotate, "revoke": revoke}
    add_group(app, "keys", commands, help="List, create and revoke your tenant's API keys.", panel="Account")
    add_commands(app, "Account", whoami)


@remote(KEYS)
def list_keys(
    client: FtClient, everything: Annotated[bool, typer.Option("--all", help="Include revoked and expired keys.")] = False
) -> Any:
    """List your tenant's API keys, newest first; only active ones, unless you pass --all."""
    return [k for k in client.api_keys.list() if everything or state(k) == "active"]


@remote(lambda made: f"key {made['id']} ({', '.join(made['scopes'])}); its secret is shown only now", prints="secret")
def create(
    client: FtClient,
    name: Name,
    scope: Scopes = None,
    expires_in: Lifetime = None,
    member: Annotated[
        str | None, typer.Option("--member", metavar="ID", help="Member who owns it; its scopes stay within their role.")
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option("--requests-per-minute", help="At most the tenant's limit.")] = None,
) -> Any:
    """Create a key. Its secret is written to stdout, only now."""
    options = given(scopes=scope, expires_in=span_s(expires_in), member_id=member, requests_per_minute=requests_per_minute)
    return client.api_keys.create(name=name, **options)


def _show(found: Record) -> None:
    times = {name: ago(found[f"{name}_at"]) for name in ("created", "last_used", "revoked")}
    fields({**{k: found[k] for k in ("id", "name", "hint", "member_id", "requests_per_minute")}, "state": state(found), **times})


@remote(_show)
def show(client: FtClient, key_id: KeyId) -> Any:
    """Show a key, without its secret."""
    return client.api_keys.retrieve(key_id)


@remote("key {id} replaces {key_id}, which expires in {overlap}; the secret is shown only now", prints="secret")
def rotate(
    client: FtClient,
    key_id: KeyId,
    overlap: Annotated[
        str, typer.Option("--overlap", metavar="SPAN", help="How long the old secret stays valid; 0 ends it immediately.")
    ] = "24h",
    expires_in: Lifetime = None,
) -> Any:
    """Replace a key; the new secret is written to stdout, and the old key expires after the overlap."""
    return client.api_keys.rotate(key_id, overlap=span_s(overlap), **given(expires_in=span_s(expires_in)))


@remote("key {id} ({name}) is revoked")
def revoke(client: FtClient, key_id: KeyId) -> Any:
    """Revoke a key immediately."""
    return client.api_keys.revoke(key_id)


def _show_me(me: Record) -> None:
    limits, member = me["limits"], me["member"]
    fields({
        "tenant": f"{me['tenant_id']} ({me['tenant_name']})",
        "tier": me["tier"],
        "jobs in flight": f"at most {limits['max_jobs_in_flight']}",
        "GPU-hours a month": f"overage from {_hours(limits['soft_gpu_hours'])}, cap {_hours(limits['hard_gpu_hours'])}",
        "requests a minute": me["requests_per_minute"],
        "key": f"{me['key']['id']} ({me['key']['name']}), {me['key']['hint']}",
        "scopes": ", ".join(me["scopes"]),
        "member": f"{member['email']} ({member['role']})" if member else None,
        "expires": _moment(me["key"]["expires_at"]),
    })  # fmt: skip


@remote(_show_me)
def whoami(client: FtClient) -> Any:
    """Show who you are to the API: tenant, tier and limits, key and scopes."""
    return client.me.retrieve()


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
