"""Log-probabilities of answers under the model that training starts from, which DPO and KTO compare with; computed once.

    manifest.json                written last: a directory with one is complete
    ref-shard-00000.parquet      one row per row of the pack's file of that name, in its order
    ref-val-00000.parquet        the same for its validation part

Columns are row, chosen_logp, rejected_logp for a pack of pairs, and row, logp, kl_logp for one of judged answers. They depend on the pack,
the base model, how it is run (precision, attention, quantization) and what a warm start begins with, and on no other choice of
a job: any job with the same key reuses them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from core.durable_files import sha256_of, sync_to_disk, write_durable, write_json
from core.errors import IntegrityError
from core.typed_json import from_json
from engine.training.spec import Quantization, TrainingSpec

REFERENCE_FORMAT = 2
"""Version of the files and their content; a change makes new keys."""
REFERENCE_MANIFEST = "manifest.json"
ATTENTION = "sdpa"
"""Attention of every reference: any machine has it, and it differs from training only by rounding."""
SIDES: Mapping[str, Mapping[str, str]] = {
    "pairs": {"chosen_logp": "chosen_", "rejected_logp": "rejected_"},
    "judged": {"logp": "", "kl_logp": "kl_"},
}
"""By kind of pack, each column with the prefix of its ``input_ids`` and ``labels``."""
SCHEMAS = {kind: pa.schema([("row", pa.int64()), *((column, pa.float32()) for column in columns)]) for kind, columns in SIDES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceFile:
    name: str
    of: str
    """File of the pack that it scores; of a mixture, after the directory of the pack."""
    sha256: str
    num_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceManifest:
    key: str
    pack_fingerprint: str
    base_digest: str
    precision: str
    attention: str
    kind: str = "pairs"
    """Digest of the pack's file."""
    quantization: str | None = None
    """``nf4``, ``nf4-double`` and so on; None: not quantized."""
    adapter: str | None = None
    """Digest of the manifest of the adapter on the base, or of the whole model in its place; None: the base alone."""
    files: tuple[ReferenceFile, ...]
    format: int = REFERENCE_FORMAT

    @classmethod
    def read(cls, directory: Path, *, name: str = REFERENCE_MANIFEST) -> Self:
        """Reads the manifest of a complete directory; raises ``IntegrityError`` if there is none."""
        file = directory / name
        try:
            return from_json(cls, json.loads(file.read_text()))
        except FileNotFoundError:
            raise IntegrityError(f"{directory} has no complete reference log-probabilities; compute them again") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise IntegrityError(
                f"{file} is not a manifest of reference log-probabilities ({str(error)[:120]}); compute them again"
            ) from error

    def write(self, directory: Path, *, name: str = REFERENCE_MANIFEST) -> None:
        """Writes the manifest atomically; every file that it lists must already exist."""
        write_json(directory / name, asdict(self), durable=True)
        sync_to_disk(directory)


def reference_key_for(spec: TrainingSpec) -> str:
    """Returns the key of the reference that a training of `spec` needs: of a mixture, one for all its packs, however it reads them."""
    adapter = None if spec.warm_start is None else spec.warm_start.manifest_sha256
    packs = joined_fingerprint([fingerprint for fingerprint, _ in spec.packs])
    return reference_key(packs, spec.base_digest, spec.precision, ATTENTION, quantization=spec.quantization, adapter=adapter)


def joined_fingerprint(packs: Sequence[str]) -> str:
    """Returns what stands for several packs, in order; for one, its fingerprint."""
    return "+".join(packs)


def files_of_pack(directory: str, names: Sequence[str], *, mixed: bool) -> list[str]:
    """Returns how a reference names the files of a pack: in a mixture, with its directory within that of the run's data."""
    return [f"{directory}/{name}" if mixed else name for name in names]


def reference_key(
    pack_fingerprint: str,
    base_digest: str,
    precision: str,
    attention: str,
    *,
    quantization: Quantization | None = None,
    adapter: str | None = None,
) -> str:
    """Returns ``rf_`` + 32 hex digits over everything that the log-probabilities depend on; the pack's fingerprint covers its kind.

    `adapter` is the digest of the manifest of the adapter or whole model that training starts from.
    """
    spelled = json.dumps([REFERENCE_FORMAT, pack_fingerprint, base_digest, precision, attention, quantization_label(quantization), adapter])
    return "rf_" + hashlib.sha256(spelled.encode()).hexdigest()[:32]


def quantization_label(quantization: Quantization | None) -> str | None:
    """Returns ``nf4`` or ``fp4``, with ``-double`` if the constants are quantized too."""
    return None if quantization is None else quantization.kind + ("-double" if quantization.double else "")


def verify(directory: Path) -> ReferenceManifest:
    """Verifies every file's digest and returns the manifest."""
    manifest = ReferenceManifest.read(directory)
    for entry in manifest.files:
        if (found := digest_of(directory / entry.name)) != entry.sha256:
            raise IntegrityError(
                f"{directory / entry.name} is {found}, but the manifest says {entry.sha256}; compute the reference log-probabilities again"
            )
    return manifest


def partial_name(rank: int | str) -> str:
    """Returns the name of the manifest of what a rank has computed so far."""
    return f".partial-{rank}.json"


def remove_partial(directory: Path) -> None:
    """Removes the manifests of ranks, after the whole one was written."""
    for path in directory.glob(partial_name("*")):
        path.unlink(missing_ok=True)


def usable_files(directory: Path, key: str) -> list[ReferenceFile]:
    """Returns the complete files that an earlier computation of `key` left, finished or not."""
    found: dict[str, ReferenceFile] = {}
    for path in (directory / REFERENCE_MANIFEST, *directory.glob(partial_name("*"))):
        try:
            manifest = ReferenceManifest.read(directory, name=path.name)
        except IntegrityError:
            continue
        if manifest.key == key:
            found |= {entry.of: entry for entry in manifest.files if digest_of(directory / entry.name) == entry.sha256}
    return list(found.values())


def write_logps(directory: Path, pack_file: str, columns: dict[str, Any], *, kind: str = "pairs") -> ReferenceFile:
    """Writes the file for `pack_file` atomically and durably."""
    path = directory / f"ref-{pack_file.replace('/', '-')}"
    table = pa.table(columns, schema=SCHEMAS[kind])
    partial = path.with_name(f".{path.name}.tmp")
    with partial.open("wb") as stream:
        pq.write_table(table, stream, compression="zstd", use_dictionary=False, store_schema=False)
        write_durable(stream)
    partial.replace(path)
    sync_to_disk(directory)
    return ReferenceFile(name=path.name, of=pack_file, sha256=sha256_of(path), num_rows=table.num_rows)


def digest_of(path: Path) -> str:
    return sha256_of(path) if path.is_file() else "absent"
