"""Commands of the account: ``ft login``, ``whoami``, ``keys``, ``members``, ``quota``, ``webhooks``, ``wandb``, ``audit``."""

from __future__ import annotations

import csv
import json
import os
import sys
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from core.errors import InvalidRequest
from core.event_types import EVENT_TYPES
from ft_client.cli import session
from ft_client.cli.command_options import Lifetime, span_s, unix_seconds
from ft_client.cli.commands import NewName, add_commands, add_group, argument, listing, option, show, since
from ft_client.cli.output import Json, ago, fields, number, print_json, say, table
from ft_client.cli.session import connect, remote

if TYPE_CHECKING:
    from ft_client import FtClient, Record

KeyId = argument("Key id (`ft keys` lists them): key_...", metavar="KEY_ID")
EndpointId = Annotated[str, typer.Argument(metavar="ENDPOINT", help="Endpoint id (`ft webhooks` lists them): we_...")]
MemberId = argument("Member id (`ft members` lists them): mem_...", metavar="MEMBER_ID")
Events = option(
    "--event", "Event type (`ft webhooks types`); may be repeated. Default: every type.", "-e", metavar="TYPE", type=list[str] | None
)
Role = option("--role", "owner, admin, member or viewer.")
Of = Annotated[str | None, typer.Option("--object", metavar="ID", help="Id of one object.")]
Kind = Annotated[str | None, typer.Option("--type", help="Kind of object: job, file, api_key, ...")]
Action = Annotated[str | None, typer.Option("--action", help="Action, such as `api_key.created`.")]
ByWhom = Annotated[str | None, typer.Option("--actor", metavar="ID", help="Id of a key, of a member (all their keys), or of an operator.")]
Since = Annotated[str | None, typer.Option("--since", metavar="TIME", help="2026-11-21, 2026-11-21T15:04 (UTC) or unix seconds.")]
Before = Annotated[str | None, typer.Option("--before", metavar="TIME")]
Lines = Annotated[int | None, typer.Option("-n", "--limit", help="Lines; default 20 in a table, all in an export.")]
AsCsv = Annotated[bool, typer.Option("--csv", help="Write all lines as CSV, for a spreadsheet.")]
AsJsonl = Annotated[bool, typer.Option("--jsonl", help="Write all lines as JSON objects.")]
REPLAYED_S = 7 * 86400
"""Age of the oldest events that ``ft webhooks replay`` sends again without ``--since``."""
IN_A_TABLE, MAX_CELL = 20, 60
FIELDS = ("id", "time", "tenant_id", "actor_type", "actor_id", "actor_name", "actor_email", "action", "object_type", "object_id",
    "changes", "ip", "user_agent", "request_id", "redacted_at")  # fmt: skip


def key_state(key: Mapping[str, Any]) -> str:
    if key["revoked_at"]:
        return "revoked"
    return "expired" if key["expires_at"] and key["expires_at"] <= time.time() else "active"


def _types(endpoint: Record) -> str:
    return "all" if endpoint["event_types"] == ["*"] else " ".join(endpoint["event_types"])


KEYS = listing({
    "ID": "id", "NAME": "name", "KEY": "hint", "SCOPES": lambda k: ",".join(k["scopes"]), "MEMBER": lambda k: k["member_id"] or "-",
    "STATE": key_state, "LAST USED": since("last_used_at"),
})  # fmt: skip
MEMBERS = listing({
    "ID": "id", "E-MAIL": "email", "NAME": "name", "ROLE": lambda m: "removed" if m["removed_at"] else m["role"],
    "SINCE": since("created_at"),
})  # fmt: skip
ENDPOINTS = listing({"ID": "id", "NAME": "name", "URL": "url", "STATE": "state", "FAILING SINCE": since("failing_since"), "EVENTS": _types})
DELIVERIES = listing({
    "ID": "id", "EVENT": "event_type", "ABOUT": "subject", "STATE": "state", "ATTEMPTS": "attempts",
    "LAST ANSWER": lambda d: d["last_error"] or d["last_status_code"], "SINCE": since("created_at"),
})  # fmt: skip


def register(app: typer.Typer) -> None:
    add_commands(app, "Account", {
        "login": login,
        "whoami": remote.call("me.retrieve", "Show who you are to the API: tenant, tier and limits, key and scopes.", _show_me),
        "quota": remote.call("quota.retrieve", "Show your limits, and the used, held and remaining GPU-hours of this month.", _show_quota),
        "audit": audit,
    })  # fmt: skip
    add_group(app, "keys", "List, create and revoke your tenant's API keys.", {
        "list": remote.call(_keys, "List your tenant's API keys, newest first; only active ones, unless you pass --all.", KEYS,
            everything=option("--all", "Include revoked and expired keys.", type=bool)),
        "create": remote.call("api_keys.create", "Create a key. Its secret is written to stdout, only now.",
            lambda made: f"key {made['id']} ({', '.join(made['scopes'])}); its secret is shown only now", prints="secret",
            name=argument("Name, shown in lists and in the audit log."),
            scopes=option("--scope", "read, write or admin; may be repeated. Default: read and write.", type=list[str] | None),
            expires_in=Lifetime, member_id=option("--member", "Member who owns it; its scopes stay within their role.", metavar="ID"),
            requests_per_minute=option("--requests-per-minute", "At most the tenant's limit.", type=int | None)),
        "show": remote.call("api_keys.retrieve", "Show a key, without its secret.", _show_key, key_id=KeyId),
        "rotate": remote.call(_rotate_key,
            "Replace a key; the new secret is written to stdout, and the old key expires after the overlap.",
            "key {id} replaces {key_id}, which expires in {overlap}; the secret is shown only now", prints="secret", key_id=KeyId,
            overlap=(option("--overlap", "How long the old secret stays valid; 0 ends it immediately.", metavar="SPAN", type=str), "24h"),
            expires_in=Lifetime),
        "revoke": remote.call("api_keys.revoke", "Revoke a key immediately.", "key {id} ({name}) is revoked", key_id=KeyId),
    }, panel="Account")  # fmt: skip
    add_group(app, "members", "List the people of your tenant, add and remove them.", {
        "list": remote.call("members.list", "List the people of your tenant, newest first.", MEMBERS,
            removed=option("--all", "Include removed members.", type=bool)),
        "add": remote.call("members.create", "Add a person; `ft keys create NAME --member ID` creates a key for them.", _show_member,
            email=argument(metavar="E-MAIL"), role=(Role, "member"), name=NewName),
        "update": remote.call("members.update", "Change a person's role, name, or e-mail notifications.", _show_member, member_id=MemberId,
            role=Role, name=NewName, notify=option("--notify/--no-notify", "Send e-mail to this person.", type=bool | None)),
        "remove": remote.call("members.remove", "Remove a person and revoke their keys.",
            "{member_id} is removed; keys revoked with it: {revoked_keys}", member_id=MemberId),
    }, panel="Account")  # fmt: skip
    add_group(app, "wandb", "Your key for Weights & Biases.", {
        "set": set_wandb_key,
        "show": remote.call("wandb.retrieve", "Show when a key was stored, and its last characters.", _show_wandb),
        "remove": remote.call("wandb.remove", "Delete your key; jobs that are running stop sending.", "the key is deleted"),
    }, panel="Account")  # fmt: skip
    add_group(app, "webhooks", "List, create and change your webhook endpoints.", {
        "list": remote.call("webhook_endpoints.list", "List your webhook endpoints, newest first.", ENDPOINTS),
        "create": remote.call(_create_endpoint,
            "Create an endpoint that receives events. The signing secret is written to stdout, only now.",
            "endpoint {id}; its signing secret is shown only now. Try it with `ft webhooks test`", prints="signing_secret",
            name=argument("Purpose of the key."), url=argument("https://..., at a public address."), event_types=Events),
        "show": remote.call("webhook_endpoints.retrieve", "Show an endpoint, without its secret.", _show_endpoint,
            webhook_endpoint_id=EndpointId),
        "update": remote.call(_update_endpoint, "Change an endpoint's name, URL or event types.", _show_endpoint, endpoint=EndpointId,
            name=NewName, url=option("--url", "New URL for events."), event_types=Events),
        "enable": remote.call("webhook_endpoints.update",
            "Resume sending events to an endpoint; `ft webhooks replay` sends what it missed.", _show_endpoint, fixed={"state": "enabled"},
            webhook_endpoint_id=EndpointId),
        "disable": remote.call("webhook_endpoints.update", "Stop sending events to an endpoint; missed events are kept for 30 days.",
            _show_endpoint, fixed={"state": "disabled"}, webhook_endpoint_id=EndpointId),
        "delete": remote.call("webhook_endpoints.delete", "Delete an endpoint.", "endpoint {webhook_endpoint_id} is deleted",
            webhook_endpoint_id=EndpointId),
        "deliveries": remote.call(_deliveries, "List what was sent to an endpoint in the last 30 days, or is to be, newest first.",
            DELIVERIES, endpoint=EndpointId,
            state=option("--state", "pending, delivered or dead."), limit=(option("--limit", "", "-n", min=1, type=int), 20)),
        "replay": remote.call(_replay, "Resend missed events to an endpoint, with their original ids.",
            lambda done: f"{done['replayed']} deliveries are sent again" if "replayed" in done else f"{done['id']} is sent again",
            endpoint=EndpointId,
            delivery=argument("One delivery; without it, all dead ones.", metavar="DELIVERY", type=str | None),
            since=option("--since", "2026-11-21, 2026-11-21T15:04 or seconds. Default: a week ago.")),
        "types": types,
        "test": remote.call("webhook_endpoints.test",
            "Send a signed test event now and show the receiver's answer; exit code 1 unless that is 2xx.",
            lambda tried: f"{tried['event_type']}: the receiver answered {tried['status_code']} {tried['response']}".rstrip(),
            fails=lambda tried: not 200 <= tried["status_code"] < 300, webhook_endpoint_id=EndpointId,
            event_type=option("--event", "Event type; the endpoint's first if absent.", "-e", metavar="TYPE")),
        "rotate-secret": rotate_secret,
    }, panel="Account")  # fmt: skip


def login(as_json: Json = False) -> None:
    """Check and store the API's address and a key; both as options before the command, or the key at a prompt."""
    url = session.api_url()
    key = session.chosen.api_key or os.environ.get("FT_API_KEY")
    if not key:
        session.require_answer(url)
        key = _ask_for_key(url)
    found = session.Credentials(url=url, api_key=key)
    with connect(found) as client:
        models = client.models.list().all()
    path = session.store(found)
    if as_json:
        print_json({"url": url, "credentials_file": str(path), "models": len(models)})
    else:
        say(f"logged in to {url}; the key is in {path}")


def _ask_for_key(url: str) -> str:
    if not sys.stdin.isatty():
        key = sys.stdin.readline().strip()
    else:
        key = str(typer.prompt(f"API key for {url}", hide_input=True)).strip()
    if not key:
        raise InvalidRequest(
            "no API key was given; type or paste it, send it on standard input (`ft login < key.txt`), or set FT_API_KEY", code="no_api_key"
        )
    return key


def _show_me(me: Record) -> None:
    limits, member = me["limits"], me["member"]
    soft, hard = ("none" if hours is None else f"{hours:g}" for hours in (limits["soft_gpu_hours"], limits["hard_gpu_hours"]))
    expires_at = me["key"]["expires_at"]
    fields({
        "tenant": f"{me['tenant_id']} ({me['tenant_name']})", "tier": me["tier"],
        "jobs in flight": f"at most {limits['max_jobs_in_flight']}", "GPU-hours a month": f"overage from {soft}, cap {hard}",
        "requests a minute": me["requests_per_minute"], "key": f"{me['key']['id']} ({me['key']['name']}), {me['key']['hint']}",
        "scopes": ", ".join(me["scopes"]), "member": f"{member['email']} ({member['role']})" if member else None,
        "expires": None if expires_at is None else _minute(expires_at),
    })  # fmt: skip


def _minute(unix_s: float) -> str:
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M} UTC"


def _show_quota(found: Mapping[str, Any]) -> None:
    soft, hard, left = (found[name] for name in ("soft_gpu_hours", "hard_gpu_hours", "left_gpu_hours"))
    starts = found["starts_within_s"]
    fields({
        "tenant": f"{found['tenant']} ({found['tier']})", "month": f"{found['month']}, until {_minute(found['month_ends_at'])}",
        "used": f"{number(found['used_gpu_hours'])} GPU-hours, of them {number(found['running_gpu_hours'])} running",
        "held": f"{number(found['held_gpu_hours'])} GPU-hours for admitted jobs",
        "left": "no hard cap" if left is None else f"{number(left)} GPU-hours",
        "soft limit": "none" if soft is None else f"{number(soft)} GPU-hours, {number(found['overage_gpu_hours'])} beyond it",
        "hard cap": "none" if hard is None else f"{number(hard)} GPU-hours",
        "jobs in flight": f"{found['jobs_in_flight']} of {found['max_jobs_in_flight']}, {found['jobs_paused_for_cap']} paused for the cap",
        "jobs start": "best effort: a wait has no bound" if starts is None else f"within {starts / 60:g} minutes",
    })  # fmt: skip
    if found["at_hard_cap"]:
        say(found["on_hard_cap"])


def quota_line(quota: Mapping[str, Any]) -> str:
    """Describe in one line what a job takes of the month."""
    left, over = quota["left_gpu_hours"], quota["overage_gpu_hours"]
    space = "no hard cap" if left is None else f"{number(left)} GPU-hours are left up to the hard cap"
    excess = f"; {number(over)} of the job's exceed the soft limit and are billed as overage" if quota["goes_into_overage"] else ""
    return space + ("" if quota["fits"] else "; the job does not fit") + excess


def _keys(client: FtClient, everything: bool) -> Any:
    return [k for k in client.api_keys.list() if everything or key_state(k) == "active"]


def _show_key(found: Record) -> None:
    times = {name: ago(found[f"{name}_at"]) for name in ("created", "last_used", "revoked")}
    fields({**{k: found[k] for k in ("id", "name", "hint", "member_id", "requests_per_minute")}, "state": key_state(found), **times})


def _rotate_key(client: FtClient, key_id: str, overlap: str, **options: Any) -> Any:
    return client.api_keys.rotate(key_id, overlap=span_s(overlap), **options)


def _show_member(member: Record) -> None:
    print(member["id"])
    say(f"{member['email']} is {member['role']}; e-mail is {'sent' if member['notify'] else 'not sent'}")


def _show_wandb(found: Mapping[str, Any]) -> None:
    fields({"key": found["hint"], "stored": ago(found["created_at"]), "replaced": ago(found["updated_at"])})


@remote(_show_wandb)
def set_wandb_key(client: FtClient) -> Any:
    """Store your W&B API key: WANDB_API_KEY, else read from the terminal or standard input. Jobs with --wandb-project use it."""
    from getpass import getpass

    key = os.environ.get("WANDB_API_KEY") or (getpass("W&B API key: ") if sys.stdin.isatty() else sys.stdin.readline())
    return client.wandb.set(api_key=key.strip())


def _show_endpoint(found: Record) -> None:
    shown = {name: found[name] for name in ("id", "name", "url", "state", "disabled_reason")}
    fields({**shown, "secret": found["signing_secret_hint"], "events": _types(found), "created": ago(found["created_at"])})


def _create_endpoint(client: FtClient, name: str, url: str, event_types: list[str] | None = None) -> Any:
    return client.webhook_endpoints.create(name=name, url=url, event_types=event_types or ["*"])


def _update_endpoint(client: FtClient, endpoint: str, **options: Any) -> Any:
    if not (changes := {name: value for name, value in options.items() if value}):
        raise InvalidRequest("nothing to change; give --name, --url or --event", param="name")
    return client.webhook_endpoints.update(endpoint, **changes)


def rotate_secret(
    endpoint: EndpointId,
    now: Annotated[bool, typer.Option("--now", help="End the old secret immediately, because it leaked.")] = False,
    as_json: Json = False,
) -> None:
    """Replace the signing secret; the old one also signs for 24 hours, unless you pass --now."""
    with connect() as client:
        made = client.webhook_endpoints.rotate_secret(endpoint, keep_old_secret_active_for_24_hours=not now)
    old = "the old one has ended" if now else "the old one signs too for 24 hours"
    show(made, f"the new secret of {endpoint} is shown only now; {old}", prints="signing_secret", as_json=as_json)


def _deliveries(client: FtClient, endpoint: str, limit: int, state: str | None = None) -> Any:
    return client.webhook_endpoints.deliveries(endpoint, state=state, limit=min(limit, 100)).take(limit)


def _replay(client: FtClient, endpoint: str, delivery: str | None = None, since: str | None = None) -> Any:
    if delivery is not None:
        return client.webhook_endpoints.replay(endpoint, delivery)
    start = unix_seconds(since, "since")
    return client.webhook_endpoints.replay_all(endpoint, since=int(time.time()) - REPLAYED_S if start is None else start)


def types(as_json: Json = False) -> None:
    """List the types of events and what each means."""
    if as_json:
        print_json(dict(EVENT_TYPES))
    else:
        table(("TYPE", "WHAT HAS HAPPENED"), list(EVENT_TYPES.items()))


def audit(
    of: Of = None,
    kind: Kind = None,
    action: Action = None,
    actor: ByWhom = None,
    since: Since = None,
    before: Before = None,
    limit: Lines = None,
    as_csv: AsCsv = False,
    as_jsonl: AsJsonl = False,
    as_json: Json = False,
) -> None:
    """List changes in your tenant, newest first: who, what, when, from where."""
    with connect() as client:
        lines = client.audit_log.list(
            object_id=of, object_type=kind, action=action, actor=actor,
            created_from=unix_seconds(since, "since"), created_before=unix_seconds(before, "before"),
        )  # fmt: skip
        show_audit(islice(lines, at_most(limit, as_csv or as_jsonl)), as_csv, as_jsonl, as_json)


def at_most(limit: int | None, export: bool) -> int | None:
    if limit is not None and limit < 1:
        raise InvalidRequest(f"limit {limit} is below 1", param="limit")
    return limit if limit is not None or export else IN_A_TABLE


def show_audit(lines: Iterable[Mapping[str, Any]], as_csv: bool, as_jsonl: bool, as_json: bool) -> None:
    """Write `lines` in the requested format; exports are written as they arrive."""
    if as_jsonl:
        for line in lines:
            print_json(line)
    elif as_json:
        print_json(list(lines))
    elif as_csv:
        out = csv.writer(sys.stdout, lineterminator="\n")
        out.writerow(FIELDS)
        out.writerows(_record(line) for line in lines)
    else:
        table(("TIME", "WHO", "FROM", "ACTION", "OBJECT", "CHANGES"), [_row(line) for line in lines])


def _row(line: Mapping[str, Any]) -> tuple[str, ...]:
    who = line["actor"]
    name = who["email"] or who["name"]
    changed = "(redacted)" if line["redacted_at"] else _changes(line["changes"])
    at = f"{datetime.fromtimestamp(line['created_at'], UTC):%Y-%m-%d %H:%M:%S}"
    return at, f"{who['id']} ({name})" if name else who["id"], line["ip"] or "-", line["action"], line["object_id"], changed


def _changes(changes: Mapping[str, Any]) -> str:
    reported = "; ".join(f"{name}: {_value(old)} -> {_value(new)}" for name, (old, new) in changes.items())
    return " ".join(reported.split())


def _value(value: Any) -> str:
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_CELL else f"{text[: MAX_CELL - 3]}..."


def _record(line: Mapping[str, Any]) -> list[str]:
    who = line["actor"]
    at, redacted = (None if line[k] is None else datetime.fromtimestamp(line[k], UTC).isoformat() for k in ("created_at", "redacted_at"))
    cells = (line["id"], at, line["tenant_id"], who["type"], who["id"], who["name"], who["email"], line["action"], line["object_type"],
        line["object_id"], json.dumps(line["changes"]), line["ip"], line["user_agent"], line["request_id"], redacted)  # fmt: skip
    return [_cell(cell) for cell in cells]


def _cell(value: str | None) -> str:
    """Mark text that a spreadsheet would evaluate: names and user agents come from callers."""
    text = value or ""
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text
