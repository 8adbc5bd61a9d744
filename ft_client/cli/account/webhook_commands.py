"""``ft webhooks``: where events are sent, test events, and replays."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from core.errors import InvalidRequest
from ft_client.cli.dates import unix_seconds
from ft_client.cli.output import Json, ago, fields, print_json, table
from ft_client.cli.record_views import NewName, add_group, given, listing, show, since
from ft_client.cli.remote import connect, remote

if TYPE_CHECKING:
    from ft_client import FtClient, Record

EndpointId = Annotated[str, typer.Argument(metavar="ENDPOINT", help="Endpoint id (`ft webhooks` lists them): we_...")]
Events = Annotated[
    list[str] | None,
    typer.Option("--event", "-e", metavar="TYPE", help="Event type (`ft webhooks types`); may be repeated. Default: every type."),
]
DEFAULT_SINCE_S = 7 * 86400


def _types(endpoint: Record) -> str:
    return "all" if endpoint["event_types"] == ["*"] else " ".join(endpoint["event_types"])


ENDPOINTS = listing({"ID": "id", "NAME": "name", "URL": "url", "STATE": "state", "FAILING SINCE": since("failing_since"), "EVENTS": _types})
DELIVERIES = listing({
    "ID": "id", "EVENT": "event_type", "ABOUT": "subject", "STATE": "state", "ATTEMPTS": "attempts",
    "LAST ANSWER": lambda d: d["last_error"] or d["last_status_code"], "SINCE": since("created_at"),
})  # fmt: skip


def register(app: typer.Typer) -> None:
    add_group(app, "webhooks", {
        "list": list_endpoints, "create": create, "show": show_endpoint, "update": update, "enable": enable, "disable": disable,
        "delete": delete, "deliveries": deliveries, "replay": replay, "types": types, "test": try_out, "rotate-secret": rotate_secret,
    }, help="List, create and change your webhook endpoints.", panel="Account")  # fmt: skip


def _show(found: Record) -> None:
    shown = {name: found[name] for name in ("id", "name", "url", "state", "disabled_reason")}
    fields({**shown, "secret": found["signing_secret_hint"], "events": _types(found), "created": ago(found["created_at"])})


@remote(ENDPOINTS)
def list_endpoints(client: FtClient) -> Any:
    """List your webhook endpoints, newest first."""
    return client.webhook_endpoints.list().all()


@remote("endpoint {id}; its signing secret is shown only now. Try it with `ft webhooks test`", prints="signing_secret")
def create(
    client: FtClient,
    name: Annotated[str, typer.Argument(help="Purpose of the key.")],
    url: Annotated[str, typer.Argument(help="https://..., at a public address.")],
    event: Events = None,
) -> Any:
    """Create an endpoint that receives events. The signing secret is written to stdout, only now."""
    return client.webhook_endpoints.create(name=name, url=url, event_types=event or ["*"])


@remote(_show)
def show_endpoint(client: FtClient, endpoint: EndpointId) -> Any:
    """Show an endpoint, without its secret."""
    return client.webhook_endpoints.retrieve(endpoint)


@remote(_show)
def update(
    client: FtClient,
    endpoint: EndpointId,
    name: NewName = None,
    url: Annotated[str | None, typer.Option("--url", help="New URL for events.")] = None,
    event: Events = None,
) -> Any:
    """Change an endpoint's name, URL or event types."""
    changes = given(name=name or None, url=url or None, event_types=event or None)
    if not changes:
        raise InvalidRequest("nothing to change; give --name, --url or --event", param="name")
    return client.webhook_endpoints.update(endpoint, **changes)


@remote(_show)
def enable(client: FtClient, endpoint: EndpointId) -> Any:
    """Resume sending events to an endpoint; `ft webhooks replay` sends what it missed."""
    return client.webhook_endpoints.update(endpoint, state="enabled")


@remote(_show)
def disable(client: FtClient, endpoint: EndpointId) -> Any:
    """Stop sending events to an endpoint; missed events are kept for 30 days."""
    return client.webhook_endpoints.update(endpoint, state="disabled")


@remote("endpoint {endpoint} is deleted")
def delete(client: FtClient, endpoint: EndpointId) -> Any:
    """Delete an endpoint."""
    return client.webhook_endpoints.delete(endpoint)


@remote(
    lambda tried: f"{tried['event_type']}: the receiver answered {tried['status_code']} {tried['response']}".rstrip(),
    fails=lambda tried: not 200 <= tried["status_code"] < 300,
)
def try_out(
    client: FtClient,
    endpoint: EndpointId,
    event: Annotated[str | None, typer.Option("--event", "-e", metavar="TYPE", help="Event type; the endpoint's first if absent.")] = None,
) -> Any:
    """Send a signed test event now and show the receiver's answer; exit code 1 unless that is 2xx."""
    return client.webhook_endpoints.test(endpoint, **given(event_type=event or None))


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


@remote(DELIVERIES)
def deliveries(
    client: FtClient,
    endpoint: EndpointId,
    state: Annotated[str | None, typer.Option("--state", help="pending, delivered or dead.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1)] = 20,
) -> Any:
    """List what was sent to an endpoint in the last 30 days, or is to be, newest first."""
    return client.webhook_endpoints.deliveries(endpoint, state=state, limit=min(limit, 100)).take(limit)


@remote(lambda done: f"{done['replayed']} deliveries are sent again" if "replayed" in done else f"{done['id']} is sent again")
def replay(
    client: FtClient,
    endpoint: EndpointId,
    delivery: Annotated[str | None, typer.Argument(metavar="DELIVERY", help="One delivery; without it, all dead ones.")] = None,
    since: Annotated[str | None, typer.Option("--since", help="2026-11-21, 2026-11-21T15:04 or seconds. Default: a week ago.")] = None,
) -> Any:
    """Resend missed events to an endpoint, with their original ids."""
    if delivery is not None:
        return client.webhook_endpoints.replay(endpoint, delivery)
    start = unix_seconds(since, "since")
    return client.webhook_endpoints.replay_all(endpoint, since=int(time.time()) - DEFAULT_SINCE_S if start is None else start)


def types(as_json: Json = False) -> None:
    """List the types of events and what each means."""
    from control_plane.notifications.rules import EVENT_TYPES

    if as_json:
        print_json(dict(EVENT_TYPES))
    else:
        table(("TYPE", "WHAT HAS HAPPENED"), list(EVENT_TYPES.items()))
