"""``ft manifest server | route``: Kubernetes manifests on stdout."""

from __future__ import annotations

from typing import Annotated

import typer

from ft_client.cli.output import Json, print_manifests
from ft_client.cli.record_views import add_group
from ft_client.cli.remote import connect


def register(app: typer.Typer) -> None:
    about = "Kubernetes manifests: `ft manifest server ID | kubectl apply -f -`."
    add_group(app, "manifest", {"server": server, "route": route}, help=about, panel="Models")


def server(model: Annotated[str, typer.Argument(metavar="ID", help="Id or name of a whole model.")], as_json: Json = False) -> None:
    """Render the Kubernetes manifests of a server for a fully trained model: Deployment, Service, NetworkPolicy."""
    with connect() as client:
        print_manifests(client.adapters.manifest(model), as_json=as_json)


def route(name: Annotated[str, typer.Argument(metavar="NAME", help="One of your routes.")], as_json: Json = False) -> None:
    """Write a route between versions as llm-d's InferenceModelRewrite."""
    with connect() as client:
        print_manifests(client.model_routes.manifest(name), as_json=as_json)
