"""GPUs over time: what a node, and a pool of them, has free now and from when on."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import accumulate, islice

NEVER = math.inf
ROUNDING_S = 0.5
"""Half of the second below which moments are one: what ends so little after a promise begins does not hold it up, and two promises may
overlap by it. Sums of floating-point seconds differ by far less."""


@dataclass(frozen=True, slots=True)
class Claim:
    """GPUs promised to a job from `start` to `end`."""

    job_id: str
    start: float
    end: float
    num_gpus: int


class Room:
    """GPUs of one node, or those that a pool's lower tiers may hold together.

    `free` counts what nobody holds now; it grows by `ends` as time goes on, and `claims` take from it.
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
        """Like :meth:`hold`, of what runs already; all of it comes before anything else, and :meth:`settle` after it."""
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
        self.ends = sorted((min(t, end), n, j) if j in job_ids else (t, n, j) for t, n, j in self.ends)
        self._times = self._checks = None

    def without(self, job_ids: frozenset[str], end: float) -> Room:
        """This room, were `job_ids` to end at `end`."""
        other = Room(index=self.index, name=self.name, size=self.size, fabric=self.fabric, now=self.now)
        other.free, other.claims, other.ends = self.free, self.claims, self.ends
        other.end_sooner(job_ids, end)
        return other

    def _timeline(self) -> list[float]:
        if self._times is None:
            self._times = [t for t, _, _ in self.ends]
            self._given = list(accumulate((n for _, n, _ in self.ends), initial=0))
        return self._times

    def available(self, time: float, *, early: float = 0.0) -> int:
        """GPUs free at `time` if running jobs end `early` before it is expected, promised ones are held, and nothing else starts."""
        times = self._timeline()
        free = self.free + self._given[bisect_right(times, time + early)]
        for c in self.claims:
            if c.start <= time < c.end:
                free -= c.num_gpus
        return free

    def fits_now(self, num_gpus: int, until: float) -> bool:
        """Whether `num_gpus` are free now, and nobody's promise needs them before `until`."""
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
        """The first time from `after` on at which `num_gpus` are free for `length`."""
        if not self.claims:
            if self.free >= num_gpus:
                return after
            times = self._timeline()
            i = bisect_left(self._given, num_gpus - self.free)
            return max(after, times[i - 1]) if i <= len(times) else NEVER
        return self._earliest(num_gpus, length, after)

    def _earliest(self, num_gpus: int, length: float, after: float) -> float:
        level = self.available(after)
        found = after if level >= num_gpus else NEVER
        given = ((t, -n) for t, n, _ in islice(self.ends, bisect_right(self._timeline(), after), None))
        starts = [(c.start, c.num_gpus) for c in self.claims if c.start > after]
        ends = [(c.end, -c.num_gpus) for c in self.claims if c.end > after]
        for time, taken in merge(given, sorted(starts + ends)):  # what is given at a moment comes first: it can be taken at it
            if found + length <= time:
                return found
            level -= taken
            if level < num_gpus:
                found = NEVER
            elif found == NEVER:
                found = time
        return found


class ByFree:
    """Nodes without a promise, by fabric and by how many GPUs they have free: the fullest that fits is found at once."""

    __slots__ = ("_lists",)

    def __init__(self, rooms: Iterable[Room]) -> None:
        self._lists: dict[str, dict[int, list[int]]] = {}
        for room in rooms:
            self.add(room)

    def add(self, room: Room) -> None:
        insort(self._lists.setdefault(room.fabric, {}).setdefault(room.free, []), room.index)

    def remove(self, room: Room) -> None:
        lists = self._lists[room.fabric]
        lists[room.free].remove(room.index)
        if not lists[room.free]:
            del lists[room.free]

    def fullest(self, num_gpus: int) -> tuple[int, int] | None:
        """Free GPUs and index of the fullest node that has `num_gpus`, the first of those."""
        best: tuple[int, int] | None = None
        for lists in self._lists.values():
            for free, indices in lists.items():
                if free >= num_gpus and (best is None or (free, indices[0]) < best):
                    best = (free, indices[0])
        return best

    def with_at_least(self, num_gpus: int) -> Sequence[int]:
        """Indices of the nodes that have `num_gpus` free."""
        return [i for lists in self._lists.values() for free, indices in lists.items() if free >= num_gpus for i in indices]
