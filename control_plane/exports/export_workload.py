"""Starts the workload of an export that holds a reservation."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import sqlalchemy as sa

from control_plane.adapters import adapter_signatures, exports
from control_plane.adapters.tables import Export
from control_plane.attempts import evaluation_endings, start
from control_plane.attempts import service as attempts
from control_plane.attempts.claims import Claim
from control_plane.attempts.exports.export_endings import archive_key
from control_plane.attempts.inputs import listed_files, stored_base_models
from control_plane.jobs.transitions import job_row
from control_plane.platform.context import Platform
from control_plane.platform.protocols import Launcher
from control_plane.queue.tables import reservations
from core import layout
from core.errors import FtError, NotAdmitted, Unavailable
from core.workload import Input, Kind, Output, Workload

GRACE_S = 10.0
"""Seconds between SIGTERM and SIGKILL: nothing is kept of an unfinished export."""
ARCHIVE = "export.tar"
"""As the process names it (:mod:`engine.adapters.exports.export_runner`), which this process does not import."""
PLACES = ("base_dir", "adapter_dir")
"""Fields of the order that are directories of the node."""


def carry_out(platform: Platform, launcher: Launcher, tenant: str, export_id: str) -> None:
    """Make an export that needs no device, or start or adopt the workload of one that holds a reservation. May be called again.

    If the export was deleted before its workload began, its reservation is released.
    """
    order = exports.find(platform, tenant, export_id)
    if order is not None and order.expected_s is None:
        exports.make(platform, tenant, export_id)
        adapter_signatures.sign_due(platform)
        return
    held = _held(platform, tenant, export_id)
    if held is None:
        return
    try:
        unbegun = start.start_or_adopt(platform, launcher, held, lambda p, h: describe(p, h, exports.must_find(p, tenant, export_id)))
    except FtError as error:
        if isinstance(error, Unavailable | NotAdmitted):
            raise
        attempts.finish(platform, held, evaluation_endings.refused(launcher.stop(held.workload, grace_s=0.0), error))
        return
    if unbegun is not None:
        attempts.finish(platform, held, unbegun)


def _held(platform: Platform, tenant: str, export_id: str) -> Claim | None:
    """Return the reservation of the export; None if it holds none."""
    r = reservations.c
    with platform.engine.connect() as conn:
        job_id = conn.execute(sa.select(r.job_id).where(r.export_id == export_id, r.released_at.is_(None))).scalar()
    if job_id is None:
        return None
    try:
        held = attempts.claim(platform, tenant, job_id, Kind.EXPORT)
    except NotAdmitted:
        return None
    return held if held.export_id == export_id else None


def describe(platform: Platform, held: Claim, order: Export) -> Workload:
    """Return the workload of an attempt; ``IntegrityError`` if the base model has changed."""
    record, content = exports.content_of(platform, order)
    with platform.engine.connect() as conn:
        job, key = job_row(conn, held.tenant, held.job_id), archive_key(conn, held)
    weights = layout.adapter_prefix(held.tenant, record.id)
    inputs = (
        Input(name="base_model_dir", files=stored_base_models.publish(platform, record.base_model, record.base_digest)),
        Input(name="adapter_dir", files=listed_files.of_weights(platform.objects, weights, manifest_sha256=record.manifest_sha256)),
    )
    run = {name: value for name, value in asdict(content(base_dir=Path(), adapter_dir=Path())).items() if name not in PLACES}
    return Workload(
        name=held.workload,
        kind=Kind.EXPORT,
        tenant=held.tenant,
        job=held.job_id,
        attempt=held.attempt,
        module="engine.adapters.exports.export_runner",
        run={"order": run},
        inputs=inputs,
        outputs=(Output(path=f"exports/{order.id}/{ARCHIVE}", key=key),),
        report_to=platform.settings.internal_url,
        placement=held.placement,
        image=str((job.spec or {}).get("image", "")),
        grace_s=GRACE_S,
        heartbeat_timeout_s=platform.settings.heartbeat_timeout_s,
        env=start.watched_as(held),
        labels={"tier": held.tier, "pool": held.pool},
    )
