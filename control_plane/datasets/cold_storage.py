"""Moves datasets that no job has used for long to cheaper storage; they can still be read from there."""

from __future__ import annotations

import logging
import time
from datetime import timedelta

import sqlalchemy as sa

from control_plane.datasets.tables import datasets, files
from control_plane.jobs.tables import jobs, names_file, trained_on_dataset
from control_plane.platform.context import Platform
from control_plane.platform.job_states import FINAL
from core import layout
from core.retries import FAILURES

log = logging.getLogger(__name__)

BUDGET_S = 15.0
"""Time limit of one pass in seconds, apart from the dataset under way."""
MAX_DATASETS = 100


def cool_unused(platform: Platform, *, budget_s: float = BUDGET_S, at_a_time: int = MAX_DATASETS) -> int:
    """Move datasets, and their uploads, that no job has needed for ``cold_after_days``; returns how many.

    A dataset that is used later stays there: cold storage is slower or costlier to read, but readable.
    """
    until = time.monotonic() + budget_s
    with platform.engine.connect() as conn:
        unused = conn.execute(_unused(platform).limit(at_a_time)).all()
    cooled = 0
    for row in unused:
        if time.monotonic() >= until:
            break
        try:
            if not _cool(platform, row.tenant_id, row.id):
                return cooled  # the store has no cold storage
        except FAILURES as error:
            log.warning("dataset %s of %s is not in cold storage yet: %s", row.id, row.tenant_id, error)
            continue
        cooled += 1
    return cooled


def _unused(platform: Platform) -> sa.Select[tuple[str, str]]:
    """Oldest first. A job counts from its end, and as use until then."""
    limit = platform.clock() - timedelta(days=platform.settings.cold_after_days)
    mine = (jobs.c.tenant_id == datasets.c.tenant_id) & trained_on_dataset(datasets.c.id)
    used = sa.exists().where(mine, sa.or_(jobs.c.state.not_in(FINAL), sa.func.coalesce(jobs.c.finished_at, jobs.c.created_at) > limit))
    of = files.alias("named")
    named = sa.exists().where(
        of.c.tenant_id == datasets.c.tenant_id, of.c.dataset_id == datasets.c.id, names_file(of.c.id), jobs.c.state.not_in(FINAL)
    )
    return (
        sa.select(datasets.c.tenant_id, datasets.c.id)
        .where(datasets.c.cooled_at.is_(None), datasets.c.created_at <= limit, ~used, ~named)
        .order_by(datasets.c.created_at, datasets.c.id)
    )


def _cool(platform: Platform, tenant: str, dataset_id: str) -> bool:
    """Returns False if the store has no cold storage."""
    with platform.engine.connect() as conn:
        query = sa.select(files.c.id).where(files.c.tenant_id == tenant, files.c.dataset_id == dataset_id, files.c.deleted_at.is_(None))
        uploads = [f"{layout.tenant_prefix(tenant)}/files/{layout.checked_id(id_)}" for id_ in conn.execute(query).scalars()]
    for prefix in (layout.dataset_prefix(tenant, dataset_id), *uploads):
        if platform.objects.cool(prefix) is None:
            return False
    with platform.engine.begin() as conn:
        this = (datasets.c.tenant_id == tenant) & (datasets.c.id == dataset_id)
        conn.execute(sa.update(datasets).where(this).values(cooled_at=platform.clock()))
    return True
