"""Preemption: which running jobs are stopped, with a checkpoint, so that another one starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from engine.scheduler.model import TIER_ORDER, Placement, Running, Waiting
from engine.scheduler.node_timeline import NodeTimeline
from engine.scheduler.order import remaining_wait
from engine.scheduler.placement import TIE_S, PoolTimeline, length
from engine.scheduler.pools import RESERVED_FOR
from engine.scheduler.rules import Rules

MOST_DOUBLINGS = 10
"""Of the least run time of an attempt: ten days, after which one more stop costs nothing that matters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stops:
    """Nodes for a job, and the jobs to stop so that it gets them."""

    pool: str
    placement: Placement
    victims: tuple[Running, ...]
    lost_s: float

    def key(self) -> tuple[int, int, float, int, str, Placement]:
        """Sort key, cheapest first: no victim of a higher tier than needed, few due jobs, little lost work, few victims."""
        tier = -min((TIER_ORDER[v.tier] for v in self.victims), default=len(TIER_ORDER))
        due = sum(remaining_wait(v) <= 0.0 for v in self.victims)
        return tier, due, self.lost_s, len(self.victims), self.pool, self.placement


def lost_s(job: Running, *, now: float, rules: Rules) -> float:
    """Return the expected cost of stopping it in GPU-seconds: saving and loading, plus unsaved work that a notice does not save."""
    saved = max(job.started_at, job.saved_at or job.started_at)
    return (rules.overhead_s + rules.unsaved_share * max(0.0, now - saved)) * job.num_gpus


def order_preemptees(running: Sequence[Running], *, longest: bool = False, now: float, rules: Rules) -> list[Running]:
    """Return running jobs in the order in which they would be stopped.

    1. Lower tier first.
    2. Jobs that are not due before those that are.
    3. For a premium job, less lost work first; for others (`longest`), the longest remaining time first.
    4. Started later first.
    5. Job id, so that ties always sort alike.
    """

    def key(job: Running) -> tuple[int, bool, float, float, str]:
        tier = -TIER_ORDER[job.tier]
        cost = -job.expected_end if longest else lost_s(job, now=now, rules=rules)
        return tier, remaining_wait(job) <= 0.0, cost, -job.started_at, job.job_id

    return sorted(running, key=key)


def is_protected(job: Running, *, now: float, rules: Rules) -> bool:
    """Whether the job may not be stopped.

    1. It is being stopped, another transaction has locked its rows, or it starts in this very cycle.
    2. It is nearly done, or runs past its estimate.
    3. It is past a share of its expected time.
    4. It was stopped before, and this attempt has not run for the cool-down.
    """
    left = job.expected_end - now
    least_left = max(rules.least_left_s, (1.0 - rules.protect_past) * job.expected_s)
    if job.stopping or not job.stoppable or job.started_at >= now or left < least_left:
        return True
    return job.preemptions > 0 and now - job.started_at < rules.cool_down_s


def yields_to_slice(job: Running, *, least_queue_wait: float, now: float, rules: Rules) -> bool:
    """Rule 5.2: a job may have to make room for one that is due, or much shorter (:func:`makes_room`).

    Never stopped are

    1. premium jobs;
    2. jobs whose wait is used up: they would be due again at once. A running job has at least the maximum wait of its tier's waiting jobs;
    3. jobs that have not run for a while in this attempt: twice as long after each stop.
    """
    if job.tier == RESERVED_FOR or max(remaining_wait(job), least_queue_wait - job.waited_s) <= rules.overhead_s:
        return False
    return now - job.started_at >= rules.least_run_s * 2.0 ** min(job.preemptions, MOST_DOUBLINGS)


def makes_room(job: Running, other: Waiting, *, due: bool, now: float, rules: Rules) -> bool:
    """Whether a job that yields by rule 5.2 does so to `other`: one of its own or a higher tier that is due, or for which the job has
    many times as long to run."""
    if TIER_ORDER[job.tier] < TIER_ORDER[other.tier]:
        return False
    weight = (job.num_gpus / other.num_gpus) ** rules.size_exponent
    return due or (job.expected_end - now) * weight >= rules.shorter_by * length(other)


def cheapest(job: Waiting, pool: PoolTimeline, victims: Sequence[Running], *, now: float, rules: Rules) -> Stops | None:
    """Return nodes of `pool` on which `job` can start after the handshake, and which of `victims`, in their order, to stop for it.

    1. A gang that fits on one node: the node with the cheapest victims, stopping as few as suffice in their order. Only nodes that need the
       fewest GPUs of others are examined.
    2. A wider gang: the nodes of one fabric that are cheapest to empty; on the last one, only what is left of the gang.
    3. No reservation is delayed: after the stops, the gang fits for its whole length.

    Returns None if nothing suffices.
    """
    if not victims:
        return None
    search = _Search(job, pool, victims, now=now, rules=rules)
    found = search.on_a_node() if job.num_gpus <= pool.largest else search.on_nodes()
    return next((s for s in sorted(found, key=Stops.key) if s.victims and search.allowed(s)), None)


class _Search:
    def __init__(self, job: Waiting, pool: PoolTimeline, victims: Sequence[Running], *, now: float, rules: Rules) -> None:
        self.job, self.pool, self.now, self.rules = job, pool, now, rules
        self.moment = now + rules.handshake_s
        self.victims = victims
        self.rank = {v.job_id: i for i, v in enumerate(victims)}
        self.nodes = {name for v in victims for name, _ in v.placement}
        """Nodes on which victims run."""

    def on_a_node(self) -> list[Stops]:
        need = self.job.num_gpus
        nodes = [r for r in self.pool.nodes if r.size >= need and r.name in self.nodes]
        nodes.sort(key=lambda r: (max(0, self.pool.takes(r, need) - r.free), r.index))
        found = ((r, v) for r in nodes if (v := self._emptied(r, need)) is not None)
        return [self._stops(((r.name, need),), v) for r, v in islice(found, self.rules.candidates)]

    def on_nodes(self) -> list[Stops]:
        return [s for nodes in self.pool.fabrics.values() if (s := self._on_fabric(nodes)) is not None]

    def _on_fabric(self, nodes: Sequence[NodeTimeline]) -> Stops | None:
        emptied = [(r, v) for r in nodes if (v := self._emptied(r, r.size)) is not None]
        ranked = sorted(((self._stops(((r.name, r.size),), v), r, v) for r, v in emptied), key=lambda e: (-e[1].size, *e[0].key()))
        left, placement, victims = self.job.num_gpus, [], dict[str, Running]()
        while left > 0 and ranked:
            _, node, needed = ranked.pop(0)
            if left < node.size:
                needed = self._emptied(node, left) or []
            placement.append((node.name, min(left, node.size)))
            victims |= {v.job_id: v for v in needed}
            left -= node.size
        return self._stops(tuple(placement), tuple(victims.values())) if left <= 0 else None

    def _stops(self, placement: Placement, victims: Sequence[Running]) -> Stops:
        lost = sum(lost_s(v, now=self.now, rules=self.rules) for v in victims)
        return Stops(pool=self.pool.pool.name, placement=placement, victims=tuple(victims), lost_s=lost)

    def _emptied(self, node: NodeTimeline, num_gpus: int) -> list[Running] | None:
        """Return the jobs to stop for `num_gpus` of this node; None if they do not suffice."""
        need = self.pool.takes(node, num_gpus)
        chosen = [j for _, _, j in node.ends if j in self.rank]
        if not self._fits(node, chosen, need):
            return None
        chosen.sort(key=self.rank.__getitem__)
        for job_id in reversed(chosen[:]):
            if self._fits(node, rest := [c for c in chosen if c != job_id], need):
                chosen = rest
        return [self.victims[self.rank[c]] for c in chosen]

    def _fits(self, node: NodeTimeline, stopped: Sequence[str], need: int) -> bool:
        if not node.claims:  # it stays free
            return node.free + sum([n for end, n, j in node.ends if j in stopped or end <= self.moment + TIE_S]) >= need
        other = node.without(frozenset(stopped), self.moment) if stopped else node
        return other.earliest(need, length(self.job), self.moment) <= self.moment + TIE_S

    def allowed(self, stops: Stops) -> bool:
        """Whether all nodes together, and the unreserved GPUs, suffice."""
        if self.job.tier == RESERVED_FOR:
            return True
        shared = self.pool.shared.without(frozenset(v.job_id for v in stops.victims), self.moment)
        return shared.earliest(self.pool.held(stops.placement), length(self.job), self.moment) <= self.moment + TIE_S
