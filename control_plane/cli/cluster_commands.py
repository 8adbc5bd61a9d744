"""``ft admin kueue | pool-manifest``: Kubernetes objects for pools and tenants, a check of a cluster's queues, servers of a base model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from control_plane.cli.local_platform import open_local
from ft_client.cli.exits import Exit
from ft_client.cli.output import Json, print_json, print_manifests, say


def register(admin: typer.Typer) -> None:
    admin.command("kueue")(kueue)
    admin.command("pool-manifest")(pool_manifest)


def kueue(
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Write queues.yaml, tenants.yaml and nodes.sh there.")] = None,
    check: Annotated[
        Path | None,
        typer.Option("--check", metavar="FILE", help="Output of `kubectl get clusterqueues -o yaml`; -: stdin. Exit code 1 if they differ"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Render Kueue's objects for the pools and tenants, or check a cluster's queues against the GPUs that are ready.

    Without options, writes to stdout, for `kubectl apply --server-side -f -`.
    """
    from control_plane.capacity import kueue

    if check is not None and str(check) != "-" and not check.is_file():
        raise typer.BadParameter(f"--check {check} is not a file; it is the output of `kubectl get clusterqueues -o yaml`")
    with open_local() as platform:
        if check is not None:
            text = sys.stdin.read() if str(check) == "-" else check.read_text(encoding="utf-8")
            _verdict(kueue.check(platform, text), as_json)
            return
        files = kueue.files(platform)
        if out is None:
            print_manifests("---\n".join(text for name, text in files.items() if name.endswith(".yaml")), as_json=as_json)
            return
        out.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (out / name).write_text(text, encoding="utf-8")
    if as_json:
        print_json({"files": [str(out / name) for name in files]})
    say(f"wrote {', '.join(files)} to {out}: sh nodes.sh, then kubectl apply --server-side -f queues.yaml -f tenants.yaml")


def _verdict(differences: list[str], as_json: bool) -> None:
    if as_json:
        print_json({"agrees": not differences, "differences": differences})
    else:
        for line in differences:
            print(line)
    if differences:
        raise typer.Exit(Exit.FAILED)
    say("the cluster's quotas match the ready and drained GPUs, and Kueue's own preemption is off")


def pool_manifest(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A base model of the catalogue.")],
    replicas: Annotated[int, typer.Option(min=1, help="Servers.")] = 2,
    max_loras: Annotated[int, typer.Option(min=1, help="Adapters in one batch.")] = 8,
    max_cpu_loras: Annotated[int, typer.Option(min=1, help="Adapters in a server's memory; at least as many as are loaded.")] = 256,
    as_json: Json = False,
) -> None:
    """Render the Kubernetes manifests of a base model's servers: StatefulSet with its Service, NetworkPolicy, InferencePool.

    Comments at the top give the platform's FT_INFERENCE_URLS and FT_SERVED_ADAPTERS_DIR.
    """
    from control_plane.adapters import manifests

    with open_local() as platform:
        made = manifests.pool(platform, model, replicas=replicas, max_loras=max_loras, max_cpu_loras=max_cpu_loras)
    print_manifests(made, as_json=as_json)
