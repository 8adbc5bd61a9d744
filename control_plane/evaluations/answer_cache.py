"""Cached answers: of a base model under its digest, of an adapter under its base's digest and its own; suite by suite.

The base answers a platform's suites once, however many adapters are compared with it. An adapter's answers as a candidate are reused when
the next adapter of its lineage is compared with it, and deleted once there will be none: when it is quarantined or archived.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.engine import Connection

from control_plane.adapters.tables import adapters
from control_plane.attempts.tables import checkpoints
from control_plane.evaluations.tables import eval_scores
from control_plane.jobs.tables import Job
from control_plane.platform.context import Platform
from control_plane.platform.records import columns, one_or_none
from core.errors import InvalidRequest
from core.storable_text import check_storable
from engine.adapters import PACKAGE_MANIFEST, AdapterRecord, Stage, make_adapter_name
from engine.evals import EvalRun, capability_id, known_answers_key, plain_suites

KINDS_OF_ALL = ("golden", "safety", "capability")
"""Built-in suites: answers to them are not tenant data."""
NEWEST = 4
"""Cached answers of one capability suite that are used: few versions and limits are in use at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Previous:
    """The last accepted adapter of a lineage."""

    adapter_id: str
    digest: str
    """Digest of its base in the comparison."""
    prefix: str
    """Object prefix of its files."""
    manifest_sha256: str


def subject_digest(base_digest: str, manifest_sha256: str) -> str:
    return f"{base_digest}+{manifest_sha256}"


def manifest_of(result: Mapping[str, Any], subject: str = "previous") -> str | None:
    """Key of the manifest in the digest of an adapter."""
    digest = (result.get("digests") or {}).get(subject)
    return str(digest).rpartition("+")[2] if digest else None


def previous(platform: Platform, tenant: str, job: Job, base_digest: str) -> Previous | None:
    """Return the newest production adapter with the logical name that `job`'s has or will have, other than `job`'s own.

    If `job`'s adapter was promoted, only adapters promoted before it count. An adapter without files does not count: it is needed for
    comparison.
    """
    logical = make_adapter_name(job.model, tenant, job.suffix, "").logical
    lineage = (adapters.c.tenant_id == tenant) & adapters.c.name.startswith(f"{logical}:", autoescape=True)
    own = adapters.alias("own")
    promoted = sa.select(sa.func.max(own.c.promoted_at)).where(own.c.job_id == job.id).scalar_subquery()
    before = sa.or_(promoted.is_(None), adapters.c.promoted_at < promoted)
    query = (
        sa.select(*columns(adapters, AdapterRecord))
        .where(lineage, adapters.c.stage == Stage.PRODUCTION, adapters.c.job_id != job.id, before)
        .order_by(adapters.c.promoted_at.desc().nulls_last(), adapters.c.id)
        .limit(1)
    )
    with platform.engine.connect() as conn:
        if (found := one_or_none(conn, query, AdapterRecord)) is None:
            return None
        final = sa.select(checkpoints.c.manifest_sha256).where(checkpoints.c.job_id == found.job_id, checkpoints.c.final)
        trained = conn.scalar(final) or found.manifest_sha256
    if not platform.objects.exists(f"{found.object_prefix}/{PACKAGE_MANIFEST}"):
        return None
    digest = subject_digest(base_digest, trained)
    return Previous(adapter_id=found.id, digest=digest, prefix=found.object_prefix, manifest_sha256=found.manifest_sha256)


def with_known(platform: Platform, run: EvalRun) -> EvalRun:
    """Return `run` with every cached answer of its base and its previous adapter."""
    plain, _ = plain_suites(run)
    capability = [capability_id(name) for name in run.capability]
    known: dict[str, Mapping[str, Any]] = {}
    with platform.engine.connect() as conn:
        for subject in ("base", "previous"):
            if (digest := run.digests.get(subject)) is None:
                continue
            mine = eval_scores.c.subject_digest.startswith(known_answers_key(digest, ""), autoescape=True)
            exact = sa.select(eval_scores).where(mine, eval_scores.c.suite_digest.in_([suite.digest for suite in plain]))
            rows = list(conn.execute(exact))
            for suite in capability:  # their digests are known once the harness has built them
                newest = sa.select(eval_scores).where(mine, eval_scores.c.suite == suite).order_by(eval_scores.c.created_at.desc())
                rows += conn.execute(newest.limit(NEWEST))
            known[subject] = {known_answers_key(row.suite_digest, row.scores["environment"]): row.scores for row in rows}
    return replace(run, known=known)


def remember(platform: Platform, tenant: str, result: Mapping[str, Any]) -> None:
    """Cache the answers in `result`, except those that cannot be stored; existing entries stay."""
    rows = []
    for subject, sections in (result.get("subjects") or {}).items():
        for suite, section in (sections or {}).items():
            kind = result["suites"][suite]["kind"]
            owner = None if subject == "base" and kind in KINDS_OF_ALL else tenant
            scores = {k: section[k] for k in ("digest", "environment", "answers", "seconds")}
            with contextlib.suppress(InvalidRequest):  # a weak model may answer with NUL characters, which the database refuses
                check_storable(scores)
                rows.append({
                    "subject_digest": known_answers_key(result["digests"][subject], section["environment"]),
                    "suite_digest": section["digest"], "suite": suite, "tenant_id": owner, "scores": scores, "created_at": platform.clock(),
                })  # fmt: skip
    if rows:
        with platform.engine.begin() as conn:
            conn.execute(insert(eval_scores).on_conflict_do_nothing(), rows)


def forget(conn: Connection, tenant: str, job_id: str) -> int:
    """Delete the answers of the job's adapter, which no other will be compared with any more; returns how many entries."""
    final = (checkpoints.c.job_id == job_id) & checkpoints.c.final
    manifests = sa.union(
        sa.select(adapters.c.manifest_sha256).where(adapters.c.job_id == job_id), sa.select(checkpoints.c.manifest_sha256).where(final)
    )
    digests = [subject_digest("", manifest) for manifest in conn.execute(manifests).scalars()]
    own = sa.or_(sa.false(), *(eval_scores.c.subject_digest.contains(known_answers_key(digest, "")) for digest in digests))
    return conn.execute(sa.delete(eval_scores).where(eval_scores.c.tenant_id == tenant, own)).rowcount
