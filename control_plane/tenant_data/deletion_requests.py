"""Requests of deletions: by retention, for adapters past their grace period, and by tenants or operators, for all of a tenant's data."""

from __future__ import annotations

import sqlalchemy as sa

from control_plane.adapters.service import set_stage
from control_plane.adapters.tables import adapters
from control_plane.platform.context import Platform
from control_plane.tenant_data import deletion
from control_plane.tenant_data.erasure import AdapterFiles, Servers
from control_plane.tenant_data.tables import Deletion
from control_plane.tenants import service as tenants
from core.errors import Forbidden, InvalidRequest
from engine.adapters import DEPRECATION_GRACE, Stage

MAX_REASON_CHARS = 1000
AT_A_TIME = 100


def request_tenant(
    platform: Platform, tenant: str, *, confirm: str, reason: str, requested_by: str, close_account: bool = False, by_owner: bool = True
) -> Deletion:
    """Request the deletion of everything `tenant` has stored, now and until it is done; returns the open one if there is one.

    `confirm` is the tenant's id again, because a deletion cannot be undone. `close_account`: the account ends with it, also with one that
    is open already; an owner's to ask (`by_owner`). ``Conflict`` (``account_closed``) afterwards.
    """
    if close_account and not by_owner:
        raise Forbidden(
            "only an owner closes the account; use an owner's key, or one of the tenant's own that an owner made",
            code="owner_required",
            param="close_account",
        )
    if confirm != tenant:
        raise InvalidRequest(
            f"confirm {confirm[:60]!r} is not the tenant's id {tenant!r}; type the id to delete all of its data permanently",
            code="not_confirmed",
            param="confirm",
        )
    if len(reason) > MAX_REASON_CHARS:
        raise InvalidRequest(f"reason has {len(reason)} characters, at most {MAX_REASON_CHARS} are kept", param="reason")
    with platform.engine.begin() as conn:
        tenants.lock_open(conn, tenant)
        return deletion.request(
            conn, tenant=tenant, kind=deletion.TENANT, subject=tenant, reason=reason, requested_by=requested_by, now=platform.clock(),
            closes_account=close_account,
        )  # fmt: skip


def archive_due(platform: Platform, *, at_a_time: int = AT_A_TIME) -> list[str]:
    """Archive deprecated adapters past their grace period that nothing needs; returns the ids of their deletions.

    Archives and requests in one transaction: from then on the adapter cannot be promoted, and its files are deleted.
    """
    due = adapters.c.deprecated_at <= platform.clock() - DEPRECATION_GRACE
    query = sa.select(adapters.c.id, adapters.c.tenant_id).where(adapters.c.stage == Stage.DEPRECATED.value, due)
    with platform.engine.connect() as conn:
        found = conn.execute(query.order_by(adapters.c.deprecated_at).limit(at_a_time)).all()
    made, servers = [], Servers(platform=platform)
    for row in found:
        needed = AdapterFiles(tenant=row.tenant_id, id=row.id).needed_by(platform, servers)
        if needed is None and (id_ := _archive(platform, row.tenant_id, row.id)):
            made.append(id_)
    return made


def _archive(platform: Platform, tenant: str, adapter_id: str) -> str | None:
    """Return None if it was promoted again meanwhile."""
    now = platform.clock()
    with platform.engine.begin() as conn:
        still = sa.select(adapters.c.deprecated_at).where(adapters.c.id == adapter_id, adapters.c.stage == Stage.DEPRECATED.value)
        deprecated_at = conn.execute(still.with_for_update()).scalar()
        if deprecated_at is None or deprecated_at > now - DEPRECATION_GRACE:
            return None
        set_stage(conn, adapter_id, Stage.ARCHIVED, archived_at=now)
        reason = f"deprecated at {deprecated_at:%Y-%m-%d %H:%M} UTC, and the {DEPRECATION_GRACE.days} days of grace are over"
        return deletion.request(
            conn, tenant=tenant, kind=deletion.ADAPTER, subject=adapter_id, reason=reason, requested_by="retention", now=now
        ).id
