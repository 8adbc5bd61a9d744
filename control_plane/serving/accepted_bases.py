"""Bases on which an adapter may be served: the one it was trained on, those on which its newest evaluation passed, and the present files of
its base model if the catalogue says that they answer alike."""

from __future__ import annotations

from collections.abc import Collection

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from control_plane.adapters.tables import adapters
from control_plane.evaluations.tables import evaluations
from core.base_models import Catalogue
from engine.adapters import AdapterRecord
from engine.evals import PASSED

SUCCEEDED = "succeeded"
"""State of an evaluation with a verdict."""


def accepted_digests(models: Catalogue, conn: Connection, record: AdapterRecord) -> frozenset[str]:
    """Return the bases on which the adapter may be served."""
    passed = {digest for _, digest in _passed(conn, evaluations.c.adapter_id == record.id)}
    alike = {models.card(record.base_model).digest} if record.base_digest in models.digests_alike(record.base_model) else set()
    return frozenset({record.base_digest, *passed, *alike})


def accepted_on_other_bases(models: Catalogue, conn: Connection, served: Collection[tuple[str, str]]) -> frozenset[tuple[str, str]]:
    """Return (adapter, base digest) pairs, over all adapters, for those of the `served` (base model, digest) that the adapter may be served
    on but was not trained on."""
    digests = {digest for _, digest in served}
    found = set(_passed(conn, evaluations.c.base_digest.in_(digests) & (evaluations.c.base_digest != adapters.c.base_digest)))
    for model in {model for model, _ in served}:
        if (alike := models.digests_alike(model)) and (present := models.card(model).digest) in digests:
            older = sa.select(adapters.c.id).where(adapters.c.base_model == model, adapters.c.base_digest.in_(alike))
            found |= {(adapter_id, present) for adapter_id in conn.execute(older).scalars()}
    return frozenset(found)


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
