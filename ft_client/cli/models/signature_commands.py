"""``ft models keys|verify`` and ``ft adapters signature``: whether downloaded files are those that the platform signed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from core.errors import InvalidRequest
from ft_client.cli.exits import Exit
from ft_client.cli.output import Json, print_json, say
from ft_client.cli.remote import connect

if TYPE_CHECKING:
    from engine.adapters.package import Refusal

Out = Annotated[Path | None, typer.Option("--out", "-o", help="File to write; default: standard output.")]


def keys(out: Out = None, as_json: Json = False) -> None:
    """Print the platform's public keys, to keep for `ft models verify --keys`."""
    with connect() as client:
        _written(client.models.signing_keys(), out, as_json=as_json)


def signature(
    adapter: Annotated[str, typer.Argument(metavar="ID", help="Adapter id or model name (`ft adapters` lists them).")],
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Print the signature of a registered adapter: a DSSE envelope over its manifest and files."""
    with connect() as client:
        _written(client.adapters.signature(adapter), out, as_json=as_json)


def verify(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of an export.")],
    keys: Annotated[
        Path | None, typer.Option("--keys", help="Public keys, saved with `ft models keys`; default: asks the platform.")
    ] = None,
    signature: Annotated[Path | None, typer.Option("--signature", help="Signature, if it is not in the folder.")] = None,
    as_json: Json = False,
) -> None:
    """Verify that the files of a folder are those that the platform signed. With --keys, without a network."""
    from engine.adapters.signatures import public_keys, signed_folder

    statement, refused = signed_folder.check(folder, public_keys.read_key_set(_key_set(keys)), envelope=signature)
    if as_json:
        print_json({"verified": not refused, "statement": statement, "refusals": [{"code": r.code, "detail": r.detail} for r in refused]})
    else:
        say(_verdict(folder, statement, refused))
    if refused:
        raise typer.Exit(Exit.FAILED)


def _key_set(file: Path | None) -> object:
    if file is None:
        with connect() as client:
            return client.models.signing_keys()
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError) as e:
        raise InvalidRequest(f"{file} cannot be read as a key set: {e}; `ft models keys -o {file}` saves one", param="keys") from e


def _verdict(folder: Path, statement: Mapping[str, Any] | None, refused: list[Refusal]) -> str:
    if refused or statement is None:
        return "\n".join(["NOT VERIFIED", *(f"  {one.code}: {one.detail}" for one in refused)])
    build, run = statement["predicate"]["buildDefinition"], statement["predicate"]["runDetails"]
    made = f"{build['externalParameters']['model']}, signed by {run['builder']['id']}"
    return f"VERIFIED: the {len(statement['subject'])} files of {folder} are {made}"


def _written(document: Any, out: Path | None, *, as_json: bool) -> None:
    if out is None:
        print_json(document)
        return
    out.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if as_json:
        print_json({"file": str(out)})
    else:
        print(out)
