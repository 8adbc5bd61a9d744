"""Where a gang goes: nodes of a pool that can hold it now or later without delaying any reservation; and the reservations themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from engine.scheduler.model import Placement, Reservation, Waiting
from engine.scheduler.node_timeline import NEVER, ROUNDING_S, ByFree, Claim, NodeTimeline
from engine.scheduler.pools import RESERVED_FOR, Pool

ROUNDS = 64
"""Bound on the search for a time at which all nodes of a gang are free together: each step moves one node to its next time."""


class PoolTimeline:
    """A pool's nodes over time.

    1. A gang that fits on one node goes onto one: in dense pools the fullest that fits, else an empty one.
    2. A wider gang takes whole nodes of one fabric, the largest first; the rest goes onto one more node, the fullest that fits. Of several
       fabrics, it uses the one with the fewest empty nodes that suffice.
    3. Tiers below premium together hold at most the pool's GPUs less the reserved ones, wherever those are.
    4. In pools with packing ``whole_node``, a node that holds a job holds no other: all of its GPUs count as held, so a node with any free
       GPU is entirely free.
    """

    def __init__(self, pool: Pool, now: float) -> None:
        self.pool, self.now = pool, now
        self.whole = pool.packing == "whole_node"
        self.nodes = [
            NodeTimeline(index=i, name=n.name, size=n.num_gpus, fabric=n.fabric, now=now)
            for i, n in enumerate(n for n in pool.nodes if n.ready)
        ]
        self.by_name = {r.name: r for r in self.nodes}
        self.largest = max((r.size for r in self.nodes), default=0)
        self.fabrics: dict[str, list[NodeTimeline]] = {}
        for node in self.nodes:
            self.fabrics.setdefault(node.fabric, []).append(node)
        sizes: dict[str, int] = {}
        for n in pool.nodes:
            sizes[n.fabric] = sizes.get(n.fabric, 0) + n.num_gpus
        self._widest = max(sizes.values(), default=0)
        self.shared = NodeTimeline(index=len(self.nodes), name="", size=pool.num_gpus - pool.reserved_gpus, fabric="", now=now)
        self._claimed: dict[int, NodeTimeline] = {}
        self._free = ByFree(())
        self.idle = 0
        """GPUs that no job holds now."""
        self._refused: dict[tuple[int, bool], float] = {}
        self._where: dict[str, list[NodeTimeline]] = {}
        self._together_now: dict[int, bool] = {}

    def ready(self) -> None:
        """Call when all running jobs are known; gangs are placed from here on."""
        for node in (*self.nodes, self.shared):
            node.settle()
        self._free = ByFree(self.nodes)
        self.idle = sum(r.free for r in self.nodes)

    def takes(self, node: NodeTimeline, num_gpus: int) -> int:
        """Return the GPUs that count as held if `num_gpus` of this node are used."""
        return node.size if self.whole else num_gpus

    def held(self, placement: Placement) -> int:
        """Return the GPUs that this placement takes from the pool."""
        return sum(self.takes(self.by_name[name], n) for name, n in placement if name in self.by_name)

    def run(self, job_id: str, tier: str, num_gpus: int, placement: Placement, end: float) -> None:
        """Add a running job; if its nodes are unknown, it is assumed to hold GPUs of the fullest nodes."""
        for name, n in placement or self._guess(num_gpus):
            node = self.by_name.get(name)
            if node is not None:  # a node that is not ready offers no GPUs
                takes = self.takes(node, n)
                node.run(takes, end, job_id)
                self._where.setdefault(job_id, []).append(node)
                if tier != RESERVED_FOR:
                    self.shared.run(takes, end, job_id)

    def _guess(self, num_gpus: int) -> Iterable[tuple[str, int]]:
        best = min((r for r in self.nodes if r.free >= num_gpus), key=lambda r: (r.free, r.index), default=None)
        if best is not None:
            return [(best.name, num_gpus)]
        found = []
        for node in sorted(self.nodes, key=lambda r: (-r.free, r.index)):
            n = min(node.free, num_gpus)
            if n > 0:
                found.append((node.name, n))
                num_gpus -= n
        return found

    def _hold(self, node: NodeTimeline, num_gpus: int, end: float, job_id: str, tier: str) -> None:
        node.hold(num_gpus, end, job_id)
        self.idle -= num_gpus
        if tier != RESERVED_FOR:
            self.shared.hold(num_gpus, end, job_id)

    # Placing now

    def fits_now(self, num_gpus: int, tier: str, length: float) -> Placement | None:
        """Return nodes for a gang that starts now and runs for `length`; remembers failures, because longer jobs do not fit either."""
        lower = tier != RESERVED_FOR
        if self._refused.get((num_gpus, lower), NEVER) <= length:
            return None
        found = self._fits_now(num_gpus, lower, self.now + length)
        if found is None:
            self._refused[num_gpus, lower] = length
        return found

    def _fits_now(self, num_gpus: int, lower: bool, until: float) -> Placement | None:
        if lower and not self.shared.fits_now(num_gpus, until):
            return None
        found = self._on_a_node_now(num_gpus, until) if num_gpus <= self.largest else self._on_nodes_now(num_gpus, until, lower)
        if found and lower and self.whole and not self.shared.fits_now(self.held(found), until):
            return None
        return found

    def _on_a_node_now(self, num_gpus: int, until: float) -> Placement | None:
        claimed = (r for r in self._claimed.values() if r.free >= num_gpus and r.fits_now(self.takes(r, num_gpus), until))
        fits = [(r.free, r.index) for r in claimed]
        if (other := self._free.fullest(num_gpus)) is not None:
            fits.append(other)
        return ((self.nodes[min(fits)[1]].name, num_gpus),) if fits else None

    def _on_nodes_now(self, num_gpus: int, until: float, lower: bool) -> Placement | None:
        empty = {
            fabric: [r for r in nodes if r.free == r.size and (not r.claims or r.fits_now(r.size, until))]
            for fabric, nodes in self.fabrics.items()
        }
        for fabric in sorted(empty, key=lambda f: (sum(r.size for r in empty[f]), f)):
            placement = _spread(num_gpus, empty[fabric], self.fabrics[fabric], lambda r, n: r.fits_now(n, until))
            if placement and not (lower and self.whole and not self.shared.fits_now(self.held(placement), until)):
                return placement
        return None

    # Placing later

    def earliest(self, num_gpus: int, tier: str, length: float, after: float) -> tuple[float, Placement]:
        """Return the first time from `after` on at which the gang fits for `length`, and where; never if no nodes can hold it."""
        lower = tier != RESERVED_FOR
        for _ in range(ROUNDS):
            if lower:
                after = self.shared.earliest(num_gpus, length, after)
            start, placement = self._earliest(num_gpus, length, after, self.shared.size if lower else self.pool.num_gpus)
            if start == NEVER or not lower:
                return start, placement
            after = self.shared.earliest(self.held(placement), length, start)
            if after == start:
                return start, placement
        return NEVER, ()

    def _earliest(self, num_gpus: int, length: float, after: float, most: int) -> tuple[float, Placement]:
        """Return the first time and nodes for the gang, among nodes of which it takes at most `most` GPUs."""
        if num_gpus <= self.largest:
            start: float = NEVER
            chosen: NodeTimeline | None = None
            for r in self.nodes:
                takes = r.size if self.whole else num_gpus
                time = r.earliest(takes, length, after) if r.size >= num_gpus and takes <= most else NEVER
                if time < start or (chosen and time == start and r.free < chosen.free):
                    start, chosen = time, r
            return (start, ((chosen.name, num_gpus),)) if chosen else (NEVER, ())
        found = [self._together(num_gpus, nodes, length, after) for nodes in self.fabrics.values()]
        return min((f for f in found if self.held(f[1]) <= most), key=lambda f: f[0], default=(NEVER, ()))

    def _together(self, num_gpus: int, nodes: Sequence[NodeTimeline], length: float, after: float) -> tuple[float, Placement]:
        if sum(r.size for r in nodes) < num_gpus:
            return NEVER, ()
        for _ in range(ROUNDS):
            empty_from = [r.earliest(r.size, length, after) for r in nodes]
            times = sorted(empty_from)
            for moment in times[num_gpus // self.largest - 1 :]:  # before that, too few nodes are free
                if moment == NEVER:
                    return NEVER, ()
                soon = [r for r, time in zip(nodes, empty_from, strict=True) if time <= moment]
                if placement := self._spread_at(num_gpus, nodes, soon, length, moment):
                    return moment, placement
            after = min((t for t in times if t > after), default=NEVER)
            if after == NEVER:
                break
        return NEVER, ()

    def _spread_at(
        self, num_gpus: int, nodes: Sequence[NodeTimeline], soon: Sequence[NodeTimeline], length: float, moment: float
    ) -> Placement | None:
        """`soon`: the nodes of which all may be free at `moment`."""
        empty = [r for r in soon if r.earliest(r.size, length, moment) == moment]
        return _spread(num_gpus, empty, nodes, lambda r, n: r.earliest(n, length, moment) == moment)

    def when_free(self, placement: Placement, tier: str, length: float, after: float) -> float:
        """Return the first time from `after` on at which exactly these nodes are free for `length`."""
        held = self.held(placement)
        for _ in range(ROUNDS):
            moment = self.shared.earliest(held, length, after) if tier != RESERVED_FOR else after
            moment = max([moment, *(r.earliest(self.takes(r, n), length, moment) for name, n in placement if (r := self.by_name[name]))])
            if moment in (after, NEVER):
                return moment
            after = moment
        return NEVER

    # Claiming

    def start(self, job_id: str, tier: str, placement: Placement, length: float) -> None:
        """The gang holds its nodes from now on."""
        for name, n in placement:
            node = self.by_name[name]
            free = node.index not in self._claimed
            if free:
                self._free.remove(node)
            self._hold(node, self.takes(node, n), self.now + length, job_id, tier)
            if free:
                self._free.add(node)

    def claim(self, job_id: str, tier: str, promise: Reservation, length: float) -> None:
        """The gang has its reserved nodes from the reserved start on."""
        start = max(self.now, promise.start)
        for name, n in promise.placement:
            node = self.by_name[name]
            if node.index not in self._claimed:
                self._free.remove(node)
                self._claimed[node.index] = node
            claim = Claim(job_id, start, start + length, self.takes(node, n))
            node.claim(claim)
            if tier != RESERVED_FOR:
                self.shared.claim(claim)

    def unclaim(self, job_id: str, placement: Placement) -> None:
        """Drop a reservation; jobs that were refused because of it may be tried again."""
        for name, _ in placement:
            node = self.by_name[name]
            node.unclaim(job_id)
            if not node.claims and node.index in self._claimed:
                del self._claimed[node.index]
                self._free.add(node)
        self.shared.unclaim(job_id)
        self._refused.clear()

    def can_hold(self, placement: Placement) -> bool:
        """Whether these nodes exist, are ready and are large enough."""
        return all(name in self.by_name and n <= self.by_name[name].size for name, n in placement)

    def end_sooner(self, job_ids: frozenset[str], end: float) -> None:
        """Record that running jobs that are being stopped release their GPUs at `end`."""
        for node in {r.index: r for j in job_ids for r in self._where.get(j, [])}.values():
            node.end_sooner(job_ids, end)
        self.shared.end_sooner(job_ids, end)

    def could_hold(self, num_gpus: int, tier: str) -> bool:
        """Whether the gang would fit if nothing ran, counting nodes that are not ready."""
        return num_gpus <= min(self._widest, self.pool.widest(tier))

    def together(self, num_gpus: int) -> bool:
        """Whether `num_gpus` are free on nodes that could hold such a gang, counting reserved ones as free."""
        if num_gpus not in self._together_now:
            self._together_now[num_gpus] = self._are_together(num_gpus)
        return self._together_now[num_gpus]

    def _are_together(self, num_gpus: int) -> bool:
        if num_gpus <= self.largest:
            return any(r.free >= num_gpus for r in self.nodes)
        return any(
            _spread(num_gpus, [r for r in nodes if r.free == r.size], nodes, lambda r, n: r.free >= n) for nodes in self.fabrics.values()
        )


def _spread(
    num_gpus: int, empty: Sequence[NodeTimeline], nodes: Sequence[NodeTimeline], fits: Callable[[NodeTimeline, int], bool]
) -> Placement | None:
    """Return whole nodes of `empty`, largest first, and the rest on one of `nodes`; None if they do not suffice."""
    chosen: list[tuple[str, int]] = []
    for node in sorted(empty, key=lambda r: (-r.size, r.index)):
        if node.size > num_gpus:
            break
        chosen.append((node.name, node.size))
        num_gpus -= node.size
        if not num_gpus:
            return tuple(chosen)
    names = {name for name, _ in chosen}
    rest = [r for r in nodes if r.name not in names and r.size >= num_gpus and fits(r, num_gpus)]
    if not chosen or not rest:
        return None
    best = min(rest, key=lambda r: (r.free, r.index))
    return (*chosen, (best.name, num_gpus))


TIE_S = 1.0
"""Times closer than this count as equal; a plan is not changed for less."""


class ReservationPlan:
    """The reservations in force, each with its GPUs claimed.

    1. A reservation is kept until its job starts: later placements leave its GPUs free from its start on.
    2. It may move earlier, to other nodes, when a job ended before its expected end.
    3. It moves later only if its own nodes become free later because a job there overran: by that much, and later reservations of these
       nodes with it. A reservation whose node is lost is void.
    """

    def __init__(self, timelines: Mapping[str, PoolTimeline], now: float) -> None:
        self.timelines, self.now = timelines, now
        self.of: dict[str, Reservation] = {}

    def keep(self, jobs: Sequence[Waiting], pools: Mapping[str, Sequence[str]]) -> None:
        """Claim stored reservations, earliest first; `pools`: those that could ever hold each job."""
        held = [(max(self.now, j.promise.start), i, j, j.promise) for i, j in enumerate(jobs) if j.promise]
        for start, _, job, promise in sorted(held, key=lambda h: h[:2]):
            if job.waiting_since is not None and promise.made_at < job.waiting_since:
                continue  # a reservation of an earlier stay is void
            if sum(n for _, n in promise.placement) != job.num_gpus:
                continue  # it was made for another width of the gang
            if promise.pool not in pools[job.job_id] or not self.timelines[promise.pool].can_hold(promise.placement):
                continue
            real = self.timelines[promise.pool].when_free(promise.placement, job.tier, length(job), start)
            if real < NEVER:
                self.make(job, replace(promise, start=real) if real > start + ROUNDING_S else promise)

    def make(self, job: Waiting, promise: Reservation) -> None:
        """Claim the reservation's GPUs; the job has no other reservation."""
        self.drop(job)
        self.of[job.job_id] = promise
        self.timelines[promise.pool].claim(job.job_id, job.tier, promise, length(job))

    def drop(self, job: Waiting) -> Reservation | None:
        """Drop a job's reservation and release its GPUs."""
        promise = self.of.pop(job.job_id, None)
        if promise is not None:
            self.timelines[promise.pool].unclaim(job.job_id, promise.placement)
        return promise

    def sooner(self, job: Waiting, pools: Sequence[str]) -> None:
        """Move a job's reservation to an earlier start in one of `pools`, if possible."""
        old = self.drop(job)
        new = self.plan(job, pools)
        if new is not None and (old is None or new.start < old.start - TIE_S):
            self.make(job, new)
        elif old is not None:
            self.make(job, old)

    def plan(self, job: Waiting, pools: Sequence[str]) -> Reservation | None:
        """Return the first time at which one of `pools` can hold the job, with the nodes; None if none can."""
        best: Reservation | None = None
        for name in pools:
            start, placement = self.timelines[name].earliest(job.num_gpus, job.tier, length(job), self.now)
            if placement and (best is None or start < best.start):
                best = Reservation(start=start, pool=name, placement=placement, made_at=self.now)
        return best


def length(job: Waiting) -> float:
    """Return the seconds that a job holds GPUs; an unknown duration counts as a moment, not as zero."""
    return max(TIE_S, job.expected_s)
