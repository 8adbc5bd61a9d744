"""What keeps the installation whole: ``ft admin doctor``, ``backup``, ``restore``, ``keys``, ``signing-keys`` and ``audit``."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from control_plane.cli.local_platform import local, open_local
from core.errors import InvalidRequest
from ft_client.cli import account_commands
from ft_client.cli.command_options import unix_seconds
from ft_client.cli.commands import Commands, add_commands, add_group, argument, listing, option, show, since
from ft_client.cli.output import Exit, Json, counted, say

if TYPE_CHECKING:
    from control_plane.platform.context import Platform
    from control_plane.platform.settings import Settings
    from control_plane.tenants.audit.audit_chain import Head, Verdict
    from deploy.doctor.check_findings import Finding, Site
    from deploy.local.backup.home_backup import Backup

Directory = argument(type=Path, metavar="DIR", file_okay=False)
SIGNING_KEY = "id public_key created_at revoked_at"
SIGNING_KEYS = listing({"KEY": "id", "CREATED": since("created_at"), "STATE": lambda k: "revoked" if k["revoked_at"] else "trusted"})


@contextmanager
def _settings() -> Iterator[Settings]:
    """Yield the settings of this home; the umask is narrowed until the end."""
    from deploy.local.lifecycle import load_settings
    from deploy.local.private_home import UMASK

    before = os.umask(UMASK)
    try:
        yield load_settings()
    finally:
        os.umask(before)


@contextmanager
def _site() -> Iterator[Site]:
    from deploy.doctor.check_findings import Site
    from resources.database.engine import control_plane_url, shared_logins

    with _settings() as settings, ExitStack() as at_the_end:
        at_the_end.callback(shared_logins(control_plane_url(settings)).dispose)
        yield Site(settings=settings)


def register(admin: typer.Typer) -> None:
    at_home = Commands(opened=_settings)
    add_commands(admin, None, {
        "doctor": Commands(opened=_site).call(_doctor, "Check database, object store, Dagster, inference servers and the cluster, with a "
            "fix for each problem. Exit code 1 on a problem.", _findings, fails=lambda found: found["problems"] > 0),
        "backup": at_home.call(_back_up, "Write database, objects, keys and base models to an empty directory, and read everything back. "
            "Jobs go on running.", _backed_up, directory=Directory),
        "restore": at_home.call(_restore, "Make a new home (FT_HOME, absent or empty) from a backup, after checking every file of it.",
            _restored, directory=Directory),
    })  # fmt: skip
    add_group(admin, "keys", "Encryption keys of the installation and of tenants' objects.", {
        "rotate": local.call(_rotate, "Add new keys and encrypt with them what the older ones had encrypted. Nothing stops; repeat it if "
            "it was interrupted.", _rotated,
            tenant=option("--tenant", "Only this tenant's key of objects; by default, all keys and the installation's.")),
        "retire": local.call("resources.key_rotation.retire",
            "Remove the older keys of a rotation, once nothing needs them. Backups made before it still need them.", _retired),
    })  # fmt: skip
    add_group(admin, "signing-keys", "Keys that sign adapters and exports; the newest signs, earlier ones still verify.", {
        "list": local.call("control_plane.adapters.signing_keys.list_keys", "List every key that ever signed, newest first.", SIGNING_KEYS,
            shows=SIGNING_KEY),
        "rotate": local.call("control_plane.adapters.signing_keys.rotate", "Make a new key in the key file of this machine.",
            "{id} signs from now on; earlier keys still verify what they signed", shows=SIGNING_KEY),
        "revoke": local.call("control_plane.adapters.signing_keys.revoke",
            "Trust a key no longer, e.g. because it leaked. Rotate first, so that there is a key that signs.",
            "{id} is revoked; the worker signs again what it had signed", shows=SIGNING_KEY, id_=argument("Key id.", metavar="KEY")),
    })  # fmt: skip
    add_group(admin, "audit", "The audit log of all tenants: list, export and verify its chain.", {
        "list": audit_of_all,
        "export": local.call(_export_audit, "Write the whole audit log to a new file, one JSON entry a line, and verify it. Exit code 1 if "
            "an entry does not hold.", _chain, fails=_broken,
            file=argument("New file; it has tenants' data.", type=Path, metavar="FILE", dir_okay=False)),
        "verify": verify_audit,
    })  # fmt: skip


def _doctor(site: Site) -> Any:
    rows = [{"check": name, **asdict(each)} for name, each in findings(site)]
    counts = Counter(row["status"] for row in rows)
    return {"findings": rows, "problems": counts["problem"], "warnings": counts["warning"]}


def _findings(found: Mapping[str, Any]) -> str:
    for each in found["findings"]:
        print(f"{each['status']:<8} {each['check']}: {each['found']}" + (f". Fix: {each['fix']}" if each["fix"] else ""))
    return f"{counted(found['problems'], 'problem')}, {counted(found['warnings'], 'warning')}"


def findings(site: Site) -> Iterator[tuple[str, Finding]]:
    """Yield the findings of all checks, with the check's name."""
    from deploy.doctor import cluster_checks, service_checks
    from deploy.doctor.check_findings import problem, run
    from deploy.doctor.fixes import restart

    if site.settings.embedded_database and not site.settings.home.is_dir():  # checks would write to it
        yield "home", problem(f"{site.settings.home} does not exist; set FT_HOME if the platform is elsewhere", restart(""))
        return
    for name, found in run({**service_checks.CHECKS, **cluster_checks.CHECKS}, site).items():
        yield from ((name, each) for each in found)


def _backed_up(done: Mapping[str, Any]) -> str:
    keys = "without the key file, which is outside of the home" if done["key_file_outside"] else "with the installation's keys"
    lines = [
        f"{done['directory']}: {done['num_files']} files, {done['num_bytes'] / 1e6:.1f} MB, {done['num_rows']} rows of "
        f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(done['taken_at']))} UTC, {keys}; {done['total_s']:.1f} s"
    ]
    if done["absent"]:
        lines.append(f"the database refers to objects that the store does not have: {', '.join(done['absent'])}")
    return "\n".join(lines)


def _restored(done: Mapping[str, Any]) -> str:
    settings = "".join(f"\n  {name}={value}" for name, value in done["settings"].items())
    return "\n".join([
        _backed_up(done),
        f"{done['running']} attempts were running: `ft up` resumes their jobs from the last checkpoint",
        "revoke again what was revoked since, and repeat deletions that were requested since",
        *([f"the stack of the backup had these settings:{settings}"] if settings else []),
    ])  # fmt: skip


def _back_up(settings: Settings, directory: Path) -> Any:
    from deploy.local.backup.home_backup import back_up

    return _backup(back_up(settings, directory.absolute(), say=say))


def _restore(settings: Settings, directory: Path) -> Any:
    from deploy.local.backup.home_restore import restore

    done, running = restore(settings, directory.absolute(), say=say)
    return {**_backup(done), "running": running}


def _backup(done: Backup) -> dict[str, Any]:
    manifest = done.manifest
    names = ("taken_at", "version", "commit", "schema", "num_files", "num_bytes", "num_rows", "key_file_outside", "sha256")
    return {
        "directory": str(done.directory), **{name: getattr(manifest, name) for name in names}, "absent": list(manifest.absent),
        "settings": dict(manifest.settings), "seconds": dict(done.seconds), "total_s": round(sum(done.seconds.values()), 3),
    }  # fmt: skip


def _rotate(platform: Platform, tenant: str | None = None) -> Any:
    from resources import key_rotation

    return asdict(key_rotation.rotate(platform, tenant=tenant))


def _rotated(done: Mapping[str, Any]) -> str:
    added = ", ".join(done["added"]) or "none"
    again = f"{done['num_secrets']} rows of secrets and {done['num_objects']} objects ({done['num_bytes'] / 1e6:.1f} MB)"
    lines = [
        f"new keys: {added}; encrypted again: {again}; the older ones still open everything; after 1 h, `ft admin keys retire` removes them"
    ]
    if done["continued"]:
        lines.append(
            f"no new key for {', '.join(done['continued'])}: a rotation is under way, which this continued. If one of these has leaked, "
            "run `ft admin keys retire`, then rotate again"
        )
    if done["unreadable"]:
        lines.append(f"left as they are, because no key opens them: {', '.join(done['unreadable'])}; restore them from a backup")
    return "\n".join(lines)


def _retired(removed: Mapping[str, int]) -> str:
    named = ", ".join(f"{num} of {owner}" for owner, num in removed.items())
    return f"older keys removed: {named}" if named else "there are no older keys; `ft admin keys rotate` adds new ones"


def audit_of_all(
    tenant: Annotated[str | None, typer.Option("--tenant", help="Only this tenant.")] = None,
    of: account_commands.Of = None,
    kind: account_commands.Kind = None,
    action: account_commands.Action = None,
    actor: account_commands.ByWhom = None,
    since: account_commands.Since = None,
    before: account_commands.Before = None,
    limit: account_commands.Lines = None,
    as_csv: account_commands.AsCsv = False,
    as_jsonl: account_commands.AsJsonl = False,
    as_json: Json = False,
) -> None:
    """List changes in all tenants and of the platform itself, newest first."""
    from control_plane.tenants.audit_log import Wanted, document, every

    wanted = Wanted(
        object_id=of, object_type=kind, action=action, actor=actor, since_s=unix_seconds(since, "since"),
        before_s=unix_seconds(before, "before"),
    )  # fmt: skip
    with open_local() as platform:
        lines = every(platform, tenant, wanted, at_most=account_commands.at_most(limit, as_csv or as_jsonl))
        account_commands.show_audit((document(line) for line in lines), as_csv, as_jsonl, as_json)


def _chain(found: Mapping[str, Any]) -> str:
    lines = [f"{found['num_entries']} entries, {found['num_redacted']} of them erased; head {found['head'] or 'none'}"]
    if found["findings"]:
        return "\n".join([*lines, *found["findings"], "the audit log was tampered with: compare it with an earlier export or a backup"])
    return "\n".join([*lines, "every entry holds; keep the head in a place that this platform's operators cannot change"])


def _broken(found: Mapping[str, Any]) -> bool:
    return bool(found["findings"])


def _export_audit(platform: Platform, file: Path) -> Any:
    from control_plane.tenants.audit import audit_entries

    if file.exists():
        raise InvalidRequest(f"{file} exists; name a new file")
    return _verdict(audit_entries.export(platform, file))


def verify_audit(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", exists=True, dir_okay=False, help="An exported file; by default, the database.")
    ] = None,
    head: Annotated[
        str | None,
        typer.Option("--head", metavar="POSITION:SHA256", help="Head that an earlier export printed: what came before is unchanged."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Verify the audit log of the database, or an exported file without one. Exit code 1 if an entry was changed, removed or added."""
    from control_plane.tenants.audit import audit_entries

    if file is not None:
        found = audit_entries.verify_file(file, head=_head(head))
    else:
        with open_local() as platform:
            found = audit_entries.verify(platform, head=_head(head))
    shown = _verdict(found)
    show(shown, _chain, as_json=as_json)
    if _broken(shown):
        raise typer.Exit(Exit.FAILED)


def _head(text: str | None) -> Head | None:
    from control_plane.tenants.audit.audit_chain import parse_head

    try:
        return None if text is None else parse_head(text)
    except ValueError as error:
        raise InvalidRequest(str(error), param="head") from error


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "num_entries": verdict.num_entries, "num_redacted": verdict.num_redacted, "head": verdict.head and str(verdict.head),
        "findings": list(verdict.findings),
    }  # fmt: skip
