"""``ft check`` (offline), ``ft upload`` and ``ft datasets``."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from core.errors import FtError, InvalidDataset, NotFound
from engine.data.report_lines import report_lines
from ft_client.cli import session
from ft_client.cli.exits import Exit, show_error
from ft_client.cli.output import Json, ago, fields, print_json, say
from ft_client.cli.record_views import Limit, add_commands, add_group, count, given, listing, since
from ft_client.cli.remote import connect, remote

if TYPE_CHECKING:
    from engine.data.policies import Policies
    from ft_client import FtClient

Map = Annotated[
    str | None, typer.Option("--map", help="Columns of a CSV or Parquet file: `text=prompt,category=completion` (COLUMN=FIELD).")
]
Model = Annotated[
    str | None, typer.Option("--model", "-m", help="Base model: its tokenizer is used to count tokens and detect control tokens.")
]
Policy = Annotated[
    list[str] | None,
    typer.Option("--policy", metavar="CHECK=VERDICT", help="Policy of a check, such as `pii=redact`; may be repeated."),
]
Encoding = Annotated[
    str | None, typer.Option("--encoding", help="Encoding of the file if it is not UTF-8: windows-1252, utf-16, mac-roman, ...")
]
RowsAt = Annotated[str | None, typer.Option("--rows-at", metavar="KEY", help="Key of the rows, in a file that is one JSON object.")]
Offline = Annotated[
    bool,
    typer.Option("--offline", help="Do not ask the platform for limits, contamination lists and models; compare with this directory's."),
]
HUB = "hf://"
VERSIONS = listing({
    "ID": "id", "NAME": lambda d: f"{d['name']} v{d['version']}", "FORMAT": "format", "ROWS": count("row_count"),
    "TOKENS": count("token_count"), "REVIEW": "review", "CREATED": since("created_at"),
})  # fmt: skip


def register(app: typer.Typer) -> None:
    add_commands(app, "Data", check, upload)
    versions = {"list": list_versions, "show": show, "approve": approve}
    add_group(app, "datasets", versions, help="Validated, immutable dataset versions.", panel="Data")


def parse_map(text: str | None) -> dict[str, str] | None:
    """``{"text": "prompt"}`` for ``text=prompt``; a usage error for anything else."""
    from engine.data.readers.column_map import parse_column_map

    try:
        return None if text is None else parse_column_map(text)
    except InvalidDataset as error:
        raise typer.BadParameter(error.message) from None


def parse_policies(pairs: list[str] | None, *, encoding: str | None = None, rows_at: str | None = None) -> Mapping[str, object] | None:
    """``{"pii": "redact"}`` for ``pii=redact``; numbers are numbers; a usage error for what is no pair.

    With them goes how the file is read: its `encoding`, and the key `rows_at` that holds its rows.
    """
    found: dict[str, object] = {}
    for pair in pairs or ():
        name, sep, value = pair.partition("=")
        if not (name.strip() and sep and value.strip()):
            raise typer.BadParameter(f"{pair!r} is not CHECK=VERDICT; write --policy pii=redact")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            found[name.strip()] = value.strip()
    return {**found, **given(encoding=encoding, rows_at=rows_at)} or None


def check(
    file: Annotated[str, typer.Argument(help="JSONL, JSON, CSV or Parquet (.gz and .zst too), or hf://ORG/NAME@COMMIT.")],
    column_map: Map = None,
    model: Model = None,
    policy: Policy = None,
    encoding: Encoding = None,
    rows_at: RowsAt = None,
    max_seq_len: Annotated[
        int | None, typer.Option("--max-seq-len", min=2, help="Tokens after which an example is truncated; default: the model's context.")
    ] = None,
    as_validation: Annotated[
        bool, typer.Option("--as-validation", help="Check it as a validation file, which may have fewer than the 10 examples of training.")
    ] = False,
    offline: Offline = False,
    html: Annotated[Path | None, typer.Option("--html", help="Write the report as a page to this file.")] = None,
    as_json: Json = False,
) -> None:
    """Check a dataset locally, without uploading it; the report is the same as the platform's.

    With an address and a key (`ft login`), the limits of your tier, the contamination lists and the model's tokenizer are the platform's;
    otherwise the report names what it was not compared with. Exit codes: 0 valid, 1 invalid, 2 unreadable.
    """
    from engine.data.policies import MIN_TRAINING_EXAMPLES, Policies

    asked = parse_policies(policy, encoding=encoding, rows_at=rows_at) or {}
    mapping, policies = parse_map(column_map), Policies.from_request(asked, min_examples=1 if as_validation else MIN_TRAINING_EXAMPLES)
    with local_file(file) as path:
        report = _validate(path, file, mapping, model, policies, max_seq_len, offline=offline)
    if html is not None:
        from control_plane.console.documents.report_page import report_page

        html.write_text(report_page(report, name=file))
        say(f"the report is in {html}")
    if as_json:
        print_json(report)
    elif html is None:
        show_report(report, name=file)
    if not report["valid"]:
        raise typer.Exit(Exit.FAILED)


@contextmanager
def local_file(given: str) -> Iterator[Path]:
    """Yields the file's path; a dataset of the Hub is fetched into a temporary directory. Exits with code 2 if it cannot be read."""
    if given.startswith(HUB):
        from control_plane.platform.settings import load
        from engine.data.readers.hub import hub_dataset

        settings = load()
        access: Any = {"endpoint": settings.hub_endpoint, "token": settings.hub_token or None}
        with tempfile.TemporaryDirectory(prefix="ft-hub-") as directory:
            try:
                pinned = hub_dataset.parse_hub_id(given, scratch=Path(directory), **access)
                path = hub_dataset.fetch(pinned, Path(directory), **access).path
            except FtError as error:
                show_error(error, as_json=False)
                raise typer.Exit(Exit.USAGE) from error
            yield path
        return
    file = Path(given)
    if not file.is_file() or not os.access(file, os.R_OK):
        say(f"ft: {file} cannot be read: {'it is not a file' if file.exists() else 'the file does not exist'} [unreadable_file]")
        raise typer.Exit(Exit.USAGE)
    yield file


def _validate(
    file: Path,
    called: str,
    mapping: Mapping[str, str] | None,
    model: str | None,
    policies: Policies,
    max_seq_len: int | None,
    *,
    offline: bool,
) -> Mapping[str, Any]:
    """Return the report that the platform makes of `file`, and what could not be compared with the platform (``platform``)."""
    from control_plane.platform.settings import load
    from engine.data.ingest import Policies, validate_file
    from engine.data.report.validation_report import counted_by
    from ft_client.cli.data import platform_inputs

    with tempfile.TemporaryDirectory(prefix="ft-check-") as directory:
        inputs = platform_inputs.collect(Path(directory), model=model, lists=policies.contamination != "off", offline=offline)
        if policies.toxicity != "off":
            inputs = replace(inputs, not_compared=(*inputs.not_compared, "the platform's toxicity classifier"))
        _check_size(file, inputs.max_file_bytes)
        base = inputs.base
        if max_seq_len is not None and (base is None or max_seq_len > base.context_length):
            raise typer.BadParameter(
                "name the --model that counts tokens" if base is None else f"{base.id} takes {base.context_length} tokens"
            )
        result = validate_file(
            file,
            filename=file.name,
            called=called,
            column_map=mapping,
            policies=Policies(**{**policies.to_dict(), "max_examples": inputs.max_examples}),
            model_dir=base.directory if base else None,
            max_seq_len=(max_seq_len or base.context_length) if base else None,
            suites=inputs.suites,
            classifier=load().toxicity_classifier,
        )
    counted = None if base is None else {**counted_by(base), **given(max_seq_len=max_seq_len)}
    if inputs.not_compared:
        say(f"not compared with {', '.join(inputs.not_compared)}{f': {inputs.reason}' if inputs.reason else ''}")
    return {**asdict(replace(result.report, model=counted)), "platform": inputs.to_dict()}


def _check_size(file: Path, most: int | None) -> None:
    if most is not None and (size := file.stat().st_size) > most:
        raise InvalidDataset(
            f"{file.name} has {size:,} bytes, more than the {most:,} that your tier may upload; split it, compress it (.gz, .zst), or ask "
            "for another tier",
            code="file_too_large",
            param="file",
        )


def show_report(report: Mapping[str, Any], *, name: str) -> None:
    """Print a validation report as text."""
    for line in report_lines(report, name=name):
        print(line)


def upload(
    file: Annotated[str, typer.Argument(help="JSONL, JSON, CSV or Parquet (.gz and .zst too), or hf://ORG/NAME@COMMIT.")],
    column_map: Map = None,
    model: Model = None,
    policy: Policy = None,
    encoding: Encoding = None,
    rows_at: RowsAt = None,
    hub_token: Annotated[bool, typer.Option("--hub-token", help="Send FT_HUB_TOKEN, for a dataset that is not public.")] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until a large file is validated, showing progress.")] = True,
    as_json: Json = False,
) -> None:
    """Upload a dataset; the platform validates it. Exit code 1 when it is not valid, with every bad row.

    From 64 MiB on it goes up in parts: the same command once more goes on where it was interrupted.
    """
    options = {"column_map": parse_map(column_map), "policies": parse_policies(policy, encoding=encoding, rows_at=rows_at), "model": model}
    if not file.startswith(HUB) and not Path(file).is_file():
        raise typer.BadParameter(f"{file!r} is not a file here")
    if hub_token:
        options |= {"hub_token": _hub_token(file)}
    with connect() as client:
        made = send(client, file, options, wait=wait)
        if as_json:
            print_json(made)
        else:
            accepted(client, made)
            print(made["id"])
            fields({"file": made["filename"], "bytes": made["bytes"], "status": made["status"], "dataset": made["dataset_id"]})
    if made["status"] == "error":
        raise typer.Exit(Exit.FAILED)


def _hub_token(file: str) -> str:
    """Asked for by name: a token that happens to be in the environment is not sent to another machine."""
    from control_plane.platform.settings import load

    token = load().hub_token
    if not token or not file.startswith(HUB):
        raise typer.BadParameter("--hub-token is for hf:// ids, and needs FT_HUB_TOKEN to be set")
    return token


def send(client: FtClient, given: str, options: Mapping[str, Any], *, wait: bool = True) -> Mapping[str, Any]:
    """Upload a file, or have the platform import it; with `wait`, it comes back validated."""
    from ft_client.cli.data import part_uploads

    if given.startswith(HUB):
        made = client.datasets.import_from_hub(hub_id=given, **options)
    elif Path(given).stat().st_size >= part_uploads.FROM_BYTES:
        made = part_uploads.send_in_parts(client, session.api_url(), Path(given), options)
    else:
        made = client.files.create(Path(given), **options)
    if made["status"] == "uploaded" and wait:
        from ft_client.cli.job_progress import follow_validation

        return follow_validation(client, made["id"])
    return made


@remote(VERSIONS)
def list_versions(client: FtClient, limit: Limit = 20) -> Any:
    """List dataset versions, newest first."""
    return client.datasets.list(limit=limit).take(limit)


def show(
    dataset: Annotated[str, typer.Argument(metavar="ID", help="Dataset id (`ft datasets list`), or a file id for its report.")],
    as_json: Json = False,
) -> None:
    """Show a dataset version and its report."""
    with connect() as client:
        version = client.datasets.retrieve(dataset) if dataset.startswith("ds_") else None
        report = client.datasets.report(dataset)
    if as_json:
        print_json({"dataset": version, "report": report})
        return
    if version is not None:
        hidden = ("object", "report_url")
        fields({k.replace("_", " "): ago(v) if k.endswith("_at") else v for k, v in version.items() if k not in hidden})
    show_report(report, name=dataset)


@remote("dataset {dataset}: review {review}")
def approve(client: FtClient, dataset: Annotated[str, typer.Argument(metavar="ID", help="Dataset id.")]) -> Any:
    """Let jobs train on a dataset that a policy holds for review."""
    return client.datasets.approve(dataset)


def accepted(client: FtClient, made: Mapping[str, Any]) -> Mapping[str, Any]:
    """`made` if the upload is valid or still being looked at; else its report on stderr and a refusal."""
    if made["status"] != "error":
        return made
    try:
        for line in report_lines(client.datasets.report(made["id"]), name=made["filename"]):
            say(line)
    except NotFound:
        pass  # refused before a report could be made; the reason is in the details
    raise InvalidDataset(f"{made['filename']} ({made['id']}) is not valid: {made.get('status_details') or 'see the report above'}")
