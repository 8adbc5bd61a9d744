"""The work of the ``dataset`` and ``tokenized_pack`` assets: pins the dataset versions of a job, builds or reuses its pack, freezes its
spec.

A pack is built once per fingerprint and reused by all jobs of the tenant.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from control_plane.datasets.previews import rows_file
from control_plane.datasets.service import check_distinct, check_enough_to_train, check_reviewed
from control_plane.datasets.tables import datasets, files
from control_plane.datasets.uploads import uploaded_files
from control_plane.datasets.validation_state import PLATFORM_FAILURES
from control_plane.jobs import training_data, warm_starts
from control_plane.jobs.estimates import expected_time, job_plan
from control_plane.jobs.estimates.job_plan import Placed
from control_plane.jobs.queue_entry import mark_packed
from control_plane.jobs.tables import Job, jobs, names_file
from control_plane.jobs.training_data import dataset_of, held_out_part
from control_plane.jobs.transitions import job_row, record
from control_plane.platform import job_events
from control_plane.platform.build_lock import Say, one_anywhere, one_on_this_machine
from control_plane.platform.context import Platform
from control_plane.platform.job_states import JobState
from control_plane.platform.transfer import upload
from control_plane.sandbox.sandbox_parent import CRASHED
from core import layout
from core.base_models import BaseModel
from core.durable_files import remove_unused
from core.errors import IntegrityError, InvalidDataset, Unavailable
from core.telemetry import provenance
from core.typed_json import JsonObject
from engine.data import (
    ChatTokenizer,
    DatasetReport,
    Example,
    MixedFile,
    PackManifest,
    PackProgress,
    PackSettings,
    PassProgress,
    Policies,
    ThinkingSwitch,
    build_pack,
    load_rows,
    load_stored,
    mixture_params,
    pack_fingerprint,
    part_of,
    recounted_differences,
    rows_per_epoch,
    suitable_workers,
)
from engine.training import (
    PACK_SETTINGS,
    REFERENCE_MANIFEST,
    Method,
    PackFacts,
    Source,
    TrainingSpec,
    canonical_json,
    method_named,
    min_windows,
    quantization_label,
    reference_key_for,
    resolve,
)
from ft_assets.datasets.pack_cache import fetch_pack

log = logging.getLogger(__name__)

ANNOUNCE_EVERY_S = 5.0
"""Least seconds between two events about one stage of a dataset: each is a row in the database."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PinnedDataset:
    """The immutable dataset versions that a job trains and validates on."""

    dataset_id: str
    """Of a mixture, that of the first file."""
    content_sha256: str
    row_count: int
    uri: str
    report: DatasetReport
    validation_id: str | None
    """Dataset version of the tenant's own validation file; None: split off automatically."""
    mixed_ids: tuple[str, ...]
    """Dataset versions of the other files of a mixture."""
    data_version: str
    """The content's hash; of a mixture, a hash over those of all files."""


def pin_dataset(platform: Platform, tenant: str, job_id: str, *, progress: Callable[[PassProgress], None] | None = None) -> PinnedDataset:
    """Resolves the job's files to dataset versions, validating a file if that has not been done; a second call changes nothing."""
    with platform.engine.connect() as conn:
        job = job_row(conn, tenant, job_id)
    named = zip(job.trained_on, mixture_params(job.training_files), strict=True)
    versions = [_version(platform, tenant, file_id, param=param, progress=progress) for file_id, param in named]
    check_distinct(job.trained_on, [version.id for version in versions])
    training, validation = versions[0], None
    if job.validation_file:
        validation = _version(platform, tenant, job.validation_file, param="validation_file", progress=progress)
    with platform.engine.begin() as conn:
        conn.execute(sa.update(jobs).where(jobs.c.id == job_id).values(dataset_id=training.id, heartbeat_at=platform.clock()))
    return PinnedDataset(
        dataset_id=training.id,
        content_sha256=training.content_sha256,
        row_count=training.row_count,
        uri=training.uri,
        report=DatasetReport.from_dict(training.report),
        validation_id=validation.id if validation else None,
        mixed_ids=tuple(version.id for version in versions[1:]),
        data_version=training.content_sha256 if len(versions) == 1 else _digest([version.content_sha256 for version in versions]),
    )


def _digest(value: object) -> str:
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def versions_of(platform: Platform, tenant: str, job_id: str) -> list[str]:
    """Returns the dataset versions of the job's files that have been validated, the training file's first."""
    used = names_file(files.c.id) & files.c.dataset_id.is_not(None)
    query = sa.select(files.c.dataset_id).join(jobs, used).where(jobs.c.id == job_id, jobs.c.tenant_id == tenant)
    with platform.engine.connect() as conn:
        return list(conn.execute(query.order_by(files.c.id != jobs.c.training_file)).scalars())


def announcer(platform: Platform, job_id: str, *, say: Callable[[str], None] | None = None) -> Callable[[PassProgress], None]:
    """Returns a progress callback that reports to the job's tenant (an event) and to `say` at most every five seconds, and at each new
    stage."""
    reported_at, stage = -math.inf, ""

    def tell(progress: PassProgress) -> None:
        nonlocal reported_at, stage
        if time.monotonic() - reported_at < ANNOUNCE_EVERY_S and progress.stage == stage:
            return
        reported_at, stage = time.monotonic(), progress.stage
        event = job_events.progress_event(asdict(progress))
        if say is not None:
            say(event.message)
        with contextlib.suppress(SQLAlchemyError), platform.engine.begin() as conn:  # a progress report must not fail the step
            record(conn, job_id, event, now=platform.clock())

    return tell


def _version(platform: Platform, tenant: str, file_id: str, *, param: str, progress: Callable[[PassProgress], None] | None) -> sa.Row[Any]:
    found = uploaded_files.wait_until_validated(platform, file_id, progress=progress)
    if found.status_code in PLATFORM_FAILURES:  # an earlier attempt died: this is the next one
        uploaded_files.validate_again(platform, tenant, file_id)
        uploaded_files.wait_until_validated(platform, file_id, progress=progress)
    with platform.engine.connect() as conn:
        file = conn.execute(sa.select(files).where(files.c.id == file_id, files.c.tenant_id == tenant)).one()
        if file.status_code in PLATFORM_FAILURES:
            raise Unavailable(f"{file.filename} ({file_id}) could not be validated: {file.status_details}", code=CRASHED)
        if file.dataset_id is None:
            raise InvalidDataset(
                f"{file.filename} ({file_id}) cannot be trained on: {file.status_details}. "
                f"All problems: GET /v1/datasets/{file_id}/report or `ft check FILE`",
                code="invalid_validation_file" if param == "validation_file" else "invalid_training_file",
                param=param,
            )
        version = conn.execute(sa.select(datasets).where(datasets.c.tenant_id == tenant, datasets.c.id == file.dataset_id)).one()
    check_reviewed(version.review, version.id, param=param)
    if param != "validation_file":
        check_enough_to_train(version.row_count, training_file=file_id, param=param)
    return version


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """Reference log-probabilities of a pack; the first training that needs them computes them."""

    key: str
    stored: bool
    """An earlier job computed them."""
    precision: str
    quantization: str | None
    adapter: str | None
    """Digest of the adapter of a warm start."""
    uri: str


PACK_COLUMNS = ("dataset_id", "fingerprint", "num_examples", "num_rows", "num_tokens", "num_trained_tokens", "fill", "truncated", "split")


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    manifests: Sequence[PackManifest]
    """One for each training file."""
    reused: bool
    """All packs already existed; nothing was tokenized."""
    sources: tuple[Source, ...]
    """How a mixture reads them; empty for a single file."""
    data_version: str
    """The pack's fingerprint; of a mixture, a hash over its sources."""
    lengths: Mapping[str, list[int]]
    """Histogram of tokens per training example; of a mixture, of its first file's."""
    total_steps: int
    spec_sha256: str
    uri: str
    reference: Reference | None
    """The log-probabilities that the method compares with; None if it needs none."""

    @property
    def manifest(self) -> PackManifest:
        """The first file's."""
        return self.manifests[0]

    @property
    def rows(self) -> list[dict[str, str | int | float]]:
        """One row per pack: its counts, and the rows that an epoch reads of it."""
        read = [source.rows_per_epoch for source in self.sources] or [self.manifest.num_rows]
        return [
            {**{name: getattr(pack, name) for name in PACK_COLUMNS}, "rows_per_epoch": count}
            for pack, count in zip(self.manifests, read, strict=True)
        ]


def pack(
    platform: Platform, tenant: str, job_id: str, *, progress: Callable[[PassProgress], None] | None = None, say: Say = log.info
) -> Packed:
    """Builds or reuses the job's pack and reference, freezes its spec, and queues it. A second run finds everything done.

    `progress` receives each shard; `say` reports waiting for another builder.
    """
    with platform.engine.connect() as conn:
        job = job_row(conn, tenant, job_id)
    model = platform.models.get_pinned(job.model, job.base_digest)
    placed = job_plan.of_job(platform, job, model)
    plan = placed.plan
    method = method_named(job.method)
    packs, reused = list[PackManifest](), True
    for file_id in job.trained_on:
        settings = _pack_settings(platform, tenant, job, file_id, placed, method)
        with _naming(file_id if job.training_files else ""):
            built, known = _stored_pack(platform, tenant, job, file_id, model, method, settings, progress=progress, say=say)
        packs, reused = [*packs, built], reused and known
    facts, sources = _read_an_epoch(job.training_files, packs)
    spec = resolve(
        plan,
        facts,
        seed=job.seed,
        lock_sha256=provenance.lock_sha256(),
        commit=provenance.commit(),
        image=provenance.image(),
        **placed.placement,
        warm_start=warm_starts.spec_of(job.warm_start),
        sources=sources,
    )
    compared = None
    if method.needs_reference:
        spec = replace(spec, reference=reference_key_for(spec))
        compared = _reference(platform, tenant, spec)
    if job.state is JobState.VALIDATING:  # else they are recorded
        findings = training_data.findings(
            platform, tenant, job, packs, spec, min_steps=int(plan.value("min_steps")), model=model, switch=_switch(model)
        )
        with platform.engine.begin() as conn:
            for event in findings:
                record(conn, job.id, event, now=platform.clock())
    steps = spec.total_steps(num_rows=facts.num_windows)
    expected = expected_time.expect(platform, model, spec, num_rows=facts.num_windows, tokens_per_epoch=facts.num_tokens)
    mark_packed(platform, tenant, job_id, spec=spec, total_steps=steps, expected_s=expected.expected_s, modelled=expected.modelled)
    return Packed(
        manifests=packs,
        reused=reused,
        sources=sources,
        data_version=_digest([asdict(source) for source in sources]) if sources else packs[0].fingerprint,
        lengths=packs[0].lengths,
        total_steps=steps,
        spec_sha256=spec.sha256,
        uri=platform.objects.uri(layout.pack_prefix(tenant, spec.pack_fingerprint)),
        reference=compared,
    )


@contextlib.contextmanager
def _naming(file_id: str) -> Iterator[None]:
    """Names the file of a mixture that cannot be packed."""
    try:
        yield
    except InvalidDataset as error:
        if not file_id:
            raise
        raise InvalidDataset(f"{file_id}: {error.message}", code=error.code, param=error.param) from error


def _read_an_epoch(files: Sequence[MixedFile], packs: Sequence[PackManifest]) -> tuple[PackFacts, tuple[Source, ...]]:
    """Returns what an epoch reads of the one pack there is, or of a mixture of packs with its sources."""
    facts = PackFacts(**{k: getattr(packs[0], k) for k in PackFacts.__slots__})
    facts = replace(facts, max_seq_len=max(pack.max_seq_len for pack in packs))
    if not files:
        return facts, ()
    rows = rows_per_epoch(files, packs)
    sources = tuple(
        Source(dataset_id=pack.dataset_id, pack_fingerprint=pack.fingerprint, rows_per_epoch=count)
        for pack, count in zip(packs, rows, strict=True)
    )
    times = [count / pack.num_rows for count, pack in zip(rows, packs, strict=True)]
    return replace(
        facts,
        num_examples=sum(round(n * pack.num_examples) for n, pack in zip(times, packs, strict=True)),
        num_windows=sum(rows),
        num_tokens=sum(round(n * pack.num_tokens) for n, pack in zip(times, packs, strict=True)),
    ), sources


def _switch(model: BaseModel) -> ThinkingSwitch | None:
    """Returns the variable of the base model's chat template that turns reasoning on or off, if there is one."""
    template = None if model.directory is None else ChatTokenizer.load(model.directory).reasoning
    return None if template is None else template.facts.switch


def _reference(platform: Platform, tenant: str, spec: TrainingSpec) -> Reference:
    key = str(spec.reference)
    prefix = layout.reference_prefix(tenant, key)
    return Reference(
        key=key,
        stored=platform.objects.exists(f"{prefix}/{REFERENCE_MANIFEST}"),
        precision=spec.precision,
        quantization=quantization_label(spec.quantization),
        adapter=None if spec.warm_start is None else spec.warm_start.manifest_sha256,
        uri=platform.objects.uri(prefix),
    )


def pack_differences(platform: Platform, tenant: str, packs: Sequence[PackManifest]) -> list[str]:
    """Counts this machine's copies of packs again; returns what differs from their manifests."""
    return [what for pack in packs for what in recounted_differences(fetch_pack(platform, tenant, pack.fingerprint))]


def _pack_settings(platform: Platform, tenant: str, job: Job, file_id: str, placed: Placed, method: Method) -> PackSettings:
    """Returns the job's settings for one of its training files, with the upload's policies for rows that do not fit the base model."""
    query = sa.select(files.c.policies).where(files.c.id == file_id, files.c.tenant_id == tenant)
    with platform.engine.connect() as conn:
        policies = Policies.from_request(conn.execute(query).scalar_one() or {})
    own, fraction = held_out_part(platform, tenant, job, file_id)
    plan, num_rows = placed.plan, round(dataset_of(platform, tenant, file_id).row_count * (1 - fraction))
    settings = PackSettings(
        max_seq_len=plan.max_seq_len,
        min_windows=min_windows(plan, num_examples=num_rows, data_ranks=placed.data_ranks),
        safety_file=platform.settings.safety_file,
        bad_rows=policies.bad_rows,
        control_tokens=policies.control_tokens,
        over_long=policies.over_long,
        validation_dataset_id=own,
        validation_fraction=fraction,
        **{name: plan.requested[name] for name in PACK_SETTINGS if name in plan.requested},
    )
    if not method.every_token:
        return settings
    # Every token is learned, so that long rows are split without loss.
    return replace(settings, train_on_inputs=True, over_long="split" if settings.over_long == "truncate" else settings.over_long)


def _stored_pack(
    platform: Platform,
    tenant: str,
    job: Job,
    file_id: str,
    model: BaseModel,
    method: Method,
    settings: PackSettings,
    *,
    progress: Callable[[PassProgress], None] | None,
    say: Say,
) -> tuple[PackManifest, bool]:
    """Returns the pack of a training file, on this machine and in the object store, and whether it already existed.

    Built by one process at a time across all machines; others wait and then use what is stored.
    """
    if model.directory is None:
        raise Unavailable(f"base model {model.id} is not on this machine", code="base_model_unavailable")
    tokenizer = ChatTokenizer.load(model.directory)
    digests, dataset = (tokenizer.tokenizer_digest, tokenizer.template_digest), dataset_of(platform, tenant, file_id)
    fingerprint = pack_fingerprint(dataset.id, *digests, settings, kind=method.pack)
    directory = platform.settings.work_dir / "packs" / layout.checked_id(tenant) / fingerprint
    with one_on_this_machine(directory, who=job.id, say=say):
        if (found := _stored(platform, tenant, fingerprint)) is not None:
            return found, True
        with one_anywhere(platform.engine, tenant, fingerprint, who=job.id, say=say):
            if (found := _stored(platform, tenant, fingerprint)) is not None:
                return found, True
            own = settings.validation_dataset_id
            remove_unused(directory.parents[1])
            manifest = build_pack(
                rows_file(platform, tenant, dataset.id),
                tokenizer,
                settings,
                directory,
                dataset_id=dataset.id,
                kind=method.pack,
                validation=rows_file(platform, tenant, own) if own else (),
                workers=suitable_workers(dataset.row_count),
                model_dir=model.directory,
                progress=_relay(progress) if progress else None,
            )
            upload(platform.objects, directory, layout.pack_prefix(tenant, fingerprint))
            return manifest, False


def _stored(platform: Platform, tenant: str, fingerprint: str) -> PackManifest | None:
    """Returns the pack from the object store, in this machine's cache and verified; None if it is missing, or damaged there too."""
    if not platform.objects.exists(f"{layout.pack_prefix(tenant, fingerprint)}/manifest.json"):
        return None
    try:
        return PackManifest.read(fetch_pack(platform, tenant, fingerprint))
    except IntegrityError as damage:
        log.warning("the stored pack %s is damaged and is built again: %s", fingerprint, damage)
        return None


def _relay(progress: Callable[[PassProgress], None]) -> Callable[[PackProgress], None]:
    """Reports the examples of both parts together to `progress`."""
    done: dict[tuple[str, str], int] = {}

    def report(seen: PackProgress) -> None:
        done[seen.stage, seen.part] = seen.num_examples
        rows = sum(count for (stage, _), count in done.items() if stage == seen.stage)
        progress(PassProgress(stage="tokenizing" if seen.stage == "tokenize" else "packing", rows=rows, bytes=0, total_bytes=0))

    return report


def validation_rows(platform: Platform, tenant: str, job: Job) -> Iterator[JsonObject]:
    """Returns the rows that the job did not train on, as conversations that end with the wanted answer, for its evaluation.

    For a preference the chosen answer is wanted; answers labeled bad and texts are left out.
    """
    if job.validation_file:
        examples = load_rows(rows_file(platform, tenant, dataset_of(platform, tenant, job.validation_file).id))
    else:
        examples = itertools.chain.from_iterable(_held_out_examples(platform, tenant, job, file_id) for file_id in job.trained_on)
    return (row for row in map(Example.as_row, examples) if row["messages"])


def _held_out_examples(platform: Platform, tenant: str, job: Job, file_id: str) -> Iterator[Example]:
    _, fraction = held_out_part(platform, tenant, job, file_id)
    stored = load_stored(rows_file(platform, tenant, dataset_of(platform, tenant, file_id).id))
    return (s.example for s in stored if (s.part or part_of(s.split_key, validation_fraction=fraction)) == "validation")
