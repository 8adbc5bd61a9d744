"""``ft adapters lineage|pending|approve|reject``, ``ft deletions``, and operators' commands for deletions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from core.errors import InvalidRequest
from ft_client.cli.output import Json, fields, print_json, say, table
from ft_client.cli.record_views import add_commands, listing, since
from ft_client.cli.remote import connect, remote

if TYPE_CHECKING:
    from ft_client import FtClient, Record

Reference = Annotated[str, typer.Argument(metavar="NAME", help="Adapter id or model name, such as the `model` of a response.")]
Note = Annotated[str | None, typer.Option("--note", help="Note, kept with the decision.")]
PENDING = listing({"ID": "id", "MODEL": "name", "JOB": "job_id", "CREATED": since("created_at")})
DELETIONS = listing({
    "ID": "id", "OF": "subject_id", "STATUS": "status", "ASKED FOR": since("requested_at"),
    "": lambda d: d["waiting_for"] or d["reason"],
})  # fmt: skip


def register(app: typer.Typer) -> None:
    add_commands(app, "Models", deletions)


def register_adapters(group: typer.Typer) -> None:
    for command in (lineage, pending, approve, reject, release):
        group.command()(command)


def lineage(
    name: Reference,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read the stored bytes again and compare them with the recorded hashes.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Trace a model back: evaluation, job, spec, base model, dataset, uploaded file."""
    with connect() as client:
        found = client.models.lineage(name, verify=verify)
    if as_json:
        print_json(found)
    else:
        for adapter in found["adapters"]:
            _show(adapter)
        if found["kind"] == "base_model":
            fields(found.get("base_model") or {})
        if verify:
            print(verdict(found))
    if verify and found["adapters"] and not found.get("holds"):
        raise typer.Exit(1)


def verdict(found: Mapping[str, Any]) -> str:
    """Summarize a verification in one line."""
    links = [link for one in found["adapters"] for link in one["links"]]
    if not links:
        return "NOTHING TO VERIFY: a base model was trained elsewhere; `ft admin models verify` reads its files again"
    broken = [link["link"] for link in links if link["holds"] is False]
    unread = [link["link"] for link in links if link["holds"] is None]
    held = f"{len(links) - len(broken) - len(unread)} of {len(links)} links hold"
    rest = f"; not readable: {', '.join(unread)}" if unread else ""
    if broken:
        return f"BROKEN at {', '.join(broken)}: {held}{rest}"
    return f"{'VERIFIED' if len(unread) < len(links) else 'NOT VERIFIED'}: {held}{rest}"


def _show(one: Record) -> None:
    adapter, training, base = one["adapter"], one["training"], one["base_model"]
    datasets = [dataset or {} for dataset in (one["dataset"], *one["mixed_datasets"])]
    weights = one["files"]["files"]
    fields(
        {
            "model": adapter["name"],
            "adapter": f"{adapter['id']} ({adapter['stage']}), manifest {adapter['manifest_sha256']}",
            **{f"  {name}": sha256 for name, sha256 in sorted(weights.items())},
            "evaluations": ", ".join(f"{e['kind']} {e['outcome'] or e.get('state')}" for e in one["evaluations"]),
            "job": f"{one['job']['id']}, {len(training['attempts'])} attempts, {len(training['checkpoints'])} checkpoints",
            "spec": training["spec_sha256"],
            "lock": training["lock_sha256"],
            "commit": training["commit"],
            "base model": f"{base['id']} {base['digest']}" + (f" ({base['repo']}@{base['revision']})" if base.get("repo") else ""),
            **{f"dataset{f' {n}' if len(datasets) > 1 else ''}": _dataset(one) for n, one in enumerate(datasets, 1)},
            **{_upload_name(u, one["uploads"]): f"{u['id']} {u['filename']} {u['sha256']}" for u in one["uploads"]},
            **({"started from": " < ".join(p["adapter"]["name"] for p in one["parents"])} if one["parents"] else {}),
            **({"deletion": f"{one['deletion']['id']}: {one['deletion']['reason']}"} if one["deletion"] else {}),
        }
    )
    if "links" in one:
        message = {True: "holds", False: "BROKEN", None: "not there"}
        table(("LINK", "", ""), [(link["link"], message[link["holds"]], link["detail"]) for link in one["links"]])


def _dataset(dataset: Mapping[str, Any]) -> str:
    return f"{dataset.get('id')} ({dataset.get('row_count')} rows), content {dataset.get('content_sha256')}"


def _upload_name(upload: Mapping[str, Any], uploads: Sequence[Mapping[str, Any]]) -> str:
    """Return its role, numbered if several files have it."""
    alike = [one["id"] for one in uploads if one["role"] == upload["role"]]
    return f"{upload['role']} file" + (f" {alike.index(upload['id']) + 1}" if len(alike) > 1 else "")


@remote(PENDING)
def pending(client: FtClient) -> Any:
    """List adapters that wait for approval."""
    return client.adapters.list(approval="pending").all()


def _decided(adapter: Mapping[str, Any]) -> str:
    servable = adapter["approval"] == "approved" and adapter["stage"] != "production"
    next_step = f"; `ft promote {adapter['id']}` serves it" if servable else ""
    return f"{adapter['name']} is {adapter['approval']} and in {adapter['stage']}{next_step}"


@remote(_decided)
def approve(
    client: FtClient,
    adapter: Reference,
    note: Note = None,
    promote: Annotated[bool, typer.Option("--promote", help="Promote it to production immediately.")] = False,
) -> Any:
    """Approve an adapter whose job requires approval, so that it can be promoted."""
    return client.adapters.approve(adapter, note=note, promote=promote)


@remote(_decided)
def reject(client: FtClient, adapter: Reference, note: Note = None) -> Any:
    """Reject an adapter, so that it cannot be promoted."""
    return client.adapters.reject(adapter, note=note)


@remote(lambda a: f"{a['name']} is released and in {a['stage']}; its job succeeded")
def release(
    client: FtClient, adapter: Reference, reason: Annotated[str, typer.Option("--reason", help="Why it is good enough to be served.")]
) -> Any:
    """Serve a model that did not pass its gate. Needs a key with scope admin; the reason is kept with the model."""
    return client.adapters.release(adapter, reason=reason)


def deletions(
    deletion: Annotated[str | None, typer.Argument(metavar="ID", help="One deletion, with its proof.")] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the proof to this file.")] = None,
    as_json: Json = False,
) -> None:
    """List deletions, or show one with its proof."""
    with connect() as client:
        found: Any = client.deletions.list().all() if deletion is None else client.deletions.retrieve(deletion)
    if output is not None:
        if deletion is None:
            raise InvalidRequest("-o writes one proof; name its deletion (`ft deletions` lists them)", param="ID")
        output.write_text(json.dumps(found, indent=1, ensure_ascii=False))
        say(f"{output} has the proof of {deletion}, sha256 {found['sha256']}")
    if as_json or (deletion is not None and output is None):
        print_json(found)
    elif deletion is None:
        DELETIONS(found)
