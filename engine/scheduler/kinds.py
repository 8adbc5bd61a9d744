"""What alike jobs share, derived once per decision: the pools that could ever hold them, and the jobs they compete with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.scheduler.model import Running, Snapshot, Waiting
from engine.scheduler.placement import PoolTimeline
from engine.scheduler.pools import may_use_spot, pools_in_order

Group = tuple[str, frozenset[str]]
"""Jobs that compete for the same GPUs: a tier, and the pools that could ever hold them."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Kind:
    """Jobs of one tier, class and width that may or may not use spot GPUs. Equal only to itself, which makes it a fast key."""

    pools: tuple[str, ...]
    """Those that could ever hold the jobs, preferred first; those under maintenance only if all of them are."""
    group: Group


class Kinds:
    """Looks up the :class:`Kind` of a job; `timelines` by pool."""

    def __init__(self, snapshot: Snapshot, timelines: Mapping[str, PoolTimeline]) -> None:
        self.snapshot, self.timelines = snapshot, timelines
        self._known: dict[tuple[str, str, int, bool, bool], Kind] = {}

    def of(self, job: Waiting | Running) -> Kind:
        spot = job.spot and may_use_spot(spot=True, tier=job.tier, expected_s=job.expected_s)
        evaluation = isinstance(job, Waiting) and job.evaluation is not None
        key = (job.tier, job.job_class, job.num_gpus, spot, evaluation)
        kind = self._known.get(key)
        if kind is None:
            kind = self._known[key] = self._derive(*key)
        return kind

    def _derive(self, tier: str, job_class: str, num_gpus: int, spot: bool, evaluation: bool) -> Kind:
        """An evaluation on several GPUs needs a node in service that has them: it is one process."""
        pools = pools_in_order(self.snapshot.pools, tier=tier, kind=job_class, num_gpus=num_gpus, spot=spot)
        able = [p for p in pools if self.timelines[p.name].could_hold(num_gpus, tier)]
        if evaluation and num_gpus > 1:
            able = [p for p in able if num_gpus <= self.timelines[p.name].largest]
        names = tuple(p.name for p in able if p.name not in self.snapshot.closed) or tuple(p.name for p in able)
        return Kind(pools=names, group=(tier, frozenset(names)))
