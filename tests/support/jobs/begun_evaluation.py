"""An ordered evaluation that runs, without a GPU or a workload: for tests of its verdict."""

from __future__ import annotations

import sqlalchemy as sa

from control_plane.evaluations.tables import Evaluation, evaluations
from control_plane.platform.context import Platform
from control_plane.platform.records import one


def begin(platform: Platform, evaluation_id: str) -> Evaluation:
    """What the scheduler does when it starts a waiting evaluation."""
    this = (evaluations.c.id == evaluation_id) & (evaluations.c.state == "queued")
    begun = sa.update(evaluations).where(this).values(state="running", runs=evaluations.c.runs + 1, started_at=platform.clock())
    with platform.engine.begin() as conn:
        return one(conn, begun.returning(evaluations), Evaluation)
