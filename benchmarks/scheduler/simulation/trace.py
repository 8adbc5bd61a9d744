"""Traces: what is submitted when, for how many GPUs and how long; read from CSV with errors that name the line and the column."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from engine.scheduler.model import TIER_ORDER
from engine.scheduler.pools import JOB_CLASSES
from engine.scheduler.simulation.simulated_job import CHECKPOINT_S, SimulatedJob

REQUIRED = ("job_id", "submit_time_s", "num_gpus", "duration_s")
OPTIONAL = ("tenant", "tier", "job_class", "spot", "checkpoint_s")
TRUE, FALSE = ("1", "true", "yes"), ("0", "false", "no", "")


class BadTrace(ValueError):
    """A trace that cannot be replayed; the message says where and what to do."""


def read(path: Path, *, num_gpus: int) -> list[SimulatedJob]:
    """The jobs of a trace by time of submission; :class:`BadTrace` for the first thing that is wrong with it."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            header = [name.strip() for name in rows.fieldnames or ()]
            rows.fieldnames = header
            missing = [name for name in REQUIRED if name not in header]
            if missing:
                raise BadTrace(f"{path}: line 1: column {missing[0]} is missing; a trace has {', '.join(REQUIRED)}, and may have more")
            jobs = [_job(row, f"{path}: line {rows.line_num}", num_gpus) for row in rows]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadTrace(f"{path} cannot be read: {error}; name a CSV file with the columns {', '.join(REQUIRED)}") from error
    if not jobs:
        raise BadTrace(f"{path}: no job; below the header there is one line for each")
    _unique(jobs, path)
    return sorted(jobs, key=lambda job: (job.submit_s, job.job_id))


def with_cadence(jobs: Sequence[SimulatedJob], seconds: float) -> list[SimulatedJob]:
    """The same jobs with a checkpoint every `seconds`; 0: none at all."""
    return [replace(job, checkpoint_s=seconds) for job in jobs]


def write(jobs: Sequence[SimulatedJob], path: Path) -> None:
    """A trace that :func:`read` reads back."""
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(REQUIRED + OPTIONAL)
        for j in jobs:
            spot = str(j.spot).lower()
            out.writerow([j.job_id, j.submit_s, j.num_gpus, j.duration_s, j.tenant, j.tier, j.job_class, spot, j.checkpoint_s])


def _job(row: Mapping[str | None, str | None], where: str, limit: int) -> SimulatedJob:
    if None in row:
        raise BadTrace(f"{where}: more values than columns; quote values that hold a comma")
    width = _number(row, "num_gpus", where)
    if width != int(width) or width < 1:
        raise BadTrace(f"{where}: column num_gpus: {row['num_gpus']!r} is no whole number of at least 1")
    if width > limit:
        raise BadTrace(
            f"{where}: column num_gpus: the job needs {int(width)} GPUs at once, the cluster has {limit}; replay it with more --gpus"
        )
    submit, duration = _number(row, "submit_time_s", where), _number(row, "duration_s", where)
    for name, value, least in (("submit_time_s", submit, 0.0), ("duration_s", duration, 0.0)):
        if value < least:
            raise BadTrace(f"{where}: column {name}: {row[name]!r} is negative; times are seconds from the start of the trace")
    cadence = _number(row, "checkpoint_s", where) if (row.get("checkpoint_s") or "").strip() else CHECKPOINT_S
    if cadence < 0:
        raise BadTrace(f"{where}: column checkpoint_s: {row['checkpoint_s']!r} is negative; 0 means no checkpoints")
    return SimulatedJob(
        job_id=_text(row, "job_id", where),
        submit_s=submit,
        num_gpus=int(width),
        duration_s=duration,
        tenant=(row.get("tenant") or "").strip() or "tenant",
        tier=_one_of(row, "tier", tuple(TIER_ORDER), "standard", where),
        job_class=_one_of(row, "job_class", JOB_CLASSES, "lora", where),
        spot=_one_of(row, "spot", TRUE + FALSE, "", where) in TRUE,
        checkpoint_s=cadence,
    )


def _text(row: Mapping[str | None, str | None], column: str, where: str) -> str:
    value = (row.get(column) or "").strip()
    if not value:
        raise BadTrace(f"{where}: column {column}: is empty; every line needs one")
    return value


def _number(row: Mapping[str | None, str | None], column: str, where: str) -> float:
    text = _text(row, column, where)
    try:
        value = float(text)
    except ValueError:
        raise BadTrace(f"{where}: column {column}: {text!r} is not a number") from None
    if not math.isfinite(value):
        raise BadTrace(f"{where}: column {column}: {text!r} is not a finite number")
    return value


def _one_of(row: Mapping[str | None, str | None], column: str, allowed: Sequence[str], default: str, where: str) -> str:
    value = (row.get(column) or "").strip().lower() or default
    if value not in allowed:
        raise BadTrace(f"{where}: column {column}: {value!r} is none of {', '.join(a for a in allowed if a)}")
    return value


def _unique(jobs: Sequence[SimulatedJob], path: Path) -> None:
    seen: set[str] = set()
    for job in jobs:
        if job.job_id in seen:
            raise BadTrace(f"{path}: column job_id: {job.job_id!r} is there twice; every job has an id of its own")
        seen.add(job.job_id)
