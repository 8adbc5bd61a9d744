"""``ft admin audit export`` and ``verify``: the audit log as a chain of hashes, which shows what was changed or removed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane.cli.local_platform import local, open_local
from core.errors import InvalidRequest
from ft_client.cli.exits import Exit
from ft_client.cli.output import Json
from ft_client.cli.record_views import show

if TYPE_CHECKING:
    from control_plane.platform.context import Platform
    from control_plane.tenants.audit.audit_chain import Head, Verdict

NoteHead = Annotated[
    str | None,
    typer.Option("--head", metavar="POSITION:SHA256", help="Head that an earlier export printed: what came before is unchanged."),
]


def _shown(found: Mapping[str, Any]) -> str:
    lines = [f"{found['num_entries']} entries, {found['num_redacted']} of them erased; head {found['head'] or 'none'}"]
    if found["findings"]:
        return "\n".join([*lines, *found["findings"], "the audit log was tampered with: compare it with an earlier export or a backup"])
    return "\n".join([*lines, "every entry holds; keep the head in a place that this platform's operators cannot change"])


def _broken(found: Mapping[str, Any]) -> bool:
    return bool(found["findings"])


@local(_shown, fails=_broken)
def export(
    platform: Platform, file: Annotated[Path, typer.Argument(metavar="FILE", dir_okay=False, help="New file; it has tenants' data.")]
) -> Any:
    """Write the whole audit log to a new file, one JSON entry a line, and verify it. Exit code 1 if an entry does not hold."""
    from control_plane.tenants.audit import audit_entries

    if file.exists():
        raise InvalidRequest(f"{file} exists; name a new file")
    return _document(audit_entries.export(platform, file))


def verify(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", exists=True, dir_okay=False, help="An exported file; by default, the database.")
    ] = None,
    head: NoteHead = None,
    as_json: Json = False,
) -> None:
    """Verify the audit log of the database, or an exported file without one. Exit code 1 if an entry was changed, removed or added."""
    from control_plane.tenants.audit import audit_entries

    if file is not None:
        found = audit_entries.verify_file(file, head=_head(head))
    else:
        with open_local() as platform:
            found = audit_entries.verify(platform, head=_head(head))
    document = _document(found)
    show(document, _shown, as_json=as_json)
    if _broken(document):
        raise typer.Exit(Exit.FAILED)


def _head(text: str | None) -> Head | None:
    from control_plane.tenants.audit.audit_chain import parse_head

    try:
        return None if text is None else parse_head(text)
    except ValueError as error:
        raise InvalidRequest(str(error), param="head") from error


def _document(verdict: Verdict) -> dict[str, Any]:
    return {
        "num_entries": verdict.num_entries, "num_redacted": verdict.num_redacted, "head": verdict.head and str(verdict.head),
        "findings": list(verdict.findings),
    }  # fmt: skip
