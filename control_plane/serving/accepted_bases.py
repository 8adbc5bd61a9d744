"""Bases on which an adapter may be served: the one it was trained on, and those on which its newest evaluation passed."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.adapters.tables import adapters
from control_plane.evaluations.tables import evaluations
from ft_assets.evals.gate.verdict import PASSED

SUCCEEDED = "succeeded"
"""State of an evaluation with a verdict."""


def accepted_digests(conn: Connection, adapter_id: str, own_digest: str) -> frozenset[str]:
    """Return the bases on which the adapter may be served: the one it was trained on, and those on which its last verdict is a pass."""
    query = (
        sa.select(evaluations.c.base_digest, evaluations.c.outcome)
        .where(evaluations.c.adapter_id == adapter_id, evaluations.c.state == SUCCEEDED, evaluations.c.eval_config.is_(None))
        .order_by(evaluations.c.finished_at, evaluations.c.id)
    )
    newest = {row.base_digest: row.outcome for row in conn.execute(query)}
    return frozenset({own_digest, *(digest for digest, outcome in newest.items() if outcome == PASSED)})


def accepted_on_other_bases(conn: Connection, digests: Collection[str]) -> frozenset[tuple[str, str]]:
    """Return (adapter, base digest) pairs, over all adapters, for those of these bases that the adapter may be served on but was not
    trained on."""
    query = (
        sa.select(evaluations.c.adapter_id, evaluations.c.base_digest, evaluations.c.outcome)
        .join(adapters, adapters.c.id == evaluations.c.adapter_id)
        .where(evaluations.c.base_digest.in_(digests), evaluations.c.base_digest != adapters.c.base_digest)
        .where(evaluations.c.state == SUCCEEDED, evaluations.c.eval_config.is_(None))
        .order_by(evaluations.c.finished_at, evaluations.c.id)
    )
    newest = {(row.adapter_id, row.base_digest): row.outcome for row in conn.execute(query)}
    return frozenset(where for where, outcome in newest.items() if outcome == PASSED)
