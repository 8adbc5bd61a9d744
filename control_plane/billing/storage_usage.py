"""Samples once a day what tenants store, and posts one entry per day from it.

Sizes come from the database if a row has them (files, exports); checkpoints, adapters, datasets, packs and upload parts are listed in the
object store by prefix, a thousand keys per call, once a day per tenant. Only what exists at that moment counts. A day without a sample is
not billed: a missing measurement is the platform's failure.
"""

from __future__ import annotations

import calendar
import logging
import time
from datetime import UTC, date, datetime

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from control_plane.adapters.tables import exports
from control_plane.billing import ledger, prices
from control_plane.billing.metering.rounds import Round
from control_plane.billing.prices import PriceBook
from control_plane.billing.rules import Entry, storage_id
from control_plane.billing.tables import storage_samples
from control_plane.datasets.tables import files
from control_plane.platform.context import Platform
from control_plane.tenants.tables import tenants
from core import layout
from core.errors import FtError

BUDGET_S = 20.0
"""Tenants per pass; the next pass continues."""
CLASSES = ("files", "datasets", "checkpoints", "adapters", "exports")
LISTED = {
    "uploads": "files", "datasets": "datasets", "packs": "datasets", "references": "datasets", "jobs": "checkpoints",
    "adapters": "adapters",
}  # fmt: skip
"""Storage class by directory of a tenant. What jobs leave is nearly all checkpoints; upload parts count as files."""

log = logging.getLogger(__name__)


def sample_due(platform: Platform, *, budget_s: float = BUDGET_S) -> int:
    """Sample tenants without a sample of today, and post their entries; returns how many. Concurrent calls post one entry."""
    until, today = time.monotonic() + budget_s, platform.clock().astimezone(UTC).date()
    seen = sa.exists().where(storage_samples.c.tenant_id == tenants.c.id, storage_samples.c.day == today)
    with platform.engine.connect() as conn:
        due = conn.execute(sa.select(tenants.c.id, tenants.c.tier).where(~seen).order_by(tenants.c.id)).all()
    done, book = 0, prices.load(platform.settings.prices_file)
    with Round("tenants") as each:
        for row in due:
            if time.monotonic() >= until:
                break
            with each(row.id):
                done += _sample(platform, row.id, row.tier, today, book)
    return done


def measured(platform: Platform, tenant: str) -> dict[str, int]:
    """Return the bytes of `tenant` by class, now."""
    found = dict.fromkeys(CLASSES, 0)
    kept = sa.select(sa.func.sum(files.c.bytes)).where(files.c.tenant_id == tenant, files.c.deleted_at.is_(None))
    ready = sa.select(sa.func.sum(exports.c.bytes)).where(exports.c.tenant_id == tenant, exports.c.status == "ready")
    with platform.engine.connect() as conn:
        found |= {kind: int(conn.execute(query).scalar() or 0) for kind, query in (("files", kept), ("exports", ready))}
    for directory, kind in LISTED.items():
        found[kind] += sum(info.size_bytes for info in platform.objects.list(f"{layout.tenant_prefix(tenant)}/{directory}"))
    return found


def entry(tenant: str, tier: str, day: date, stored: dict[str, int], book: PriceBook) -> Entry:
    """Return the entry of one day: storage beyond the tier's allowance, for one day of its month."""
    at = datetime(day.year, day.month, day.day, tzinfo=UTC)
    held, whole = book.at(at), sum(stored.values())
    days = calendar.monthrange(day.year, day.month)[1]
    amount = held.storage_micros_per_day(tier=tier, stored_bytes=whole, days_in_month=days)
    of_tier = held.tiers[tier]
    detail = {
        "bytes": stored, "stored_bytes": whole, "allowance_bytes": of_tier.storage_allowance_bytes, "tier": tier,
        "tier_percent": of_tier.storage_percent, "micros_per_gib_month": held.storage.micros_per_gib_month, "days_in_month": days,
        "prices_of": held.valid_from.isoformat(),
    }  # fmt: skip
    return Entry(id=storage_id(tenant, day), kind="storage", amount_micros=amount, list_micros=amount, occurred_at=at, detail=detail)


def _sample(platform: Platform, tenant: str, tier: str, day: date, book: PriceBook) -> bool:
    try:
        stored = measured(platform, tenant)
    except (FtError, OSError) as error:
        log.warning("what %s stores is not measured yet: %s", tenant, error)
        return False
    now = platform.clock()
    values = {"tenant_id": tenant, "day": day, "bytes": stored, "created_at": now}
    with platform.engine.begin() as conn:
        new = insert(storage_samples).values(values).on_conflict_do_nothing().returning(storage_samples.c.day)
        if conn.execute(new).scalar() is None:
            return False
        return ledger.post(conn, tenant, entry(tenant, tier, day, stored, book), now=now)
