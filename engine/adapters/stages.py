"""Stages of an adapter and the one table of legal moves.

    draft ----> staging ----> production ----> deprecated ----> archived
      |  \\________________________^  |
      |                              +--(rollback)--> staging
      v
    quarantined ------> archived
      |
      +--(release)--> draft

The gate puts an adapter into ``draft`` or ``quarantined``. A quarantined one is kept and not served, unless a person releases it
(:mod:`engine.adapters.promotion_rules`): its verdict stays part of its record. Once registered, an adapter's record never changes: only
its stage moves, its approval and its release. One that a person has to approve waits in ``staging``. A deprecated one is not served; its
files stay for 30 days, in which it can be promoted again, and are then deleted: it is archived.

The database holds the same table (``adapter_stage_moves``) and refuses every other move.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from datetime import timedelta

from core.errors import Conflict


class Stage(enum.StrEnum):
    DRAFT = "draft"
    STAGING = "staging"
    PRODUCTION = "production"
    QUARANTINED = "quarantined"
    DEPRECATED = "deprecated"
    ARCHIVED = "archived"


S = Stage
DEPRECATION_GRACE = timedelta(days=30)
"""Time from deprecation to deletion."""

STAGE_TRANSITIONS: Mapping[Stage, frozenset[Stage]] = {
    S.DRAFT: frozenset({S.STAGING, S.PRODUCTION, S.QUARANTINED, S.DEPRECATED, S.ARCHIVED}),
    S.STAGING: frozenset({S.PRODUCTION, S.QUARANTINED, S.DEPRECATED, S.ARCHIVED}),
    S.PRODUCTION: frozenset({S.STAGING, S.DEPRECATED}),
    S.QUARANTINED: frozenset({S.DRAFT, S.ARCHIVED}),
    S.DEPRECATED: frozenset({S.PRODUCTION, S.ARCHIVED}),
    S.ARCHIVED: frozenset(),
}


def check_transition(adapter_id: str, current: Stage, target: Stage) -> None:
    """Refuses an illegal move and names the legal ones."""
    if target in STAGE_TRANSITIONS[current]:
        return
    legal = ", ".join(sorted(STAGE_TRANSITIONS[current])) or "none: it is final"
    raise Conflict(f"adapter {adapter_id} is {current} and cannot become {target}; legal next stages: {legal}", param="stage")
