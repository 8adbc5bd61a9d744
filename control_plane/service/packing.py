"""From a pinned dataset to a stored pack and a frozen spec; one build per fingerprint, reused by all jobs of the tenant."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import sqlalchemy as sa

from control_plane.service.platform import Platform
from control_plane.service.preparation import SETUP_S, job_row, mark_packed
from control_plane.service.training import fetch_pack, upload
from control_plane.tables import datasets, files
from ft_assets import layout, provenance
from ft_assets.base_models import BaseModel
from ft_assets.datasets.histogram import histogram
from ft_assets.datasets.packs.build import PackManifest, PackSettings, build_pack, pack_fingerprint, verify
from ft_assets.datasets.schema import Example
from ft_assets.datasets.split import part_of
from ft_assets.datasets.stored import load_rows, load_stored
from ft_assets.datasets.tokens.chat_tokenizer import ChatTokenizer
from ft_assets.errors import Unavailable
from ft_assets.training import hyperparameters

EVAL_ITEMS = 200
"""Items that an evaluation asks at most by default: what an automatic split tries to hold out."""
LEAST_SHARE, MOST_SHARE = 0.02, 0.10
"""Bounds of an automatic split: a small dataset gives up a tenth, a huge one a fiftieth."""
FLOPS_PER_TOKEN_FACTOR = 6.0
"""Floating-point operations per parameter and trained token, forward and backward (Kaplan et al. 2020, 2.1)."""
DEVICE_FLOPS = {"fp32": 1.0e11, "bf16": 4.0e14, "fp16": 4.0e14}
"""Sustained operations a second: two CPU cores in fp32 (8,500 tokens/s on 1.3M parameters); an H100 at 40 % of its
989 TFLOP/s dense bf16 peak. First estimates of a duration; history corrects them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    manifest: PackManifest
    reused: bool
    """The pack was there already; nothing was tokenized."""
    lengths: Mapping[str, list[int]]
    """Histogram of tokens per training example."""
    total_steps: int
    spec_sha256: str
    uri: str


def pack(platform: Platform, tenant: str, job_id: str) -> Packed:
    """Build or reuse the job's pack, freeze its spec, and queue it. Run again, it finds everything done."""
    with platform.engine.connect() as conn:
        job = job_row(conn, tenant, job_id)
    model = platform.models.get(job.model)
    facts = hyperparameters.ModelFacts(
        id=model.id, num_parameters=model.num_parameters, context_length=model.context_length, digest=model.digest
    )
    plan = hyperparameters.plan(job.hyperparameters, facts, method=job.method, recipe=(job.request or {}).get("recipe"))
    settings = PackSettings(max_seq_len=plan.max_seq_len, **_split(platform, tenant, job))
    manifest, directory, reused = _stored_pack(platform, tenant, job, model, settings)
    spec = hyperparameters.resolve(
        plan,
        hyperparameters.PackFacts(**{k: getattr(manifest, k) for k in hyperparameters.PackFacts.__slots__}),
        seed=job.seed,
        lock_sha256=provenance.lock_sha256(),
        commit=provenance.commit(),
        image=provenance.image(),
    )
    steps = spec.optimization.total_steps(num_windows=manifest.num_windows, world_size=spec.world_size)
    expected_s = _expected_s(model.num_parameters, manifest.num_tokens * spec.optimization.num_epochs, spec.precision)
    mark_packed(platform, tenant, job_id, spec=spec, total_steps=steps, expected_s=expected_s)
    return Packed(
        manifest=manifest,
        reused=reused,
        lengths=histogram(_example_lengths(directory, manifest)),
        total_steps=steps,
        spec_sha256=spec.sha256,
        uri=platform.objects.uri(layout.pack_prefix(tenant, manifest.fingerprint)),
    )


def _example_lengths(directory: Path, manifest: PackManifest) -> list[int]:
    shards = (pq.read_table(directory / shard["name"], columns=["seq_lengths"]) for shard in manifest.shards)
    return [n for shard in shards for window in shard.column("seq_lengths").to_pylist() for n in window]


def _expected_s(num_parameters: int, tokens: float, precision: str) -> float:
    return SETUP_S + FLOPS_PER_TOKEN_FACTOR * num_parameters * tokens / DEVICE_FLOPS[precision]


def _split(platform: Platform, tenant: str, job: sa.Row[Any]) -> dict[str, Any]:
    """The tenant's own validation file, or the share that an automatic split holds out."""
    if job.validation_file:
        return {"validation_dataset_id": _dataset_of(platform, tenant, job.validation_file).id}
    rows = _dataset_of(platform, tenant, job.training_file).row_count
    return {"validation_fraction": min(MOST_SHARE, max(LEAST_SHARE, EVAL_ITEMS / rows))}


def _dataset_of(platform: Platform, tenant: str, file_id: str) -> sa.Row[Any]:
    query = sa.select(datasets).join(files, (files.c.dataset_id == datasets.c.id) & (files.c.tenant_id == datasets.c.tenant_id))
    with platform.engine.connect() as conn:
        return conn.execute(query.where(files.c.id == file_id, files.c.tenant_id == tenant)).one()


def _stored_pack(
    platform: Platform, tenant: str, job: sa.Row[Any], model: BaseModel, settings: PackSettings
) -> tuple[PackManifest, Path, bool]:
    """The pack on this machine and in the object store, and whether it was there before."""
    if model.directory is None:
        raise Unavailable(f"base model {model.id} is not on this machine", code="base_model_unavailable")
    tokenizer = ChatTokenizer.load(model.directory)
    fingerprint = pack_fingerprint(job.dataset_id, tokenizer.tokenizer_digest, tokenizer.template_digest, settings)
    prefix = layout.pack_prefix(tenant, fingerprint)
    directory = platform.settings.work_dir / "packs" / layout.checked_id(tenant) / fingerprint
    with _one_builder(directory):
        if platform.objects.exists(f"{prefix}/manifest.json"):
            fetch_pack(platform, tenant, fingerprint)
            return verify(directory), directory, True
        rows = _rows_file(platform, tenant, job.dataset_id)
        held_out = load_rows(_rows_file(platform, tenant, settings.validation_dataset_id)) if settings.validation_dataset_id else iter(())
        manifest = build_pack(load_rows(rows), tokenizer, settings, directory, dataset_id=job.dataset_id, validation=held_out)
        upload(platform.objects, directory, prefix)
        return manifest, directory, False


@contextmanager
def _one_builder(directory: Path) -> Iterator[None]:
    """On one machine, one process builds a pack and the others wait for it and reuse it."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f".{directory.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _rows_file(platform: Platform, tenant: str, dataset_id: str) -> Path:
    """The dataset's rows in this machine's cache."""
    target = platform.settings.work_dir / "datasets" / layout.checked_id(tenant) / layout.checked_id(dataset_id) / "rows.parquet"
    if not target.exists():
        platform.objects.get_file(f"{layout.dataset_prefix(tenant, dataset_id)}/rows.parquet", target)
    return target


def validation_rows(platform: Platform, tenant: str, job: sa.Row[Any]) -> Iterator[dict[str, Any]]:
    """The rows that the job did not train on, as messages: what its evaluation asks."""
    held_out = _split(platform, tenant, job)
    if own := held_out.get("validation_dataset_id"):
        return (_as_row(e) for e in load_rows(_rows_file(platform, tenant, own)))
    fraction = held_out["validation_fraction"]
    stored = load_stored(_rows_file(platform, tenant, job.dataset_id))
    return (_as_row(s.example) for s in stored if part_of(s.content_sha256, validation_fraction=fraction) == "validation")


def _as_row(example: Example) -> dict[str, Any]:
    return {"messages": [m.as_template() for m in example.messages]}
