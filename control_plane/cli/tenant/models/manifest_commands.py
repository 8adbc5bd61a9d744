"""``ft manifest server | route``: Kubernetes manifests on stdout."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Kubernetes manifests: `ft manifest server ID | kubectl apply -f -`.", no_args_is_help=True)
    group.command("server")(server)
    group.command("route")(route)
    app.add_typer(group, name="manifest", rich_help_panel="Models")


def server(model: Annotated[str, typer.Argument(metavar="ID", help="Id or name of a whole model.")]) -> None:
    """Write the server of a fully trained model: Deployment, Service, NetworkPolicy."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        print(client.adapters.manifest(model), end="")


def route(name: Annotated[str, typer.Argument(metavar="NAME", help="One of your routes.")]) -> None:
    """Write a route between versions as llm-d's InferenceModelRewrite."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        print(client.model_routes.manifest(name), end="")
