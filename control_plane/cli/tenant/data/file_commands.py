"""``ft files``: uploaded files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from control_plane.cli.output import Json, ago, fields, print_json, say, table

if TYPE_CHECKING:
    from control_plane.client import Record

FileId = Annotated[str, typer.Argument(metavar="ID", help="File id (`ft files list`).")]


def register(app: typer.Typer) -> None:
    files = typer.Typer(help="Uploaded files.", no_args_is_help=True)
    for name, command in (("list", list_files), ("show", show), ("download", download), ("validate", validate), ("delete", delete)):
        files.command(name)(command)
    app.add_typer(files, name="files", rich_help_panel="Data")


def list_files(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000)] = 20,
    as_json: Json = False,
) -> None:
    """List files, newest first."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        found = client.files.list(limit=limit).take(limit)
    if as_json:
        print_json(found)
        return
    table(("ID", "FILE", "BYTES", "PURPOSE", "STATUS", "CREATED", "EXPIRES"), [_row(f) for f in found])


def _row(f: Record) -> tuple[str, ...]:
    expires_at = f.get("expires_at")
    return f["id"], f["filename"], f"{f['bytes']:,}", f["purpose"], f["status"], ago(f["created_at"]), _day(expires_at)


def _day(unix_s: int | None) -> str:
    import time

    return "never" if unix_s is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_s))


def show(file: FileId, as_json: Json = False) -> None:
    """Show a file; `ft datasets show ID` prints its report."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        found = client.files.retrieve(file)
    if as_json:
        print_json(found)
        return
    shown = {k.replace("_", " "): v for k, v in found.items() if k not in ("object", "progress", "report_url", "created_at", "expires_at")}
    fields({**shown, "created": ago(found["created_at"]), "expires": _day(found.get("expires_at"))})


def download(
    file: FileId,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Output file; by default its name, in this directory.")] = None,
    as_json: Json = False,
) -> None:
    """Download the bytes as uploaded, and verify them against the file's sha256."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        target = out or Path(client.files.retrieve(file)["filename"])
        if target.exists():
            raise typer.BadParameter(f"{target} exists; choose another place with --out")
        sha256 = client.files.download(file, target)
    if as_json:
        print_json({"file": str(target), "sha256": sha256})
        return
    say(f"{target}: sha256 {sha256}")


def validate(file: FileId, as_json: Json = False) -> None:
    """Validate a file again after the platform failed to."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        found = client.files.validate(file)
    if as_json:
        print_json(found)
        return
    say(f"file {file} is {found['status']}; `ft files show {file}` shows its progress")


def delete(file: FileId, as_json: Json = False) -> None:
    """Delete a file's bytes; the dataset version made from them stays. Refused while an unfinished job uses it."""
    from control_plane.cli.tenant.remote import connect

    with connect() as client:
        gone = client.files.delete(file)
    if as_json:
        print_json(gone)
        return
    say(f"file {file} is deleted")
