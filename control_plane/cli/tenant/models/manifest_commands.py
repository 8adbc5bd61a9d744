"""``ft manifest server | route`` and ``ft admin pool-manifest``: Kubernetes manifests on stdout."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    group = typer.Typer(help="Kubernetes manifests: `ft manifest server ID | kubectl apply -f -`.", no_args_is_help=True)
    group.command("server")(server)
    group.command("route")(route)
    app.add_typer(group, name="manifest", rich_help_panel="Models")


def register_admin(admin: typer.Typer) -> None:
    admin.command("pool-manifest")(pool)


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


def pool(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A base model of the catalogue.")],
    replicas: Annotated[int, typer.Option(min=1, help="Servers.")] = 2,
    max_loras: Annotated[int, typer.Option(min=1, help="Adapters in one batch.")] = 8,
    max_cpu_loras: Annotated[int, typer.Option(min=1, help="Adapters in a server's memory; at least as many as are loaded.")] = 256,
) -> None:
    """Write the servers of a base model with their adapters: StatefulSet with its Service, NetworkPolicy, InferencePool.

    Comments at the top give the platform's FT_INFERENCE_URLS and FT_SERVED_ADAPTERS_DIR.
    """
    from control_plane.adapters import manifests
    from control_plane.cli.admin.local_platform import open_local

    with open_local() as platform:
        print(manifests.pool(platform, model, replicas=replicas, max_loras=max_loras, max_cpu_loras=max_cpu_loras), end="")
