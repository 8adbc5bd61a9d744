"""``ft export``: an adapter as files or on a Hub. ``ft export-data``: everything the tenant has stored."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from core.errors import Conflict, FtError, IntegrityError, InvalidRequest, Unavailable
from ft_client.cli.output import Json, print_json, say
from ft_client.cli.session import connect, hub_endpoint, remote

if TYPE_CHECKING:
    from ft_client import FtClient, Record
    from ft_client.hub_upload import Pushed

AdapterId = Annotated[str, typer.Argument(metavar="ADAPTER", help="Adapter id or model name (`ft adapters` lists them).")]
Format = Annotated[str, typer.Option("--format", help="adapter, gguf_adapter, merged, gguf or tokenizer.")]
Precision = Annotated[str | None, typer.Option("--precision", help="For gguf: f32, f16 (default), q8_0, q4_k_m. For merged: fp8.")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="New or empty directory for the files.")]
Push = Annotated[str | None, typer.Option("--push", help="Repository ORG/NAME of the Hub at FT_HUB_ENDPOINT; created if missing.")]
Token = Annotated[str, typer.Option("--token", envvar="HF_TOKEN", help="Token of the Hub for --push; sent only to the Hub.")]


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Models")(export)
    app.command("export-data", rich_help_panel="Account")(export_data)


def export(
    adapter: AdapterId,
    format: Format = "adapter",
    precision: Precision = None,
    out: Out = None,
    push: Push = None,
    token: Token = "",
    public: Annotated[bool, typer.Option("--public", help="Allow --push to create, or push to, a public repository.")] = False,
    as_json: Json = False,
) -> None:
    """Export an adapter, merged weights, GGUF files or the tokenizer: to a directory, to a Hub, or both."""
    if out is None and push is None:
        raise InvalidRequest("choose a destination: -o DIR, --push ORG/NAME, or both", param="out")
    from engine.adapters import ENVELOPE_FILE, unpack_export

    endpoint = _endpoint(push, token)
    if out is not None and out.exists() and any(out.iterdir()):
        raise Conflict(f"{out} is not empty; name a new directory", code="directory_not_empty", param="out")
    with connect() as client, tempfile.TemporaryDirectory(prefix="ft-export-", dir=_beside(out)) as scratch:
        made = client.exports.create(adapter, format=format, precision=precision)
        if made["status"] != "ready" or made["signature"] is None:
            say(f"{made['id']} is {made['status']}; {_awaited(made['status'])}")
            made = client.exports.wait(adapter, made["id"])
        if made["status"] == "failed":
            why = made["error"] or {"code": None, "message": f"export {made['id']} failed"}
            raise FtError(why["message"] or "", code=why["code"])
        archive = Path(scratch) / "export.tar"
        if client.exports.download(adapter, made["id"], archive) != made["sha256"]:
            raise IntegrityError(f"export {made['id']} did not arrive whole; run the command again")
        files = Path(scratch) / "files"  # moved to `out` once everything has worked, so that the command can be run again
        unpack_export(archive, files)
        archive.unlink()
        (files / ENVELOPE_FILE).write_text(json.dumps(made["signature"], indent=1, sort_keys=True), encoding="utf-8")
        pushed = None if push is None else _pushed(push, files, made, endpoint=endpoint, token=token, private=not public)
        if out is not None:
            out.mkdir(exist_ok=True)
            for file in files.iterdir():
                shutil.move(file, out / file.name)
    _tell(made, out, pushed, as_json=as_json)


@remote("{file}: {members} files, {bytes} bytes, verified against its manifest")
def export_data(
    client: FtClient, out: Annotated[Path, typer.Option("--out", "-o", help="New file for the ZIP archive.")] = Path("ft-export.zip")
) -> Any:
    """Download everything your tenant has stored as one ZIP archive: files, datasets, adapters, logs, and records as JSON lines."""
    if out.exists():
        raise Conflict(f"{out} exists; name a new file", code="file_exists", param="out")
    with tempfile.TemporaryDirectory(prefix="ft-export-", dir=_beside(out)) as scratch:
        archive = Path(scratch) / out.name
        sha256 = client.data_export.download(archive)
        members = _verified(archive)
        os.replace(archive, out)  # noqa: PTH105
    return {"file": str(out), "sha256": sha256, "members": len(members), "bytes": sum(m["bytes"] for m in members)}


def _verified(archive: Path) -> Sequence[Mapping[str, Any]]:
    """Verify members against the manifest; ``IntegrityError`` if one is missing, differs, or is not listed."""
    with zipfile.ZipFile(archive) as file:
        members: Sequence[Mapping[str, Any]] = json.loads(file.read("manifest.json"))["members"]
        if differ := sorted(set(file.namelist()) ^ {"manifest.json", *(member["path"] for member in members)}):
            raise IntegrityError(f"{differ[0][:160]} is only in {archive.name} or only in its manifest; run the command again")
        for member in members:
            with file.open(member["path"]) as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() != member["sha256"]:  # type: ignore[arg-type]
                    raise IntegrityError(
                        f"{member['path']} in {archive.name} differs from its sha256 in the manifest; run the command again"
                    )
    return members


def _endpoint(push: str | None, token: str) -> str:
    if push is None:
        return ""
    endpoint = hub_endpoint()
    if not endpoint:
        raise InvalidRequest("no Hub is set up on this machine; set FT_HUB_ENDPOINT to its address", code="hub_disabled", param="push")
    if not token:
        raise InvalidRequest(
            f"pushing to {push} needs a token that may write there: --token, or HF_TOKEN", code="no_hub_token", param="token"
        )
    return endpoint


def _awaited(status: str) -> str:
    if status == "ready":
        return "the worker signs it within a minute"
    return "merged weights and GGUF files wait for a device as jobs do"


def _beside(out: Path | None) -> Path | None:
    """A place with room for the files also has room for the archive."""
    if out is None:
        return None
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    return out.absolute().parent


def _pushed(repo: str, files: Path, made: Record, *, endpoint: str, token: str, private: bool) -> Pushed:
    from ft_client.hub_upload import Pushed, Upload, upload

    message = f"Export {made['format']} of {made['adapter_id']}"
    answer = upload(Upload(endpoint=endpoint, token=token, repo=repo, directory=str(files), message=message, private=private))
    if isinstance(answer, Pushed):
        return answer
    if answer.error == "public":
        raise Conflict(
            f"{repo} already exists on {endpoint} and is public; add --public to push to it anyway, or name a new repository",
            code="hub_repo_public",
            param="push",
        )
    if answer.error == "refused":
        raise InvalidRequest(f"{endpoint} refuses the token for {repo} ({answer.detail})", code="hub_push_refused", param="push")
    raise Unavailable(f"{repo} could not be pushed to {endpoint} ({answer.detail}); run the command again", code="hub_unavailable")


def _tell(made: Record, out: Path | None, pushed: Pushed | None, *, as_json: bool) -> None:
    if as_json:
        print_json({**made, "directory": None if out is None else str(out), "pushed": pushed and asdict(pushed)})
        return
    proof = (made["manifest"] or {}).get("proof")
    if proof:
        say(f"verified: logits differ from base and adapter by {proof['mean_difference']:.2g} of their standard deviation")
    if out is not None:
        print(os.path.relpath(out))
    if pushed is not None:
        print(pushed.url)
