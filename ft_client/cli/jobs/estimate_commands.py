"""``ft estimate`` and ``ft preview``: what a job would cost and what the model would see, before submitting it."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from core.errors import InvalidDataset
from ft_client.cli.account.quota_commands import quota_line
from ft_client.cli.data_commands import Encoding, Map, Offline, RowsAt, local_file, parse_map, parse_policies
from ft_client.cli.job_commands import (
    Adapter,
    Method,
    NumGpus,
    Recipe,
    Spot,
    Tier,
    TrainingFiles,
    check_given,
    file_id_of,
    parse_files,
    parse_hyperparameters,
    training_data,
)
from ft_client.cli.output import Json, fields, print_json, say
from ft_client.cli.record_views import add_commands, given
from ft_client.cli.remote import connect, remote

if TYPE_CHECKING:
    from ft_client import FtClient

MICROS = 1_000_000
DAY_S = 86400
GIB = 2**30


def register(app: typer.Typer) -> None:
    add_commands(app, "Data", preview)
    add_commands(app, "Jobs", estimate)


def _show_estimate(found: Mapping[str, Any]) -> None:
    tokens, mixed = found["tokens"], found["training_files"] or ()
    spread = f" (+- {tokens['error']:,})" if tokens["error"] else ""
    fields({
        **({"file": found["training_file"], "dataset": found["dataset_id"]} if not mixed else {}),
        **{f"file {n}": f"{one['file']}, {one['repeats']:.3g} times an epoch ({one['tokens']:,} tokens)" for n, one in enumerate(mixed, 1)},
        "examples": f"{found['num_examples']:,}",
        "tokens": f"{tokens['total']:,} in {found['n_epochs']:g} epochs, {tokens['per_epoch']:,} each{spread}",
        "steps": f"{found['total_steps']:,}", "gpu hours": f"{found['gpu_hours']:.4g} on {found['num_gpus']} x {found['gpu_type']}",
        "memory": _memory(found["memory"]), "result": f"{found['result']['type'].replace('_', ' ')}: {found['result']['detail']}",
        "price": f"{found['price_micros'] / MICROS:.4f} USD", "starts in": _span(found["seconds_to_start"]),
        "finishes in": _span(found["seconds_to_finish"]), "quota": quota_line(found["quota"]),
    })  # fmt: skip
    for assumption in found["assumptions"]:
        print(f"  - {assumption}")


def _memory(found: Mapping[str, Any]) -> str:
    of = f" of {found['gpu_bytes'] / GIB:.0f}" if found["gpu_bytes"] else ""
    largest = max(found["parts"], key=lambda name: found["parts"][name])
    return (
        f"{found['per_gpu_bytes'] / GIB:.1f}{of} GiB on each of {found['num_gpus']} ({found['strategy']}, {found['per_device_batch_size']} "
        f"rows at a time), most of it {largest}"
    )


def _span(seconds: float | None) -> str:
    if seconds is None:
        return "not foreseeable"
    return time.strftime("%H:%M:%S", time.gmtime(seconds)) if seconds < DAY_S else f"{seconds / 3600:.1f} h"


@remote(_show_estimate)
def estimate(
    client: FtClient,
    files: TrainingFiles,
    model: Annotated[str, typer.Option("--model", "-m", help="Base model (`ft models`).")] = "demo-llama-3m",
    validation_file: Annotated[str | None, typer.Option("--validation-file", help="Held-out file or id.")] = None,
    method: Method = None,
    adapter: Adapter = None,
    recipe: Recipe = None,
    num_gpus: NumGpus = None,
    hp: Annotated[list[str] | None, typer.Option("--hp", metavar="NAME=VALUE", help="Hyperparameter; may be repeated.")] = None,
    tier: Tier = None,
    spot: Spot = False,
    column_map: Map = None,
    encoding: Encoding = None,
    rows_at: RowsAt = None,
) -> Any:
    """Estimate tokens, steps, GPU-hours, price, start and finish of a job, and show the assumptions. Submits nothing."""
    options = {"column_map": parse_map(column_map), "policies": parse_policies(None, encoding=encoding, rows_at=rows_at), "model": None}
    hyperparameters = parse_hyperparameters(hp or [])
    mixed = parse_files(files)
    check_given(*(str(one["file"]) for one in mixed), validation_file)
    return client.jobs.estimate(**given(
        validation_file=file_id_of(client, validation_file, options), method=method, hyperparameters=hyperparameters or None, tier=tier,
        spot=spot or None, adapter=adapter, recipe=recipe, hardware={"num_gpus": num_gpus} if num_gpus else None, model=model,
        **training_data(client, mixed, options),
    ))  # fmt: skip


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
    from engine.data.preview import Preview, render_lines

    for one in shown:
        for line in render_lines(from_json(Preview, one), colour=sys.stdout.isatty()):
            print(line)


def _preview_here(
    path: Path, model: str, reading: Mapping[str, Any], num_examples: int, max_seq_len: int | None, *, offline: bool
) -> Sequence[Mapping[str, Any]]:
    from engine.data.ingest import Policies, load_rows, validate_file
    from engine.data.preview import preview as previewed
    from engine.data.tokens.chat_tokenizer import ChatTokenizer
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
