"""``ft webhooks``: where events are sent, test events, and replays."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from control_plane.cli.output import Json, ago, fields, print_json, say, table
from ft_assets.errors import InvalidRequest

EndpointId = Annotated[str, typer.Argument(metavar="ENDPOINT", help="Endpoint id (`ft webhooks` lists them): we_...")]
Events = Annotated[
    list[str] | None,
    typer.Option("--event", "-e", metavar="TYPE", help="Event type (`ft webhooks types`); may be repeated. Default: every type."),
]
DEFAULT_SINCE_S = 7 * 86400


def register(app: typer.Typer) -> None:
    webhooks = typer.Typer(help="List, create and change your webhook endpoints.", no_args_is_help=True)
    webhooks.command("list")(list_endpoints)
    for command in (create, show, update, enable, disable, delete, deliveries, replay, types):
        webhooks.command()(command)
    webhooks.command("test")(try_out)
    webhooks.command("rotate-secret")(rotate_secret)
    app.add_typer(webhooks, name="webhooks", rich_help_panel="Account")


def list_endpoints(as_json: Json = False) -> None:
    """List your webhook endpoints, newest first."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        found = client.webhook_endpoints.list().all()
    if as_json:
        print_json(found)
        return
    rows = [(e["id"], e["name"], e["url"], e["state"], ago(e["failing_since"]) if e["failing_since"] else "", _types(e)) for e in found]
    table(("ID", "NAME", "URL", "STATE", "FAILING SINCE", "EVENTS"), rows)


def create(
    name: Annotated[str, typer.Argument(help="Purpose of the key.")],
    url: Annotated[str, typer.Argument(help="https://..., at a public address.")],
    event: Events = None,
    as_json: Json = False,
) -> None:
    """Send events to a URL. The signing secret is written to stdout, only now."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        made = client.webhook_endpoints.create(name=name, url=url, event_types=event or ["*"])
    _show_secret(made, f"endpoint {made['id']}; its signing secret is shown only now. Try it with `ft webhooks test`", as_json=as_json)


def show(endpoint: EndpointId, as_json: Json = False) -> None:
    """Show an endpoint, without its secret."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        found = client.webhook_endpoints.retrieve(endpoint)
    _show_endpoint(found, as_json=as_json)


def update(
    endpoint: EndpointId,
    name: Annotated[str | None, typer.Option("--name")] = None,
    url: Annotated[str | None, typer.Option("--url", help="New URL for events.")] = None,
    event: Events = None,
    as_json: Json = False,
) -> None:
    """Change an endpoint's name, URL or event types."""
    changes = {k: v for k, v in {"name": name, "url": url, "event_types": event}.items() if v}
    if not changes:
        raise InvalidRequest("nothing to change; give --name, --url or --event", param="name")
    _changed(endpoint, changes, as_json=as_json)


def enable(endpoint: EndpointId, as_json: Json = False) -> None:
    """Resume sending events to an endpoint; `ft webhooks replay` sends what it missed."""
    _changed(endpoint, {"state": "enabled"}, as_json=as_json)


def disable(endpoint: EndpointId, as_json: Json = False) -> None:
    """Stop sending events to an endpoint; missed events are kept for 30 days."""
    _changed(endpoint, {"state": "disabled"}, as_json=as_json)


def delete(endpoint: EndpointId, as_json: Json = False) -> None:
    """Delete an endpoint."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        done = client.webhook_endpoints.delete(endpoint)
    if as_json:
        print_json(done)
    else:
        say(f"endpoint {endpoint} is deleted")


def try_out(
    endpoint: EndpointId,
    event: Annotated[str | None, typer.Option("--event", "-e", metavar="TYPE", help="Event type; the endpoint's first if absent.")] = None,
    as_json: Json = False,
) -> None:
    """Send a signed test event now and show the receiver's answer; exit code 1 unless that is 2xx."""
    from control_plane.cli.exits import Exit
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        tried = client.webhook_endpoints.test(endpoint, **({"event_type": event} if event else {}))
    if as_json:
        print_json(tried)
    else:
        say(f"{tried['event_type']}: the receiver answered {tried['status_code']} {tried['response']}".rstrip())
    if not 200 <= tried["status_code"] < 300:
        raise typer.Exit(Exit.FAILED)


def rotate_secret(
    endpoint: EndpointId,
    now: Annotated[bool, typer.Option("--now", help="End the old secret at once, because it leaked.")] = False,
    as_json: Json = False,
) -> None:
    """Replace the signing secret; the old one also signs for 24 hours, unless you pass --now."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        made = client.webhook_endpoints.rotate_secret(endpoint, keep_old_secret_active_for_24_hours=not now)
    old = "the old one has ended" if now else "the old one signs too for 24 hours"
    _show_secret(made, f"the new secret of {endpoint} is shown only now; {old}", as_json=as_json)


def deliveries(
    endpoint: EndpointId,
    state: Annotated[str | None, typer.Option("--state", help="pending, delivered or dead.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1)] = 20,
    as_json: Json = False,
) -> None:
    """List what was sent to an endpoint in the last 30 days, or is to be, newest first."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        found = client.webhook_endpoints.deliveries(endpoint, state=state, limit=min(limit, 100)).take(limit)
    if as_json:
        print_json(found)
        return
    rows = [
        (d["id"], d["event_type"], d["subject"], d["state"], str(d["attempts"]), d["last_error"] or d["last_status_code"] or "",
         ago(d["created_at"]))
        for d in found
    ]  # fmt: skip
    table(("ID", "EVENT", "ABOUT", "STATE", "ATTEMPTS", "LAST ANSWER", "SINCE"), [tuple(map(str, row)) for row in rows])


def replay(
    endpoint: EndpointId,
    delivery: Annotated[str | None, typer.Argument(metavar="[DELIVERY]", help="One delivery; without it, all dead ones.")] = None,
    since: Annotated[str | None, typer.Option("--since", help="2026-11-21, 2026-11-21T15:04 or seconds. Default: a week ago.")] = None,
    as_json: Json = False,
) -> None:
    """Send again what an endpoint missed, under the ids that the events always had."""
    from control_plane.cli.dates import unix_seconds
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        if delivery is not None:
            done = client.webhook_endpoints.replay(endpoint, delivery)
            message = f"{delivery} is sent again"
        else:
            start = unix_seconds(since, "since")
            start = int(time.time()) - DEFAULT_SINCE_S if start is None else start
            done = client.webhook_endpoints.replay_all(endpoint, since=start)
            message = f"{done['replayed']} deliveries are sent again"
    if as_json:
        print_json(done)
    else:
        say(message)


def types(as_json: Json = False) -> None:
    """List the types of events and what each tells."""
    from control_plane.notifications.rules import EVENT_TYPES

    if as_json:
        print_json(dict(EVENT_TYPES))
    else:
        table(("TYPE", "WHAT HAS HAPPENED"), list(EVENT_TYPES.items()))


def _changed(endpoint: str, changes: dict[str, Any], *, as_json: bool) -> None:
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        _show_endpoint(client.webhook_endpoints.update(endpoint, **changes), as_json=as_json)


def _show_endpoint(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    shown = {name: found[name] for name in ("id", "name", "url", "state", "disabled_reason") if found[name]}
    fields({**shown, "secret": found["signing_secret_hint"], "events": _types(found), "created": ago(found["created_at"])})


def _show_secret(made: dict[str, Any], message: str, *, as_json: bool) -> None:
    if as_json:
        print_json(made)
        return
    print(made["signing_secret"])
    say(message)


def _types(endpoint: dict[str, Any]) -> str:
    return "all" if endpoint["event_types"] == ["*"] else " ".join(endpoint["event_types"])
