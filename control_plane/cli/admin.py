"""``ft admin``: what operators do on the machine of the control plane; it goes to the database, not through the API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from control_plane.cli.output import Json, print_json, say, table
from ft_assets.errors import Unavailable

if TYPE_CHECKING:
    from control_plane.service.platform import Platform


def register(app: typer.Typer) -> None:
    admin = typer.Typer(help="Operators: tenants and their keys.", no_args_is_help=True)
    tenants = typer.Typer(help="Make and list tenants.", no_args_is_help=True)
    tenants.command("create")(create_tenant)
    tenants.command("list")(list_tenants)
    admin.add_typer(tenants, name="tenants")
    app.add_typer(admin, name="admin", rich_help_panel="Operators")


@contextmanager
def open_local() -> Iterator[Platform]:
    """The platform of this home, for as long as its database answers; the embedded one has to be up."""
    from sqlalchemy.exc import OperationalError

    from resources.platform import open_platform
    from resources.stack.commands import load_settings
    from resources.stack.postgres import postmaster_pid

    settings = load_settings()
    if settings.embedded_database and postmaster_pid(settings) is None:
        raise Unavailable(
            f"the embedded database in {settings.home} is not running; start it with `ft up`, or set FT_DATABASE_URL", code="stack_down"
        )
    try:
        yield open_platform(settings)
    except OperationalError as e:
        raise Unavailable(f"the database does not answer: {e.orig}; check FT_DATABASE_URL", code="database_unreachable") from e


def create_tenant(
    tenant: Annotated[str, typer.Argument(help="Id of the tenant: lower-case letters, digits and '-'.")],
    tier: Annotated[str, typer.Option("--tier", help="free, standard or premium.")] = "standard",
    as_json: Json = False,
) -> None:
    """Make a tenant and its first API key. The key is shown once: only its hash is stored."""
    from control_plane.service import tenants

    with open_local() as platform:
        made, key = tenants.create(platform, tenant, tier=tier)
    if as_json:
        print_json({"id": made.id, "name": made.name, "tier": made.tier, "key_id": key.id, "api_key": key.secret})
        return
    print(key.secret)
    say(f"tenant {made.id} ({made.tier}); its key is shown only now: `ft --api-key KEY login` stores it")


def list_tenants(as_json: Json = False) -> None:
    """List tenants."""
    from control_plane.service import tenants

    with open_local() as platform:
        found = tenants.list_all(platform)
    if as_json:
        print_json([{"id": t.id, "name": t.name, "tier": t.tier, "max_jobs_in_flight": t.max_jobs_in_flight} for t in found])
        return
    table(("ID", "NAME", "TIER", "JOBS IN FLIGHT, AT MOST"), [(t.id, t.name, t.tier, str(t.max_jobs_in_flight)) for t in found])
