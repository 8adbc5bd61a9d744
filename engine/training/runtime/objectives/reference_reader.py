"""Reads the reference log-probabilities of a pack, after checking row by row that they are those that the spec names.

A stale or foreign reference silently trains towards the wrong goal, so any mismatch is refused: key, pack, base model and adapter, digests,
rows, and numbers that are not finite. ``check_reference`` verifies that they are the model's own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from core.errors import IntegrityError
from engine.training.reference_logps import ReferenceManifest, files_of_pack, joined_fingerprint, quantization_label, verify
from engine.training.runtime.pack_loader import Pack
from engine.training.runtime.run_errors import BadInput
from engine.training.spec import RunFile, TrainingSpec

AGAIN = "compute the reference log-probabilities again"


def load(run: RunFile, pack: Pack, train: pa.Table) -> tuple[pa.Table, pa.Table | None]:
    """Returns the reference of all training rows of `pack`, which are `train`, and of its validation rows; raises ``BadInput`` if they do
    not fit."""
    spec = run.spec
    if run.reference_dir is None or spec.reference is None:
        raise BadInput(f"method {spec.method} needs reference log-probabilities, but the run file names none; {AGAIN}")
    try:
        manifest = verify(run.reference_dir)
    except IntegrityError as e:
        raise BadInput(e.message) from e
    _require_same(manifest, spec)
    mixed = len(spec.packs) > 1
    shards: list[list[str]] = []
    held_out: list[list[str]] = []
    for _, directory in spec.packs:
        body = json.loads((run.pack_dir / directory / "manifest.json").read_text())
        for files, of in ((shards, body["shards"]), (held_out, (body.get("validation") or {}).get("shards", ()))):
            files.append(files_of_pack(directory, [str(shard["name"]) for shard in of], mixed=mixed))
    of_train = _read(run.reference_dir, manifest, shards, [sum(rows) for rows in pack.train.rows_of_packs], train, "training")
    if pack.validation is None:
        return of_train, None
    return of_train, _read(run.reference_dir, manifest, held_out, pack.held_out, pack.validation, "validation")


def _require_same(manifest: ReferenceManifest, spec: TrainingSpec) -> None:
    checks: list[tuple[str, str | None, str | None]] = [
        ("key", manifest.key, spec.reference),
        ("pack", manifest.pack_fingerprint, joined_fingerprint([fingerprint for fingerprint, _ in spec.packs])),
        ("base model", manifest.base_digest, spec.base_digest),
        ("quantization", manifest.quantization, quantization_label(spec.quantization)),
        ("adapter", manifest.adapter, spec.warm_start.manifest_sha256 if spec.warm_start else None),
    ]
    for what, found, wanted in checks:
        if found != wanted:
            raise BadInput(f"the reference log-probabilities have {what} {found}, but the spec requires {wanted}; {AGAIN}")


def _read(
    directory: Path, manifest: ReferenceManifest, shards: Sequence[Sequence[str]], counts: Sequence[int], rows: pa.Table, part: str
) -> pa.Table:
    """Returns the reference of `rows`: of each pack, the first of its `shards`, as many as `counts` says."""
    names = {entry.of: entry.name for entry in manifest.files}
    read = [(of_pack, count) for of_pack, count in zip(shards, counts, strict=True) if count]
    missing = [name for of_pack, _ in read for name in of_pack if name not in names]
    if missing:
        raise BadInput(f"the reference log-probabilities lack {missing[0]} of the pack; {AGAIN}")
    tables = [pa.concat_tables([pq.read_table(directory / names[name]) for name in of_pack]).slice(0, count) for of_pack, count in read]
    found = pa.concat_tables(tables)
    if found.num_rows != rows.num_rows or not pc.all(pc.equal(found["row"], rows["row"])).as_py():
        raise BadInput(f"the reference log-probabilities do not match the {part} rows of the pack; {AGAIN}")
    for name in found.column_names:
        bad = ~np.isfinite(found[name].to_numpy())
        if bad.any():
            row = found["row"][int(bad.argmax())].as_py()
            raise BadInput(f"{name} of {part} row {row} is not a number; {AGAIN}")
    return found.combine_chunks()
