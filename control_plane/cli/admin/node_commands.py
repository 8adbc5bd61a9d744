"""``ft admin nodes``: list, drain and undrain the nodes of the pools."""

from __future__ import annotations

import getpass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane.cli.output import Json, ago, print_json, say, table

if TYPE_CHECKING:
    from control_plane.capacity.nodes import NodeView

Name = Annotated[str, typer.Argument(metavar="NODE", help="Node, as in `ft admin nodes list`.")]


def register(admin: typer.Typer) -> None:
    nodes = typer.Typer(help="Nodes of the pools: list, drain and undrain them.", no_args_is_help=True)
    for name, command in (("list", list_nodes), ("drain", drain), ("undrain", undrain)):
        nodes.command(name)(command)
    admin.add_typer(nodes, name="nodes")


def list_nodes(as_json: Json = False) -> None:
    """List every node with the GPUs held there and whether it is drained."""
    from control_plane.capacity import nodes
    from control_plane.cli.admin.local_platform import open_local

    with open_local() as platform:
        found = nodes.list_nodes(platform)
    if as_json:
        print_json([_document(node) for node in found])
        return
    table(
        ("NODE", "POOL", "GPUS", "USED", "JOBS", "FABRIC", "STATE", "SINCE", "WHY"),
        [
            (n.name, n.pool, f"{n.num_gpus} x {n.gpu_type}", str(n.used_gpus), str(n.num_jobs), n.fabric, n.state,
             ago(n.drained_at.timestamp()) if n.drained_at else "", n.reason or "")
            for n in found
        ],
    )  # fmt: skip


def drain(
    node: Name,
    reason: Annotated[str, typer.Option("--reason", help="Note for other operators.")] = "drained by an operator",
    as_json: Json = False,
) -> None:
    """Place nothing new on a node; what runs there continues to its end."""
    from control_plane.capacity import nodes
    from control_plane.cli.admin.local_platform import open_local

    with open_local() as platform:
        done = nodes.drain(platform, node, reason=reason, by=f"cli:{getpass.getuser()}")
    if as_json:
        print_json(_document(done))
        return
    left = (
        f"{done.num_jobs} jobs still run there on {done.used_gpus} GPUs" if done.num_jobs else "no job runs there; the node can be removed"
    )
    say(f"node {done.name} of pool {done.pool} is {done.state}: no new jobs are placed on it; {left}. Take it back: ft admin nodes undrain")


def undrain(node: Name, as_json: Json = False) -> None:
    """Allow new jobs on a node again."""
    from control_plane.capacity import nodes
    from control_plane.cli.admin.local_platform import open_local

    with open_local() as platform:
        done = nodes.undrain(platform, node)
    if as_json:
        print_json(_document(done))
        return
    say(f"node {done.name} of pool {done.pool} takes jobs again")


def _document(node: NodeView) -> dict[str, Any]:
    shown: dict[str, Any] = {
        name: getattr(node, name) for name in ("name", "pool", "gpu_type", "fabric", "num_gpus", "used_gpus", "num_jobs", "state")
    }
    since = None if node.drained_at is None else node.drained_at.timestamp()
    return shown | {"drained_at": since, "drained_by": node.drained_by, "reason": node.reason}
