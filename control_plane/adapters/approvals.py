"""Adapters that a person has to approve: they wait in staging, and no promotion takes one that nobody has approved.

A job asks for that with ``eval_config.approval: "required"``. Who approved or rejected, when, and what they noted is kept with the
adapter; any key of the tenant that may write can do it, another one than submitted the job as well.
"""

from __future__ import annotations

import sqlalchemy as sa

from control_plane.adapters import lineage_errors, promotions
from control_plane.adapters import service as registry
from control_plane.adapters.service import Adapter
from control_plane.adapters.tables import adapters
from control_plane.platform.context import Platform
from ft_assets.adapters.stages import Stage
from ft_assets.errors import Conflict, InvalidRequest
from ft_assets.storable_text import printable

NONE, PENDING, APPROVED, REJECTED = "none", "pending", "approved", "rejected"
MAX_NOTE_CHARS = 2000


def approve(platform: Platform, tenant: str, reference: str, *, key_id: str, note: str | None = None, promote: bool = False) -> Adapter:
    """Let an adapter be promoted, and promote it if asked to. Approving again changes nothing; what was rejected can be approved."""
    decided = _decide(platform, tenant, reference, APPROVED, key_id=key_id, note=note)
    return promotions.promote(platform, tenant, decided["id"]) if promote else decided


def reject(platform: Platform, tenant: str, reference: str, *, key_id: str, note: str | None = None) -> Adapter:
    """Keep an adapter from being promoted; one that is in production has to be rolled back or deprecated first."""
    return _decide(platform, tenant, reference, REJECTED, key_id=key_id, note=note)


def _decide(platform: Platform, tenant: str, reference: str, decision: str, *, key_id: str, note: str | None) -> Adapter:
    if note is not None and len(note) > MAX_NOTE_CHARS:
        raise InvalidRequest(f"note has {len(note)} characters, at most {MAX_NOTE_CHARS} are kept", code="invalid_note", param="note")
    with platform.engine.begin() as conn:
        row = registry.locked_row(conn, tenant, registry.find_record(platform, tenant, reference).id)
        _check(row["id"], Stage(row["stage"]), row["approval"], decision)
        if row["approval"] != decision:
            signed = {"approved_by": key_id, "approved_at": platform.clock(), "approval_note": None if note is None else printable(note)}
            with lineage_errors.kept(f"adapter {row['id']}"):
                conn.execute(sa.update(adapters).where(adapters.c.id == row["id"]).values(approval=decision, **signed))
    return registry.get_adapter(platform, tenant, row["id"])


def _check(id_: str, stage: Stage, approval: str, decision: str) -> None:
    if approval == NONE:
        raise Conflict(
            f"adapter {id_} needs no approval: its job did not ask for one; promote it, or deprecate it", code="approval_not_asked_for"
        )
    if decision == REJECTED and stage is Stage.PRODUCTION:
        raise Conflict(
            f"adapter {id_} is in production; roll it back or deprecate it before you reject it", code="invalid_state", param="stage"
        )
    if decision == APPROVED and stage in (Stage.QUARANTINED, Stage.ARCHIVED):
        raise Conflict(
            f"adapter {id_} is {stage} and can never be served; there is nothing to approve", code="invalid_state", param="stage"
        )
