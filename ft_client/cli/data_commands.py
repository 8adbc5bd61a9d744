"""Commands on data: ``ft demo-data``, ``check``, ``upload``, ``preview``, ``datasets``, ``files``, ``contamination``, ``suites``."""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from core.errors import Conflict, FtError, InvalidDataset, InvalidRequest, NotFound
from ft_client.cli import session
from ft_client.cli.command_options import Encoding, Map, Policy, RowsAt, parse_map, parse_policies
from ft_client.cli.commands import Limit, add_commands, add_group, argument, count, given, listing, option, since
from ft_client.cli.output import Exit, Json, ago, fields, print_json, say, show_error
from ft_client.cli.session import connect, remote

if TYPE_CHECKING:
    from engine.data import Policies
    from ft_client import FtClient, Record

Model = Annotated[
    str | None, typer.Option("--model", "-m", help="Base model: its tokenizer is used to count tokens and detect control tokens.")
]
Offline = Annotated[
    bool,
    typer.Option("--offline", help="Do not ask the platform for limits, contamination lists and models; compare with this directory's."),
]
Dataset = argument("Dataset id.", metavar="ID")
FileId = argument("File id (`ft files list`).", metavar="ID")
ListName = Annotated[str, typer.Argument(help="Name of the list: letters, digits, '_' and '-'.")]
ListFile = Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="JSONL, JSON, CSV or Parquet; a row is an item.")]
ListField = Annotated[str, typer.Option("--field", help="Field that holds the question; several with commas between.")]
SuiteName = argument("Name of the suite: letters, digits, '_' and '-'.")
HUB = "hf://"
VERSIONS = listing({
    "ID": "id", "NAME": lambda d: f"{d['name']} v{d['version']}", "FORMAT": "format", "ROWS": count("row_count"),
    "TOKENS": count("token_count"), "REVIEW": "review", "CREATED": since("created_at"),
})  # fmt: skip
SUITES = listing({"NAME": "name", "OWNER": "owner", "ITEMS": count("num_items"), "FIELD": "field", "CREATED": since("created_at")})
CAPABILITIES = listing({
    "NAME": lambda s: s["name"] + (" (default)" if s["default"] else ""), "VERSION": "version", "SHOTS": count("num_fewshot", "?"),
    "ITEMS": count("num_items", "?"), "READY": lambda s: "yes" if s["ready"] else f"no: {s['reason']}",
})  # fmt: skip
SCORED = listing({
    "NAME": "name", "VERSION": count("version"), "ITEMS": count("num_items"), "SCORED BY": "metric",
    "AT LEAST": lambda s: "" if s["min_score"] is None else f"{s['min_score']:g}", "MAX DROP": lambda s: f"{s['max_drop']:g}",
    "CREATED": since("created_at"),
})  # fmt: skip
ADDED = "contamination list {name}: {num_items} items; new uploads are checked for them"
REMOVED = "contamination list {name} is removed"


def _expiry(file: Record) -> str:
    at = file.get("expires_at")
    return "never" if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


FILES = listing({
    "ID": "id", "FILE": "filename", "BYTES": count("bytes"), "PURPOSE": "purpose", "STATUS": "status", "CREATED": since("created_at"),
    "EXPIRES": _expiry,
})  # fmt: skip


def register(app: typer.Typer) -> None:
    add_commands(app, "Data", {"demo-data": demo_data, "check": check, "upload": upload, "preview": preview})
    add_group(app, "datasets", "Validated, immutable dataset versions.", {
        "list": remote.call("datasets.list", "List dataset versions, newest first.", VERSIONS, limit=(Limit, 20)),
        "show": show_dataset,
        "approve": remote.call("datasets.approve", "Let jobs train on a dataset that a policy holds for review.",
            "dataset {dataset_id}: review {review}", dataset_id=Dataset),
    }, panel="Data")  # fmt: skip
    add_group(app, "files", "Uploaded files.", {
        "list": remote.call("files.list", "List files, newest first.", FILES,
            limit=(option("--limit", "", "-n", min=1, max=10_000, type=int), 20)),
        "show": remote.call("files.retrieve", "Show a file; `ft datasets show ID` prints its report.", _show_file, file_id=FileId),
        "download": remote.call(_download, "Download the bytes as uploaded, and verify them against the file's sha256.",
            "{file}: sha256 {sha256}", file=FileId,
            out=option("--out", "Output file; by default its name, in this directory.", "-o", type=Path | None)),
        "validate": remote.call("files.validate", "Validate a file again after the platform failed to.",
            "file {id} is {status}; `ft files show {id}` shows its progress", file_id=FileId),
        "delete": remote.call("files.delete",
            "Delete a file's bytes; the dataset version made from them stays. Refused while an unfinished job uses it.",
            "file {file_id} is deleted", file_id=FileId),
    }, panel="Data")  # fmt: skip
    lists = {
        "add": remote.call(_add_list, "Register a contamination list of your own; uploads from now on are checked for its items.", ADDED,
            name=ListName, file=ListFile, field=(ListField, "question"), column_map=Map),
        "list": remote.call("suites.list", "List the contamination lists that ship, the operator's and yours.", SUITES),
        "remove": remote.call("suites.delete", "Remove one of your contamination lists.", REMOVED, name=ListName),
    }  # fmt: skip
    add_group(app, "contamination", "Contamination lists that your datasets are checked against.", lists, panel="Data")
    add_group(app, "suites", "General tasks that jobs are evaluated with; also the commands of `ft contamination`.", {
        "capability": remote.call("capability_suites.list",
            "List general tasks that jobs can be evaluated with (eval_config.capability), and which are ready.", CAPABILITIES),
        **lists,
    }, panel="Data")  # fmt: skip
    add_group(app, "scored-suites", "Suites of your own that models are evaluated with.", {
        "add": remote.call(_add_scored, "Add a suite, or the next version of one: prompts with answers, scored by a metric or a grader.",
            "scored suite {name}, version {version}: {num_items} items; evaluate with it: ft submit FILE --suite {name}", name=SuiteName,
            file=argument("JSONL, JSON, CSV or Parquet; a row is an item with its answer.", type=Path, exists=True, dir_okay=False),
            metric=option("--metric", "exact_match, accuracy, rouge_l, json_valid, ..."),
            grader=option("--grader", "JSON file with a grader, in place of a metric.", type=Path | None, exists=True, dir_okay=False),
            min_score=option("--min-score", "Least score that a model needs, from 0 to 1.", type=float | None),
            max_drop=option("--max-drop", "Most that it may fall below its base model; 0.02 by default.", type=float | None)),
        "list": remote.call("scored_suites.list", "List the newest version of each of your scored suites.", SCORED),
        "versions": remote.call("scored_suites.versions", "List the versions of a scored suite, newest first.", SCORED, name=SuiteName),
        "remove": remote.call("scored_suites.delete", "Remove a scored suite with all of its versions.", "scored suite {name} is removed",
            name=SuiteName),
    }, panel="Data")  # fmt: skip


def demo_data(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to write to; created if missing.")], as_json: Json = False
) -> None:
    """Write the demo's support tickets: 1,500 rows to train on and 240 held out; the same bytes each time."""
    from ft_client.demo import tickets

    texts = {directory / name: text for name, text in tickets.files().items()}
    for path, text in texts.items():
        if path.exists() and (not path.is_file() or path.read_bytes() != text.encode()):
            raise Conflict(f"{path} exists with other content; name another directory", code="file_exists", param="DIR")
    directory.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    training, validation = (str(directory / name) for name in (tickets.TICKETS, tickets.HOLDOUT))
    following = f"ft check {shlex.quote(training)} --model demo-llama-3m"
    if as_json:
        rows = [text.count("\n") for text in texts.values()]
        print_json(
            {"training_file": training, "validation_file": validation, "rows": rows[0], "validation_rows": rows[1], "next": following}
        )
        return
    for path, text in texts.items():
        print(path)
        say(f"wrote {text.count(chr(10)):,} rows to {path}")
    say(f"next: {following}")


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
    from engine.data import MIN_TRAINING_EXAMPLES, Policies

    asked = parse_policies(policy, encoding=encoding, rows_at=rows_at) or {}
    mapping, policies = parse_map(column_map), Policies.from_request(asked, min_examples=1 if as_validation else MIN_TRAINING_EXAMPLES)
    with local_file(file) as path:
        report = _validate(path, file, mapping, model, policies, max_seq_len, offline=offline)
    if html is not None:
        html.write_text(_page(report, name=file))
        say(f"the report is in {html}")
    if as_json:
        print_json(report)
    elif html is None:
        _show_report(report, name=file)
    if not report["valid"]:
        raise typer.Exit(Exit.FAILED)


def _page(report: Mapping[str, Any], *, name: str) -> str:
    try:
        from control_plane.console.documents.report_page import report_page
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            "--html needs the platform's package on this machine; leave it out, or upload the file", param="html"
        ) from error
    return report_page(report, name=name)


@contextmanager
def local_file(given: str) -> Iterator[Path]:
    """Yield the file's path; a dataset of the Hub is fetched into a temporary directory. Exits with code 2 if it cannot be read."""
    if given.startswith(HUB):
        from engine.data import fetch_from_hub, parse_hub_id

        access: Any = {"endpoint": session.hub_endpoint(), "token": session.setting("FT_HUB_TOKEN") or None}
        with tempfile.TemporaryDirectory(prefix="ft-hub-") as directory:
            try:
                pinned = parse_hub_id(given, scratch=Path(directory), **access)
                path = fetch_from_hub(pinned, Path(directory), **access).path
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
    from engine.data import Policies, counting_tokenizer, validate_file
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
            file, filename=file.name, called=called, column_map=mapping,
            policies=Policies(**{**policies.to_dict(), "max_examples": inputs.max_examples}),
            model_dir=base.directory if base else None, max_seq_len=(max_seq_len or base.context_length) if base else None,
            suites=inputs.suites, classifier=session.setting("FT_TOXICITY_CLASSIFIER") or "builtin",
        )  # fmt: skip
    counted = None if base is None else {**counting_tokenizer(base), **given(max_seq_len=max_seq_len)}
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


def _show_report(report: Mapping[str, Any], *, name: str) -> None:
    from engine.data import report_lines

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
    if hub_token:  # asked for by name: a token that happens to be in the environment is not sent to another machine
        options |= {"hub_token": session.setting("FT_HUB_TOKEN")}
        if not options["hub_token"] or not file.startswith(HUB):
            raise typer.BadParameter("--hub-token is for hf:// ids, and needs FT_HUB_TOKEN to be set")
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


def send(client: FtClient, given: str, options: Mapping[str, Any], *, wait: bool = True) -> Mapping[str, Any]:
    """Upload a file, or have the platform import it; with `wait`, it comes back validated."""
    from ft_client.cli.data import part_uploads

    made: Mapping[str, Any]
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


def accepted(client: FtClient, made: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `made` if the upload is valid or still being validated; else print its report to stderr and refuse it."""
    from engine.data import report_lines

    if made["status"] != "error":
        return made
    try:
        for line in report_lines(client.datasets.report(made["id"]), name=made["filename"]):
            say(line)
    except NotFound:
        pass  # refused before a report could be made; the reason is in the details
    raise InvalidDataset(f"{made['filename']} ({made['id']}) is not valid: {made.get('status_details') or 'see the report above'}")


def preview(
    subject: Annotated[
        str, typer.Argument(metavar="FILE_OR_ID", help="A local dataset file (nothing is uploaded), or the id of a dataset or file.")
    ],
    model: Annotated[str, typer.Option("--model", "-m", help="Base model whose template and tokenizer are used.")] = "demo-llama-3m",
    num_examples: Annotated[int, typer.Option("--num-examples", "-n", min=1, max=100)] = 5,
    max_seq_len: Annotated[int | None, typer.Option("--max-seq-len", min=1, help="Tokens after which an example is truncated.")] = None,
    column_map: Map = None,
    encoding: Encoding = None,
    rows_at: RowsAt = None,
    offline: Offline = False,
    as_json: Json = False,
) -> None:
    """Show the first examples exactly as they are trained on: rendered text, tokens, which parts carry loss, what is truncated."""
    if subject.startswith(("ds_", "file-")) and not Path(subject).is_file():
        with connect() as client:
            shown = client.datasets.preview(subject, model=model, num_examples=num_examples, max_seq_len=max_seq_len)["data"]
    else:
        with local_file(subject) as path:
            reading = {"column_map": parse_map(column_map), "policies": parse_policies(None, encoding=encoding, rows_at=rows_at)}
            shown = _preview_here(path, model, reading, num_examples, max_seq_len, offline=offline)
    if as_json:
        print_json(shown)
        return
    from core.typed_json import from_json
    from engine.data import Preview, preview_lines

    for one in shown:
        for line in preview_lines(from_json(Preview, one), colour=sys.stdout.isatty()):
            print(line)


def _preview_here(
    path: Path, model: str, reading: Mapping[str, Any], num_examples: int, max_seq_len: int | None, *, offline: bool
) -> Sequence[Mapping[str, Any]]:
    from engine.data import ChatTokenizer, Policies, load_rows, validate_file
    from engine.data import preview as previewed
    from ft_client.cli.data import platform_inputs

    with tempfile.TemporaryDirectory(prefix="ft-preview-") as directory:
        base, reason = platform_inputs.base_model(Path(directory), model, offline=offline)
        assert base.directory is not None
        if reason is not None:
            say(f"shown with the {model} of this directory, not with the platform's tokenizer and template: {reason}")
        rows = Path(directory) / "rows.parquet"
        policies = Policies.from_request(reading["policies"] or {}, bad_rows="drop")
        report = validate_file(path, filename=path.name, column_map=reading["column_map"], policies=policies, output=rows).report
        if not report.valid:
            raise InvalidDataset(f"{path} has nothing to show: {report.summary()}; `ft check {path}` lists every problem")
        if bad := report.stats["bad_rows"]:
            say(f"{bad:,} row{' with problems is' if bad == 1 else 's with problems are'} not shown; `ft check {path}` lists every problem")
        tokenizer = ChatTokenizer.load(base.directory)
        length = max_seq_len or base.context_length
        return [asdict(p) for p in previewed(load_rows(rows), tokenizer, max_seq_len=length, num_examples=num_examples)]


def show_dataset(
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
    _show_report(report, name=dataset)


def _show_file(found: Record) -> None:
    shown = {k.replace("_", " "): v for k, v in found.items() if k not in ("object", "progress", "report_url", "created_at", "expires_at")}
    fields({**shown, "created": ago(found["created_at"]), "expires": _expiry(found)})


def _download(client: FtClient, file: str, out: Path | None = None) -> Any:
    target = out or Path(client.files.retrieve(file)["filename"])
    if target.exists():
        raise typer.BadParameter(f"{target} exists; choose another place with --out")
    return {"file": str(target), "sha256": client.files.download(file, target)}


def _add_list(client: FtClient, file: Path, column_map: str | None = None, **named: str) -> Any:
    return client.suites.create(file, column_map=parse_map(column_map), **named)  # type: ignore[arg-type]


def _add_scored(client: FtClient, file: Path, grader: Path | None = None, **named: Any) -> Any:
    return client.scored_suites.create(file, grader=_read_grader(grader) if grader else None, **named)


def _read_grader(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} is not JSON: {error}", code="invalid_grader", param="grader") from None
