"""``ft files``: uploaded files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ft_client.cli.output import ago, fields
from ft_client.cli.record_views import add_group, count, listing, since
from ft_client.cli.remote import remote

if TYPE_CHECKING:
    from ft_client import FtClient, Record

FileId = Annotated[str, typer.Argument(metavar="ID", help="File id (`ft files list`).")]


def _expiry(file: Record) -> str:
    at = file.get("expires_at")
    return "never" if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


FILES = listing({
    "ID": "id", "FILE": "filename", "BYTES": count("bytes"), "PURPOSE": "purpose", "STATUS": "status", "CREATED": since("created_at"),
    "EXPIRES": _expiry,
})  # fmt: skip


def register(app: typer.Typer) -> None:
    commands = {"list": list_files, "show": show, "download": download, "validate": validate, "delete": delete}
    add_group(app, "files", commands, help="Uploaded files.", panel="Data")


@remote(FILES)
def list_files(client: FtClient, limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000)] = 20) -> Any:
    """List files, newest first."""
    return client.files.list(limit=limit).take(limit)


def _show(found: Record) -> None:
    shown = {k.replace("_", " "): v for k, v in found.items() if k not in ("object", "progress", "report_url", "created_at", "expires_at")}
    fields({**shown, "created": ago(found["created_at"]), "expires": _expiry(found)})


@remote(_show)
def show(client: FtClient, file: FileId) -> Any:
    """Show a file; `ft datasets show ID` prints its report."""
    return client.files.retrieve(file)


@remote("{file}: sha256 {sha256}")
def download(
    client: FtClient,
    file: FileId,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Output file; by default its name, in this directory.")] = None,
) -> Any:
    """Download the bytes as uploaded, and verify them against the file's sha256."""
    target = out or Path(client.files.retrieve(file)["filename"])
    if target.exists():
        raise typer.BadParameter(f"{target} exists; choose another place with --out")
    return {"file": str(target), "sha256": client.files.download(file, target)}


@remote(lambda found: f"file {found['id']} is {found['status']}; `ft files show {found['id']}` shows its progress")
def validate(client: FtClient, file: FileId) -> Any:
    """Validate a file again after the platform failed to."""
    return client.files.validate(file)


@remote("file {file} is deleted")
def delete(client: FtClient, file: FileId) -> Any:
    """Delete a file's bytes; the dataset version made from them stays. Refused while an unfinished job uses it."""
    return client.files.delete(file)
