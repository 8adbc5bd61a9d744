"""GPUs over time: what a node, or a pool of nodes, has free now and later."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import merge
from itertools import accumulate, islice

NEVER = math.inf
ROUNDING_S = 0.5
"""Half of the second within which two moments count as equal: what ends this shortly after a reservation begins does not delay it, and
two reservations may overlap by it. Rounding errors of floating-point seconds are far smaller."""


@dataclass(frozen=True, slots=True)
class Claim:
    """GPUs reserved for one job from `start` to `end`."""

    job_id: str
    start: float
    end: float
    num_gpus: int


class NodeTimeline:
    """GPUs of one node, or those that a pool's lower tiers may hold together.

    `free` counts GPUs that are free now; `ends` add to it over time and `claims` take from it.
    """

    __slots__ = ("_checks", "_given", "_times", "claims", "ends", "fabric", "free", "index", "name", "now", "size")

    def __init__(self, *, index: int, name: str, size: int, fabric: str, now: float) -> None:
        self.index, self.name, self.size, self.fabric, self.now = index, name, size, fabric, now
        self.free = size
        self.ends: list[tuple[float, int, str]] = []
        """Sorted."""
        self.claims: list[Claim] = []
        self._checks: list[tuple[float, int]] | None = []
        self._times: list[float] | None = None
        self._given: list[int] = []

    def run(self, num_gpus: int, end: float, job_id: str) -> None:
        """Like :meth:`hold`, for jobs that already run. Call it before any :meth:`hold`, and :meth:`settle` after it."""
        self.free -= num_gpus
        self.ends.append((end, num_gpus, job_id))

    def settle(self) -> None:
        self.ends.sort()
        self._times = self._checks = None

    def hold(self, num_gpus: int, end: float, job_id: str) -> None:
        self.free -= num_gpus
        insort(self.ends, (end, num_gpus, job_id))
        self._times = None
        if self._checks:
            self._checks = [(t, slack - num_gpus if t < end - ROUNDING_S else slack) for t, slack in self._checks]

    def claim(self, claim: Claim) -> None:
        self.claims.append(claim)
        self._checks = None

    def unclaim(self, job_id: str) -> None:
        self.claims = [c for c in self.claims if c.job_id != job_id]
        self._checks = None

    def end_sooner(self, job_ids: frozenset[str], end: float) -> None:
        sooner = [(min(t, end), n, j) for t, n, j in self.ends if j in job_ids]
        self.ends = [e for e in self.ends if e[2] not in job_ids]
        for e in sooner:
            insort(self.ends, e)
        self._times = self._checks = None

    def without(self, job_ids: frozenset[str], end: float) -> NodeTimeline:
        """Return this timeline as if `job_ids` ended at `end`."""
        other = NodeTimeline(index=self.index, name=self.name, size=self.size, fabric=self.fabric, now=self.now)
        other.free, other.claims, other.ends = self.free, self.claims, self.ends
        other.end_sooner(job_ids, end)
        return other

    def _timeline(self) -> list[float]:
        if self._times is None:
            self._times = [t for t, _, _ in self.ends]
            self._given = list(accumulate((n for _, n, _ in self.ends), initial=0))
        return self._times

    def available(self, time: float, *, early: float = 0.0) -> int:
        """Return GPUs free at `time` if running jobs end `early` seconds before expected, reservations are held, and nothing else
        starts."""
        times = self._timeline()
        free = self.free + self._given[bisect_right(times, time + early)]
        for c in self.claims:
            if c.start <= time < c.end:
                free -= c.num_gpus
        return free

    def fits_now(self, num_gpus: int, until: float) -> bool:
        """Whether `num_gpus` are free now and no reservation needs them before `until`."""
        if self.free < num_gpus:
            return False
        if self._checks is None:
            self._checks = [(t, self.available(t, early=ROUNDING_S)) for t in sorted({c.start for c in self.claims})]
        for start, slack in self._checks:
            if start >= until:
                return True
            if slack < num_gpus:
                return False
        return True

    def earliest(self, num_gpus: int, length: float, after: float) -> float:
        """Return the first time from `after` on at which `num_gpus` are free for `length`."""
        if self.free < num_gpus:
            times = self._timeline()
            i = bisect_left(self._given, num_gpus - self.free)
            if i > len(times):
                return NEVER
            after = max(after, times[i - 1])
        return self._beside_claims(num_gpus, length, after) if self.claims else after

    def _beside_claims(self, num_gpus: int, length: float, after: float) -> float:
        level = self.available(after)
        found = after if level >= num_gpus else NEVER
        given = ((t, -n) for t, n, _ in islice(self.ends, bisect_right(self._timeline(), after), None))
        starts = [(c.start, c.num_gpus) for c in self.claims if c.start > after]
        ends = [(c.end, -c.num_gpus) for c in self.claims if c.end > after]
        for time, taken in merge(given, sorted(starts + ends)):  # releases come first: GPUs released at a moment can be taken at it
            if found + length <= time:
                return found
            level -= taken
            if level < num_gpus:
                found = NEVER
            elif found == NEVER:
                found = time
        return found


class ByFree:
    """Nodes without a reservation by free GPUs, so that the fullest node that fits is found at once."""

    __slots__ = ("_indices",)

    def __init__(self, nodes: Iterable[NodeTimeline]) -> None:
        self._indices: dict[int, list[int]] = {}
        for node in nodes:
            self.add(node)

    def add(self, node: NodeTimeline) -> None:
        insort(self._indices.setdefault(node.free, []), node.index)

    def remove(self, node: NodeTimeline) -> None:
        self._indices[node.free].remove(node.index)

    def fullest(self, num_gpus: int) -> tuple[int, int] | None:
        """Return free GPUs and index of the fullest node with at least `num_gpus` free, lowest index first."""
        free = min((free for free, indices in self._indices.items() if free >= num_gpus and indices), default=None)
        return None if free is None else (free, self._indices[free][0])
