"""``ft admin maintenance``: start no jobs on the platform, in a pool or of a tenant."""

from __future__ import annotations

import getpass
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane.cli.local_platform import local
from ft_client.cli.account_commands import span_s
from ft_client.cli.job_progress import wall_clock
from ft_client.cli.record_views import add_group, document, listing, since

if TYPE_CHECKING:
    from control_plane.capacity.tables import Maintenance
    from control_plane.platform.context import Platform

Pool = Annotated[str | None, typer.Option("--pool", help="Only this pool.")]
Tenant = Annotated[str | None, typer.Option("--tenant", help="Only this tenant.")]


def register(admin: typer.Typer) -> None:
    commands = {"start": start, "end": end, "list": list_all}
    add_group(admin, "maintenance", commands, help="Start no jobs on the platform, in a pool or of a tenant.")


def _stops(done: Mapping[str, Any]) -> str:
    at = done["stop_at"]
    return "running jobs finish" if at is None else f"by {wall_clock(at, time.time())}, running jobs save a checkpoint and stop"


@local(lambda done: f"maintenance of {done['scope']}: no job starts; {_stops(done)}. End it: ft admin maintenance end")
def start(
    platform: Platform,
    message: Annotated[str, typer.Option("--message", help="Message that waiting jobs show.")],
    pool: Pool = None,
    tenant: Tenant = None,
    stop_in: Annotated[
        str | None, typer.Option("--stop-in", metavar="SPAN", help="When no job runs any more: 90min, 2h. By default, running jobs finish.")
    ] = None,
) -> Any:
    """Start no more jobs; running jobs finish, or save a checkpoint by a given time. Again: change message and time."""
    from control_plane.capacity import maintenance

    by = f"cli:{getpass.getuser()}"
    return _document(maintenance.start(platform, pool=pool, tenant=tenant, message=message, by=by, stop_in_s=span_s(stop_in)))


@local("maintenance of {scope} has ended: jobs start again")
def end(platform: Platform, pool: Pool = None, tenant: Tenant = None) -> Any:
    """Start jobs again."""
    from control_plane.capacity import maintenance

    return _document(maintenance.end(platform, pool=pool, tenant=tenant))


@local(listing({"SCOPE": "scope", "SINCE": since("started_at"), "BY": "started_by", "RUNNING JOBS": _stops, "MESSAGE": "message"}))
def list_all(platform: Platform) -> Any:
    """List what is under maintenance."""
    from control_plane.capacity import maintenance

    with platform.engine.connect() as conn:
        return [_document(found) for found in maintenance.list_all(conn)]


def _document(found: Maintenance) -> Mapping[str, Any]:
    return document(found, "scope", "message", "started_by", "started_at", "stop_at")
