"""``ft admin nodes``: list, drain and undrain the nodes of the pools."""

from __future__ import annotations

import getpass
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane.cli.local_platform import local
from ft_client.cli.record_views import add_group, document, listing, since

if TYPE_CHECKING:
    from control_plane.capacity.nodes import NodeView
    from control_plane.platform.context import Platform

Name = Annotated[str, typer.Argument(metavar="NODE", help="Node, as in `ft admin nodes list`.")]
NODES = listing({
    "NODE": "name", "POOL": "pool", "GPUS": lambda n: f"{n['num_gpus']} x {n['gpu_type']}", "USED": "used_gpus", "JOBS": "num_jobs",
    "FABRIC": "fabric", "STATE": "state", "SINCE": since("drained_at"), "WHY": "reason",
})  # fmt: skip


def register(admin: typer.Typer) -> None:
    commands = {"list": list_nodes, "drain": drain, "undrain": undrain}
    add_group(admin, "nodes", commands, help="Nodes of the pools: list, drain and undrain them.")


@local(NODES)
def list_nodes(platform: Platform) -> Any:
    """List every node with the GPUs held there and whether it is drained."""
    from control_plane.capacity import nodes

    return [_document(node) for node in nodes.list_nodes(platform)]


def _drained(done: Mapping[str, Any]) -> str:
    running = f"{done['num_jobs']} jobs still run there on {done['used_gpus']} GPUs"
    left = running if done["num_jobs"] else "no job runs there; the node can be removed"
    what = f"node {done['name']} of pool {done['pool']} is {done['state']}: no new jobs are placed on it"
    return f"{what}; {left}. Take it back: ft admin nodes undrain"


@local(_drained)
def drain(
    platform: Platform,
    node: Name,
    reason: Annotated[str, typer.Option("--reason", help="Note for other operators.")] = "drained by an operator",
) -> Any:
    """Place nothing new on a node; what runs there continues to its end."""
    from control_plane.capacity import nodes

    return _document(nodes.drain(platform, node, reason=reason, by=f"cli:{getpass.getuser()}"))


@local("node {name} of pool {pool} takes jobs again")
def undrain(platform: Platform, node: Name) -> Any:
    """Allow new jobs on a node again."""
    from control_plane.capacity import nodes

    return _document(nodes.undrain(platform, node))


def _document(node: NodeView) -> Mapping[str, Any]:
    return document(
        node, "name", "pool", "gpu_type", "fabric", "num_gpus", "used_gpus", "num_jobs", "state", "drained_at", "drained_by", "reason"
    )
