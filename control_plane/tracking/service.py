"""A tenant's key for Weights & Biases: set, shown by its last characters, removed. Only the worker reads it."""

from __future__ import annotations

import re

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from control_plane.platform import records
from control_plane.platform.context import Platform
from control_plane.platform.secrets import seal
from control_plane.tracking.tables import Integration, integrations
from core.errors import InvalidRequest, NotFound

WANDB = "wandb"
KEY = re.compile(r"[!-~]{20,512}")
"""Keys of W&B are letters, digits, ``-`` and ``_``, 40 or more; servers of one's own may make others."""
HINT_CHARS = 4


def set_wandb(platform: Platform, tenant: str, *, api_key: str) -> Integration:
    """Store the tenant's key in place of an earlier one. It is not tried: the first job that uses it reports if W&B refuses it."""
    if platform.wandb is None:
        raise InvalidRequest(
            "this installation sends nothing to Weights & Biases (FT_WANDB_URL is off)", code="unsupported_integration", param="type"
        )
    given = api_key.strip()
    if not KEY.fullmatch(given):
        raise InvalidRequest(
            f"the key has {len(given)} characters or contains spaces; copy the whole key from your W&B settings (40 characters or more)",
            code="invalid_integration_key",
            param="api_key",
        )
    now = platform.clock()
    values = {"sealed_key": seal(platform.settings, given), "hint": f"...{given[-HINT_CHARS:]}", "updated_at": now}
    stored = insert(integrations).values(tenant_id=tenant, type=WANDB, created_at=now, **values)
    with platform.engine.begin() as conn:
        conn.execute(stored.on_conflict_do_update(index_elements=["tenant_id", "type"], set_=values))
    return get_wandb(platform, tenant)


def find_wandb(platform: Platform, tenant: str) -> Integration | None:
    """Return the integration, None if the tenant has stored no key."""
    query = sa.select(*records.columns(integrations, Integration)).where(_mine(tenant))
    with platform.engine.connect() as conn:
        return records.one_or_none(conn, query, Integration)


def get_wandb(platform: Platform, tenant: str) -> Integration:
    """Return the integration; ``NotFound`` if the tenant has stored no key."""
    if (found := find_wandb(platform, tenant)) is None:
        raise _not_found()
    return found


def remove_wandb(platform: Platform, tenant: str) -> None:
    """Delete the key. Running jobs stop sending."""
    with platform.engine.begin() as conn:
        if not conn.execute(sa.delete(integrations).where(_mine(tenant))).rowcount:
            raise _not_found()


def _mine(tenant: str) -> sa.ColumnElement[bool]:
    return (integrations.c.tenant_id == tenant) & (integrations.c.type == WANDB)


def _not_found() -> NotFound:
    return NotFound("no key for Weights & Biases is stored; set one with PUT /v1/integrations/wandb", code="integration_not_found")
