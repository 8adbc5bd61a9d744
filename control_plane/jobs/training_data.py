"""What a job's files hold: their dataset versions, what is held out of them, and what its tenant should know before it trains on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import sqlalchemy as sa
from numpy.typing import NDArray

from control_plane.datasets.previews import rows_file
from control_plane.datasets.tables import datasets, files
from control_plane.jobs.tables import Job
from control_plane.platform.context import Platform
from control_plane.platform.job_events import Event
from core.base_models import BaseModel
from engine.data import (
    USEFUL_READS,
    PackManifest,
    TemplateOpenings,
    ThinkingSwitch,
    automatic_fraction,
    described_mixture,
    has_own_split,
    held_out,
    quality_warnings,
    repetition_warning,
    train_validation_overlap,
)
from engine.training import TrainingSpec

JOB_DOUBTS = frozenset(("many_epochs", "validation_overlap"))
"""Warnings about a dataset that depend on the job that trains on it."""
NAMED_TOKENS = 5


def findings(
    platform: Platform, tenant: str, job: Job, packs: Sequence[PackManifest], spec: TrainingSpec, *, min_steps: int, model: BaseModel,
    switch: ThinkingSwitch | None,
) -> list[Event]:  # fmt: skip
    """Return what depends on the job: shortened windows, fewer steps than the recipe's `min_steps`, too many epochs over many rows,
    validation rows that are trained on, turns and rows without loss, answers that begin in two ways over all files, added tokens that an
    adapter does not train, and how much of each file a mixture reads.

    `switch` of the base model's chat template is the fix for two beginnings.
    """
    overlapping, num_validation = _overlap(platform, tenant, job) if job.validation_file or job.training_files else (0, 0)
    found: list[Event] = []
    epochs, times = spec.optimization.num_epochs, [1.0] * len(packs)
    if spec.sources:
        times = [source.rows_per_epoch / pack.num_rows for source, pack in zip(spec.sources, packs, strict=True)]
        read = "; ".join(described_mixture(job.training_files, [source.rows_per_epoch for source in spec.sources], packs))
        found.append(Event(code="mixture_planned", message=f"An epoch of the mixture reads {read}."))
    found += _step_counts(packs, spec, min_steps)
    if model.added_tokens and spec.adapter != "full":
        found.append(Event(code="added_tokens_not_trained", message=_not_trained(model), level="warn"))
    openings = TemplateOpenings()
    for built in packs:
        openings.merge(TemplateOpenings(counts=built.openings))
    found += [Event(code=code, message=message, level="warn") for code, message in openings.warnings(switch)]
    for file_id, built, n in zip(job.trained_on, packs, times, strict=True):
        counted = dataset_of(platform, tenant, file_id).report["stats"]["quality"]
        first = file_id == job.training_file
        doubts = quality_warnings(
            counted, num_epochs=epochs * n, num_overlapping=overlapping if first else 0, num_validation=num_validation if first else 0
        )
        told = [doubt for doubt in doubts if doubt[0] in JOB_DOUBTS] + _pack_doubts(built)
        if spec.sources and epochs * n > USEFUL_READS:
            told.append(("source_repeated", repetition_warning(epochs * n)))
        for code, message in told:
            of = f"{file_id}: " if spec.sources and code != "validation_overlap" else ""  # which is counted over all files
            found.append(Event(code=code, message=f"{of}{message}", level="warn"))
    return found


def _step_counts(packs: Sequence[PackManifest], spec: TrainingSpec, min_steps: int) -> Iterator[Event]:
    """Yield how windows were chosen if they are shorter than ``max_seq_len``, and a warning about too few steps."""
    optimization, examples, rows = spec.optimization, sum(p.num_examples for p in packs), sum(p.num_rows for p in packs)
    if spec.sources:
        rows = sum(source.rows_per_epoch for source in spec.sources)
    steps, batch = spec.total_steps(num_rows=rows), spec.rows_per_step
    rows_each, epochs = "1 row" if batch == 1 else f"{batch} rows", optimization.num_epochs
    made = f"{steps} steps of {rows_each} in {epochs:g} {'epoch' if epochs == 1 else 'epochs'}"
    shorter = [pack for pack in packs if pack.window and pack.window < pack.settings["max_seq_len"]]
    if shorter:
        mean = sum(p.num_tokens for p in packs) / examples
        message = (
            f"Windows have {min(p.window or 0 for p in shorter):,} tokens instead of {shorter[0].settings['max_seq_len']:,}, so that "
            f"{examples:,} examples of {mean:.0f} tokens on average make {rows:,} windows: {made}"
        )
        yield Event(code="windows_shortened", message=f"{message}. No example is cut by it.")
    if steps < min_steps and optimization.max_steps is None:
        message = f"The job makes {made}. Fewer than {min_steps} steps barely change a model: add rows, raise n_epochs"
        yield Event(code="few_steps", message=f"{message}{', or lower batch_size' if batch > 1 else ''}", level="warn")


def _not_trained(model: BaseModel) -> str:
    some, more = ", ".join(model.added_tokens[:NAMED_TOKENS]), len(model.added_tokens) - NAMED_TOKENS
    named = f"{some} and {more} more" if more > 0 else some
    return (
        f"An adapter does not train the tokens that were added to {model.id} ({named}): the model cannot tell them apart. Train with "
        "adapter full, or on a base without them"
    )


def _pack_doubts(manifest: PackManifest) -> list[tuple[str, str]]:
    """Return warnings about turns without loss and about rows that are left out."""
    found = []
    if manifest.untrained_turns:
        message = (
            f"{manifest.untrained_turns} earlier assistant turns carry no loss: the base model's chat template writes them differently"
        )
        found.append(("turns_without_loss", f"{message} once more messages follow (`ft preview` shows which)"))
    if count := manifest.dropped.get("answer_cut_off"):
        rows = ", ".join(map(str, manifest.dropped_rows["answer_cut_off"]))
        limit = manifest.settings["max_seq_len"]  # the pack's own is less if its windows are shortened
        message = f"max_seq_len {limit} cuts off the whole answer of {count} rows (rows {rows}), which are not trained on"
        found.append(("answer_cut_off", f"{message}; raise it, or shorten the prompts"))
    if manifest.dropped:
        reasons = ", ".join(f"{code} {count}" for code, count in manifest.dropped.items())
        found.append(("rows_left_out", f"{sum(manifest.dropped.values())} rows are not trained on: {reasons}"))
    return found


def _overlap(platform: Platform, tenant: str, job: Job) -> tuple[int, int]:
    """Return how many rows that are held out are trained on, in any of the job's files, and how many are held out.

    Rows are equal if their split keys are: their content hash, or that of the first of their near-duplicate cluster within their file. So
    equal rows of two files are found, and rows that only resemble each other are not.
    """
    trained: list[NDArray[np.uint64]] = []
    held: list[NDArray[np.uint64]] = []
    for file_id in job.trained_on:
        keys, parts = _keys(platform, tenant, dataset_of(platform, tenant, file_id).id)
        _, fraction = held_out_part(platform, tenant, job, file_id)
        is_held = (parts == "validation") | ((parts == "") & held_out(keys, validation_fraction=fraction))
        trained.append(keys[~is_held])
        held += [keys[is_held]] if job.training_files else []
    if job.validation_file:
        held.append(_keys(platform, tenant, dataset_of(platform, tenant, job.validation_file).id)[0])
    together = np.concatenate(held)
    return train_validation_overlap(np.concatenate(trained), together), len(together)


def _keys(platform: Platform, tenant: str, dataset_id: str) -> tuple[NDArray[np.uint64], NDArray[np.str_]]:
    """Return the first 64 bits of each row's split key, and the part that the dataset's own split assigns it to, empty if none does."""
    keys, parts = [np.empty(0, np.uint64)], [np.empty(0, "U10")]
    with pq.ParquetFile(rows_file(platform, tenant, dataset_id)) as file:
        for batch in file.iter_batches(columns=["split_key", "part"]):
            raw = bytes.fromhex("".join(batch.column("split_key").to_pylist()))
            keys.append(np.frombuffer(raw, ">u8")[::2].astype(np.uint64))
            parts.append(np.array([part or "" for part in batch.column("part").to_pylist()], "U10"))
    return np.concatenate(keys), np.concatenate(parts)


def held_out_part(platform: Platform, tenant: str, job: Job, file_id: str) -> tuple[str | None, float]:
    """Return the dataset version of the tenant's own validation file, else the share of the file's rows split off automatically: 0 if the
    dataset has a split of its own. In a mixture the first file's pack holds the validation file."""
    if job.validation_file:
        return dataset_of(platform, tenant, job.validation_file).id if file_id == job.training_file else None, 0.0
    version = dataset_of(platform, tenant, file_id)
    if has_own_split(rows_file(platform, tenant, version.id)):
        return None, 0.0
    return None, automatic_fraction(version.row_count)


def dataset_of(platform: Platform, tenant: str, file_id: str) -> sa.Row[Any]:
    query = sa.select(datasets).join(files, (files.c.dataset_id == datasets.c.id) & (files.c.tenant_id == datasets.c.tenant_id))
    with platform.engine.connect() as conn:
        return conn.execute(query.where(files.c.id == file_id, files.c.tenant_id == tenant)).one()
