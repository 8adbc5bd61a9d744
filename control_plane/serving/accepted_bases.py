"""Bases on which an adapter may be served: the one it was trained on, and those on which its newest evaluation passed."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.adapters.tables import adapters
from control_plane.evaluations.tables import evaluations
from ft_assets.adapters.record import AdapterRecord
from ft_assets.evals.gate.verdict import PASSED

SUCCEEDED = "succeeded"
"""State of an evaluation with a verdict."""


def accepted_digests(conn: Connection, record: AdapterRecord) -> frozenset[str]:
    """Return the bases on which the adapter may be served: the one it was trained on, and those on which its last verdict is a pass."""
    return frozenset({record.base_digest, *(digest for _, digest in _passed(conn, evaluations.c.adapter_id == record.id))})


def accepted_on_other_bases(conn: Connection, digests: Collection[str]) -> frozenset[tuple[str, str]]:
    """Return (adapter, base digest) pairs, over all adapters, for those of these bases that the adapter may be served on but was not
    trained on."""
    return _passed(conn, evaluations.c.base_digest.in_(digests) & (evaluations.c.base_digest != adapters.c.base_digest))


def _passed(conn: Connection, which: sa.ColumnElement[bool]) -> frozenset[tuple[str, str]]:
    """Return the adapters and base digests whose newest verdict by the job's own rules is a pass."""
    query = (
        sa.select(evaluations.c.adapter_id, evaluations.c.base_digest, evaluations.c.outcome)
        .join(adapters, adapters.c.id == evaluations.c.adapter_id)
        .where(which, evaluations.c.state == SUCCEEDED, evaluations.c.eval_config.is_(None))
        .order_by(evaluations.c.finished_at, evaluations.c.id)
    )
    newest = {(row.adapter_id, row.base_digest): row.outcome for row in conn.execute(query)}
    return frozenset(where for where, outcome in newest.items() if outcome == PASSED)
